"""Eviction when only the past is known: the objects read last leave first. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Index, Mask, joined, unique
from creel.policies.eviction.policy import RESIDENT, EvictionPolicy
from creel.policies.next_use import NextUses

_LEAST_ENTRIES = 256  # entries processed together, at least: most may be invalid


class ReleaseLog:
    """Objects in the order of their latest releases.

    >>> log = ReleaseLog(4)
    >>> log.add(np.array([0, 1, 2]))
    >>> log.add(np.array([1]))
    >>> log.take(2, lambda ids: ids >= 0).tolist()
    [1, 2]
    """

    def __init__(self, objects: int) -> None:
        self._log = np.empty(_LEAST_ENTRIES, np.int32)
        self._end = 0
        self._at = np.full(objects, -1, np.int32)  # index of each object's valid entry

    def add(self, ids: Index) -> None:
        """Add distinct objects as the latest."""
        if self._end + len(ids) > len(self._log):
            self._squeeze(len(ids))
        start, self._end = self._end, self._end + len(ids)
        self._log[start : self._end] = ids
        self._at[ids] = np.arange(start, self._end)

    def remove(self, ids: Index) -> None:
        """Remove objects that are in the log."""
        self._at[ids] = -1

    def clear(self) -> None:
        self._end = 0
        self._at[:] = -1

    def all(self) -> Index:
        """Return (k,) the objects in the log, the latest last."""
        ids = self._log[: self._end].astype(np.intp)
        valid: Mask = self._at[ids] == np.arange(self._end)
        return ids[valid]

    def take(self, k: int, leaving: Callable[[Index], Mask]) -> Index:
        """Remove and return up to k objects, the latest first; drop any not `leaving`."""
        out = []
        while k > 0 and self._end:
            start = max(self._end - 2 * k - _LEAST_ENTRIES, 0)
            ids = self._log[start : self._end].astype(np.intp)
            good = (self._at[ids] == np.arange(start, self._end)) & leaving(ids)
            rows = good.nonzero()[0][-k:]
            self._end = start + int(rows[0]) if len(rows) == k else start
            out.append(ids[rows[::-1]])
            k -= len(rows)
        return joined(out)

    def _squeeze(self, more: int) -> None:
        """Remove invalid entries and make room for `more`, so that at most half the log is used."""
        ids = self.all()
        self._end = len(ids)
        if len(self._log) < 2 * (len(ids) + more):
            self._log = np.empty(2 * (len(ids) + more), np.int32)
        self._log[: self._end] = ids
        self._at[ids] = np.arange(self._end)


class MostRecentFirst(EvictionPolicy):
    """For readers that publish one step at a time: evicts the objects read last.

    Only the past is known. The best guess is that an epoch reads all objects once before it reads
    any of them again. Then the latest reads are due last, and a share f of the data gives f hits
    (L1).
    """

    name = "recent"

    def __init__(
        self, state: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[NextUses]
    ) -> None:
        super().__init__(state, pins, uses)
        self.stale = True  # evictable residents may be missing from the log
        self._log = ReleaseLog(len(state))

    def replanned(self) -> None:
        self.stale = True

    def relist(self) -> None:
        """Add the residents that are missing from the log; their release times are unknown."""
        self.stale = False
        absent = (self._state == RESIDENT) & (self._pins == 0)
        absent[self._log.all()] = False
        self._enter(np.flatnonzero(absent))

    def released(self, ids: Index) -> None:
        self._enter(unique(ids))

    def _enter(self, ids: Index) -> None:
        self._log.add(ids)

    def victims(self, k: int, step: int) -> Index:  # noqa: ARG002  (next uses are unknown)
        """Remove and return up to k distinct objects to evict, the objects read last first."""
        if self.stale:
            self.relist()
        return self._log.take(k, self._leaving)
