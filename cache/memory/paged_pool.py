"""PagedPool: room for objects of any size, in whole pages and in one or several runs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import NOWHERE, must
from creel.cache.memory.runs import HEADER, Runs, chained
from creel.errors import IllegalEventError
from creel.policies.arrays import Ints, every

if TYPE_CHECKING:
    from creel.cache.memory.allocator import Allocator

#: Most runs of one object: each takes 3 us here and 1 us of a reader. An object that would need
#: more waits for others to leave.
_MAX_RUNS = 1024
#: From this many rooms on, join them before freeing: one by one, a million would take seconds.
_MANY = 4096


def _joined(offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return the ranges, ascending, with touching ones joined."""
    order = offsets.argsort()
    offsets, sizes = offsets[order], sizes[order]
    first = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1]))
    return offsets[first], np.add.reduceat(sizes, first)


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

    def alloc(self, nbytes: Ints) -> Ints:
        """(k,) places for objects of these sizes; NOWHERE where there is no room.

        Where there is not enough for all, the first ones are served first, and a large object
        without room does not keep out a small one. Else the largest are: the others fill what these
        leave.
        """
        extents, rooms = self._space.extents, self.rounded(nbytes)
        out = np.full(len(rooms), NOWHERE, np.int64)
        total = int(rooms.sum())
        if extents.nbytes < total:
            self._space.trim(self)
        order = np.arange(len(rooms))
        if total <= extents.nbytes:
            order = (-rooms).argsort(kind="stable")
        for i, n in zip(order.tolist(), rooms[order].tolist(), strict=True):
            start = extents.take(n, self.page)
            out[i] = start if start != NOWHERE else self._chain(int(nbytes[i]))
        got = out != NOWHERE
        at, size = self.rooms(out[got], nbytes[got])
        np.bitwise_or.at(self._begins, *self._bits(at))
        self.used += int(size.sum())
        return out

    def _chain(self, nbytes: int) -> int:
        """The place of an object in several runs, the largest there are; NOWHERE without room."""
        extents, found = self._space.extents, list[tuple[int, int]]()
        while nbytes > 0 and extents.nbytes >= nbytes and len(found) < _MAX_RUNS:
            want = -(-(nbytes + HEADER.size) // self.page) * self.page
            at, size = extents.take_most(want, self.page)
            if at == NOWHERE:
                break
            found.append((at, size))
            nbytes -= size - HEADER.size
        if nbytes > 0 or not found:
            for at, size in found:
                extents.put(at, size)
            return NOWHERE
        place = chained(found[0][0])
        self._chains[place] = np.array(found, np.int64)
        return place

    def free(self, places: Ints, nbytes: Ints) -> int:
        """Free objects of these sizes; bytes of their rooms.

        Raises:
            IllegalEventError: a place that no object in use has (nothing was freed).
        """
        at, size = self.rooms(np.asarray(places, np.int64), nbytes)
        self._check_in_use(at)
        for place in places[places < NOWHERE].tolist():
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

    def runs(self, places: Ints) -> Runs:
        return {place: self._chains[place] for place in places[places < NOWHERE].tolist()}

    def rooms(self, places: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
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

    def ranges(self) -> tuple[Ints, Ints]:
        """(n,) starts and (n,) sizes of all runs: -1, up to where the next range begins."""
        bits = np.unpackbits(self._begins, bitorder="little")
        start = bits.nonzero()[0] << self._shift
        return start, np.full(len(start), -1)

    def check(self, held: Ints) -> None:
        """Raise IllegalEventError unless the sizes `held` (n,) of all runs add up."""
        must(int(held.sum()) == self.used, "used bytes do not add up")

    def rounded(self, nbytes: Ints) -> Ints:
        """(k,) bytes of the rooms for objects of these sizes, in one piece."""
        return -(-np.maximum(nbytes, 1) // self.page) * self.page

    def _bits(self, at: Ints) -> tuple[Ints, NDArray[np.uint8]]:
        """(k,) byte of `_begins` and (k,) bit in it, for the pages at these addresses."""
        page = at >> self._shift
        return page >> 3, np.left_shift(1, page & 7).astype(np.uint8)

    def _check_in_use(self, at: Ints) -> None:
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
