"""Files of which pages are read into the page cache, block by block."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import Descriptor, mapped
from creel.loader.data.maps.mappings import MappedRange
from creel.loader.data.page_cache import cached_at
from creel.system import limits

#: Files are read in whole blocks of this size, as a fault reads them: it is the kernel's readahead
#: by default, to which it cuts what it is asked for (`mm/readahead.c`, `force_page_cache_ra`).
BLOCK_NBYTES = 1 << 17
#: Descriptors that are open at once, if there are so many.
_MAX_FILES = 256
#: `madvise` of Linux 5.14 and later, which Python does not name: fault pages in, and wait.
_POPULATE_READ = 22
_libc = ctypes.CDLL(None)
#: Of older ones, what is read is written here by all threads, and read by none.
_scratch = bytearray(BLOCK_NBYTES)


class FileBlock(NamedTuple):
    """The bytes from number * BLOCK_NBYTES on of a file, as many or as far as it has them."""

    path: str
    number: int


class PageFiles:
    """Files of which pages are read, opened as needed; those that cannot be opened are empty.

    They stay open from epoch to epoch.
    """

    def __init__(self) -> None:
        self.recent = 0  # how many of the blocks asked for last are taken to be there still
        self._opened: OrderedDict[str, _PageFile] = OrderedDict()  # used last comes last
        self.begin()

    def begin(self) -> None:
        """Begin an epoch: nothing is known to be in memory, and files may have been replaced."""
        for path, file in list(self._opened.items()):
            if not file.is_still():
                del self._opened[path]
            file.asked[:] = 0
        self._seen = set(self._opened)
        self.nbytes = sum(file.nbytes for file in self._opened.values())  # of all files so far
        self._asked = 0

    def blocks(self, ranges: list[MappedRange]) -> Iterator[FileBlock]:
        """Yield the blocks that have these bytes; some more than once."""
        for path, offset, nbytes in ranges:
            end = min(offset + nbytes, self._file(path).nbytes)
            if offset < end:
                for number in range(offset // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
                    yield FileBlock(path, number)

    def ask(self, block: FileBlock) -> bool:
        """Ask the kernel to read a block; False: memory has it or will soon, or nobody ever can."""
        file, at = self._file(block.path), block.number * BLOCK_NBYTES
        if block.number >= len(file.asked):  # the file has been cut
            return False
        before = int(file.asked[block.number])
        if before and self._asked - before < self.recent:
            return False
        self._asked += 1
        file.asked[block.number] = self._asked
        last = min(at + BLOCK_NBYTES, file.nbytes) - 1
        with suppress(OSError):
            if cached_at(file.number, last):
                return False
        try:
            os.posix_fadvise(file.number, at, BLOCK_NBYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return False
        return True

    def read(self, block: FileBlock) -> None:
        """Wait until memory has a block."""
        file, at = self._file(block.path), block.number * BLOCK_NBYTES
        with suppress(OSError):
            if not file.populated(at, min(BLOCK_NBYTES, file.nbytes - at)):
                os.preadv(file.number, [_scratch], at)

    def resident(self, part: MappedRange) -> bool:
        """Whether memory has the first and the last byte.

        Raises:
            OSError: the kernel does not say, as of another person's files on NFS or FUSE.
        """
        file = self._file(part.path)
        if not 0 < part.nbytes <= file.nbytes - part.offset:
            return True
        return all(file.resident(at) for at in {part.offset, part.offset + part.nbytes - 1})

    def _file(self, path: str) -> _PageFile:
        file = self._opened.get(path)
        if file is None:
            if len(self._opened) >= _MAX_FILES or (self._opened and limits.descriptors_run_out()):
                self._opened.popitem(last=False)
            file = self._opened[path] = _PageFile(path)
            if path not in self._seen:
                self._seen.add(path)
                self.nbytes += file.nbytes
        self._opened.move_to_end(path)
        return file

    def close(self) -> None:
        self._opened.clear()


class _PageFile:
    """A regular file, opened; one that is no such file, or cannot be opened, is empty.

    nbytes: its size. asked: (blocks,) the number of the request for each block, 0 for none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._own, self._status = _opened(path)
        self.number = -1 if self._own is None else self._own.fd  # of the descriptor
        self.nbytes = 0 if self._status is None else self._status.st_size
        self.asked = np.zeros(-(-self.nbytes // BLOCK_NBYTES), np.uint32)
        self._memory: NDArray[np.uint8] | None = None

    def is_still(self) -> bool:
        """Whether its path stands for this file, of this size."""
        with suppress(OSError, ValueError):
            now, then = os.stat(self.path), self._status  # noqa: PTH116  a string
            return then is not None and os.path.samestat(now, then) and now.st_size == self.nbytes
        return False

    def resident(self, at: int) -> bool:
        """Whether memory has a byte of the file."""
        try:
            return cached_at(self.number, at)
        except OSError:  # a file system that does not say: the kernel does, to whom may write
            if not (os.access(self.path, os.W_OK) or os.fstat(self.number).st_uid == os.geteuid()):
                raise
            there = ctypes.c_ubyte(1)
            if self._of_mapping("mincore", at - at % mmap.PAGESIZE, 1, ctypes.byref(there)):
                raise
            return bool(there.value & 1)

    def populated(self, at: int, nbytes: int) -> bool:
        """Wait until memory has these bytes; False if this kernel cannot.

        Of a file without a page cache (direct I/O) only faults leave pages for who maps it.
        """
        if self._of_mapping("madvise", at, nbytes, _POPULATE_READ):
            return False
        self._of_mapping("madvise", at, nbytes, mmap.MADV_DONTNEED)  # not this process's memory
        return True

    def _of_mapping(self, name: str, at: int, nbytes: int, argument: Any) -> int:
        """Return what a function of libc returns for a part of a mapping of the file; -1 if none.

        The mapping is one and stays: with each new one, FUSE drops the pages of such a file.
        """
        if self._memory is None and self.nbytes and limits.may_map(self.nbytes):
            with suppress(OSError, ValueError):
                memory = mapped(self.number, self.nbytes, mmap.PROT_READ)
                self._memory = np.frombuffer(memory, np.uint8)
        if self._memory is None:
            return -1
        address = ctypes.c_void_p(int(self._memory.ctypes.data) + at)
        return int(getattr(_libc, name)(address, ctypes.c_size_t(nbytes), argument))


def _opened(path: str) -> tuple[Descriptor | None, os.stat_result | None]:
    """Open a regular file; (None, None) if there is none."""
    with suppress(OSError, ValueError):
        # A pipe without a writer would wait.
        own = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        status = os.fstat(own.fd)
        if stat.S_ISREG(status.st_mode):
            # Only what is asked for is read, without the kernel's own readahead.
            os.posix_fadvise(own.fd, 0, 0, os.POSIX_FADV_RANDOM)
            return own, status
    return None, None
