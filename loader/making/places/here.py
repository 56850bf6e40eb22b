"""Here: the training thread makes a batch itself, when it takes it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from creel.loader.client.claim import DIRECT
from creel.loader.making.places.made import Made
from creel.loader.making.places.place import BatchPlace
from creel.loader.torch_private import ExceptionWrapper

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding
    from creel.loader.data.reading.bad_samples import Key
    from creel.loader.making.batch_times import BatchTimes
    from creel.loader.making.maker import BatchMaker, Waits
    from creel.loader.making.places.other_ranks import Tee
    from creel.loader.making.places.place import Serves, Slots
    from creel.loader.making.stage import Make
    from creel.loader.making.task import Task
    from creel.loader.making.transport.pinning import Pinning


class Here(BatchPlace):
    """The thread that trains. All the time that a batch takes counts as waiting."""

    pins = makes_now = True

    def __init__(
        self,
        maker: BatchMaker,
        serving: Serves,
        pinning: Pinning | None,
        *,
        counted: Callable[[BatchTimes, Mapping[str, int]], None],
        ahead: int = 0,
        tee: Tee | None = None,
        waits: Callable[[Binding | None], Waits] | None = None,
    ) -> None:
        """Make one.

        Args:
            serving: has the session that serves the iterator.
            counted: is told the times and counts of each batch.
            ahead: how many batches it is asked for ahead of use, in place of workers. 0: a batch
                that raises is lost, as in torch without workers.
            tee: sends the batches to other ranks, too.
            waits: how to wait for objects of another binding, which may take the maker's place.
        """
        super().__init__()
        self.pid = 0  # no process of its own
        self._maker, self._serving, self._pinning = maker, serving, pinning
        self._counted = counted
        self._make: Make = maker.make
        for stage in maker.stages:
            self._make = stage.in_trainer(self._make)
        if tee is not None:
            self._make = tee.around(self._make, maker.times)
        #: `_as_worker`: an error is a batch, as one of a worker is: the next batches still come.
        self._as_worker, self._tee, self._waits = ahead > 0, tee, waits
        #: Asked for, not made: number, task, session.
        self._tasks: deque[tuple[int, Task, Session | None]] = deque(maxlen=max(ahead, 1))

    def again(self, bad: Mapping[Key, str]) -> None:
        self._tasks.clear()
        super().again(bad)

    def task(self, worker: int, task: Task) -> None:
        self._tasks.append((worker, task, self._serving.session))

    def receive(self, timeout_s: float) -> Made:  # noqa: ARG002  nobody else makes it meanwhile
        """Make the next batch.

        Raises:
            Exception: what the person's code raises; in place of workers it is the batch.
        """
        maker, session = self._maker, self._serving.session
        worker, task, claimed = self._tasks[0]  # stays first if Ctrl-C comes
        if self._waits is not None and maker.binding is not self._serving.binding:
            maker.bind(self._serving.binding, self._waits(self._serving.binding))
        if session is not claimed:  # replaced since: its steps are gone
            task = msgspec.structs.replace(task, claim=DIRECT)
        try:
            try:
                data = self._make(task, session)
            finally:
                times = maker.times(time.monotonic_ns())
                self._counted(times, maker.counts)
            if self._pinning is not None:
                data = self._pinning.pin(data)
        except Exception:
            if not self._as_worker:
                raise
            where = f"in DataLoader worker process {worker}"
            data = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's
        self._tasks.popleft()
        return Made(-1, task.tag, task.batch, data, times)

    def close(self) -> Slots:
        if self._tee is not None:
            self._tee.close()
        return ()
