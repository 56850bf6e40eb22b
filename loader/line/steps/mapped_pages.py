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
from typing import NamedTuple

from creel.loader.client.cluster.ranks import speaks
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.maps.held import held_ranges
from creel.loader.data.maps.mappings import MappedRange
from creel.loader.data.maps.page_files import BLOCK_NBYTES, FileBlock, PageFiles
from creel.loader.data.maps.ranges import RangesOf, ranges_of
from creel.loader.line.order.epoch_order import EpochOrder
from creel.loader.line.order.epoch_plan import EpochPlan, same_batch
from creel.loader.line.steps.batch_stream import try_predict
from creel.loader.line.steps.held_rows import HeldRows
from creel.loader.line.steps.page_window import MappedBatch, PageWindow, Warmth
from creel.settings import WindowSettings
from creel.system import limits
from creel.system.forks import join, pause_before_fork, reset_in_child
from creel.units import format_size

_log = logging.getLogger("creel.loader")

#: Blocks that are asked for before the first of them is awaited.
_IN_FLIGHT = 128
#: Share of the available memory that may be read ahead: pages of which the kernel drops some before
#: they are used would be read twice.
_MEMORY_SHARE = 0.5
_warned: set[str] = set()  # kinds of datasets of which nothing is read ahead
_too_large: set[str] = set()  # kinds of datasets whose files are larger than memory


class Lookup(NamedTuple):
    """What a sample of a batch maps, as far as it was not asked for: see `RangesOf`."""

    batch: MappedBatch
    sample: int
    parts: Iterator[list[MappedRange]]


class MappedPages:
    """The pages of an iterator's coming batches. The trainer calls its public methods.

    The thread alone writes `_next` and `_warmth`.

    Attributes:
        follows: whether `claimed` and `done` need be called.
    """

    def __init__(self, window: WindowSettings) -> None:
        self._window = PageWindow(window)
        self.reset_for_process()
        reset_in_child(self)
        pause_before_fork(self)
        _all.add(self)

    def reset_for_process(self) -> None:
        """Read nothing ahead, as after a fork in the child."""
        self._files = PageFiles()  # the child closes what it has inherited
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()  # of this thread
        self._order: EpochOrder | None = None  # until the first batch is claimed
        self._plan: EpochPlan | None = None  # what the epoch reads
        self._kind = ""  # of the dataset, for warnings
        self._ranges: RangesOf | None = None  # what a sample maps
        self._over = True  # whether no further batches of the epoch are looked at
        self._next = self._done = 0  # the batch to look at next; batches that training has
        self._window, self._warmth = PageWindow(self._window.settings), Warmth()
        self._held: HeldRows | None = None  # while it is to be found out what samples map
        self.follows = False

    def pause(self) -> None:
        """End the thread before a fork; after the next batch there is another one."""
        thread = self._thread
        self._stop.set()
        join(thread)

    def stop(self) -> None:
        """Read nothing more in this epoch."""
        self._over = True
        self.pause()
        if self._thread is not None:  # storage hangs: the thread closes them, if it ever ends
            self._files = PageFiles()

    def leave_files(self) -> PageFiles:
        """Return the open files, for the next iterator; none while this one reads."""
        files = self._files if self._over and self._thread is None else PageFiles()
        self._files = PageFiles() if files is self._files else self._files
        return files

    def begin(self, dataset: object, order: EpochOrder, before: MappedPages | None) -> None:
        """Prepare an epoch; nothing is read ahead of an order with more than the dataset.

        before: those of the loader's last iterator.
        """
        self.stop()
        self._reset()
        if before is not None:
            self._files = before.leave_files()
        self._files.begin()
        if order.extended or order.paced:
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
        self._held, self._over = HeldRows(dataset) if asks else None, not known
        self.follows = asks or known

    def claimed(self, batch: int, index: object) -> None:
        """Begin with the epoch's first batch; stop if the order is not the one foreseen.

        A plan made now knows the draws that torch's samplers make when the first batch is pulled.
        There is none if the loader itself is gone: the earlier one foresaw these draws.
        """
        if self._over:
            if self._held is not None:
                self._held.claimed(batch, index)
            return
        if self._order is not None:
            order, self._order = self._order, None
            self._next = batch
            self._plan = try_predict(order, 0) or self._plan
            self._over = self._plan is None
            self._start()
        planned = self._window.ahead.get(batch)
        if planned is not None and not same_batch(planned.samples, index):
            self.stop()

    def done(self, batch: int) -> None:
        """Note that training has all batches below `batch`."""
        self._done = batch
        if self._held is not None and self._held.asks(batch):
            ranges, decided = self._held.ranges(batch, self._files)
            if ranges is not None:
                self._ranges, self._over = ranges, False
            self._held = None if decided else self._held
        self._window.done(batch)
        if self._order is None and not self._over and self._window.has_room(0.5):
            self._start()
        self.follows = bool(self._window.ahead) or not self._over or self._held is not None

    # --- the thread ---------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._over or self._thread is not None or not self._window.has_room():
                return
            available = limits.memory(active=True).available
            ahead = int(available * _MEMORY_SHARE)
            self._files.recent = ahead // BLOCK_NBYTES
            self._window.limit(ahead)
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
                self._thread, self._over = None, True

    def _run(self, stop: threading.Event, available: int) -> None:
        files, flight, due = self._files, deque[FileBlock | Lookup](), deque[Lookup]()
        try:
            while self._goes_on(stop):
                if due:
                    self._ask(due.popleft(), flight, due, stop)
                elif self._window.has_room() and not self._over:
                    due += self._batch()
                elif flight:
                    self._land(flight, due)
                elif self._ends(stop):
                    return
                if files.nbytes > available:
                    _tell_of_memory(self._kind, files.nbytes, available)
        except Exception:  # noqa: BLE001  a sampler that raises does so again when pulled
            _log.debug("no pages are read ahead", exc_info=True)
            self._over = True
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
            ends = self._over or not self._goes_on(stop) or not self._window.has_room()
            if ends and self._stop is stop:
                self._thread = None
            return ends

    def _batch(self) -> list[Lookup]:
        """Count the next batch as ahead, and return its samples; none at the end of the plan."""
        plan, ranges, number = self._plan, self._ranges, max(self._next, self._done)
        if plan is None or ranges is None:
            self._over = True
            return []
        plan.draw()
        if number >= plan.steps:
            self._over = True
            return []
        indices, _ = plan.cut(number, number + 1)
        self._next = number + 1
        batch = MappedBatch(number, indices)
        self._window.add(batch)
        looked_at = self._warmth.looked_at(indices)
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
            self._over = True
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
            self._window.grow(batch, BLOCK_NBYTES)
            while len(flight) >= _IN_FLIGHT:
                self._land(flight, due)
        self._warmth.note(read=read)
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
    if kind in _too_large:
        return
    _too_large.add(kind)
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
