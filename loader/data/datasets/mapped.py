"""Copies scattered records of a file in the page cache out of a mapping by one system call.

One call for each record costs more than the copy does: batches with a transform have 0.82 to 0.9 of
the speed of `np.memmap` with `preadv`, and 0.91 to 0.93 with one call (benchmarks/transforms.py,
`torchs`). The call is `process_vm_readv`. Code that touched the mapping itself would die by SIGBUS
if the file was cut meanwhile, or a disk failed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import address_of
from creel.cache.memory.memfd import mapped
from creel.policies.arrays import Ints
from creel.system.limits import IOV_MAX, may_keep

#: Consecutive batches that must have come from the page cache before a file is mapped. Mapping and
#: unmapping take longer than a batch, so mapping a file that is being written would not pay off.
BATCHES = 16
_MAX_FILES = 16
#: Fewer records than this are read one by one.
_MIN_ROWS = 8
_readv: Any = None
with suppress(ImportError, AttributeError, TypeError):  # Windows, macOS: for imports only
    import resource

    _readv = ctypes.CDLL(None).process_vm_readv
    _size = ctypes.c_size_t
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, ctypes.c_void_p, _size, ctypes.c_void_p, _size, _size)


class MappedFiles:
    """Mappings of those files of a dataset that the page cache has. Thread-safe.

    A mapping is dropped once the file was replaced or written to, or a disk had to be read.
    """

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}
        self._cached: dict[str, int] = {}  # consecutive batches from the page cache

    def read(self, path: str, offsets: Ints, out: NDArray[np.uint8], rows: Ints) -> bool:
        """Fill rows of `out` from a file; on False, the rows are undefined: read them otherwise.

        Args:
            offsets: (k,) bytes in the file before each record.
            out: (n, nbytes), contiguous.
            rows: (k,) rows of `out` to fill.
        """
        mapping = self._mappings.get(path)
        if mapping is None or len(rows) < _MIN_ROWS:
            return False
        before = _waits()
        whole = mapping.copy(offsets, out, rows) and mapping.is_still(path)
        if not whole or _waits() != before:
            self._mappings.pop(path, None)
        return whole

    def saw(self, path: str, fd: int, *, cached: bool) -> None:
        """Note a batch that was read without a mapping; `cached`: all from the page cache."""
        self._cached[path] = batches = self._cached.get(path, 0) + 1 if cached else 0
        full = path in self._mappings or len(self._mappings) >= _MAX_FILES
        if batches < BATCHES or full or _readv is None or not may_keep():
            return
        self._cached[path] = 0
        try:
            self._mappings[path] = _Mapping(fd)
        except (OSError, ValueError):  # no address space; an empty file
            return


class _Mapping:
    """A file in this process's memory."""

    def __init__(self, fd: int) -> None:
        status = os.fstat(fd)
        self._file = _identity(status)
        self._mapping = mapped(fd, status.st_size, mmap.PROT_READ)
        self._address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)

    def is_still(self, path: str) -> bool:
        """Whether the path still names this file, unchanged."""
        try:
            return _identity(os.stat(path)) == self._file  # noqa: PTH116  faster than a Path
        except OSError:
            return False

    def copy(self, offsets: Ints, out: NDArray[np.uint8], rows: Ints) -> bool:
        """See `MappedFiles.read`; also True if bytes came from behind the end of a cut file."""
        nbytes = out.shape[1]
        if int(offsets.max()) + nbytes > len(self._mapping):
            return False
        to = _Vectors(rows * nbytes, address_of(out), nbytes)
        source = _Vectors(offsets, self._address, nbytes)
        for i in range(0, len(rows), IOV_MAX):
            k = min(len(rows) - i, IOV_MAX)
            got = _readv(os.getpid(), to.address(i), k, source.address(i), k, 0)
            if got != k * nbytes:
                return False
        return True


class _Vectors:
    """Places of the same length in memory, in the form of system calls: `struct iovec[k]`."""

    def __init__(self, offsets: Ints, address: int, nbytes: int) -> None:
        """`offsets`: (k,) bytes from `address` on."""
        self._array = np.empty((len(offsets), 2), np.int64)
        np.add(offsets, address, out=self._array[:, 0])
        self._array[:, 1] = nbytes
        self._address = address_of(self._array)

    def address(self, i: int) -> int:
        """Return the address of the i-th entry."""
        return self._address + i * self._array.strides[0]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _waits() -> int:
    """Return how often this thread has waited for a page of a file."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
