"""Eviction by farthest next use (MIN with bypass, Belady 1966), for streams with repeats. Pure.

Lists are lazy: an entry is valid if it is the object's latest one and the object is resident and
not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Floats, Index, Ints, Mask, joined, unique
from creel.policies.eviction.candidates import Sorted
from creel.policies.eviction.policy import EvictionPolicy
from creel.policies.next_use import NEVER, NextUses

#: All residents are sorted again once plans for this part (1/n) of the dataset have come.
_SORT_AGAIN_PART = 16


class FarthestNextUse(EvictionPolicy):
    """For streams with repeats: evicts the farthest next use, never for a later read (law L4)."""

    name = "far"
    short_prefetch = True

    def __init__(
        self,
        state: NDArray[np.uint8],
        pins: NDArray[np.int32],
        uses: list[NextUses],
        clock: Callable[[], list[tuple[float, float]]],
    ) -> None:
        """`clock`: for each of `uses`, (a, b), so that its step s is at common time a * s + b."""
        super().__init__(state, pins, uses)
        self.stale = True  # evictable residents may be missing from the list
        self._unsorted_reads = 0  # planned reads since all residents were sorted
        self._clock = clock
        self._job_clocks: list[tuple[float, float, float]] = []
        self._pool = self._sorted(0)

    def replanned(self) -> None:
        self.stale = True

    def plan_extended(self, ids: Index, epoch: int) -> None:  # noqa: ARG002
        loose = ids[self._leaving(ids)]
        if len(loose):
            self.released(loose)
        self._unsorted_reads += len(ids)
        if self._unsorted_reads * _SORT_AGAIN_PART >= len(self._state):
            self.stale = True

    def relist(self) -> None:
        """Sort all residents again, as plans or the jobs' speeds have changed."""
        self.stale, self._unsorted_reads = False, 0
        self._job_clocks = [
            (a, b, a * uses.beyond + b)
            for uses, (a, b) in zip(self.all_uses, self._clock(), strict=True)
        ]
        self._pool = self._sorted(len(self._state))
        self._list(self._unpinned())

    def due(self, ids: Index) -> Ints:
        """(k,) common time of each object's next use."""
        if self.stale:
            self.relist()
        return _next_uses(self.all_uses, self._job_clocks, self.alive, ids)

    def _sorted(self, objects: int) -> Sorted:
        """Return an empty list. A bound method as its key would make a reference cycle."""
        return Sorted(objects, partial(_next_uses, self.all_uses, self._job_clocks, self.alive))

    def at(self, uses: NextUses, step: int) -> int:
        """Convert a job's step to common time."""
        if self.stale:
            self.relist()
        a, b, _ = self._job_clocks[next(i for i, u in enumerate(self.all_uses) if u is uses)]
        return int(a * step + b)

    def released(self, ids: Index) -> None:
        if not self.stale:
            self._list(unique(ids))

    def _list(self, ids: Index) -> None:
        """Add distinct residents that may leave."""
        self._pool.add(ids)

    def victims(self, k: int, step: int) -> Index:
        """Remove and return up to k distinct objects to evict for `step`, all due later."""
        if self.stale:
            self.relist()
        out = []
        while k > 0:
            ids = self._pool.take(k, step)
            if not len(ids):
                break
            ids = ids[self._leaving(ids)]
            out.append(ids)
            k -= len(ids)
        return joined(out)


def _next_uses(
    jobs: list[NextUses],
    lines: list[tuple[float, float, float]],
    alive: Mask | None,
    ids: Index,
) -> Ints:
    """Return (k,) common times of next uses; `lines`: (a, b, time of unknown uses) per job."""
    times = []
    for uses, (a, b, beyond) in zip(jobs, lines, strict=True):
        due = uses.due[ids]
        unknown = beyond if alive is None else np.where(alive[ids], beyond, np.inf)
        times.append(np.where(due == NEVER, unknown, a * due + b))
    return soonest(times, len(ids), 2**62)


def soonest(times: Iterable[Floats], objects: int, latest: int) -> Ints:
    """Return (objects,) the minimum of several arrays of times, clipped to 0 ... `latest`.

    >>> soonest([np.array([3.0, -1.0, 7.5]), np.array([4.0, 2.0, np.inf])], 3, 5).tolist()
    [3, 0, 5]
    """
    out = np.full(objects, np.inf)
    for time in times:
        np.minimum(out, time, out=out)
    keys: Ints = np.clip(out, 0, latest).astype(np.int64)
    return keys
