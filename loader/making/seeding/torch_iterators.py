"""torch's own iterators with seeds per sample, for a loader that is switched off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from creel.loader.making.generators import restored_generators
from creel.loader.making.seeding.by_sample import Numbered, Seeded, next_epoch
from creel.loader.making.task import BatchSeeds
from creel.loader.making.workers.init_fn import init_of
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
)


def initialised_view(loader: Any) -> Any:
    """Return a copy of a loader for torch's iterators, whose workers set up each of its datasets.

    The loader itself, where that changes nothing.
    """
    init_fn = init_of(loader.dataset, loader.worker_init_fn)
    if init_fn is loader.worker_init_fn or not loader.num_workers:
        return loader
    view = copy.copy(loader)
    vars(view).update(worker_init_fn=init_fn)
    return view


def seeded_view(loader: Any, *, repeats: bool) -> Any:
    """Return a copy of a map-style loader for `seeded_iterator`.

    repeats: whether its epochs may read a sample twice.
    """
    seeded = Seeded(loader.dataset)
    view = copy.copy(loader)  # torch's iterators take their arguments from a loader
    vars(view).update(
        dataset=seeded,
        collate_fn=seeded.collating(loader.collate_fn),
        worker_init_fn=_Unseeded(init_of(loader.dataset, loader.worker_init_fn)),
        _creel_repeats=repeats,
    )
    return view


class _Unseeded:
    """A `worker_init_fn` to which `get_worker_info().dataset` is the person's own."""

    def __init__(self, init_fn: Callable[[int], object] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch's lets no one set it
        if self._init_fn is not None:
            self._init_fn(worker)


def seeded_iterator(view: Any) -> BaseDataLoaderIter:
    """Return what torch's `_get_iterator` returns, with seeds per sample."""
    if not view.num_workers:
        return _SeededInline(view)
    view.check_worker_number_rationality()
    return _SeededWorkers(view)


class _Numbering(BaseDataLoaderIter):
    """An iterator that sends each batch's seeds along with the indices of its samples."""

    _seed: int | None = None  # of the epoch; None before its first batch

    def __init__(self, loader: Any) -> None:
        self._repeats = loader._creel_repeats  # noqa: SLF001  see `seeded_view`
        self._numbered = 0
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # persistent workers
            self._seed = next_epoch(self._epoch_seed())
        self._numbered = 0
        super()._reset(loader, first_iter)

    def _epoch_seed(self) -> int:
        return int(self._base_seed) if self._seed is None else self._seed

    def _next_index(self) -> Numbered:
        index = super()._next_index()  # type: ignore[no-untyped-call]  # torch's
        number, self._numbered = self._numbered, self._numbered + 1
        return Numbered(index, BatchSeeds(self._epoch_seed(), number, self._repeats))


class _SeededWorkers(_Numbering, MultiProcessingDataLoaderIter):
    """`num_workers > 0`."""


class _SeededInline(_Numbering, SingleProcessDataLoaderIter):
    """`num_workers=0`."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._dataset_fetcher: Any = _RestoringFetcher(self._dataset_fetcher)


class _RestoringFetcher:
    """A fetcher after which the trainer's generators are as they were."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    def fetch(self, index: Numbered) -> Any:
        with restored_generators():
            return self._fetcher.fetch(index)
