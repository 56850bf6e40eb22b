"""Admission: the share of memory of each dataset, and what is evicted to make room. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from creel.cache.memory.allocator import Allocator
from creel.cache.memory.free_ranges import ABSENT as NOWHERE
from creel.daemon.core.compactor import Compactor
from creel.daemon.core.residency import Index, Residency, Sizes
from creel.policies.masks import some

#: Rounds of eviction for objects that find no contiguous room (paged pools only).
_ROUNDS = 4
#: Share of the space kept free, so that moving few objects makes contiguous room.
_SLACK = 0.0075
#: The same where there is no time to move objects (tests/unit/test_allocator.py).
_WIDE_SLACK = 0.03


class Admission:
    """The space and the residencies of all datasets in it.

    A dataset's share of the memory is its share of all bytes being read; datasets without readers
    have none. The share limits a dataset only against others: it may take any free room.
    """

    def __init__(self, space: Allocator) -> None:
        self.space = space
        self.residencies: dict[str, Residency] = {}
        self.compactor = Compactor(space)
        self.expected = 0  # bytes in flight whose length is a guess
        #: Offsets and lengths that fetches in flight for a dataset write to; set by `Inflight`.
        self.busy: Callable[[Residency], tuple[Sizes, Sizes]] = _none

    def share(self, residency: Residency) -> float:
        """Bytes that this dataset may claim."""
        if not residency.active:
            return 0.0
        total = sum(h.nbytes for h in self.residencies.values() if h.active)
        return self.space.nbytes * residency.nbytes / max(total, 1.0)

    def missing(self, residency: Residency) -> float:
        """Return the part of the dataset that does not fit its share: 1 - f."""
        return max(1.0 - self.share(residency) / max(residency.nbytes, 1.0), 0.0)

    @property
    def free_nbytes(self) -> int:
        """Bytes that are neither held nor expected."""
        return self.space.free_bytes - self.expected

    def place(self, h: Residency, ids: Index, sizes: Sizes, need: int, *, stalled: bool) -> Sizes:
        """(k,) offsets for objects of these sizes; ABSENT (-1) where no room can be made.

        Evicts as far as retention allows; where `stalled`, also whatever is not pinned.
        """
        if h.pool.alike:
            return self._swap(h, sizes, need, stalled=stalled)
        fits = h.policy is not None and h.policy.fits
        slack = 0 if fits else int(_SLACK * self.space.nbytes)
        short = int(sizes.sum()) + slack - self.free_nbytes
        if short > 0:
            if fits:
                self._claim(h, short)
            else:
                self._make_room(h, short, need, stalled=stalled)
        out = h.place(ids, sizes)
        if fits:
            self._fit(h, ids, sizes, out, stalled=stalled)
        for _ in range(_ROUNDS):
            lack = (out < 0) & (sizes <= self.space.nbytes)
            if not some(lack):
                break
            self._join(h, ids, sizes, out, stalled=stalled)
            lack &= out < 0
            if not some(lack) or not self._force(h, sizes[lack], need, stalled=stalled):
                break
            out[lack] = h.place(ids[lack], sizes[lack])
        return out

    def _force(self, h: Residency, sizes: Sizes, need: int, *, stalled: bool) -> int:
        """Evict more than is short, for objects without contiguous room; return bytes freed."""
        freed = 0
        if h.policy is None or not h.policy.fits:
            # The free pieces are too small: keep enough free for larger ones to appear.
            wide = max(int(_WIDE_SLACK * self.space.nbytes) - self.free_nbytes, 0)
            freed = self._make_room(h, int(sizes.sum()) + wide, need, stalled=stalled)
        if not freed and stalled:
            freed = h.evict_region(int(sizes.max()), self.busy(h)[0], "stalled")
        return freed

    def _fit(self, h: Residency, ids: Index, sizes: Sizes, out: Sizes, *, stalled: bool) -> None:
        """Place new objects where residents are evicted whose rooms fit."""
        lack = np.flatnonzero(out < 0)
        if not len(lack) or h.policy is None:
            return
        wants = h.pool.rounded(sizes[lack])
        victims = h.policy.fitting(wants, stalled=stalled)
        found = victims >= 0
        lack = lack[found]
        out[lack] = h.inherit(ids[lack], wants[found], victims[found])

    def _join(self, h: Residency, ids: Index, sizes: Sizes, out: Sizes, *, stalled: bool) -> None:
        """Move residents for objects without contiguous room, in order, while that pays."""
        for i in np.flatnonzero(out < 0).tolist():
            if not self.compactor.gather(h, int(sizes[i]), stalled=stalled):
                break
            out[i : i + 1] = h.place(ids[i : i + 1], sizes[i : i + 1])

    def _swap(self, h: Residency, sizes: Sizes, need: int, *, stalled: bool) -> Sizes:
        """`place` for pools of equal records: new objects take the places of evicted ones."""
        out = np.full(len(sizes), NOWHERE, np.int64)
        record = max(int(sizes[0]), 1) if len(sizes) else 1
        k = min(len(sizes), max(self.free_nbytes, 0) // record)
        if k:
            out[:k] = h.pool.alloc(sizes[:k])
            k = len(sizes) - int(np.count_nonzero(out == NOWHERE))
        if k < len(sizes) and self._claim(h, (len(sizes) - k) * record):
            out[k:] = h.pool.alloc(sizes[k:])
            k = len(sizes) - int(np.count_nonzero(out == NOWHERE))
        while k < len(sizes) and h.policy is not None:
            ids, why = h.policy.victims(len(sizes) - k, need), "due_later"
            if stalled and not len(ids):
                ids, why = h.policy.last(len(sizes) - k, need), "stalled"
            if not len(ids):
                break
            out[k : k + len(ids)] = h.vacate(ids, why)
            k += len(ids)
        return out

    def reserve(self, h: Residency, k: int, need: int, *, stalled: bool) -> int:
        """How many of k objects of unknown length there is room for, judged by the mean length."""
        each = int(h.mean)
        short = k * each - self.free_nbytes
        if short > 0:
            self._make_room(h, short, need, stalled=stalled)
        return min(k, max(self.free_nbytes, 0) // each)

    def _make_room(self, h: Residency, nbytes: int, need: int, *, stalled: bool) -> int:
        """Evict about `nbytes`; return the bytes freed."""
        freed = self._claim(h, nbytes)
        if freed < nbytes:
            freed += self._evict(h, nbytes - freed, need)
        if freed < nbytes and stalled and h.policy is not None:
            k = math.ceil((nbytes - freed) / h.mean)
            freed += h.evict(h.policy.last(k, need), "stalled")
        return freed

    def _evict(self, h: Residency, nbytes: int, need: int) -> int:
        """Evict what the dataset's own eviction policy allows; return the bytes freed."""
        freed = 0
        while freed < nbytes and h.policy is not None:
            ids: Index = h.policy.victims(math.ceil((nbytes - freed) / h.mean), need)
            if not len(ids):
                break
            freed += h.evict(ids, "due_later")
        return freed

    def _claim(self, h: Residency, nbytes: int) -> int:
        """Evict from datasets above their share if this one stays within its own; bytes freed."""
        if len(self.residencies) == 1 or h.pool.used + nbytes > self.share(h):
            return 0
        freed = 0
        others = [(g.pool.used - self.share(g), g) for g in self.residencies.values() if g is not h]
        for excess, other in sorted(others, key=lambda x: -x[0]):
            taken = 0
            while freed + taken < nbytes and taken < excess:
                got = other.evict_region(nbytes - freed, self.busy(other)[0], "other_dataset")
                if not got:
                    break
                taken += got
            freed += taken
        return freed


def _none(residency: Residency) -> tuple[Sizes, Sizes]:
    del residency
    return np.empty(0, np.int64), np.empty(0, np.int64)
