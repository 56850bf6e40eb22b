"""PageWindow: which coming batches are read ahead of training, and which of their samples."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.settings import WindowSettings

#: After so many samples in a row that needed no read, one in `_EVERY` is looked at.
_WARM, _EVERY = 64, 16


class MappedBatch:
    """A coming batch, and how many bytes of the window it takes as far as is known."""

    def __init__(self, number: int, samples: NDArray[np.integer[Any]]) -> None:
        self.number, self.samples = number, samples
        self.nbytes = 0
        self.passed = False  # whether training has it


class PageWindow:
    """The batches that are read ahead of training, up to a limit of bytes and of batches.

    The thread and the trainer write it.

    Attributes:
        ahead: by number: those that were looked at, and that training is not known to have.
        nbytes: the limit; less than the setting where memory is short.
    """

    def __init__(self, settings: WindowSettings) -> None:
        self.settings = settings
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self.ahead: dict[int, MappedBatch] = {}
        self.nbytes = self._used = 0

    def limit(self, nbytes: int) -> None:
        """Read ahead at most so many bytes, and what is set."""
        self.nbytes = min(self.settings.bytes, nbytes)

    def has_room(self, share: float = 1.0) -> bool:
        """Whether less than this share of the window is full; any batch may be read if none is."""
        steps = self.settings.max_steps * share
        fits = self._used < self.nbytes * share and len(self.ahead) < steps
        return not self.ahead or fits

    def add(self, batch: MappedBatch) -> None:
        """Count a batch as ahead."""
        with self._lock:
            self.ahead[batch.number] = batch

    def grow(self, batch: MappedBatch, nbytes: int) -> None:
        """Count bytes that a batch takes, unless training has it."""
        with self._lock:
            if not batch.passed:
                batch.nbytes += nbytes
                self._used += nbytes

    def done(self, batch: int) -> None:
        """Give up the room of all batches below `batch`."""
        with self._lock:
            while self.ahead and (number := next(iter(self.ahead))) < batch:
                read = self.ahead.pop(number)
                read.passed = True
                self._used -= read.nbytes


class Warmth:
    """Which samples are looked at: where many in a row needed no read, few."""

    def __init__(self) -> None:
        self._seen = self._warm = 0

    def looked_at(self, samples: NDArray[np.integer[Any]]) -> list[int]:
        """Return those of a batch's samples that are looked at."""
        first, self._seen = self._seen, self._seen + len(samples)
        every = _EVERY if self._warm >= _WARM else 1
        few: list[int] = samples[-first % every :: every].tolist()
        return few

    def note(self, *, read: bool) -> None:
        """Note whether a sample needed a read."""
        self._warm = 0 if read else self._warm + 1
