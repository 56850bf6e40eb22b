"""FixedPool: the allocator of objects of one known length, dense in slabs. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.memory.pools.free_ranges import NOWHERE, must
from creel.cache.memory.pools.pool import Space
from creel.cache.memory.pools.runs import Runs
from creel.errors import IllegalEventError
from creel.policies.arrays import Index, Ints, every

_SLAB_NBYTES = 64 << 20  # adding a slab takes about 20 us, nothing compared to reading 64 MiB
_SLABS = 64  # least number of slabs in a space, so that several pools can share a small one

_MIN_SORTED = 4096  # places from which on sorting them before freeing is several times as fast

_FREE, _USED = 1, 2


class FixedPool:
    """Records of one length, dense in slabs, at offsets that are multiples of that length."""

    same_size = True
    page = 1

    def __init__(self, space: Space, record: int, objects: int) -> None:
        """Make a pool for a dataset of `objects` records; a slab is never larger than it needs."""
        self.record = record
        self.used = 0  # bytes
        self._space = space
        self._slab = max(min(min(_SLAB_NBYTES, space.nbytes // _SLABS) // record, objects), 1)
        self._state = np.zeros(space.nbytes // record, np.uint8)  # zeroed lazily by the system
        # Stack of free records, of which the last is allocated first. Of each slab: its first
        # record (ascending), its number of records, and how many of them are in use.
        self._stack, self._first, self._count, self._busy = np.empty((4, 0), np.int64)
        self._top = 0  # records on the stack

    def alloc(self, nbytes: Ints) -> Ints:
        """Return (k,) offsets for objects of these sizes; NOWHERE for the last ones without room.

        An object longer than the record gets NOWHERE as well; a shorter one takes a whole record.
        """
        out = np.full(len(nbytes), NOWHERE, np.int64)
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

    def rounded(self, nbytes: Ints) -> Ints:
        """Return the same sizes, as a room is as long as its object."""
        return nbytes

    def runs(self, places: Ints) -> Runs:  # noqa: ARG002
        """Return no runs, as all records are in one piece."""
        return {}

    def rooms(self, places: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
        """Return the arguments, as each object occupies its own record."""
        return places, nbytes

    def free(self, places: Ints, nbytes: Ints) -> int:  # noqa: ARG002  (as in ObjectPool)
        """Free objects; return the bytes of their records.

        Raises:
            IllegalEventError: an offset is not in use (nothing was freed).
        """
        if len(places) >= _MIN_SORTED:
            places = np.sort(places)
        records, remainder = np.divmod(np.asarray(places, np.int64), self.record)
        self._check_in_use(records, remainder)
        self._state[records] = _FREE
        self._busy -= self._per_slab(records)
        self.used -= len(records) * self.record
        self._push(records)
        return len(records) * self.record

    def adopt(
        self,
        ranges: tuple[Ints, Ints],
        places: Ints,
        nbytes: Ints,  # noqa: ARG002  (as in ObjectPool)
        runs: Runs,  # noqa: ARG002
    ) -> None:
        (first, count), remainder = np.divmod(np.stack(ranges), self.record)
        must(not remainder.any(), "slabs of records of another length")
        records, remainder = np.divmod(places, self.record)
        must(
            not remainder.any() and len(np.unique(records)) == len(records), "no places of records"
        )
        order = first.argsort()
        slab = np.searchsorted(first[order], records, side="right") - 1
        must(bool((slab >= 0).all()), "a record in no slab")
        must(bool((records < (first + count)[order][slab]).all()), "a record in no slab")
        for record, n in zip(first.tolist(), count.tolist(), strict=True):
            self._add(record, n)
        self._state[records] = _USED
        free = self._stack[: self._top]
        free = free[self._state[free] == _FREE]
        self._top = len(free)
        self._stack[: self._top] = free
        self._busy += self._per_slab(records)
        self.used = len(records) * self.record

    def clear(self) -> bool:
        """Free all objects at once: record by record, 14 million would take seconds."""
        self._busy[:] = 0
        self._top = self.used = 0
        self.trim()
        return True

    def take_over(self, other: FixedPool) -> None:
        """As in `ObjectPool`; both have records of one length."""
        for first, count in zip(other._first.tolist(), other._count.tolist(), strict=True):
            self._state[first : first + count] = other._state[first : first + count]
            other._state[first : first + count] = 0
        mine = self._first, self._count, self._busy
        its = other._first, other._count, other._busy
        slabs = np.array([np.concatenate(pair) for pair in zip(mine, its, strict=True)])
        self._first, self._count, self._busy = slabs[:, slabs[0].argsort()]
        self._push(other._stack[: other._top])
        self.used += other.used
        other._first, other._count, other._busy = np.empty((3, 0), np.int64)
        other._top = other.used = 0

    def trim(self) -> None:
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

    def ranges(self) -> tuple[Ints, Ints]:
        return self._first * self.record, self._count * self.record

    def check(self, held: Ints) -> None:
        """Raise IllegalEventError unless records and the `held` (n,) bytes of slabs add up."""
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
        """Take slabs until `records` more are free, or the space has no more slabs."""
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

    def _push(self, records: Ints) -> None:
        top = self._top + len(records)
        if top > len(self._stack):
            grown = np.empty(max(top, 2 * len(self._stack)), np.int64)
            grown[: self._top] = self._stack[: self._top]
            self._stack = grown
        self._stack[self._top : top] = records
        self._top = top

    def _slab_of(self, records: Ints) -> Index:
        return np.searchsorted(self._first, records, side="right") - 1

    def _per_slab(self, records: Ints) -> Index:
        return np.bincount(self._slab_of(records), minlength=len(self._first))

    def _check_in_use(self, records: Ints, remainder: Ints) -> None:
        if not len(records):
            return
        ordered = records if every(records[1:] > records[:-1]) else np.sort(records)
        if (
            remainder.any()
            or ordered[0] < 0
            or ordered[-1] >= len(self._state)
            or (self._state[records] != _USED).any()
            or (ordered[1:] == ordered[:-1]).any()
        ):
            raise IllegalEventError("freed records that are not in use")
