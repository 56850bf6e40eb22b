"""Find the object at an arena address: the inverse of the `offset` column. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.allocator import ObjectPool
from creel.cache.memory.offsets import Places

Index = NDArray[np.intp]
Sizes = NDArray[np.int64]

#: Least bytes of the space per entry: 4 bytes each make 0.4 % of it.
_GRAIN = 1024


class AddressIndex:
    """For each small piece of the space, one object that was put there at some time.

    Where several objects begin in one piece, the last one put is kept. Entries are never removed:
    callers must check that the object is still there.
    """

    def __init__(self, nbytes: int, pool: ObjectPool) -> None:
        self._pool = pool
        self._grain = max(_GRAIN, pool.page)
        self._ids = np.zeros(nbytes // self._grain + 1, np.int32)  # zeroed lazily by the system

    def put(self, ids: Index, offset: Sizes) -> None:
        """Record that objects `ids` (k,) begin at `offset` (k,)."""
        self._ids[offset // self._grain] = ids

    def between(self, start: int, stop: int, offset: Places) -> Index:
        """(k,) objects that begin in [start, stop), ascending by address.

        Args:
            offset: (n,) where each object begins; negative where it is absent.
        """
        starts = self._pool.starts(start, stop)
        ids = self._ids[starts // self._grain]
        found: Index = ids[offset[ids] == starts].astype(np.intp)
        return found
