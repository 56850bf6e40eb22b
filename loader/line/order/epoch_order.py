"""EpochOrder: what an epoch reads, in torch's order: drawn when torch draws it, saved, predicted.

Each epoch of a loader has one, made by `samplers.take_over` when torch's iterator has begun it. It
takes the place of the iterator's `_sampler_iter`. There are two kinds:

- `ReplayedOrder` (`replayed`) computes what one of torch's own samplers yields, from the same draws
  of the same generators. Its indices are slices of arrays, and it can be predicted, resumed and
  skipped without being iterated.
- `CustomOrder` (`custom`) passes on what any other sampler yields. That is the user's code, of
  which nothing is known.

An `OrderCombinator` puts another order around these, as `rehearsed_order` does.

Who calls: torch's iterator (or one of `line/batches`, in its place) calls `next`, in the thread
that trains, when torch would: this makes the draws that the user can see. `EpochRun` asks for
`predict` and `state` at any time, also in mid-epoch. Neither may change anything that the user can
see: a generator's state, an attribute of a sampler, or how often its code has run. A prediction is
a copy of the order with copies of the generators, and the planner thread computes it while the
order itself goes on.

Nothing here decides what is read: where a prediction is wrong, the order yields the right batch
all the same, and `loader/line/steps/batch_stream.py` notices the difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypedDict, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from creel.loader.line.order.custom.sampler_copy import SamplerCopy
from creel.loader.line.order.custom.sampler_state import SamplerState, sampler_states
from creel.loader.line.order.epoch_plan import EpochPlan
from creel.loader.line.order.generators import encode_state, state_of
from creel.loader.line.order.streams import StreamState


class OrderState(TypedDict, total=False):
    """A saved epoch order, small enough for a checkpoint and fit for JSON.

    Under 200 bytes without a user's generator, which adds about 4 KB. A combinator may add keys.
    """

    kind: str  # class of the sampler
    base_seed: int
    total: int  # items of the epoch, -1 if unknown
    batch: int  # `batch_of` its sampler
    before: int  # CRC-32 of the global generator's state before the epoch's first draw
    stream: StreamState
    loader_rng: str  # state of the loader's generator after the base seed
    own: list[SamplerState]  # of custom samplers, before the epoch; after it if it is over
    inner_rng: str  # of torch's sampler inside a custom one; state of its generator


#: A `Progress` of another version is refused.
PROGRESS_VERSION = 1


class Progress(TypedDict, total=False):
    """The result of `DataLoader.state_dict()`: a position in training, as values that fit JSON."""

    version: int
    epoch: int  # epochs begun before this one
    batches: int  # of this epoch, up to the last one that was returned to the caller
    finished: bool
    order: OrderState
    seed: int  # of the epoch's samples, if they are seeded by their numbers


def not_begun() -> Progress:
    """Return the position before the first epoch."""
    return Progress(version=PROGRESS_VERSION, epoch=-1, batches=0, finished=False)


class StateBefore(NamedTuple):
    """The state before torch's iterator begins an epoch; see `samplers.before`."""

    rng: bytes  # state of the global generator
    own: list[SamplerState]
    copied: SamplerCopy | None = None  # of a custom sampler that may be run ahead


class IteratorStart(NamedTuple):
    """The state of torch's `_BaseDataLoaderIter` when it has begun an epoch."""

    sampler_iter: Iterator[object]
    base_seed: int
    before: StateBefore


class EpochOrder:
    """Iterator over one epoch's index sampler. Made by `samplers.take_over`.

    Attributes:
        base_seed: the `_base_seed` of torch's iterator.
        known: True: the order is computed; False: the sampler is iterated.
        paced: items arrive while training runs, and the end is a place like any other.
        copied: runs ahead of a custom sampler, if the user permits it.
        pulled: items returned by `next` or skipped so far.
        extended: whether it may read more than the dataset's own samples, if not yet.
        lookahead: how many epochs after this one are useful to know. One if every epoch reads the
            same samples (law L1). With replacement, or with other data in between, the next epoch
            may lack a sample that the one after it reads. With replacement, knowing two gives 24 %
            fewer misses, with memory for 3/4 of the samples (law L4).
    """

    known: bool
    paced = extended = False
    lookahead = 1

    def __init__(self, loader: DataLoader[object], begun: IteratorStart) -> None:
        self._loader = loader
        self._sampler = index_sampler(loader)
        #: CRC of the global generator before the epoch first began, in whatever process.
        self.before = zlib.crc32(begun.before.rng)
        self._own, self.copied = begun.before.own, begun.before.copied
        #: The state of its generator, before the epoch.
        self._loader_rng = b"" if loader.generator is None else state_of(loader.generator)
        self._encoded_rng = ""  # the same for a checkpoint, once asked for
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
        the user asked for it: a copy of it then runs in this call.

        Returns:
            None if the epoch cannot be predicted.
        """
        raise NotImplementedError

    def note_wrong_prediction(self) -> None:
        """Note that the epoch differs from what `predict` said."""

    def state(self, *, over: bool = False) -> OrderState:
        """Return what `take_over` needs to begin this epoch again; the caller keeps the position.

        over: all of the epoch was read, and the next one is to be resumed.
        """
        state = OrderState(kind=kind_of(self._sampler), base_seed=self.base_seed, total=-1)
        state["before"] = self.before
        state["batch"] = batch_of(self._sampler)
        if self._loader_rng:
            self._encoded_rng = self._encoded_rng or encode_state(self._loader_rng)
            state["loader_rng"] = self._encoded_rng
        if self._own:
            state["own"] = sampler_states(self._sampler) if over else self._own
        return state

    def state_after(self, batches: int, *, over: bool) -> OrderState:  # noqa: ARG002  paced orders
        """Return `state`; `batches`: how many were delivered, which the caller keeps as well."""
        return self.state(over=over)

    def arrived(self) -> bool:
        """Whether `next` need not wait for data: always, except for a stream (`PacedOrder`)."""
        return True

    def delivered(self, batches: int) -> None:
        """Note that training has all batches below `batches`."""

    @property
    def innermost(self) -> EpochOrder:
        """The order of the sampler itself, without what a combinator puts around it."""
        return self

    def close(self) -> None:
        """Drop a custom sampler's iterator, as torch does once its own is deleted."""

    def _keeps_seed(self) -> bool:
        """Whether the next epoch keeps this one's base seed."""
        return self._loader.num_workers > 0 and self._loader.persistent_workers


class CombinedOrder(EpochOrder):
    """The order of an epoch around that of another sampler; this one changes nothing.

    Attributes:
        inside: the other one.
    """

    def __init__(self, inside: EpochOrder) -> None:
        self.inside = inside
        self.known, self.base_seed, self.copied = inside.known, inside.base_seed, inside.copied
        self.lookahead, self.extended, self.pulled = inside.lookahead, inside.extended, 0

    def __next__(self) -> Any:
        item = next(self.inside)
        self.pulled += 1
        return item

    def skip(self, batches: int) -> None:
        self.inside.skip(batches)
        self.pulled += batches

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        return self.inside.predict(epochs_ahead)

    def note_wrong_prediction(self) -> None:
        self.inside.note_wrong_prediction()

    def state(self, *, over: bool = False) -> OrderState:
        return self.inside.state(over=over)

    @property
    def innermost(self) -> EpochOrder:
        return self.inside.innermost

    def close(self) -> None:
        self.inside.close()


class OrderCombinator(BatchSampler):
    """A batch sampler of creel's around another one, each of whose batches it changes.

    Attributes:
        batches: the other one.
        digest: equal where two of these change batches alike.
        changes: whether it changes any.
    """

    batches: Iterable[Any]
    digest: str

    @property
    def changes(self) -> bool:
        raise NotImplementedError

    def around(self, order: EpochOrder, saved: OrderState | None) -> CombinedOrder:
        """Return the order of an epoch, around that of `batches`; `saved`: it begins again."""
        raise NotImplementedError

    def check(self, saved: OrderState) -> None:
        """Raise ConfigError if a saved epoch is of one with another `digest`."""
        raise NotImplementedError

    def resume(self, saved: OrderState) -> None:
        """Begin the next epoch where this one is saved."""
        raise NotImplementedError


def index_sampler(loader: DataLoader[object]) -> Iterable[object]:
    """Return the object that torch iterates for the loader; a subclass may override it.

    With a combinator: that inside.
    """
    sampler = _iterated(loader)
    return sampler.batches if isinstance(sampler, OrderCombinator) else sampler


def combinator_of(loader: DataLoader[object]) -> OrderCombinator | None:
    """Return what changes the loader's batches; None if nothing does."""
    sampler = _iterated(loader)
    return sampler if isinstance(sampler, OrderCombinator) and sampler.changes else None


def _iterated(loader: DataLoader[object]) -> Iterable[object]:
    return cast("Iterable[object]", loader._index_sampler)  # noqa: SLF001  torch's


def inner_of(sampler: object) -> object:
    """Return the sampler that draws: the one inside torch's BatchSampler, else `sampler` itself."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def may_repeat(sampler: object) -> bool:
    """Whether an epoch of a loader's index sampler may read a sample twice.

    Not one of torch's samplers that read each sample once; DistributedSampler counts as one,
    though it fills the last batch up with the epoch's first samples.
    """
    inner = inner_of(sampler)
    if type(inner) is RandomSampler:
        return inner.replacement or inner.num_samples > len(inner.data_source)
    return type(inner) not in {SequentialSampler, DistributedSampler}


def batch_of(sampler: object) -> int:
    """Return the items of a batch; 1 if torch's BatchSampler does not make them."""
    return sampler.batch_size if type(sampler) is BatchSampler else 1


def kind_of(sampler: object) -> str:
    return type(inner_of(sampler)).__name__
