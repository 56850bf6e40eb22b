"""BatchPlace: where the batches of an iterator are made."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from creel.loader.making.batch_times import IDLE
from creel.loader.making.places.made import Made

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding
    from creel.loader.data.reading.bad_samples import BadSample, Key
    from creel.loader.making.places.made import Event
    from creel.loader.making.places.pinner import Pinner
    from creel.loader.making.task import Task
    from creel.loader.making.transport.batch_message import Inbox
    from creel.loader.making.transport.channel import Channel
    from creel.loader.making.workers.kernel_waits import Reader


#: For each worker, the memory of its slots.
Slots: TypeAlias = "Sequence[Sequence[mmap.mmap]]"


@dataclass(eq=False)
class WorkerProcess:
    """One worker process as the trainer sees it."""

    process: BaseProcess
    channel: Channel
    inbox: Inbox
    ticket: tuple[str, str, int] | None = None  # session it reads through: (daemon, token, id)
    dead: bool = False


class Serves(Protocol):
    """Which session serves an iterator at the moment."""

    session: Session | None
    binding: Binding | None


class BatchPlace(ABC):
    """What an iterator takes batches from, with or without a `Pinner` in between.

    Attributes:
        pid: of the only process that may use it; 0: a forked child may, too.
        tag: of the iterator's epoch.
        members: the worker processes of this rank.
        shared: whether any of its workers makes any batch.
        pins: whether it pins its batches itself, so that it needs no pinner.
        makes_now: whether `receive` makes the next batch, and returns it.
        bad: new bad samples that workers found, also those of discarded batches.
    """

    pins = shared = makes_now = False

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.tag = 0
        self.members: list[WorkerProcess] = []
        self.pinner: Pinner | None = None
        self.bad: deque[BadSample] = deque()

    # --- epochs -------------------------------------------------------------------------------

    def again(self, bad: Mapping[Key, str]) -> None:  # noqa: ARG002  for worker processes
        """Begin another epoch, of the next `tag`, with all state of the workers.

        bad: the samples known to be bad.
        """
        self.tag += 1

    def bind(self, digest: str) -> None:  # noqa: B027  few places have workers
        """Let workers bind their dataset, whose objects must have this `Binding.digest`."""

    def join(self, ticket: tuple[str, str, int]) -> None:  # noqa: B027  as above
        """Let workers read through a session: (daemon's name, token, session id)."""

    @abstractmethod
    def close(self) -> Slots:
        """End the workers; return slots for another place."""

    # --- batches ------------------------------------------------------------------------------

    @abstractmethod
    def task(self, worker: int, task: Task) -> None:
        """Ask for a batch, of this worker if the place does not choose one.

        Raises:
            OSError: no descriptor or memory for a long index.
            Exception: pickling the index failed.
        """

    @abstractmethod
    def receive(self, timeout_s: float) -> Event | None:
        """Return `next_event` without the pinner; only one thread may call this."""

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event; None on timeout. A worker's death comes after all its results."""
        return self.receive(timeout_s) if self.pinner is None else self.pinner.get(timeout_s)

    def open(self, batch: Made) -> object:
        """Return the batch itself, or an ExceptionWrapper if the worker failed."""
        return batch.unpacked()

    def discard(self, batch: Made) -> None:
        """Give back the slots of an unwanted batch."""
        batch.drop()

    # --- who makes them -----------------------------------------------------------------------

    def makers(self) -> int:
        """Return how many processes or threads of this rank make batches beside training."""
        return len(self.members)

    def readers(self) -> Sequence[Reader]:
        """Return the processes of this rank that read the samples; none of other ranks."""
        return ()

    def new_counts(self) -> Mapping[str, int]:
        """Return what worker processes have counted since the last call, by name."""
        return {}

    def holder(self, worker: int, batch: int) -> int:  # noqa: ARG002  a subclass needs it
        """Return which worker has a batch that was asked of `worker`."""
        return worker

    def stage(self, worker: int) -> tuple[int, int, float]:  # noqa: ARG002  as above
        """Return (stage, batch, seconds in the stage) of a worker; idle if that is not known."""
        return IDLE, -1, 0.0

    def describe(self, worker: int) -> str:  # noqa: ARG002  as above
        """Say what a worker is doing, for warnings of a wait; "" if others warn."""
        return ""

    def lost(self) -> list[int]:
        """Return the workers whose deaths cost batches; this rank may have none."""
        return []
