"""Events that the trainer receives from its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.loader.workers.stages import BatchTimes

if TYPE_CHECKING:
    from creel.loader.transport.batch_message import Inbox


@dataclass(frozen=True)
class BatchResult:
    """A worker's batch: `packed` is a `Packed`, or the data itself once pinned."""

    worker: int
    tag: int
    index: int
    packed: Any
    times: BatchTimes
    #: Of the process that made the batch, which may have been replaced since.
    inbox: Inbox


@dataclass(frozen=True)
class JoinedBatch(BatchResult):
    """A batch that several workers have made: `packed` is the data itself."""


@dataclass(frozen=True)
class WorkerDeath:
    """A worker process ended unexpectedly; the pool marks one of its `members` as `dead`."""


@dataclass(frozen=True)
class LeaderLoss:
    """The leader, the rank that makes the batches, delivers no more of this epoch."""

    tag: int
    reason: str


WorkerEvent: TypeAlias = BatchResult | WorkerDeath | LeaderLoss
