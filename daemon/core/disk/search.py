"""Finding objects of some kind among all of a dataset, a part of them at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creel.policies.arrays import NONE, Index, Ints, Mask, joined

#: Objects looked at together in search of some kind of object, and how often in one call.
_SCANNED_AT_ONCE, _MAX_SCANS = 1 << 16, 4
#: Of those found, the part (1/n) that is due last is used, and at least this many.
_BEST_PART, _BEST = 4, 64
#: After this many changes a search that found nothing is repeated; sooner where it is cheap.
_CHANGES = 256

#: (k,) or a slice -> (k,) whether each object is of some kind.
Predicate = Callable[[Index | slice], Mask]


class Walk:
    """Finds objects that match, chunk by chunk of all: of each chunk, those due last first.

    Where none was found in all chunks, it looks again once `changes` objects may have become such.
    """

    def __init__(self, objects: int) -> None:
        self.changes = 0
        self._empty = 0  # chunks in a row in which there was none
        self._objects = objects
        self._hand = 0
        self._found = NONE

    def take(
        self, k: int, matches: Predicate, due: Callable[[Index], Ints], above: int | None = None
    ) -> Index:
        """Up to k distinct objects that are of this kind now; only those due after `above`."""
        out = []
        for _ in range(_MAX_SCANS + 1):
            while k > 0 and len(self._found):
                head, self._found = np.split(self._found, [2 * k + 64])
                head = head[matches(head)]
                good = head if above is None else head[due(head) > above]
                out.append(good[:k])
                k -= len(out[-1])
                self._found = np.concatenate([good[len(out[-1]) :], self._found])
            if k <= 0 or not self._look(matches, due):
                break
        found = joined(out)
        if len(out) > 1:  # a chunk may have come twice
            found = found[np.sort(np.unique(found, return_index=True)[1])]
        return found

    def _look(self, matches: Predicate, due: Callable[[Index], Ints]) -> bool:
        """Look into the next chunk; False where it is known that there is none in any."""
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
        self._found = ids[order[: max(len(ids) // _BEST_PART, _BEST)]]
        self._empty = 0 if len(ids) else self._empty + 1
        return True
