"""Streams: computed items of torch's own samplers. One stream is one epoch of one sampler.

A stream draws in blocks, each at the moment at which torch's sampler draws it: when its first item
is requested (`need`), or, for the block that `RandomSampler` draws and discards, at the end of the
sampler. A draw from a generator that the user can see is *visible*; other draws may be made at any
time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import WeightedRandomSampler

from creel.loader.line.order.generators import (
    Permutation,
    RandomSource,
    clone,
    decode_state,
    encode_state,
    permutation,
    seeded,
    set_state,
    state_of,
)
from creel.policies.cluster.job_order import JobOrder
from creel.policies.order.division import Division

Items: TypeAlias = "NDArray[np.integer] | list[object]"

#: Items that RandomSampler(replacement=True) draws at a time.
_DRAWN_AT_ONCE = 32

#: Items per draw with replacement from a private generator.
_DRAWN_PRIVATELY = 1 << 15


class StreamState(TypedDict, total=False):
    """What determines a stream besides the sampler itself; small, fit for JSON."""

    seed: int
    epoch: int
    rng: str
    world: int  # ranks that an order is dealt to
    offset: int  # its items that other ranks read before
    without: list[int]  # batches that are left out, ascending
    each: int  # items of such a batch


def indices_of(items: object) -> NDArray[np.int32]:
    """Convert a flat sequence of indices to int32.

    Raises:
        ValueError: it is not flat, contains a non-integer, or one does not fit.
    """
    indices = np.asarray(items)
    if indices.size == 0:
        return np.empty(0, dtype=np.int32)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ValueError(f"not indices: {indices.ndim} dimensions of {indices.dtype}")
    if indices.min() < 0 or indices.max() > np.iinfo(np.int32).max:
        raise ValueError("an index is negative or above 2**31 - 1")
    return indices.astype(np.int32, copy=False)


class SamplerStream:
    """Base: `total` items, all known without a draw.

    Attributes:
        total: number of items, as far as it is known now.
        key: streams whose keys are not None are equal exactly if their keys are.
        live: whether `items` returns the user's own objects, out of a list that may change until
            torch reads it: one batch at a time.
        at_once: a hint: the first item costs as much as all.
        spread: a hint: entries of a permutation that are drawn for each item.
    """

    total: int
    key: tuple[object, ...] | None = None
    live = False
    at_once = False
    spread = 1

    @property
    def ready(self) -> int:
        """Items [0, ready) are drawn and cheap; others are computed piece by piece."""
        return self.total

    def need(self, item: int) -> None:
        """Make every draw that torch has made once it yields `item`; `total` means the end."""

    def items(self, start: int, stop: int) -> Items:
        """Return items [start, stop), which `need` has drawn: an array, or a list if `live`."""
        raise NotImplementedError

    def fork(self, source: RandomSource) -> SamplerStream:
        """Return a copy of the stream at the same point that draws from `source` from now on."""
        twin = copy.copy(self)
        twin._rebase(source)  # noqa: SLF001  its own
        return twin

    def state(self) -> StreamState:
        """Return what `open_stream` needs to reopen this stream in another process."""
        return {}

    def dealt(self, division: Division) -> JobOrder | None:  # noqa: ARG002  of a job with ranks
        """Return the whole job's epoch, which is divided into steps; None: it cannot be told."""
        return None

    def in_epoch(self, item: int) -> int:
        """Return how many items each rank has read, or left out, once `item` comes."""
        return item

    def of_all_ranks(self, start: int, stop: int) -> Items:
        """Return what all ranks read in the whole epoch as their items [start, stop).

        In any order, and once each if it is repeated to fill up the ranks. `need` has drawn it.
        """
        return self.items(start, min(stop, self.total))

    def _rebase(self, source: RandomSource) -> None:
        """Stop sharing mutable state with the stream it was copied from; draw from `source`."""


class Sequential(SamplerStream):
    """The items 0, 1, 2, ..."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.key = ("counted", total)

    def items(self, start: int, stop: int) -> Items:
        return np.arange(start, stop)


class FromArray(SamplerStream):
    """Indices that a copy of a sampler yielded, (total,) int32."""

    def __init__(self, indices: NDArray[np.int32]) -> None:
        self._indices = indices
        self.total = len(indices)
        self.key = ("run", xxhash.xxh3_128_digest(indices.tobytes()))

    def items(self, start: int, stop: int) -> Items:
        return self._indices[start:stop]


class FromList(SamplerStream):
    """The elements of a sequence used as a sampler, each the same object."""

    live = True

    def __init__(self, listed: Sequence[object]) -> None:
        self._listed = listed
        self.total = len(listed)

    def items(self, start: int, stop: int) -> Items:
        return list(self._listed[start:stop])


class Origin(NamedTuple):
    """Where a stream draws from.

    Attributes:
        generator: to draw from.
        outer: the sampler's own generator attribute; None: the global generator.
        state: reopens the stream; known without a draw if the generator is private.
        unseen: whether only the stream sees the generator's state before the stream's end.
    """

    generator: torch.Generator
    outer: torch.Generator | None
    state: StreamState
    unseen: bool

    @classmethod
    def seeded(cls, seed: int) -> Origin:
        """Draw from a new generator."""
        return cls(seeded(seed), None, {"seed": seed}, unseen=True)

    @classmethod
    def of(cls, outer: torch.Generator | None, source: RandomSource, given: StreamState) -> Origin:
        """Draw from `outer` itself; if `given` has an `rng`, from that state of it."""
        generator = source.of(outer)
        if "rng" not in given:
            return cls(generator, outer, {}, source.unseen)
        start = decode_state(given["rng"])
        if outer is None and state_of(generator) != start:
            # The global generator belongs to the user: draw from a copy in the old state.
            copied = torch.Generator()
            set_state(copied, start)
            return cls(copied, None, {"rng": given["rng"]}, unseen=True)
        set_state(generator, start)
        return cls(generator, outer, {}, source.unseen)


class Drawing(SamplerStream):
    """Base of streams that draw, from a generator that the user can see (`_visible`) or not.

    torch's RandomSampler counts its samples again before its last draw: if the dataset has grown or
    shrunk since the epoch began, some come twice. Here an epoch has the length that it began with.
    """

    def __init__(self, total: int, origin: Origin) -> None:
        self.total = total
        self._generator, self._outer, self._state, self._unseen = origin
        self._visible = not self._state
        self._start = state_of(self._generator) if self._visible else b""
        self._key = type(self), total, *self._state.items(), self._start
        self.key = self._key

    def state(self) -> StreamState:
        if not self._state:  # kept, since some users save one after each batch
            self._state = {"rng": encode_state(self._start)}
        return self._state

    def _rebase(self, source: RandomSource) -> None:
        self._generator = source.of(self._outer) if self._visible else clone(self._generator)
        self._unseen = not self._visible or source.unseen


class Shuffled(Drawing):
    """Consecutive permutations of n, cut off at `total` items."""

    def __init__(self, n: int, total: int, origin: Origin, *, spare: bool = False) -> None:
        """`spare`: one more permutation is drawn at the end, even if none of it is used."""
        super().__init__(total, origin)
        self._n = n
        self._spare = spare and self._visible
        self._blocks: list[Permutation] = []
        self._passed = 0  # blocks whose draws the generator has made
        self.key = (*self._key, n)

    @property
    def ready(self) -> int:
        there = 0
        for block in self._blocks:
            there += block.ready
            if block.ready < self._n:
                break
        return min(there, self.total)

    def need(self, item: int) -> None:
        n = max(self._n, 1)
        most = self.total // n + 1 if self._spare else -(-self.total // n)
        while len(self._blocks) < min(item // n + 1, most):
            self._advance()
            self._blocks.append(permutation(self._n, self._generator))
        if not self._unseen or (self._visible and item >= self.total):
            self._advance()

    def _advance(self) -> None:
        """Put the generator past all blocks: 40 ms at 14 M, so only when its state is used."""
        for block in self._blocks[self._passed :]:
            block.leave(self._generator)
        self._passed = len(self._blocks)

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return np.empty(0, dtype=np.int32)
        n, first, last = self._n, start // self._n, (stop - 1) // self._n
        pieces = [
            self._blocks[b].first(min(stop - b * n, n))[max(start - b * n, 0) : stop - b * n]
            for b in range(first, last + 1)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _rebase(self, source: RandomSource) -> None:
        super()._rebase(source)
        self._blocks = list(self._blocks)


class Derived(SamplerStream):
    """Base of streams computed from another stream, `_order`; by default of the same length."""

    def __init__(self, order: SamplerStream) -> None:
        self._order = order
        self.total = order.total

    @property
    def ready(self) -> int:
        return self._order.ready

    def need(self, item: int) -> None:
        self._order.need(item)

    def state(self) -> StreamState:
        return self._order.state()

    def _rebase(self, source: RandomSource) -> None:
        self._order = self._order.fork(source)


class ShuffledList(Derived):
    """A shuffled list: item i is listed[order[i]]."""

    live = True

    def __init__(self, listed: Sequence[object], order: SamplerStream) -> None:
        super().__init__(order)
        self._listed = listed

    def items(self, start: int, stop: int) -> Items:
        places = np.asarray(self._order.items(start, stop))
        return [self._listed[i] for i in places.tolist()]


class WithReplacement(Drawing):
    """`total` draws from 0 ... n-1, each independent of the others."""

    def __init__(self, n: int, total: int, origin: Origin) -> None:
        super().__init__(total, origin)
        self._n = n
        self._have = 0
        kind = np.int32 if n <= np.iinfo(np.int32).max else np.int64
        self._buffer: NDArray[np.signedinteger] = np.empty(min(total, _DRAWN_PRIVATELY), dtype=kind)
        self.key = (*self._key, n)

    @property
    def ready(self) -> int:
        return self._have

    def need(self, item: int) -> None:
        wanted = min(_DRAWN_AT_ONCE * (item // _DRAWN_AT_ONCE + 1), self.total)
        if not self._visible and self._have < wanted:
            wanted = min(max(wanted, self._have + _DRAWN_PRIVATELY), self.total)
        k = wanted - self._have
        if k <= 0 < self._n:  # torch draws from 0 samples too, and raises
            return
        if wanted > len(self._buffer):
            larger = np.empty(
                min(max(2 * wanted, _DRAWN_PRIVATELY), self.total), self._buffer.dtype
            )
            larger[: self._have] = self._buffer[: self._have]
            self._buffer = larger
        # torch's CPU generator draws entry by entry: one call for all chunks gives the same items.
        drawn = torch.randint(
            high=self._n, size=(k,), dtype=torch.int64, generator=self._generator, device="cpu"
        )
        self._buffer[self._have : wanted] = drawn.numpy()
        self._have = wanted

    def items(self, start: int, stop: int) -> Items:
        return self._buffer[start:stop]

    def _rebase(self, source: RandomSource) -> None:
        super()._rebase(source)
        self._buffer = self._buffer.copy()


class Weighted(Drawing):
    """Weighted draws by `torch.multinomial`, all in one call."""

    at_once = True

    def __init__(self, sampler: WeightedRandomSampler, origin: Origin) -> None:
        super().__init__(sampler.num_samples, origin)
        self._sampler = sampler
        self._drawn: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        w = sampler.weights
        version = w._version  # noqa: SLF001  torch's count of changes in place
        self.key = (*self._key, id(w), version, sampler.replacement)

    @property
    def ready(self) -> int:
        return len(self._drawn)

    def need(self, item: int) -> None:  # noqa: ARG002  all at once
        if not len(self._drawn):
            s = self._sampler
            self._drawn = torch.multinomial(
                s.weights, s.num_samples, s.replacement, generator=self._generator
            ).numpy()

    def items(self, start: int, stop: int) -> Items:
        return self._drawn[start:stop]
