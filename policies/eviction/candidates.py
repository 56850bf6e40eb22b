"""Ordered lists of eviction candidates, as arrays. Pure.

All operations work on batches; an entry costs a fraction of a microsecond (benchmarks/planning.py
measures whole events).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creel.policies.arrays import NONE, Index, Ints, joined


class Sorted:
    """Candidates ordered by a key, largest first: sorted runs that are merged (log n per entry).

    Adding an object again under another key makes its old entry invalid.

    >>> pool = Sorted(3, lambda ids: np.array([5, 9, 7])[ids])
    >>> pool.add(np.arange(3))
    >>> pool.take(2).tolist()
    [1, 2]
    """

    def __init__(self, objects: int, key: Callable[[Index], Ints]) -> None:
        """`key` maps (k,) ids to (k,) keys >= 0; an object's key may change."""
        self._key = key
        self._listed = np.full(objects, -1, np.int64)  # the key of the valid entry
        self._runs: list[tuple[Ints, Index]] = []  # keys ascending, ids

    def add(self, ids: Index) -> None:
        """Add candidates, each once."""
        keys = self._key(ids)
        new = self._listed[ids] != keys
        keys, ids = keys[new], ids[new]
        if not len(ids):
            return
        self._listed[ids] = keys
        order = keys.argsort()
        run = keys[order], ids[order]
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = self._merged(self._runs.pop(), run)
        self._runs.append(run)

    def take(self, k: int, above: int = -1) -> Index:
        """Remove and return up to k candidates with keys > `above`, largest key first."""
        out = []
        while k > 0:
            keys, ids, more = self._pop(k, above)
            ids = self._distinct(ids[self._listed[ids] == keys])
            out.append(ids)
            k -= len(ids)
            if not more:
                break
        return joined(out)

    def _distinct(self, ids: Index) -> Index:
        """Remove and return distinct ids; a key that came back may have two valid entries."""
        mark = np.arange(-2, -2 - len(ids), -1)
        self._listed[ids] = mark
        ids = ids[self._listed[ids] == mark]
        self._listed[ids] = -1
        return ids

    def _pop(self, k: int, above: int) -> tuple[Ints, Index, bool]:
        """Remove k entries with the largest keys > above; return also whether there may be more."""
        if not self._runs:
            return np.empty(0, np.int64), NONE, False
        heads = [(keys[-k:], ids[-k:]) for keys, ids in self._runs]
        keys = np.concatenate([h[0] for h in heads])
        ids = np.concatenate([h[1] for h in heads])
        run = np.repeat(np.arange(len(heads)), [len(h[0]) for h in heads])
        best = keys.argsort(kind="stable")[-k:][::-1]
        best = best[keys[best] > above]
        taken = np.bincount(run[best], minlength=len(heads)).tolist()
        self._runs = [
            (keys[: len(keys) - n], ids[: len(ids) - n])
            for (keys, ids), n in zip(self._runs, taken, strict=True)
            if len(keys) > n
        ]
        return keys[best], ids[best], len(best) == k

    def _merged(self, a: tuple[Ints, Index], b: tuple[Ints, Index]) -> tuple[Ints, Index]:
        keys, ids = np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])
        counts = self._listed[ids] == keys
        keys, ids = keys[counts], ids[counts]
        order = keys.argsort(kind="stable")  # two sorted runs: a merge, not a sort
        return keys[order], ids[order]
