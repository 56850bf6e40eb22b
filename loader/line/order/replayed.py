"""ReplayedOrder: the order of torch's own samplers, computed from the draws that torch makes.

Training draws from the same generators. So every draw that it can see is made at the moment when
torch makes it, no earlier and no later. For RandomSampler:

    moment           no generator               generator=G
    iter(loader)     base seed (global)         base seed (G), by torch
    first next       sampler's seed (global)    permutation (G)
    at the end       -                          one more permutation (G), discarded

An epoch that is left early has no end. With replacement 32 indices are drawn at a time, each time
one is needed. SubsetRandomSampler and WeightedRandomSampler draw all at the first `next`, from the
global generator if they have none of their own. DistributedSampler has a new generator in each
epoch, seeded with `seed + epoch`, which nobody else sees. A draw from a private generator like that
may be made at any time: it is made piece by piece, or whole in another thread (`generators`).

torch reads a sampler's attributes, and the dataset's length, at these moments too: most when the
first item is pulled, `batch_size` with each batch, RandomSampler the length once more before its
last draw. With workers it pulls `prefetch_factor * num_workers` batches before `iter(loader)`
returns, and one for each batch that it returns. The caller must pull likewise.

`streams` holds the samplers' recipes, `replay` picks the one of a sampler. **An array of int64
stands for the list of Python ints that torch would yield** (`.tolist()` before a user sees it); any
other item is the same object that torch would pass on.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from creel.loader.line.order.derived import step_in_epoch
from creel.loader.line.order.epoch_order import (
    EpochOrder,
    IteratorStart,
    OrderState,
    inner_of,
)
from creel.loader.line.order.epoch_plan import EpochPlan, PredictedEpoch, run_to_end
from creel.loader.line.order.generators import GeneratorCopies, RandomSource
from creel.loader.line.order.replay import is_sequence, open_stream
from creel.loader.line.order.streams import Items, SamplerStream, StreamState, indices_of
from creel.policies.order.division import Division
from creel.policies.order.remap import Exchange

#: Entries converted to int64 in the first piece, so that it is early; later pieces are larger.
_FIRST_PIECE = 1 << 11
#: Entries of a permutation that are computed at once while training waits: a few ms.
_MAX_PIECE = 1 << 16


class _ItemPiece(NamedTuple):
    """Items [start, end) of an order."""

    items: Items
    start: int
    end: int


class ReplayedOrder(EpochOrder):
    """The order of torch's own sampler or of a sequence, with or without BatchSampler."""

    known = True

    def __init__(
        self,
        loader: DataLoader[object],
        begun: IteratorStart,
        previous: EpochOrder | None = None,
        given: StreamState | None = None,
        *,
        redraw: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        """Make an order.

        Args:
            given: state of the stream to reopen.
            redraw: whether to repeat the stream's global draws even if its state is given.
            exchange: see `take_over`.
        """
        super().__init__(loader, begun)
        self._exchange = exchange
        #: torch's BatchSampler; None: the loader has none.
        self._batcher = self._sampler if type(self._sampler) is BatchSampler else None
        self.inner = inner_of(self._sampler)  # the sampler that draws
        self._given, self._redraw = given, redraw
        if getattr(self.inner, "replacement", False):
            self.lookahead = 2  # with replacement, see `EpochOrder`
        self._stream: SamplerStream | None = None  # None until torch would begin to draw
        self._division = Division()  # of its items, in steps
        self._at = 0  # next item
        self._piece = _ItemPiece([], 0, 0)  # the items that are converted
        #: Items of the next piece.
        self._piece_size = _FIRST_PIECE
        self._stride = 1  # increment of DistributedSampler.epoch per epoch
        before = None if previous is None else previous.innermost
        if isinstance(before, ReplayedOrder) and before.inner is self.inner:
            self._stride = before.epochs_to(self.inner)
        # The __iter__ of these two is not a generator function: it reads the dataset's length now.
        if self._batcher is None and type(self.inner) in (SequentialSampler, DistributedSampler):
            self._open()

    def _open(self) -> SamplerStream:
        if self._stream is None:
            self._division = self._divided()
            if self._redraw and self._given and "seed" in self._given:
                RandomSource().seed(None)
            self._stream = open_stream(self.inner, RandomSource(), self._given, self._exchange)
        return self._stream

    def of_all_ranks(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return what all ranks read in steps [start, stop) of the whole epoch, once it is open."""
        stream, at = self._open(), self._division.start
        if self._batcher is not None:
            return indices_of(stream.of_all_ranks(at(start), at(stop)))
        return np.array(
            [i for group in list[Any](stream.items(start, stop)) for i in group], np.int64
        )

    def step(self, batch: int) -> int:
        """Return the number of a batch in the whole epoch, once it is open."""
        return step_in_epoch(self._open(), self._division, batch)

    def _divided(self) -> Division:
        """Return the steps of an epoch that begins now."""
        batcher = self._batcher
        return Division() if batcher is None else Division(batcher.batch_size, batcher.drop_last)

    def _copies(self) -> GeneratorCopies:
        return GeneratorCopies(self._loader.generator, getattr(self.inner, "generator", None))

    def __next__(self) -> Any:
        start, piece = self._at, self._piece
        if self._batcher is None:
            if start >= piece.end:
                self._load(start, start + 1)
                piece = self._piece
            self._at = start + 1
            self.pulled += 1
            return piece.items[start - piece.start]
        # torch reads `batch_size` again for each batch, unless incomplete ones are dropped.
        drop = self._division.drop_last and self._stream is not None
        stop = start + (self._division.size if drop else self._batcher.batch_size)
        if stop > piece.end:
            stop = self._load(start, stop)
            piece = self._piece
        self._at = stop
        self.pulled += 1
        return piece.items[start - piece.start : stop - piece.start]

    def _load(self, start: int, stop: int) -> int:
        """Draw up to `stop` as torch would, load a piece from `start` on; return the batch's end.

        Raises:
            StopIteration: the epoch is over; its final draws are made.
        """
        stream = self._open()
        stream.need(min(stop - 1, stream.total))
        if start >= stream.total or (self._division.drop_last and stop > stream.total):
            raise StopIteration
        stop = min(stop, stream.total)
        # Of a large permutation that is partly drawn, take only the entries computed or needed now.
        size = min(self._piece_size, _MAX_PIECE // stream.spread)
        end = stop if stream.live else max(stop, min(start + size, stream.ready))
        items = stream.items(start, end)
        if isinstance(items, np.ndarray):
            items = items.tolist() if self._batcher is None else items.astype(np.int64)
        self._piece = _ItemPiece(items, start, end)
        self._piece_size *= 2
        return stop

    def skip(self, batches: int) -> None:
        self._at += batches * (1 if self._batcher is None else self._batcher.batch_size)
        self.pulled += batches

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        shadow = self._copies()
        now = self._stream.fork(shadow) if self._stream is not None else None
        # A copy keeps the sampler's present settings.
        sampler = self.inner if is_sequence(self.inner) else copy.copy(self.inner)
        return EpochPlan(functools.partial(self._predicted, epochs_ahead, shadow, now, sampler))

    def _predicted(
        self, epochs_ahead: int, shadow: GeneratorCopies, now: SamplerStream | None, sampler: object
    ) -> PredictedEpoch:
        division = self._division if now is not None and not epochs_ahead else self._divided()
        stream = now or open_stream(sampler, shadow, self._given, self._exchange)
        for _ in range(epochs_ahead):
            stream.need(stream.total)
            if not self._keeps_seed():
                shadow.seed(self._loader.generator)  # as torch draws the base seed
            if isinstance(sampler, DistributedSampler):
                sampler.epoch = stream.state()["epoch"] + self._stride
            stream = open_stream(sampler, shadow, None, self._exchange)
        if self._batcher is None and is_sequence(sampler):  # its items may be batches
            predicted = run_to_end(sampler)  # type: ignore[arg-type]  # a sequence
            if predicted is None:
                raise ValueError("the sequence is too long to predict")
            return predicted
        return PredictedEpoch(division, stream)

    def epochs_to(self, sampler: object) -> int:
        """Return how much the caller adds to DistributedSampler.epoch per epoch; 1 if unknown."""
        new = getattr(sampler, "epoch", None)
        if new is None or self._stream is None:  # first: most streams encode their state (0.1 ms)
            return 1
        old = self._stream.state().get("epoch")
        return new - old if old is not None and new >= old else 1

    def state(self, *, over: bool = False) -> OrderState:
        state = super().state(over=over)
        stream = self._stream
        if stream is None:
            stream = open_stream(self.inner, self._copies(), self._given)
        state["total"] = stream.total
        state["stream"] = stream.state()
        if "rng" in state["stream"] and self._loader.generator is getattr(
            self.inner, "generator", None
        ):
            state.pop("loader_rng", None)  # the stream has a later state of the same generator
        return state
