"""Who gets which part of the memory, and at whose expense room is made. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from creel.cache.extents import ABSENT as NOWHERE
from creel.cache.space import FixedPool, PagedPool, Space
from creel.daemon.holding import Holding, Index, Sizes
from creel.daemon.mover import Mover
from creel.policies.masks import some
from creel.policies.retain import EpochKeeper, Need

#: Rounds of evicting for objects that find no room in one piece (paged pools only).
_ROUNDS = 4
#: Share of the space kept free, so that moving few objects makes room in one piece.
_SLACK = 0.0075
#: The same where there is no time to move any (tests/unit/test_space.py).
_WIDE_SLACK = 0.03
#: Share of what is kept that an epoch may begin with.
_BEGIN = 0.2


class Shares:
    """The space and all that live in it.

    A dataset's share of the memory is its share of all bytes that are being read; datasets nobody
    reads have none. A share is claimed only against others: free room is free.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.holdings: dict[str, Holding] = {}
        self.mover = Mover(space)
        self.expected = 0  # bytes under way whose length is a guess
        #: Offsets that the fetches under way for a dataset write to; set by `Flights`.
        self.busy: Callable[[Holding], tuple[Sizes, Sizes]] = _none

    def share(self, holding: Holding) -> float:
        """Bytes that this dataset may claim."""
        if not holding.active:
            return 0.0
        total = sum(h.nbytes for h in self.holdings.values() if h.active)
        return self.space.nbytes * holding.nbytes / max(total, 1.0)

    def missing(self, holding: Holding) -> float:
        """The part of the dataset that finds no place in its share: 1 - f."""
        return max(1.0 - self.share(holding) / max(holding.nbytes, 1.0), 0.0)

    @property
    def free_nbytes(self) -> int:
        """Bytes that are neither held nor expected."""
        return self.space.free_bytes - self.expected

    def place(self, h: Holding, ids: Index, sizes: Sizes, need: Need, *, stalled: bool) -> Sizes:
        """(k,) offsets for objects of these sizes; ABSENT (-1) where no room can be made.

        Others leave as far as retention allows; for those who stall, whatever is not pinned.
        """
        if isinstance(h.pool, FixedPool):
            return self._swap(h, sizes, need, stalled=stalled)
        fits = h.keeper is not None and h.keeper.fits
        slack = 0 if fits else int(_SLACK * self.space.nbytes)
        short = int(sizes.sum()) + slack - self.free_nbytes
        if short > 0:
            if fits:
                self._claim(h, short)
            else:
                self._make_room(h, short, need, stalled=stalled)
        out = h.place(ids, sizes)
        if fits:
            self._fit(h, ids, sizes, out, need)
        for _ in range(_ROUNDS):
            lack = (out < 0) & (sizes <= self.space.nbytes)
            if not some(lack):
                break
            self._join(h, ids, sizes, out, need, stalled=stalled)
            lack &= out < 0
            if not some(lack) or not self._force(h, sizes[lack], need, stalled=stalled):
                break
            out[lack] = h.place(ids[lack], sizes[lack])
        return out

    def _force(self, h: Holding, sizes: Sizes, need: Need, *, stalled: bool) -> int:
        """Evict more than is short, for those who find no room in one piece; bytes freed."""
        freed = 0
        if h.keeper is None or not h.keeper.fits:
            # what is free lies in pieces too small: keep so much free that there are larger ones
            wide = max(int(_WIDE_SLACK * self.space.nbytes) - self.free_nbytes, 0)
            freed = self._make_room(h, int(sizes.sum()) + wide, need, stalled=stalled)
        if not freed and stalled:
            freed = h.evict_region(int(sizes.max()), self.busy(h)[0], "stalled")
        return freed

    def _fit(self, h: Holding, ids: Index, sizes: Sizes, out: Sizes, need: Need) -> None:
        """Give newcomers the places of others whose rooms fit."""
        lack = np.flatnonzero(out < 0)
        if not len(lack) or h.keeper is None or not isinstance(h.pool, PagedPool):
            return
        wants = h.pool.rounded(sizes[lack])
        victims = h.keeper.fitting(wants, need)
        found = victims >= 0
        lack = lack[found]
        out[lack] = h.inherit(ids[lack], wants[found], victims[found])

    def _join(
        self, h: Holding, ids: Index, sizes: Sizes, out: Sizes, need: Need, *, stalled: bool
    ) -> None:
        """Move others for those who find no room in one piece, in order, while it is worth it."""
        for i in np.flatnonzero(out < 0).tolist():
            if not self.mover.gather(h, int(sizes[i]), need, stalled=stalled):
                break
            out[i : i + 1] = h.place(ids[i : i + 1], sizes[i : i + 1])

    def _swap(self, h: Holding, sizes: Sizes, need: Need, *, stalled: bool) -> Sizes:
        """`place` where all records are alike: newcomers take the places of those who leave."""
        out = np.full(len(sizes), NOWHERE, np.int64)
        record = max(int(sizes[0]), 1) if len(sizes) else 1
        k = min(len(sizes), max(self.free_nbytes, 0) // record)
        if k:
            out[:k] = h.pool.alloc(sizes[:k])
            k = len(sizes) - int(np.count_nonzero(out == NOWHERE))
        if k < len(sizes) and self._claim(h, (len(sizes) - k) * record):
            out[k:] = h.pool.alloc(sizes[k:])
            k = len(sizes) - int(np.count_nonzero(out == NOWHERE))
        while k < len(sizes) and h.keeper is not None:
            ids, why = h.keeper.victims(len(sizes) - k, need), "due_later"
            if stalled and not len(ids):
                ids, why = h.keeper.last(len(sizes) - k, need), "stalled"
            if not len(ids):
                break
            out[k : k + len(ids)] = h.vacate(ids, why)
            k += len(ids)
        return out

    def reserve(self, h: Holding, k: int, need: Need, *, stalled: bool) -> int:
        """How many of k objects of unknown length there is room for, going by the mean."""
        each = int(h.mean)
        short = k * each - self.free_nbytes
        if short > 0:
            self._make_room(h, short, need, stalled=stalled)
        return min(k, max(self.free_nbytes, 0) // each)

    def _make_room(self, h: Holding, nbytes: int, need: Need, *, stalled: bool) -> int:
        """Evict about `nbytes`; returns what was freed."""
        freed = self._claim(h, nbytes)
        if freed < nbytes:
            freed += self._evict(h, nbytes - freed, need)
        if freed < nbytes and stalled and h.keeper is not None:
            k = math.ceil((nbytes - freed) / h.mean)
            freed += h.evict(h.keeper.last(k, need), "stalled")
        return freed

    def _evict(self, h: Holding, nbytes: int, need: Need) -> int:
        """Evict what the dataset's own keeper lets go."""
        freed = 0
        while freed < nbytes and h.keeper is not None:
            ids: Index = h.keeper.victims(math.ceil((nbytes - freed) / h.mean), need)
            if not len(ids):
                break
            freed += h.evict(ids, "due_later")
        return freed

    def _claim(self, h: Holding, nbytes: int) -> int:
        """Take from those who hold more than their share, if this one holds less; bytes freed."""
        if len(self.holdings) == 1 or h.pool.used + nbytes > self.share(h):
            return 0
        freed = 0
        others = [(g.pool.used - self.share(g), g) for g in self.holdings.values() if g is not h]
        for excess, other in sorted(others, key=lambda x: -x[0]):
            taken = 0
            while freed + taken < nbytes and taken < excess:
                got = other.evict_region(nbytes - freed, self.busy(other)[0], "other_dataset")
                if not got:
                    break
                taken += got
            freed += taken
        return freed

    def set_loans(self, h: Holding, lend_share: float, ahead: int) -> None:
        """Say how much may be fetched across an epoch's turn: nothing where everything fits.

        ahead: steps that may be pinned at the turn.
        """
        keeper = h.keeper
        if isinstance(keeper, EpochKeeper):
            each = max(keeper.uses.per_step, 1.0)
            few = _BEGIN * min(len(h), self.share(h) / h.mean) / each
            keeper.begin = int(min(ahead, few))
            missing, share = self.missing(h), lend_share * len(h)
            keeper.lend = math.ceil(missing * max(share, 2 * each))
            share = 0.0 if keeper.fits else share
            keeper.lend_more = math.ceil(missing * max(share, (2 - keeper.begin) * each))


def _none(holding: Holding) -> tuple[Sizes, Sizes]:
    del holding
    return np.empty(0, np.int64), np.empty(0, np.int64)
