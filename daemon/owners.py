"""Which object lies at an address: the table `offset`, read backwards. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.cache.space import PagedPool

Index = NDArray[np.intp]
Sizes = NDArray[np.int64]

#: Bytes of the space per entry, at least: 4 bytes each make 0.4 % of it.
_GRAIN = 1024


class Owners:
    """One of the objects that were put into each small piece of the space, however long ago.

    Where several begin in one piece the last one is known. Whoever asks must look whether the
    object is still there: nothing is ever taken out.
    """

    def __init__(self, nbytes: int, pool: PagedPool) -> None:
        self._pool = pool
        self._grain = max(_GRAIN, pool.page)
        self._ids = np.zeros(nbytes // self._grain + 1, np.int32)  # lazily touched by the system

    def put(self, ids: Index, offset: Sizes) -> None:
        """These objects begin at these offsets now."""
        self._ids[offset // self._grain] = ids

    def between(self, start: int, stop: int, offset: Sizes) -> Index:
        """(k,) objects that begin in [start, stop), ascending by address.

        Args:
            offset: (n,) where each object begins, or a negative number.
        """
        starts = self._pool.starts(start, stop)
        ids = self._ids[starts // self._grain]
        found: Index = ids[offset[ids] == starts].astype(np.intp)
        return found
