"""MappedPages: reads what coming batches map into memory, before they fault on it.

For a mapped file the kernel is the cache. What it lacks is the order: a fault on a page at random
waits for storage alone, and the next one comes after it. Where it is known which bytes a sample
maps (`loader/data/maps`), these are read into the page cache in the order of the epoch, at most
`window` ahead of training. All processes of the node share these pages, so workers, and the other
ranks, find them too.

A thread of the training process does it, not the daemon. What a sample maps is told by the person's
own code or lies in mappings of this process, so the daemon would need tables that grow with the
dataset, and rights to the paths; and nothing would be gained, as the page cache is the node's,
whoever fills it. The thread waits for storage without Python's lock.

Nothing here is needed: what fails, or is foreseen wrongly, is read by the fault itself, as without
creel. The thread ends when the window is full; `done` starts another when half of it is free. So
none waits, also while workers are forked and when Python exits.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.client.cluster.ranks import speaks
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.maps.held import held_ranges, proved
from creel.loader.data.maps.mappings import MappedRange
from creel.loader.data.maps.page_files import BLOCK_NBYTES, FileBlock, PageFiles
from creel.loader.data.maps.ranges import RangesOf, ranges_of
from creel.loader.data.user_code.protected import length
from creel.loader.line.order.epoch_order import EpochOrder
from creel.loader.line.order.epoch_plan import EpochPlan, same_batch
from creel.loader.line.steps.batch_stream import samples_of, try_predict
from creel.settings import WindowSettings
from creel.system import limits
from creel.system.forks import forget_in_child, join, pause_before_fork
from creel.units import format_size

_log = logging.getLogger("creel.loader")

#: Blocks that are asked for before the first of them is awaited.
_IN_FLIGHT = 128
#: After so many samples in a row that needed no read, one in `_EVERY` is looked at.
_WARM, _EVERY = 64, 16
#: Share of the available memory that may be read ahead: pages of which the kernel drops some before
#: they are used would be read twice.
_MEMORY_SHARE = 0.5

#: Batches of which it is looked at whether their samples are rows that the dataset holds.
_PULLED = 16
#: After so many batches nothing is found out any more: the dataset holds no such rows.
_LAST_ASK = 64
_warned: set[str] = set()  # kinds of datasets of which nothing is read ahead
_told: set[str] = set()  # kinds of datasets whose files are larger than memory


class MappedBatch:
    """A coming batch, and how many bytes of the window it takes as far as is known."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.nbytes = 0
        self.passed = False  # whether training has it


class Lookup(NamedTuple):
    """What a sample of a batch maps, as far as it was not asked for: see `RangesOf`."""

    batch: MappedBatch
    sample: int
    parts: Iterator[list[MappedRange]]


class MappedPages:
    """The pages of an iterator's coming batches. The trainer calls its public methods.

    The thread alone writes `_next`, `_warm` and `_seen`. Both write `_nbytes_ahead`, with the lock.

    Attributes:
        over: whether no further batches of the epoch are looked at.
        ahead: batches that were looked at, and that training is not known to have.
    """

    def __init__(self, window: WindowSettings, idle: list[PageFiles]) -> None:
        """`idle`: the files of earlier iterators of the loader, and where they are left."""
        self._window, self._idle = window, idle
        self._reset()
        forget_in_child(self)
        pause_before_fork(self)
        _all.add(self)

    def forget(self) -> None:
        """Read nothing ahead, as after a fork in the child."""
        self._idle.clear()  # the child has inherited it
        self._reset()

    def _reset(self) -> None:
        self._files = self._idle.pop() if self._idle else PageFiles()
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._order: EpochOrder | None = None
        self._plan: EpochPlan | None = None
        self._kind = ""
        self._ranges: RangesOf | None = None
        self._begun, self.over = False, True
        self._nbytes = 0  # of the window; less than the setting where memory is short
        self._next = self._done = 0  # the batch to look at next; batches that training has
        self._planned: dict[int, NDArray[np.integer[Any]]] = {}
        self.ahead: deque[MappedBatch] = deque()
        self._nbytes_ahead = 0
        self._warm = self._seen = 0
        #: The dataset, while it is to be found out what its samples map.
        self.unknown: Any = None
        self._pulled: list[tuple[int, list[int]]] = []  # the first batches, and their samples
        self._asks_at = 1  # when to find that out: at so many batches

    def pause(self) -> None:
        """End the thread before a fork; after the next batch there is another one."""
        thread = self._thread
        self._stop.set()
        join(thread)

    def stop(self) -> None:
        """Read nothing more in this epoch."""
        self.over = True
        self.pause()
        if self._thread is not None:  # storage hangs: the thread closes them, if it ever ends
            self._files = PageFiles()
        elif not self._idle:
            self._idle.append(self._files)
            self._files = PageFiles()
        self._files.close()

    def begin(self, dataset: object, order: EpochOrder) -> None:
        """Prepare an epoch; numbers of a rehearsal's memory are not the dataset's."""
        self.stop()
        self._reset()
        self._files.begin()
        if order.rehearses or order.paced:
            return
        self._kind = type(dataset).__name__
        try:
            self._ranges = ranges_of(dataset)
            known = self._ranges is not None
            maps = known or held_ranges(dataset) is not None
        except Exception as e:  # noqa: BLE001  the person's object, or a library of another version
            _warn(self._kind, repr(e))
            return
        self._order, self._plan = order, try_predict(order, 0) if maps else None
        asks = not known and not isinstance(dataset, CreelDataset)  # which maps nothing by itself
        self.unknown, self.over = dataset if asks else None, not known

    def claimed(self, batch: int, index: object) -> None:
        """Begin with the epoch's first batch; stop if the order is not the one foreseen.

        A plan made now knows the draws that torch's samplers make when the first batch is pulled.
        There is none if the loader itself is gone: the earlier one foresaw these draws.
        """
        if self.over:
            if self.unknown is not None and len(self._pulled) < _PULLED:
                samples = samples_of(index)
                self._pulled.append((batch, [] if samples is None else samples.tolist()))
            return
        if not self._begun and self._order is not None:
            self._begun, self._next = True, batch
            self._plan = try_predict(self._order, 0) or self._plan
            self.over = self._plan is None
            self._start()
        planned = self._planned.get(batch)
        if planned is not None and not same_batch(planned, index):
            self.stop()

    def done(self, batch: int) -> None:
        """Note that training has all batches below `batch`."""
        self._done = batch
        if self.unknown is not None and batch >= self._asks_at:
            self._find_out()
        while self.ahead and self.ahead[0].number < batch:
            with self._lock:
                read = self.ahead.popleft()
                read.passed = True
                self._nbytes_ahead -= read.nbytes
            self._planned.pop(read.number, None)
        if self._begun and not self.over and self._has_room(0.5):
            self._start()

    def _find_out(self) -> None:
        """Read rows of a mapped file that the dataset holds ahead, once they are what it reads."""
        dataset, self._asks_at = self.unknown, 4 * self._done
        try:
            ranges, count = held_ranges(dataset), length(dataset)
            read = [i for batch, samples in self._pulled if batch < self._done for i in samples]
            shown = ranges and count and proved(ranges, read, count, self._files.resident)
        except Exception:  # noqa: BLE001  the person's object, or a library of another version
            shown = False
        if shown is None and self._done < _LAST_ASK:
            return
        self.unknown = None
        if shown:
            self._ranges, self.over = ranges, False

    # --- the thread ---------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self.over or self._thread is not None or not self._has_room():
                return
            available = limits.memory(active=True).available
            ahead = int(available * _MEMORY_SHARE)
            self._nbytes, self._files.recent = min(self._window.bytes, ahead), ahead // BLOCK_NBYTES
            self._stop = threading.Event()
            args = self._stop, available
            # A daemon thread, as storage that hangs must not hold up Python's exit; `_pause_all`
            # waits for it a moment: one that returns from torch during the exit aborts it.
            self._thread = threading.Thread(
                target=self._run, args=args, name="creel-pages", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread available
                self._thread, self.over = None, True

    def _has_room(self, share: float = 1.0) -> bool:
        """Whether less than this share of the window is full; any batch may be read if none is."""
        steps = self._window.max_steps * share
        fits = self._nbytes_ahead < self._nbytes * share and len(self.ahead) < steps
        return not self.ahead or fits

    def _run(self, stop: threading.Event, available: int) -> None:
        files, flight, due = self._files, deque[FileBlock | Lookup](), deque[Lookup]()
        try:
            while self._goes_on(stop):
                if due:
                    self._ask(due.popleft(), flight, due, stop)
                elif self._has_room() and not self.over:
                    due += self._batch()
                elif flight:
                    self._land(flight, due)
                elif self._ends(stop):
                    return
                if files.nbytes > available:
                    _tell_of_memory(self._kind, files.nbytes, available)
        except Exception:  # noqa: BLE001  a sampler that raises does so again when pulled
            _log.debug("no pages are read ahead", exc_info=True)
            self.over = True
        finally:
            if files is not self._files:
                files.close()
            self._ends(stop)

    def _goes_on(self, stop: threading.Event) -> bool:
        # When Python exits, the main thread has ended.
        return not stop.is_set() and threading.main_thread().is_alive()

    def _ends(self, stop: threading.Event) -> bool:
        """Whether there is nothing to read for now, so that the thread ends."""
        with self._lock:
            ends = self.over or not self._goes_on(stop) or not self._has_room()
            if ends and self._stop is stop:
                self._thread = None
            return ends

    def _batch(self) -> list[Lookup]:
        """Count the next batch as ahead, and return its samples; none at the end of the plan."""
        plan, ranges, number = self._plan, self._ranges, max(self._next, self._done)
        if plan is None or ranges is None:
            self.over = True
            return []
        plan.draw()
        if number >= plan.steps:
            self.over = True
            return []
        indices, _ = plan.cut(number, number + 1)
        self._next, self._planned[number] = number + 1, indices
        batch = MappedBatch(number)
        self.ahead.append(batch)
        first, self._seen = self._seen, self._seen + len(indices)
        every = _EVERY if self._warm >= _WARM else 1
        looked_at = indices[-first % every :: every].tolist()
        return [Lookup(batch, index, _parts(ranges, index)) for index in looked_at]

    def _ask(
        self,
        lookup: Lookup,
        flight: deque[FileBlock | Lookup],
        due: deque[Lookup],
        stop: threading.Event,
    ) -> None:
        """Ask for the next part of what a sample maps; `flight` says when memory has it."""
        batch = lookup.batch
        try:
            ranges = next(lookup.parts, None)
        except Exception as e:  # noqa: BLE001  the person's code
            self.over = True
            _warn(self._kind, f"ranges({lookup.sample}) raised {e!r}")
            return
        if ranges is None:
            return
        read = False
        for block in self._files.blocks(ranges):
            # Training that is here already reads it by itself.
            if batch.passed or not self._goes_on(stop):
                return
            if not self._files.ask(block):
                continue
            flight.append(block)
            read = True
            with self._lock:
                if not batch.passed:
                    batch.nbytes += BLOCK_NBYTES
                    self._nbytes_ahead += BLOCK_NBYTES
            while len(flight) >= _IN_FLIGHT:
                self._land(flight, due)
        self._warm = 0 if read else self._warm + 1
        flight.append(lookup)

    def _land(self, flight: deque[FileBlock | Lookup], due: deque[Lookup]) -> None:
        """Wait until memory has the block that was asked for first."""
        first = flight.popleft()
        if isinstance(first, Lookup):
            due.append(first)
        else:
            self._files.read(first)


def _parts(ranges: RangesOf, index: int) -> Iterator[list[MappedRange]]:
    yield from ranges(index)


def _warn(kind: str, why: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        _log.warning("creel reads nothing of %s ahead: %s", kind, why)


def _tell_of_memory(kind: str, nbytes: int, available: int) -> None:
    """Say once what the kernel keeps of files that are larger than memory.

    LRU over shuffled epochs: two uses of a sample are apart by u v of all samples beyond what
    memory lacks, where u and v are uniform in [0, 1].
    """
    if kind in _told:
        return
    _told.add(kind)
    share = available / nbytes
    lack = 1 - share
    again = share + (lack * math.log(lack) if lack < 1 else 0.0)
    if speaks():
        _log.warning(
            "%s maps files of %s or more, and memory has room for %s of them. The kernel keeps what"
            " was used last, which leaves %.0f %% to the next shuffled epoch; the rest is read"
            " again, ahead of use. What creel reads itself (creel.RecordDataset) stays by next"
            " use: %.0f %%",
            kind,
            format_size(nbytes),
            format_size(available),
            100 * again,
            100 * share,
        )


_all: weakref.WeakSet[MappedPages] = weakref.WeakSet()


def _pause_all() -> None:
    for pages in list(_all):
        pages.stop()


atexit.register(_pause_all)
