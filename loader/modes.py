"""What a forked worker inherits and no argument says: the modes of torch, numpy and Python."""

from __future__ import annotations

import decimal
import locale
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _python_dispatch

_SUBNORMAL = 5e-324


def modes() -> tuple[object, ...]:
    """Modes of this thread and process that samples can depend on; equal where they are the same.

    Only what changes values, or decides whether something is raised. Priorities, masks, signal
    handlers, log levels and the like say nothing about a batch.
    """
    return (*_of_torch(), *_of_python(), *sorted(np.geterr().items()))


def _of_torch() -> tuple[object, ...]:
    deterministic: Any = torch.utils.deterministic  # its attribute is made at run time
    stacked = (
        *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]  # torch's
        *_python_dispatch._get_current_dispatch_mode_stack(),  # noqa: SLF001  no public name
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        # `with torch.device(...)` makes one anew each time; any other is compared by being the same
        *(m.device if isinstance(m, _device.DeviceContext) else m for m in stacked),
    )


def _of_python() -> tuple[object, ...]:
    context = decimal.getcontext()
    return (
        context.prec,
        context.rounding,
        tuple(context.traps.items()),
        _SUBNORMAL + 0.0 == 0.0,  # torch.set_flush_denormal
        locale.setlocale(locale.LC_ALL),
        time.tzname,
        sys.getrecursionlimit(),
        tuple(sys.path),
        tuple(warnings.filters),
    )
