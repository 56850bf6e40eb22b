"""Objects that are gone, but are still being sent to peers. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.memory.allocator import ObjectPool
from creel.policies.arrays import Ints


class Departed:
    """Rooms of objects that are gone, but are still being sent to peers."""

    def __init__(self, pool: ObjectPool) -> None:
        self._pool = pool
        self._rooms: list[tuple[set[int], Ints, Ints]] = []

    def add(self, requests: set[int], place: Ints, nbytes: Ints) -> None:
        """These rooms are free once these requests of peers have been answered."""
        self._rooms.append((requests, place, nbytes))

    def answered(self, request: int) -> None:
        """Free the rooms that were kept for this request alone."""
        for requests, place, nbytes in self._rooms:
            requests.discard(request)
            if not requests:
                self._pool.free(place, nbytes)
        self._rooms = [room for room in self._rooms if room[0]]

    def rooms(self) -> tuple[Ints, Ints]:
        """(k,) places and (k,) lengths."""
        none = np.empty(0, np.int64)
        place = np.concatenate([none, *(place for _, place, _ in self._rooms)])
        return place, np.concatenate([none, *(nbytes for _, _, nbytes in self._rooms)])
