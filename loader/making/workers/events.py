"""Events that the trainer receives from its workers."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.loader.making.stages import BatchTimes
from creel.loader.making.transport.unpacking import discard, unpack

if TYPE_CHECKING:
    from creel.loader.making.transport.batch_message import Inbox


@dataclass(frozen=True)
class BatchResult:
    """A worker's batch: `packed` is a `Packed`."""

    worker: int
    tag: int
    index: int
    packed: Any
    times: BatchTimes
    #: Of the process that made the batch, which may have been replaced since.
    inbox: Inbox

    def data(self) -> Any:
        """Return the batch itself, or an ExceptionWrapper if the worker failed."""
        return unpack(self.packed, self.inbox)

    def drop(self) -> None:
        """Give back the slots of an unwanted batch."""
        discard(self.packed, self.inbox)

    def lock_pages(self, lock: Callable[[mmap.mmap], object]) -> None:
        """Lock the pages of the batch's slots that are worth it; before `data`."""
        for slot_id, once in self.packed.slots:
            if not once:
                self.inbox.lock_pages(slot_id, lock)

    def unlock_pages(self) -> None:
        """Unlock the pages of the batch's slots."""
        for slot_id, _ in self.packed.slots:
            self.inbox.unlock_pages(slot_id)

    def leases(self) -> Sequence[object]:
        """Return what keeps the batch's locked slots from being written; after `data`."""
        return self.inbox.locked_leases([slot_id for slot_id, _ in self.packed.slots])


@dataclass(frozen=True)
class ReadyBatch(BatchResult):
    """A batch that has been pinned, or joined from parts: `packed` is the data itself.

    Attributes:
        lent: leases of the locked slots in which it lies; see `Lender`.
    """

    lent: Sequence[object] = ()

    def data(self) -> Any:
        return self.packed

    def drop(self) -> None:
        pass

    def lock_pages(self, lock: Callable[[mmap.mmap], object]) -> None:
        pass

    def unlock_pages(self) -> None:
        pass

    def leases(self) -> Sequence[object]:
        return ()


@dataclass(frozen=True)
class WorkerDeath:
    """A worker process ended unexpectedly; the pool marks one of its `members` as `dead`."""


@dataclass(frozen=True)
class LeaderLoss:
    """The leader, the rank that makes the batches, delivers no more of this epoch."""

    tag: int
    reason: str


WorkerEvent: TypeAlias = BatchResult | WorkerDeath | LeaderLoss
