"""Unplanned batches: published to the daemon one by one, as they are requested.

Some samplers cannot be predicted: they decide as they go, or share their generator with other code.
The daemon then knows only the batches that were pulled already, as many as torch pulls ahead. It
fetches these and keeps what it expects to be read again.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class UnplannedBatch(NamedTuple):
    """A published unplanned batch: its session step, (k,) objects and number of samples."""

    step: int
    ids: NDArray[np.int32]
    samples: int


class UnplannedBatches:
    """The unplanned batches of one epoch, by their numbers in it."""

    def __init__(self) -> None:
        self._given: dict[int, UnplannedBatch] = {}  # until they are counted
        self._open: deque[tuple[int, int]] = deque()  # (batch, step) until they have arrived
        self._done = 0

    def add(self, i: int, given: UnplannedBatch) -> None:
        """Add batch i, which was published."""
        self._given[i] = given
        self._open.append((i, given.step))

    def ids(self, i: int) -> NDArray[np.int32] | None:
        """Return the (k,) objects of batch i; None if unpublished or counted already."""
        given = self._given.get(i)
        return None if given is None else given.ids

    def done(self, i: int) -> int:
        """All batches below i have arrived; returns the step up to which the session is done."""
        while self._open and self._open[0][0] < i:
            self._done = self._open.popleft()[1] + 1
        return self._done

    def take(self, first: int, last: int) -> list[UnplannedBatch]:
        """Remove and return the published batches of [first, last)."""
        if not self._given:
            return []
        return [self._given.pop(i) for i in range(first, last) if i in self._given]


def indices_of(pulled: object) -> NDArray[np.int64] | None:
    """Return the (n,) samples of a sampler's item: an index or a flat group of them; else None."""
    try:
        found = np.atleast_1d(np.asarray(pulled))
    except Exception:  # noqa: BLE001  numpy cannot convert it, whatever it raises
        return None
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        return None
    found = found.astype(np.int64)
    return None if found.min() < 0 else found


def samples_in(pulled: object) -> int:
    """Return the number of samples in a batch of any type; 1 if it has no length."""
    try:
        return operator.length_hint(pulled, 1)
    except Exception:  # noqa: BLE001  the user's own code may run here
        return 1
