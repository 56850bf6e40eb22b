"""SharedPool: workers that take batches from one socket (`workers="shared"`).

The kernel gives each packet of the task socket to exactly one reader. So the next batch goes to
whichever worker is idle first, in the order of the batches, and no thread of the trainer has to run
in between. With seeds per sample it does not matter who makes a batch, so the batches of a worker
that died are made again by the others.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from creel.loader.data.buffers import keep_freed_memory
from creel.loader.data.reading.bad_samples import Key
from creel.loader.making.batch_times import IDLE, STARTING, BatchTimes, merged
from creel.loader.making.places.made import Death, Made
from creel.loader.making.places.processes import WorkerPool, until_forked
from creel.loader.making.task import WHOLE
from creel.loader.making.transport.batch_message import BatchMessage
from creel.loader.making.transport.channel import Channel, pair
from creel.loader.making.transport.parts import UnevenPartsError, joined
from creel.loader.making.transport.unpacking import unpack
from creel.loader.making.workers.worker_words import BATCH, PART, STAGE, TAG
from creel.policies.concurrency import SampleTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from creel.loader.making.places.place import Slots
    from creel.loader.making.task import Task

_log = logging.getLogger("creel.loader")

#: Workers that may die at one batch: the last of these deaths is the trainer's error.
MOST_DEATHS = 3


@dataclass(frozen=True)
class _MadePart:
    """A part of a batch that has arrived."""

    data: Any
    times: BatchTimes
    kind: str


@dataclass(eq=False)
class _OpenTask:
    """A batch that has not arrived: messages that ask for it or its parts, and who died at it."""

    whole: tuple[object, ...]
    #: By the number of the part; WHOLE: all of it.
    messages: dict[int, tuple[object, ...]]
    rows: int
    done: dict[int, _MadePart] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)


class SharedPool(WorkerPool):
    """Worker processes that all read one task socket.

    The first batches of an epoch are cut into parts, which workers make at the same time, as
    training has none yet. Later all workers are busy, and only batches of very different times are
    cut (see `SampleTimes`). Parts that do not fit together are made again as a whole.
    """

    shared = True

    def __init__(self, *args: Any, cuts: bool = False, **given: Any) -> None:
        """Start workers; other arguments as for `WorkerPool`.

        cuts: batches are what `default_collate` makes of samples that are read one by one.
        """
        ours, theirs = pair()
        self._tasks = Channel(ours, whole=True)
        self._reading = Channel(theirs)  # of the workers; this process only empties it
        until_forked(self._tasks, self._reading)
        self._open: dict[tuple[int, int], _OpenTask] = {}  # by (tag, batch)
        self._orders = 0  # "again", "bind" and "join" that all workers were sent
        self._joined: tuple[str, str, int] | None = None
        self._ended: set[int] = set()  # workers
        self._failed: _OpenTask | None = None
        self._cuts = cuts
        self._sample_times = SampleTimes()
        if cuts:
            keep_freed_memory()  # joined batches are the trainer's memory
        super().__init__(*args, **given)

    def _given(self) -> list[int]:
        return [self._reading.fileno()]

    # --- sending --------------------------------------------------------------------------

    def again(self, bad: Mapping[Key, str]) -> None:
        self._orders += 1
        super().again(bad)

    def bind(self, digest: str) -> None:
        self._orders += 1
        super().bind(digest)

    def join(self, ticket: tuple[str, str, int]) -> None:
        if ticket != self._joined:
            self._joined = ticket
            self._orders += 1
            super().join(ticket)

    def task(self, worker: int, task: Task) -> None:
        """Send a batch to whichever worker is idle first; `worker` is not used."""
        del worker
        if self._followers is not None:
            self._followers.expect(task.tag, task.batch, task.index)
        for number, member in enumerate(self.members):
            if freed := self._freed(number):
                self._post(member, ("freed", freed))
        whole = "any", self._orders, task.message()
        cuttable = type(task.index) in {list, tuple, np.ndarray}  # a subclass slices in its own way
        open_task = _OpenTask(whole, {WHOLE: whole}, rows=len(task.index) if cuttable else 1)
        count = self._parts(open_task.rows, task.batch)
        if count > 1:
            cut = enumerate(_cut(task, count))
            open_task.messages = {part: ("any", self._orders, message) for part, message in cut}
        key = task.tag, task.batch
        self._open[key] = open_task  # first, as another thread may receive it
        try:
            for message in open_task.messages.values():
                self._tasks.post(message)
        except BaseException:
            self._open.pop(key, None)
            raise

    def _parts(self, rows: int, batch: int) -> int:
        """Return into how many parts a batch is to be cut."""
        workers = len(self.members) - len(self._ended)
        if not self._cuts:
            return 1
        return self._sample_times.parts(rows, workers, awaited=batch < workers)

    def _congested(self) -> bool:
        waiting = super()._congested()
        return (self._tasks.congested and not self._tasks.flush()) or waiting

    # --- receiving ------------------------------------------------------------------------

    def _expects(self, tag: int, batch: int, times: BatchTimes) -> bool:
        task = self._open.get((tag, batch))
        if task is None or WHOLE not in task.messages:
            return False
        self._measure(times, task.rows)
        return self._open.pop((tag, batch), None) is not None

    def _measure(self, times: BatchTimes, rows: int) -> None:
        self._sample_times.measured(max(rows, 1), max(times.collating - times.ready, 0) / 1e9)

    def _take_part(self, worker: int, message: tuple[object, ...], fds: list[int]) -> None:
        match message:
            case ("part", int(tag), int(batch), int(part), sent, BatchTimes() as times, _, kind):
                arrival = _MadePart(None, times, "")
                if isinstance(sent, BatchMessage):
                    arrival = _MadePart(self._opened(worker, sent, fds), times, str(kind))
                task = self._open.get((tag, batch))
                if task is None or part not in task.messages:
                    return
                self._measure(times, task.rows // len(task.messages))
                task.done[part] = arrival
                if len(task.done) == len(task.messages):
                    self._complete((tag, batch), task, worker)

    def _opened(self, worker: int, sent: BatchMessage, fds: list[int]) -> Any:
        """Return the data of a part; None if it cannot be unpickled, as the batch will say."""
        inbox = self.members[worker].inbox
        packed = inbox.accept(sent, fds)
        try:
            return unpack(packed, inbox)
        except Exception:  # noqa: BLE001  user code may run here
            return None

    def _complete(self, key: tuple[int, int], task: _OpenTask, worker: int) -> None:
        """Join the parts of a batch, or have it made as a whole if they do not fit."""
        parts = [task.done[part] for part in sorted(task.done)]
        same = parts[0].kind if len({part.kind for part in parts}) == 1 else ""
        began = time.monotonic()
        empty = torch.empty if self.pinner is None else self.pinner.empty
        try:
            data = joined([part.data for part in parts] if same else [], empty)
        except UnevenPartsError as e:
            _log.debug("batch %d is made as a whole: %s", key[1], e)
            self._cuts = False
            task.messages = {WHOLE: task.whole}
            task.done.clear()
            self._tasks.post(task.whole)
            return
        self._sample_times.joined(time.monotonic() - began)
        if self._open.pop(key, None) is not None:
            times = merged([part.times for part in parts])
            self._events.append(Made(worker, *key, data, times))

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
            self._events.append(Death())
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
        for key, task in sorted(self._open.items(), key=itemgetter(0)):
            if key[0] != self.tag:
                self._open.pop(key, None)  # nobody waits for it
                continue
            for part, message in task.messages.items():
                if part not in task.done and (*key, part) not in begun:
                    self._tasks.post(message)

    def _begun(self) -> dict[tuple[int, int, int], int]:
        """Return which living worker makes a batch or part, by (tag, batch, part)."""
        return {
            (row[TAG], row[BATCH], row[PART]): worker
            for worker, (row, member) in enumerate(zip(self._words.rows, self.members, strict=True))
            if not member.dead and row[STAGE] not in {IDLE, STARTING}
        }

    def lost(self) -> list[int]:
        """Return the dead workers, if the others cannot make their batches."""
        dead = super().lost()
        if self._failed is not None:
            return self._failed.deaths
        # A worker that can no longer be read from has lost its batch, even if its process runs.
        return dead if len(dead) == len(self.members) or set(dead) - self._ended else []

    # --- watching and closing ---------------------------------------------------------------

    def holder(self, worker: int, batch: int) -> int:
        makers = (maker for key, maker in self._begun().items() if key[:2] == (self.tag, batch))
        return next(makers, worker)

    def close(self) -> Slots:
        spare = super().close()
        if self.closed:
            self._tasks.close()
            self._reading.close()
        return spare


def _cut(task: Task, count: int) -> list[tuple[object, ...]]:
    """Return the messages that ask for `count` parts of a batch, even in their number of rows."""
    ends = [len(task.index) * part // count for part in range(count + 1)]
    return [
        msgspec.structs.replace(task, index=task.index[first:end], part=part, first=first).message()
        for part, (first, end) in enumerate(itertools.pairwise(ends))
    ]
