"""FileCopies: what samples read of slow files while nobody knows which files they need.

Below `creel.wrap`, in the first epoch, a dataset opens its files itself, and the daemon would read
each once more in the second. So what a sample reads through a file object is written to a memfd as
well, by a thread, into memory which the trainer and its workers share; the daemon gets it with the
manifest (`creel.cache.storage.copies`). No read is added or waits for that. Only files of which a
sample has read nearly all are kept, and only where the storage made it wait for the open.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from creel.cache.storage import version
from creel.cache.storage.copies import PAGE_NBYTES, free, locked, new_copies
from creel.forks import forget_in_child
from creel.limits import IOV_MAX

if TYPE_CHECKING:
    from creel.loader.reading.observed import PartialRead

#: What a sample left out of a file, at most this part of it, is read when the file is closed.
_GAPS = 16
_BLOCK_NBYTES = 512  # of st_blocks
#: Bytes that are written together: a small file at once, since every write wakes up the thread.
_PIECE_NBYTES = 1 << 20
_UNKNOWN = -2
_IDLE_S = 0.5  # after which the thread ends: who forks rather has none
_FLUSH_S = 10.0


class FileCopies:
    """Copies of files in a memfd, thread-safe and shared with forked workers."""

    def __init__(self, limit: int, fd: int | None = None) -> None:
        """`limit`: bytes of all copies. `fd`: another process's memfd, taken over; None: new."""
        self.limit = limit
        self.fd = new_copies() if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        #: Address, first byte, bytes and version of copies that this process has completed.
        self.done: deque[tuple[str, int, int, int]] = deque()
        #: The file that C has opened last, and how many were read in its place since (`libraries`).
        self.read_in_c: PartialRead | None = None
        self.read_here = 0
        self._begun: set[str] = set()
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.done.clear()

    def put(self, work: Callable[[], None]) -> None:
        """Do this soon, in order, in a thread: while the next read waits for the storage."""
        self._work.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="creel-copies", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads
                    self._thread = None
                    with suppress(Exception):
                        self._work.get()()

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._thread = None
                        return
                continue
            work()

    def flush(self) -> None:
        """Wait until all is done that was `put`."""
        done = threading.Event()
        if self._thread is not None:
            self.put(done.set)
            done.wait(_FLUSH_S)

    def begin(self, address: str, nbytes: int, of: int) -> FileCopy | None:
        """Begin the copy of a file that was opened; None if this process has done so before.

        `nbytes`, `of`: its size and version.
        """
        if address in self._begun:
            return None
        self._begun.add(address)
        return FileCopy(self, address, nbytes, of)

    def give_up(self, address: str) -> None:
        """The next open of this file may begin a copy."""
        self._begun.discard(address)

    def reserve(self, nbytes: int) -> int:
        """The first byte of room for a copy in the memfd; -1 where there is none."""
        with self._lock, suppress(OSError), locked(self.fd):  # no locks, or no memory
            status = os.fstat(self.fd)
            if status.st_blocks * _BLOCK_NBYTES + nbytes <= self.limit:
                first = status.st_size
                os.ftruncate(self.fd, first + -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
                return first
        return -1


class FileCopy:
    """The copy of one file, made while a sample reads it, by one thread."""

    def __init__(self, copies: FileCopies, address: str, nbytes: int, of: int) -> None:
        """See `FileCopies.begin`."""
        self._copies = copies
        self._address = address
        self._nbytes = nbytes
        self._version = of
        self._first = _UNKNOWN
        self._at = self._end = 0  # first and last + 1 of the stretch that is not written yet
        self._pieces: list[bytes] = []  # its bytes
        self._todo: list[Callable[[], None]] = []  # for the thread
        self._failed = False
        self._spans: list[tuple[int, int]] = []  # first and last + 1 of those that are

    def add(self, at: int, data: bytes | memoryview) -> None:
        """Take in what was read at a position; a view is good during the call only."""
        if at != self._end or len(self._pieces) >= IOV_MAX:
            self._write()
        if not self._pieces:
            self._at = at
        self._pieces.append(bytes(data))
        self._end = at + len(data)
        if self._end - self._at >= _PIECE_NBYTES:
            self._write()
            self._put()

    def _write(self) -> None:
        """Have the stretch written that was read last, at the next `_put`."""
        pieces, self._pieces = self._pieces, []
        at, end = self._at, self._end
        if not pieces or at == end or end > self._nbytes:
            return
        self._todo.append(partial(self._written, at, end, pieces))
        if self._spans and self._spans[-1][1] == at:
            at = self._spans.pop()[0]
        self._spans.append((at, end))

    def _written(self, at: int, end: int, pieces: list[bytes]) -> None:
        """Write a stretch, in the thread; without room or memory the copy fails."""
        whole = False
        try:
            first = self._place()
            whole = first >= 0 and os.pwritev(self._copies.fd, pieces, first + at) == end - at
        finally:
            self._failed |= not whole

    def _place(self) -> int:
        """Where the copy begins in the memfd, from its first use on; -1: nowhere."""
        if self._first == _UNKNOWN:
            changing = self._version == version.CHANGING
            self._first = -1 if changing else self._copies.reserve(self._nbytes)
        return self._first

    def finish(self, file: BinaryIO) -> None:
        """Complete the copy, before the file is closed, or give it up until the next open.

        Whether the file has changed since it was opened is seen when the copy is taken, by its
        version (`Copies.take`): to ask now as well would cost another call of the storage.
        """
        self._write()
        gaps = missing(self._spans, self._nbytes)
        if sum(end - at for at, end in gaps) * _GAPS <= self._nbytes:
            for at, end in gaps:
                file.seek(at)
                self.add(at, file.read(end - at))
            self._write()
        whole = not missing(self._spans, self._nbytes)
        self._todo.append(partial(self._end_with, whole=whole))
        self._put()

    def _put(self) -> None:
        todo, self._todo = self._todo, []
        self._copies.put(partial(_each, todo))

    def _end_with(self, *, whole: bool) -> None:
        """In the thread, when all is written."""
        nbytes = self._nbytes
        if whole and not self._failed and self._first >= 0:
            self._copies.done.append((self._address, self._first, nbytes, self._version))
            return
        self._copies.give_up(self._address)
        if self._first >= 0:
            with suppress(OSError, ValueError):
                free(self._copies.fd, self._first, nbytes)


def _each(todo: list[Callable[[], None]]) -> None:
    """Do all, whatever becomes of those before."""
    for work in todo:
        with suppress(Exception):  # a copy that is not complete is none
            work()


def missing(spans: list[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """What of [0, nbytes) lies in none of the spans (first, last + 1), in any order.

    >>> missing([(4, 6), (0, 2), (1, 3)], 8)
    [(3, 4), (6, 8)]
    """
    gaps, at = [], 0
    for first, end in sorted(spans):
        if first > at:
            gaps.append((at, first))
        at = max(at, end)
    return [*gaps, (at, nbytes)] if at < nbytes else gaps
