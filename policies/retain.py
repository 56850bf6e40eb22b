"""Which residents leave when room is needed. Pure: arrays in, object ids out.

Three cases, told apart by the plans themselves (laws L1 to L3, docs/architecture.md):

- Every epoch reads each object at most once: `EpochKeeper`. What the epoch still has to read stays
  (L1); of the rest, an even share of each (step, rank) of the next epoch is kept (L2), so that the
  source is read at a steady pace.
- All else (replacement, weights, several jobs on one dataset): `FarKeeper`, the farthest next use
  first, and never for something that is due later than the victim (MIN with bypass, Belady 1966).
- Nothing is known beyond the step that is being read (creel.wrap): `RecentKeeper`.

Lists are lazy: an entry counts while the object's stamp is the one it was entered under, the object
is resident and nobody has pinned it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from creel.policies.epochs import EpochKeeper
from creel.policies.keeper import ABSENT, FAILED, FETCHING, RESIDENT, Keeper, Need, joined
from creel.policies.pools import Index, Sorted
from creel.policies.uses import NEVER, Uses

__all__ = [
    "ABSENT",
    "FAILED",
    "FETCHING",
    "RESIDENT",
    "EpochKeeper",
    "FarKeeper",
    "Keeper",
    "Need",
    "RecentKeeper",
]


class RecentKeeper(Keeper):
    """For readers who tell one step at a time: what was read last leaves first.

    Nothing is known but the past. The best guess is an epoch that reads all once before anything
    twice: then the latest reads are due last, and a share f of the data gives f hits (L1).
    """

    def __init__(self, life: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[Uses]) -> None:
        super().__init__(life, pins, uses)
        self._stamp = np.zeros(len(life), np.int64)  # of the latest release
        self._last = 0
        self._stack: list[tuple[int, Index]] = []  # (stamp, objects)
        self._listed = 0

    def relist(self) -> None:
        """Put all residents in the order of their latest release."""
        self.stale = False
        ids = self._unpinned()
        ids = ids[self._stamp[ids].argsort(kind="stable")]
        stamps, starts = np.unique(self._stamp[ids], return_index=True)
        parts = np.split(ids, starts[1:]) if len(ids) else []
        self._stack = list(zip(stamps.tolist(), parts, strict=True))
        self._listed = len(ids)

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        self._last += 1
        self._stamp[ids] = self._last
        if self.stale:
            return
        self._stack.append((self._last, np.unique(ids)))
        self._listed += len(ids)
        if self._listed > 2 * len(self._life):  # most entries are of no use any more
            self.stale = True

    def victims(self, k: int, need: Need) -> Index:  # noqa: ARG002  (nobody knows what is due)
        """Up to k distinct objects to evict, read last; they are in no list after this."""
        if self.stale:
            self.relist()
        out = []
        while k > 0 and self._stack:
            stamp, ids = self._stack.pop()
            self._listed -= len(ids)
            ids = ids[(self._stamp[ids] == stamp) & self._leaving(ids)]
            if len(ids) > k:
                self._stack.append((stamp, ids[:-k]))
                self._listed += len(ids) - k
                ids = ids[-k:]
            out.append(ids)
            k -= len(ids)
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
        self._pool = Sorted(0, self.keys)

    def relist(self) -> None:
        """Sort all residents anew: plans or the jobs' speeds have changed."""
        self.stale = False
        self._lines = [
            (a, b, a * uses.beyond + b)
            for uses, (a, b) in zip(self.all_uses, self._clock(), strict=True)
        ]
        self._pool = Sorted(len(self._life), self.keys)
        self.released(self._unpinned())

    def keys(self, ids: Index) -> NDArray[np.int64]:
        """(k,) common time of the next use of each object."""
        out = np.full(len(ids), np.inf)
        for uses, (a, b, beyond) in zip(self.all_uses, self._lines, strict=True):
            due = uses.due[ids]
            np.minimum(out, np.where(due == NEVER, beyond, a * due + b), out=out)
        keys: NDArray[np.int64] = np.clip(out, 0, 2**62).astype(np.int64)
        return keys

    def at(self, uses: Uses, step: int) -> int:
        """A job's step on the clock of `Need.step`."""
        if self.stale:
            self.relist()
        a, b, _ = self._lines[next(i for i, u in enumerate(self.all_uses) if u is uses)]
        return int(a * step + b)

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        if not self.stale:
            self._pool.add(np.unique(ids))

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
