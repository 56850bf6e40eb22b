"""Allocation of the arena's bytes. Pure: numbers in, offsets out; it never touches the memory.

An `Allocator` is shared by one *pool* per dataset. Where all objects of a dataset have one known
length, its pool is *fixed*: records lie dense in slabs, at multiples of the exact record length, so
that a reader gathers rows with one `np.take`; alloc and free work on whole batches. Any other pool
is *paged*: an object takes the smallest free range that holds it (best fit), rounded up to pages.

Under random churn best fit alone leaves up to a sixth of the space in holes that nothing fits;
`PagedPool.compact` plans the few moves that keep 97 % in use (tests/unit/test_allocator.py measures
both).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import (
    ABSENT,
    FreeRanges,
    Sizes,
    cheapest,
    evacuate,
    must,
    slide,
)
from creel.errors import IllegalEventError
from creel.policies.masks import every

_SLAB_NBYTES = 64 << 20  # making a slab takes about 20 us: nothing beside reading 64 MiB
_SLABS = 64  # at least this many slabs in a space, so that several pools can share a small one
_PAGE_SHARE = 128  # pages are at most mean / 128, and one cell per page is 0.9 % of it at most
_PAGES = (64, 1 << 16)  # smallest (a cache line) and largest page, in bytes
_GRAINS = 128  # most grains in a page: a cell holds the grain in which an object begins

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

    `objects` in all, `known` of them with a known length, `nbytes` together, from `least` to
    `most` (0 where none is known).
    """

    objects: int
    known: int
    nbytes: int
    least: int
    most: int

    @classmethod
    def of(cls, length: NDArray[np.integer], count: NDArray[np.integer] | None = None) -> Lengths:
        """Summarize `count[i]` objects of `length[i]` bytes each (negative: unknown).

        >>> Lengths.of(np.array([5, -1, 3]))
        Lengths(objects=3, known=2, nbytes=8, least=3, most=5)
        >>> Lengths.of(np.array([5, 7]), np.array([1000, 0]))
        Lengths(objects=1000, known=1000, nbytes=5000, least=5, most=5)
        """
        counts = np.ones(len(length), np.int64) if count is None else np.asarray(count, np.int64)
        told = (length >= 0) & (counts > 0)
        of_each, counts_told = length[told].astype(np.int64), counts[told]
        least, most = (int(of_each.min()), int(of_each.max())) if len(of_each) else (0, 0)
        known, nbytes = int(counts_told.sum()), int((of_each * counts_told).sum())
        return cls(int(counts.sum()), known, nbytes, least, most)


class ObjectPool(Protocol):
    """One dataset's part of a space; offsets and sizes are (k,) int64 bytes."""

    alike: bool  # whether all rooms have one size, so that none ever needs to be moved
    used: int  # bytes of all rooms
    record: int  # bytes of a room where all are alike, or 0
    grain: int  # rooms are multiples of it
    page: int  # least size of a room

    def alloc(self, nbytes: Sizes) -> Sizes:
        """Offsets for objects of these sizes; ABSENT where there is no room."""

    def settle(self, nbytes: Sizes, least: int) -> tuple[Sizes, Sizes]:
        """Like `alloc`, with the bytes of each room; leaves no hole below `least` bytes."""

    def rounded(self, nbytes: Sizes) -> Sizes:
        """Bytes of the smallest rooms for objects of these sizes."""

    def free(self, offsets: Sizes, nbytes: Sizes) -> None:
        """Free objects; `nbytes` as for `alloc`, or of their rooms."""

    def shrink(self, offsets: Sizes, rooms: Sizes, kept: Sizes) -> None:
        """Free the ends of rooms: only `kept` bytes of each stay."""

    def compact(
        self, offsets: Sizes, nbytes: Sizes, need: int, most: int = ...
    ) -> tuple[Sizes, Sizes, Sizes]:
        """From, to and bytes of moves that make contiguous room for `need` bytes, if any do."""

    def neighbours(
        self, offsets: Sizes, nbytes: Sizes, need: int, cost: Sizes | None = None
    ) -> NDArray[np.intp]:
        """Objects that must leave to make contiguous room for `need` bytes; empty if none do."""

    def starts(self, start: int, stop: int) -> Sizes:
        """Where rooms begin in [start, stop), ascending; empty where all are alike."""

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
        if lengths.known and lengths.known == lengths.objects and lengths.least == lengths.most:
            pool = FixedPool(self, max(lengths.least, 1))
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
            raise IllegalEventError(f"a pool that holds {pool.used} bytes cannot go")
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
        many = size < 0  # rooms of a paged pool: up to where the next range begins
        size = np.where(many, end - start, size)
        must((start + size == end).all(), "ranges overlap or leave a gap")
        for i, pool in enumerate(self._pools, 1):
            pool.check(size[owner == i])


def page_size(mean: float) -> int:
    """Page for objects of `mean` bytes: a power of two, about a hundredth of them.

    >>> page_size(110_000), page_size(0), page_size(1e12)
    (512, 64, 65536)
    """
    low, high = _PAGES
    return min(max(1 << max(int(mean / _PAGE_SHARE).bit_length() - 1, 0), low), high)


class FixedPool:
    """Records of one length, dense in slabs, at offsets that are multiples of that length."""

    alike = True
    grain = page = 1

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

    def settle(self, nbytes: Sizes, least: int) -> tuple[Sizes, Sizes]:  # noqa: ARG002
        """Like `alloc`; a room is as long as its object."""
        return self.alloc(nbytes), nbytes

    def rounded(self, nbytes: Sizes) -> Sizes:
        """Return the same sizes: a room is as long as its object."""
        return nbytes

    def shrink(self, offsets: Sizes, rooms: Sizes, kept: Sizes) -> None:
        """Do nothing: rooms keep their size."""

    def compact(
        self,
        offsets: Sizes,  # noqa: ARG002
        nbytes: Sizes,  # noqa: ARG002
        need: int,  # noqa: ARG002
        most: int = 0,  # noqa: ARG002
    ) -> tuple[Sizes, Sizes, Sizes]:
        """No object ever needs to be moved."""
        return _empty(), _empty(), _empty()

    def neighbours(
        self,
        offsets: Sizes,  # noqa: ARG002
        nbytes: Sizes,  # noqa: ARG002
        need: int,  # noqa: ARG002
        cost: Sizes | None = None,  # noqa: ARG002
    ) -> NDArray[np.intp]:
        """No object ever needs to leave with others."""
        return np.empty(0, np.intp)

    def starts(self, start: int, stop: int) -> Sizes:  # noqa: ARG002
        """Not needed for records."""
        return _empty()

    def free(self, offsets: Sizes, nbytes: Sizes) -> None:  # noqa: ARG002  (all pools alike)
        """Free objects.

        Raises:
            IllegalEventError: an offset that is not in use (nothing was freed).
        """
        if len(offsets) >= _MANY:  # the rest is several times as fast in order
            offsets = np.sort(offsets)
        records, rest = np.divmod(np.asarray(offsets, np.int64), self.record)
        self._refuse_strangers(records, rest)
        self._state[records] = _FREE
        self._busy -= self._per_slab(records)
        self.used -= len(records) * self.record
        self._push(records)

    def clear(self) -> bool:
        """Free everything at once: record by record, 14 million take seconds."""
        self._busy[:] = 0
        self._top = self.used = 0
        self.trim()
        return True

    def trim(self) -> None:
        """Return empty slabs to the space."""
        gone = self._busy == 0
        if not gone.any():
            return
        stack = self._stack[: self._top]
        kept = stack[~gone[self._slab_of(stack)]]
        self._stack[: len(kept)] = kept
        self._top = len(kept)
        for first, count in zip(
            self._first[gone].tolist(), self._count[gone].tolist(), strict=True
        ):
            self._state[first : first + count] = 0
            self._space.extents.put(first * self.record, count * self.record)
        self._first, self._count, self._busy = (
            a[~gone] for a in (self._first, self._count, self._busy)
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
        must((self._per_slab(inuse) == self._busy).all(), "slabs count wrongly")

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

    def _refuse_strangers(self, records: Sizes, rest: Sizes) -> None:
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
    """Objects of any size, each in its own room: whole grains, and no less than a page.

    So at most one object begins in each page, and a byte says where. The pool does not store the
    size of a room, which may be larger than its object: the caller does.
    """

    alike = False
    record = 0

    def __init__(self, space: Allocator, page: int) -> None:
        self.page = page
        self.grain = max(_PAGES[0], page // _GRAINS)
        self.used = 0  # bytes of all rooms
        self._space = space
        self._shift = page.bit_length() - 1
        # per page: 0, or 1 + the grain of the page in which an object begins
        self._cells = np.zeros((space.nbytes >> self._shift) + 1, np.uint8)

    def alloc(self, nbytes: Sizes) -> Sizes:
        """(k,) offsets for objects of these sizes; ABSENT where there is no room.

        In order: a large object may find none and a later small one some.
        """
        return self.settle(nbytes, 0)[0]

    def settle(self, nbytes: Sizes, least: int) -> tuple[Sizes, Sizes]:
        """Like `alloc`; with the (k,) bytes of each room, which leave no hole below `least` bytes.

        (A hole too small for any object would be lost until its neighbours leave.)
        """
        rooms = self.rounded(nbytes)
        offsets = np.full(len(rooms), ABSENT, np.int64)
        self._take(offsets, rooms, least)
        if self._other_slabs() and not every(offsets != ABSENT):
            self._space.trim(self)
            self._take(offsets, rooms, least)
        self._mark(offsets, rooms)
        return offsets, rooms

    def clear(self) -> bool:
        """Possible only when empty: the pool does not know the rooms' sizes."""
        return not self.used

    def _take(self, offsets: Sizes, rooms: Sizes, least: int) -> None:
        """Allocate room for those that have none yet, as far as there is any."""
        extents, grain = self._space.extents, self.grain
        for i in ((offsets == ABSENT) & (rooms <= extents.largest)).nonzero()[0].tolist():
            nbytes = int(rooms[i])
            at = extents.take(nbytes, grain)
            if at != ABSENT:
                offsets[i] = at
                if least:
                    rooms[i] += extents.absorb(at + nbytes, least, grain)

    def shrink(self, offsets: Sizes, rooms: Sizes, kept: Sizes) -> None:
        """Free the ends of rooms: only `kept` bytes of each, whole grains, stay."""
        self.used -= int((rooms - kept).sum())
        ends = (offsets + kept).tolist()
        for at, n in zip(ends, (rooms - kept).tolist(), strict=True):
            self._space.extents.put(at, n)

    def free(self, offsets: Sizes, nbytes: Sizes) -> None:
        """Free objects; `nbytes` as for `alloc`, or of their rooms.

        Raises:
            IllegalEventError: an offset that no object in use has (nothing was freed).
        """
        offsets, sizes = np.asarray(offsets, np.int64), self.rounded(nbytes)
        self._refuse_strangers(offsets, sizes)
        self._cells[offsets >> self._shift] = 0
        self.used -= int(sizes.sum())
        if len(offsets) >= _MANY:
            offsets, sizes = _joined(offsets, sizes)
        put = self._space.extents.put
        for at, n in zip(offsets.tolist(), sizes.tolist(), strict=True):
            put(at, n)

    def compact(
        self, offsets: Sizes, nbytes: Sizes, need: int, most: int = 1 << 62
    ) -> tuple[Sizes, Sizes, Sizes]:
        """Plan moves that make room for an object of `need` bytes, with little copying.

        The pool treats the moves as done. The caller copies them in order, each as a `memmove`:
        source and target of one move may overlap, but no target overlaps a later move's source.

        Args:
            offsets, nbytes: (n,) rooms of this pool that may move (unpinned), in any order.
                Neighbours matter: of very many, give those of one stretch of addresses.
            need: bytes of the object; most: bytes that may be moved for it.
        Returns:
            (m,) from, (m,) to, (m,) bytes of each move; empty where it cannot be done.
        Raises:
            IllegalEventError: an object that is not in use.
        """
        offsets, nbytes = np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64)
        self._refuse_strangers(offsets, self.rounded(nbytes))
        order = np.argsort(offsets)
        offsets, nbytes = offsets[order], nbytes[order]
        sizes, extents = self.rounded(nbytes), self._space.extents
        want = int(self.rounded(np.array([need]))[0])
        plan = evacuate(extents, offsets, sizes, want, self.grain, most)
        plan = plan or slide(extents, offsets, sizes, want, self.grain, most)
        if plan is None:
            return _empty(), _empty(), _empty()
        moved, target = plan
        self._cells[offsets[moved] >> self._shift] = 0
        self.used -= int(sizes[moved].sum())
        self._mark(target, sizes[moved])
        far = offsets[moved] != target
        return offsets[moved][far], target[far], nbytes[moved][far]

    def neighbours(
        self, offsets: Sizes, nbytes: Sizes, need: int, cost: Sizes | None = None
    ) -> NDArray[np.intp]:
        """Which objects must leave so that an object of `need` bytes has room.

        Args:
            offsets, nbytes: (n,) rooms of this pool that may become free, ascending by address.
            cost: (n,) of freeing each; by default its bytes.
        Returns:
            (m,) indices; empty where all of them together do not make contiguous room.
        """
        want = int(self.rounded(np.array([need]))[0])
        return cheapest(self._space.extents, offsets, self.rounded(nbytes), want, cost)

    def trim(self) -> None:
        """Do nothing: a page returns to the space with its object."""

    def starts(self, start: int, stop: int) -> Sizes:
        """(k,) offsets of the objects that begin in [start, stop), ascending."""
        first = start >> self._shift
        cells = self._cells[first : -(-stop // self.page)]
        pages = cells.nonzero()[0]
        starts: Sizes = (first + pages) << self._shift
        starts += (cells[pages].astype(np.int64) - 1) * self.grain
        return starts

    def ranges(self) -> tuple[Sizes, Sizes]:
        """(n,) starts and (n,) sizes of all rooms: -1, up to where the next range begins."""
        start = self.starts(0, self._space.nbytes)
        return start, np.full(len(start), -1)

    def check(self, held: Sizes) -> None:
        """Raise IllegalEventError unless the sizes `held` (n,) of all rooms add up."""
        must(int(held.sum()) == self.used, "used bytes do not add up")
        must((held >= self.page).all(), "an object has less room than a page")

    def rounded(self, nbytes: Sizes) -> Sizes:
        """(k,) bytes of the smallest rooms for objects of these sizes."""
        rounded: Sizes = (np.asarray(nbytes, np.int64) + (self.grain - 1)) & -self.grain
        return np.maximum(rounded, self.page)

    def _mark(self, offsets: Sizes, sizes: Sizes) -> None:
        got = offsets != ABSENT
        if not every(got):
            offsets, sizes = offsets[got], sizes[got]
        self._cells[offsets >> self._shift] = self._begin(offsets)
        self.used += int(sizes.sum())

    def _begin(self, offsets: Sizes) -> Sizes:
        begin: Sizes = 1 + (offsets & (self.page - 1)) // self.grain
        return begin

    def _other_slabs(self) -> bool:
        return self._space.extents.nbytes < self._space.free_bytes

    def _refuse_strangers(self, offsets: Sizes, sizes: Sizes) -> None:
        if len(offsets) != len(sizes):
            raise IllegalEventError("as many sizes as offsets are needed")
        if not len(offsets):
            return
        ordered = np.sort(offsets)
        if ordered[0] < 0 or ordered[-1] >= self._space.nbytes:
            raise IllegalEventError("freed bytes outside of the space")
        cells = self._cells[offsets >> self._shift]
        if (
            (offsets & (self.grain - 1)).any()
            or (cells != self._begin(offsets)).any()
            or (ordered[1:] == ordered[:-1]).any()
        ):
            raise IllegalEventError("freed objects that are not in use")
