"""Modes of torch, numpy and Python that are set between epochs reach the workers."""

from __future__ import annotations

import decimal
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

import creel

_deterministic: Any = torch.utils.deterministic


class Modes(Dataset[Any]):
    """A sample has everything that a mode can change."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        weight = torch.ones(2, 2, requires_grad=True)
        return {
            "grad": (weight * 2).requires_grad,
            "inference": torch.zeros(1).is_inference(),
            "autocast": str((weight @ weight).dtype),
            "filled": _deterministic.fill_uninitialized_memory,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "modes": torch._C._len_torch_function_stack(),
            "tiny": (torch.tensor(1e-40) * 1).item(),
            "decimal": str(decimal.Decimal(1) / 3),
            "numpy": _outcome(lambda: np.float64(1) / np.float64(0)),
            "warning": _outcome(lambda: warnings.warn("of the sample", stacklevel=1)),
            "path": len(sys.path),
            "recursion": sys.getrecursionlimit(),
        }


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Undone(ExitStack):
    """Do something, and undo it at exit."""

    def __init__(self, do: Callable[[], object], undo: Callable[[], object]) -> None:
        super().__init__()
        self._do = do
        self.callback(undo)

    def __enter__(self) -> Any:
        self._do()
        return self


class Warned(warnings.catch_warnings):
    def __enter__(self) -> Any:
        super().__enter__()
        warnings.simplefilter("error")


def _fill(on: bool) -> None:
    _deterministic.fill_uninitialized_memory = on


LIMIT = sys.getrecursionlimit()
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fill": lambda: Undone(lambda: _fill(False), lambda: _fill(True)),
    "deterministic": lambda: Undone(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "function mode": Passing,
    "flush": lambda: Undone(
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    ),
    "decimal": lambda: decimal.localcontext(decimal.Context(prec=5)),
    "errstate": lambda: np.errstate(all="raise"),
    "warnings": Warned,
    "path": lambda: mock.patch.object(sys, "path", [*sys.path, "/nowhere"]),
    "recursion": lambda: Undone(
        lambda: sys.setrecursionlimit(LIMIT + 100), lambda: sys.setrecursionlimit(LIMIT)
    ),
}


def _outcome(code: Callable[[], object]) -> str:
    try:
        return repr(code())
    except (Warning, FloatingPointError) as e:
        return repr(e)


def _shown(cls: Any, mode: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Return samples from before the mode, from inside it, and from after it."""
    loader = cls(Modes(), batch_size=None, num_workers=1)
    shown = list(loader)
    with mode():
        shown += list(loader)
    return shown + list(loader)


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", MODES)
def test_a_mode_set_between_epochs_reaches_the_workers(name: str) -> None:
    assert _shown(creel.DataLoader, MODES[name]) == _shown(torch.utils.data.DataLoader, MODES[name])
