"""What workers report, as their trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.loader.stages import Times

if TYPE_CHECKING:
    from creel.loader.parcel import Inbox


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
class Death:
    """A worker process ended without being told to."""

    worker: int


Event: TypeAlias = Batch | Death
