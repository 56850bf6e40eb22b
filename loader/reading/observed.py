"""ObservedReads: a record of what a sample reads, and of which files in which versions."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from creel.cache.storage.version import CHANGING, MISSING, of_stat
from creel.loader.reading.this_thread import this_thread

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
_SMALL = 1 << 16


def worth(got: int, nbytes: int) -> bool:
    """Whether a file is worth caching if a sample read `got` of its `nbytes`."""
    return got * WORTH >= nbytes


class PartialRead:
    """How much of a file one sample has read through file objects."""

    def __init__(self, nbytes: int, waited_ns: int = 0) -> None:
        """`nbytes`: size of the file."""
        self.nbytes = nbytes
        self._since = -1  # what the thread had read when its reads began to count
        self._read = 0
        #: How long the storage made the thread wait for the open, in ns.
        self.waited_ns = waited_ns
        self.got_last = 0  # what `got` gave last

    def count(self, nbytes: int) -> None:
        """Count bytes that were read through a file object."""
        self._read += nbytes

    def count_thread(self) -> None:
        """Count all that this thread reads from now on: nobody sees what it reads of the file."""
        self._since = _thread_nbytes()

    def got(self) -> int:
        """Bytes that were read, at the end of the sample."""
        unseen = _thread_nbytes() - self._since if self._since >= 0 else 0
        self.got_last = self._read + unseen
        return self.got_last

    @property
    def copied_sooner(self) -> bool:
        """Whether a copy of the file, at 1 GB/s, takes less time than its open."""
        return self.nbytes <= self.waited_ns


def _thread_nbytes() -> int:
    """Bytes that this thread has read by system calls; -1 where the system does not tell."""
    try:
        fd = os_open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return int(os.read(fd, 40).split()[1])
    finally:
        os.close(fd)


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


def enter_version(versions: dict[str, int], address: str, of: int) -> None:
    """Enter the version of which a sample has found a file; MISSING once it had two.

    >>> versions: dict[str, int] = {}
    >>> for of in (CHANGING, 5, CHANGING, 5):
    ...     enter_version(versions, "/a", of)
    >>> enter_version(versions, "/b", 5)
    >>> enter_version(versions, "/b", 6)
    >>> versions == {"/a": 5, "/b": MISSING}
    True
    """
    known = versions.setdefault(address, of)
    if known == CHANGING:
        versions[address] = of
    elif of not in {known, CHANGING}:
        versions[address] = MISSING


class ObservedReads:
    """Records what this thread reads inside the `with`."""

    def __init__(
        self,
        *,
        whole: bool = False,
        copies: FileCopies | None = None,
        versions: dict[str, int] | None = None,
    ) -> None:
        """Make a record.

        Args:
            whole: whether a file is worth caching however little of it is seen to be read.
            copies: where to keep what is read of slow files.
            versions: where to enter those of local files by address (see `enter_version`).
        """
        self._whole = whole
        self.copies = copies
        self._versions = {} if versions is None else versions
        self._asked: dict[Asked, PartialRead | None] = {}  # None: it was read as a whole
        self._outer: ObservedReads | None = None

    def wanted(self) -> list[Asked]:
        """Each read once, in order; small parts of files only where a copy saves time."""
        found: list[Asked] = []
        for what, part in self._asked.items():
            got = -1 if self._whole or part is None else part.got()
            if part is None or got < 0 or worth(got, part.nbytes):
                found.append(what)
            elif part.copied_sooner and isinstance(what, str):
                found.append((what, got, part.nbytes))
        return found

    def add(self, asked: Asked) -> None:
        """Record a read that succeeded: one that failed would be repeated by the daemon."""
        self._asked[asked] = None
        if isinstance(asked, str) and is_local(asked):
            enter_version(self._versions, asked, version_at(asked))

    def opened(self, path: str, nbytes: int, of: int, waited_ns: int) -> PartialRead | None:
        """Record a file that was opened, and that the storage made the thread wait for `waited_ns`.

        `of`: its version. Returns where its reads are to be counted, one place for all file objects
        of a path; None where the file is worth caching however little is read.
        """
        enter_version(self._versions, path, of)
        if nbytes <= _SMALL:
            self._asked[path] = None
            return None
        part = self._asked.setdefault(path, PartialRead(nbytes))
        if part is not None:
            part.waited_ns = max(part.waited_ns, waited_ns)
        return part

    def __enter__(self) -> ObservedReads:
        self._outer, this_thread.observed = this_thread.observed, self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.observed = self._outer
