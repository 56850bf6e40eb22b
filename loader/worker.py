"""A worker process: fetches and collates batches exactly as torch's own worker does.

The messages (tuples over a `Wire`; T trainer, W worker):
    T "board" + fd               the shared words below; always first
    T "again", tag               a further epoch with everything kept (persistent workers)
    T "join", daemon's name, token, session
                                 read through the daemon from now on
    T "task", tag, index of batch, sampler's index, freed slots, session's step or -1
    T "tasks"                    the same with an array that stands for a list of ints
    W "batch", tag, index of batch, packed batch, its times [+ fds of new slots]
    T "quit"
A tag names one epoch of one iterator. Tasks whose tag is below the board's VOID word are skipped.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data._utils.worker import WorkerInfo, _generate_state
from torch.utils.data.dataloader import _DatasetKind

from creel.errors import UnavailableError
from creel.loader.parcel import Outbox
from creel.loader.stages import COLLATING, IDLE, READING, SENDING, WAITING, Times
from creel.loader.wire import Wire

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from creel.loader.client import Client
    from creel.loader.gather import Gatherer
    from creel.loader.reading import Lease
    from creel.loader.session import Session
    from creel.loader.sources import Binding

_log = logging.getLogger("creel.loader")

Collate: TypeAlias = Callable[[Sequence[object]], object]

#: How long a worker waits for the daemon's answer before it reads directly, seconds.
_JOIN_S = 3.0

#: Bytes: glibc takes blocks below 32 MiB as a hint, on 64-bit systems.
_LARGE = 31 << 20

# words of the board: one for all, then WORDS for each worker
VOID = 0
FIRST = 8
WORDS = 16
STAGE, BATCH, SINCE_NS = range(3)
#: Counters: ns spent on batches, and reads that the arena could not serve.
SOURCE_NS, DECODE_NS, COLLATE_NS, HANDOVER_NS, DIRECT_READS, DIRECT_NBYTES = range(3, 9)


def board_nbytes(workers: int) -> int:
    """Size of the board's memfd."""
    return 8 * (FIRST + WORDS * workers)


@dataclass(frozen=True)
class Outfit:
    """What a worker is born with; pickled under spawn and forkserver, inherited under fork."""

    dataset: Dataset[object]
    collate_fn: Collate
    auto_collation: bool
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], None] | None
    worker_id: int
    num_workers: int
    binding: Binding | None = None
    plain: bool = False  # a batch is default_collate of its samples
    wait_s: float = 60.0  # for the daemon, at most
    slots: int = 8


def worker_main(sock: socket.socket, outfit: Outfit) -> None:
    """Serve until told to quit or the trainer is gone."""
    try:
        _utils.signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]  # noqa: SLF001  as torch
        set_thread_name = getattr(torch.multiprocessing, "_set_thread_name", None)  # torch >= 2.6
        if set_thread_name is not None:
            set_thread_name("pt_data_worker")
        _keep_freed_memory()
        worker = _Worker(Wire(sock), outfit)
        worker.run_init_fn(outfit.init_fn)
        worker.serve()
    except (KeyboardInterrupt, EOFError, ConnectionError):
        # The trainer raises the first itself; the others say that it is gone.
        pass


def _keep_freed_memory() -> None:
    """Let the C library keep what a batch frees for the next one, up to 62 MiB.

    Its heap is cut back whenever 128 KiB at the end are free. Samples below that size then touch
    fresh pages batch after batch, which costs several times the copy that goes into them. glibc
    raises the limit by itself, to twice the size of a larger block that was freed (mallopt(3));
    this is such a block, never written to. Other C libraries pass over it.
    """
    with suppress(MemoryError):  # little address space is left (`ulimit -v`): none is kept
        np.empty(_LARGE, np.uint8)


class _Worker:
    """The state of a worker between messages."""

    def __init__(self, wire: Wire, outfit: Outfit) -> None:
        self._wire = wire
        self._id = outfit.worker_id
        self._num_workers = outfit.num_workers
        self._flags = (outfit.auto_collation, outfit.drop_last)
        self._parent = os.getppid()
        self._outbox = Outbox(outfit.slots)
        self._plain = outfit.plain
        self._wait_s = outfit.wait_s
        self._session: Session | None = None
        self._client: Client | None = None
        self._gatherer: Gatherer | None = None
        self._init_failure: ExceptionWrapper | None = None
        self._batch = self._began = self._ready = self._collating = self._direct_ns = 0
        self._lost = False
        (_, fds) = self._get()
        self._board = memoryview(mmap.mmap(fds[0], 0)).cast("q")
        os.close(fds[0])
        self._words = FIRST + WORDS * self._id
        self._dataset, self._collate = outfit.dataset, outfit.collate_fn
        self._binding = outfit.binding
        self._seed(outfit.base_seed)
        self._new_fetcher()

    def _seed(self, base_seed: int) -> None:
        """Seeds and WorkerInfo, as at the start of torch's `_worker_loop`."""
        torch.set_num_threads(1)
        seed = base_seed + self._id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(_generate_state(base_seed, self._id))  # type: ignore[no-untyped-call]  # noqa: NPY002  torch's contract
        _utils.worker._worker_info = WorkerInfo(  # noqa: SLF001  what get_worker_info() reads
            id=self._id, num_workers=self._num_workers, seed=seed, dataset=self._dataset
        )

    def _new_fetcher(self) -> None:
        auto_collation, drop_last = self._flags
        self._fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]  # torch's
            _DatasetKind.Map,
            self._dataset,
            auto_collation,
            self._noting(self._outbox.collate(self._collate)),
            drop_last,
        )

    def _noting(self, collate: Collate) -> Collate:
        """The same function, noting when it is called."""

        def noted(samples: Sequence[object]) -> object:
            self._collating = self._enter(COLLATING)
            return collate(samples)

        return noted

    def run_init_fn(self, init_fn: Callable[[int], None] | None) -> None:
        """Call the user's `worker_init_fn`; what it raises is the result of every batch.

        torch reports it for the first batch and an UnboundLocalError of its own for the others.
        """
        if init_fn is None:
            return
        try:
            init_fn(self._id)
            self._new_fetcher()
        except Exception:  # noqa: BLE001  any failure of the user's code goes to the trainer
            self._init_failure = _portable(self._failure())

    def _failure(self) -> ExceptionWrapper:
        where = f"in DataLoader worker process {self._id}"
        return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's

    def _get(self) -> tuple[tuple[object, ...], list[int]]:
        """The next message; EOFError when the trainer is gone."""
        while True:
            got = self._wire.get(_utils.MP_STATUS_CHECK_INTERVAL)
            if got is not None:
                return got
            # Its end of the socket may live on in a process it forked in a way we cannot see.
            if os.getppid() != self._parent:
                raise EOFError("the trainer is gone")

    def serve(self) -> None:
        """Answer messages until "quit"."""
        while True:
            message, _ = self._get()
            match message:
                case ("tasks", int(tag), int(batch), np.ndarray() as array, list(freed), int(step)):
                    self._outbox.take_back(freed)
                    if tag >= self._board[VOID]:
                        self._task(tag, batch, array.tolist(), step)
                case ("task", int(tag), int(batch), index, list(freed), int(step)):
                    self._outbox.take_back(freed)
                    if tag >= self._board[VOID]:
                        self._task(tag, batch, index, step)
                case ("join", str(name), str(token), int(session)):
                    self._join(name, token, session)
                case ("again", _):
                    self._new_fetcher()
                case ("quit",):
                    return

    def _join(self, name: str, token: str, session: int) -> None:
        """Attach to the trainer's session; without it reads are direct."""
        from creel.loader.client import Client
        from creel.loader.gather import Gatherer

        self._session = self._gatherer = None
        try:
            if self._client is None or not self._client.alive:
                # Its trainer saw the daemon beat: one that does not answer has just stopped.
                self._client = Client.connect(name, "worker", token, timeout_s=_JOIN_S)
            self._session = self._client.attach(session)
            gather = None if self._binding is None or not self._plain else self._binding.gather()
            if gather is not None:
                memory = self._outbox.memory
                self._gatherer = Gatherer(gather, self._client, self._session, memory)
        except (UnavailableError, OSError) as e:  # no descriptor, or no room for a mapping
            _log.info("worker %d reads directly: %s", self._id, e)

    def _task(self, tag: int, batch: int, index: object, step: int) -> None:
        self._batch, self._direct_ns, self._lost = batch, 0, False
        self._began = self._ready = self._enter(READING)
        self._collating = 0  # until it begins: a failure may come first
        data: object = self._init_failure
        if data is None:
            try:
                data = self._fetch(index, step)
            except Exception:  # noqa: BLE001  any failure of the user's code goes to the trainer
                # Exception info must not outlive this line: see torch's
                # NOTE [ Python Traceback Reference Cycle Problem ].
                data = _portable(self._failure())
        sending = self._enter(SENDING)
        collating = self._collating or sending
        # Before the batch is there, so that whoever has it finds what it cost.
        board, words = self._board, self._words
        board[words + SOURCE_NS] += self._ready - self._began + self._direct_ns
        board[words + DECODE_NS] += max(collating - self._ready - self._direct_ns, 0)
        board[words + COLLATE_NS] += sending - collating
        self._send(tag, batch, data)
        board[words + HANDOVER_NS] += self._enter(IDLE) - sending

    def _fetch(self, index: object, step: int) -> object:
        session, binding = self._session, self._binding
        if binding is None:
            return self._fetcher.fetch(index)
        if step < 0 or session is None or not self._wait(session, step):
            return self._read(index, binding.counting())
        stamp = session.hold(step)
        if stamp < 0:
            return self._read(index, binding.counting())
        indices = np.asarray(index, np.int64)
        ids = binding.objects(indices.reshape(-1))[0]
        if self._gatherer is not None:
            self._collating = self._enter(COLLATING)
            rows = self._gatherer.rows(ids, indices)
            whole = session.held(step, stamp)
            if whole and rows is not None:
                return self._gatherer.batch(rows, indices)
            self._enter(READING)
            self._collating = 0
            if not whole:
                return self._read(index, binding.counting())
        return self._read(index, binding.reading(session, ids, stamp))

    def _wait(self, session: Session, step: int) -> bool:
        """Whether the step's objects are pinned; if not, what the table says may be void."""
        if session.ready(step):
            return True
        self._enter(WAITING)
        ready = session.wait(step, self._wait_s)
        self._lost = not ready and not session.alive
        self._ready = self._enter(READING)
        return ready

    def _read(self, index: object, lease: Lease) -> object:
        try:
            with lease:
                return self._fetcher.fetch(index)
        finally:
            self._direct_ns = lease.direct_ns
            self._board[self._words + DIRECT_READS] += lease.direct_reads
            self._board[self._words + DIRECT_NBYTES] += lease.direct_nbytes

    def _enter(self, stage: int) -> int:
        now = time.monotonic_ns()
        self._board[self._words + STAGE] = stage
        self._board[self._words + BATCH] = self._batch
        self._board[self._words + SINCE_NS] = now
        return now

    def _times(self) -> Times:
        """Of the batch that is packed by now."""
        now = time.monotonic_ns()
        times = (self._began, self._ready, self._collating or now, now)
        return *times, self._direct_ns, int(self._lost)

    def _send(self, tag: int, batch: int, data: object) -> None:
        try:
            packed, fds = self._outbox.pack(data)
            self._wire.put(("batch", tag, batch, packed, self._times()), fds)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001  e.g. a batch that cannot be pickled; torch would hang
            packed, fds = self._outbox.pack(_portable(self._failure()))
            self._wire.put(("batch", tag, batch, packed, self._times()), fds)


def _portable(failure: ExceptionWrapper) -> ExceptionWrapper:
    """The same story with a class that can travel, when its own cannot."""
    try:
        pickle.dumps(failure.exc_type)
    except Exception:  # noqa: BLE001  pickling runs the user's code
        failure.exc_type = RuntimeError
    return failure
