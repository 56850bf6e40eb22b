"""FileCopies: keeps the bytes that samples read from slow files before their file lists are known.

Below `creel.wrap`, a dataset opens its files itself in the first epoch, and the daemon would read
each file again in the second. So a thread also writes every byte that a sample reads through a file
object to a memfd, which the trainer shares with its workers. The daemon gets the memfd with the
manifest (`creel.cache.storage.copies`). No read is added, and no read waits for the thread. A copy
is kept only if the sample read nearly all of the file, and the storage made it wait for the open.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from creel.cache.memory.memfd import Descriptor
from creel.cache.storage import version
from creel.cache.storage.copies import PAGE_NBYTES, free, locked, new_copies
from creel.system.forks import forget_in_child, join, pause_before_fork
from creel.system.limits import IOV_MAX

if TYPE_CHECKING:
    from creel.loader.reading.observed import PartialRead

#: Missing parts of a file are read when it is closed, if they are at most 1/16 of its bytes.
_GAPS = 16
_BLOCK_NBYTES = 512  # unit of st_blocks
#: Bytes written at once. A small file is written whole, since every write wakes up the thread.
_PIECE_NBYTES = 1 << 20
_UNKNOWN = -2
_IDLE_S = 0.5  # the idle thread then ends: a process should fork without threads
_FLUSH_S = 10.0


class FileCopies:
    """Copies of files in a memfd, thread-safe and shared with forked workers."""

    def __init__(self, limit: int, own: Descriptor | None = None) -> None:
        """Copy up to `limit` bytes into another process's memfd; None: a new one."""
        self.limit = limit
        self.own = new_copies() if own is None else own
        #: (address, first byte, bytes, version) of each copy that this process has completed.
        self.done: deque[tuple[str, int, int, int]] = deque()
        #: The file that C code opened last, and how many files were read for it since
        #: (`libraries`).
        self.read_in_c: PartialRead | None = None
        self.read_here = 0
        self._begun: set[str] = set()
        self.forget()
        forget_in_child(self)
        pause_before_fork(self)

    @property
    def fd(self) -> int:
        return self.own.fd

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.done.clear()

    def put(self, work: Callable[[], None]) -> None:
        """Queue `work` for the thread, which runs it in order while a read waits for storage."""
        self._work.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="creel-copies", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads
                    self._thread = None
                    with suppress(Exception):
                        work()

    def pause(self) -> None:
        """End the thread before a fork, after the queued work; the next work starts it again."""
        if self._thread is not None:
            self._work.put(None)
            join(self._thread)

    def _run(self) -> None:
        while True:
            work = None
            with suppress(queue.Empty):
                work = self._work.get(timeout=_IDLE_S)
            if work is not None:
                work()
                continue
            with self._lock:
                if self._work.empty():
                    self._thread = None
                    return

    def flush(self) -> None:
        """Wait until the thread has finished all queued work."""
        done = threading.Event()
        if self._thread is not None:
            self.put(done.set)
            done.wait(_FLUSH_S)

    def begin(self, address: str, nbytes: int, of: int) -> FileCopy | None:
        """Begin the copy of an opened file of this size and version (`of`).

        Returns None if this process has begun a copy of this file before.
        """
        if address in self._begun:
            return None
        self._begun.add(address)
        return FileCopy(self, address, nbytes, of)

    def give_up(self, address: str) -> None:
        """Allow the next open of this file to begin a copy."""
        self._begun.discard(address)

    def reserve(self, nbytes: int) -> int:
        """Reserve room for a copy in the memfd; return its first byte, or -1 if there is none."""
        if not self.own.valid:
            return -1
        with self._lock, suppress(OSError), locked(self.fd):  # no file locks, or no memory
            status = os.fstat(self.fd)
            if status.st_blocks * _BLOCK_NBYTES + nbytes <= self.limit:
                first = status.st_size
                os.ftruncate(self.fd, first + -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
                return first
        return -1


class FileCopy:
    """The copy of one file, made by one thread while a sample reads the file."""

    def __init__(self, copies: FileCopies, address: str, nbytes: int, of: int) -> None:
        """See `FileCopies.begin`."""
        self._copies = copies
        self._address = address
        self._nbytes = nbytes
        self._version = of
        self._first = _UNKNOWN
        self._at = self._end = 0  # the unwritten stretch is [_at, _end) of the file
        self._pieces: list[bytes] = []  # the bytes of that stretch
        self._todo: list[Callable[[], None]] = []  # queued for the thread by `_put`
        self._failed = False
        self._spans: list[tuple[int, int]] = []  # stretches passed on, as (first, last + 1)

    def add(self, at: int, data: bytes | memoryview) -> None:
        """Take in the bytes read at position `at`; a view is used during the call only."""
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
        """Let the next `_put` write the current stretch."""
        pieces, self._pieces = self._pieces, []
        at, end = self._at, self._end
        if not pieces or at == end or end > self._nbytes:
            return
        self._todo.append(partial(self._written, at, end, pieces))
        if self._spans and self._spans[-1][1] == at:
            at = self._spans.pop()[0]
        self._spans.append((at, end))

    def _written(self, at: int, end: int, pieces: list[bytes]) -> None:
        """Write a stretch, in the thread. Without room or memory, the copy fails."""
        whole = False
        try:
            first, own = self._place(), self._copies.own
            whole = first >= 0 and own.valid
            whole = whole and os.pwritev(own.fd, pieces, first + at) == end - at
        finally:
            self._failed |= not whole

    def _place(self) -> int:
        """Return where the copy begins in the memfd, reserved at first; -1 without room."""
        if self._first == _UNKNOWN:
            changing = self._version == version.CHANGING
            self._first = -1 if changing else self._copies.reserve(self._nbytes)
        return self._first

    def finish(self, file: BinaryIO) -> None:
        """Complete the copy before the file is closed, or give it up until the next open.

        Nothing checks here whether the file changed since it was opened, which would cost another
        call to the storage. `Copies.take` compares versions when the copy is used.
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
        """Record or give up the copy, in the thread, after its last write."""
        nbytes = self._nbytes
        if whole and not self._failed and self._first >= 0:
            self._copies.done.append((self._address, self._first, nbytes, self._version))
            return
        self._copies.give_up(self._address)
        if self._first >= 0:
            with suppress(OSError, ValueError):
                free(self._copies.fd, self._first, nbytes)


def _each(todo: list[Callable[[], None]]) -> None:
    """Run all of `todo`, even after failures."""
    for work in todo:
        with suppress(Exception):  # a failed step leaves the copy incomplete, so it is given up
            work()


def missing(spans: list[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the parts of [0, nbytes) in none of the spans (first, last + 1), in any order.

    >>> missing([(4, 6), (0, 2), (1, 3)], 8)
    [(3, 4), (6, 8)]
    """
    gaps, at = [], 0
    for first, end in sorted(spans):
        if first > at:
            gaps.append((at, first))
        at = max(at, end)
    return [*gaps, (at, nbytes)] if at < nbytes else gaps
