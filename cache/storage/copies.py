"""Copies of files in shared memory, which a job has read before its dataset was registered.

While a loader learns which files its dataset reads, it keeps copies of those from slow storage. The
daemon takes each copy once, instead of a read of the source, if the file has not changed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from creel.cache.memory.memfd import Descriptor, mapped, memfd
from creel.cache.storage import version
from creel.errors import MalformedError
from creel.policies.arrays import Ints

COPIES = "creel-copies"  # the name of a memfd for copies
#: Copies begin at multiples of this, so that the memory of each can be freed separately. The first
#: page has one byte that says whether a daemon has the copies, and the salt from the next word on.
PAGE_NBYTES = mmap.PAGESIZE
_SALT_AT, _SALT_NBYTES = 8, 16
_FIELDS = 4


class Copies:
    """Copies of some of a manifest's files.

    Args:
        own: a memfd.
        entries: (k, 4) int64 by ascending row: row of the manifest, first byte in the memfd, bytes,
            version of the file (see `cache/storage/version.py`).
    """

    def __init__(self, own: Descriptor, entries: Ints) -> None:
        self._own = own
        self.entries = entries
        self._left = np.ones(len(entries), np.bool_)
        self._mapped: mmap.mmap | None = None  # the whole memfd, to free copies that were taken

    @property
    def fd(self) -> int:
        return self._own.fd

    @staticmethod
    def parsed(data: bytes, rows: int) -> Ints:
        """Parse and check the bytes of entries for a manifest with `rows` rows.

        Raises:
            MalformedError: the entries are not valid.
        """
        if len(data) % (8 * _FIELDS):
            raise MalformedError("copies of files have four numbers each")
        entries = np.frombuffer(data, "<i8").reshape(-1, _FIELDS)
        row, first, nbytes, _ = entries.T
        ends = first.astype(np.float64) + nbytes
        if len(row) and (np.diff(row) <= 0).any():
            raise MalformedError("copies of files must be in the order of rows")
        if len(row) and (row[0] < 0 or row[-1] >= rows or (first < 0).any() or (nbytes < 0).any()):
            raise MalformedError("a copy of a row that does not exist, or of a negative range")
        if (ends >= 2.0**62).any():
            raise MalformedError("copies must end below 2**62")
        return entries

    @property
    def salt(self) -> str:
        """Random text that makes a dataset with these copies differ from others of the same files.

        Only the client's own job trusts the bytes that the client has copied.
        """
        return os.pread(self.fd, _SALT_NBYTES, _SALT_AT).hex()

    @property
    def given(self) -> bool:
        """Whether the copies were given to a daemon."""
        return os.pread(self.fd, 1, 0) == b"\1"

    def give(self) -> bool:
        """Mark the copies as given; return False if another daemon has them, which frees them."""
        with locked(self.fd):
            if self.given:
                return False
            os.pwrite(self.fd, b"\1", 0)
            return True

    def take(self, row: int, path: str, now_ns: int) -> tuple[bytes, int] | None:
        """Return bytes and version of a row's file and free the copy; None without a current copy.

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
        except (OSError, ValueError):  # the owner has truncated the memfd
            return None
        return (data, of) if same and len(data) == nbytes else None

    def _free(self, first: int, nbytes: int) -> None:
        """Do as `free`, with one mapping for all: to map each copy takes longer than the rest."""
        if self._mapped is None:
            self._mapped = mapped(self.fd, os.fstat(self.fd).st_size)
        if nbytes:
            self._mapped.madvise(mmap.MADV_REMOVE, first, nbytes)


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of a memfd for copies, which other processes use as well."""
    import fcntl  # missing on Windows, where this module is imported as well

    fcntl.lockf(fd, fcntl.LOCK_EX, 1)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1)


def new_copies(suffix: str = "") -> Descriptor:
    """Create a memfd for copies, without any. `suffix`: of its name."""
    own = Descriptor(memfd(f"{COPIES}{suffix}"))
    os.ftruncate(own.fd, PAGE_NBYTES)
    os.pwrite(own.fd, os.urandom(_SALT_NBYTES), _SALT_AT)
    return own


def _read(fd: int, first: int, nbytes: int) -> bytes:
    """Read a copy; returns fewer bytes only if the owner has truncated the memfd."""
    data = os.pread(fd, nbytes, first)  # mostly all bytes, in one copy to memory not zeroed before
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), first + len(data))):
        data += more
    return data


def free(fd: int, first: int, nbytes: int) -> None:
    """Free the memory of a copy that begins at a page."""
    if nbytes:
        with mapped(fd, nbytes, offset=first) as mapping:
            mapping.madvise(mmap.MADV_REMOVE)
