"""Iterators that read in the training process itself."""

from __future__ import annotations

import logging
import sys
import time
import warnings
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

from creel.cache.board import ABSENT
from creel.cache.patience import public
from creel.loader.gather import Gatherer
from creel.loader.home import Course, Home, collates_plainly
from creel.loader.samplers import before
from creel.loader.stages import StallWarning
from creel.loader.step import Step

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader
    from creel.loader.feed import Feed
    from creel.loader.reading import Lease
    from creel.loader.sources import Binding, Gather


_log = logging.getLogger("creel.loader")

#: Batches up to this are assembled by the trainer whatever `num_workers`: 2 MB are copied in
#: 0.2 ms; having another process do it took 0.9 ms (benchmarks/cost_per_batch.py, tokens x 256).
_HERE_NBYTES = 4 << 20


class Reader:
    """Reads batches in this process: from the arena's rows, else sample by sample."""

    def __init__(
        self,
        loader: DataLoader[Any],
        home: Home,
        course: Course,
        fetcher: Any,
        *,
        as_worker: bool = False,
    ) -> None:
        """`fetcher` is torch's, for the loader's dataset.

        as_worker: as a worker, it sees nothing of what becomes of the dataset from here on.
        """
        self._course = course
        self._fetcher = fetcher
        self._as_worker = as_worker
        self._meter = home.meter
        self._ring = home.ring
        self._wait_s = home.config.loader.wait_s
        self._tell_after_s = home.config.loader.hung_s
        self._gatherer: Gatherer | None = None
        self._gathers: Feed | None = None  # whose rows
        self._told = False
        self._gather: Gather | None = None
        self._labels: list[object] = []  # as they were when `_gather` was made
        self._binding: Binding | None = None
        feed = course.feed
        self._dataset = fetcher.dataset
        self._collating = [0]  # when the batch's collation began
        fetcher.collate_fn = _noting(fetcher.collate_fn, self._collating)
        self._plainly = collates_plainly(loader)
        if feed is not None:
            self._binding = feed.binding.frozen() if as_worker else feed.binding
            fetcher.dataset = self._binding.dataset
            self._look(self._binding)

    def read(self, i: int, step: int, index: Any) -> Any:
        """Batch i of the epoch from here on; `step` is the session's, -1 to read directly."""
        feed, binding = self._course.feed, self._binding
        if feed is None or binding is None:
            return self._fetch(index, None)
        if step < 0 or not (feed.session.ready(step) or self._wait(feed, i, step)):
            return self._fetch(index, binding.counting())
        stamp = feed.session.hold(step)
        if stamp < 0:
            return self._fetch(index, binding.counting())
        if not self._as_worker and not binding.still(np.atleast_1d(np.asarray(index))):
            self._fetcher.dataset = self._dataset  # changed since the epoch began
            return self._fetch(index, binding.counting())
        ids = feed.ids(self._course.skipped + i)
        gatherer = self._gatherer_of(feed, binding)
        if gatherer is not None:
            start = time.monotonic_ns()
            indices = np.asarray(index)
            rows = gatherer.rows(ids, indices)
            whole = feed.session.held(step, stamp)
            data = gatherer.batch(rows, indices) if whole and rows is not None else None
            self._meter.collate_ns += time.monotonic_ns() - start
            if not whole:
                return self._fetch(index, binding.counting())
            if rows is not None:
                return data
        return self._fetch(index, binding.reading(feed.session, ids, stamp))

    def _gatherer_of(self, feed: Feed, binding: Binding) -> Gatherer | None:
        """What builds batches from this session's rows; a lost one's are no longer true."""
        if not self._as_worker and self._changed(binding):
            self._look(binding)
            self._gathers = None
        if self._gathers is not feed:
            self._gathers = feed
            self._gatherer = None
            if self._gather is not None:
                memory = self._ring.take
                self._gatherer = Gatherer(self._gather, feed.client, feed.session, memory)
        return self._gatherer

    def _changed(self, binding: Binding) -> bool:
        """Whether the person has assigned attributes or labels since `_look`."""
        if any(a is not b for a, b in zip(self._labels, binding.labels(), strict=True)):
            return True
        return self._gather is not None and not binding.gathers(self._gather)

    def _look(self, binding: Binding) -> None:
        """How batches follow from bytes and labels now."""
        self._labels = binding.labels()
        self._gather = binding.gather() if self._plainly else None

    def _wait(self, feed: Feed, i: int, step: int) -> bool:
        """Whether the step's objects are pinned; if not, what the table says may be void."""
        session, start = feed.session, time.monotonic_ns()
        quiet_s = min(self._wait_s, self._tell_after_s)
        ready = session.wait(step, quiet_s)
        waited = time.monotonic_ns() - start
        if not ready and session.alive and waited >= quiet_s * 1e9:
            left_s = self._wait_s - quiet_s
            self._tell(feed, i, quiet_s, left_s)
            ready = left_s > 0 and session.wait(step, left_s)
            waited = time.monotonic_ns() - start
        if ready or session.alive:
            self._meter.source_ns += waited
        else:
            self._meter.daemon_ns += waited
        return ready

    def _tell(self, feed: Feed, i: int, waited_s: float, left_s: float) -> None:
        """Say once per epoch what a long wait is for."""
        if self._told:
            return
        self._told = True
        ids = feed.ids(self._course.skipped + i)
        absent = ids[feed.session.table.offset[ids] == ABSENT]
        what = public(feed.binding.manifest.location(int(absent[0]))[0]) if len(absent) else "it"
        then = f"up to {left_s:g} s more" if left_s > 0 else "then it is read directly"
        text = f"no batch for {waited_s:g} s: waiting for the daemon to read {what}; {then}"
        _log.warning(text)
        warnings.warn(text, StallWarning, stacklevel=2)

    def _fetch(self, index: Any, lease: Lease | None) -> Any:
        """As torch does, and counted."""
        start = time.monotonic_ns()
        self._collating[0] = 0
        try:
            if lease is None:
                return self._fetcher.fetch(self._plain(index))
            with lease:
                return self._fetcher.fetch(self._plain(index))
        finally:
            end = time.monotonic_ns()
            collating = self._collating[0] or end
            direct_ns = 0 if lease is None else lease.direct_ns
            self._meter.source_ns += direct_ns
            self._meter.decode_ns += collating - start - direct_ns
            self._meter.collate_ns += end - collating
            if lease is not None:
                self._meter.direct(lease.direct_reads, lease.direct_nbytes)

    def _plain(self, index: Any) -> Any:
        """The index as torch would have it: an array of the order stands for a list of ints."""
        return index.tolist() if self._course.slices and isinstance(index, np.ndarray) else index


def _noting(collate: Callable[[Any], Any], when: list[int]) -> Callable[[Any], Any]:
    """The same function, noting when it is called; in a cell, as a reader in a cycle would stay."""

    def noted(samples: Any) -> Any:
        when[0] = time.monotonic_ns()
        return collate(samples)

    return noted


class SoloIter(Step, _SingleProcessDataLoaderIter):
    """`num_workers=0`: torch's own iterator, with its samples read through the daemon."""

    _course: Course  # not there until an epoch has begun

    def __init__(self, loader: DataLoader[Any], home: Home) -> None:
        """Begin an epoch."""
        moment = before(loader)
        super().__init__(loader)
        self._meter = home.meter
        self._given = 0
        course = self._course = Course(home, loader)
        self._reader = Reader(loader, home, course, self._dataset_fetcher)
        self._order = course.begin(loader, self, moment)

    def _next_data(self) -> Any:
        course = self._course
        start = time.monotonic_ns()
        try:
            index = next(self._order)
        except StopIteration:
            course.finish()
            raise
        finally:
            self._meter.sampler_ns += time.monotonic_ns() - start
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
        self._moment = before(loader)
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
        self._reader = Reader(loader, home, course, fetcher, as_worker=True)
        self._reset(loader, first_iter=True)

    @staticmethod
    def can(loader: DataLoader[Any], course: Course) -> bool:
        """Whether this loader's batches can be made so."""
        if course.feed is None or loader.worker_init_fn is not None or not collates_plainly(loader):
            return False
        gather = course.feed.binding.gather()
        if gather is None or gather.has_code:
            return False
        nbytes = max(gather.nbytes, gather.batch_nbytes)
        return nbytes * (loader.batch_size or 0) in range(1, _HERE_NBYTES)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._moment = before(loader)
        _BaseDataLoaderIter._reset(self, loader, first_iter)  # noqa: SLF001  torch's
        self._course.begin(loader, self, self._moment)
        self._queue: deque[tuple[int, Any]] = deque()  # (step, index)
        self._pulled = self._taken = 0
        for _ in range(self._ahead):
            self._pull()

    def _pull(self) -> None:
        start = time.monotonic_ns()
        index = next(self._sampler_iter, self)
        self._meter.sampler_ns += time.monotonic_ns() - start
        if index is not self:
            self._queue.append((self._course.give(self._pulled, index), index))
            self._pulled += 1

    def _next_data(self) -> Any:
        course = self._course
        if not self._queue:
            course.finished = True
            if not self._persistent_workers:
                course.leave()
            raise StopIteration
        i, (step, index) = self._taken, self._queue.popleft()
        self._taken = i + 1
        self._pull()
        try:
            data = self._reader.read(i, step, index)
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

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # as above
            self._shutdown_workers()
