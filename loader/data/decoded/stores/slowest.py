"""Slowest: where not all samples find room, those are kept that take longest to make.

In the first epoch each is made once, in an order that says nothing of it. So a sample is kept if it
is among those that save most, by the samples so far. From then on all are, while there is room.
"""

from __future__ import annotations

from creel.loader.data.decoded.stores.memory import DECODED, DECODES, Words
from creel.policies.memory import SAVINGS, least_saving

#: From which class of samples on they are kept, in parts of a class; -1: all are. And the bytes of
#: what was decoded of each class.
_LEAST, _PARTS, _BY_CLASS = 17, 1 << 16, 18
#: So many samples show how they differ.
_SOME = 32


class Slowest:
    """The choice of all processes that have a store; under its lock, but for `again`."""

    def __init__(self, words: Words, samples: int) -> None:
        """`words`: the store's."""
        self._words, self._samples = words, samples

    def decoded(self, kind: int, nbytes: int) -> None:
        """Count a sample of a class (`policies.memory.saving`)."""
        self._words[_BY_CLASS + kind] += nbytes

    def choose(self, room: int) -> None:
        """Keep as many of the samples to come as find room, of `room` bytes for all."""
        words = self._words
        if words[_LEAST] >= 0 and words[DECODES] >= _SOME:
            whole = words[DECODED] * self._samples // words[DECODES]
            by_class = [words[_BY_CLASS + kind] for kind in range(SAVINGS)]
            words[_LEAST] = int(least_saving(by_class, min(room / whole, 1)) * _PARTS)

    def has(self, kind: int, number: int) -> bool:
        """Whether a sample is to be kept; those of one class are spread over it."""
        part = (number * 0x9E3779B1 >> 16) % _PARTS
        again = self._words[DECODES] > self._samples
        return again or kind * _PARTS + part >= self._words[_LEAST]

    def again(self) -> None:
        """Note that another epoch begins."""
        if self._words[DECODES]:
            self._words[_LEAST] = -1
