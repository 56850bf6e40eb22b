"""The iterators that `iter(loader)` returns: torch's scheme over a place where batches are made."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from creel.loader.data.buffers import keep_freed_memory
from creel.loader.line.batches.epoch_run import EpochRun
from creel.loader.line.batches.places import place_of
from creel.loader.line.batches.turns import WorkerTurns
from creel.loader.making.places.made import Loss, Made
from creel.loader.making.places.pinner import Pinner
from creel.loader.making.transport.pinning import Lender, Pinning
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
    profiler_enabled,
    raise_failure,
    require_prefetch_factor,
    utils,
)

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader

    from creel.loader.line.batches.state import LoaderState
    from creel.loader.line.order.epoch_order import StateBefore
    from creel.loader.making.places.place import BatchPlace

#: Seconds between checks for dead workers in a wait without a timeout.
POLL_S = 5.0


class Batches(Lender, BaseDataLoaderIter):
    """The batches of a map-style dataset, from wherever they are made.

    Subclasses torch's iterators for code that checks their classes or calls `_shutdown_workers`,
    but has none of their queues and threads. The methods follow those of torch's iterator with
    workers step by step, including when they pull the sampler. Without workers (`_ahead` is 0) the
    sampler is pulled when a batch is taken, as torch does.
    """

    _place: BatchPlace  # unset until batches can be made
    _shutdown = False  # whether it makes no more batches, for good
    _stopped = False  # whether some or all workers make no more batches

    def _open(self, loader: DataLoader[Any], state: LoaderState, run: EpochRun, ahead: int) -> None:
        """Begin to make batches, up to `ahead` of them ahead of use."""
        self._state, self._run, self._meter = state, run, state.observers.meter
        self._ahead = ahead  # batches that are asked for ahead of use
        self._turns = WorkerTurns(self._num_workers, ahead, in_order=loader.in_order)
        run.serving.waits = not ahead
        start = time.monotonic_ns()
        place = self._place = place_of(self, loader, state, run.serving, ahead)
        if not place.makes_now:
            run.statistics.made_by(place)
        if place.pins:
            return
        self._meter["stall_daemon_ns"] += time.monotonic_ns() - start
        pinning = Pinning.of(self)
        if pinning is not None:
            place.pinner = Pinner(place.receive, pinning)

    def _begin(self, loader: DataLoader[Any], before: StateBefore) -> None:
        """Begin an epoch, after torch's iterator has."""
        self._run.begin(loader, self, before)
        self._send_idx = self._rcvd_idx = 0  # the next batch to ask for, and to return
        # batch -> (worker,) while outstanding, (worker, made) if it arrived out of order
        self._task_info: dict[int, tuple[int] | tuple[int, Made]] = {}
        self._turns.begin()
        self._withheld = 0  # batches that are not asked for yet, since their data has not arrived

    def _join(self) -> None:
        """Let the workers read through the session that serves this epoch, if there is one."""
        serving = self._run.serving
        reads = serving.joined = serving.reads
        if reads is not None and serving.digest is not None:
            self._place.bind(serving.digest)
            serving.digest = None
        if reads is not None:
            self._place.join(reads.ticket)

    # --- torch's scheme ---------------------------------------------------------------------

    def __next__(self) -> Any:
        """Do as torch without its profiler range (15 us), unless a profiler runs.

        For map-style datasets only: the rest of torch's method checks the length of iterable ones.
        """
        wait = self._run.overdue
        wait.since = time.monotonic_ns()
        try:
            if profiler_enabled():
                return super().__next__()
            if self._sampler_iter is None:  # as in torch: the iterator is not started
                self._reset()  # type: ignore[call-arg]
            data = self._next_data()
            self._num_yielded += 1
            return data
        finally:
            wait.since = 0
            if wait.reported_to is not None:
                wait.ends()

    def _next_data(self) -> Any:
        try:
            if not self._ahead:
                self._try_put_index()
            elif self._withheld:
                self._request_withheld()
            if self._stopped or self._rcvd_idx not in self._task_info:
                self._find_next()
            place = self._place
            ready_batch: Any = place.receive(0.0) if place.makes_now else self._taken()
        except BaseException:
            if not self._ahead:
                self._lose(self._rcvd_idx)
            raise
        self._turns.asked[self._task_info.pop(ready_batch.batch)[0]] -= 1
        if ready_batch.batch == self._rcvd_idx:
            self._rcvd_idx += 1
        return self._delivered(ready_batch)

    def _find_next(self) -> None:
        """Advance to the next batch that has arrived or will.

        Raises:
            StopIteration: all were returned.
            AssertionError: the workers were ended; as torch.
        """
        while self._rcvd_idx < self._send_idx:
            info = self._task_info.get(self._rcvd_idx)
            if info is not None and (len(info) == 2 or self._turns.alive[info[0]]):
                if self._shutdown and len(info) == 1:
                    raise AssertionError("Invalid iterator state: shutdown when fetching next data")
                return
            self._task_info.pop(self._rcvd_idx, None)
            self._rcvd_idx += 1
        self._run.finished = True
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _taken(self) -> Made:
        """Wait for the batch that is to be returned next."""
        since = 0
        while True:
            self._check_process()
            info = self._task_info[self._rcvd_idx]
            if len(info) == 2:
                return info[1]
            since = since or time.monotonic_ns()
            ready_batch = self._await(since)
            if ready_batch.batch == self._rcvd_idx or not self._turns.in_order:
                self._meter.awaited(ready_batch.times, since, time.monotonic_ns())
                return ready_batch
            self._task_info[ready_batch.batch] = (
                self._task_info[ready_batch.batch][0],
                ready_batch,
            )

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child: workers and sockets belong to its parent."""
        if self._foreign():
            raise RuntimeError(
                f"this iterator belongs to process {self._place.pid} and cannot be used in the"
                f" forked process {os.getpid()}: create a new one with iter(loader)"
            )

    def _delivered(self, ready_batch: Made) -> Any:
        run, place = self._run, self._place
        if (reads := run.serving.reads) is not None:
            reads.done(run.skipped + self._rcvd_idx)
        try:
            if self._ahead and not run.paced:
                self._try_put_index()
            elif self._ahead:
                self._request()
        except BaseException:  # raised by the sampler: as in torch, this batch is lost
            run.lost(ready_batch.batch)
            place.discard(ready_batch)
            raise
        data = ready_batch.data if place.makes_now else place.open(ready_batch)
        if self._state.tolerance.wanted:
            self._note_bad()
        if isinstance(data, ExceptionWrapper):
            run.lost(ready_batch.batch)
            raise_failure(data)
        if ready_batch.counts:
            self._meter.add(ready_batch.counts)
        run.deliver(self._rcvd_idx, ready_batch)
        self._lent = ready_batch.lent  # kept until the next batch: see `Lender`
        return data

    def _lose(self, idx: int) -> None:
        """Leave out a batch that raised: without workers it is not made again, as in torch."""
        if idx not in self._run.pulled.by_batch:  # it was the sampler that raised
            return
        self._task_info.pop(idx, None)
        self._send_idx = self._rcvd_idx = idx + 1
        run = self._run
        run.lost(idx)
        if (reads := run.serving.reads) is not None:
            reads.done(run.skipped + idx + 1)
        self._note_bad()

    # --- asking for batches -----------------------------------------------------------------

    def _request(self) -> None:
        """Ask for one more batch if its data has arrived."""
        if not self._run.paced or self._run.arrived():
            self._try_put_index()
        else:
            self._withheld += 1

    def _request_withheld(self) -> None:
        """Ask for batches that have arrived since; wait for one if no other is under way."""
        while self._withheld and (not self._task_info or self._run.arrived()):
            self._try_put_index()
            self._withheld -= 1

    def _try_put_index(self) -> None:
        """Pull the sampler, and ask for that batch of the worker whose turn it is."""
        start = time.monotonic_ns()
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]  # torch's
        except StopIteration:
            return
        finally:
            self._meter["stall_sampler_ns"] += time.monotonic_ns() - start
        turns, idx, run = self._turns, self._send_idx, self._run
        worker = next(turns.cycle)
        if not (turns.in_order and turns.alive[worker]):
            worker = turns.free(worker)
            if worker < 0:
                return
        task = run.task(idx, index, self._place.tag)
        if run.serving.reads is not run.serving.joined:
            self._join()  # another session
        self._place.task(worker, task)
        self._task_info[idx] = (worker,)
        turns.asked[worker] += 1
        self._send_idx += 1

    def _note_bad(self) -> None:
        """Note new bad samples; raises if all makers together found too many."""
        tolerance, bad = self._state.tolerance, self._place.bad
        samples = [bad.popleft() for _ in range(len(bad))]
        new = [sample for sample in samples if sample.index not in tolerance.known]
        self._run.note_bad([*tolerance.take_new(), *new])
        for sample in samples:
            tolerance.add(sample.index, sample.reason)

    # --- waiting ----------------------------------------------------------------------------

    def _await(self, since: int) -> Made:
        """Call `_next_made`; on failure count the wait since `since` (monotonic ns)."""
        worker = self._task_info[self._rcvd_idx][0]
        try:
            return self._next_made(worker)
        except RuntimeError:
            stage = self._place.stage(self._place.holder(worker, self._rcvd_idx))[0]
            self._meter.gave_up(stage, time.monotonic_ns() - since)
            raise

    def _next_made(self, worker: int) -> Made:
        """Return the next batch of this epoch, whatever its number; one is awaited of `worker`.

        Raises:
            RuntimeError: none came within `timeout`, or a worker died; with torch's message.
        """
        place, overdue = self._place, self._run.overdue
        start = time.monotonic()
        while True:
            self._raise_if_dead()
            look_s = min(POLL_S, overdue.warns_after_s)
            left = self._timeout - (time.monotonic() - start) if self._timeout > 0 else look_s
            event = place.next_event(max(left, 0.0))
            if isinstance(event, Made):
                if event.tag == place.tag:
                    return event
                place.discard(event)
            elif isinstance(event, Loss) and event.tag == place.tag:
                raise RuntimeError(event.reason)
            elif event is None and self._timeout > 0:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            elif event is None:
                maker = place.describe(place.holder(worker, self._rcvd_idx))
                overdue.warn((place.tag, self._rcvd_idx), maker, time.monotonic() - start)

    def _raise_if_dead(self) -> None:
        members, status = self._place.members, self._turns.alive
        dead = [(i, members[i].process) for i in self._place.lost() if status[i]]
        if not dead:
            return
        self._stopped = True
        for worker, _ in dead:
            status[worker] = False
        if self._place.shared:  # nobody makes the batches that are left
            status[:] = [False] * len(status)
        pids = ", ".join(str(process.pid) for _, process in dead)
        raise RuntimeError(
            f"DataLoader worker (pid(s) {pids}) exited unexpectedly"
        ) from RuntimeError(_last_words(dead[0][1]))

    # --- closing ----------------------------------------------------------------------------

    def lend(self) -> None:
        if self._place.pinner is not None:
            self._place.pinner.lend(True)

    def _foreign(self) -> bool:
        """Whether this is a forked child, and the workers are its parent's."""
        return self._place.pid not in {0, os.getpid()}

    def _shutdown_workers(self) -> None:
        """End the workers, as torch does; the session stays for the next epoch."""
        if utils is None or utils.python_exit_status in (True, None):  # type: ignore[redundant-expr]  # a module's names may be None at exit
            return
        if self._shutdown or "_place" not in self.__dict__:
            return
        self._shutdown = self._stopped = True
        if self._foreign():
            return
        self._run.leave()
        self._drop_held()
        self._state.keep_slots(self._place.close())

    def _drop_held(self) -> None:
        """Return the slots of batches that arrived out of order and will not be used."""
        tasks = self.__dict__.get("_task_info", {})
        for idx, info in tasks.items():
            if len(info) == 2:
                tasks[idx] = info[:1]
                self._place.discard(info[1])

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the workers have ended, and the modules needed here may be gone
            return
        self._shutdown_workers()
        if self.__dict__.get("_shutdown") and not self._foreign():
            self._run.leave(deleted=True)


class InlineIter(Batches, SingleProcessDataLoaderIter):
    """`num_workers=0`."""

    def __init__(self, loader: DataLoader[Any], state: LoaderState) -> None:
        keep_freed_memory()
        before = state.before(loader)
        super().__init__(loader)
        run = EpochRun(state, loader)
        try:
            self._open(loader, state, run, 0)
            self._begin(loader, before)
        except BaseException:
            run.leave(deleted=True)
            raise


class WorkerIter(Batches, MultiProcessingDataLoaderIter):
    """`num_workers>0`, whoever stands in for the workers."""

    def __init__(self, loader: DataLoader[Any], state: LoaderState, run: EpochRun) -> None:
        self._moment = state.before(loader)
        BaseDataLoaderIter.__init__(self, loader)
        if self._num_workers <= 0:
            raise AssertionError(  # torch's message
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._prefetch_factor = require_prefetch_factor(loader.prefetch_factor)
        self._worker_init_fn = loader.worker_init_fn
        if (resume := state.position.resume) is not None:
            self._base_seed = resume["order"]["base_seed"]
        self._open(loader, state, run, self._prefetch_factor * self._num_workers)
        self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[BaseProcess]:  # type: ignore[override]  # torch's is an attribute
        return [m.process for m in self._place.members]

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch of persistent workers (or the first of any)."""
        place = self._place
        if not first_iter:
            self._moment = self._state.before(loader)
            self._drop_held()
            if place.pinner is not None:
                place.pinner.lend(False)
        BaseDataLoaderIter._reset(self, loader, first_iter)  # noqa: SLF001  torch's
        if not first_iter:
            self._run.serving.bind_late(loader)
        self._begin(loader, self._moment)
        if not first_iter:
            place.again(self._state.tolerance.known)
            self._raise_if_dead()
        self._join()
        for _ in range(self._ahead):
            self._request()


def _last_words(process: BaseProcess) -> str:
    """Return torch's message about a dead worker."""
    process.join(1.0)
    code = process.exitcode or 0
    if code >= 0:
        return (
            f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}. "
            "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better "
            "error trace."
        )
    name: str | None = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.strsignal(-code)
    return f"DataLoader worker (pid {process.pid}) is killed by signal: {name}. "
