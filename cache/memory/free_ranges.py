"""Free ranges of the arena, and how to join small ones into large ones. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.errors import IllegalEventError

Sizes: TypeAlias = NDArray[np.int64]

#: The offset of an object without room; equals `shared_words.ABSENT`.
ABSENT = -1

_TRIES = 32  # candidates tried one by one before a search settles for less


def must(holds: bool | np.bool_, what: str) -> None:
    """Check an invariant: raise IllegalEventError(what) unless `holds`."""
    if not holds:
        raise IllegalEventError(what)


class FreeRanges:
    """The free ranges of [0, nbytes): merged with their neighbours, found by best fit.

    The distinct sizes are in a sorted list. D of them sum to at most `nbytes`, so with pages of p
    bytes D <= sqrt(2 * nbytes / p): 5,000 at 100 GB and 8 KiB, which makes a list fast enough.
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
        """Make [start, start + nbytes) free, joined with adjacent free ranges."""
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
        """Start of `nbytes` at a multiple of `align`, from the smallest range that has room.

        Returns ABSENT where there is no room.
        """
        sizes = self._sizes
        i = bisect_left(sizes, nbytes)
        if i == len(sizes):
            return ABSENT
        size = sizes[i]
        start = next(reversed(self._starts[size]))
        at = -(-start // align) * align
        if at + nbytes > start + size:
            found = self._search(nbytes, align)
            if found is None:
                return ABSENT
            start, size, at = found
        self._cut(start, size, at, nbytes)
        return at

    def carve(self, record: int, most: int) -> tuple[int, int]:
        """(first, count): take records first..first+count-1, at `record` times their number.

        As many as fit, up to `most`, in one range; count is 0 where not even one fits.
        """
        sizes = self._sizes
        i = bisect_left(sizes, (most + 1) * record)
        picks = (
            sizes[i : i + 1] or sizes[: -_TRIES - 1 : -1]
        )  # a sure fit, or the largest there are
        for size in picks:
            start = next(reversed(self._starts[size]))
            first = -(-start // record)
            count = min((start + size) // record - first, most)
            if count > 0:
                self._cut(start, size, first * record, count * record)
                return first, count
        return 0, 0

    def claim(self, start: int, at: int, nbytes: int) -> None:
        """Take [at, at + nbytes) out of the free range that begins at `start`."""
        self._cut(start, self._size[start], at, nbytes)

    def absorb(self, start: int, least: int, align: int) -> int:
        """Take the free range that begins at `start` if it is below `least`; return bytes taken."""
        size = self._size.get(start, 0)
        nbytes = size // align * align if size < least else 0
        if nbytes:
            self._cut(start, size, start, nbytes)
        return nbytes

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return self._sizes[-1] if self._sizes else 0

    def beside(self, start: Sizes, end: Sizes) -> tuple[Sizes, Sizes]:
        """(n,) starts, ascending, and (n,) sizes of free ranges adjacent to [start, end) ranges."""
        before, after = self._start, self._size
        found = {before[at] for at in start.tolist() if at in before}
        found.update(at for at in end.tolist() if at in after)
        starts = sorted(found)
        return np.array(starts, np.int64), np.array([after[at] for at in starts], np.int64)

    def sorted(self) -> tuple[Sizes, Sizes]:
        """(n,) starts, ascending, and (n,) sizes of all free ranges."""
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
        """(start, size, at) where the best fit is misaligned: a few close fits, then a sure one."""
        i = bisect_left(self._sizes, nbytes)
        near = ((s, n) for n in self._sizes[i:] for s in reversed(self._starts[n]))
        for start, size in islice(near, _TRIES):
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
        rest = start + size - at - nbytes
        if rest:
            self._keep(at + nbytes, rest)

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


def evacuate(
    extents: FreeRanges, offsets: Sizes, sizes: Sizes, need: int, page: int, most: int
) -> tuple[Sizes, Sizes] | None:
    """Move a few objects into holes elsewhere so that `need` bytes are contiguous and free.

    Costs at most about `need` bytes of copying, never more than `most`. The extents are updated as
    if it were done.

    Args:
        offsets, sizes: (n,) objects that may move; ascending, multiples of `page`.
    Returns:
        (m,) indices of the objects that move and (m,) their targets; None where no way was found.
    """
    few = (sizes <= extents.largest).nonzero()[0]  # no hole holds any of the others
    at, size, which = _row(extents, offsets[few], sizes[few])
    first, last, spent = _windows(at, size, which, need)
    best = spent.argsort(kind="stable")[:_TRIES]
    for i in best[spent[best] <= most].tolist():
        window = slice(int(first[i]), int(last[i]) + 1)
        moved = _rehouse(extents, at[window], size[window], which[window], page)
        if moved is not None:
            return few[moved[0]], moved[1]
    return None


def cheapest(
    extents: FreeRanges, offsets: Sizes, sizes: Sizes, need: int, cost: Sizes | None = None
) -> NDArray[np.intp]:
    """Which objects must leave so that `need` bytes are contiguous and free, at the least cost.

    Args:
        offsets, sizes: (n,) objects that may leave; ascending. cost: (n,), or their sizes.
    Returns:
        (m,) indices of neighbours; empty where all of them do not make enough room.
    """
    at, size, which = _row(extents, offsets, sizes)
    first, last, spent = _windows(at, size, which, need, cost)
    if not len(first):
        return np.empty(0, np.intp)
    best = int(spent.argmin())
    inside = which[first[best] : last[best] + 1]
    return inside[inside >= 0]


def _windows(
    at: Sizes, size: Sizes, which: Sizes, need: int, cost: Sizes | None = None
) -> tuple[Sizes, Sizes, Sizes]:
    """The shortest runs of touching ranges with `need` bytes: first, last, cost of objects."""
    total = np.append(0, np.cumsum(size))
    last = np.searchsorted(total, total[:-1] + need) - 1  # the item that completes `need`
    first = np.flatnonzero(last < len(at))
    last = last[first]
    run = _runs(at, size)
    one = run[first] == run[last]
    first, last = first[one], last[one]
    each = size if cost is None or not len(cost) else cost[which]
    spent = np.append(0, np.cumsum(np.where(which < 0, 0, each)))
    return first, last, spent[last + 1] - spent[first]


def slide(
    extents: FreeRanges, offsets: Sizes, sizes: Sizes, need: int, page: int, most: int
) -> tuple[Sizes, Sizes] | None:
    """`evacuate` without holes elsewhere: push neighbours together, to the stretch's low end.

    May copy many times `need`, up to `most`; takes the cheapest stretch there is.
    """
    at, size, which = _row(extents, offsets, sizes)
    # whole pages only: parts of a hole lost to alignment do not count
    whole = (at + size) // page - -(-at // page)
    freed = np.append(0, np.cumsum(np.where(which < 0, np.maximum(whole, 0) * page, 0)))
    if freed[-1] < need:
        return None
    first = np.flatnonzero(which < 0)
    last = np.searchsorted(freed, freed[first] + need) - 1
    enough = last < len(at)
    first, last = first[enough], last[enough]
    run = _runs(at, size)
    one = run[first] == run[last]
    first, last = first[one], last[one]
    if not len(first):
        return None
    cost = np.append(0, np.cumsum(np.where(which < 0, 0, size)))
    spent = cost[last + 1] - cost[first]
    best = int(spent.argmin())
    if spent[best] > most:
        return None
    window = slice(int(first[best]), int(last[best]) + 1)
    moved = which[window][which[window] >= 0]
    low = int(at[window.start])
    base = -(-low // page) * page
    target = base + np.cumsum(sizes[moved]) - sizes[moved]
    for start, n in zip(offsets[moved].tolist(), sizes[moved].tolist(), strict=True):
        extents.put(start, n)
    if len(moved):
        extents.claim(low, base, int(sizes[moved].sum()))
    return moved, target


def _row(extents: FreeRanges, offsets: Sizes, sizes: Sizes) -> tuple[Sizes, Sizes, Sizes]:
    """Movable objects and adjacent holes: start, ascending; bytes; index of the object or -1."""
    hole_at, hole_size = extents.beside(offsets, offsets + sizes)
    at = np.concatenate([hole_at, offsets])
    size = np.concatenate([hole_size, sizes])
    which = np.concatenate([np.full(len(hole_at), -1), np.arange(len(offsets))])
    order = np.argsort(at, kind="stable")
    return at[order], size[order], which[order]


def _runs(at: Sizes, size: Sizes) -> Sizes:
    """Number of the run of touching ranges that each range belongs to."""
    breaks = np.ones(len(at), np.int64)
    breaks[1:] = at[1:] != at[:-1] + size[:-1]
    return np.cumsum(breaks)


def _rehouse(
    extents: FreeRanges, at: Sizes, size: Sizes, which: Sizes, page: int
) -> tuple[Sizes, Sizes] | None:
    """Allocate room outside of a window for the objects inside; None, unchanged, if impossible."""
    hole = which < 0
    holes = list(zip(at[hole].tolist(), size[hole].tolist(), strict=True))
    inside = np.flatnonzero(~hole)
    inside = inside[np.argsort(-size[inside], kind="stable")]  # the largest are hardest to place
    for a, n in holes:
        extents.claim(a, a, n)
    found: list[int] = []
    for n in size[inside].tolist():
        target = extents.take(n, page)
        if target == ABSENT:
            break
        found.append(target)
    done = len(found) == len(inside)
    back = zip(at[inside].tolist() if done else found, size[inside].tolist(), strict=False)
    for a, n in [*holes, *back]:
        extents.put(a, n)
    return (which[inside], np.array(found, np.int64)) if done else None
