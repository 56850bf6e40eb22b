"""Search for objects that match a predicate, a part of the dataset at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creel.policies.arrays import NONE, Index, Ints, Mask, joined

#: Objects examined together, and how often in one call of `take`.
_SCANNED_AT_ONCE, _MAX_SCANS = 1 << 16, 4
#: Part (1/n) of the objects found that is used, those due last; and the least number of them.
_BEST_PART, _BEST = 4, 64
#: Changes after which a search that found nothing is repeated; fewer in small datasets.
_CHANGES = 256

#: Takes (k,) ids or a slice; returns (k,) whether each object matches.
Predicate = Callable[[Index | slice], Mask]


class Walk:
    """Finds matching objects chunk by chunk; within a chunk, those due last come first.

    After a pass that found none, it searches again once enough objects have changed (`changes`).
    """

    def __init__(self, objects: int) -> None:
        self.changes = 0
        self._empty = 0  # chunks in a row without a match
        self._objects = objects
        self._hand = 0
        self._matches = NONE

    def take(
        self, k: int, matches: Predicate, due: Callable[[Index], Ints], above: int | None = None
    ) -> Index:
        """Return up to k distinct objects that match now and are due after `above`."""
        out = []
        for _ in range(_MAX_SCANS + 1):
            while k > 0 and len(self._matches):
                head, self._matches = np.split(self._matches, [2 * k + 64])
                head = head[matches(head)]
                good = head if above is None else head[due(head) > above]
                out.append(good[:k])
                k -= len(out[-1])
                self._matches = np.concatenate([good[len(out[-1]) :], self._matches])
            if k <= 0 or not self._scan(matches, due):
                break
        ids = joined(out)
        if len(out) > 1:  # a chunk may have been examined twice
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
        return ids

    def _scan(self, matches: Predicate, due: Callable[[Index], Ints]) -> bool:
        """Search the next chunk; return False if no chunk had a match and few objects changed."""
        if self._empty * _SCANNED_AT_ONCE >= self._objects:
            if self.changes < min(_CHANGES, 1 + self._objects // 1024):
                return False
            self._empty = 0
        if not self._empty:
            self.changes = 0
        stop = min(self._hand + _SCANNED_AT_ONCE, self._objects)
        ids = self._hand + np.flatnonzero(matches(slice(self._hand, stop)))
        self._hand = stop if stop < self._objects else 0
        order = np.argsort(due(ids), kind="stable")[::-1]
        self._matches = ids[order[: max(len(ids) // _BEST_PART, _BEST)]]
        self._empty = 0 if len(ids) else self._empty + 1
        return True
