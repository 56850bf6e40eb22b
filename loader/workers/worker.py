"""A worker process: fetches and collates batches exactly as torch's own worker does.

Messages (tuples over a `Channel`; T from the trainer, W from the worker):
    T "words" + fd               memfd of the `worker_words`; always first
    T "again", tag, samples known to be bad
                                 another epoch, keeping all state (persistent workers)
    T "bind", digest             the dataset's objects are known now, and have this `digest`
    T "join", daemon's name, token, session
                                 read through the daemon from now on
    T "task", tag, index of batch, sampler's index, freed slots, its `Claim`: step, ids as bytes,
              its `BatchSeeds`, or None
    T "tasks"                    the same, with bytes of int64, to be used as a list of ints
    W "batch", tag, index of batch, packed batch, its times, new bad samples [+ fds of new slots]
    T "freed", slots             slots that it may use again, if tasks do not bring them
    T "quit"
With `SharedPool`, tasks come over one socket that all workers read:
    T "any", how many "again", "bind" and "join" came before, task as above
    T "any", the same, ("part", number of the part, its first row in the batch, task as above with
             the indices of its samples, and the `Claim` of the whole batch)
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from creel.errors import UnavailableError
from creel.loader.binding.bind import Binding, bind
from creel.loader.binding.gather import Gatherer, StepReader
from creel.loader.client.claim import Claim
from creel.loader.decoded import worth
from creel.loader.reading.bad_samples import Tolerance, Tolerant, without_skipped
from creel.loader.reading.lease import Lease
from creel.loader.seeding.by_sample import BatchSeeds, Seeded
from creel.loader.torch_private import (
    MP_STATUS_CHECK_INTERVAL,
    DatasetKind,
    ExceptionWrapper,
    WorkerInfo,
    generate_state,
    signal_handling,
)
from creel.loader.torch_private import worker as torch_worker
from creel.loader.transport.batch_message import BatchMessage, Collate, Outbox
from creel.loader.transport.buffers import keep_freed_memory
from creel.loader.transport.channel import Channel
from creel.loader.transport.parts import kind_of
from creel.loader.workers.stages import COLLATING, IDLE, READING, SENDING, WAITING, BatchTimes
from creel.loader.workers.worker_words import (
    BATCH,
    COUNTER,
    PART,
    SINCE_NS,
    STAGE,
    TAG,
    WHOLE,
    WorkerWords,
)

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

    dataset: Dataset[object]
    collate_fn: Collate
    auto_collation: bool
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], object] | None
    worker_id: int
    num_workers: int
    binding: Binding | None
    tolerance: Tolerance
    plain: bool  # a batch is default_collate of all its samples
    wait_s: float  # longest wait for the daemon
    slots: int
    seeded: bool = False  # each sample by its number
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


class _Worker(StepReader):
    """The state of a worker between messages."""

    def __init__(self, channel: Channel, args: WorkerArgs) -> None:
        self._channel = channel
        self._id = args.worker_id
        self._num_workers = args.num_workers
        self._flags = (args.auto_collation, args.drop_last)
        self._parent = os.getppid()
        self._outbox = Outbox(args.slots, args.inherited)
        self._outbox.look = self._look_ahead
        self._early: deque[tuple[tuple[object, ...], list[int]]] = deque()  # messages read ahead
        self._plain = args.plain
        self._wait_s = args.wait_s
        self._session: Session | None = None
        self._client: Client | None = None
        self._gatherer: Gatherer | None = None
        self._init_failure: ExceptionWrapper | None = None
        self._batch = self._began = self._ready = self._collating = self._direct_ns = 0
        self._lost = False
        self._cpu_ns = time.process_time_ns()
        self._tasks: Channel | None = None  # that all workers read
        self._obeyed = 0  # "again", "bind" and "join"
        self._tag, self._part, self._kind = 0, WHOLE, ""
        (_, (words, *shared)) = self._get()
        self._words = WorkerWords(words, self._num_workers)
        os.close(words)
        if shared:
            self._tasks = Channel(socket.socket(fileno=shared[0]))
            self._poll = select.epoll()
            # A task wakes one of the idle workers, not all.
            self._poll.register(self._tasks, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            self._poll.register(self._channel, select.EPOLLIN)
        self._row = self._words.rows[self._id]
        self._dataset, self._collate = args.dataset, args.collate_fn
        self._binding = args.binding
        self._tolerance = args.tolerance
        self._seeded = Seeded(args.dataset) if args.seeded else None
        self._seed(args.base_seed)
        self._new_fetcher()

    def _seed(self, base_seed: int) -> None:
        """Set seeds and WorkerInfo, as at the start of torch's `_worker_loop`."""
        torch.set_num_threads(1)
        seed = base_seed + self._id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(generate_state(base_seed, self._id))  # type: ignore[no-untyped-call]  # noqa: NPY002  torch's contract
        torch_worker._worker_info = WorkerInfo(  # noqa: SLF001  get_worker_info() reads it
            id=self._id, num_workers=self._num_workers, seed=seed, dataset=self._dataset
        )

    def _new_fetcher(self) -> None:
        auto_collation, drop_last = self._flags
        dataset, seeded = self._dataset, self._seeded
        user = self._collate if seeded is None else seeded.collating(self._collate)
        collate = self._timed(self._outbox.collate(user))
        if self._tolerance.wanted:
            dataset = Tolerant(dataset, self._tolerance, reads=seeded)
            collate = without_skipped(collate) if auto_collation else collate
        elif seeded is not None:
            dataset = seeded
        self._fetcher = DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]  # torch's
            DatasetKind.Map, dataset, auto_collation, collate, drop_last
        )

    def _timed(self, collate: Collate) -> Collate:
        def timed(samples: Sequence[object]) -> object:
            self._collating = self._enter(COLLATING)
            self._kind = kind_of(samples[0]) if self._part != WHOLE else ""
            return collate(samples)

        return timed

    def run_init_fn(self, init_fn: Callable[[int], object] | None) -> None:
        """Call the user's `worker_init_fn`; its exception becomes the result of every batch.

        torch reports it for the first batch, and an UnboundLocalError of its own for the others.
        """
        if init_fn is None:
            return
        try:
            init_fn(self._id)
            self._new_fetcher()
        except Exception:  # noqa: BLE001  the user's exceptions go to the trainer
            self._init_failure = portable(self._failure())

    def _failure(self) -> ExceptionWrapper:
        where = f"in DataLoader worker process {self._id}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's

    def _get(self) -> tuple[tuple[object, ...], list[int]]:
        """Return the next message, or a task of all workers if this one has none of its own."""
        while self._tasks is not None:
            if (got := self._own(0)) is not None or (got := self._tasks.get(0)) is not None:
                return got
            if not self._poll.poll(MP_STATUS_CHECK_INTERVAL):
                self._check_trainer()
        return self._own_next()

    def _own_next(self) -> tuple[tuple[object, ...], list[int]]:
        """Wait for a message to this worker; raises EOFError when the trainer has ended."""
        while (got := self._own(MP_STATUS_CHECK_INTERVAL)) is None:
            self._check_trainer()
        return got

    def _own(self, timeout_s: float) -> tuple[tuple[object, ...], list[int]] | None:
        return self._early.popleft() if self._early else self._channel.get(timeout_s)

    def _check_trainer(self) -> None:
        # A process that the trainer forked may still hold its end of the socket.
        if os.getppid() != self._parent:
            raise EOFError("the training process has ended")

    def _look_ahead(self) -> None:
        """Read the tasks that wait, as they give slots back, which then need not be made anew."""
        with suppress(EOFError):  # the next `_get` raises it again
            while (got := self._channel.get(0)) is not None:
                message, fds = got
                match message:
                    case ("task" | "tasks", tag, batch, index, list(freed), *claim):
                        self._outbox.give_back(freed)
                        message = (message[0], tag, batch, index, [], *claim)
                    case ("freed", list(freed)):
                        self._outbox.give_back(freed)
                        continue
                self._early.append((message, fds))

    def serve(self) -> None:
        """Handle messages; raises EOFError at the end."""
        while True:
            self._handle(self._get()[0])

    def _handle(self, message: tuple[object, ...]) -> None:
        match message:
            case ("any", int(before), tuple(task)):
                while self._obeyed < before:
                    self._handle(self._own_next()[0])
                self._handle(task)
            case ("part", int(part), int(first), tuple(task)):
                self._asked(task, part, first)
            case ("task" | "tasks", *_):
                self._asked(message)
            case ("freed", list(freed)):
                self._outbox.give_back(freed)
            case ("quit",):
                raise EOFError("the trainer needs no more batches")
            case _:
                self._obey(message)
                self._obeyed += 1

    def _asked(self, task: tuple[object, ...], part: int = WHOLE, first: int = 0) -> None:
        """Make a batch, or a part from its row `first` on, unless nobody waits for it any more."""
        match task:
            case (kind, int(tag), int(batch), index, list(freed), int(step), bytes(ids), seeds):
                self._outbox.give_back(freed)
                if tag < self._words.void:
                    return
                if kind == "tasks" and isinstance(index, bytes):
                    index = np.frombuffer(index, np.int64).tolist()
                if self._seeded is not None and isinstance(seeds, BatchSeeds):
                    self._seeded.begin(seeds, first)
                self._part = part
                self._task(tag, batch, index, Claim(step, np.frombuffer(ids, np.int32)))

    def _obey(self, message: tuple[object, ...]) -> None:
        match message:
            case ("bind", str(digest)):
                self._bind(digest)
            case ("join", str(name), str(token), int(session)):
                self._join(name, token, session)
            case ("again", _, dict(bad)):
                self._tolerance.known.update(bad)
                self._new_fetcher()

    def _bind(self, digest: str) -> None:
        """Bind the dataset from its trace, if its objects are the trainer's."""
        try:
            binding = bind(self._dataset)
            if binding is not None and binding.digest() == digest:
                self._binding = binding
        except Exception:  # noqa: BLE001  user code may run here; on failure, reads are direct
            _log.debug("worker %d does not bind its dataset", self._id, exc_info=True)

    def _join(self, name: str, token: str, session: int) -> None:
        """Attach to the trainer's session; on failure, reads are direct."""
        from creel.loader.client.client import Client

        self._session = self._gatherer = None
        try:
            if self._client is None or not self._client.alive:
                # Short: the trainer saw the daemon's heartbeat, so one that is silent has just
                # stopped.
                self._client = Client.connect(name, "worker", token, timeout_s=_JOIN_S)
            self._session = self._client.attach(session)
            self._gather()
        except (UnavailableError, OSError) as e:  # no descriptor, or no memory for a mapping
            _log.info("worker %d reads directly: %s", self._id, e)

    def _gather(self) -> None:
        """Set how batches are made from bytes, if the dataset as it is now allows that."""
        binding, session = self._binding, self._session
        gather = binding.gather() if binding is not None and self._plain else None
        self._gatherer = None
        if gather is not None and gather.has_code and self._seeded is not None:
            return  # samples are seeded one by one
        if gather is not None and session is not None:
            how = self._outbox.memory, self._fetcher.collate_fn
            self._gatherer = Gatherer(gather, session, *how)

    def _task(self, tag: int, batch: int, index: object, claim: Claim) -> None:
        self._tag, self._batch, self._direct_ns, self._lost = tag, batch, 0, False
        self._began = self._ready = self._enter(READING)
        self._collating = 0  # 0 until collation begins: reading may fail before
        data: object = self._init_failure
        if data is None:
            try:
                data = self._read(index, claim)
            except Exception:  # noqa: BLE001  the user's exceptions go to the trainer
                # The exception must not outlive this line: see torch's NOTE [ Python Traceback
                # Reference Cycle Problem ].
                data = portable(self._failure())
        sending = self._enter(SENDING)
        collating = self._collating or sending
        # Before sending, so that the counters include each batch that was received.
        self._count(
            busy_source_ns=self._ready - self._began + self._direct_ns,
            busy_decode_ns=max(collating - self._ready - self._direct_ns, 0),
            busy_collate_ns=sending - collating,
        )
        self._send(tag, batch, data)
        before, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        self._count(busy_handover_ns=self._enter(IDLE) - sending, cpu_ns=self._cpu_ns - before)

    def _count(self, **counts: int) -> None:
        """Add to this worker's counters, by their names in `creel.counters`."""
        for name, more in counts.items():
            self._row[COUNTER[name]] += more

    def _read(self, index: object, claim: Claim) -> object:
        session, binding = self._session, self._binding
        if binding is None:
            return self._fetcher.fetch(index)
        if session is None:
            return self.fetch(index, Lease())
        made = self._gatherer if self._part == WHOLE else None
        if made is not None and made.gather.has_code and not binding.gathers(made.gather):
            self._gather()  # user code in this process has assigned another transform
            made = self._gatherer
        return self.read_step(binding, session, *claim, index, made)

    def wait_for(self, session: Session, step: int, ids: object) -> bool:  # noqa: ARG002
        """Wait until a step's objects are pinned; on False the location table may be outdated."""
        self._enter(WAITING)
        ready = session.wait(step, self._wait_s)
        self._lost = not ready and not session.alive
        self._ready = self._enter(READING)
        return ready

    def fetch(self, index: object, lease: Lease) -> object:
        """Fetch as torch does, and count direct reads in the shared words."""
        try:
            with lease:
                return self._fetcher.fetch(index)
        finally:
            self._direct_ns = lease.direct_ns
            self._count(
                direct_reads=lease.direct_reads,
                direct_nbytes=lease.direct_nbytes,
                decoded_hits=lease.decoded_hits,
                decoded_misses=lease.decoded_misses,
                **worth.counts(lease),
            )

    def copying(self, *, decodes: bool) -> None:
        """Note that rows are being copied, which counts as collation if a batch is made of them."""
        if not decodes:
            self._collating = self._enter(COLLATING)

    def copied(self, *, done: bool) -> None:
        """Note the end of copying; if it gave no batch, samples are read one by one."""
        if not done:
            self._enter(READING)
            self._collating = 0

    def _enter(self, stage: int) -> int:
        now, row = time.monotonic_ns(), self._row
        row[TAG], row[BATCH], row[PART] = self._tag, self._batch, self._part
        row[SINCE_NS], row[STAGE] = now, stage
        return now

    def _send(self, tag: int, batch: int, data: object) -> None:
        try:
            self._put(tag, batch, data)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001  e.g. an unpicklable batch; torch would hang
            self._put(tag, batch, portable(self._failure()))

    def _put(self, tag: int, batch: int, data: object) -> None:
        message: BatchMessage | None = None
        fds: list[int] = []
        if self._part != WHOLE and isinstance(data, ExceptionWrapper):
            self._outbox.abandon()  # the batch is made as a whole, and raises there
        else:
            message, fds = self._outbox.pack(data)
        now = time.monotonic_ns()
        when = self._began, self._ready, self._collating or now, now
        times = BatchTimes(*when, self._direct_ns, int(self._lost))
        rest = times, self._tolerance.take_new()

        def wrapped(packed: BatchMessage | None) -> tuple[object, ...]:
            if self._part == WHOLE:
                return ("batch", tag, batch, packed, *rest)
            return ("part", tag, batch, self._part, packed, *rest, self._kind)

        def without() -> tuple[object, ...]:
            return wrapped(message and self._outbox.without_slots(data, message))

        self._channel.put(wrapped(message), fds, without)


def portable(failure: ExceptionWrapper) -> ExceptionWrapper:
    """Return the failure, as a RuntimeError if its exception class cannot be pickled."""
    try:
        pickle.dumps(failure.exc_type)
    except Exception:  # noqa: BLE001  pickling runs user code
        failure.exc_type = RuntimeError
    return failure
