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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from creel.counters import OF_WORKERS
from creel.loader.iterators.epoch_run import EpochRun
from creel.loader.iterators.inline_iter import BatchReader
from creel.loader.iterators.meter import Meter
from creel.loader.iterators.state import LoaderState
from creel.loader.iterators.unprofiled import AheadIter
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    DatasetKind,
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    raise_failure,
    require_prefetch_factor,
)
from creel.loader.transport.pinning import Pinning
from creel.loader.workers.stages import BATCH_CAUSES, BatchTimes
from creel.policies.direct import DirectReads
from creel.system.forks import join_before_fork
from creel.system.limits import cores

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.client.claim import Claim
    from creel.loader.plan.batch_stream import BatchStream

#: Smaller batches are copied on request: 2 MB take 0.2 ms, about as long as waking a thread
#: (benchmarks/cost_per_batch.py, tokens x 256). Larger ones are copied ahead of use.
INLINE_NBYTES = 4 << 20


class Task(NamedTuple):
    """A batch to read: torch's choice of worker, the sampler's index, a stream and its claim."""

    worker: int
    index: Any
    stream: BatchStream | None
    claim: Claim


@dataclass(frozen=True)
class ReadBatch:
    """A batch or an ExceptionWrapper, its stage times, and what its reader has counted."""

    data: Any
    times: BatchTimes
    counts: dict[str, int]


Batch: TypeAlias = "Future[ReadBatch]"


class ReaderThreads:
    """Threads of this process that read batches ahead of use, in the order of requests.

    Copying releases the GIL; nothing is forked, sent or mapped. The threads end with `stop`, or
    when this object is deleted.
    """

    def __init__(
        self, readers: list[BatchReader], meters: list[Meter], pinning: Pinning | None
    ) -> None:
        """Start one thread per reader.

        Args:
            readers: one for each thread.
            meters: the meter of each reader.
            pinning: how batches are pinned; None: they are not.
        """
        self._tasks: queue.SimpleQueue[tuple[Task, Batch] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for i, (reader, meter) in enumerate(zip(readers, meters, strict=True)):
            args = (self._tasks, reader, meter, pinning)
            name = f"creel-read-{i}"
            self._threads.append(threading.Thread(target=_serve, args=args, daemon=True, name=name))
            self._threads[-1].start()

    def read(self, task: Task) -> Batch:
        """Queue a batch; cancelling the result before a thread takes it skips the read."""
        batch: Batch = Future()
        self._tasks.put((task, batch))
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
    tasks: queue.SimpleQueue[tuple[Task, Batch] | None],
    reader: BatchReader,
    meter: Meter,
    pinning: Pinning | None,
) -> None:
    torch.set_num_threads(1)  # as in a worker
    if pinning is not None:
        pinning.use_device()
    while (given := tasks.get()) is not None:
        task, batch = given
        if batch.set_running_or_notify_cancel():
            batch.set_result(_read(task, reader, meter, pinning))
        del given, task, batch  # otherwise the last batch would live until the next one comes


def _read(task: Task, reader: BatchReader, meter: Meter, pinning: Pinning | None) -> ReadBatch:
    began, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    meter.unreported()  # count from here on
    data = _data(task, reader, pinning)
    cpu_ns = time.thread_time_ns() - cpu_ns
    spent = meter.unreported()
    source, decode, collate, lost = (spent.get(f"stall_{cause}_ns", 0) for cause in BATCH_CAUSES)
    ready = began + source + lost
    times = BatchTimes(began, ready, ready + decode, time.monotonic_ns(), lost=int(lost > 0))
    counts = {name: spent[name] for name in OF_WORKERS if name in spent}
    counts |= {"busy_source_ns": source, "busy_decode_ns": decode, "busy_collate_ns": collate}
    counts["cpu_ns"] = cpu_ns
    return ReadBatch(data, times, counts)


def _data(task: Task, reader: BatchReader, pinning: Pinning | None) -> Any:
    """Return the batch, or an ExceptionWrapper as a worker would send it."""
    try:
        data = reader.read(task.index, task.claim, task.stream)
        return data if pinning is None else pinning.pin(data)
    except Exception:  # noqa: BLE001  see torch's note on reference cycles
        where = f"in DataLoader worker process {task.worker}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


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
        self._queue: deque[Task | Batch] = deque()
        self._ahead = require_prefetch_factor(loader.prefetch_factor) * self._num_workers
        self._meter = loader_state.meter
        self._workers: list[Any] = []
        self._run = run
        frozen = None if run.stream is None else run.stream.binding.frozen()

        pinning = self._pinning = Pinning.of(self)

        def reader(meter: Meter | None, direct: DirectReads | None) -> BatchReader:
            fetcher = DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
                DatasetKind.Map, loader.dataset, True, self._collate_fn, self._drop_last
            )
            return BatchReader(
                *(loader, loader_state, run, fetcher),
                frozen=frozen,
                as_worker=True,
                meter=meter,
                direct=direct,
                pinning=pinning,
            )

        if _is_large(loader, run):
            meters = [Meter() for _ in range(min(self._num_workers, math.ceil(cores())))]
            # Threads do not read directly: large objects fill fresh memory, so that would only cost
            # CPU time.
            waits = DirectReads(allowed=False)
            readers = [reader(meter, waits) for meter in meters]
            self._threads = ReaderThreads(readers, meters, pinning)
            run.note_workers(len(readers))
        else:
            self._reader = reader(None, None)
        self._reset(loader, first_iter=True)

    @staticmethod
    def can(loader: DataLoader[Any], loader_state: LoaderState, run: EpochRun) -> bool:
        """Whether this iterator can make the loader's batches."""
        if run.direct is not None:
            return True
        return run.stream is not None and loader_state.only_copies(loader, run.stream.binding)

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
        claim = run.claim(i, index)  # may find another stream
        task = Task(i % self._num_workers, index, run.stream, claim)
        self._queue.append(task if self._threads is None else self._threads.read(task))
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
        times, worker = None, -1
        if isinstance(asked, Task):
            data = _data(asked, self._reader, self._pinning)
        else:
            read = self._awaited(asked)
            data, times, worker = read.data, read.times, self._taken % self._num_workers
        self._queue.popleft()
        self._taken += 1
        run.done(self._taken)
        self._request()
        if isinstance(data, ExceptionWrapper):
            run.lost(self._taken - 1)
            raise_failure(data)
        run.deliver(self._taken, times, worker)
        return data

    def _awaited(self, batch: Batch) -> ReadBatch:
        """Wait for a thread's batch and return it.

        Raises:
            RuntimeError: it did not come within `timeout`; with torch's message.
        """
        since = 0 if batch.done() else time.monotonic_ns()
        try:
            read = batch.result(self._timeout or None)
        except FutureTimeoutError:  # before Python 3.11 not the builtin one
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        if since:
            self._meter.awaited(read.times, since, time.monotonic_ns())
        self._meter.add(read.counts)
        return read

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
    gather = None if run.stream is None else run.stream.binding.gather()
    if run.direct is not None:
        gather = run.direct[0]
    if gather is None:
        return False
    nbytes = max(gather.nbytes, gather.batch_nbytes)
    return loader.batch_size is None or nbytes * loader.batch_size >= INLINE_NBYTES
