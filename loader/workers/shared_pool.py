"""SharedPool: workers that take batches from one socket (`workers="shared"`).

The kernel gives each packet of the task socket to exactly one reader. So the next batch goes to
whichever worker is idle first, in the order of the batches, and no thread of the trainer has to run
in between. With seeds per sample it does not matter who makes a batch, so the batches of a worker
that died are made again by the others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from creel.loader.transport.channel import Channel, pair
from creel.loader.workers.events import WorkerDeath
from creel.loader.workers.pool import WorkerPool, until_forked
from creel.loader.workers.stages import IDLE, STARTING
from creel.loader.workers.worker_words import BATCH, STAGE, TAG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from creel.loader.plan.publish import Claim
    from creel.loader.seeding.by_sample import BatchSeeds
    from creel.loader.workers.pool import Slots

_log = logging.getLogger("creel.loader")

#: Workers that may die at one batch: the last of these deaths is the trainer's error.
MOST_DEATHS = 3


@dataclass(eq=False)
class _OpenTask:
    """A batch that has not arrived: the message that asks for it, and who died at it."""

    message: tuple[object, ...]
    deaths: list[int] = field(default_factory=list)


class SharedPool(WorkerPool):
    """Worker processes that all read one task socket."""

    def __init__(self, *args: Any, **given: Any) -> None:
        """Start workers; arguments as for `WorkerPool`."""
        ours, theirs = pair()
        self._tasks = Channel(ours, whole=True)
        self._reading = Channel(theirs)  # of the workers; this process only empties it
        until_forked(self._tasks, self._reading)
        self._open: dict[tuple[int, int], _OpenTask] = {}  # by (tag, batch)
        self._orders = 0  # "again", "bind" and "join" that all workers were sent
        self._joined: tuple[str, str, int] | None = None
        self._ended: set[int] = set()  # workers
        self._failed: _OpenTask | None = None
        super().__init__(*args, **given)

    def _given(self) -> list[int]:
        return [self._reading.fileno()]

    # --- sending --------------------------------------------------------------------------

    def again(self, bad: Mapping[int, str]) -> int:
        self._orders += 1
        return super().again(bad)

    def bind(self, digest: str) -> None:
        self._orders += 1
        super().bind(digest)

    def join(self, ticket: tuple[str, str, int]) -> None:
        if ticket != self._joined:
            self._joined = ticket
            self._orders += 1
            super().join(ticket)

    def task(
        self,
        worker: int,
        tag: int,
        batch: int,
        index: object,
        claim: Claim,
        *,
        many: bool,
        seeds: BatchSeeds | None = None,
    ) -> None:
        """Send a batch to whichever worker is idle first; `worker` is not used."""
        del worker
        if self._followers is not None:
            self._followers.expect(tag, batch, index)
        for number, member in enumerate(self.members):
            freed = member.inbox.returned()
            if self._followers is not None:
                freed = self._followers.returned(number, freed)
            if freed:
                self._post(member, ("freed", freed))
        kind = "task"
        if many:
            kind, index = "tasks", np.asarray(index, np.int64).tobytes()
        ids = claim.ids.tobytes()
        message: tuple[object, ...]
        message = "any", self._orders, (kind, tag, batch, index, [], claim.step, ids, seeds)
        # First, as another thread may receive it.
        self._open[tag, batch] = _OpenTask(message)
        try:
            self._tasks.post(message)
        except BaseException:
            self._open.pop((tag, batch), None)
            raise

    def _congested(self) -> bool:
        waiting = super()._congested()
        return (self._tasks.congested and not self._tasks.flush()) or waiting

    # --- receiving ------------------------------------------------------------------------

    def _expects(self, tag: int, batch: int) -> bool:
        return self._open.pop((tag, batch), None) is not None

    def _died(self, worker: int) -> None:
        self._ended.add(worker)
        row = self._words.rows[worker]
        at_work = row[STAGE] not in {IDLE, STARTING}
        task = self._open.get((row[TAG], row[BATCH])) if at_work else None
        if task is not None:
            task.deaths.append(worker)
            if len(task.deaths) >= MOST_DEATHS:
                self._failed = task
        if self.lost():
            self._events.append(WorkerDeath())
            return
        pid = self.members[worker].process.pid
        _log.warning("worker %d (pid %s) has ended; the others make its batches", worker, pid)
        self._send_again()

    def _send_again(self) -> None:
        """Send all tasks that no worker is known to have.

        One that a worker has just taken is made twice: `_expects` drops the second.
        """
        while self._reading.get(0) is not None:
            pass
        begun = set(self._begun())
        for key, task in sorted(self._open.items()):
            if key[0] != self.tag:
                self._open.pop(key, None)  # nobody waits for it
            elif key not in begun:
                self._tasks.post(task.message)

    def _begun(self) -> dict[tuple[int, int], int]:
        """Return which living worker makes a batch, by (tag, batch)."""
        return {
            (row[TAG], row[BATCH]): worker
            for worker, (row, member) in enumerate(zip(self._words.rows, self.members, strict=True))
            if not member.dead and row[STAGE] not in {IDLE, STARTING}
        }

    def lost(self) -> list[int]:
        """Return the dead workers, if the others cannot make their batches."""
        dead = super().lost()
        if self._failed is not None:
            return self._failed.deaths
        # One that is dead but has not ended could not be heard: its batch is lost.
        return dead if len(dead) == len(self.members) or set(dead) - self._ended else []

    # --- watching and closing ---------------------------------------------------------------

    def holder(self, worker: int, batch: int) -> int:
        return self._begun().get((self.tag, batch), worker)

    def close(self) -> Slots:
        spare = super().close()
        if self.closed:
            self._tasks.close()
            self._reading.close()
        return spare
