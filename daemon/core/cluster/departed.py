"""Rooms of evicted objects that are still being sent to peers. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.memory.pools.pool import ObjectPool
from creel.policies.arrays import Ints


class Departed:
    """Rooms of evicted objects that are still being sent to peers."""

    def __init__(self, pool: ObjectPool) -> None:
        self._pool = pool
        self._rooms: list[tuple[set[int], Ints, Ints]] = []

    def add(self, requests: set[int], place: Ints, nbytes: Ints) -> None:
        """Keep these rooms allocated until the given peer requests have been answered."""
        self._rooms.append((requests, place, nbytes))

    def answered(self, request: int) -> None:
        """Note that a request was answered; free the rooms that no other request needs."""
        for requests, place, nbytes in self._rooms:
            requests.discard(request)
            if not requests:
                self._pool.free(place, nbytes)
        self._rooms = [room for room in self._rooms if room[0]]

    def rooms(self) -> tuple[Ints, Ints]:
        """Return (k,) places and (k,) lengths of all rooms that are kept."""
        none = np.empty(0, np.int64)
        place = np.concatenate([none, *(place for _, place, _ in self._rooms)])
        return place, np.concatenate([none, *(nbytes for _, _, nbytes in self._rooms)])
