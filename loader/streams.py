"""What torch's own samplers yield, without iterating them: one stream is one epoch of one sampler.

A stream draws in blocks, and each block at the moment at which torch's sampler draws it: when its
first item is asked for (`need`), or, for the block that `RandomSampler` draws and throws away, when
the sampler is run to its end. A draw from a generator that the user can see is *visible*; the
others may be made whenever it suits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from creel.loader.draws import Dice, Memo, Permutation, clone, pack, state_of

Items: TypeAlias = "NDArray[np.signedinteger] | list[object]"

#: RandomSampler(replacement=True) draws so many at a time.
_CHUNK = 32

#: Private draws with replacement are made so many at a time.
_AHEAD = 1 << 15


class Facts(TypedDict, total=False):
    """What, beside the sampler itself, decides a stream; small, fit for JSON."""

    seed: int
    epoch: int
    rng: str


def indices_of(items: object) -> NDArray[np.int32]:
    """A flat sequence of indices as int32.

    Raises:
        ValueError: it is not flat, holds something else than integers, or one does not fit.
    """
    found = np.asarray(items)
    if found.size == 0:
        return np.empty(0, dtype=np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"no indices: {found.ndim} dimensions of {found.dtype}")
    if found.min() < 0 or found.max() > np.iinfo(np.int32).max:
        raise ValueError("an index is negative or above 2**31 - 1")
    return found.astype(np.int32, copy=False)


def _plain(listed: object) -> bool:
    """Whether an item of a sequence is had without the user's code."""
    return type(listed) in (list, tuple, range, np.ndarray, torch.Tensor)


class Stream:
    """Base: `total` items, all known without a draw. A key that is not None decides equality."""

    total: int
    key: tuple[object, ...] | None = None

    #: Items must be read one batch at a time, for the user may change what lies under them.
    live = False

    #: Whether the first item costs as much as all.
    at_once = False

    #: So many entries of a permutation are drawn for each item.
    spread = 1

    #: Whether another thread may ask for items: none of the user's code runs.
    apart = True

    @property
    def drawn(self) -> int:
        """Items [0, drawn) are known now."""
        return self.total

    @property
    def ready(self) -> int:
        """Items [0, ready) cost next to nothing any more; the next ones are made piece by piece."""
        return self.drawn

    def draw(self) -> None:
        """Have all that was needed `ready`: for who is in no hurry, it costs least so."""

    def need(self, item: int) -> None:
        """Make every draw that torch has made once `item` was asked for; `total` means the end."""

    def items(self, start: int, stop: int) -> Items:
        """Items [start, stop), stop <= drawn: an array, or a list of the user's own objects."""
        raise NotImplementedError

    def fork(self, dice: Dice) -> Stream:
        """The same stream at the same point, drawing from copies from now on."""
        made = copy.copy(self)
        made.rebase(dice)
        return made

    def rebase(self, dice: Dice) -> None:
        """Share nothing that moves with the stream this is a copy of; draw from `dice`."""

    def facts(self) -> Facts:
        """What `opened` needs to open this very stream again, in another process."""
        return {}

    def everything(self) -> NDArray[np.int32]:
        """All items, drawing what is not drawn yet; (total,) int32.

        Raises:
            ValueError: the items are no indices that fit.
        """
        self.need(self.total)
        return indices_of(self.items(0, self.total))


class Counted(Stream):
    """0, 1, 2, ..."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.key = ("counted", total)

    def items(self, start: int, stop: int) -> Items:
        return np.arange(start, stop)


class Listed(Stream):
    """The elements of a sequence that is used as a sampler, each as the very object it is."""

    live = True

    def __init__(self, listed: Sequence[object]) -> None:
        self._listed = listed
        self.total = len(listed)
        self.apart = _plain(listed)

    def items(self, start: int, stop: int) -> Items:
        return list(self._listed[start:stop])

    def everything(self) -> NDArray[np.int32]:
        return indices_of(self._listed)


class Drawing(Stream):
    """Base of those that draw themselves; `visible`: from the user's or the global generator."""

    def __init__(self, generator: torch.Generator, outer: torch.Generator | None, kept: Facts):
        """`outer` is the sampler's own generator attribute; `kept` what is known without a draw."""
        self._generator = generator
        self._outer = outer
        self._kept = kept
        self.visible = not kept
        self._start = state_of(generator) if self.visible else b""
        self._told: Facts | None = None

    def rebase(self, dice: Dice) -> None:
        self._generator = dice.of(self._outer) if self.visible else clone(self._generator)

    def facts(self) -> Facts:
        if self.visible and self._told is None:
            self._told = {"rng": pack(self._start)}  # once: some save a state after each batch
        return self._told or self._kept


class Shuffled(Drawing):
    """One permutation of n after the other, cut at `total`."""

    def __init__(
        self,
        n: int,
        total: int,
        memo: Memo,
        generator: torch.Generator,
        outer: torch.Generator | None,
        kept: Facts,
        *,
        spare: bool = False,
    ) -> None:
        """`spare`: at the end another permutation is drawn, even where none of it is used."""
        super().__init__(generator, outer, kept)
        self.total = total
        self._n = n
        self._memo = memo
        self._blocks: list[Permutation] = []
        self._most = total // n + 1 if spare and self.visible else -(-total // max(n, 1))
        self.key = ("shuffled", n, total, kept.get("seed"), self._start)

    def rebase(self, dice: Dice) -> None:
        super().rebase(dice)
        self._blocks = list(self._blocks)

    @property
    def drawn(self) -> int:
        return min(self.total, len(self._blocks) * self._n)

    @property
    def ready(self) -> int:
        there = 0
        for block in self._blocks:
            there += block.ready
            if block.ready < self._n:
                break
        return min(there, self.total)

    def draw(self) -> None:
        for block in self._blocks:
            block.whole()

    def need(self, item: int) -> None:
        wanted = min(item // max(self._n, 1) + 1, self._most)
        while len(self._blocks) < wanted:
            # A private generator moves only when it is used again: moving takes 40 ms at 14 M.
            if self._blocks and not self.visible:
                self._blocks[-1].leave(self._generator)
            block = self._memo.permutation(self._n, self._generator)
            if self.visible:
                block.leave(self._generator)
            self._blocks.append(block)

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return np.empty(0, dtype=np.int32)
        n, first, last = self._n, start // self._n, (stop - 1) // self._n
        pieces = [
            self._blocks[b].first(min(stop - b * n, n))[max(start - b * n, 0) : stop - b * n]
            for b in range(first, last + 1)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class Chosen(Stream):
    """A shuffled list: item i is listed[order[i]]."""

    live = True

    def __init__(self, listed: Sequence[object], order: Stream) -> None:
        self._listed = listed
        self._order = order
        self.total = order.total
        self.apart = _plain(listed)

    @property
    def drawn(self) -> int:
        return self._order.drawn

    @property
    def ready(self) -> int:
        return self._order.ready

    def draw(self) -> None:
        self._order.draw()

    def need(self, item: int) -> None:
        self._order.need(item)

    def items(self, start: int, stop: int) -> Items:
        places = np.asarray(self._order.items(start, stop))
        return [self._listed[i] for i in places.tolist()]

    def everything(self) -> NDArray[np.int32]:
        return indices_of(self._listed)[self._order.everything()]

    def rebase(self, dice: Dice) -> None:
        self._order = self._order.fork(dice)

    def facts(self) -> Facts:
        return self._order.facts()


class Dealt(Stream):
    """One rank's share of an order: every world-th item, the head repeated or the tail cut."""

    def __init__(self, order: Stream, sampler: DistributedSampler[object], epoch: int) -> None:
        self._order, self._epoch = order, epoch
        self._rank, self._world = sampler.rank, sampler.num_replicas
        self._n = order.total
        self.total = sampler.num_samples
        self.spread = self._world
        self.key = ("dealt", order.key, self._rank, self._world, self.total)

    def need(self, item: int) -> None:  # noqa: ARG002  (the first wants the whole order)
        self._order.need(0)

    @property
    def drawn(self) -> int:
        return self.total if self._order.drawn == self._n else 0

    @property
    def ready(self) -> int:
        there = self._order.ready
        return self.total if there == self._n else max(there - self._rank, 0) // self._world

    def draw(self) -> None:
        self._order.draw()

    def items(self, start: int, stop: int) -> Items:
        places = self._rank + self._world * np.arange(start, stop)
        if isinstance(self._order, Counted) or start >= stop:
            return places % max(self._n, 1)
        head = self._order.items(0, min(int(places[-1]) + 1, self._n))
        return np.asarray(head)[places % self._n]

    def rebase(self, dice: Dice) -> None:
        self._order = self._order.fork(dice)

    def facts(self) -> Facts:
        return {"epoch": self._epoch}


class Replaced(Drawing):
    """`total` draws from 0 ... n-1, each independent of the others."""

    def __init__(
        self,
        n: int,
        total: int,
        generator: torch.Generator,
        outer: torch.Generator | None,
        kept: Facts,
    ) -> None:
        super().__init__(generator, outer, kept)
        self.total = total
        self._n = n
        self._have = 0
        kind = np.int32 if n <= np.iinfo(np.int32).max else np.int64
        self._buffer: NDArray[np.signedinteger] = np.empty(min(total, _AHEAD), dtype=kind)
        self.key = ("replaced", n, total, kept.get("seed"), self._start)

    def rebase(self, dice: Dice) -> None:
        super().rebase(dice)
        self._buffer = self._buffer.copy()

    @property
    def drawn(self) -> int:
        return self._have

    @property
    def ready(self) -> int:
        return self.total  # those that are not drawn yet cost no more one by one

    def need(self, item: int) -> None:
        wanted = min(_CHUNK * (item // _CHUNK + 1), self.total)
        if not self.visible and self._have < wanted:
            wanted = min(max(wanted, self._have + _AHEAD), self.total)
        k = wanted - self._have
        if k <= 0:
            return
        if wanted > len(self._buffer):
            larger = np.empty(
                min(max(2 * len(self._buffer), wanted), self.total), self._buffer.dtype
            )
            larger[: self._have] = self._buffer[: self._have]
            self._buffer = larger
        # Entry by entry on the CPU: one call for all chunks draws what one call for each does.
        drawn = torch.randint(
            high=self._n, size=(k,), dtype=torch.int64, generator=self._generator, device="cpu"
        )
        self._buffer[self._have : wanted] = drawn.numpy()
        self._have = wanted

    def items(self, start: int, stop: int) -> Items:
        return self._buffer[start:stop]


class Weighted(Drawing):
    """`torch.multinomial`, all in one draw."""

    at_once = True

    def __init__(
        self,
        sampler: WeightedRandomSampler,
        generator: torch.Generator,
        outer: torch.Generator | None,
        kept: Facts,
    ) -> None:
        super().__init__(generator, outer, kept)
        self._sampler = sampler
        self.total = sampler.num_samples
        self._drawn: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        w = sampler.weights
        version = w._version  # noqa: SLF001  torch's count of changes in place
        self.key = ("weighted", id(w), version, self.total, sampler.replacement, self._start)

    @property
    def drawn(self) -> int:
        return len(self._drawn)

    def need(self, item: int) -> None:  # noqa: ARG002  (all at once)
        if not len(self._drawn):
            s = self._sampler
            # Weights on an accelerator want its generator, which is the sampler's own.
            generator = self._outer if s.weights.device.type != "cpu" else self._generator
            drawn = torch.multinomial(s.weights, s.num_samples, s.replacement, generator=generator)
            self._drawn = np.asarray(drawn.cpu().numpy(), dtype=np.int64)

    def items(self, start: int, stop: int) -> Items:
        return self._drawn[start:stop]
