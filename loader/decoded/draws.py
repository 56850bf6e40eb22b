"""Draws: whether code drew from the generators that all code of a process shares.

A sample that is kept is not decoded again. A decoder that draws would leave the generators in
another state than under torch, and its samples differ from epoch to epoch.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: Bytes of the state of numpy's MT19937: 624 words and the position (numpy's `mt19937.h`).
_NUMPY_NBYTES = 4 * 624 + 4


class Draws:
    """Compares the states of torch's, numpy's and Python's generators at two moments."""

    def __init__(self) -> None:
        self._before = _states()

    def any(self) -> bool:
        """Whether something has drawn (or seeded) since."""
        return _states() != self._before


def _states() -> tuple[object, ...]:
    return bytes(torch.default_generator.get_state().numpy()), _of_numpy(), random.getstate()


def _of_numpy() -> object:
    """Return the state; `np.random.get_state` takes 40 us, this 1."""
    generator: Any = np.random.mtrand._rand._bit_generator  # noqa: SLF001  no public name before numpy 1.24
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _NUMPY_NBYTES)
    state: object = repr(generator.state)
    return state


def drawing(decode: Callable[[bytes], Any], data: bytes) -> tuple[Any, bool]:
    """Return `decode(data)`, and whether that drew from a shared generator."""
    before = Draws()
    sample = decode(data)
    return sample, before.any()
