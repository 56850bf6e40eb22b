"""Counts of the bytes that a sample reads of a file."""

from __future__ import annotations

import os
from contextlib import suppress

#: The system's functions, even while `creel.loader.data.interception.intercept` has replaced them.
os_open, os_stat = os.open, os.stat


class PartialRead:
    """Counts how much of a file one sample has read through file objects."""

    def __init__(self, nbytes: int, waited_ns: int = 0) -> None:
        """`nbytes`: size of the file; `waited_ns`: as below."""
        self.nbytes = nbytes
        self._thread: ThreadReads | None = None  # the thread whose system calls count too
        self._since = 0  # what that thread had read when `count_thread` was called
        self._read = 0
        #: How long the storage made the thread wait for the open, in ns.
        self.waited_ns = waited_ns

    def count(self, nbytes: int) -> None:
        """Count bytes that were read through a file object."""
        self._read += nbytes

    def count_thread(self, thread: ThreadReads) -> None:
        """Count all bytes a thread reads from now on, since its reads of the file are not seen."""
        self._thread, self._since = thread, thread.nbytes()

    def got(self) -> int:
        """Return the bytes read; called at the end of the sample."""
        unseen = 0 if self._thread is None else self._thread.nbytes() - self._since
        return self._read + unseen

    @property
    def copied_sooner(self) -> bool:
        """Whether copying the file, at 1 GB/s, takes less time than its open took."""
        return self.nbytes <= self.waited_ns


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
