"""PagedPool: the allocator of objects of any size, in pages and in one or several runs. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE, must
from creel.cache.memory.pools.pool import Space
from creel.cache.memory.pools.runs import HEADER, Runs, chained
from creel.errors import IllegalEventError
from creel.policies.arrays import Ints, every

#: Most runs of one object: each takes 3 us here and 1 us in a reader. An object that would need
#: more finds no room until other objects leave.
_MAX_RUNS = 1024
#: From this many rooms on, adjacent ones are joined before they are freed: one by one, a million
#: would take seconds.
_MIN_JOINED = 4096


def _joined(offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Sort ranges and join adjacent ones."""
    order = offsets.argsort()
    offsets, sizes = offsets[order], sizes[order]
    first = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1]))
    return offsets[first], np.add.reduceat(sizes, first)


class PagedPool:
    """Objects of any size, in whole pages: in one piece, or in several runs if no range is left.

    The pool does not store the lengths of objects in one piece, which the caller has.
    """

    same_size = False
    record = 0

    def __init__(self, space: Space, page: int) -> None:
        self.page = page
        self.used = 0  # bytes of all rooms
        self._space = space
        self._shift = page.bit_length() - 1
        # One bit per page: whether a run begins there.
        self._begins = np.zeros((space.nbytes >> self._shift + 3) + 1, np.uint8)
        self._chains: Runs = {}

    def alloc(self, nbytes: Ints) -> Ints:
        """Return (k,) places for objects of these sizes; NOWHERE where there is no room.

        If there is room for all, the largest objects are allocated first, and smaller ones fill the
        gaps. Else they are allocated in order; an object without room does not stop later ones.
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
        """Allocate an object in several runs, largest ranges first; NOWHERE without room."""
        extents, runs = self._space.extents, list[tuple[int, int]]()
        while nbytes > 0 and extents.nbytes >= nbytes and len(runs) < _MAX_RUNS:
            want = -(-(nbytes + HEADER.size) // self.page) * self.page
            at, size = extents.take_most(want, self.page)
            if at == NOWHERE:
                break
            runs.append((at, size))
            nbytes -= size - HEADER.size
        if nbytes > 0 or not runs:
            for at, size in runs:
                extents.put(at, size)
            return NOWHERE
        place = chained(runs[0][0])
        self._chains[place] = np.array(runs, np.int64)
        return place

    def free(self, places: Ints, nbytes: Ints) -> int:
        """Free objects of these sizes; return the bytes of their rooms.

        Raises:
            IllegalEventError: a place is not in use (nothing was freed).
        """
        at, size = self.rooms(np.asarray(places, np.int64), nbytes)
        self._check_in_use(at)
        for place in places[places < NOWHERE].tolist():
            del self._chains[place]
        np.bitwise_xor.at(self._begins, *self._bits(at))
        total = int(size.sum())
        self.used -= total
        if len(at) >= _MIN_JOINED:
            at, size = _joined(at, size)
        put = self._space.extents.put
        for first, n in zip(at.tolist(), size.tolist(), strict=True):
            put(first, n)
        return total

    def runs(self, places: Ints) -> Runs:
        return {place: self._chains[place] for place in places[places < NOWHERE].tolist()}

    def rooms(self, places: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
        """Return (m,) starts and (m,) sizes of all ranges that these objects occupy, in any order.

        Raises:
            IllegalEventError: a place in several runs is not in use.
        """
        return self._rooms(places, nbytes, self._chains)

    def _rooms(self, places: Ints, nbytes: Ints, runs: Runs) -> tuple[Ints, Ints]:
        """Return the result of `rooms` for objects that these runs hold."""
        if len(places) != len(nbytes):
            raise IllegalEventError("as many sizes as places are needed")
        sizes, whole = self.rounded(nbytes), places >= 0
        if every(whole):
            return places, sizes
        chains = [runs.get(place) for place in places[~whole].tolist()]
        in_use = [chain for chain in chains if chain is not None]
        must(len(in_use) == len(chains), "a place of runs that are not in use")
        at, size = np.concatenate(in_use).T
        return np.concatenate([places[whole], at]), np.concatenate([sizes[whole], size])

    def adopt(self, ranges: tuple[Ints, Ints], places: Ints, nbytes: Ints, runs: Runs) -> None:
        at, size = self._rooms(places, nbytes, runs)
        kept, order = ranges[0].argsort(), at.argsort()
        same = np.array_equal(ranges[0][kept], at[order]) and np.array_equal(
            ranges[1][kept], size[order]
        )
        must(same and not (at % self.page).any(), "the objects take other ranges")
        chains = {place: runs[place] for place in places[places < 0].tolist()}
        begin = all(chained(place) == run[0, 0] for place, run in chains.items())
        must(begin, "a place of runs that begin elsewhere")
        self._chains = chains
        np.bitwise_or.at(self._begins, *self._bits(at))
        self.used = int(size.sum())

    def clear(self) -> bool:
        """Return whether the pool is empty; it cannot free objects without their lengths."""
        return not self.used

    def take_over(self, other: PagedPool) -> None:
        """As in `ObjectPool`; both have pages of one size."""
        self._begins |= other._begins
        self._chains |= other._chains
        self.used += other.used
        other._begins[:] = 0
        other._chains, other.used = {}, 0

    def trim(self) -> None:
        """Do nothing: pages return to the space as soon as their object is freed."""

    def ranges(self) -> tuple[Ints, Ints]:
        """Return (n,) starts and (n,) sizes of all runs; -1 means up to the next range."""
        bits = np.unpackbits(self._begins, bitorder="little")
        start = bits.nonzero()[0] << self._shift
        return start, np.full(len(start), -1)

    def check(self, held: Ints) -> None:
        """Raise IllegalEventError unless the sizes `held` (n,) of all runs add up."""
        must(int(held.sum()) == self.used, "used bytes do not add up")

    def rounded(self, nbytes: Ints) -> Ints:
        """Return (k,) bytes of the rooms for objects of these sizes in one piece."""
        return -(-np.maximum(nbytes, 1) // self.page) * self.page

    def _bits(self, at: Ints) -> tuple[Ints, NDArray[np.uint8]]:
        """Return (k,) indices of bytes in `_begins` and (k,) bits, for pages at these addresses."""
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
