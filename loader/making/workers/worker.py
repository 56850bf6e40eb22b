"""A worker process: fetches and collates batches exactly as torch's own worker does.

Messages (tuples over a `Channel`; T from the trainer, W from the worker):
    T "words" + fd               memfd of the `worker_words`; always first
    T "again", tag, samples known to be bad
                                 another epoch, keeping all state (persistent workers)
    T "bind", digest             the dataset's objects are known now, and have this `digest`
    T "join", daemon's name, token, session
                                 read through the daemon from now on
    T "task", freed slots, ...   make a batch, or a part of one (`Task.message`)
    W "batch", tag, index of batch, packed batch, its times, new bad samples [+ fds of new slots]
    T "freed", slots             slots that it may use again, if tasks do not bring them
    T "quit"
With `SharedPool`, tasks come over one socket that all workers read:
    T "any", how many "again", "bind" and "join" came before, task as above
    W "part", tag, index of batch, number of the part, packed part or None if it raised, its times,
              new bad samples, `kind_of` its first sample [+ fds of new slots]
A tag identifies one epoch of one iterator. Tasks with a tag below `WorkerWords.void` are
skipped.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from creel.errors import UnavailableError
from creel.loader.data.binding.bind import Binding, bind
from creel.loader.data.buffers import keep_freed_memory
from creel.loader.data.reading.bad_samples import Tolerance
from creel.loader.making.batch_times import IDLE, SENDING, busy
from creel.loader.making.maker import BatchMaker, StageClock, Waits
from creel.loader.making.stage import Stage
from creel.loader.making.task import WHOLE, Task
from creel.loader.making.transport.batch_message import BatchMessage, Collate, Outbox
from creel.loader.making.transport.channel import Channel
from creel.loader.making.transport.parts import kind_of
from creel.loader.making.workers.worker_words import (
    BATCH,
    COUNTER,
    PART,
    SINCE_NS,
    STAGE,
    TAG,
    WorkerWords,
)
from creel.loader.torch_private import (
    MP_STATUS_CHECK_INTERVAL,
    ExceptionWrapper,
    WorkerInfo,
    generate_state,
    signal_handling,
)
from creel.loader.torch_private import worker as torch_worker

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.client.client import Client
    from creel.loader.client.session import Session

_log = logging.getLogger("creel.loader")

#: Seconds that a worker waits for the daemon's answer before it reads directly.
_JOIN_S = 3.0


@dataclass(frozen=True)
class WorkerArgs:
    """Arguments of a worker; pickled under spawn and forkserver, inherited under fork."""

    dataset: Dataset[object]  # of this worker
    collate_fn: Collate
    auto_collation: bool  # whether an index is of a batch, not of a sample
    drop_last: bool  # as the loader's
    base_seed: int  # of torch's iterator
    init_fn: Callable[[int], object] | None  # a person's `worker_init_fn`
    worker_id: int  # from 0 on, as torch counts
    num_workers: int  # of the loader
    binding: Binding | None
    tolerance: Tolerance
    plain: bool  # a batch is default_collate of all its samples
    wait_s: float  # longest wait for the daemon
    slots: int  # most slots of one worker, see `loader.slots`
    stages: tuple[Stage, ...] = ()  # of the options that are set
    inherited: tuple[mmap.mmap, ...] = ()  # slots of the previous worker; only under fork


def worker_main(sock: socket.socket, args: WorkerArgs) -> None:
    """Run a worker until "quit", or until the trainer has ended."""
    try:
        signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]  # noqa: SLF001  as torch
        set_thread_name = getattr(torch.multiprocessing, "_set_thread_name", None)  # torch >= 2.6
        if set_thread_name is not None:
            set_thread_name("pt_data_worker")
        keep_freed_memory()
        worker = _Worker(Channel(sock), args)
        worker.run_init_fn(args.init_fn)
        worker.serve()
    except (KeyboardInterrupt, EOFError, ConnectionError):
        # The trainer has ended, or it raises the same KeyboardInterrupt itself.
        pass


class _Inlet:
    """Where a worker's messages come from: its own socket, and one that all workers read."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.shared: Channel | None = None  # tasks that any worker may take
        self.early: deque[tuple[tuple[object, ...], list[int]]] = deque()  # messages read ahead
        self._parent = os.getppid()
        self._poll: select.epoll | None = None

    def share(self, tasks: int) -> None:
        """Also take tasks from the socket `tasks`, a descriptor, that all workers read."""
        self.shared, self._poll = Channel(socket.socket(fileno=tasks)), select.epoll()
        # A task wakes one of the idle workers, not all.
        self._poll.register(self.shared, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._poll.register(self.channel, select.EPOLLIN)

    def get(self) -> tuple[tuple[object, ...], list[int]]:
        """Return the next message, or a task of all workers if this one has none of its own."""
        while self.shared is not None and self._poll is not None:
            if (got := self._private(0)) is not None or (got := self.shared.get(0)) is not None:
                return got
            if not self._poll.poll(MP_STATUS_CHECK_INTERVAL):
                self._check_trainer()
        return self.next_private()

    def next_private(self) -> tuple[tuple[object, ...], list[int]]:
        """Wait for a message to this worker; raises EOFError when the trainer has ended."""
        while (got := self._private(MP_STATUS_CHECK_INTERVAL)) is None:
            self._check_trainer()
        return got

    def _private(self, timeout_s: float) -> tuple[tuple[object, ...], list[int]] | None:
        return self.early.popleft() if self.early else self.channel.get(timeout_s)

    def _check_trainer(self) -> None:
        # A process that the trainer forked may still hold its end of the socket.
        if os.getppid() != self._parent:
            raise EOFError("the training process has ended")


class _WorkerClock(StageClock):
    """Shows the stages of the task that a worker has in its shared words."""

    shows = True

    def __init__(self, row: memoryview) -> None:
        super().__init__()
        self.row = row
        self.task: Task | None = None  # at work

    def enter(self, stage: int) -> int:
        now, row = time.monotonic_ns(), self.row
        if self.task is not None:
            row[TAG], row[BATCH], row[PART] = self.task.tag, self.task.batch, self.task.part
        row[SINCE_NS], row[STAGE] = now, stage
        return now


class _Worker:
    """The state of a worker between messages."""

    def __init__(self, channel: Channel, args: WorkerArgs) -> None:
        self._args = args
        self._inlet = _Inlet(channel)
        self._outbox = Outbox(args.slots, args.inherited)
        self._outbox.poll = self._poll_ahead
        self._session: Session | None = None  # the trainer's, once joined
        self._client: Client | None = None
        self._init_failure: ExceptionWrapper | None = None  # in place of each batch
        self._cpu_ns = time.process_time_ns()  # up to the last batch
        self._obeyed = 0  # "again", "bind" and "join"
        self._kind = ""  # of a part's first sample
        (_, (words, *shared)) = self._inlet.get()
        self._words = WorkerWords(words, args.num_workers)
        os.close(words)
        if shared:
            self._inlet.share(shared[0])
        self._clock = _WorkerClock(self._words.rows[args.worker_id])
        self._seed(args.base_seed)
        self._maker = BatchMaker(
            args.dataset,
            args.collate_fn,
            torch_flags=(args.auto_collation, args.drop_last),
            stages=args.stages,
            binding=args.binding,
            plain=args.plain,
            live=False,
            memory=self._outbox.memory,
            waits=Waits(args.wait_s),
            clock=self._clock,
            into=self._into,
        )

    def _seed(self, base_seed: int) -> None:
        """Set seeds and WorkerInfo, as at the start of torch's `_worker_loop`."""
        torch.set_num_threads(1)
        worker, args = self._args.worker_id, self._args
        seed = base_seed + worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(generate_state(base_seed, worker))  # type: ignore[no-untyped-call]  # noqa: NPY002  torch's contract
        torch_worker._worker_info = WorkerInfo(  # noqa: SLF001  get_worker_info() reads it
            id=worker, num_workers=args.num_workers, seed=seed, dataset=args.dataset
        )

    def _into(self, collate: Collate) -> Collate:
        """Return what collates into a slot, where the collation is torch's."""
        collate = self._outbox.collate(collate)

        def noting_kind(samples: Sequence[object]) -> object:
            task = self._clock.task
            self._kind = kind_of(samples[0]) if task is not None and task.part != WHOLE else ""
            return collate(samples)

        return noting_kind

    def _stage(self) -> None:
        """Put the maker's stages around the dataset anew: the person's code may have changed it."""
        self._maker.stage(self._args.dataset, self._args.collate_fn)

    def run_init_fn(self, init_fn: Callable[[int], object] | None) -> None:
        """Call the user's `worker_init_fn`; its exception becomes the result of every batch.

        torch reports it for the first batch, and an UnboundLocalError of its own for the others.
        """
        if init_fn is None:
            return
        try:
            init_fn(self._args.worker_id)
            self._stage()
        except Exception:  # noqa: BLE001  the user's exceptions go to the trainer
            self._init_failure = portable(self._failure())

    def _failure(self) -> ExceptionWrapper:
        where = f"in DataLoader worker process {self._args.worker_id}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's

    def _poll_ahead(self) -> None:
        """Read the tasks that wait, as they give slots back, which then need not be made anew."""
        with suppress(EOFError):  # the next `get` raises it again
            while (got := self._inlet.channel.get(0)) is not None:
                message, fds = got
                match message:
                    case ("task", list(freed), *task):
                        self._outbox.give_back(freed)
                        message = ("task", [], *task)
                    case ("freed", list(freed)):
                        self._outbox.give_back(freed)
                        continue
                self._inlet.early.append((message, fds))

    def serve(self) -> None:
        """Handle messages; raises EOFError at the end."""
        while True:
            self._handle(self._inlet.get()[0])

    def _handle(self, message: tuple[object, ...]) -> None:
        match message:
            case ("any", int(before), tuple(task)):
                while self._obeyed < before:
                    self._handle(self._inlet.next_private()[0])
                self._handle(task)
            case ("task", list(freed), int(tag), *_):
                self._outbox.give_back(freed)
                if tag >= self._words.void:  # else nobody waits for it any more
                    self._make(Task.received(message))
            case ("freed", list(freed)):
                self._outbox.give_back(freed)
            case ("quit",):
                raise EOFError("the trainer needs no more batches")
            case _:
                self._obey(message)
                self._obeyed += 1

    def _obey(self, message: tuple[object, ...]) -> None:
        match message:
            case ("bind", str(digest)):
                self._bind(digest)
            case ("join", str(name), str(token), int(session)):
                self._join(name, token, session)
            case ("again", _, dict(bad)):
                self._args.tolerance.known.update(bad)
                self._stage()

    def _bind(self, digest: str) -> None:
        """Bind the dataset by its trace, if its objects are the trainer's; else by none.

        The session that follows is one of these objects.
        """
        self._maker.bind(None)
        try:
            binding = bind(self._args.dataset)
            if binding is not None and binding.digest() == digest:
                self._maker.bind(binding)
        except Exception:  # noqa: BLE001  user code may run here; on failure, reads are direct
            _log.debug("worker does not bind its dataset", exc_info=True)

    def _join(self, name: str, token: str, session: int) -> None:
        """Attach to the trainer's session; on failure, reads are direct."""
        from creel.loader.client.client import Client

        self._session = None
        try:
            if self._client is None or not self._client.alive:
                # Short: the trainer saw the daemon's heartbeat, so one that is silent has just
                # stopped.
                self._client = Client.connect(name, "worker", token, timeout_s=_JOIN_S)
            self._session = self._client.attach(session)
            self._maker.inspect()
        except (UnavailableError, OSError) as e:  # no descriptor, or no memory for a mapping
            _log.info("worker %d reads directly: %s", self._args.worker_id, e)

    def _make(self, task: Task) -> None:
        clock, maker = self._clock, self._maker
        clock.task = task
        data: object = self._init_failure
        if data is None:
            try:
                data = maker.make(task, self._session)
            except Exception:  # noqa: BLE001  the user's exceptions go to the trainer
                # The exception must not outlive this line: see torch's NOTE [ Python Traceback
                # Reference Cycle Problem ].
                data = portable(self._failure())
        else:
            clock.began = clock.ready = clock.collating = clock.enter(SENDING)
        sending = clock.enter(SENDING)
        # Before sending, so that the counters include each batch that was received.
        self._count(busy(maker.times(sending)) | maker.counts)
        self._send(task, data)
        before, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        idle = clock.enter(IDLE)
        self._count({"busy_handover_ns": idle - sending, "cpu_ns": self._cpu_ns - before})

    def _count(self, counts: Mapping[str, int]) -> None:
        """Add to this worker's counters, by their names in `creel.counters`."""
        for name, more in counts.items():
            self._clock.row[COUNTER[name]] += more

    def _send(self, task: Task, data: object) -> None:
        try:
            self._put(task, data)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001  e.g. an unpicklable batch; torch would hang
            self._put(task, portable(self._failure()))

    def _put(self, task: Task, data: object) -> None:
        packed: BatchMessage | None = None
        fds: list[int] = []
        if task.part != WHOLE and isinstance(data, ExceptionWrapper):
            self._outbox.abandon()  # the batch is made as a whole, and raises there
        else:
            packed, fds = self._outbox.pack(data)
        times = self._maker.times(time.monotonic_ns())
        bad = self._args.tolerance.take_new()

        def message(packed: BatchMessage | None) -> tuple[object, ...]:
            content = packed, times, bad
            if task.part == WHOLE:
                return ("batch", task.tag, task.batch, *content)
            return ("part", task.tag, task.batch, task.part, *content, self._kind)

        def without() -> tuple[object, ...]:
            return message(packed and self._outbox.without_slots(data, packed))

        self._inlet.channel.put(message(packed), fds, without)


def portable(failure: ExceptionWrapper) -> ExceptionWrapper:
    """Return the failure, as a RuntimeError if its exception class cannot be pickled."""
    try:
        pickle.dumps(failure.exc_type)
    except Exception:  # noqa: BLE001  pickling runs user code
        failure.exc_type = RuntimeError
    return failure
