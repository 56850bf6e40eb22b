"""BatchPool: the source of an iterator's batches, made by workers or by another rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from creel.loader.transport.unpacking import discard, unpack
from creel.loader.workers.events import JoinedBatch

if TYPE_CHECKING:
    from creel.loader.reading.bad_samples import BadSample
    from creel.loader.workers.events import BatchResult, WorkerEvent
    from creel.loader.workers.own_files import Reader
    from creel.loader.workers.pinner import Pinner


class BatchPool(ABC):
    """What an iterator takes batches from, with or without a `Pinner` in between."""

    def __init__(self) -> None:
        self.pinner: Pinner | None = None
        self.bad: deque[BadSample] = deque()  # new ones that workers found, until `take_bad`

    @abstractmethod
    def receive(self, timeout_s: float) -> WorkerEvent | None:
        """Return `next_event` without the pinner; only one thread may call this."""

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """Return the next event; None on timeout. A worker's death comes after all its results."""
        return self.receive(timeout_s) if self.pinner is None else self.pinner.get(timeout_s)

    def open(self, event: BatchResult) -> object:
        """Return the batch itself, or an ExceptionWrapper if the worker failed."""
        done = self.pinner is not None or isinstance(event, JoinedBatch)
        return event.packed if done else unpack(event.packed, event.inbox)

    def discard(self, event: BatchResult) -> None:
        """Give back the slots of an unwanted batch."""
        if self.pinner is None and not isinstance(event, JoinedBatch):
            discard(event.packed, event.inbox)

    def readers(self) -> Sequence[Reader]:
        """Return the processes of this rank that read the samples; none of other ranks."""
        return ()

    def take_bad(self) -> list[BadSample]:
        """Return new bad samples that workers found, also those of discarded batches."""
        return [self.bad.popleft() for _ in range(len(self.bad))]
