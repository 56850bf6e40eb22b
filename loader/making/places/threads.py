"""Threads: batches of bytes that threads of the training process copy ahead of use."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from creel.loader.client.claim import DIRECT
from creel.loader.making.batch_times import NO_TIMES
from creel.loader.making.places.made import Made
from creel.loader.making.places.place import BatchPlace
from creel.loader.torch_private import ExceptionWrapper
from creel.system.forks import join_before_fork

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.reading.bad_samples import Key
    from creel.loader.making.maker import BatchMaker
    from creel.loader.making.places.place import Serves, Slots
    from creel.loader.making.task import Task
    from creel.loader.making.transport.pinning import Pinning

#: A batch that is asked for: of which worker, the session of its claim, and where it is put.
Asked: TypeAlias = "tuple[int, Task, Session | None, Future[Made]]"


class Threads(BatchPlace):
    """Threads that make batches in the order of requests.

    Copying releases the GIL; nothing is forked, sent or mapped. The threads end with `close`, or
    when this object is deleted.
    """

    pins = True

    def __init__(self, makers: list[BatchMaker], serving: Serves, pinning: Pinning | None) -> None:
        """Start one thread per maker; `pinning`: how batches are pinned, None: they are not."""
        super().__init__()
        self._serving = serving
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._batches: deque[Future[Made]] = deque()
        self._threads: list[threading.Thread] = []
        for i, maker in enumerate(makers):
            args = (self._asked, maker, serving, pinning)
            name = f"creel-read-{i}"
            self._threads.append(threading.Thread(target=_serve, args=args, daemon=True, name=name))
            self._threads[-1].start()

    def again(self, bad: Mapping[Key, str]) -> None:
        self._cancel()
        super().again(bad)

    def task(self, worker: int, task: Task) -> None:
        batch: Future[Made] = Future()
        self._batches.append(batch)
        self._asked.put((worker, task, self._serving.session, batch))

    def receive(self, timeout_s: float) -> Made | None:
        try:
            ready_batch = self._batches[0].result(timeout_s)
        except FutureTimeoutError:  # before Python 3.11 not the builtin one
            return None
        self._batches.popleft()
        return ready_batch

    def makers(self) -> int:
        return len(self._threads)

    def _cancel(self) -> None:
        """Let no thread begin a batch that was asked for."""
        while self._batches:
            self._batches.popleft().cancel()

    def close(self) -> Slots:
        """End the threads after the batches that they have begun."""
        self._cancel()
        for thread in self._threads:
            self._asked.put(None)
            join_before_fork(thread)
        self._threads = []
        return ()

    def __del__(self) -> None:
        self.close()


def _serve(
    tasks: queue.SimpleQueue[Asked | None],
    maker: BatchMaker,
    serving: Serves,
    pinning: Pinning | None,
) -> None:
    torch.set_num_threads(1)  # as in a worker
    if pinning is not None:
        pinning.use_device()
    while (asked := tasks.get()) is not None:
        batch = asked[-1]
        if batch.set_running_or_notify_cancel():
            batch.set_result(_make(asked, maker, serving, pinning))
        del asked, batch  # otherwise the last batch would live until the next one comes


def _make(asked: Asked, maker: BatchMaker, serving: Serves, pinning: Pinning | None) -> Made:
    worker, task, claimed, _ = asked
    session = serving.session
    if session is not claimed:  # replaced since: its steps are gone
        task = msgspec.structs.replace(task, claim=DIRECT)
    try:
        data, times, counts = maker.counted(task, session)
        if pinning is not None:
            data = pinning.pin(data)
    except Exception:  # noqa: BLE001  see torch's note on reference cycles
        where = f"in DataLoader worker process {worker}"
        data, times, counts = ExceptionWrapper(where=where), NO_TIMES, {}  # type: ignore[no-untyped-call]
    return Made(worker, task.tag, task.batch, data, times, counts)
