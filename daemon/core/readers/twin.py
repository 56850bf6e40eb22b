"""Twin: which objects of a dataset are in memory decoded, so that their bytes need not be. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from creel.policies.arrays import Index, Ints, Mask


class Twin:
    """What the readers of a session keep decoded: live views, which other processes write.

    A word may say anything at any time. An object that has a twin is neither fetched nor held; a
    reader that does not find it decoded reads it directly, as any object that was skipped.
    """

    def __init__(self, parts: Sequence[tuple[int, Ints]]) -> None:
        """`parts`: (first object, words of the objects from there on, 0: not decoded)."""
        self._parts = parts

    def has(self, ids: Index) -> Mask:
        """Return (k,) whether each object is in memory decoded.

        >>> Twin([(2, np.array([0, 64]))]).has(np.array([1, 2, 3, 4])).tolist()
        [False, False, True, False]
        """
        has = np.zeros(len(ids), np.bool_)
        for first, words in self._parts:
            inside = np.flatnonzero((ids >= first) & (ids < first + len(words)))
            has[inside] |= words[ids[inside] - first] != 0
        return has
