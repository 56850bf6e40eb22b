"""Copies of files in shared memory: what a job has read before its dataset was registered.

A loader that learns what its dataset reads keeps what slow storage gave it meanwhile; the daemon
takes each copy once, in place of a read of the source, if the file is still the same.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from creel.cache.memory.memfd import memfd
from creel.cache.storage import version
from creel.errors import MalformedError
from creel.policies.arrays import Ints

COPIES = "creel-copies"  # the name of a memfd for them
#: Copies begin at multiples of this, so that the memory of each can be freed by itself. The first
#: page says in one byte whether they were given to a daemon, and from the next word on its salt.
PAGE_NBYTES = mmap.PAGESIZE
_SALT_AT, _SALT_NBYTES = 8, 16
_FIELDS = 4


class Copies:
    """Copies of some of a manifest's files.

    Args:
        fd: a memfd, closed with this object.
        entries: (k, 4) int64 by ascending row: row of the manifest, first byte in the memfd, bytes,
            version of the file (see `cache/storage/version.py`).
    """

    def __init__(self, fd: int, entries: Ints) -> None:
        self.fd = fd
        self.entries = entries
        weakref.finalize(self, os.close, fd)
        self._left = np.ones(len(entries), np.bool_)
        self._mapped: mmap.mmap | None = None  # all of it, to free what was taken

    @staticmethod
    def parsed(data: bytes, rows: int) -> Ints:
        """The entries whose bytes these are, of a manifest with `rows` rows.

        Raises:
            MalformedError: no such entries.
        """
        if len(data) % (8 * _FIELDS):
            raise MalformedError("copies of files have four numbers each")
        entries = np.frombuffer(data, "<i8").reshape(-1, _FIELDS)
        row, first, nbytes, _ = entries.T
        ends = first.astype(np.float64) + nbytes
        if len(row) and (np.diff(row) <= 0).any():
            raise MalformedError("copies of files in no order")
        if len(row) and (row[0] < 0 or row[-1] >= rows or (first < 0).any() or (nbytes < 0).any()):
            raise MalformedError("copies of no files")
        if (ends >= 2.0**62).any():
            raise MalformedError("copies end below 2**62")
        return entries

    @property
    def salt(self) -> str:
        """Tells a dataset with these copies from any other of the same files.

        So what a client says of a file's bytes is believed in its own job only.
        """
        return os.pread(self.fd, _SALT_NBYTES, _SALT_AT).hex()

    @property
    def given(self) -> bool:
        """Whether a daemon has them."""
        return os.pread(self.fd, 1, 0) == b"\1"

    def give(self) -> bool:
        """Whether they may go to a daemon: once, as it frees what it has taken."""
        with locked(self.fd):
            if self.given:
                return False
            os.pwrite(self.fd, b"\1", 0)
            return True

    def take(self, row: int, path: str, now_ns: int) -> tuple[bytes, int] | None:
        """Bytes and version of a row's file, whose copy is freed; None without a current copy.

        `now_ns`: time.time_ns().
        """
        i = int(np.searchsorted(self.entries[:, 0], row))
        if i == len(self.entries) or self.entries[i, 0] != row or not self._left[i]:
            return None
        self._left[i] = False
        _, first, nbytes, of = self.entries[i].tolist()
        try:
            same = version.of_stat(os.stat(path), now_ns) == of  # noqa: PTH116
            data = _read(self.fd, first, nbytes) if same else b""
            self._free(first, nbytes)
        except (OSError, ValueError):  # its owner has cut the memfd
            return None
        return (data, of) if same and len(data) == nbytes else None

    def _free(self, first: int, nbytes: int) -> None:
        """`free`, by one mapping for all: to map each copy anew takes longer than the rest."""
        if self._mapped is None:
            self._mapped = mmap.mmap(self.fd, 0)
        if nbytes:
            self._mapped.madvise(mmap.MADV_REMOVE, first, nbytes)


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of a memfd for copies, which other processes use, too."""
    import fcntl  # there is none on Windows, where this module is imported, too

    fcntl.lockf(fd, fcntl.LOCK_EX, 1)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1)


def new_copies(suffix: str = "") -> int:
    """The descriptor of a memfd for copies; there is none so far. `suffix`: of its name."""
    fd = memfd(f"{COPIES}{suffix}")
    os.ftruncate(fd, PAGE_NBYTES)
    os.pwrite(fd, os.urandom(_SALT_NBYTES), _SALT_AT)
    return fd


def _read(fd: int, first: int, nbytes: int) -> bytes:
    """Fewer bytes only at the end of the memfd: its owner may have cut it."""
    data = os.pread(fd, nbytes, first)  # all of it: one copy, in memory that is not zeroed before
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), first + len(data))):
        data += more
    return data


def free(fd: int, first: int, nbytes: int) -> None:
    """Free the memory of a copy that begins at a page."""
    if nbytes:
        with mmap.mmap(fd, nbytes, offset=first) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
