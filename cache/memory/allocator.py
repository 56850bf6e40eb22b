"""Allocation of the arena's bytes. Pure: numbers in, offsets out; it never touches the memory.

An `Allocator` is shared by one *pool* per dataset. Where all objects of a dataset have one known
length, its pool is *fixed*: records lie dense in slabs, at multiples of the exact record length, so
that a reader gathers rows with one `np.take`; alloc and free work on whole batches. Any other pool
is *paged*: an object takes the smallest free range that holds it (best fit), rounded up to pages,
or several ranges where no single one does (`runs`). So fragmentation loses no room, and nothing
ever moves; tests/unit/test_allocator.py has how many runs that makes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import ABSENT, FreeRanges, Sizes, must
from creel.cache.memory.runs import HEADER, Runs, chained
from creel.errors import IllegalEventError
from creel.policies.masks import every

_SLAB_NBYTES = 64 << 20  # making a slab takes about 20 us: nothing beside reading 64 MiB
_SLABS = 64  # at least this many slabs in a space, so that several pools can share a small one
_PAGE_SHARE = 512  # pages are at most mean / 512: an object wastes half a page, 0.1 %, on average
_PAGES = (64, 1 << 16)  # smallest (a cache line) and largest page, in bytes

#: Most runs of one object: each takes 3 us here and 1 us of a reader. An object that would need
#: more waits for others to leave.
_MAX_RUNS = 1024
#: From this many rooms on, join them before freeing: one by one, a million would take seconds.
_MANY = 4096

_FREE, _USED = 1, 2


def _empty() -> Sizes:
    return np.empty(0, np.int64)


def _joined(offsets: Sizes, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Return the ranges, ascending, with touching ones joined."""
    order = offsets.argsort()
    offsets, sizes = offsets[order], sizes[order]
    first = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1]))
    return offsets[first], np.add.reduceat(sizes, first)


class Lengths(NamedTuple):
    """Summary of the lengths of a dataset's objects, in bytes.

    `objects` in all, `known` of them with a known length, `nbytes` together, from
    `min_nbytes` to `max_nbytes` (0 where none is known).
    """

    objects: int
    known: int
    nbytes: int
    min_nbytes: int
    max_nbytes: int

    @classmethod
    def of(cls, length: NDArray[np.integer], count: NDArray[np.integer] | None = None) -> Lengths:
        """Summarize `count[i]` objects of `length[i]` bytes each (negative: unknown).

        >>> Lengths.of(np.array([5, -1, 3]))
        Lengths(objects=3, known=2, nbytes=8, min_nbytes=3, max_nbytes=5)
        >>> Lengths.of(np.array([5, 7]), np.array([1000, 0]))
        Lengths(objects=1000, known=1000, nbytes=5000, min_nbytes=5, max_nbytes=5)
        """
        counts = np.ones(len(length), np.int64) if count is None else np.asarray(count, np.int64)
        known_lengths = (length >= 0) & (counts > 0)
        of_each, counts_known = length[known_lengths].astype(np.int64), counts[known_lengths]
        min_nbytes, max_nbytes = (
            (int(of_each.min()), int(of_each.max())) if len(of_each) else (0, 0)
        )
        known, nbytes = int(counts_known.sum()), int((of_each * counts_known).sum())
        return cls(int(counts.sum()), known, nbytes, min_nbytes, max_nbytes)


class ObjectPool(Protocol):
    """One dataset's part of a space; places (see `runs`) and sizes are (k,) int64."""

    same_size: bool  # whether all rooms have one size
    used: int  # bytes of all rooms
    record: int  # bytes of a room where all have one size, or 0
    page: int  # rooms are multiples of it

    def alloc(self, nbytes: Sizes) -> Sizes:
        """Places for objects of these sizes; ABSENT where there is no room."""

    def rounded(self, nbytes: Sizes) -> Sizes:
        """Bytes of the rooms for objects of these sizes."""

    def free(self, places: Sizes, nbytes: Sizes) -> int:
        """Free objects of these sizes; bytes of their rooms."""

    def runs(self, places: Sizes) -> Runs:
        """The runs of those objects that are in several."""

    def rooms(self, places: Sizes, nbytes: Sizes) -> tuple[Sizes, Sizes]:
        """Starts and sizes of all ranges that these objects take up, in any order."""

    def ranges(self) -> tuple[Sizes, Sizes]:
        """Starts and sizes of its ranges (-1: up to where the next begins)."""

    def clear(self) -> bool:
        """Free everything at once; return whether that is possible."""

    def trim(self) -> None:
        """Return unused slabs to the space."""

    def check(self, held: Sizes) -> None:
        """Raise IllegalEventError unless the `held` bytes of all ranges add up."""


class Allocator:
    """The bytes [0, nbytes) of one arena, allocated by pools.

    >>> space = Allocator(10_000)
    >>> pool = space.pool(Lengths.of(np.full(50, 3_000)))
    >>> pool.alloc(np.full(4, 3_000)).tolist()
    [0, 3000, 6000, -1]
    >>> space.free_bytes
    1000
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.extents = FreeRanges(nbytes)
        self._pools: list[ObjectPool] = []

    def pool(self, lengths: Lengths) -> ObjectPool:
        """Make a pool for a dataset whose objects have these lengths."""
        pool: ObjectPool
        if (
            lengths.known
            and lengths.known == lengths.objects
            and lengths.min_nbytes == lengths.max_nbytes
        ):
            pool = FixedPool(self, max(lengths.min_nbytes, 1))
        else:
            pool = PagedPool(self, page_size(lengths.nbytes / max(lengths.known, 1)))
        self._pools.append(pool)
        return pool

    @property
    def pools(self) -> int:
        """Number of pools that share this space."""
        return len(self._pools)

    @property
    def free_bytes(self) -> int:
        """Bytes that no object holds. They may be in pieces, or in a slab of one pool."""
        return self.nbytes - sum(pool.used for pool in self._pools)

    def trim(self, asking: ObjectPool) -> None:
        """Take empty slabs back from all pools except the one that needs room."""
        for pool in self._pools:
            if pool is not asking:
                pool.trim()

    def discard(self, pool: ObjectPool) -> None:
        """Remove an empty pool.

        Raises:
            IllegalEventError: it still holds objects.
        """
        if pool.used:
            raise IllegalEventError(f"a pool that holds {pool.used} bytes cannot be removed")
        pool.trim()
        self._pools.remove(pool)

    def check(self) -> None:
        """Raise IllegalEventError unless each byte has exactly one owner and the sums are right."""
        self.extents.check()
        parts = [self.extents.sorted(), *(pool.ranges() for pool in self._pools)]
        owner = np.repeat(np.arange(len(parts)), [len(p[0]) for p in parts])
        start = np.concatenate([p[0] for p in parts])
        size = np.concatenate([p[1] for p in parts])
        order = np.argsort(start, kind="stable")
        start, size, owner = start[order], size[order], owner[order]
        end = np.append(start[1:], self.nbytes)
        must(not len(start) or start[0] == 0, "the first bytes have no owner")
        many = size < 0  # runs of a paged pool: up to where the next range begins
        size = np.where(many, end - start, size)
        must((start + size == end).all(), "ranges overlap or leave a gap")
        for i, pool in enumerate(self._pools, 1):
            pool.check(size[owner == i])


def page_size(mean: float) -> int:
    """Page for objects of `mean` bytes: a power of two.

    >>> page_size(110_000), page_size(0), page_size(1e12)
    (128, 64, 65536)
    """
    low, high = _PAGES
    return min(max(1 << max(int(mean / _PAGE_SHARE).bit_length() - 1, 0), low), high)


class FixedPool:
    """Records of one length, dense in slabs, at offsets that are multiples of that length."""

    same_size = True
    page = 1

    def __init__(self, space: Allocator, record: int) -> None:
        self.record = record
        self.used = 0  # bytes
        self._space = space
        self._slab = max(min(_SLAB_NBYTES, space.nbytes // _SLABS) // record, 1)
        self._state = np.zeros(space.nbytes // record, np.uint8)  # zeroed lazily by the system
        self._stack = np.empty(0, np.int64)  # free records; the last is allocated first
        self._top = 0
        self._first = _empty()  # slabs: first record, ascending; records; records in use
        self._count = _empty()
        self._busy = _empty()

    def alloc(self, nbytes: Sizes) -> Sizes:
        """(k,) offsets for objects of these sizes; ABSENT where there is no room (the last ones).

        An object longer than the record is ABSENT, too; a shorter one takes a whole record.
        """
        out = np.full(len(nbytes), ABSENT, np.int64)
        where = np.flatnonzero(np.asarray(nbytes) <= self.record)
        if self._top < len(where):
            self._grow(len(where) - self._top)
        k = min(self._top, len(where))
        if k:
            records = self._stack[self._top - k : self._top][::-1]
            self._top -= k
            self._state[records] = _USED
            self._busy += self._per_slab(records)
            self.used += k * self.record
            out[where[:k]] = records * self.record
        return out

    def rounded(self, nbytes: Sizes) -> Sizes:
        """Return the same sizes: a room is as long as its object."""
        return nbytes

    def runs(self, places: Sizes) -> Runs:  # noqa: ARG002
        """All records are in one piece."""
        return {}

    def rooms(self, places: Sizes, nbytes: Sizes) -> tuple[Sizes, Sizes]:
        """Return the same: each object takes up its own record."""
        return places, nbytes

    def free(self, places: Sizes, nbytes: Sizes) -> int:  # noqa: ARG002  (as in ObjectPool)
        """Free objects; bytes of their records.

        Raises:
            IllegalEventError: an offset that is not in use (nothing was freed).
        """
        if len(places) >= _MANY:  # the rest is several times as fast in order
            places = np.sort(places)
        records, rest = np.divmod(np.asarray(places, np.int64), self.record)
        self._check_in_use(records, rest)
        self._state[records] = _FREE
        self._busy -= self._per_slab(records)
        self.used -= len(records) * self.record
        self._push(records)
        return len(records) * self.record

    def clear(self) -> bool:
        """Free everything at once: record by record, 14 million take seconds."""
        self._busy[:] = 0
        self._top = self.used = 0
        self.trim()
        return True

    def trim(self) -> None:
        """Return empty slabs to the space."""
        empty = self._busy == 0
        if not empty.any():
            return
        stack = self._stack[: self._top]
        kept = stack[~empty[self._slab_of(stack)]]
        self._stack[: len(kept)] = kept
        self._top = len(kept)
        for first, count in zip(
            self._first[empty].tolist(), self._count[empty].tolist(), strict=True
        ):
            self._state[first : first + count] = 0
            self._space.extents.put(first * self.record, count * self.record)
        self._first, self._count, self._busy = (
            a[~empty] for a in (self._first, self._count, self._busy)
        )

    def ranges(self) -> tuple[Sizes, Sizes]:
        """(n,) starts and (n,) sizes of all slabs."""
        return self._first * self.record, self._count * self.record

    def check(self, held: Sizes) -> None:
        """Raise IllegalEventError unless the records of the `held` (n,) bytes of slabs add up."""
        must(int(held.sum()) == int(self._count.sum()) * self.record, "slabs have other sizes")
        must(int(self._busy.sum()) * self.record == self.used, "used bytes do not add up")
        must(self._top + int(self._busy.sum()) == int(self._count.sum()), "a record is lost")
        stack = self._stack[: self._top]
        must(len(np.unique(stack)) == self._top, "a free record is listed twice")
        must((self._state[stack] == _FREE).all(), "a record that is listed as free is not")
        must(np.count_nonzero(self._state == _FREE) == self._top, "a free record is not listed")
        inuse = np.flatnonzero(self._state == _USED)
        must(
            (self._per_slab(inuse) == self._busy).all(), "slabs count their records in use wrongly"
        )

    def _grow(self, records: int) -> None:
        """Take slabs until `records` more are free, or the space has none left."""
        slabs: list[tuple[int, int]] = []
        trimmed = False
        while records > 0:
            first, count = self._space.extents.carve(self.record, self._slab)
            if count:
                slabs.append((first, count))
                records -= count
            elif trimmed:
                break
            else:
                self._space.trim(self)
                trimmed = True
        for first, count in reversed(slabs):  # so that the first record is allocated next
            self._add(first, count)

    def _add(self, first: int, count: int) -> None:
        at = int(np.searchsorted(self._first, first))
        self._first = np.insert(self._first, at, first)
        self._count = np.insert(self._count, at, count)
        self._busy = np.insert(self._busy, at, 0)
        self._state[first : first + count] = _FREE
        self._push(np.arange(first + count - 1, first - 1, -1, dtype=np.int64))

    def _push(self, records: Sizes) -> None:
        top = self._top + len(records)
        if top > len(self._stack):
            grown = np.empty(max(top, 2 * len(self._stack)), np.int64)
            grown[: self._top] = self._stack[: self._top]
            self._stack = grown
        self._stack[self._top : top] = records
        self._top = top

    def _slab_of(self, records: Sizes) -> NDArray[np.intp]:
        return np.searchsorted(self._first, records, side="right") - 1

    def _per_slab(self, records: Sizes) -> NDArray[np.intp]:
        return np.bincount(self._slab_of(records), minlength=len(self._first))

    def _check_in_use(self, records: Sizes, rest: Sizes) -> None:
        if not len(records):
            return
        ordered = records if every(records[1:] > records[:-1]) else np.sort(records)
        if (
            rest.any()
            or ordered[0] < 0
            or ordered[-1] >= len(self._state)
            or (self._state[records] != _USED).any()
            or (ordered[1:] == ordered[:-1]).any()
        ):
            raise IllegalEventError("freed records that are not in use")


class PagedPool:
    """Objects of any size, in whole pages: in one piece, or in several runs where none is left.

    The pool does not store the lengths of objects in one piece: the caller does.
    """

    same_size = False
    record = 0

    def __init__(self, space: Allocator, page: int) -> None:
        self.page = page
        self.used = 0  # bytes of all rooms
        self._space = space
        self._shift = page.bit_length() - 1
        # One bit per page: whether a run begins there.
        self._begins = np.zeros((space.nbytes >> self._shift + 3) + 1, np.uint8)
        self._chains: Runs = {}

    def alloc(self, nbytes: Sizes) -> Sizes:
        """(k,) places for objects of these sizes; ABSENT where there is no room.

        Where there is not enough for all, the first ones are served first, and a large object
        without room does not keep out a small one. Else the largest are: the others fill what these
        leave.
        """
        extents, rooms = self._space.extents, self.rounded(nbytes)
        out = np.full(len(rooms), ABSENT, np.int64)
        total = int(rooms.sum())
        if extents.nbytes < total:
            self._space.trim(self)
        order = np.arange(len(rooms))
        if total <= extents.nbytes:
            order = (-rooms).argsort(kind="stable")
        for i, n in zip(order.tolist(), rooms[order].tolist(), strict=True):
            start = extents.take(n, self.page)
            out[i] = start if start != ABSENT else self._chain(int(nbytes[i]))
        got = out != ABSENT
        at, size = self.rooms(out[got], nbytes[got])
        np.bitwise_or.at(self._begins, *self._bits(at))
        self.used += int(size.sum())
        return out

    def _chain(self, nbytes: int) -> int:
        """The place of an object in several runs, the largest there are; ABSENT without room."""
        extents, found = self._space.extents, list[tuple[int, int]]()
        while nbytes > 0 and extents.nbytes >= nbytes and len(found) < _MAX_RUNS:
            want = -(-(nbytes + HEADER.size) // self.page) * self.page
            at, size = extents.take_most(want, self.page)
            if at == ABSENT:
                break
            found.append((at, size))
            nbytes -= size - HEADER.size
        if nbytes > 0 or not found:
            for at, size in found:
                extents.put(at, size)
            return ABSENT
        place = chained(found[0][0])
        self._chains[place] = np.array(found, np.int64)
        return place

    def free(self, places: Sizes, nbytes: Sizes) -> int:
        """Free objects of these sizes; bytes of their rooms.

        Raises:
            IllegalEventError: a place that no object in use has (nothing was freed).
        """
        at, size = self.rooms(np.asarray(places, np.int64), nbytes)
        self._check_in_use(at)
        for place in places[places < ABSENT].tolist():
            del self._chains[place]
        np.bitwise_xor.at(self._begins, *self._bits(at))
        total = int(size.sum())
        self.used -= total
        if len(at) >= _MANY:
            at, size = _joined(at, size)
        put = self._space.extents.put
        for first, n in zip(at.tolist(), size.tolist(), strict=True):
            put(first, n)
        return total

    def runs(self, places: Sizes) -> Runs:
        """The runs of those objects that are in several."""
        return {place: self._chains[place] for place in places[places < ABSENT].tolist()}

    def rooms(self, places: Sizes, nbytes: Sizes) -> tuple[Sizes, Sizes]:
        """(m,) starts and (m,) sizes of all ranges that these objects take up, in any order.

        Raises:
            IllegalEventError: a place in several runs that no object in use has.
        """
        if len(places) != len(nbytes):
            raise IllegalEventError("as many sizes as places are needed")
        sizes, whole = self.rounded(nbytes), places >= 0
        if every(whole):
            return places, sizes
        chains = [self._chains.get(place) for place in places[~whole].tolist()]
        found = [chain for chain in chains if chain is not None]
        must(len(found) == len(chains), "a place of runs that are not in use")
        at, size = np.concatenate(found).T
        return np.concatenate([places[whole], at]), np.concatenate([sizes[whole], size])

    def clear(self) -> bool:
        """Possible only when empty: the pool does not know the objects' lengths."""
        return not self.used

    def trim(self) -> None:
        """Do nothing: a page returns to the space with its object."""

    def ranges(self) -> tuple[Sizes, Sizes]:
        """(n,) starts and (n,) sizes of all runs: -1, up to where the next range begins."""
        bits = np.unpackbits(self._begins, bitorder="little")
        start = bits.nonzero()[0] << self._shift
        return start, np.full(len(start), -1)

    def check(self, held: Sizes) -> None:
        """Raise IllegalEventError unless the sizes `held` (n,) of all runs add up."""
        must(int(held.sum()) == self.used, "used bytes do not add up")

    def rounded(self, nbytes: Sizes) -> Sizes:
        """(k,) bytes of the rooms for objects of these sizes, in one piece."""
        return -(-np.maximum(nbytes, 1) // self.page) * self.page

    def _bits(self, at: Sizes) -> tuple[Sizes, NDArray[np.uint8]]:
        """(k,) byte of `_begins` and (k,) bit in it, for the pages at these addresses."""
        page = at >> self._shift
        return page >> 3, np.left_shift(1, page & 7).astype(np.uint8)

    def _check_in_use(self, at: Sizes) -> None:
        if not len(at):
            return
        ordered = np.sort(at)
        if ordered[0] < 0 or ordered[-1] >= self._space.nbytes:
            raise IllegalEventError("freed bytes outside of the space")
        byte, bit = self._bits(at)
        if (
            (at & (self.page - 1)).any()
            or not every(self._begins[byte] & bit > 0)
            or (ordered[1:] == ordered[:-1]).any()
        ):
            raise IllegalEventError("freed objects that are not in use")
