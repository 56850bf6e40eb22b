"""Events of workers, as the trainer sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.loader.workers.stages import BatchTimes

if TYPE_CHECKING:
    from creel.loader.workers.batch_message import Inbox


@dataclass(frozen=True)
class BatchResult:
    """A worker's batch: `packed` is a `Packed`, or the data itself once pinned."""

    worker: int
    tag: int
    index: int
    packed: Any
    times: BatchTimes
    #: The process that made the batch; it may have been replaced since.
    inbox: Inbox


@dataclass(frozen=True)
class WorkerDeath:
    """A worker process ended unexpectedly: one of the pool's `members` is `dead`."""


@dataclass(frozen=True)
class LeaderLoss:
    """No more batches of this epoch come from the rank that makes them (`leader`)."""

    tag: int
    reason: str


WorkerEvent: TypeAlias = BatchResult | WorkerDeath | LeaderLoss
