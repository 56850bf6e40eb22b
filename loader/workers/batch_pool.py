"""BatchPool: the source of an iterator's batches, made by workers or by another rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from creel.loader.client.claim import Claim
    from creel.loader.reading.bad_samples import BadSample
    from creel.loader.seeding.by_sample import BatchSeeds
    from creel.loader.workers.events import BatchResult, WorkerEvent
    from creel.loader.workers.kernel_waits import Reader
    from creel.loader.workers.pinner import Pinner


class BatchTask(NamedTuple):
    """A batch that an iterator asks for.

    Attributes:
        tag: of the iterator's epoch.
        batch: its number among those that are not skipped.
        index: what the sampler yielded.
        claim: how it is read.
        many: whether the index is an array to be used as a list of ints.
        seeds: of its samples; None: workers have torch's.
    """

    tag: int
    batch: int
    index: Any
    claim: Claim
    many: bool = False
    seeds: BatchSeeds | None = None

    def message(self, freed: Sequence[int]) -> tuple[object, ...]:
        """Return what a worker is sent; `freed`: slots that it may use again."""
        kind, index = "task", self.index
        if self.many:  # bytes pickle in a fifth of the time of an array
            kind, index = "tasks", np.asarray(index, np.int64).tobytes()
        claim = self.claim.step, self.claim.ids.tobytes()
        return (kind, self.tag, self.batch, index, freed, *claim, self.seeds)


class BatchPool(ABC):
    """What an iterator takes batches from, with or without a `Pinner` in between."""

    def __init__(self) -> None:
        self.pinner: Pinner | None = None
        self.bad: deque[BadSample] = deque()  # new ones that workers found, until `take_bad`

    @abstractmethod
    def task(self, worker: int, task: BatchTask) -> None:
        """Ask for a batch, of this worker if the pool does not choose one.

        Raises:
            OSError: no descriptor or memory for a long index.
            Exception: pickling the index failed.
        """

    @abstractmethod
    def receive(self, timeout_s: float) -> WorkerEvent | None:
        """Return `next_event` without the pinner; only one thread may call this."""

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """Return the next event; None on timeout. A worker's death comes after all its results."""
        return self.receive(timeout_s) if self.pinner is None else self.pinner.get(timeout_s)

    def open(self, event: BatchResult) -> object:
        """Return the batch itself, or an ExceptionWrapper if the worker failed."""
        return event.data()

    def discard(self, event: BatchResult) -> None:
        """Give back the slots of an unwanted batch."""
        event.drop()

    def readers(self) -> Sequence[Reader]:
        """Return the processes of this rank that read the samples; none of other ranks."""
        return ()

    def holder(self, worker: int, batch: int) -> int:  # noqa: ARG002  a subclass needs it
        """Return which worker has a batch that was asked of `worker`."""
        return worker

    def lost(self) -> list[int]:
        """Return the workers whose deaths cost batches; this rank may have none."""
        return []

    def take_bad(self) -> list[BadSample]:
        """Return new bad samples that workers found, also those of discarded batches."""
        return [self.bad.popleft() for _ in range(len(self.bad))]
