"""Batches with rows of a rehearsal memory: new samples first, then the rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler

from creel.errors import ConfigError
from creel.loader.data.user_code.protected import attribute, length
from creel.loader.line.order.generators import Permutation, permutation, seeded
from creel.policies.arrays import Ints, unique
from creel.policies.rehearsal.content import Offered, mixed
from creel.policies.rehearsal.growth import Growth
from creel.policies.rehearsal.passes import Passes

_log = logging.getLogger("creel.loader")

#: Digests of memories that were found too small; each is said once.
_small: set[str] = set()
#: Returns the new samples of all ranks in steps [start, stop) of an epoch.
NewItems: TypeAlias = "Callable[[int, int], NDArray[np.integer]]"

#: Steps between the first ones of two epochs whose batches cannot be counted before they are drawn.
_UNCOUNTED = 1 << 32
#: Steps whose rows are computed at once: a call for one takes 34 us.
_AT_ONCE = 64
_NO_STEP = 1 << 62  # above the number of any step


class EpochStart(NamedTuple):
    """Where an epoch with a rehearsal begins.

    Attributes:
        step: the number, among all steps of the job, of the epoch's first.
        grows: whether the memory grows in it.
    """

    step: int
    grows: bool


class Content(NamedTuple):
    """What batches need to know of a memory.

    Attributes:
        kept: number of rows.
        per_batch: rows that a batch replays.
        seed: of the order in which they are replayed.
        digest: equal for equal rows in an equal order.
        growth: None: it stays as it is.
    """

    kept: int
    per_batch: int
    seed: int
    digest: str
    growth: Growth | None = None


class _Block(NamedTuple):
    """What is replayed in `every` steps of an epoch in which the memory grows.

    Attributes:
        number: of the block in the epoch.
        held: what the memory keeps.
        numbers: (m,) of `held`, in the rehearsed dataset.
        passes: how all ranks share them.
    """

    number: int
    held: Offered
    numbers: Ints
    passes: Passes


class Replays:
    """The rows that one rank replays in the steps of one epoch. Thread-safe.

    Attributes:
        passes: how all ranks share the rows.
        start: where the epoch begins.
        bare: earlier steps of the epoch replay nothing.
        growth: of the memory in this epoch.
        steps: of the epoch, once it has begun.
        new_items: if the memory grows: by what. Set by who knows the epoch's order.
    """

    new_items: NewItems

    def __init__(
        self,
        passes: Passes,
        rank: int,
        start: EpochStart,
        first_row: int,
        growth: Growth | None = None,
    ) -> None:
        """Make the rows of an epoch.

        Args:
            first_row: the number of the memory's first row in the rehearsed dataset.
            growth: of the memory in this epoch; None: it stays as it is.
        """
        self.passes, self._rank, self._first_row = passes, rank, first_row
        self.start, self.growth, self.steps = start, growth, _NO_STEP
        self.bare = 0 if passes.kept else _NO_STEP if growth is None else growth.every
        self.key = ("replays", passes, rank, start, first_row)
        self._drawn: dict[Passes, tuple[int, Permutation]] = {}
        self._last: _Block | None = None
        self._computed: tuple[int, Ints] = (0, np.empty((0, passes.each), np.int64))

    def rows(self, steps: Ints) -> Ints:
        """Return the (k, each) numbers of the rows in (k,) steps, none of them below `bare`."""
        if self.growth is None:
            rows = self.passes.to_rank(self._rank, self.start.step + steps, self._head(self.passes))
            return rows + self._first_row
        rows = np.empty((len(steps), self.passes.each), np.int64)
        blocks, inside = np.divmod(steps, self.growth.every)
        for block in unique(blocks):
            mine = blocks == block
            found = self._block(int(block), self.growth)
            places = found.passes.to_rank(self._rank, inside[mine], self._head(found.passes))
            rows[mine] = np.sort(found.numbers[places], axis=1)  # the memory's rows come last
        return rows

    def joined(self, batch: Any, step: int) -> Any:
        """Return a batch with the rows of its step: an array, if it is one, or else a list.

        Raises:
            IndexError: it has a sample beyond the new data, where the memory's rows are.
        """
        if step < self.bare:
            return batch
        rows = self._rows_of(step)
        if isinstance(batch, np.ndarray):
            self._check(int(batch.max(initial=-1)))
            return np.concatenate([batch, rows])
        self._check(max((i for i in batch if type(i) is int), default=-1))
        return [*batch, *rows.tolist()]

    def _check(self, largest: int) -> None:
        if self.passes.kept and largest >= self._first_row:
            raise IndexError(f"sample {largest}: the dataset has {self._first_row}")

    def _rows_of(self, step: int) -> Ints:
        """Return the (each,) rows of one step; computed for some steps at once."""
        first, rows = self._computed
        if not first <= step < first + len(rows):
            stop = max(min(step + _AT_ONCE, self.steps), step + 1)
            if self.growth is not None:  # what is new in this block is not known yet
                stop = min(stop, (step // self.growth.every + 1) * self.growth.every)
            first, rows = self._computed = step, self.rows(np.arange(step, stop))
        row: Ints = rows[step - first]
        return row

    def _block(self, number: int, growth: Growth) -> _Block:
        """Return what is replayed in a block of steps; from the block before it in little time."""
        last = self._last
        if last is not None and last.number == number:
            return last
        begun, held = 0, growth.kept
        if last is not None and last.number < number:
            begun, held = last.number, last.held
        held = growth.grown(held, self.new_items(begun * growth.every, number * growth.every))
        seed = int(mixed(np.array([number]), self.passes.seed)[0])
        passes = self.passes._replace(kept=len(held.uids), seed=seed)
        self._last = _Block(number, held, growth.numbers(held, self._first_row), passes)
        return self._last

    def _head(self, passes: Passes) -> Callable[[int, int], NDArray[np.integer]]:
        def head(number: int, k: int) -> NDArray[np.integer]:
            at, drawn = self._drawn.get(passes, (-1, None))
            if drawn is None or at != number:
                drawn = permutation(passes.kept, seeded(passes.seed_of(number)))
                self._drawn = {passes: (number, drawn)}
            return drawn.first(k)

        return head


class RehearsedBatches(BatchSampler):
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
        found = self.at(start or self.next)
        found.steps = self.steps
        self.next = found.start._replace(step=found.start.step + found.steps)
        rows, there = found.passes.step_rows, found.passes.kept
        if rows > there > 0 and self.digest not in _small:
            _small.add(self.digest)
            _log.warning("a step replays %d rows of a memory of %d: it repeats them", rows, there)
        return found

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


def _of_job() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
