"""Returned: the numbers of the samples in the batch that a loader returned last."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.errors import ConfigError


class Returned:
    """What the sampler yielded for the batch that a loader returned last."""

    def __init__(self) -> None:
        self._index: Any = None

    @classmethod
    def of(cls, loader: Any) -> Returned:
        """Return the one of a loader, which all its iterators share."""
        found: Returned = loader.__dict__.setdefault("_creel_returned", cls())
        return found

    def note(self, index: Any) -> None:
        """Note what the sampler yielded for the batch that is about to be returned."""
        self._index = index

    def numbers(self) -> NDArray[np.int64]:
        """Return the (n,) numbers, n = 0 before the first batch.

        Raises:
            ConfigError: what the sampler yielded is no number, nor a flat group of numbers.
        """
        if self._index is None:
            return np.empty(0, np.int64)
        try:
            found = np.atleast_1d(np.asarray(self._index))
        except Exception as e:
            raise ConfigError(f"the samples of the last batch have no numbers: {e}") from e
        if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
            raise ConfigError(f"the samples of the last batch have no numbers: {found.dtype}")
        return found.astype(np.int64)
