"""Offsets of a dataset's objects in the arena, in few bytes per object. Pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.policies.arrays import Ints


class Offsets:
    """(n,) first byte in the arena of each object, or NOWHERE; indexed like an array.

    The stored numbers are record numbers plus one, with 0 for NOWHERE.

    >>> offset = Offsets(np.zeros(3, np.int32), 10)
    >>> offset[np.array([1])] = np.array([70])
    >>> offset[:].tolist(), int(offset[1])
    ([-1, 70, -1], 70)
    """

    __slots__ = ("_record", "_words")

    def __init__(self, words: NDArray[np.signedinteger], record: int) -> None:
        """words: (n,) zeros; record: all offsets are multiples of this many bytes, at least 1."""
        self._words = words
        self._record = record

    def __len__(self) -> int:
        return len(self._words)

    def view(self) -> Offsets:
        """Return the same offsets, read-only."""
        words = self._words.view()
        words.flags.writeable = False
        return Offsets(words, self._record)

    def __getitem__(self, ids: NDArray[np.integer] | slice | int) -> Ints:
        out: Ints = np.subtract(self._words[ids], 1, dtype=np.int64)
        return out if self._record == 1 else np.maximum(out * self._record, NOWHERE)

    def rows(self, ids: NDArray[np.integer], nbytes: int) -> Ints | None:
        """Return (k > 0,) the row of each object, with the arena seen as rows of `nbytes`.

        None if an object is absent, or does not begin at a row.
        """
        if self._record == nbytes:  # the row numbers are stored: a third of the time
            words = self._words.take(ids)
            if np.count_nonzero(words) != len(words):
                return None
            places: Ints = np.subtract(words, 1, dtype=np.int64)
            return places
        row, remainder = np.divmod(self[ids], nbytes)
        return None if np.count_nonzero(remainder) or row.min() < 0 else row

    def __setitem__(self, ids: NDArray[np.integer] | slice | int, offset: Ints | int) -> None:
        self._words[ids] = offset // self._record + 1


#: Offsets, or an array of them.
Places: TypeAlias = "Offsets | Ints"
