"""Batches with rows of a rehearsal memory: new samples first, then the rows."""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypedDict, cast

import numpy as np
import torch.distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from creel.errors import ConfigError
from creel.loader.data.user_code.protected import attribute, length
from creel.loader.line.order.derived import step_in_epoch
from creel.loader.line.order.epoch_order import (
    CombinedOrder,
    EpochOrder,
    OrderCombinator,
    OrderState,
    combinator_of,
)
from creel.loader.line.order.epoch_plan import EpochPlan, PredictedEpoch
from creel.loader.line.order.rehearsing import Content, EpochStart, NewItems, Replays
from creel.loader.line.order.replayed import ReplayedOrder
from creel.loader.line.order.streams import Derived, Items, SamplerStream, indices_of
from creel.policies.arrays import Ints
from creel.policies.cluster.job_order import JobOrder, JobReplays
from creel.policies.order.division import Division
from creel.policies.rehearsal.replay_passes import Passes

_log = logging.getLogger("creel.loader")

#: Digests of memories that were found too small; each is said once.
_small: set[str] = set()
#: Steps between the first ones of two epochs whose batches cannot be counted before they are drawn.
_UNCOUNTED = 1 << 32


class RehearsalState(TypedDict):
    """What an epoch replays, without the memory itself: 90 bytes of a checkpoint."""

    memory: str  # its digest
    step: int  # the epoch's first step, counted over all epochs
    grows: bool  # whether the memory grows in it


class RehearsedState(OrderState, total=False):
    """A saved epoch that replays rows of a memory."""

    rehearsal: RehearsalState


def _start_of(saved: OrderState) -> EpochStart:
    state = cast("RehearsedState", saved)["rehearsal"]
    return EpochStart(state["step"], grows=state["grows"])


class RehearsedBatches(OrderCombinator):
    """A batch sampler that adds rows of a memory to each batch of another one.

    Steps are counted over all epochs, and a step's rows depend on its number alone: an epoch that
    is left early takes as many numbers as a whole one.

    Attributes:
        batches: of new samples.
        digest: of the memory.
        next: where the next epoch begins. The memory grows until an epoch was read whole.
        first_row: the number of the memory's first row in the rehearsed dataset.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        content: Content,
        first_row: int,
        ranks: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """Add rows of a memory to each batch.

        Args:
            batches: of new samples.
            content: of the memory.
            first_row: the number of its first row in the rehearsed dataset.
            ranks: returns (rank, world) where the sampler has none; None: the job's.
        """
        self.batches = batches
        self.digest = content.digest
        self.next = EpochStart(0, grows=content.growth is not None)
        self._content, self.first_row, self._ranks = content, first_row, ranks or _of_job
        # As other loaders read them.
        inner, size = attribute(batches, "sampler"), attribute(batches, "batch_size")
        self.sampler = batches if inner is None else inner
        self.batch_size = (size if type(size) is int and size > 0 else 1) + self.each
        self.drop_last = attribute(batches, "drop_last") or False

    @property
    def changes(self) -> bool:
        return self.each > 0

    def around(self, order: EpochOrder, saved: OrderState | None) -> RehearsedOrder:
        start = None if saved is None or not order.known else _start_of(saved)
        return RehearsedOrder(order, self, start)

    def check(self, saved: OrderState) -> None:
        memory = cast("RehearsedState", saved).get("rehearsal")
        if memory is None or memory["memory"] != self.digest:
            raise ConfigError(
                "the saved state is of an epoch with another rehearsal memory: make the memory by"
                " the same calls of add, with the same seed and budget"
            )

    def resume(self, saved: OrderState) -> None:
        self.next = _start_of(saved)

    @property
    def each(self) -> int:
        """Rows that are added to a batch: 0 for a memory that is and stays empty."""
        content = self._content
        return content.per_batch if content.kept or content.growth is not None else 0

    @property
    def _dealt(self) -> bool:
        """Whether torch deals one order to all ranks."""
        inner: Any = self.sampler
        return type(self.batches) is BatchSampler and type(inner) is DistributedSampler

    @property
    def steps(self) -> int:
        """Steps that an epoch takes."""
        steps = length(self.batches)
        return _UNCOUNTED if steps is None else steps

    def begin(self, start: EpochStart | None = None) -> Replays:
        """Begin an epoch; None: the next one."""
        epoch_batches = self.at(start or self.next)
        epoch_batches.steps = self.steps
        self.next = epoch_batches.start._replace(
            step=epoch_batches.start.step + epoch_batches.steps
        )
        rows, there = epoch_batches.passes.step_rows, epoch_batches.passes.kept
        if rows > there > 0 and self.digest not in _small:
            _small.add(self.digest)
            _log.warning("a step replays %d rows of a memory of %d: it repeats them", rows, there)
        return epoch_batches

    def at(self, start: EpochStart) -> Replays:
        """Return the rows of an epoch that begins there.

        Raises:
            ConfigError: the memory grows by what other ranks read, and nobody knows that.
        """
        rank, world = self.ranks()
        growth = self._content.growth if start.grows else None
        if growth is not None and world > 1 and not self._dealt:
            raise ConfigError("every= needs a DistributedSampler where a job has several ranks")
        passes = Passes(self._content.kept, self.each, world, self._content.seed)
        return Replays(passes, rank, start, self.first_row, growth)

    def joined(self, replays: Replays, batch: Any, step: int) -> Any:
        """Return a batch with the rows of its step in an epoch that was begun."""
        if step + 1 >= replays.steps:
            self.end()
        return replays.joined(batch, step)

    def end(self) -> None:
        """Note that an epoch was read whole: the memory does not grow in later ones."""
        self.next = self.next._replace(grows=False)

    def ranks(self) -> tuple[int, int]:
        """Return (rank, world): the sampler's, as a DistributedSampler has them, or the job's."""
        for holder in (self.batches, attribute(self.batches, "sampler")):
            rank, world = attribute(holder, "rank"), attribute(holder, "num_replicas")
            if isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world:
                return rank, world
        return self._ranks()

    def __iter__(self) -> Iterator[Any]:
        return self._joined(iter(self.batches))  # a custom sampler's own code runs now, as in torch

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        if not self.each:
            yield from batches
            return
        replays = self.begin()
        pulled: list[Ints] = []
        if replays.growth is not None:
            replays.new_items = self._new_items(pulled)
        for step, batch in enumerate(batches):
            new = list(batch)
            if replays.growth is not None:
                pulled.append(np.array(new, np.int64))
            yield self.joined(replays, new, step)
        self.end()

    def _new_items(self, pulled: list[Ints]) -> NewItems:
        """Return what finds the new samples of all ranks; `pulled`: this rank's batches so far."""
        sampler: Any = self.sampler
        if not self._dealt or sampler.num_replicas == 1:
            return lambda start, stop: np.concatenate(pulled[start:stop] or [np.empty(0, np.int64)])
        of_all: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, 1, 0, sampler.shuffle, sampler.seed, sampler.drop_last
        )
        of_all.set_epoch(sampler.epoch)
        many = self.batches.batch_size * sampler.num_replicas  # type: ignore[attr-defined]  # `_dealt`
        order = functools.cache(lambda: np.array(list(of_all), np.int64))
        return lambda start, stop: order()[start * many : stop * many]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # as torch: TypeError if it has none

    def set_epoch(self, epoch: int) -> None:
        """Begin the next epoch with the steps of this one; does not tell the other samplers."""
        self.next = self.next._replace(step=epoch * self.steps)


def rehearsed_batches(loader: DataLoader[Any]) -> RehearsedBatches | None:
    """Return what adds rows of a memory to the loader's batches; None if nothing does."""
    sampler = combinator_of(loader)
    return sampler if isinstance(sampler, RehearsedBatches) else None


class RehearsedOrder(CombinedOrder):
    """The order of an epoch with rows of a memory in each batch, around that of the new samples.

    A custom sampler is iterated within `RehearsedBatches`, which adds the rows itself.
    """

    def __init__(
        self, new: EpochOrder, batches: RehearsedBatches, start: EpochStart | None
    ) -> None:
        """`start`: where the epoch begins; None: where the one before has ended."""
        super().__init__(new)
        self.extended, self.lookahead = True, 2
        self._batches = batches
        self._replayed = new if isinstance(new, ReplayedOrder) else None
        self._begun = start
        self._replays: Replays | None = None

    def __next__(self) -> Any:
        new = self._replayed
        if new is None:
            self._begun = self._start
            return super().__next__()
        if self._replays is None:
            self._replays = self._batches.begin(self._begun)
            self._begun = self._replays.start
            self._replays.new_items = new.of_all_ranks
        try:
            batch = super().__next__()
        except StopIteration:
            self._batches.end()
            raise
        if type(self._batches.batches) is not BatchSampler:
            batch = list(batch)
        return self._batches.joined(self._replays, batch, new.step(self.pulled - 1))

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        plan, start = super().predict(epochs_ahead), self._start
        if plan is None:
            return None
        if epochs_ahead:  # this one will be read whole
            start = EpochStart(start.step + epochs_ahead * self._batches.steps, grows=False)
        replays = self._batches.at(start)

        def rehearsed(epoch: PredictedEpoch) -> PredictedEpoch:
            stream = WithReplays(epoch.stream, epoch.division, replays)
            return PredictedEpoch(stream.division, stream)

        return plan.changed(rehearsed)

    @property
    def _start(self) -> EpochStart:
        """Where the epoch begins, or will."""
        return self._begun or self._batches.next

    def state(self, *, over: bool = False) -> OrderState:
        start = self._batches.next if over and not self.known else self._start
        memory = RehearsalState(memory=self._batches.digest, step=start.step, grows=start.grows)
        return RehearsedState(**super().state(over=over), rehearsal=memory)


class WithReplays(Derived):
    """A stream with the rows of a rehearsal memory at the end of each step. Only to predict."""

    def __init__(self, new: SamplerStream, division: Division, replays: Replays) -> None:
        """division: of the new items."""
        super().__init__(new)
        self._of_new, self._replays = division, replays
        if replays.growth is not None:
            at = division.start
            replays.new_items = lambda start, stop: indices_of(
                new.of_all_ranks(at(start), at(stop))
            )
        steps = division.steps(new.total)
        self._new_total = min(division.start(steps), new.total)
        numbers = functools.partial(step_in_epoch, new, division)
        #: Steps at the head that replay nothing.
        self._bare = bisect_left(range(steps), replays.bare, key=numbers)
        each = replays.passes.each
        self.total = self._new_total + (steps - self._bare) * each
        self.division = Division(division.size + each)
        if division.starts is not None or self._bare:
            starts = np.array([division.start(k) for k in range(steps + 1)], np.int64)
            more = (np.arange(steps + 1) - self._bare).clip(0) * each
            self.division = Division(starts=starts.clip(max=self._new_total) + more)
        self.at_once, self.spread = new.at_once, new.spread
        if new.key is not None:
            self.key = ("replays", new.key, division.size, replays.key)

    def dealt(self, division: Division) -> JobOrder | None:  # noqa: ARG002  it has its own
        """Return the job's order of the new samples, with its replays; None while memory grows."""
        order, replays = self._order.dealt(self._of_new), self._replays
        if order is None or replays.growth is not None:
            return None
        if not replays.passes.kept:
            return order
        return order._replace(replays=JobReplays(replays.passes, replays.start.step))

    @property
    def ready(self) -> int:
        ready = self._order.ready
        if ready >= self._new_total:
            return self.total
        return self.division.start(self._of_new.within(ready))

    def need(self, item: int) -> None:
        if item >= self.total:
            self._order.need(self._order.total)
        else:
            last = self._of_new.start(self.division.within(item) + 1)
            self._order.need(min(last, self._new_total) - 1)

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return np.empty(0, np.int32)
        first, last = self.division.within(start), self.division.within(stop - 1) + 1
        new = indices_of(
            self._order.items(
                self._of_new.start(first), min(self._of_new.start(last), self._new_total)
            )
        )
        ends = self._of_new.ends(first, last, len(new))
        each, steps = self._replays.passes.each, np.arange(max(first, self._bare), last)
        numbers = [step_in_epoch(self._order, self._of_new, k) for k in steps.tolist()]
        before = np.arange(len(steps)) * each
        places = (ends[last - first - len(steps) :] + before)[:, None] + np.arange(each)
        items = np.empty(len(new) + places.size, np.int32)
        is_new = np.ones(len(items), np.bool_)
        if len(steps):
            items[places], is_new[places] = self._replays.rows(np.array(numbers)), False
        items[is_new] = new
        begin = self.division.start(first)
        return items[start - begin : stop - begin]


def _of_job() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
