"""Batches with rows of a rehearsal memory: new samples first, then the rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from creel.loader.order.generators import Permutation, permutation, seeded
from creel.loader.order.sampler_state import attribute
from creel.policies.arrays import Ints
from creel.policies.rehearsal.passes import Passes

_log = logging.getLogger("creel.loader")

#: Digests of memories that were found too small; each is said once.
_small: set[str] = set()
#: Steps between the first ones of two epochs whose batches cannot be counted before they are drawn.
_UNCOUNTED = 1 << 32


class Content(NamedTuple):
    """What batches need to know of a memory.

    Attributes:
        kept: number of rows.
        per_batch: rows that a batch replays.
        seed: of the order in which they are replayed.
        digest: equal for equal rows in an equal order.
    """

    kept: int
    per_batch: int
    seed: int
    digest: str


class Replays:
    """The rows that one rank replays in the steps of one epoch. Thread-safe.

    Attributes:
        passes: how all ranks share the rows.
        first_step: the number, among all steps of the job, of the epoch's first.
    """

    def __init__(self, passes: Passes, rank: int, first_step: int, first_row: int) -> None:
        """`first_row`: the number of the memory's first row in the rehearsed dataset."""
        self.passes, self._rank, self._first_row = passes, rank, first_row
        self.first_step = first_step
        self.key = ("replays", passes, rank, first_step, first_row)
        self._drawn: dict[int, Permutation] = {}

    def rows(self, steps: Ints) -> Ints:
        """Return the (k, each) numbers of the rows in (k,) steps of the epoch."""
        rows = self.passes.to_rank(self._rank, self.first_step + steps, self._head)
        return rows + self._first_row

    def joined(self, batch: Any, step: int) -> Any:
        """Return a batch with the rows of its step: an array, if it is one, or else a list."""
        rows = self.rows(np.array([step]))[0]
        if isinstance(batch, np.ndarray):
            return np.concatenate([batch, rows])
        return [*batch, *rows.tolist()]

    def _head(self, number: int, k: int) -> NDArray[np.integer]:
        drawn = self._drawn.get(number)
        if drawn is None:
            drawn = permutation(self.passes.kept, seeded(self.passes.seed_of(number)))
            self._drawn = {number: drawn}
        return drawn.first(k)


class RehearsedBatches(BatchSampler):
    """A batch sampler that adds rows of a memory to each batch of another one.

    Steps are counted over all epochs, and a step's rows depend on its number alone: an epoch that
    is left early takes as many numbers as a whole one.

    Attributes:
        batches: of new samples.
        digest: of the memory.
        next_step: the number of the next epoch's first step.
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
        self.next_step = 0
        self._content, self._first_row, self._ranks = content, first_row, ranks or _of_job
        # As other loaders read them.
        self.sampler = getattr(batches, "sampler", batches)
        self.batch_size = getattr(batches, "batch_size", 1) + self.each
        self.drop_last = getattr(batches, "drop_last", False)

    @property
    def each(self) -> int:
        """Rows that are added to a batch: 0 for an empty memory."""
        return self._content.per_batch if self._content.kept else 0

    @property
    def steps(self) -> int:
        """Steps that an epoch takes."""
        try:
            return len(self.batches)  # type: ignore[arg-type]  # TypeError if it has none
        except (TypeError, NotImplementedError):
            return _UNCOUNTED

    def begin(self, first_step: int | None = None) -> Replays:
        """Begin an epoch, at step `first_step` of the job or else after the last epoch."""
        found = self.at(self.next_step if first_step is None else first_step)
        self.next_step = found.first_step + self.steps
        rows, kept = found.passes.step_rows, found.passes.kept
        if rows > kept and self.digest not in _small:
            _small.add(self.digest)
            _log.warning("a step replays %d rows of a memory of %d: it repeats them", rows, kept)
        return found

    def at(self, first_step: int) -> Replays:
        """Return the rows of an epoch that begins at this step of the job."""
        rank, world = self.ranks()
        passes = Passes(self._content.kept, self.each, world, self._content.seed)
        return Replays(passes, rank, first_step, self._first_row)

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
        for step, batch in enumerate(batches):
            yield replays.joined(list(batch), step)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # as torch: TypeError if it has none

    def set_epoch(self, epoch: int) -> None:
        """Begin the next epoch with the steps of this one; does not tell the other samplers."""
        self.next_step = epoch * self.steps


def _of_job() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
