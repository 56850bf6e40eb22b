"""MappedPages: reads what coming batches map into memory, before they fault on it.

For a mapped file the kernel is the cache. What it lacks is the order: a fault on a page at random
waits for storage alone, and the next one comes after it. A dataset that says which bytes a sample
maps (its method `ranges`) has them read into the page cache in the order of the epoch, by a thread
of the training process, at most `window` ahead of training. All processes of the node share these
pages, so workers, and the other ranks, find them too.

Nothing here is needed: what fails, or is foreseen wrongly, is read by the fault itself, as without
creel. The thread ends when the window is full; `done` starts another when half of it is free. So
none waits, also while workers are forked and when Python exits.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.data.binding.mapped_ranges import MappedRange, RangesOf
from creel.loader.line.order.epoch_order import EpochOrder
from creel.loader.line.order.epoch_plan import same_batch
from creel.loader.line.steps.batch_stream import try_predict
from creel.settings import WindowSettings
from creel.system import limits
from creel.system.forks import forget_in_child, join, pause_before_fork

_log = logging.getLogger("creel.loader")

#: Bytes that the kernel is asked for at once: it cuts longer requests to its readahead, which is
#: 128 KiB by default (`mm/readahead.c`, `force_page_cache_ra`).
_PIECE_NBYTES = 1 << 17
#: Pieces that are asked for before the first of them is awaited.
_IN_FLIGHT = 128
#: Descriptors that are open at once.
_MAX_FILES = 16
#: After so many pieces in a row that memory had already, one sample in `_EVERY` is looked at.
_WARM, _EVERY = 64, 16
#: Share of the available memory that may be read ahead: pages of which the kernel drops some before
#: they are used would be read twice.
_MEMORY_SHARE = 0.5

_warned: set[str] = set()  # kinds of datasets


class MappedBatch(NamedTuple):
    """What a coming batch maps; `nbytes` also counts samples that are not looked at."""

    number: int
    ranges: list[MappedRange]
    nbytes: int


class MappedPages:
    """The pages of one epoch's coming batches. The trainer calls its public methods.

    The thread alone writes `_next` to `_added`, and the trainer `_done` and `_consumed`.
    """

    def __init__(
        self, kind: str, ranges: RangesOf, order: EpochOrder, window: WindowSettings
    ) -> None:
        """`kind`: of the dataset, for the log."""
        self._kind, self._ranges, self._window = kind, ranges, window
        self._nbytes = 0  # of the window; less than the setting where memory is short
        self._plan = try_predict(order, 0)
        self.forget()
        self._over = False
        forget_in_child(self)
        pause_before_fork(self)

    def forget(self) -> None:
        """Create the state that belongs to one process: a forked child reads nothing ahead."""
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._begun, self._over = False, True
        self._next = 0  # the batch to look at after `_pending`
        self._pending: MappedBatch | None = None  # it waits for room
        self._planned: dict[int, NDArray[np.integer]] = {}
        self._ahead: deque[MappedBatch] = deque()
        self._warm = self._seen = 0
        self._added = self._done = self._consumed = 0

    def pause(self) -> None:
        """End the thread before a fork; after the next batch there is another one."""
        thread = self._thread
        self._stop.set()
        join(thread)

    def stop(self) -> None:
        """Read nothing more in this epoch."""
        self._over = True
        self.pause()

    def claimed(self, batch: int, index: object, order: EpochOrder) -> None:
        """Begin with the epoch's first batch; stop if the order is not the one foreseen.

        A plan made now knows the draws that torch's samplers make when the first batch is pulled.
        There is none if the loader itself is gone: the earlier one foresaw these draws.
        """
        if not self._begun:
            self._begun, self._next = True, batch
            self._plan = try_predict(order, 0) or self._plan
            self._over = self._over or self._plan is None
            self._start()
        planned = self._planned.get(batch)
        if planned is not None and not same_batch(planned, index):
            self.stop()

    def done(self, batch: int) -> None:
        """Note that training has all batches below `batch`."""
        self._done = batch
        while self._ahead and self._ahead[0].number < batch:
            read = self._ahead.popleft()
            self._planned.pop(read.number, None)
            self._consumed += read.nbytes
        if self._begun and self._added - self._consumed <= self._nbytes // 2:
            self._start()

    # --- the thread ---------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._over or self._thread is not None or not self._has_room():
                return
            available = int(limits.memory().available * _MEMORY_SHARE)
            self._nbytes = min(self._window.bytes, available)
            self._stop = threading.Event()
            # Not a daemon thread: one that returns from torch during Python's exit aborts it.
            name, args = "creel-pages", (self._stop,)
            self._thread = threading.Thread(target=self._run, args=args, name=name)
            try:
                self._thread.start()
            except RuntimeError:  # no thread available
                self._thread, self._over = None, True

    def _has_room(self) -> bool:
        """Whether the next batch may be read now; one may if none is ahead, of whatever size."""
        ahead, pending = self._added - self._consumed, self._pending
        fits = ahead + (0 if pending is None else pending.nbytes) <= self._nbytes
        return not self._ahead or (fits and len(self._ahead) < self._window.max_steps)

    def _run(self, stop: threading.Event) -> None:
        files, flight = _PageFiles(), deque[MappedRange]()
        try:
            while self._goes_on(stop):
                batch = self._batch()
                if batch is not None:
                    self._read(batch, files, flight, stop)
                    continue
                while flight and self._goes_on(stop):
                    files.read(flight.popleft())
                if self._ends(stop):
                    return
        except Exception:  # noqa: BLE001  a sampler that raises does so again when pulled
            _log.debug("no pages are read ahead", exc_info=True)
            self._over = True
        finally:
            files.close()
            self._ends(stop)

    def _read(
        self,
        batch: MappedBatch,
        files: _PageFiles,
        flight: deque[MappedRange],
        stop: threading.Event,
    ) -> None:
        """Ask for a batch's pages, and wait for what was asked for long before (`flight`)."""
        for piece in self._pieces(batch, files):
            if not self._goes_on(stop):
                return
            if not files.asked_for(piece):
                self._warm += 1
                continue
            self._warm = 0
            flight.append(piece)
            if len(flight) >= _IN_FLIGHT:
                files.read(flight.popleft())

    def _goes_on(self, stop: threading.Event) -> bool:
        # When Python exits, the main thread has ended and waits for this thread.
        return not stop.is_set() and threading.main_thread().is_alive()

    def _ends(self, stop: threading.Event) -> bool:
        """Whether there is nothing to read for now, so that the thread ends."""
        with self._lock:
            ends = self._over or not self._goes_on(stop) or not self._has_room()
            if ends and self._stop is stop:
                self._thread = None
            return ends

    def _batch(self) -> MappedBatch | None:
        """Return the next batch, and count it as ahead; None if there is no room, or no batch."""
        batch, self._pending = self._pending, None
        if batch is not None and batch.number < self._done:
            self._planned.pop(batch.number, None)
            batch = None
        batch = batch or self._looked_up()
        if batch is None:
            self._over = True
            return None
        self._pending = batch
        if not self._has_room():
            return None
        self._pending = None
        self._added += batch.nbytes
        self._ahead.append(batch)
        return batch

    def _looked_up(self) -> MappedBatch | None:
        """Return what the next batch maps; None if the plan or the dataset cannot say."""
        plan, number = self._plan, max(self._next, self._done)
        if plan is None:
            return None
        plan.draw()
        if number >= plan.steps:
            return None
        indices, _ = plan.cut(number, number + 1)
        self._next, self._planned[number] = number + 1, indices
        ranges: list[MappedRange] = []
        nbytes = mean = 0
        for index in map(int, indices):
            self._seen += 1
            if self._warm >= _WARM and self._seen % _EVERY:
                nbytes += mean
                continue
            try:
                mapped = self._ranges(index)
            except Exception as e:  # noqa: BLE001  the person's code
                _warn(self._kind, index, e)
                return None
            mean = sum(one.nbytes for one in mapped)
            nbytes += mean
            ranges += mapped
        return MappedBatch(number, ranges, nbytes)

    def _pieces(self, batch: MappedBatch, files: _PageFiles) -> Iterator[MappedRange]:
        """Yield what is to be read, until training has read the batch itself."""
        for path, offset, nbytes in batch.ranges:
            end = min(offset + nbytes, files.size(path))
            for start in range(offset, end, _PIECE_NBYTES):
                if batch.number < self._done:
                    return
                yield MappedRange(path, start, min(_PIECE_NBYTES, end - start))


class _PageFiles:
    """Files of which pages are read, opened as needed; those that cannot be opened are empty."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[int, int]] = {}  # path -> (descriptor or -1, size)
        self._scratch = bytearray(_PIECE_NBYTES)

    def size(self, path: str) -> int:
        return self._file(path)[1]

    def asked_for(self, piece: MappedRange) -> bool:
        """Ask the kernel to read a piece; False if memory has it, or nobody ever will."""
        fd, _ = self._file(piece.path)
        last = piece.offset + piece.nbytes - 1
        # File systems that cannot say it, such as NFS and FUSE, raise.
        with suppress(OSError):
            if os.preadv(fd, [bytearray(1)], last, os.RWF_NOWAIT) == 1:
                return False
        try:
            os.posix_fadvise(fd, piece.offset, piece.nbytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            return False
        return True

    def read(self, piece: MappedRange) -> None:
        """Wait until memory has a piece."""
        fd, _ = self._file(piece.path)
        with suppress(OSError):
            os.preadv(fd, [memoryview(self._scratch)[: piece.nbytes]], piece.offset)

    def _file(self, path: str) -> tuple[int, int]:
        if path not in self._opened:
            if len(self._opened) >= _MAX_FILES:
                self._close(next(iter(self._opened)))
            self._opened[path] = _opened(path)
        return self._opened[path]

    def _close(self, path: str) -> None:
        fd, _ = self._opened.pop(path)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        for path in list(self._opened):
            self._close(path)


def _opened(path: str) -> tuple[int, int]:
    """Open a regular file; return (-1, 0) if there is none."""
    try:
        # A pipe without a writer would wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return -1, 0
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            # Only what is asked for is read, without the kernel's own readahead.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return fd, status.st_size
    except OSError:
        pass
    os.close(fd)
    return -1, 0


def _warn(kind: str, index: int, error: Exception) -> None:
    if kind not in _warned:
        _warned.add(kind)
        _log.warning("creel reads nothing of %s ahead: ranges(%d) raised %r", kind, index, error)
