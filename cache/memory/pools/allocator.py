"""Allocation of the arena's bytes. Pure: it computes offsets and never touches the memory.

One *pool* per dataset uses an `Allocator`. If all objects have one known length, the pool is a
`FixedPool`: records lie dense in slabs, at multiples of the exact record length, so that a reader
gathers rows with one `np.take`; alloc and free work on whole batches. Other datasets have a
`PagedPool`: an object takes the smallest free range that holds it (best fit), rounded up to pages,
or several ranges if no single one is large enough (`runs`). Fragmentation thus wastes no room, and
objects never move; tests/unit/cache/test_allocator.py measures the number of runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.fixed_pool import FixedPool
from creel.cache.memory.pools.free_ranges import NOWHERE, FreeRanges, must
from creel.cache.memory.pools.paged_pool import PagedPool
from creel.cache.memory.pools.pool import ObjectPool
from creel.cache.memory.pools.runs import Runs
from creel.errors import IllegalEventError
from creel.policies.arrays import Ints

#: (n,) starts and (n,) sizes, in bytes.
Ranges: TypeAlias = tuple[Ints, Ints]

NONE: Ints = np.empty(0, np.int64)

_PAGE_SHARE = 512  # pages are at most mean / 512: objects waste half a page, or 0.1 %, on average
_PAGES = (64, 1 << 16)  # smallest (a cache line) and largest page, in bytes
#: The system takes memory back in pages of this size, in bytes.
SYSTEM_PAGE = 4096


class Lengths(NamedTuple):
    """Summary of the lengths of a dataset's objects, in bytes.

    Of `objects` objects, `known` have a known length. These have `nbytes` together, and between
    `min_nbytes` and `max_nbytes` each (0 if none is known).
    """

    objects: int
    known: int
    nbytes: int
    min_nbytes: int
    max_nbytes: int

    @classmethod
    def of(cls, length: NDArray[np.integer], count: Ints) -> Lengths:
        """Summarize `count[i]` objects of `length[i]` bytes each (negative: unknown).

        >>> Lengths.of(np.array([5, -1, 3]), np.array([1, 1, 1]))
        Lengths(objects=3, known=2, nbytes=8, min_nbytes=3, max_nbytes=5)
        >>> Lengths.of(np.array([5, 7]), np.array([1000, 0]))
        Lengths(objects=1000, known=1000, nbytes=5000, min_nbytes=5, max_nbytes=5)
        """
        known_lengths = (length >= 0) & (count > 0)
        of_each, counts_known = length[known_lengths].astype(np.int64), count[known_lengths]
        min_nbytes, max_nbytes = (
            (int(of_each.min()), int(of_each.max())) if len(of_each) else (0, 0)
        )
        known, nbytes = int(counts_known.sum()), int((of_each * counts_known).sum())
        return cls(int(count.sum()), known, nbytes, min_nbytes, max_nbytes)

    @property
    def only(self) -> int | None:
        """The length of all objects, if all lengths are known and equal; else None."""
        same = 0 < self.known == self.objects and self.min_nbytes == self.max_nbytes
        return self.min_nbytes if same else None


class Allocator:
    """The bytes [0, nbytes) of one arena, allocated by pools.

    >>> space = Allocator(10_000)
    >>> pool = space.pool(Lengths.of(np.array([3_000]), np.array([50])))
    >>> pool.alloc(np.full(4, 3_000)).tolist()
    [0, 3000, 6000, -1]
    >>> space.free_bytes
    1000
    """

    def __init__(self, nbytes: int, kept: Mapping[str, Ranges] | None = None) -> None:
        """Begin with all bytes free, except for the ranges `kept` for each of some datasets.

        Raises:
            IllegalEventError: these overlap, or lie outside.
        """
        self.nbytes = nbytes
        self.extents = FreeRanges(nbytes)
        self._kept = dict(kept or {})
        if self._kept:
            self.extents = _around(self._kept.values(), nbytes)
        self.withheld = 0  # bytes out of use
        self._withheld: list[tuple[int, int]] = []  # their ranges: start, bytes
        self._pools: list[ObjectPool] = []

    def pool(self, lengths: Lengths, page: int = 0) -> ObjectPool:
        """Make a pool for a dataset whose objects have these lengths.

        page: of a pool of objects of any length; 0: what suits their mean.
        """
        pool: ObjectPool
        if lengths.only is not None:
            pool = FixedPool(self, max(lengths.only, 1), lengths.objects)
        else:
            page = page or page_size(lengths.nbytes / max(lengths.known, 1))
            pool = PagedPool(self, page)
        self._pools.append(pool)
        return pool

    @property
    def pools(self) -> int:
        return len(self._pools)

    @property
    def usable(self) -> int:
        """Bytes that objects may occupy."""
        return self.nbytes - self.withheld

    @property
    def free_bytes(self) -> int:
        """Bytes that no object occupies; they may be in pieces, or in slabs of a pool."""
        kept = sum(int(size.sum()) for _, size in self._kept.values())
        return self.usable - kept - sum(pool.used for pool in self._pools)

    def adopt(self, name: str, pool: ObjectPool, places: Ints, nbytes: Ints, runs: Runs) -> None:
        """Make the ranges kept for a dataset the ranges of its empty pool, with objects in them.

        Args:
            places, nbytes: (k,) of the objects; `runs`: of those that consist of several.

        Raises:
            IllegalEventError: the ranges are not those of the objects (nothing was changed).
        """
        pool.adopt(self._kept.get(name, (NONE, NONE)), places, nbytes, runs)
        self._kept.pop(name, None)

    def abandon(self, name: str) -> None:
        """Free the ranges kept for a dataset, if there are any."""
        starts, sizes = self._kept.pop(name, (NONE, NONE))
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            self.extents.put(start, size)

    def withhold(self, nbytes: int) -> list[tuple[int, int]]:
        """Take free space out of use, in whole pages of the system; return (start, bytes) of each.

        These are `nbytes` rounded down, or less if there is not as much free space.
        """
        for pool in self._pools:
            pool.trim()
        taken: list[tuple[int, int]] = []
        while nbytes >= SYSTEM_PAGE:
            start, size = self.extents.take_most(nbytes - nbytes % SYSTEM_PAGE, SYSTEM_PAGE)
            if start == NOWHERE:
                break
            taken.append((start, size))
            nbytes -= size
        self._withheld += taken
        self.withheld += sum(size for _, size in taken)
        return taken

    def restore(self, nbytes: int) -> None:
        """Take `nbytes` or a little more of what was withheld back into use."""
        while nbytes > 0 and self._withheld:
            start, size = self._withheld.pop()
            part = min(-(-nbytes // SYSTEM_PAGE) * SYSTEM_PAGE, size)
            if part < size:
                self._withheld.append((start, size - part))
            self.extents.put(start + size - part, part)
            self.withheld -= part
            nbytes -= part

    def trim(self, asking: ObjectPool) -> None:
        """Take empty slabs back from all pools except the one that needs room."""
        for pool in self._pools:
            if pool is not asking:
                pool.trim()

    def discard(self, pool: ObjectPool) -> None:
        """Remove an empty pool.

        Raises:
            IllegalEventError: the pool still holds objects.
        """
        if pool.used:
            raise IllegalEventError(f"a pool that holds {pool.used} bytes cannot be removed")
        pool.trim()
        self._pools.remove(pool)

    def check(self) -> None:
        """Raise IllegalEventError unless each byte has exactly one owner and all sums are right."""
        self.extents.check()
        withheld = np.array(self._withheld, np.int64).reshape(-1, 2)
        must(int(withheld[:, 1].sum()) == self.withheld, "withheld bytes do not add up")
        parts = [self.extents.sorted(), (withheld[:, 0], withheld[:, 1])]
        parts += [*(pool.ranges() for pool in self._pools), *self._kept.values()]
        owner = np.repeat(np.arange(len(parts)), [len(p[0]) for p in parts])
        start = np.concatenate([p[0] for p in parts])
        size = np.concatenate([p[1] for p in parts])
        order = np.argsort(start, kind="stable")
        start, size, owner = start[order], size[order], owner[order]
        end = np.append(start[1:], self.nbytes)
        must(not len(start) or start[0] == 0, "the first bytes have no owner")
        many = size < 0  # runs of a paged pool extend to the start of the next range
        size = np.where(many, end - start, size)
        must((start + size == end).all(), "ranges overlap or leave a gap")
        for i, pool in enumerate(self._pools, 2):
            pool.check(size[owner == i])


def _around(kept: Iterable[Ranges], nbytes: int) -> FreeRanges:
    """Return [0, nbytes) without these ranges, of which none is empty."""
    start, size = map(np.concatenate, zip(*kept, strict=True))
    order = start.argsort()
    first, end = start[order], (start + size)[order]
    inside = (start >= 0) & (start <= nbytes) & (size <= nbytes)  # so that their sums are exact
    must(bool(inside.all()), "a kept range lies beyond the space")
    must(bool((size > 0).all()), "an empty range is kept")
    must(bool((first >= np.append(0, end)[:-1]).all()), "kept ranges overlap")
    must(int(end.max(initial=0)) <= nbytes, "a kept range ends beyond the space")
    free = FreeRanges(0)
    gap = np.append(0, end), np.append(first, nbytes)
    some = gap[1] > gap[0]
    for a, b in zip(gap[0][some].tolist(), gap[1][some].tolist(), strict=True):
        free.put(a, b - a)
    return free


def is_page(nbytes: int) -> bool:
    """Return whether pages of a pool may have this size.

    >>> is_page(128), is_page(96), is_page(32), is_page(1 << 17)
    (True, False, False, False)
    """
    low, high = _PAGES
    return low <= nbytes <= high and nbytes.bit_count() == 1


def page_size(mean: float) -> int:
    """Return the page size, a power of two, for objects of `mean` bytes.

    >>> page_size(110_000), page_size(0), page_size(1e12)
    (128, 64, 65536)
    """
    low, high = _PAGES
    return min(max(1 << max(int(mean / _PAGE_SHARE).bit_length() - 1, 0), low), high)
