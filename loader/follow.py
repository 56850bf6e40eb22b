"""Follow: batches that nobody foresaw, told to the daemon one by one, as they are asked for.

Some samplers cannot be run ahead: they decide as they go, or draw from what others draw from, too.
The daemon then knows only of the batches that were pulled already: as many as torch pulls ahead.
It brings them into the arena, and keeps what it thinks is read again.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Given(NamedTuple):
    """A batch that was told: its step of the session, its (k,) objects, how many samples."""

    step: int
    ids: NDArray[np.int32]
    samples: int


class Followed:
    """The batches of one epoch that were told one by one, by their numbers in it."""

    def __init__(self) -> None:
        self._given: dict[int, Given] = {}  # until they are counted
        self._open: deque[tuple[int, int]] = deque()  # (batch, step) until they have arrived
        self._done = 0

    def add(self, i: int, given: Given) -> None:
        """Batch i was told."""
        self._given[i] = given
        self._open.append((i, given.step))

    def ids(self, i: int) -> NDArray[np.int32] | None:
        """(k,) objects of batch i, if it was told and is not counted yet."""
        given = self._given.get(i)
        return None if given is None else given.ids

    def done(self, i: int) -> int:
        """All batches below i have arrived: so have the session's steps below this one."""
        while self._open and self._open[0][0] < i:
            self._done = self._open.popleft()[1] + 1
        return self._done

    def take(self, first: int, last: int) -> list[Given]:
        """The batches of [first, last) that were told; they are forgotten."""
        if not self._given:
            return []
        return [self._given.pop(i) for i in range(first, last) if i in self._given]


def indices_of(pulled: object) -> NDArray[np.int64] | None:
    """(n,) samples of what a sampler yields: an index, or a flat group of them; else None."""
    try:
        found = np.atleast_1d(np.asarray(pulled))
    except Exception:  # noqa: BLE001  nothing that numpy makes an array of, in whatever words
        return None
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        return None
    found = found.astype(np.int64)
    return None if found.min() < 0 else found


def samples_in(pulled: object) -> int:
    """How many samples a batch seems to be of, whatever it is: 1 where it does not tell."""
    try:
        return operator.length_hint(pulled, 1)
    except Exception:  # noqa: BLE001  the person's own code may run here
        return 1
