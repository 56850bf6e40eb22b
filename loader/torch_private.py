"""All private names of torch that creel imports, so that one file shows what a new torch may break.

If this torch lacks one of them, `MISSING` names it and `creel.DataLoader` behaves as torch's own
class: correct, without a cache. Only modules that serve its iterators import from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils.data

__all__ = [
    "MISSING",
    "MP_STATUS_CHECK_INTERVAL",
    "BaseDataLoaderIter",
    "DatasetKind",
    "ExceptionWrapper",
    "MultiProcessingDataLoaderIter",
    "SingleProcessDataLoaderIter",
    "WorkerInfo",
    "collate",
    "default_store",
    "generate_state",
    "pin_memory",
    "profiler_enabled",
    "raise_failure",
    "require_prefetch_factor",
    "signal_handling",
    "utils",
    "worker",
]

MISSING: str | None = None
try:
    from torch._utils import ExceptionWrapper
    from torch.utils.data import _utils as utils
    from torch.utils.data._utils import (
        MP_STATUS_CHECK_INTERVAL,
        collate,
        signal_handling,
        worker,
    )
    from torch.utils.data._utils.pin_memory import pin_memory
    from torch.utils.data._utils.worker import WorkerInfo
    from torch.utils.data._utils.worker import _generate_state as generate_state
    from torch.utils.data.dataloader import (
        _BaseDataLoaderIter as BaseDataLoaderIter,
    )
    from torch.utils.data.dataloader import (
        _DatasetKind as DatasetKind,
    )
    from torch.utils.data.dataloader import (
        _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
    )
    from torch.utils.data.dataloader import (
        _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter,
    )

    for _owner, _names in (
        (BaseDataLoaderIter, ("_reset",)),
        (DatasetKind, ("Map", "create_fetcher")),
        (collate, ("collate_tensor_fn", "default_collate_fn_map")),
        (signal_handling, ("_set_worker_signal_handlers",)),
        (torch.utils.data.DataLoader, ("_auto_collation", "_index_sampler")),
        (utils, ("python_exit_status",)),
        (worker, ("_worker_info",)),
    ):
        for _name in _names:
            getattr(_owner, _name)
except (ImportError, AttributeError) as e:
    MISSING = str(e)


def default_store() -> Any:
    """Return the store of the default process group, with a connection of its own if torch can.

    None if there is no process group, or this torch cannot tell.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:
        return None
    store = _get_default_store()
    try:
        return store.clone()  # type: ignore[attr-defined]  # waits on it must not block the process group's own connection
    except (AttributeError, RuntimeError):  # an older torch; a store in one process
        return store


def raise_failure(failure: ExceptionWrapper) -> NoReturn:
    """Raise what a worker's batch raised, as `failure.reraise()` does.

    torch's frame keeps the exception that it raises. That reference cycle would keep the iterator,
    its workers and their memory until Python's cyclic collector runs.
    """
    try:
        failure.reraise()  # type: ignore[no-untyped-call]  # torch's
    except BaseException as e:  # noqa: BLE001  any exception of the user's code
        raised = e.with_traceback(None)
    try:
        raise raised
    finally:
        del raised


def require_prefetch_factor(prefetch_factor: int | None) -> int:
    """Return `prefetch_factor` of a loader with workers, checked as torch's iterator does.

    Raises:
        AssertionError: it is None or not positive.
    """
    if prefetch_factor is None or prefetch_factor <= 0:
        raise AssertionError(
            "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
        )
    return prefetch_factor


#: Whether torch's profiler is running; true if this torch cannot tell.
profiler_enabled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
