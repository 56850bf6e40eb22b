"""The sample arena: one memfd that the daemon fills and every client maps read-only."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import F_GET_SEALS, F_SEAL_SHRINK, sealed_memfd
from creel.cache.memory.runs import pieces
from creel.errors import MalformedError
from creel.policies.arrays import Ints

_PAGE_BITS = 12  # bits of an address within a page
_PAGE = 1 << _PAGE_BITS
#: Rows from this size on, in at most this many pages, are touched before they are copied.
_TOUCHED_NBYTES = 1024
_TOUCHED_PAGES = 2048


class Arena:
    """The daemon's side: creates the memory, maps it read-write, owns the descriptors.

    `fd` is for clients: read-only, and only root can reopen it for writing. `view` is a writable
    memoryview of all `nbytes`, `array` the same as (nbytes,) uint8.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `fd` (a sealed memfd of `nbytes`) read-write and own it from now on."""
        self._fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        os.fchmod(fd, stat.S_IRUSR)
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):  # where this system has it
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._written = np.zeros((nbytes >> _PAGE_BITS) + 2, np.bool_)  # pages

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Create an arena of `nbytes` > 0. Clients can neither write to it nor shrink it.

        Memory is allocated as it is touched.
        """
        fd = sealed_memfd("creel-arena", nbytes)
        try:
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes into the arena through its descriptor, not through the mapping.

        Half the cost for memory that was never touched: the mapping would take a fault per page,
        1.5 us each. And a machine out of memory raises an error here, where a fault would kill.

        Raises:
            OSError: ENOSPC or ENOMEM.
        """
        done = os.pwrite(self._fd, data, offset)
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
        if done:  # an empty write touches no page, not even where it points into one
            self._written[offset >> _PAGE_BITS : -(-(offset + done) >> _PAGE_BITS)] = True

    def written(self, offset: Ints, length: Ints) -> bool:
        """Whether `write` has touched all pages of these (k,) ranges [offset, offset + length).

        Such ranges are best written through the mapping, which saves a copy and cannot fail. Takes
        9 bytes per page of the longest range, k times.
        """
        first, last = offset >> _PAGE_BITS, -(-(offset + length) >> _PAGE_BITS) - 1
        if not self._written[first].all():
            return False
        max_pages = int((last - first).max(initial=0)) + 1
        pages = np.minimum(
            first[:, None] + np.arange(1, max_pages), np.maximum(last, first)[:, None]
        )
        return bool(self._written[pages].all())

    def parts(self, place: Ints, length: Ints) -> list[list[memoryview]]:
        """Writable views of the objects at these places (see `runs`), whose headers are there."""
        found = zip(place.tolist(), length.tolist(), strict=True)
        return [pieces(self.view, at, nbytes) or [] for at, nbytes in found]

    def close(self) -> None:
        """Close the descriptors; the memory is freed with its last mapping and view."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._fd)
            self.fd = self._fd = -1
        _release(self)


class ArenaView:
    """A client's side: the whole arena, read-only. `view` and `array` as in `Arena`."""

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        """Use `attach`."""
        self.nbytes = nbytes
        self._map = mapping
        self.view = memoryview(mapping)
        self.array: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> ArenaView:
        """Map the arena behind `fd`; the caller keeps (and closes) `fd`.

        Raises:
            MalformedError: it is smaller than `nbytes`, or could shrink, so that a read could kill.
        """
        if os.fstat(fd).st_size < nbytes or not _seals(fd) & F_SEAL_SHRINK:
            raise MalformedError(f"the descriptor is not a sealed arena of {nbytes} bytes")
        return cls(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), nbytes)

    def rows(self, stride: int) -> NDArray[np.uint8]:
        """(n, stride) view: row i is the record at offset i * stride; the rest is cut off."""
        n = self.nbytes // stride
        return self.array[: n * stride].reshape(n, stride)

    def close(self) -> None:
        """Unmap, or leave that to the last view still in use."""
        _release(self)


class Rows:
    """Copies objects of one size out of the arena."""

    def __init__(self, arena: ArenaView, nbytes: int) -> None:
        """`nbytes`: size of each object, 1 or more."""
        self._nbytes = nbytes
        self._rows = arena.rows(nbytes)
        self._arena = arena.array
        # (p, 1): one byte in every page of a row, wherever it begins.
        self._pages = np.append(np.arange(0, nbytes, _PAGE), nbytes - 1)[:, None]

    def copy(self, offset: Ints, out: NDArray[np.uint8]) -> bool:
        """Copy objects to (n, nbytes) `out`; False, with nothing copied, unless all are rows.

        They are not rows where one is absent, or where a dataset has some of other sizes.

        Args:
            offset: (n,) first byte of each in the arena, or NOWHERE; n > 0.
        """
        row, rest = np.divmod(offset, self._nbytes)
        if np.count_nonzero(rest) or row.min() < 0:
            return False
        self.copy_rows(row, out)
        return True

    def copy_rows(self, row: Ints, out: NDArray[np.uint8]) -> None:
        """Copy (n,) rows of the arena to (n, nbytes) `out`; n > 0."""
        if self._nbytes >= _TOUCHED_NBYTES and len(row) * len(self._pages) <= _TOUCHED_PAGES:
            # Scattered rows cost a page-table walk and a memory latency each, one after the other
            # as they are copied. Independent loads overlap: a fifth less time for 3 KB x 256.
            self._arena.take(row * self._nbytes + self._pages, mode="clip")
        self._rows.take(row, 0, out, "clip")  # the function `np.take` costs 1 us more


def _release(holder: Arena | ArenaView) -> None:
    holder.array = np.empty(0, np.uint8)
    with contextlib.suppress(BufferError):  # a view is still in use: it keeps the mapping
        holder.view.release()
        holder._map.close()  # noqa: SLF001  (both classes are of this module)


def _seals(fd: int) -> int:
    import fcntl  # Windows has none; it imports this module but never has an arena

    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:  # not a memfd
        return 0
