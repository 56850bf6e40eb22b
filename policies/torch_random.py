"""torch's random numbers reproduced with numpy: permutations, samplers and batches. Pure.

torch draws an order from MT19937, an engine that numpy has, too. The functions below return, bit
for bit, what torch 2.13 returns on the CPU, as tests/unit/test_torch_random.py checks, without
torch:

- `torch.empty((), dtype=torch.int64).random_()` is 64 bits without the sign: `draw_seed`;
- `torch.randperm(n)` is a forward Fisher-Yates shuffle with one 32-bit draw for each entry but the
  last: entry i is swapped with entry `i + draw % (n - i)`. Its first k entries depend on the
  first k draws only, and the cost does not depend on n: `permutation_prefix`, `Shuffle`;
- `torch.randint(n, (k,))` is `draw % n`.

All swaps of a permutation are resolved at once instead of one after the other (`_settle`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: "Is not read again": larger than every position in a plan.
NEVER = int(np.iinfo(np.int64).max)

#: From this n on, torch.randperm shuffles inside-out with 64-bit draws. [TensorFactories.cpp]
SHUFFLE_LIMIT = (2**32 - 1) // 20

#: From this n on, torch.randint takes 64 bits for each entry. [DistributionsHelper.h of 2.13]
WIDE_RANGE = 2**28

_TOUCH = 1 << 18  # entries of fresh memory that are touched at a time

_WORDS = 624  # words in the engine's state
_LEFT, _NEXT, _STATE = 8, 16, 24  # byte offsets in the result of torch's get_state()
_STATE_NBYTES = 5056


class TorchRandom:
    """torch's CPU generator: the same seed gives the same draws.

    >>> TorchRandom(0).random(2)
    array([2357136044, 2546248239], dtype=uint32)
    """

    def __init__(self, seed: int) -> None:
        """`seed` as in `Generator.manual_seed`; the engine uses its lower 32 bits."""
        self.bits = np.random.MT19937(0)
        # The legacy seeding of RandomState is torch's (Matsumoto's init_genrand), and frozen.
        np.random.RandomState(self.bits).seed(seed & 0xFFFFFFFF)

    @classmethod
    def from_state(cls, state: bytes | memoryview | NDArray[np.uint8]) -> TorchRandom:
        """Return the generator whose `get_state()` is `state` (5,056 bytes).

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
        made = cls.__new__(cls)
        made.bits = np.random.MT19937(0)
        made.bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": words, "pos": _WORDS + 1 - left},
        }
        return made

    def into_state(self, state: bytes | memoryview | NDArray[np.uint8]) -> bytes:
        """Return `state` of a torch generator with its engine replaced by this one (5,056 bytes).

        The other parts of a state (seed, cached normal deviate) are kept.
        """
        raw = bytearray(bytes(state))
        inner = self.bits.state["state"]
        pos = int(inner["pos"])
        raw[_LEFT : _LEFT + 4] = (_WORDS + 1 - pos).to_bytes(4, "little")
        raw[_NEXT : _NEXT + 8] = pos.to_bytes(8, "little")
        words = np.asarray(inner["key"], dtype="<u8")
        raw[_STATE : _STATE + 8 * _WORDS] = words.tobytes()
        return bytes(raw)

    def random(self, k: int) -> NDArray[np.uint32]:
        """Return the next k draws of 32 bits."""
        return self.bits.random_raw(k).astype(np.uint32)

    def random64(self, k: int) -> NDArray[np.uint64]:
        """Return the next k draws of 64 bits; each is two of 32, the upper half first."""
        pairs = self.bits.random_raw(2 * k)
        return (pairs[0::2] << np.uint64(32)) | pairs[1::2]

    def skip(self, k: int) -> None:
        """Discard k draws of 32 bits: 2.6 ns each, GIL released."""
        if k > 0:
            self.bits.random_raw(k, output=False)

    def copy(self) -> TorchRandom:
        """Return an independent generator in the same state."""
        made = TorchRandom.__new__(TorchRandom)
        made.bits = np.random.MT19937(0)
        made.bits.state = self.bits.state
        return made


def draw_seed(rng: TorchRandom) -> int:
    """`torch.empty((), dtype=torch.int64).random_().item()`: base seed and sampler seed.

    >>> draw_seed(TorchRandom(0))
    900450186894289455
    """
    return int(rng.random64(1)[0]) & (2**63 - 1)


def permutation(n: int, rng: TorchRandom | int) -> NDArray[np.int32]:
    """`torch.randperm(n)` of the generator, or of a fresh one with that seed; (n,) int32.

    torch itself is faster (14.2 M: 0.4 s against 4 s); this is for code without torch.

    Raises:
        ValueError: n is negative, or at or above SHUFFLE_LIMIT.

    >>> permutation(5, 0)
    array([4, 0, 1, 3, 2], dtype=int32)
    """
    return permutation_prefix(n, rng, n)


def permutation_prefix(n: int, rng: TorchRandom | int, k: int) -> NDArray[np.int32]:
    """The first k entries of `torch.randperm(n)`, at a cost that depends on k alone.

    Args:
        n: length of the whole permutation.
        rng: generator, left after min(k, n - 1) draws, or a seed.
        k: number of entries; cut to n.

    Returns:
        (min(k, n),) int32.

    Raises:
        ValueError: n is negative, or at or above SHUFFLE_LIMIT.
    """
    return Shuffle(n, TorchRandom(rng) if isinstance(rng, int) else rng).more(k)


class Shuffle:
    """`torch.randperm(n)` in pieces of any size, from the first entry on.

    A piece costs about 0.12 us an entry (benchmarks/planning.py), least at some thousands of
    entries: torch draws the whole 4 times as fast, but only the whole.

    Args:
        n: length of the whole permutation.
        rng: generator, left after min(k, n - 1) draws where k entries were taken.

    Raises:
        ValueError: n is negative, or at or above SHUFFLE_LIMIT.

    >>> shuffle = Shuffle(5, TorchRandom(0))
    >>> shuffle.more(2), shuffle.more(9)
    (array([4, 0], dtype=int32), array([1, 3, 2], dtype=int32))
    """

    def __init__(self, n: int, rng: TorchRandom) -> None:
        if not 0 <= n < SHUFFLE_LIMIT:
            raise ValueError(
                f"cannot re-create a permutation of {n}: need 0 <= n < {SHUFFLE_LIMIT}"
            )
        self._n = n
        self._rng = rng
        self._taken = 0
        self._first: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        #: (n,) one more than the number in each place, 0 where that is the place's own index;
        #: allocated with the second piece.
        self._places: NDArray[np.int32] | None = None

    def more(self, k: int) -> NDArray[np.int32]:
        """The next k entries, or as many as are left; int32."""
        first, n = self._taken, self._n
        k = max(0, min(k, n - first))
        steps = np.arange(first, first + k, dtype=np.int64)
        draws = np.zeros(k, dtype=np.int64)  # the very last entry needs no draw: it stays
        draws[: n - 1 - first] = self._rng.random(min(k, max(n - 1 - first, 0)))
        targets = steps + draws % (n - steps)
        if first:
            self.prepare()
        taken, left = _settle(targets - first, self._held(steps), self._held(targets))
        if self._places is None:
            self._first = targets, left
        else:
            self._put(targets, left)
        self._taken = first + k
        return taken.astype(np.int32)

    def prepare(self) -> None:
        """Allocate in advance what the second piece needs: memory for all n (0.1 s at 14 M)."""
        if self._places is None:
            self._places = np.zeros(self._n, dtype=np.int32)
            for start in range(0, self._n, _TOUCH):  # in order: scattered first writes are slow
                self._places[start : start + _TOUCH].fill(0)
            if self._first is not None:
                self._put(*self._first)
                self._first = None

    def _held(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """(k,) the numbers in these places now."""
        if self._places is None:
            return places
        held = self._places[places].astype(np.int64)
        return np.where(held == 0, places, held - 1)

    def _put(self, places: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        if self._places is not None:
            self._places[places] = numbers + 1  # numpy: of several, the last one stays


def _settle(
    targets: NDArray[np.int64], held: NDArray[np.int64], there: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Do the swaps (0, t[0]), (1, t[1]), ..., (k - 1, t[k - 1]), where t[i] >= i.

    Place i is final after step i. Write c(i) for the content of place i just before step i: step i
    puts c(i) into place t[i]. Hence what a step finds in a place is c(the last earlier step with
    that target), or the original content; the same holds for c itself, and pointer doubling
    follows all these chains at once (they are O(log n) long).

    Args:
        held: (k,) content of places 0 ... k-1 before the first swap; there: of places t[i].

    Returns:
        (k,) content of places 0 ... k-1 in the end; (k,) what step i puts into place t[i].
    """
    k = len(targets)
    steps = np.arange(k, dtype=np.int64)
    inside = np.flatnonzero((targets < k) & (targets != steps))
    found = steps.copy()
    found[targets[inside]] = inside  # numpy: of several, the last one stays
    while True:
        further = found[found]
        if np.array_equal(further, found):
            break
        found = further
    found = held[found]
    order = np.argsort(targets, kind="stable")
    again = targets[order[1:]] == targets[order[:-1]]
    out = there.copy()
    out[order[1:][again]] = found[order[:-1][again]]
    return out, found


def with_replacement(n: int, k: int, rng: TorchRandom | int) -> NDArray[np.int32]:
    """`list(RandomSampler(range(n), replacement=True, num_samples=k))`; (k,) int32.

    torch draws in chunks of 32; on the CPU each entry is drawn by itself, so chunks do not matter.
    """
    rng = TorchRandom(rng) if isinstance(rng, int) else rng
    draws = rng.random64(k) if n >= WIDE_RANGE else rng.random(k).astype(np.uint64)
    return (draws % np.uint64(n)).astype(np.int32)


def sequential(n: int) -> NDArray[np.int32]:
    """0, 1, ... n-1."""
    return np.arange(n, dtype=np.int32)


def subset_random(indices: NDArray[np.int32], rng: TorchRandom | int) -> NDArray[np.int32]:
    """`list(SubsetRandomSampler(indices, generator))`; same length as `indices`."""
    return np.asarray(indices, dtype=np.int32)[permutation(len(indices), rng)]


def samples_per_rank(n: int, world: int, drop_last: bool) -> int:
    """Samples that each rank reads per epoch under a DistributedSampler."""
    return n // world if drop_last else -(-n // world)


def distributed(
    n: int,
    seed: int,
    epoch: int,
    rank: int,
    world: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    order: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """`list(DistributedSampler(...))` of one rank.

    Args:
        n: samples in the dataset.
        seed, epoch: their sum seeds the shuffle.
        rank, world: this rank reads every world-th sample from the rank-th on.
        drop_last: cut the tail; otherwise the head is repeated, cyclically if needed.
        order: the whole order where the caller has it (torch.randperm is faster), else drawn.

    Returns:
        (samples_per_rank(n, world, drop_last),) int32.
    """
    slots = rank + world * np.arange(samples_per_rank(n, world, drop_last), dtype=np.int64)
    slots %= max(n, 1)
    if not shuffle:
        return slots.astype(np.int32)
    whole = permutation(n, seed + epoch) if order is None else order
    return whole[slots]


def rank_slices(order: NDArray[np.int32], world: int, *, drop_last: bool) -> NDArray[np.int32]:
    """The order of every rank of a DistributedSampler: (world, samples_per_rank) int32.

    >>> rank_slices(np.arange(5, dtype=np.int32), 2, drop_last=False)
    array([[0, 2, 4],
           [1, 3, 0]], dtype=int32)
    """
    each = samples_per_rank(len(order), world, drop_last)
    padded = np.resize(order, each * world) if each * world > len(order) else order[: each * world]
    return np.ascontiguousarray(padded.reshape(each, world).T)


def batches(total: int, batch_size: int, *, drop_last: bool) -> NDArray[np.int64]:
    """End of each batch of `total` samples: (b,) int64; batch i is [ends[i-1], ends[i]).

    >>> batches(10, 4, drop_last=False)
    array([ 4,  8, 10])
    """
    count = total // batch_size if drop_last else -(-total // batch_size)
    ends = batch_size * np.arange(1, count + 1, dtype=np.int64)
    return np.minimum(ends, total, out=ends)


def next_use(trace: NDArray[np.signedinteger]) -> NDArray[np.int64]:
    """Position of the next read of the same sample, for each read of `trace`.

    Args:
        trace: (t,) sample ids in reading order.

    Returns:
        (t,) index into `trace` of the next read of trace[i], or NEVER.

    >>> next_use(np.array([4, 2, 4]))[:1]
    array([2])
    """
    out = np.full(trace.shape, NEVER, dtype=np.int64)
    order = np.argsort(trace, kind="stable")
    same = trace[order[:-1]] == trace[order[1:]]
    out[order[:-1][same]] = order[1:][same]
    return out
