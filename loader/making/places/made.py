"""Made: what comes back from whoever makes a batch; and what comes in its place."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from creel.loader.making.batch_times import BatchTimes
from creel.loader.making.transport.unpacking import discard, unpack

if TYPE_CHECKING:
    from creel.loader.making.transport.batch_message import Inbox


class Made(msgspec.Struct, eq=False):
    """A batch that was made.

    Attributes:
        worker: who made it; -1: the trainer itself.
        tag, batch: of its task.
        data: the batch, or an ExceptionWrapper; with an `inbox`: as its worker has packed it.
        times: when its stages began.
        counts: what was counted while it was made, by the names of `creel.counters`; worker
            processes count in shared words.
        inbox: of the process that made it, which may have been replaced since; None: it is not
            packed.
        lent: leases of the locked slots in which it lies; see `Lender`.
    """

    worker: int
    tag: int
    batch: int
    data: Any
    times: BatchTimes
    counts: Mapping[str, int] = {}
    inbox: Inbox | None = None
    lent: Sequence[object] = ()

    def unpacked(self) -> Any:
        """Return the batch itself, or an ExceptionWrapper if its maker failed."""
        return self.data if self.inbox is None else unpack(self.data, self.inbox)

    def drop(self) -> None:
        """Give back the slots of an unwanted batch."""
        if self.inbox is not None:
            discard(self.data, self.inbox)

    def lock_pages(self, lock: Callable[[mmap.mmap], object]) -> None:
        """Lock the pages of the batch's slots that are worth it; before `unpacked`."""
        if self.inbox is not None:
            for slot_id, once in self.data.slots:
                if not once:
                    self.inbox.lock_pages(slot_id, lock)

    def unlock_pages(self) -> None:
        """Unlock the pages of the batch's slots."""
        if self.inbox is not None:
            for slot_id, _ in self.data.slots:
                self.inbox.unlock_pages(slot_id)

    def leases(self) -> Sequence[object]:
        """Return what keeps the batch's locked slots from being written; after `unpacked`."""
        if self.inbox is None:
            return ()
        return self.inbox.locked_leases([slot_id for slot_id, _ in self.data.slots])


@dataclass(frozen=True)
class Death:
    """A worker process ended unexpectedly; the place marks one of its `members` as `dead`."""


@dataclass(frozen=True)
class Loss:
    """The leader, the rank that makes the batches, delivers no more of this epoch."""

    tag: int
    reason: str


Event: TypeAlias = Made | Death | Loss
