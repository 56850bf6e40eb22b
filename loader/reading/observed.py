"""ObservedReads: a record of what a sample reads, and of which files in which versions."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN, of_stat
from creel.loader.reading.this_thread import this_thread, usage

if TYPE_CHECKING:
    from creel.loader.reading.file_copies import FileCopies

#: The system's, whatever `os.open` stands for while a dataset is read.
os_open = os.open
#: What a thread reads: an address; an object of a leaf as (id(leaf), object number); a small part
#: of a file as (address, bytes that were read, bytes of the file).
Asked = str | tuple[int, int] | tuple[str, int, int]
#: An opened file is worth caching if at least 1/4 of it was read ...
WORTH = 4
#: ... or if it is at most this many bytes: copying all of it costs no more than opening it.
SMALL = 1 << 16


class PartialRead:
    """How much of a file one sample has read through file objects."""

    def __init__(self, nbytes: int, waited_ns: int = 0) -> None:
        """`nbytes`: size of the file."""
        self.nbytes = nbytes
        self._thread: ThreadReads | None = None  # whose reads count, and
        self._since = 0  # what it had read when they began to
        self._read = 0
        #: How long the storage made the thread wait for the open, in ns.
        self.waited_ns = waited_ns
        self.got_last = 0  # what `got` gave last

    def count(self, nbytes: int) -> None:
        """Count bytes that were read through a file object."""
        self._read += nbytes

    def count_thread(self, thread: ThreadReads) -> None:
        """Count all that a thread reads from now on: nobody sees what it reads of the file."""
        self._thread, self._since = thread, thread.nbytes()

    def got(self) -> int:
        """Bytes that were read, at the end of the sample."""
        unseen = 0 if self._thread is None else self._thread.nbytes() - self._since
        self.got_last = self._read + unseen
        return self.got_last

    @property
    def copied_sooner(self) -> bool:
        """Whether a copy of the file, at 1 GB/s, takes less time than its open."""
        return self.nbytes <= self.waited_ns


class ThreadReads:
    """What a thread has read by system calls, from the first question to `close`."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._nbytes = 0

    def nbytes(self) -> int:
        """Bytes that it has read; as before where the system does not tell, and after `close`."""
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


def is_local(address: str) -> bool:
    """Whether an address, in the form of `absolute`, is a path."""
    return "://" not in address


def version_at(path: str) -> int:
    """The version that a local file has now (`cache/storage/version.py`)."""
    now_ns = time.time_ns()
    try:
        return of_stat(os.stat(path), now_ns)  # noqa: PTH116  a third of the time
    except (OSError, ValueError):
        return MISSING


class FoundVersions:
    """In which version samples have found local files, by address; MISSING once it was two.

    >>> versions = FoundVersions()
    >>> for address, of in [("/a", CHANGING), ("/a", 5), ("/a", CHANGING), ("/b", 5), ("/b", 6)]:
    ...     versions.enter(address, of)
    >>> versions.take("/a"), versions.take("/b") == MISSING, versions.take("/a") == UNKNOWN
    (5, True, True)
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        #: Addresses, statuses and times as for `of_stat`. What versions these are is found out
        #: later, for many at once: between reads of a disk, each line takes several times as long.
        self.statuses: deque[tuple[str, os.stat_result, int]] = deque()

    def enter(self, address: str, of: int) -> None:
        """Enter the version of which a sample has found a file."""
        known = self._versions.setdefault(address, of)
        if known == CHANGING:
            self._versions[address] = of
        elif of not in {known, CHANGING}:
            self._versions[address] = MISSING

    def take(self, address: str) -> int:
        """The version of a file, which is forgotten; UNKNOWN where none was entered."""
        while self.statuses:
            found, status, now_ns = self.statuses.popleft()
            self.enter(found, of_stat(status, now_ns))
        return self._versions.pop(address, UNKNOWN)

    def clear(self) -> None:
        self.statuses.clear()
        self._versions.clear()


class ObservedReads:
    """Records what this thread reads inside the `with`, sample by sample."""

    #: From the page cache h5py.File takes 100 us, os.open 5.
    QUICK_OPEN_NS = 200_000

    def __init__(
        self,
        *,
        whole: bool = False,
        copies: FileCopies | None = None,
        versions: FoundVersions | None = None,
    ) -> None:
        """Make a record.

        Args:
            whole: whether a file is worth caching however little of it is seen to be read.
            copies: where to keep what is read of slow files.
            versions: where to enter those of local files.
        """
        self._whole = whole
        self.copies = copies
        self._versions = FoundVersions() if versions is None else versions
        self._asked: dict[Asked, PartialRead | None] = {}  # None: it was read as a whole
        self._sleeps = usage().ru_nvcsw  # of this thread, when `waited` was asked last
        self._outer: ObservedReads | None = None
        self.thread = ThreadReads()  # while this is active

    def waited(self, took: int) -> bool:
        """Whether the storage made this thread wait in an open that took so many ns.

        So it is where that was long, and the thread has slept since this was asked last.
        """
        if took <= self.QUICK_OPEN_NS:
            return False
        before, self._sleeps = self._sleeps, usage().ru_nvcsw
        return self._sleeps > before

    def end_sample(self) -> list[Asked]:
        """What the sample read, each once, in order; what follows is of the next one.

        Small parts of files only where a copy saves time.
        """
        asked, self._asked = self._asked, {}
        found: list[Asked] = []
        for what, part in asked.items():
            got = -1 if self._whole or part is None else part.got()
            if part is None or got < 0 or got * WORTH >= part.nbytes:
                found.append(what)
            elif part.copied_sooner and isinstance(what, str):
                found.append((what, got, part.nbytes))
        return found

    def add(self, asked: Asked) -> None:
        """Record a read that succeeded: one that failed would be repeated by the daemon."""
        self._asked[asked] = None
        if isinstance(asked, str) and is_local(asked):
            self._versions.enter(asked, version_at(asked))

    def opened(self, path: str, nbytes: int, of: int, waited_ns: int) -> PartialRead | None:
        """Record a file that was opened, and that the storage made the thread wait for `waited_ns`.

        `of`: its version. Returns where its reads are to be counted, one place for all file objects
        of a path; None where the file is worth caching however little is read.
        """
        self._versions.enter(path, of)
        if nbytes <= SMALL:
            self._asked[path] = None
            return None
        part = self._asked.setdefault(path, PartialRead(nbytes))
        if part is not None:
            part.waited_ns = max(part.waited_ns, waited_ns)
        return part

    def opened_small(self, path: str, status: os.stat_result, now_ns: int) -> None:
        """Record a file of at most `SMALL` bytes; `status` and `now_ns` as for `of_stat`."""
        self._versions.statuses.append((path, status, now_ns))
        self._asked[path] = None

    def __enter__(self) -> ObservedReads:
        self._outer, this_thread.observed = this_thread.observed, self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.observed = self._outer
        self.thread.close()
