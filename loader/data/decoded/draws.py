"""Draws: whether code drew from the generators that all code shares, or its dataset holds.

A sample that is kept is not decoded again. A decoder that draws would leave the generators in
another state than under torch, and its samples differ from epoch to epoch.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

#: Bytes of the state of numpy's MT19937: 624 words and the position (numpy's `mt19937.h`).
_NUMPY_NBYTES = 4 * 624 + 4


class Draws:
    """Compares the states of torch's, numpy's and Python's generators at two moments."""

    def __init__(
        self, own: Sequence[Any] = (), later: Callable[[], Sequence[Any]] | None = None
    ) -> None:
        """Note the states.

        Args:
            own: further generators, those of a dataset.
            later: returns them as they are later; None: they are the same. One that was made
                meanwhile has drawn.
        """
        self._own, self._later = own, later
        self._before = self._states()

    def any(self) -> bool:
        """Whether something has drawn (or seeded) since."""
        if self._later is not None and {*map(id, self._later())} - {*map(id, self._own)}:
            return True
        return self._states() != self._before

    def _states(self) -> list[object]:
        shared = torch.default_generator, np.random.mtrand._rand  # noqa: SLF001  numpy's has no public name before 1.24
        return [random.getstate(), *map(_state, (*shared, *self._own))]


def _state(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().cpu().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _of_numpy(getattr(generator, "bit_generator", None) or generator._bit_generator)  # noqa: SLF001  as above


def _of_numpy(generator: Any) -> object:
    """Return the state; `np.random.get_state` takes 40 us, this 1."""
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _NUMPY_NBYTES)
    state: object = repr(generator.state)
    return state
