"""BatchPool: the source of an iterator's batches, made by workers or by another rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from creel.loader.data.reading.bad_samples import BadSample
    from creel.loader.making.task import Task
    from creel.loader.making.workers.events import BatchResult, WorkerEvent
    from creel.loader.making.workers.kernel_waits import Reader
    from creel.loader.making.workers.pinner import Pinner


class BatchPool(ABC):
    """What an iterator takes batches from, with or without a `Pinner` in between."""

    def __init__(self) -> None:
        self.pinner: Pinner | None = None
        self.bad: deque[BadSample] = deque()  # new ones that workers found, until `take_bad`

    @abstractmethod
    def task(self, worker: int, task: Task) -> None:
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
