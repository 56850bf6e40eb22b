"""The iterator for `num_workers>0`: torch's order and semantics over creel's own workers."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from creel.loader.client.log_lines import with_rank
from creel.loader.data.reading.bad_samples import BadSample
from creel.loader.line.batches.epoch_run import EpochRun
from creel.loader.line.batches.state import LoaderState
from creel.loader.line.batches.unprofiled import AheadIter
from creel.loader.making.groups.follower import Follower, ReplicaPool
from creel.loader.making.seeding.by_sample import reads_singly
from creel.loader.making.seeding.init_fn import init_of
from creel.loader.making.stages import StallWarning
from creel.loader.making.transport.pinning import Lender, Pinning
from creel.loader.making.workers.events import BatchResult, LeaderLoss, ReadyBatch
from creel.loader.making.workers.pinner import Pinner
from creel.loader.making.workers.pool import WorkerPool
from creel.loader.making.workers.shared_pool import SharedPool
from creel.loader.making.workers.worker import WorkerArgs
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    ExceptionWrapper,
    MultiProcessingDataLoaderIter,
    raise_failure,
    require_prefetch_factor,
    utils,
)

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data import DataLoader


#: Seconds between checks for dead workers in a wait without a timeout.
LOOK_S = 5.0


class WorkerIter(AheadIter, Lender, MultiProcessingDataLoaderIter):
    """One epoch of a map-style dataset, in batches from creel's own workers.

    Subclasses torch's iterator for code that checks its class or calls its `_shutdown_workers`, but
    has none of its queues and threads. `_next_data`, `_try_put_index` and `_process_data` follow
    torch's step by step, including when they pull the sampler.
    """

    _pool: WorkerPool | ReplicaPool  # unset until workers are started
    _shutdown = False

    def __init__(self, loader: DataLoader[Any], loader_state: LoaderState, run: EpochRun) -> None:
        """Begin an epoch: draw the base seed, start workers, request the first batches."""
        self._moment = loader_state.before(loader)
        BaseDataLoaderIter.__init__(self, loader)
        self._in_order = loader.in_order
        if self._num_workers <= 0:
            raise AssertionError(  # torch's message
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._prefetch_factor = require_prefetch_factor(loader.prefetch_factor)
        self._worker_init_fn = loader.worker_init_fn
        self._loader_state = loader_state
        self._meter = loader_state.meter
        self._warn_after_s = loader_state.config.loader.hung_s
        self._warned: object = None  # the batch of which `_warn` has told
        if loader_state.resume is not None:
            self._base_seed = loader_state.resume["order"]["base_seed"]
        self._run = run
        start = time.monotonic_ns()
        self._pool = self._new_pool(loader)
        self._tag = self._pool.tag
        pool = self._pool
        run.statistics.made_by(len(pool.members), pool.new_counts, pool.readers())
        self._meter["stall_daemon_ns"] += time.monotonic_ns() - start
        pinning = Pinning.of(self)
        if pinning is not None:
            self._pool.pinner = Pinner(self._pool, pinning)
        self._reset(loader, first_iter=True)

    def _new_pool(self, loader: DataLoader[Any]) -> WorkerPool | ReplicaPool:
        loader_state, max_leased = self._loader_state, self._loader_state.config.loader.max_leased
        role = loader_state.role(loader)
        if isinstance(role, Follower):
            return ReplicaPool(role, max_leased)
        followers = None if role is None else role.open(self._prefetch_factor * self._num_workers)
        context: Any = loader.multiprocessing_context or torch.multiprocessing
        args = self._worker_args(loader)
        spare, loader_state.spare = loader_state.spare, ()
        how = context, args, self._num_workers, max_leased, spare, followers
        if loader_state.args.workers == "own":
            return WorkerPool(*how)
        plain = loader_state.collates_plainly(loader)
        cuts = followers is None and plain and reads_singly(self._dataset)
        return SharedPool(*how, cuts=cuts)

    def _worker_args(self, loader: DataLoader[Any]) -> WorkerArgs:
        """Return what workers start with. As in torch, they see no later changes."""
        options = self._loader_state.config.loader
        return WorkerArgs(
            dataset=self._dataset,
            collate_fn=cast(Any, self._collate_fn),
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=init_of(self._dataset, self._worker_init_fn),
            worker_id=0,
            num_workers=self._num_workers,
            binding=self._run.serving.binding,
            tolerance=self._loader_state.tolerance,
            plain=self._loader_state.collates_plainly(loader),
            wait_s=options.wait_s,
            slots=options.slots,
            seeded=self._loader_state.args.seeding is not None,
        )

    @property
    def _workers(self) -> list[BaseProcess]:  # type: ignore[override]  # torch's is an attribute
        return [m.process for m in self._pool.members]

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch of persistent workers (or the first of any)."""
        if not first_iter:
            self._moment = self._loader_state.before(loader)
            self._drop_held()
            if self._pool.pinner is not None:
                self._pool.pinner.lend(False)
        BaseDataLoaderIter._reset(self, loader, first_iter)  # noqa: SLF001  torch's
        late = None if first_iter else self._run.serving.bind_late(loader)
        self._run.begin(loader, self, self._moment)
        self._send_idx = 0
        self._rcvd_idx = 0
        # batch -> (worker,) while outstanding, (worker, event) if it arrived out of order
        self._task_info: dict[int, tuple[int] | tuple[int, BatchResult]] = {}
        self._tasks_outstanding = 0
        self._workers_status = [True] * self._num_workers
        self._workers_num_tasks = [0] * self._num_workers
        self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
        self._withheld = 0
        if not first_iter:
            self._tag = self._pool.again(self._loader_state.tolerance.known)
            self._raise_if_dead()
        if late is not None:
            self._pool.bind(late)
        self._join()
        for _ in range(self._prefetch_factor * self._num_workers):
            self._request()

    def _join(self) -> None:
        """Let the workers read through the session that serves this epoch, if there is one."""
        reads = self._reads = self._run.serving.reads
        if reads is not None:
            self._pool.join(reads.ticket)

    # --- torch's scheme ---------------------------------------------------------------------

    def _next_data(self) -> Any:
        since = 0
        while True:
            if self._withheld:
                self._request_withheld(self._task_info)
            if not self._find_next():
                self._run.finished = True
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            self._check_process()
            info = self._task_info[self._rcvd_idx]
            if len(info) == 2:
                del self._task_info[self._rcvd_idx]
                self._rcvd_idx += 1
                return self._process_data(info[1], info[0])
            if self._shutdown or self._tasks_outstanding <= 0:
                raise AssertionError(
                    "Invalid iterator state: shutdown or no outstanding tasks when fetching next"
                    " data"
                )
            since = since or time.monotonic_ns()
            event = self._await(since)
            self._tasks_outstanding -= 1
            idx = event.index
            worker = self._task_info[idx][0]
            if idx == self._rcvd_idx:
                self._rcvd_idx += 1
            elif self._in_order:
                self._task_info[idx] = (worker, event)
                continue
            del self._task_info[idx]
            self._meter.awaited(event.times, since, time.monotonic_ns())
            return self._process_data(event, worker)

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child: workers and sockets belong to its parent."""
        if os.getpid() != self._pool.pid:
            raise RuntimeError(
                f"this iterator belongs to process {self._pool.pid} and cannot be used in the"
                f" forked process {os.getpid()}: create a new one with iter(loader)"
            )

    def _find_next(self) -> bool:
        """Advance to the next batch that has arrived or will; False at the end of the epoch."""
        while self._rcvd_idx < self._send_idx:
            info = self._task_info.get(self._rcvd_idx)
            if info is not None:
                if len(info) == 2 or self._workers_status[info[0]]:
                    return True
                del self._task_info[self._rcvd_idx]
            self._rcvd_idx += 1
        return False

    def _try_put_index(self) -> None:
        if self._tasks_outstanding >= self._prefetch_factor * self._num_workers:
            raise AssertionError("Number of outstanding tasks exceeded maximum allowed tasks")
        try:
            index = self._next_index()
        except StopIteration:
            return
        self._put(index)

    def _put(self, index: Any) -> None:
        """Send a batch to the worker whose turn it is."""
        worker = self._choose_worker(self._prefetch_factor * self._num_workers)
        if worker is None:
            return
        task = self._run.task(self._send_idx, index, self._tag)
        if self._run.serving.reads is not self._reads:
            self._join()  # another session, after a daemon was lost
        self._pool.task(worker, task)
        self._task_info[self._send_idx] = (worker,)
        self._workers_num_tasks[worker] += 1
        self._tasks_outstanding += 1
        self._send_idx += 1

    def _choose_worker(self, max_tasks: int) -> int | None:
        """Return the next worker in turn; with `in_order=False`, the next below its share."""
        for _ in range(self._num_workers):
            worker = next(self._worker_queue_idx_cycle)
            if not self._workers_status[worker]:
                continue
            share = max_tasks // sum(self._workers_status)
            if self._in_order or self._workers_num_tasks[worker] < share:
                return worker
        return None

    def _process_data(self, event: BatchResult, worker: int) -> Any:
        self._workers_num_tasks[worker] -= 1
        self._run.done(self._rcvd_idx)
        try:
            self._request()
        except BaseException:  # raised by the sampler: as in torch, this batch is lost
            self._run.lost(event.index)
            self._pool.discard(event)
            raise
        data = self._pool.open(event)
        if self._pool.bad:
            self._note_bad(self._pool.take_bad())
        if isinstance(data, ExceptionWrapper):
            self._run.lost(event.index)
            raise_failure(data)
        self._run.deliver(self._rcvd_idx, event.times, event.worker, batch=event.index)
        self._lent = event.lent if isinstance(event, ReadyBatch) else ()
        return data

    def lend(self) -> None:
        if self._pool.pinner is not None:
            self._pool.pinner.lend(True)

    def _note_bad(self, samples: list[BadSample]) -> None:
        """Note the workers' bad samples; raises if all workers together found too many."""
        known = self._loader_state.tolerance.known
        self._run.note_bad([one for one in samples if one.index not in known])
        for one in samples:
            self._loader_state.tolerance.add(one.index, one.reason)

    # --- waiting ----------------------------------------------------------------------------

    def _await(self, since: int) -> BatchResult:
        """Call `_get_data`; on failure count the wait since `since` (monotonic ns)."""
        try:
            return self._get_data()
        except RuntimeError:
            stage = self._pool.stage(self._holder())[0]
            self._meter.gave_up(stage, time.monotonic_ns() - since)
            raise

    def _get_data(self) -> BatchResult:
        """Return the next result of this epoch, whatever its number.

        Raises:
            RuntimeError: none came within `timeout`, or a worker died; with torch's message.
        """
        pool = self._pool
        start = time.monotonic()
        while True:
            self._raise_if_dead()
            look_s = min(LOOK_S, self._warn_after_s)
            left = self._timeout - (time.monotonic() - start) if self._timeout > 0 else look_s
            event = pool.next_event(max(left, 0.0))
            if isinstance(event, BatchResult):
                if event.tag == self._tag:
                    return event
                pool.discard(event)
            elif isinstance(event, LeaderLoss) and event.tag == self._tag:
                raise RuntimeError(event.reason)
            elif event is None and self._timeout > 0:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            elif event is None:
                self._warn(self._holder(), time.monotonic() - start)

    def _holder(self) -> int:
        """Return the worker that has the batch which is waited for."""
        return self._pool.holder(self._task_info[self._rcvd_idx][0], self._rcvd_idx)

    def _raise_if_dead(self) -> None:
        members, status = self._pool.members, self._workers_status
        dead = [(i, members[i].process) for i in self._pool.lost() if status[i]]
        if not dead:
            return
        for worker, _ in dead:
            status[worker] = False
        if isinstance(self._pool, SharedPool):  # nobody makes the batches that are left
            status[:] = [False] * len(status)
        pids = ", ".join(str(process.pid) for _, process in dead)
        raise RuntimeError(
            f"DataLoader worker (pid(s) {pids}) exited unexpectedly"
        ) from RuntimeError(_last_words(dead[0][1]))

    def _warn(self, worker: int, waited_s: float) -> None:
        waits_for = self._tag, self._rcvd_idx
        if waits_for == self._warned or waited_s < self._warn_after_s:
            return
        self._warned = waits_for
        text = (
            f"no batch for {waited_s:.0f} s: batch {self._rcvd_idx} is with"
            f" {self._pool.describe(worker)}; still waiting (DataLoader(timeout=...) sets a limit)"
        )
        warnings.warn(with_rank(text), StallWarning, stacklevel=4)

    # --- closing ----------------------------------------------------------------------------

    def _shutdown_workers(self) -> None:
        """End the workers, as torch does; the session stays for the next epoch."""
        if utils is None or utils.python_exit_status in (True, None):  # type: ignore[redundant-expr]  # a module's names may be None at exit
            return
        if self._shutdown or "_pool" not in self.__dict__:
            return
        self._shutdown = True
        if os.getpid() != self._pool.pid:
            return
        self._run.leave()
        self._drop_held()
        self._loader_state.keep_slots(self._pool.close())

    def _drop_held(self) -> None:
        """Return the slots of batches that arrived out of order and will not be used."""
        tasks = self.__dict__.get("_task_info", {})
        for idx, info in tasks.items():
            if len(info) == 2:
                tasks[idx] = info[:1]
                self._pool.discard(info[1])

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the workers have ended, and the modules needed here may be gone
            return
        self._shutdown_workers()
        if self.__dict__.get("_shutdown") and os.getpid() == self._pool.pid:
            self._run.leave(deleted=True)


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
