"""ObservedReads: records what a sample reads, and the versions of the files."""

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
    from creel.loader.reading.storage import Options

#: The system's os.open, even while `intercept` has replaced it.
os_open = os.open
#: One read of a thread: an address; an object of a leaf as (id(leaf), object number); or a small
#: part of a file as (address, bytes that were read, bytes of the file).
Asked = str | tuple[int, int] | tuple[str, int, int]
#: An opened file is worth caching if at least 1/4 of it was read ...
WORTH = 4
#: ... or if it has at most this many bytes: copying all of it costs no more than opening it.
SMALL = 1 << 16


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
        self.got_last = 0  # the last result of `got`

    def count(self, nbytes: int) -> None:
        """Count bytes that were read through a file object."""
        self._read += nbytes

    def count_thread(self, thread: ThreadReads) -> None:
        """Count all bytes a thread reads from now on, since its reads of the file are not seen."""
        self._thread, self._since = thread, thread.nbytes()

    def got(self) -> int:
        """Return the bytes read; called at the end of the sample."""
        unseen = 0 if self._thread is None else self._thread.nbytes() - self._since
        self.got_last = self._read + unseen
        return self.got_last

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


def is_local(address: str) -> bool:
    """Whether an address in the form of `absolute` is a local path."""
    return "://" not in address


def version_at(path: str) -> int:
    """Return the present version of a local file (`cache/storage/version.py`)."""
    now_ns = time.time_ns()
    try:
        return of_stat(os.stat(path), now_ns)  # noqa: PTH116  a third of the time of Path.stat
    except (OSError, ValueError):
        return MISSING


class FoundVersions:
    """Versions in which samples found local files, by address; MISSING if two versions were found.

    >>> versions = FoundVersions()
    >>> for address, of in [("/a", CHANGING), ("/a", 5), ("/a", CHANGING), ("/b", 5), ("/b", 6)]:
    ...     versions.enter(address, of)
    >>> versions.take("/a"), versions.take("/b") == MISSING, versions.take("/a") == UNKNOWN
    (5, True, True)
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        #: (address, status, time) as for `of_stat`. Their versions are computed later, many at
        #: once: between reads from a disk, each line of code takes several times as long.
        self.statuses: deque[tuple[str, os.stat_result, int]] = deque()

    def enter(self, address: str, of: int) -> None:
        """Enter the version in which a sample found a file."""
        known = self._versions.setdefault(address, of)
        if known == CHANGING:
            self._versions[address] = of
        elif of not in {known, CHANGING}:
            self._versions[address] = MISSING

    def take(self, address: str) -> int:
        """Remove and return the version of a file; UNKNOWN if none was entered."""
        while self.statuses:
            found, status, now_ns = self.statuses.popleft()
            self.enter(found, of_stat(status, now_ns))
        return self._versions.pop(address, UNKNOWN)

    def clear(self) -> None:
        self.statuses.clear()
        self._versions.clear()


class ObservedReads:
    """Inside the `with`, records what this thread reads, sample by sample."""

    #: An open within this time did not wait: from the page cache h5py.File takes 100 us, os.open 5.
    QUICK_OPEN_NS = 200_000

    def __init__(
        self,
        whole: bool = False,
        options: Options = None,
        *,
        copies: FileCopies | None = None,
        versions: FoundVersions | None = None,
    ) -> None:
        """Make a record.

        Args:
            whole: whether every file is worth caching, however few of its bytes are read.
            copies: where to keep the bytes read from slow files.
            versions: where to enter the versions of local files.
            options: of remote stores; reads with other ones are not recorded.
        """
        self._whole = whole
        self.options = options
        self.copies = copies
        self._versions = FoundVersions() if versions is None else versions
        self._asked: dict[Asked, PartialRead | None] = {}  # None: cached whatever was read
        self._sleeps = usage().ru_nvcsw  # of this thread at the last call of `waited`
        self._outer: ObservedReads | None = None
        self.thread = ThreadReads()  # counts while this record is active

    def waited(self, took: int) -> bool:
        """Whether the storage made this thread wait in an open of `took` ns.

        True if the open was long, and the thread has slept since the last call.
        """
        if took <= self.QUICK_OPEN_NS:
            return False
        before, self._sleeps = self._sleeps, usage().ru_nvcsw
        return self._sleeps > before

    def end_sample(self) -> list[Asked]:
        """Return what the sample read, each once and in order, and begin the next sample.

        Parts of files are included only if copying the whole file saves time.
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
        """Record a successful read. The daemon would only repeat a failed one."""
        self._asked[asked] = None
        if isinstance(asked, str) and is_local(asked):
            self._versions.enter(asked, version_at(asked))

    def opened(self, path: str, nbytes: int, of: int, waited_ns: int) -> PartialRead | None:
        """Record a file opened in version `of`; the storage made the thread wait `waited_ns`.

        Returns where reads of the file are counted, the same for all its file objects; None if it
        is worth caching however few bytes are read.
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
        """Record a file of at most `SMALL` bytes; `status` and `now_ns` are for `of_stat`."""
        self._versions.statuses.append((path, status, now_ns))
        self._asked[path] = None

    def __enter__(self) -> ObservedReads:
        self._outer, this_thread.observed = this_thread.observed, self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.observed = self._outer
        self.thread.close()


# --- files that C code reads ---------------------------------------------------------------------

#: What C code reads cannot be kept, unless it is read here, whole, and handed to C from memory. So
#: C reads one file. If it waited, and read nearly all of that file, the next 32 are read for it.
#: Then C reads one again, since it may want only parts by now.
_READ_FOR_C = 32
#: Share of a file that counts as nearly all; a copy may lack the rest too (`file_copies`).
_NEARLY_ALL = 15 / 16
MAX_IN_C_NBYTES = 64 << 20


def left_to_c(part: PartialRead | None) -> None:
    """Remember how much of this file C reads, for `read_for_c`."""
    observed = this_thread.observed
    if observed is not None and observed.copies is not None:
        observed.copies.read_in_c, observed.copies.read_here = part, 0


def reads_for_c(copies: FileCopies | None) -> bool:
    """Whether to read the next file in place of C code; counts it."""
    if copies is None or copies.read_in_c is None or copies.read_here >= _READ_FOR_C:
        return False
    last = copies.read_in_c
    if not last.waited_ns or last.got_last < last.nbytes * _NEARLY_ALL:
        return False
    copies.read_here += 1
    return True
