"""Lists of objects that may leave, in some order, as arrays. Pure.

Both work on whole batches; an entry costs a fraction of a microsecond (benchmarks/planning.py
measures the whole event).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from creel.policies.masks import some

Index = NDArray[np.intp]

#: Most buckets of a `Spread`: a pass over them costs about 3 us, and 4,096 parts of an epoch are
#: finer than any prefetch window.
_BUCKETS = 4096
_NOBODY = np.empty(0, np.intp)
_ROWS = 64  # levels of a bucket's stack that come together: 1 MB for all of them
_SHARES = 4  # what a bucket takes at most, in shares of all objects: more are not evenly spread


class Pool(Protocol):
    """Candidates for leaving, in some order."""

    def add(self, ids: Index) -> Index:
        """Enter candidates; returns those that have no place here."""

    def take(self, k: int) -> Index:
        """Remove and return up to k candidates, the first to leave first."""


class Spread:
    """Candidates by bucket, a bucket being a stretch of (step, rank); the fullest is drawn from.

    A bucket's candidates are a stack, so that adding and taking work on whole batches; which bucket
    an object is in is asked when it comes, as it would take long for all. Buckets lie in an order
    in which any run of them is evenly spread over the epoch: where all are equally full, victims
    are, too.

    >>> pool = Spread(np.array([0, 1, 1, 1]).__getitem__, 2, 4)
    >>> pool.add(np.arange(4)).tolist()
    []
    >>> pool.take(2).tolist()
    [3, 2]
    """

    def __init__(
        self, bucket: Callable[[Index], NDArray[np.integer]], buckets: int, objects: int
    ) -> None:
        """bucket: (k,) ids to (k,) buckets of theirs, -1 or `buckets` and more where there is none.

        objects: so many may come, about evenly: a bucket takes some times its share.
        """
        self._bucket = bucket
        self._buckets = buckets
        self._place = np.full(buckets + 1, -1, np.int16)  # the last for those without a bucket
        self._place[:-1] = np.arange(buckets) * _coprime(buckets) % buckets
        self._room = _SHARES * -(-objects // buckets) + _ROWS
        self._count = np.zeros(buckets, np.int32)
        self._slots: list[NDArray[np.int32]] = []  # (_ROWS, buckets), lower levels first

    @classmethod
    def by_step(
        cls, first: NDArray[np.int32], rank: NDArray[np.uint8], span: tuple[int, int]
    ) -> Spread:
        """Buckets of an epoch's plan; first and rank as in `Uses.table`, live; span: its steps."""
        base, stop = span
        ranks = int(rank.max(initial=0)) + 1
        steps = max(stop - base, 1)
        width = -(-steps * ranks // _BUCKETS)

        def bucket(ids: Index) -> NDArray[np.int32]:
            step = first[ids]
            found = (step - np.int32(base)) // np.int32(width)
            if ranks > 1:
                found = found * np.int32(ranks) + rank[ids]
            found[(step < base) | (step >= stop)] = -1
            return found

        return cls(bucket, -(-steps // width) * ranks, len(first))

    @classmethod
    def by_chance(cls, objects: int) -> Spread:
        """Where the next epoch is not known: by a fixed scramble, so that no place is favoured."""
        n = max(objects, 1)
        buckets, factor = min(_BUCKETS, n), _coprime(n)
        return cls(lambda ids: ids.astype(np.int64) * factor % n * buckets // n, buckets, objects)

    def add(self, ids: Index) -> Index:
        """Enter candidates (each once); returns those that no bucket has a place for."""
        small = self._bucket(ids)
        small = self._place[np.where((small < 0) | (small >= self._buckets), -1, small)]
        order = small.argsort(kind="stable")  # 16 bits: by radix, 10 times as fast on all residents
        bucket, ids = small[order].astype(np.intp), ids[order]
        level = np.arange(len(ids))
        level -= _run_starts(bucket)
        level += self._count[bucket]
        full = (level >= self._room) | (bucket < 0)
        lost = _NOBODY
        if some(full):
            lost, fits = ids[full], ~full
            bucket, ids, level = bucket[fits], ids[fits], level[fits]
        self._put(bucket, level, ids)
        self._count[bucket] = level + 1  # of several the last counts: the highest
        return lost

    def _put(self, bucket: Index, level: Index, ids: Index) -> None:
        if not len(ids):
            return
        block, row = np.divmod(level, _ROWS)
        first, last = int(block.min()), int(block.max())
        while len(self._slots) <= last:
            self._slots.append(np.empty((_ROWS, self._buckets), np.int32))
        for i in range(first, last + 1):
            here = slice(None) if first == last else block == i
            self._slots[i][row[here], bucket[here]] = ids[here]

    def take(self, k: int) -> Index:
        """Remove and return up to k candidates from the fullest buckets."""
        out = []
        while k > 0:
            top = int(self._count.max())
            if top == 0:
                break
            bucket = (self._count == top).nonzero()[0][:k]
            self._count[bucket] = top - 1
            block, row = divmod(top - 1, _ROWS)
            out.append(self._slots[block][row, bucket])
            k -= len(bucket)
        return np.concatenate(out).astype(np.intp) if out else _NOBODY


class Tray:
    """Some candidates, by the room each would leave: the tightest fits are found at once.

    >>> tray = Tray(np.array([50, 20, 30]))
    >>> tray.add(np.arange(3))
    >>> tray.fit(np.array([20, 25, 60])).tolist(), len(tray)
    ([1, 2, -1], 1)
    """

    def __init__(self, room: NDArray[np.int64]) -> None:
        """room: (n,) bytes each object takes up, a live view."""
        self._room = room
        self._rooms = np.empty(0, np.int64)  # ascending
        self._ids = _NOBODY

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of room of all."""
        return int(self._rooms.sum())

    def add(self, ids: Index) -> None:
        """Enter candidates."""
        if len(ids):
            rooms = np.concatenate([self._rooms, self._room[ids]])
            order = rooms.argsort(kind="stable")
            self._rooms, self._ids = rooms[order], np.concatenate([self._ids, ids])[order]

    def fit(self, wants: NDArray[np.int64]) -> Index:
        """Remove and return (k,) candidates with as much room as is wanted, or -1; wants ascend."""
        out = np.full(len(wants), -1, np.intp)
        # each the smallest that is large enough, and beyond the one of the want before
        number = np.arange(len(wants))
        at = np.maximum.accumulate(self._rooms.searchsorted(wants) - number) + number
        at = at[: at.searchsorted(len(self._ids))]
        out[: len(at)] = self._ids[at]
        self._keep(at)
        return out

    def take(self, k: int) -> Index:
        """Remove and return up to k candidates, all sizes alike."""
        k = min(k, len(self._ids))
        at = np.arange(k) * len(self._ids) // max(k, 1)
        out = self._ids[at]
        self._keep(at)
        return out

    def _keep(self, gone: Index) -> None:
        keep = np.ones(len(self._ids), np.bool_)
        keep[gone] = False
        self._rooms, self._ids = self._rooms[keep], self._ids[keep]


def _run_starts(ordered: Index) -> Index:
    """(k,) where the run of equals begins that each entry belongs to.

    >>> _run_starts(np.array([3, 3, 8])).tolist()
    [0, 0, 2]
    """
    if len(ordered) < 4096:  # a search is log n each, the rest five more calls
        starts: Index = ordered.searchsorted(ordered)
        return starts
    new = np.empty(len(ordered), np.bool_)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    starts = np.flatnonzero(new)[np.cumsum(new) - 1]
    return starts.astype(np.intp, copy=False)


def _coprime(n: int) -> int:
    """A number near the golden section of n that shares no divisor with it.

    >>> _coprime(10), _coprime(1)
    (7, 1)
    """
    k = max(int(n * 0.6180339887), 1)
    while np.gcd(k, n) != 1:
        k += 1
    return k


class Sorted:
    """Candidates by a key, the largest first: sorted runs, merged as they grow (log n per entry).

    An object entered again under another key leaves its old entry behind, which counts no more.

    >>> pool = Sorted(3, lambda ids: np.array([5, 9, 7])[ids])
    >>> pool.add(np.arange(3)).tolist()
    []
    >>> pool.take(2).tolist()
    [1, 2]
    """

    def __init__(self, objects: int, key: Callable[[Index], NDArray[np.int64]]) -> None:
        """key: (k,) ids to (k,) keys >= 0; may change for an object between its entries."""
        self._key = key
        self._listed = np.full(objects, -1, np.int64)  # the key of the entry that counts
        self._runs: list[tuple[NDArray[np.int64], Index]] = []  # keys ascending, ids

    def add(self, ids: Index) -> Index:
        """Enter candidates (each once); returns none: all have a place."""
        keys = self._key(ids)
        new = self._listed[ids] != keys
        keys, ids = keys[new], ids[new]
        if not len(ids):
            return _NOBODY
        self._listed[ids] = keys
        order = keys.argsort()
        run = keys[order], ids[order]
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = self._merged(self._runs.pop(), run)
        self._runs.append(run)
        return _NOBODY

    def take(self, k: int, above: int = -1) -> Index:
        """Remove and return up to k candidates, largest key first, only keys > `above`."""
        out = []
        while k > 0:
            keys, ids, more = self._pop(k, above)
            ids = self._once(ids[self._listed[ids] == keys])
            out.append(ids)
            k -= len(ids)
            if not more:
                break
        return np.concatenate(out) if out else _NOBODY

    def _once(self, ids: Index) -> Index:
        """Strike these off; each once, though a key that came back has two entries that count."""
        mark = np.arange(-2, -2 - len(ids), -1)
        self._listed[ids] = mark
        ids = ids[self._listed[ids] == mark]
        self._listed[ids] = -1
        return ids

    def _pop(self, k: int, above: int) -> tuple[NDArray[np.int64], Index, bool]:
        """The k entries with the largest keys > above, and whether there may be more of them."""
        if not self._runs:
            return np.empty(0, np.int64), _NOBODY, False
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

    def _merged(
        self, a: tuple[NDArray[np.int64], Index], b: tuple[NDArray[np.int64], Index]
    ) -> tuple[NDArray[np.int64], Index]:
        keys, ids = np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])
        counts = self._listed[ids] == keys
        keys, ids = keys[counts], ids[counts]
        order = keys.argsort(kind="stable")  # two sorted runs: a merge, not a sort
        return keys[order], ids[order]
