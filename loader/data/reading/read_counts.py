"""What a sample reads of a file."""

from __future__ import annotations

import os
from contextlib import suppress

#: The system's functions, even while `creel.loader.data.interception.intercept` has replaced them.
os_open, os_stat = os.open, os.stat
#: Bytes in which the parts of files that samples read are recorded: a page.
UNIT = 4096


class PartialRead:
    """Which parts of a file one sample has read through file objects."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: size of the file."""
        self.nbytes = nbytes
        self.opened = False  # whether this sample has opened the file
        self._thread: ThreadReads | None = None  # the thread whose system calls count too
        self._since = 0  # what that thread had read when `count_thread` was called
        self._parts: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from `start` on, up to `stop`."""
        parts = self._parts
        if parts and parts[-1][0] <= start <= parts[-1][1]:
            parts[-1] = parts[-1][0], max(parts[-1][1], stop)
        elif start < stop:
            parts.append((start, stop))

    def parts(self, unit: int) -> list[tuple[int, int]]:
        """Return (start, stop) of all parts, in units of so many bytes: in order, and disjoint.

        >>> read = PartialRead(1000)
        >>> for part in [(0, 10), (90, 95), (10, 12), (30, 31)]:
        ...     read.add(*part)
        >>> read.parts(10)
        [(0, 2), (3, 4), (9, 10)]
        """
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((a // unit, -(-b // unit)) for a, b in self._parts):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
        return merged

    def count_thread(self, thread: ThreadReads) -> None:
        """Count all bytes a thread reads from now on, since its reads of the file are not seen."""
        self._thread, self._since = thread, thread.nbytes()

    def got(self) -> int:
        """Return the bytes read; called at the end of the sample."""
        unseen = 0 if self._thread is None else self._thread.nbytes() - self._since
        return sum(stop - start for start, stop in self.parts(1)) + unseen


class ThreadReads:
    """Counts the bytes that a thread reads by system calls, from the first `nbytes` to `close`."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._nbytes = 0

    def nbytes(self) -> int:
        """Return the bytes read; the last known number after `close`, or if the system has none."""
        with suppress(OSError):
            if self._fd is None:
                self._fd = os_open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
            if self._fd >= 0:
                self._nbytes = int(os.pread(self._fd, 40, 0).split()[1])
        return self._nbytes

    def close(self) -> None:
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
