"""Iterators that read in the training process itself."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from creel.loader.gather import Gatherer
from creel.loader.home import Course, Home, collates_plainly
from creel.loader.samplers import before
from creel.loader.step import Step

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader


#: Batches up to this are assembled by the trainer whatever `num_workers`: 2 MB are copied in
#: 0.2 ms; having another process do it took 0.9 ms (benchmarks/cost_per_batch.py, tokens x 256).
_HERE_NBYTES = 4 << 20


class Reader:
    """Reads batches in this process: from the arena's rows, else sample by sample."""

    def __init__(self, loader: DataLoader[Any], home: Home, course: Course, fetcher: Any) -> None:
        """`fetcher` is torch's, for the loader's dataset."""
        self._course = course
        self._fetcher = fetcher
        self._meter = home.meter
        self._wait_s = home.config.loader.wait_s
        self._gatherer = None
        feed = course.feed
        if feed is not None:
            fetcher.dataset = feed.binding.dataset
            gather = feed.binding.gather() if collates_plainly(loader) else None
            if gather is not None:
                self._gatherer = Gatherer(gather, feed.client, feed.session)

    def read(self, i: int, step: int, index: Any) -> Any:
        """Batch i of the epoch from here on; `step` is the session's, -1 to read directly."""
        feed = self._course.feed
        if step < 0 or feed is None:
            return self._fetcher.fetch(self._plain(index))
        ready = feed.session.ready(step)
        if not ready:
            start = time.monotonic()
            ready = feed.session.wait(step, self._wait_s)
            self._meter.waited("source", time.monotonic() - start)
        if not ready:
            # Nothing is pinned: what the table says of these objects may be void at any moment.
            self._meter.direct(np.size(np.asarray(index)), 0)
            return self._fetcher.fetch(self._plain(index))
        ids = feed.ids(self._course.skipped + i)
        if self._gatherer is not None:
            data = self._gatherer.batch(ids, np.asarray(index))
            if data is not None:
                return data
        with feed.binding.reading(feed.session, ids) as lease:
            data = self._fetcher.fetch(self._plain(index))
        self._meter.direct(lease.direct_reads, lease.direct_nbytes)
        return data

    def _plain(self, index: Any) -> Any:
        """The index as torch would have it: an array of the order stands for a list of ints."""
        return index.tolist() if self._course.slices and isinstance(index, np.ndarray) else index


class SoloIter(Step, _SingleProcessDataLoaderIter):
    """`num_workers=0`: torch's own iterator, with its samples read through the daemon."""

    _course: Course  # not there until an epoch has begun

    def __init__(self, loader: DataLoader[Any], home: Home) -> None:
        """Begin an epoch."""
        moment = before()
        super().__init__(loader)
        self._meter = home.meter
        self._given = 0
        course = self._course = Course(home, loader)
        self._reader = Reader(loader, home, course, self._dataset_fetcher)
        self._order = course.begin(loader, self, moment)

    def _next_data(self) -> Any:
        course = self._course
        try:
            index = next(self._order)
        except StopIteration:
            course.finish()
            raise
        i = self._given
        self._given = i + 1
        try:
            data = self._reader.read(i, course.give(i, index), index)
        finally:
            course.done(i + 1)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        course.deliver()
        return data

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the modules that leaving needs may be gone; the process is, too.
        if "_course" in self.__dict__ and not ends():
            self._course.leave()


class GatherIter(Step, _MultiProcessingDataLoaderIter):
    """`num_workers>0` where no worker is needed: small batches of rows that lie in the arena.

    Pulls the sampler when torch would. No code of the person's runs in a worker in such a case, so
    nothing tells that there is none.
    """

    _course: Course  # not there until an epoch has begun

    def __init__(self, loader: DataLoader[Any], home: Home, course: Course) -> None:
        """Begin an epoch."""
        self._moment = before()
        _BaseDataLoaderIter.__init__(self, loader)
        if not loader.prefetch_factor:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._ahead = loader.prefetch_factor * self._num_workers
        self._meter = home.meter
        fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            _DatasetKind.Map, loader.dataset, True, self._collate_fn, self._drop_last
        )
        self._workers: list[Any] = []
        self._course = course
        self._reader = Reader(loader, home, course, fetcher)
        self._reset(loader, first_iter=True)

    @staticmethod
    def can(loader: DataLoader[Any], course: Course) -> bool:
        """Whether this loader's batches can be made so."""
        if course.feed is None or loader.worker_init_fn is not None or not collates_plainly(loader):
            return False
        gather = course.feed.binding.gather()
        return gather is not None and gather.nbytes * (loader.batch_size or 0) in range(
            1, _HERE_NBYTES
        )

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._moment = before()
        _BaseDataLoaderIter._reset(self, loader, first_iter)  # noqa: SLF001  torch's
        self._course.begin(loader, self, self._moment)
        self._queue: deque[Any] = deque()
        self._taken = 0
        for _ in range(self._ahead):
            self._pull()

    def _pull(self) -> None:
        index = next(self._sampler_iter, self)
        if index is not self:
            self._queue.append(index)

    def _next_data(self) -> Any:
        course = self._course
        if not self._queue:
            course.finished = True
            if not self._persistent_workers:
                course.leave()
            raise StopIteration
        i, index = self._taken, self._queue.popleft()
        self._taken = i + 1
        self._pull()
        try:
            data = self._reader.read(i, course.give(i, index), index)
        except Exception:  # noqa: BLE001  as a worker reports it
            where = f"in DataLoader worker process {i % self._num_workers}"
            ExceptionWrapper(where=where).reraise()  # type: ignore[no-untyped-call]
        finally:
            course.done(i + 1)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        course.deliver()
        return data

    def _shutdown_workers(self) -> None:
        if "_course" in self.__dict__:
            self._course.leave()

    def __del__(self) -> None:
        self._shutdown_workers()
