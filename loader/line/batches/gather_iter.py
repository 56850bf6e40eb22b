"""The iterator for `num_workers>0` without workers: batches are rows copied from the arena."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from creel.loader.client.claim import DIRECT
from creel.loader.line.batches.epoch_run import EpochRun
from creel.loader.line.batches.in_process import Here, maker_in_process
from creel.loader.line.batches.state import LoaderState
from creel.loader.line.batches.unprofiled import AheadIter
from creel.loader.making.stages import NO_TIMES
from creel.loader.making.task import Made, Task
from creel.loader.making.transport.pinning import Pinning
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    raise_failure,
    require_prefetch_factor,
)
from creel.policies.direct import DirectReads
from creel.system.forks import join_before_fork
from creel.system.limits import cores

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.client.session import Session
    from creel.loader.line.steps.batch_stream import BatchStream
    from creel.loader.making.maker import BatchMaker

#: Smaller batches are copied on request: 2 MB take 0.2 ms, about as long as waking a thread
#: (benchmarks/cost_per_batch.py, tokens x 256). Larger ones are copied ahead of use.
INLINE_NBYTES = 4 << 20


class Asked(NamedTuple):
    """A batch to be made, the stream of its claim, and the worker that torch would choose."""

    task: Task
    stream: BatchStream | None
    worker: int


Batch: TypeAlias = "Future[Made]"


class ReaderThreads:
    """Threads of this process that make batches ahead of use, in the order of requests.

    Copying releases the GIL; nothing is forked, sent or mapped. The threads end with `stop`, or
    when this object is deleted.
    """

    def __init__(self, makers: list[BatchMaker], run: EpochRun, pinning: Pinning | None) -> None:
        """Start one thread per maker; `pinning`: how batches are pinned, None: they are not."""
        self._tasks: queue.SimpleQueue[tuple[Asked, Batch] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for i, maker in enumerate(makers):
            args = (self._tasks, maker, run, pinning)
            name = f"creel-read-{i}"
            self._threads.append(threading.Thread(target=_serve, args=args, daemon=True, name=name))
            self._threads[-1].start()

    def read(self, asked: Asked) -> Batch:
        """Queue a batch; cancelling the result before a thread takes it skips the read."""
        batch: Batch = Future()
        self._tasks.put((asked, batch))
        return batch

    def stop(self) -> None:
        """End the threads after all tasks queued so far."""
        for thread in self._threads:
            self._tasks.put(None)
            join_before_fork(thread)
        self._threads = []

    def __del__(self) -> None:
        self.stop()


def _serve(
    tasks: queue.SimpleQueue[tuple[Asked, Batch] | None],
    maker: BatchMaker,
    run: EpochRun,
    pinning: Pinning | None,
) -> None:
    torch.set_num_threads(1)  # as in a worker
    if pinning is not None:
        pinning.use_device()
    while (given := tasks.get()) is not None:
        asked, batch = given
        if batch.set_running_or_notify_cancel():
            batch.set_result(_made(asked, maker.made, run, pinning))
        del given, asked, batch  # otherwise the last batch would live until the next one comes


def _made(
    asked: Asked,
    make: Callable[[Task, Session | None], Made],
    run: EpochRun,
    pinning: Pinning | None,
) -> Made:
    """Return the batch, with an ExceptionWrapper as a worker would send it in place of its data."""
    task, stream = asked.task, run.serving.stream
    if asked.stream is not stream:  # replaced since: its steps are gone
        task = task._replace(claim=DIRECT)
    try:
        made = make(task, None if stream is None else stream.session)
        return made if pinning is None else made._replace(data=pinning.pin(made.data))
    except Exception:  # noqa: BLE001  see torch's note on reference cycles
        where = f"in DataLoader worker process {asked.worker}"
        return Made(ExceptionWrapper(where=where), NO_TIMES, {})  # type: ignore[no-untyped-call]


class GatherIter(AheadIter, MultiProcessingDataLoaderIter):
    """Batches of plain bytes, copied out of the arena by this process; large ones by threads.

    Pulls the sampler when torch would. Without workers nothing observable changes, since no user
    code would run in them. It saves the fork, and worker memory that each epoch must map and zero
    (150 KB x 256: 2.1 times as fast as torch with workers, 6 with threads).
    """

    _run: EpochRun  # unset until an epoch has begun
    _threads: ReaderThreads | None = None

    def __init__(self, loader: DataLoader[Any], loader_state: LoaderState, run: EpochRun) -> None:
        self._loader_state = loader_state
        self._moment = loader_state.before(loader)
        BaseDataLoaderIter.__init__(self, loader)
        self._queue: deque[Asked | Batch] = deque()
        self._ahead = require_prefetch_factor(loader.prefetch_factor) * self._num_workers
        self._meter = loader_state.meter
        self._workers: list[Any] = []
        self._run = run
        pinning = self._pinning = Pinning.of(self)
        frozen = None if run.serving.stream is None else run.serving.stream.binding.frozen()
        how: Any = {"frozen": frozen, "as_worker": True, "pinning": pinning}
        maker = partial(maker_in_process, loader, loader_state, run, **how)
        if _is_large(loader, run):
            # Threads do not read directly: large objects fill fresh memory, so that would only cost
            # CPU time.
            waits, count = DirectReads(allowed=False), min(self._num_workers, math.ceil(cores()))
            makers = [maker(direct=waits) for _ in range(count)]
            self._threads = ReaderThreads(makers, run, pinning)
            run.statistics.made_by(count)
        else:
            self._here = Here(maker(), self._meter)
        self._reset(loader, first_iter=True)

    @staticmethod
    def can(loader: DataLoader[Any], loader_state: LoaderState, run: EpochRun) -> bool:
        """Whether this iterator can make the loader's batches."""
        if run.serving.builder is not None:
            return True
        return run.serving.stream is not None and loader_state.only_copies(
            loader, run.serving.stream.binding
        )

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if not first_iter:
            self._moment = self._loader_state.before(loader)
            self._drop_queue()
        BaseDataLoaderIter._reset(self, loader, first_iter)  # noqa: SLF001  torch's
        self._run.begin(loader, self, self._moment)
        self._pulled = self._taken = 0
        self._withheld = 0
        for _ in range(self._ahead):
            self._request()

    def _try_put_index(self) -> None:
        try:
            index = self._next_index()
        except StopIteration:
            return
        run, i = self._run, self._pulled
        task = run.task(i, index)  # may find another stream
        asked = Asked(task, run.serving.stream, i % self._num_workers)
        self._queue.append(asked if self._threads is None else self._threads.read(asked))
        self._pulled += 1

    def _next_data(self) -> Any:
        run = self._run
        if self._withheld:
            self._request_withheld(self._queue)
        if not self._queue:
            run.finished = True
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        asked = self._queue[0]  # stays first if Ctrl-C or a timeout ends the wait
        if isinstance(asked, Asked):
            worker, made = -1, _made(asked, self._here.read, run, self._pinning)
        else:
            worker, made = self._taken % self._num_workers, self._awaited(asked)
        data = made.data
        self._queue.popleft()
        self._taken += 1
        run.done(self._taken)
        self._request()
        if isinstance(data, ExceptionWrapper):
            run.lost(self._taken - 1)
            raise_failure(data)
        run.deliver(self._taken, made.times, worker)
        return data

    def _awaited(self, batch: Batch) -> Made:
        """Wait for a thread's batch and return it.

        Raises:
            RuntimeError: it did not come within `timeout`; with torch's message.
        """
        since = 0 if batch.done() else time.monotonic_ns()
        try:
            made = batch.result(self._timeout or None)
        except FutureTimeoutError:  # before Python 3.11 not the builtin one
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        if since:
            self._meter.awaited(made.times, since, time.monotonic_ns())
        self._meter.add(made.counts)
        return made

    def _drop_queue(self) -> None:
        for batch in self._queue:
            if isinstance(batch, Future):
                batch.cancel()
        self._queue.clear()

    def _shutdown_workers(self) -> None:
        if "_run" not in self.__dict__:
            return
        self._drop_queue()
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
        self._run.leave()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # at interpreter exit the modules needed here may be gone
            self._shutdown_workers()
            if "_run" in self.__dict__:
                self._run.leave(deleted=True)


def _is_large(loader: DataLoader[Any], run: EpochRun) -> bool:
    """Whether batches are large enough for threads; True if a batch sampler sets their sizes."""
    gather = None if run.serving.stream is None else run.serving.stream.binding.gather()
    if run.serving.builder is not None:
        gather = run.serving.builder[0]
    if gather is None:
        return False
    nbytes = max(gather.nbytes, gather.batch_nbytes)
    return loader.batch_size is None or nbytes * loader.batch_size >= INLINE_NBYTES
