"""The arena: one memfd that the daemon fills with objects and every client maps read-only."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import (
    F_GET_SEALS,
    F_SEAL_SHRINK,
    Descriptor,
    mapped,
    sealed_memfd,
)
from creel.cache.memory.pools.runs import pieces
from creel.errors import MalformedError, UnavailableError
from creel.policies.arrays import Ints

_PAGE_BITS = 12  # bits of an address within a page
_PAGE = 1 << _PAGE_BITS
#: Rows of at least this size, in at most this many pages, are touched before they are copied.
_TOUCHED_NBYTES = 1024
_TOUCHED_PAGES = 2048


class Arena:
    """The daemon's side: creates the memory, maps it read-write, owns the descriptors.

    Clients get `fd`, which is read-only and which only root can reopen for writing. `view` is a
    writable memoryview of all `nbytes`, `array` the same as (nbytes,) uint8.
    """

    def __init__(self, descriptor: Descriptor, nbytes: int) -> None:
        """Map a sealed memfd of `nbytes` read-write.

        Raises:
            UnavailableError: this process has no address space for it.
        """
        self._own = descriptor
        self.nbytes = nbytes
        try:
            self._map = mapped(descriptor.fd, nbytes)
        except OSError as e:
            raise UnavailableError(
                f"the memory of {nbytes >> 20} MiB cannot be mapped ({e.strerror}): lower"
                " memory.budget, or raise the limit on address space (ulimit -v)"
            ) from e
        os.fchmod(descriptor.fd, stat.S_IRUSR)
        self._given = Descriptor(
            os.open(f"/proc/self/fd/{descriptor.fd}", os.O_RDONLY | os.O_CLOEXEC)
        )
        self._closed = False
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):  # not on every system
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._written = np.zeros((nbytes >> _PAGE_BITS) + 2, np.bool_)  # pages

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Create an arena of `nbytes` > 0. Clients can neither write to it nor shrink it.

        The system allocates the memory page by page, on first use.
        """
        return cls(Descriptor(sealed_memfd("creel-arena", nbytes)), nbytes)

    @property
    def fd(self) -> int:
        """The descriptor for clients."""
        return self._given.fd

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor that the memory can be written through."""
        return self._own

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes into the arena through its descriptor, not through the mapping.

        This halves the cost for pages that were never touched: the mapping would take a fault for
        each, 1.5 us. Without free memory it raises an error, where a fault would kill the process.

        Raises:
            OSError: ENOSPC or ENOMEM.
        """
        if self._closed:
            raise OSError(errno.EBADF, "the arena is closed")
        done = os.pwrite(self._own.fd, data, offset)
        while done < len(data):
            done += os.pwrite(self._own.fd, data[done:], offset + done)
        if done:  # an empty write touches no page
            self._written[offset >> _PAGE_BITS : -(-(offset + done) >> _PAGE_BITS)] = True

    def release(self, ranges: list[tuple[int, int]]) -> None:
        """Give ranges (start, bytes) of whole pages back to the system; they then read as zeros.

        Raises:
            OSError: this system cannot.
        """
        for start, nbytes in ranges:
            self._map.madvise(mmap.MADV_REMOVE, start, nbytes)
            self._written[start >> _PAGE_BITS : (start + nbytes) >> _PAGE_BITS] = False

    def written(self, offset: Ints, length: Ints) -> bool:
        """Return whether `write` has touched all pages of (k,) ranges [offset, offset + length).

        Such ranges are best written through the mapping, which saves a copy and cannot fail. The
        check takes 9 bytes of memory per page of the longest range, k times.
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
        """Return writable views of the objects at these places; headers of runs must be written."""
        ranges = zip(place.tolist(), length.tolist(), strict=True)
        return [pieces(self.view, at, nbytes) or [] for at, nbytes in ranges]

    def close(self) -> None:
        """Write nothing more. The system frees the memory with this object and the last view.

        A thread that hangs in a read may write later: the descriptors stay open as long as it can.
        """
        self._closed = True
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
            MalformedError: it is smaller than `nbytes`, or could shrink: a read could then kill the
                process.
        """
        if os.fstat(fd).st_size < nbytes or not _seals(fd) & F_SEAL_SHRINK:
            raise MalformedError(f"the descriptor is not a sealed arena of {nbytes} bytes")
        return cls(mapped(fd, nbytes, mmap.PROT_READ), nbytes)

    def rows(self, stride: int) -> NDArray[np.uint8]:
        """Return an (n, stride) view: row i is the record at offset i * stride; no partial row."""
        n = self.nbytes // stride
        return self.array[: n * stride].reshape(n, stride)

    def close(self) -> None:
        """Unmap the arena, or leave that to the last view still in use."""
        _release(self)


class Rows:
    """Copies objects of one size out of the arena."""

    def __init__(self, arena: ArenaView, nbytes: int) -> None:
        """`nbytes`: size of each object, at least 1."""
        self._nbytes = nbytes
        self._rows = arena.rows(nbytes)
        self._arena = arena.array
        # (p, 1) offsets in a row: one byte in each of its pages, wherever the row begins.
        self._pages = np.append(np.arange(0, nbytes, _PAGE), nbytes - 1)[:, None]

    def copy(self, offset: Ints, out: NDArray[np.uint8]) -> bool:
        """Copy objects to (n, nbytes) `out`; return False and copy nothing unless all are rows.

        An object is no row if it is absent, or if the dataset also has objects of other sizes.

        Args:
            offset: (n,) first byte of each object in the arena, or NOWHERE; n > 0.
        """
        row, remainder = np.divmod(offset, self._nbytes)
        if np.count_nonzero(remainder) or row.min() < 0:
            return False
        self.copy_rows(row, out)
        return True

    def copy_rows(self, row: Ints, out: NDArray[np.uint8]) -> None:
        """Copy (n,) rows of the arena to (n, nbytes) `out`; n > 0."""
        if self._nbytes >= _TOUCHED_NBYTES and len(row) * len(self._pages) <= _TOUCHED_PAGES:
            # Each scattered row costs a page-table walk and a memory latency, and copies wait for
            # them one by one. These independent loads overlap: a fifth less time for 3 KB x 256.
            self._arena.take(row * self._nbytes + self._pages, mode="clip")
        self._rows.take(row, 0, out, "clip")  # the function `np.take` costs 1 us more


def _release(holder: Arena | ArenaView) -> None:
    holder.array = np.empty(0, np.uint8)
    with contextlib.suppress(BufferError):  # a view is still in use and keeps the mapping
        holder.view.release()
        holder._map.close()  # noqa: SLF001  (both classes are of this module)


def _seals(fd: int) -> int:
    import fcntl  # missing on Windows, which imports this module but never has an arena

    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:  # not a memfd
        return 0
