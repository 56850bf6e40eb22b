"""Offsets of a dataset's objects in the arena, stored in as few bytes as possible. Pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import NOWHERE
from creel.policies.arrays import Ints


class Offsets:
    """(n,) first byte in the arena of each object, or NOWHERE; reads and writes like an array.

    Stored as the record number plus one, with 0 for NOWHERE.

    >>> offset = Offsets(np.zeros(3, np.int32), 10)
    >>> offset[np.array([1])] = np.array([70])
    >>> offset[:].tolist(), int(offset[1])
    ([-1, 70, -1], 70)
    """

    __slots__ = ("_record", "_words")

    def __init__(self, words: NDArray[np.signedinteger], record: int) -> None:
        """words: (n,) zeros; record: bytes, 1 or more, of which all offsets are multiples."""
        self._words = words
        self._record = record

    def __len__(self) -> int:
        return len(self._words)

    def view(self) -> Offsets:
        """The same offsets, read only."""
        words = self._words.view()
        words.flags.writeable = False
        return Offsets(words, self._record)

    def __getitem__(self, ids: NDArray[np.integer] | slice | int) -> Ints:
        out: Ints = np.subtract(self._words[ids], 1, dtype=np.int64)
        return out if self._record == 1 else np.maximum(out * self._record, NOWHERE)

    def rows(self, ids: NDArray[np.integer], nbytes: int) -> Ints | None:
        """(k > 0,) number of each object's row, where the arena is rows of `nbytes`.

        None if an object is absent, or does not begin where a row does.
        """
        if self._record == nbytes:  # rows are what is stored: a third of the time
            words = self._words.take(ids)
            if np.count_nonzero(words) != len(words):
                return None
            places: Ints = np.subtract(words, 1, dtype=np.int64)
            return places
        row, rest = np.divmod(self[ids], nbytes)
        return None if np.count_nonzero(rest) or row.min() < 0 else row

    def __setitem__(self, ids: NDArray[np.integer] | slice | int, offset: Ints | int) -> None:
        self._words[ids] = offset // self._record + 1


#: Offsets, or an array of them.
Places: TypeAlias = "Offsets | Ints"
