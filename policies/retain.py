"""Which residents leave when room is needed. Pure: arrays in, object ids out.

Three cases, told apart by the plans themselves (laws L1 to L3, docs/architecture.md):

- Every epoch reads each object at most once: `EpochKeeper`. What the epoch still has to read stays
  (L1); of the rest, an even share of each (step, rank) of the next epoch is kept (L2), so that the
  source is read at a steady pace.
- All else (replacement, weights, several jobs on one dataset): `FarKeeper`, the farthest next use
  first, and never for something that is due later than the victim (MIN with bypass, Belady 1966).
- Nothing is known beyond the steps that are being read (creel.wrap, samplers that nobody can run
  ahead): `RecentKeeper`.

Lists are lazy: an entry counts while it is the object's latest, the object is resident and nobody
has pinned it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from creel.policies.epochs import EpochKeeper
from creel.policies.keeper import (
    ABSENT,
    FAILED,
    FETCHING,
    OVERDUE,
    RESIDENT,
    Keeper,
    Need,
    joined,
)
from creel.policies.masks import unique
from creel.policies.pools import Index, Sorted
from creel.policies.uses import NEVER, Uses

__all__ = [
    "ABSENT",
    "FAILED",
    "FETCHING",
    "OVERDUE",
    "RESIDENT",
    "EpochKeeper",
    "FarKeeper",
    "Keeper",
    "Need",
    "RecentKeeper",
]


_PIECE = 256  # entries looked at together, at least: most of them may count no more


class RecentKeeper(Keeper):
    """For readers who tell one step at a time: what was read last leaves first.

    Nothing is known but the past. The best guess is an epoch that reads all once before anything
    twice: then the latest reads are due last, and a share f of the data gives f hits (L1).
    """

    def __init__(self, life: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[Uses]) -> None:
        super().__init__(life, pins, uses)
        self._log = np.empty(2 * len(life), np.int32)  # objects in the order of their releases
        self._end = 0
        self._at = np.full(len(life), -1, np.intp)  # where the entry is that counts: the latest

    def relist(self) -> None:
        """Enter residents that are in no list: nobody says when they were released."""
        self.stale = False
        self._squeeze()
        absent = (self._life == RESIDENT) & (self._pins == 0)
        absent[self._log[: self._end]] = False
        self._enter(np.flatnonzero(absent))

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        self._enter(unique(ids))

    def _enter(self, ids: Index) -> None:
        if self._end + len(ids) > len(self._log):
            self._squeeze()
        start, self._end = self._end, self._end + len(ids)
        self._log[start : self._end] = ids
        self._at[ids] = np.arange(start, self._end)

    def _squeeze(self) -> None:
        """Strike out the entries that do not count; no more than half are left."""
        ids = self._log[: self._end]
        ids = ids[self._at[ids] == np.arange(self._end)]
        self._end = len(ids)
        self._log[: self._end] = ids
        self._at[ids] = np.arange(self._end)

    def victims(self, k: int, need: Need) -> Index:  # noqa: ARG002  (nobody knows what is due)
        """Up to k distinct objects to evict, read last; they are in no list after this."""
        if self.stale:
            self.relist()
        out = []
        while k > 0 and self._end:
            start = max(self._end - 2 * k - _PIECE, 0)
            ids = self._log[start : self._end].astype(np.intp)
            good = (self._at[ids] == np.arange(start, self._end)) & self._leaving(ids)
            found = good.nonzero()[0][-k:]
            self._end = start + int(found[0]) if len(found) == k else start
            out.append(ids[found[::-1]])
            k -= len(found)
        return joined(out)


class FarKeeper(Keeper):
    """For all other streams: farthest next use first, never for something due later (law L3)."""

    def __init__(
        self,
        life: NDArray[np.uint8],
        pins: NDArray[np.int32],
        uses: list[Uses],
        clock: Callable[[], list[tuple[float, float]]],
    ) -> None:
        """clock: for each of `uses`, (a, b): its step s falls on the common time a * s + b."""
        super().__init__(life, pins, uses)
        self._clock = clock
        self._lines: list[tuple[float, float, float]] = []
        self._pool = self._sorted(0)

    def relist(self) -> None:
        """Sort all residents anew: plans or the jobs' speeds have changed."""
        self.stale = False
        self._lines = [
            (a, b, a * uses.beyond + b)
            for uses, (a, b) in zip(self.all_uses, self._clock(), strict=True)
        ]
        self._pool = self._sorted(len(self._life))
        self._pool.add(self._unpinned())

    def _sorted(self, objects: int) -> Sorted:
        """No bound method for a key: keepers are large, and a ring waits for the collector."""
        return Sorted(objects, partial(_next_uses, self.all_uses, self._lines))

    def at(self, uses: Uses, step: int) -> int:
        """A job's step on the clock of `Need.step`."""
        if self.stale:
            self.relist()
        a, b, _ = self._lines[next(i for i, u in enumerate(self.all_uses) if u is uses)]
        return int(a * step + b)

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        if not self.stale:
            self._pool.add(unique(ids))

    def victims(self, k: int, need: Need) -> Index:
        """Up to k distinct objects to evict for `need`, all due later than `need.step`."""
        if self.stale:
            self.relist()
        out = []
        while k > 0:
            ids = self._pool.take(k, need.step)
            if not len(ids):
                break
            ids = ids[self._leaving(ids)]
            out.append(ids)
            k -= len(ids)
        return joined(out)


def _next_uses(
    jobs: list[Uses], lines: list[tuple[float, float, float]], ids: Index
) -> NDArray[np.int64]:
    """(k,) common time of the next use of each object; `lines` as FarKeeper has them."""
    out = np.full(len(ids), np.inf)
    for uses, (a, b, beyond) in zip(jobs, lines, strict=True):
        due = uses.due[ids]
        np.minimum(out, np.where(due == NEVER, beyond, a * due + b), out=out)
    keys: NDArray[np.int64] = np.clip(out, 0, 2**62).astype(np.int64)
    return keys
