"""A person's `worker_init_fn`, to which `get_worker_info().dataset` is one of the person's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

from torch.utils.data import get_worker_info

from creel.loader.data.rehearsed import own_datasets, placed
from creel.loader.making.generators import restored_generators

Init: TypeAlias = "Callable[[int], object] | None"


def init_of(dataset: object, init_fn: Init) -> Init:
    """Return what a worker calls when it starts, for a loader's dataset and `worker_init_fn`."""
    return init_fn if placed(dataset) is None else OwnInit(init_fn)


class OwnInit:
    """Calls a `worker_init_fn` once for each dataset of the person's, the new data last.

    Each dataset of a memory is set up as by a loader of its own. All calls begin with the same
    states of the global generators, and the worker goes on from where the last one leaves them, as
    without a memory.
    """

    def __init__(self, init_fn: Init) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        datasets = own_datasets(info.dataset)
        for number, dataset in enumerate(datasets, 1):
            object.__setattr__(info, "dataset", dataset)  # torch's lets no one set it
            if self._init_fn is not None:
                with nullcontext() if number == len(datasets) else restored_generators():
                    self._init_fn(worker)
