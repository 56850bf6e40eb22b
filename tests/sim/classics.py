"""Classic cache policies on a plain trace, object by object, to compare creel with."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray


def lru(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """Return (t,) hits of least recently used.

    >>> lru(np.array([1, 2, 1, 3, 2]), 2).tolist()
    [False, False, True, False, False]
    """
    return _recency(trace, capacity, renew=True)


def fifo(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """Return (t,) hits of first in, first out."""
    return _recency(trace, capacity, renew=False)


def _recency(trace: NDArray[np.integer], capacity: int, *, renew: bool) -> NDArray[np.bool_]:
    held: OrderedDict[int, None] = OrderedDict()
    hit = np.zeros(len(trace), np.bool_)
    for t, x in enumerate(trace.tolist()):
        if x in held:
            hit[t] = True
            if renew:
                held.move_to_end(x)
        elif capacity:
            if len(held) >= capacity:
                held.popitem(last=False)
            held[x] = None
    return hit


def pin(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """Return (t,) hits if the first `capacity` objects always stay (MinIO in CoorDL, VLDB 2021)."""
    ids, first = np.unique(trace, return_index=True)
    kept = ids[first.argsort()[:capacity]]
    hit = np.isin(trace, kept)
    hit[first] = False
    return hit


def chance(
    trace: NDArray[np.integer], capacity: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Return (t,) hits of random eviction."""
    place: dict[int, int] = {}
    held: list[int] = []
    victims = rng.integers(0, max(capacity, 1), len(trace)).tolist()
    hit = np.zeros(len(trace), np.bool_)
    for t, x in enumerate(trace.tolist()):
        if x in place:
            hit[t] = True
        elif len(held) < capacity:
            place[x] = len(held)
            held.append(x)
        elif capacity:
            at = victims[t]
            del place[held[at]]
            held[at], place[x] = x, at
    return hit


def min_reads(trace: list[int], capacity: int, epoch: int) -> NDArray[np.int64]:
    """Return reads per epoch of offline MIN with bypass that knows only this epoch and the next."""
    never = 1 << 60
    after, last = [never] * len(trace), dict[int, int]()
    for t in range(len(trace) - 1, -1, -1):
        after[t] = last.get(trace[t], never)
        last[trace[t]] = t
    held: dict[int, int] = {}
    unseen: dict[int, None] = {}
    heap: list[tuple[int, int]] = []
    reads = np.zeros(len(trace) // epoch, np.int64)
    for t, x in enumerate(trace):
        horizon = (t // epoch + 2) * epoch
        if t % epoch == 0:
            for y in [y for y in unseen if held[y] < horizon]:
                heapq.heappush(heap, (-held[y], y))
                del unseen[y]
        unseen.pop(x, None)
        reads[t // epoch] += held.pop(x, None) is None
        held[x] = after[t]
        if after[t] >= horizon:
            unseen[x] = None
        else:
            heapq.heappush(heap, (-after[t], x))
        while len(held) > capacity:
            if unseen:
                del held[unseen.popitem()[0]]
                continue
            use, y = heapq.heappop(heap)
            if held.get(y) == -use and y not in unseen:
                del held[y]
    return reads


def lru_hits(f: float) -> float:
    """Return the hit ratio of LRU over shuffled epochs if a share f of the dataset fits.

    >>> round(lru_hits(0.5), 3)
    0.153
    """
    return f + (1 - f) * math.log(1 - f) if f < 1 else 1.0
