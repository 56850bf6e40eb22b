"""torch's random permutations, reproduced with numpy. Pure.

torch draws an order from MT19937, which numpy has as well. `torch.randperm(n)` is a forward
Fisher-Yates shuffle with one 32-bit draw for each entry but the last: entry i is swapped with entry
`i + draw % (n - i)`. Its first k entries depend on the first k draws only, and the cost does not
depend on n. tests/unit/policies/test_torch_random.py compares with torch, bit for bit.

All swaps of a permutation are resolved at once instead of one after the other (`_settle`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ints

#: From this n on, torch.randperm shuffles inside-out with 64-bit draws (its TensorFactories.cpp).
SHUFFLE_LIMIT = (2**32 - 1) // 20

_ENTRIES_AT_ONCE = 1 << 14  # entries computed at a time by `Shuffle.all`

_WORDS = 624  # words in the engine's state
_LEFT, _STATE = 8, 24  # byte offsets in the result of torch's get_state()
_STATE_NBYTES = 5056


class TorchRandom:
    """torch's CPU generator: the same state gives the same numbers."""

    def __init__(self, state: bytes | memoryview | NDArray[np.uint8]) -> None:
        """`state`: the result of `Generator.get_state()` (5,056 bytes).

        Raises:
            ValueError: `state` is not the state of a CPU generator.
        """
        raw = bytes(state)
        if len(raw) != _STATE_NBYTES:
            raise ValueError(f"a CPU generator's state has {_STATE_NBYTES} bytes, not {len(raw)}")
        left = int.from_bytes(raw[_LEFT : _LEFT + 4], "little")
        if not 0 < left <= _WORDS:
            raise ValueError(f"not a CPU generator's state: {left} words left of {_WORDS}")
        words = np.frombuffer(raw, "<u8", _WORDS, _STATE).astype(np.uint32)
        self.bits = np.random.MT19937(0)
        self.bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": words, "pos": _WORDS + 1 - left},
        }

    @classmethod
    def seeded(cls, seed: int) -> TorchRandom:
        """Return the generator after `manual_seed(seed)`; only the low 32 bits count, as there."""
        generator = cls.__new__(cls)
        generator.bits = np.random.MT19937(0)
        generator.bits._legacy_seeding(seed & 0xFFFFFFFF)  # noqa: SLF001  init_genrand, as torch
        return generator

    def random(self, k: int) -> NDArray[np.uint32]:
        """Return the next k draws of 32 bits."""
        return self.bits.random_raw(k).astype(np.uint32)


class Shuffle:
    """`torch.randperm(n)` in pieces of any size, from the first entry on.

    A piece takes about 0.12 us per entry (benchmarks/planning.py), least at some thousands of
    entries. torch is 4 times as fast, but can only draw the whole permutation.

    Args:
        n: length of the whole permutation.
        rng: generator; after k entries it has made min(k, n - 1) draws.

    Raises:
        ValueError: n is negative, or at or above SHUFFLE_LIMIT.
    """

    def __init__(self, n: int, rng: TorchRandom) -> None:
        if not 0 <= n < SHUFFLE_LIMIT:
            raise ValueError(
                f"cannot re-create a permutation of {n}: need 0 <= n < {SHUFFLE_LIMIT}"
            )
        self._n = n
        self._rng = rng
        self._taken = 0
        self._first: tuple[Ints, Ints] | None = None
        #: (n,) one more than the number in each place, or 0 for the place's own index; allocated
        #: with the second piece.
        self._places: NDArray[np.int32] | None = None

    def more(self, k: int) -> NDArray[np.int32]:
        """Return the next k entries, or all that are left, as int32."""
        first, n = self._taken, self._n
        k = max(0, min(k, n - first))
        steps = np.arange(first, first + k, dtype=np.int64)
        draws = np.zeros(k, dtype=np.int64)  # the last entry stays, without a draw
        draws[: n - 1 - first] = self._rng.random(min(k, max(n - 1 - first, 0)))
        targets = steps + draws % (n - steps)
        if first and self._places is None and self._first is not None:
            self._places = np.zeros(n, dtype=np.int32)  # pages are allocated when written
            self._put(*self._first)
            self._first = None
        taken, left = _settle(targets - first, self._held(steps), self._held(targets))
        if self._places is None:
            self._first = targets, left
        else:
            self._put(targets, left)
        self._taken = first + k
        return taken.astype(np.int32)

    def all(self) -> NDArray[np.int32]:
        """Return (n,) all entries, computed in pieces that stay within the processor's caches."""
        pieces = [self.more(_ENTRIES_AT_ONCE) for _ in range(0, self._n, _ENTRIES_AT_ONCE)]
        return np.concatenate([NO_IDS, *pieces])

    def _held(self, places: Ints) -> Ints:
        """Return (k,) the numbers that are in these places now."""
        if self._places is None:
            return places
        held = self._places[places].astype(np.int64)
        return np.where(held == 0, places, held - 1)

    def _put(self, places: Ints, numbers: Ints) -> None:
        if self._places is not None:
            self._places[places] = numbers + 1  # of equal indices, numpy keeps the last one


def _settle(targets: Ints, held: Ints, there: Ints) -> tuple[Ints, Ints]:
    """Do the swaps (0, t[0]), (1, t[1]), ..., (k - 1, t[k - 1]), where t[i] >= i.

    Place i is final after step i. Write c(i) for the content of place i just before step i: step i
    puts c(i) into place t[i]. So a step finds in a place c(the last earlier step with that target),
    or the original content. The same holds for c itself. Pointer doubling follows all these chains
    at once; they are O(log n) long.

    Args:
        held: (k,) content of places 0 ... k-1 before the first swap; there: of places t[i].

    Returns:
        (k,) content of places 0 ... k-1 in the end; (k,) what step i puts into place t[i].
    """
    k = len(targets)
    steps = np.arange(k, dtype=np.int64)
    inside = np.flatnonzero((targets < k) & (targets != steps))
    sources = steps.copy()
    sources[targets[inside]] = inside  # of equal indices, numpy keeps the last one
    while True:
        further = sources[sources]
        if np.array_equal(further, sources):
            break
        sources = further
    sources = held[sources]
    order = np.argsort(targets, kind="stable")
    again = targets[order[1:]] == targets[order[:-1]]
    out = there.copy()
    out[order[1:][again]] = sources[order[:-1][again]]
    return out, sources
