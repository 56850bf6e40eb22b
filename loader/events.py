"""What workers report, as their trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.loader.alike import Snapshot
from creel.loader.stages import Times

if TYPE_CHECKING:
    from creel.loader.parcel import Inbox
    from creel.loader.publish import Told


@dataclass(frozen=True)
class Batch:
    """A worker's result: still packed, or (pinned) the data itself."""

    worker: int
    tag: int
    index: int
    packed: Any
    times: Times
    #: Of the process that made it: another may have taken its place since.
    inbox: Inbox


@dataclass(frozen=True)
class Fit:
    """Whether a worker could begin the epoch `tag`."""

    worker: int
    tag: int
    fit: bool


@dataclass(frozen=True)
class Death:
    """A worker process ended without being told to."""

    worker: int


Event: TypeAlias = Batch | Fit | Death


@dataclass(frozen=True)
class Ahead:
    """Batches of the next epoch that were asked for before anybody wanted them.

    They are that epoch's first ones if it has this base seed, dataset and world, and if its sampler
    begins with these indices; `arrived` are those that are there. Their steps are those of `told`,
    and good for nothing once the daemon is told otherwise; None: they are read directly.
    """

    tag: int
    base_seed: int
    frozen: Snapshot
    indices: list[NDArray[np.int64]]
    told: Told | None
    arrived: list[Batch] = field(default_factory=list)

    def begins(self, indices: list[object]) -> bool:
        """Whether a sampler that begins so was foreseen."""
        return len(indices) == len(self.indices) and all(
            isinstance(a, np.ndarray) and np.array_equal(a, b)
            for a, b in zip(indices, self.indices, strict=True)
        )
