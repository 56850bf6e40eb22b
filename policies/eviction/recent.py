"""Eviction where only the past is known: what was read last leaves first. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.eviction.candidates import Index
from creel.policies.eviction.policy import RESIDENT, EvictionPolicy, joined
from creel.policies.masks import unique
from creel.policies.next_use import NextUses

_PIECE = 256  # least number of entries processed together, as most may be invalid


class MostRecentFirst(EvictionPolicy):
    """For readers that publish one step at a time: evicts what was read last.

    Only the past is known. The best guess is an epoch that reads all objects once before any
    twice: then the latest reads are due last, and a share f of the data gives f hits (L1).
    """

    name = "recent"

    def __init__(
        self, life: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[NextUses]
    ) -> None:
        super().__init__(life, pins, uses)
        self.stale = True  # evictable residents may be missing from the log
        self._log = np.empty(2 * len(life), np.int32)  # objects in the order of their releases
        self._end = 0
        self._at = np.full(len(life), -1, np.intp)  # index of each object's valid entry, the latest

    def replanned(self) -> None:
        """Plans were rebuilt, or a job ended."""
        self.stale = True

    def relist(self) -> None:
        """Add residents that are missing from the log, whose release time is unknown."""
        self.stale = False
        self._squeeze()
        absent = (self._life == RESIDENT) & (self._pins == 0)
        absent[self._log[: self._end]] = False
        self._enter(np.flatnonzero(absent))

    def released(self, ids: Index) -> None:
        """Add residents that are no longer pinned (an object may come twice)."""
        self._enter(unique(ids))

    def _enter(self, ids: Index) -> None:
        if self._end + len(ids) > len(self._log):
            self._squeeze()
        start, self._end = self._end, self._end + len(ids)
        self._log[start : self._end] = ids
        self._at[ids] = np.arange(start, self._end)

    def _squeeze(self) -> None:
        """Remove invalid entries; at most half of the log remains."""
        ids = self._log[: self._end]
        ids = ids[self._at[ids] == np.arange(self._end)]
        self._end = len(ids)
        self._log[: self._end] = ids
        self._at[ids] = np.arange(self._end)

    def victims(self, k: int, step: int) -> Index:  # noqa: ARG002  (what is due is unknown)
        """Remove and return up to k distinct objects to evict, those read last first."""
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
