"""Draws: whether code drew from the generators that all code shares, or its dataset holds.

A sample that is kept is not decoded again. A decoder that draws would leave the generators in
another state than under torch, and its samples differ from epoch to epoch.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

#: Bytes of the state of numpy's MT19937: 624 words and the position (numpy's `mt19937.h`).
_NUMPY_NBYTES = 4 * 624 + 4
#: Where CPython's `random.Random` has its position and as many words (Modules/_randommodule.c).
_PYTHON_AT, _PYTHON_NBYTES = object.__basicsize__, 4 + 4 * 624


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
        # numpy's has no public name before 1.24; Python's is that of all code.
        shared = random._inst, torch.default_generator, np.random.mtrand._rand  # noqa: SLF001
        return [*map(_state, (*shared, *self._own))]


def _state(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())  # half the time of a numpy view
    if isinstance(generator, random.Random):
        return _of_python(generator)
    return _of_numpy(getattr(generator, "bit_generator", None) or generator._bit_generator)  # noqa: SLF001  as above


def _of_python(generator: random.Random) -> object:
    """Return the state; `getstate` makes 625 numbers of it, and takes 10 to 14 us, this 0.4."""
    if isinstance(generator, random.SystemRandom):
        return object()  # nobody knows whether it was asked
    if _readable() and type(generator) is random.Random:
        return _memory(generator).raw, generator.gauss_next  # type: ignore[attr-defined]  # a number drawn ahead
    return generator.getstate()


def _of_numpy(generator: Any) -> object:
    """Return the state; `np.random.get_state` takes 40 us, this 0.3."""
    if type(generator) is np.random.MT19937:
        return _memory(generator).raw
    state: object = repr(generator.state)
    return state


@functools.lru_cache(16)
def _memory(generator: random.Random | np.random.MT19937) -> Any:
    """Return the memory of a generator's state, which lives as long as that."""
    if isinstance(generator, random.Random):
        return (ctypes.c_char * _PYTHON_NBYTES).from_address(id(generator) + _PYTHON_AT)
    return (ctypes.c_char * _NUMPY_NBYTES).from_address(generator.ctypes.state_address)


@functools.cache
def _readable() -> bool:
    """Whether this Python has the state of a `random.Random` where it is looked for."""
    if sys.implementation.name != "cpython":
        return False
    if random.Random.__base__.__basicsize__ < _PYTHON_AT + _PYTHON_NBYTES:  # type: ignore[union-attr]
        return False
    probe = random.Random(7)  # noqa: S311  nothing secret
    position, *state = np.frombuffer(_memory(probe).raw, np.uint32).tolist()
    return bool((*state, position) == probe.getstate()[1])
