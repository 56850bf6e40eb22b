"""The free ranges of the arena, allocated by best fit. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice

import numpy as np

from creel.errors import IllegalEventError
from creel.policies.arrays import Ints

#: The place of an object that is not in the arena, or has no room there.
NOWHERE = -1

_MAX_TRIED = 32  # candidates that a search tries one by one before it accepts a worse fit


def must(holds: bool | np.bool_, fault: str) -> None:
    """Raise IllegalEventError(what) unless an invariant `holds`."""
    if not holds:
        raise IllegalEventError(fault)


class FreeRanges:
    """The free ranges of [0, nbytes): merged with their neighbours, found by best fit.

    A sorted list has the D distinct sizes. They sum to at most `nbytes`, so with pages of p bytes
    D <= sqrt(2 * nbytes / p), or 5,000 at 100 GB and 8 KiB: a list is fast enough.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0  # free bytes
        self._size: dict[int, int] = {}  # start -> bytes
        self._start: dict[int, int] = {}  # end -> start
        self._sizes: list[int] = []  # distinct sizes, ascending
        self._starts: dict[int, dict[int, None]] = {}  # size -> starts, in insertion order
        if nbytes:
            self.put(0, nbytes)

    def put(self, start: int, nbytes: int) -> None:
        """Free [start, start + nbytes) and merge it with adjacent free ranges."""
        end = start + nbytes
        self.nbytes += nbytes
        before = self._start.get(start)
        if before is not None:
            self._drop(before, start - before)
            start = before
        after = self._size.get(end)
        if after is not None:
            self._drop(end, after)
            end += after
        self._keep(start, end - start)

    def take(self, nbytes: int, align: int) -> int:
        """Take `nbytes` at a multiple of `align` from the smallest range that has room.

        Returns the start, or NOWHERE without room.
        """
        sizes = self._sizes
        i = bisect_left(sizes, nbytes)
        if i == len(sizes):
            return NOWHERE
        size = sizes[i]
        start = next(reversed(self._starts[size]))
        at = -(-start // align) * align
        if at + nbytes > start + size:
            gap = self._search(nbytes, align)
            if gap is None:
                return NOWHERE
            start, size, at = gap
        self._cut(start, size, at, nbytes)
        return at

    def carve(self, record: int, limit: int) -> tuple[int, int]:
        """Take records first..first+count-1, at `record` times their number; return (first, count).

        Takes as many as fit into one range, up to `limit`; count is 0 if not even one fits.
        """
        sizes = self._sizes
        i = bisect_left(sizes, (limit + 1) * record)
        # A size that surely fits, or else the largest ones.
        candidates = sizes[i : i + 1] or sizes[: -_MAX_TRIED - 1 : -1]
        for size in candidates:
            start = next(reversed(self._starts[size]))
            first = -(-start // record)
            count = min((start + size) // record - first, limit)
            if count > 0:
                self._cut(start, size, first * record, count * record)
                return first, count
        return 0, 0

    def take_most(self, nbytes: int, align: int) -> tuple[int, int]:
        """Take `nbytes` as `take` does, or else as much as the largest range has.

        Returns (start, size), multiples of `align` as `nbytes` is; (NOWHERE, 0) without any room.
        """
        at = self.take(nbytes, align)
        if at != NOWHERE or not self._sizes:
            return at, nbytes if at != NOWHERE else 0
        size = self._sizes[-1]
        start = next(reversed(self._starts[size]))
        at = -(-start // align) * align
        limit = (start + size - at) // align * align
        if limit <= 0:
            return NOWHERE, 0
        self._cut(start, size, at, limit)
        return at, limit

    def sorted(self) -> tuple[Ints, Ints]:
        """Return (n,) starts, ascending, and (n,) sizes of all free ranges."""
        start = np.fromiter(self._size.keys(), np.int64, len(self._size))
        size = np.fromiter(self._size.values(), np.int64, len(self._size))
        order = np.argsort(start)
        return start[order], size[order]

    def check(self) -> None:
        """Raise IllegalEventError unless all four views of the ranges are consistent."""
        start, size = self.sorted()
        must((size > 0).all(), "an empty free range")
        must(int(size.sum()) == self.nbytes, "free bytes do not add up")
        must((start[:-1] + size[:-1] < start[1:]).all(), "free ranges touch or overlap")
        must(self._start == {s + n: s for s, n in self._size.items()}, "ends of free ranges")
        must(sorted(self._starts) == self._sizes, "distinct sizes of free ranges")
        by_size = {s: n for n, held in self._starts.items() for s in held}
        must(by_size == self._size, "free ranges by size")

    def _search(self, nbytes: int, align: int) -> tuple[int, int, int] | None:
        """Find (start, size, address) if the best fit is misaligned: close fits first."""
        i = bisect_left(self._sizes, nbytes)
        near = ((s, n) for n in self._sizes[i:] for s in reversed(self._starts[n]))
        for start, size in islice(near, _MAX_TRIED):
            at = -(-start // align) * align
            if at + nbytes <= start + size:
                return start, size, at
        i = bisect_left(self._sizes, nbytes + align - 1)
        if i == len(self._sizes):
            return None
        start = next(reversed(self._starts[self._sizes[i]]))
        return start, self._sizes[i], -(-start // align) * align

    def _cut(self, start: int, size: int, at: int, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._drop(start, size)
        if at > start:
            self._keep(start, at - start)
        tail = start + size - at - nbytes
        if tail:
            self._keep(at + nbytes, tail)

    def _keep(self, start: int, size: int) -> None:
        self._size[start] = size
        self._start[start + size] = start
        held = self._starts.get(size)
        if held is None:
            self._starts[size] = {start: None}
            insort(self._sizes, size)
        else:
            held[start] = None

    def _drop(self, start: int, size: int) -> None:
        del self._size[start], self._start[start + size]
        held = self._starts[size]
        del held[start]
        if not held:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
