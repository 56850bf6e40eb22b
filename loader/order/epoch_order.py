"""EpochOrder: an epoch's order, drawn when torch draws it, predicted, and saved for resuming.

`samplers` makes them.
"""

from __future__ import annotations

import copy
import functools
import logging
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypedDict, cast

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from creel.loader.order.drain import drain, gather
from creel.loader.order.epoch_plan import Division, EpochPlan, PredictedEpoch, drained_epoch
from creel.loader.order.generators import GeneratorCopies, RandomSource, encode_state, state_of
from creel.loader.order.replay import is_sequence, open_stream
from creel.loader.order.sampler_state import OwnState, attribute, own_states
from creel.loader.order.streams import Items, SamplerStream, Shuffled, StreamState, WithReplacement
from creel.policies.cluster.remap import Exchange

_log = logging.getLogger("creel.loader")

#: Entries converted to int64 in the first piece, so that it is early; later pieces are larger.
_FIRST_PIECE = 1 << 11
#: Seconds that a copy of a custom sampler may run in one call.
COPY_S = 2.0


class OrderState(TypedDict, total=False):
    """A saved epoch order, small enough for a checkpoint and fit for JSON.

    Under 200 bytes without a user's generator; a generator adds about 4 KB.
    """

    kind: str  # class of the sampler
    base_seed: int
    total: int  # items of the epoch, -1 if unknown
    batch: int  # `batch_of` its sampler
    before: int  # CRC-32 of the global generator's state before the epoch's first draw
    stream: StreamState
    loader_rng: str  # state of the loader's generator after the base seed
    own: list[OwnState]  # of custom samplers, before the epoch; after it if it is over


#: A `Progress` of another version is refused.
PROGRESS_VERSION = 1


class Progress(TypedDict, total=False):
    """The result of `DataLoader.state_dict()`: a position in training, as values that fit JSON."""

    version: int
    epoch: int  # epochs begun before this one
    batches: int  # of this epoch, up to the last one that was returned to the caller
    finished: bool
    order: OrderState


def not_begun() -> Progress:
    """Return the position before the first epoch."""
    return Progress(version=PROGRESS_VERSION, epoch=-1, batches=0, finished=False)


class StateBefore(NamedTuple):
    """The state before torch's iterator begins an epoch; see `samplers.before`."""

    rng: bytes  # state of the global generator
    own: list[OwnState]


class IteratorStart(NamedTuple):
    """The state of torch's `_BaseDataLoaderIter` when it has begun an epoch."""

    sampler_iter: Iterator[object]
    base_seed: int
    before: StateBefore


class EpochOrder:
    """Iterator over one epoch's index sampler. Made by `samplers.adopt`.

    Attributes:
        base_seed: the `_base_seed` of torch's iterator.
        known: True: the order is computed; False: the sampler is iterated.
        pulled: items returned by `next` or skipped so far.
        lookahead: how many epochs after this one are useful to know. One if every epoch reads the
            same samples (law L1). With replacement, the next epoch may lack a sample that the one
            after it reads. Knowing two epochs then gives 24 % fewer misses, with memory for 3/4 of
            the samples (law L4).
    """

    known: bool
    lookahead = 1

    def __init__(self, loader: DataLoader[object], begun: IteratorStart) -> None:
        self._loader = loader
        self._sampler = index_sampler(loader)
        #: CRC of the global generator before the epoch first began, in whatever process.
        self.before = zlib.crc32(begun.before.rng)
        self._own = begun.before.own
        self._loader_rng = b"" if loader.generator is None else state_of(loader.generator)
        self._encoded_rng = ""
        self.base_seed = begun.base_seed
        self.pulled = 0

    def __iter__(self) -> EpochOrder:
        return self

    def __next__(self) -> object:
        raise NotImplementedError

    def skip(self, batches: int) -> None:
        """Advance as `batches` calls of `next` would; O(1) if the order is known."""
        raise NotImplementedError

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        """Predict what this epoch (0), the next (1) or a later one reads.

        The prediction holds if no other code draws from the generators meanwhile. For a known order
        this takes microseconds and is valid at any moment. A custom sampler is predicted only if
        the user asked for it: a copy then runs in this call; ask for epoch 0 before the first
        `next`.

        Returns:
            None if the epoch cannot be predicted.
        """
        raise NotImplementedError

    def record_outcome(self, *, wrong: bool) -> None:
        """Record, after the epoch, whether it differed from its prediction."""

    def state(self, *, over: bool = False) -> OrderState:
        """Return what `adopt` needs to begin this epoch again; the caller keeps the position.

        over: all of the epoch was read, and the next one is to be resumed.
        """
        state = OrderState(kind=kind_of(self._sampler), base_seed=self.base_seed, total=-1)
        state["before"] = self.before
        state["batch"] = batch_of(self._sampler)
        if self._loader_rng:
            self._encoded_rng = self._encoded_rng or encode_state(self._loader_rng)
            state["loader_rng"] = self._encoded_rng
        if self._own:
            state["own"] = own_states(self._sampler) if over else self._own
        return state

    def close(self) -> None:
        """Drop a custom sampler's iterator, as torch does once its own is deleted."""

    def _keeps_seed(self) -> bool:
        """Whether the next epoch keeps this one's base seed."""
        return self._loader.num_workers > 0 and self._loader.persistent_workers


class KnownOrder(EpochOrder):
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
            exchange: see `adopt`.
        """
        super().__init__(loader, begun)
        self._exchange = exchange
        self._batcher = self._sampler if type(self._sampler) is BatchSampler else None
        self.inner = inner_of(self._sampler)
        self._given, self._redraw = given, redraw
        self.lookahead = 2 if getattr(self.inner, "replacement", False) else 1
        self._stream: SamplerStream | None = None
        self._recounted = False
        self._division = Division()
        self._at = 0  # next item
        self._piece: Items = []
        self._piece_start = self._piece_end = 0
        self._piece_size = _FIRST_PIECE
        self._stride = 1  # increment of DistributedSampler.epoch per epoch
        if isinstance(previous, KnownOrder) and previous.inner is self.inner:
            self._stride = previous.epochs_to(self.inner)
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

    def _divided(self) -> Division:
        """Return the steps of an epoch that begins now."""
        batcher = self._batcher
        return Division() if batcher is None else Division(batcher.batch_size, batcher.drop_last)

    def _copies(self) -> GeneratorCopies:
        return GeneratorCopies(self._loader.generator, getattr(self.inner, "generator", None))

    def __next__(self) -> object:
        start = self._at
        if self._batcher is None:
            if start >= self._piece_end:
                self._load(start, start + 1)
            self._at = start + 1
            self.pulled += 1
            return self._piece[start - self._piece_start]
        # torch reads `batch_size` again for each batch, unless incomplete ones are dropped.
        drop = self._division.drop_last and self._stream is not None
        stop = start + (self._division.size if drop else self._batcher.batch_size)
        if stop > self._piece_end:
            stop = self._load(start, stop)
        self._at = stop
        self.pulled += 1
        return self._piece[start - self._piece_start : stop - self._piece_start]

    def _load(self, start: int, stop: int) -> int:
        """Draw up to `stop` as torch would, load a piece from `start` on; return the batch's end.

        Raises:
            StopIteration: the epoch is over; its final draws are made.
        """
        stream = self._open()
        sure = self._recount(stream, stop - 1)
        stream.need(min(stop - 1, stream.total))
        if start >= stream.total or (self._division.drop_last and stop > stream.total):
            raise StopIteration
        stop = min(stop, stream.total)
        # Of a large permutation that is partly drawn, take only the entries computed or needed now.
        there = min(stream.drawn, stream.ready, sure)
        size = min(self._piece_size, stream.at_a_time)
        end = stop if stream.live else max(stop, min(start + size, there))
        piece = stream.items(start, end)
        if isinstance(piece, np.ndarray):
            piece = piece.tolist() if self._batcher is None else piece.astype(np.int64)
        self._piece, self._piece_start, self._piece_end = piece, start, end
        self._piece_size *= 2
        return stop

    def _recount(self, stream: SamplerStream, item: int) -> int:
        """Read the number of samples again, as RandomSampler does before its last block.

        A dataset that has grown or shrunk since the epoch began gets other batches from there on.
        Returns how many items are certain before `item` is drawn.
        """
        if not isinstance(stream, (Shuffled, WithReplacement)) or self._recounted:
            return stream.total
        if not isinstance(self.inner, RandomSampler):
            return stream.total
        if item < stream.last_block:
            return stream.last_block
        self._recounted = True
        stream.recount(self.inner.num_samples)
        return stream.total

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
            found = gather(iter(sampler))  # type: ignore[call-overload]  # a sequence
            if found is None:
                raise ValueError("the sequence is too long to predict")
            return drained_epoch(found)
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


class ForeignOrder(EpochOrder):
    """The order of a custom sampler: iterated when torch would, never ahead.

    An epoch is predicted, by running a copy, only if the user asked for it: by `loader.foresee`, or
    in the sampler by `foreseeable`.
    """

    known = False

    def __init__(
        self,
        loader: DataLoader[object],
        begun: IteratorStart,
        previous: EpochOrder | None = None,
        *,
        foresee: bool = False,
    ) -> None:
        super().__init__(loader, begun)
        self._begun = begun.sampler_iter
        self._first: EpochPlan | None = None
        self._may_run_ahead = foresee or foreseeable(self._sampler)
        self.unpredictable: bool = isinstance(previous, ForeignOrder) and previous.unpredictable
        self._epochs = _epochs_of(self._sampler)

    def record_outcome(self, *, wrong: bool) -> None:
        if wrong:
            self.unpredictable = True
            _log.warning(
                "a copy of %s yielded other samples than the sampler itself: creel no longer runs"
                " copies of it, and only reads ahead what torch has pulled from it",
                kind_of(self._sampler),
            )

    def __next__(self) -> object:
        pulled = next(self._begun)
        self.pulled += 1
        return pulled

    def close(self) -> None:
        self._begun = iter(())

    def skip(self, batches: int) -> None:
        for _ in range(batches):
            if next(self, None) is None:
                return

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        if not epochs_ahead and (self._first is not None or self.pulled):
            return self._first
        if not self._may_run_ahead or self.unpredictable or epochs_ahead > 1:
            return None
        found = drain(
            self._loader,
            self._sampler,
            None if self.pulled else self._begun,
            next_epoch=bool(epochs_ahead),
            keep_seed=self._keeps_seed(),
            advance=0 if _epochs_of(self._sampler) != self._epochs else 1,
            budget_s=COPY_S,
        )
        if found is None:
            self.unpredictable = True
            return None
        made = EpochPlan(lambda: drained_epoch(found))
        if not epochs_ahead:
            self._first = made
        return made

    def state(self, *, over: bool = False) -> OrderState:
        state = super().state(over=over)
        if over and self._loader.generator is not None:
            state["loader_rng"] = encode_state(state_of(self._loader.generator))
        return state


def index_sampler(loader: DataLoader[object]) -> Iterable[object]:
    """Return the object that torch iterates for the loader; a subclass may override it."""
    return cast("Iterable[object]", loader._index_sampler)  # noqa: SLF001  torch's


def inner_of(sampler: object) -> object:
    """Return the sampler that draws: the one inside torch's BatchSampler, else `sampler` itself."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def batch_of(sampler: object) -> int:
    """Return the items of a batch; 1 if torch's BatchSampler does not make them."""
    return sampler.batch_size if type(sampler) is BatchSampler else 1


def kind_of(sampler: object) -> str:
    return type(inner_of(sampler)).__name__


def _epochs_of(sampler: object) -> tuple[object, object]:
    return attribute(sampler, "epoch"), attribute(attribute(sampler, "sampler"), "epoch")


def foreseeable(sampler: object) -> bool:
    """Whether a custom sampler declares that a copy of it may be run ahead.

    The attribute `foreseeable = True` promises that iterating a deep copy yields what iterating the
    sampler will yield, without side effects. (The dataset is not copied; the global generators of
    torch, numpy and `random` are restored.)
    """
    return attribute(inner_of(sampler), "foreseeable") is True
