"""Feed: one iterator's stream of batches as the daemon sees it.

The daemon is told which objects each step will read, epoch after epoch and ahead of use; readers
then find them in the arena. Everything here may fail or be wrong at any time: the batches are the
same, only read directly from the source.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.cache.board import READY
from creel.config import Config
from creel.errors import CreelError, UnavailableError
from creel.loader.base import CreelDataset
from creel.loader.client import Client
from creel.loader.embed import Start, connect_or_start, start_early
from creel.loader.session import Session

if TYPE_CHECKING:
    from creel.loader.foresee import Plan
    from creel.loader.orders import Order
    from creel.loader.sources import Binding

_NONE = np.empty(0, np.int32)
_log = logging.getLogger("creel.loader")

#: What a worker needs to join the trainer's session: daemon's name, token, session.
Ticket = tuple[str, str, int]


class Told(NamedTuple):
    """An epoch that the daemon was told of: its batch i is step `origin + i` of the session."""

    plan: Plan
    origin: int
    objects: NDArray[np.int32]
    ends: NDArray[np.int64]

    @property
    def repeats(self) -> bool:
        """Whether some object is read more than once."""
        return len(self.objects) > 0 and int(np.bincount(self.objects).max()) > 1

    @property
    def stop(self) -> int:
        """One more than the last step."""
        return self.origin + len(self.ends)

    def step(self, i: int) -> int:
        """The session's step of batch i."""
        return self.origin + i

    def ids(self, i: int) -> NDArray[np.int32]:
        """(k,) objects of batch i."""
        return self.objects[self.ends[i - 1] if i else 0 : self.ends[i]]

    def reads(self, i: int, index: object) -> bool:
        """Whether batch i was foreseen to be of exactly these samples."""
        if not isinstance(index, np.ndarray):
            return self.plan.matches(i, index)
        ends = self.plan.ends
        if i >= len(ends):
            return False
        planned = self.plan.indices[ends[i - 1] if i else 0 : ends[i]]
        return len(planned) == len(index) and bool((planned == index).all())


class Feed:
    """A session and the plan it was told. Lives over many epochs, for one iterator at a time."""

    def __init__(self, client: Client, session: Session, binding: Binding, name: str) -> None:
        self.client = client
        self.session = session
        self.binding = binding
        self.ticket: Ticket = (name, session.token, session.id)
        self._epoch = -1
        self._now: Told | None = None
        self._ahead: list[Told] = []  # the epochs after this one, in order
        self._past: Told | None = None  # this epoch's, until it turned out to be wrong
        self._told_at = time.monotonic_ns()
        self._next = 0  # all steps below were given out

    @property
    def alive(self) -> bool:
        """Whether the daemon still serves."""
        return self.session.alive

    def code(self) -> Callable[[], list[object]] | None:
        """What gives the person's code in a dataset that never changes otherwise, or None."""
        dataset: object = self.binding.dataset
        if not isinstance(dataset, CreelDataset) or not self.binding.immutable:
            return None
        return dataset.callables if type(dataset).__module__.startswith("creel.") else None

    def begin(self, order: Order, skip: int = 0) -> None:
        """An epoch begins, `skip` batches after its start."""
        self._epoch += 1
        before, self._now = self._now, None
        self._past = None
        first = self._ahead.pop(0) if self._ahead else None
        plan = foreseen(order, 0)
        fits = first is not None and first.origin == self._next and not skip
        if fits and first is not None and plan is not None and plan.same(first.plan):
            self._now = first
            return
        # An iterator that begins anew has not left what it never read.
        if first is not None or (before is not None and self._next < before.stop):
            self._ahead.clear()
            self.session.truncate(self._next)
        self.session.done(self._next)
        self._now = self._tell(plan, self._epoch, self._next, skip)

    def foresee(self, order: Order) -> None:
        """Tell the daemon of the epochs after this one, where they can be known.

        One is enough where every epoch reads everything once (law L1). Where it reads some samples
        more often than others, the best choice of what to keep needs two (law L3).
        """
        if self._now is None:
            return
        while len(self._ahead) < (2 if self._now.repeats else 1):
            last = self._ahead[-1] if self._ahead else self._now
            number = len(self._ahead) + 1
            told = self._tell(foreseen(order, number), self._epoch + number, last.stop)
            if told is None:
                return
            self._ahead.append(told)

    def _tell(self, plan: Plan | None, epoch: int, first: int, skip: int = 0) -> Told | None:
        if plan is None or len(plan.ends) <= skip:
            return None
        try:
            objects, counts = self.binding.objects(plan.indices.astype(np.int64))
        except (IndexError, CreelError):  # the sampler is wrong: the person learns it from a read
            return None
        ends = np.cumsum(counts)[plan.ends - 1]
        start = int(ends[skip - 1]) if skip else 0
        told = self.session.extend(epoch, first, objects[start:], ends[skip:] - start)
        return Told(plan, first - skip, objects, ends) if told else None

    def give(self, i: int, index: object) -> int:
        """Batch i of the epoch is about to be read: its step, or -1 when it was not foreseen."""
        now = self._now
        if now is None:
            return -1
        if not now.reads(i, index):
            # Steps given out before may still be read by workers: only what comes after is void.
            self._ahead.clear()
            self.session.truncate(self._next)
            self._now, self._past = None, now
            return -1
        self._next = now.origin + i + 1
        return self._next - 1

    def ahead(self) -> Told | None:
        """The next epoch as the daemon was told of it, if it was."""
        return self._ahead[0] if self._ahead else None

    def reads(self, told: Told) -> bool:
        """Whether the epoch that goes on is that one, which the daemon was never told otherwise."""
        return self._now is told

    def ids(self, i: int) -> NDArray[np.int32]:
        """(k,) objects of batch i, for which `give` gave a step."""
        return _NONE if self._now is None else self._now.ids(i)

    def done(self, i: int) -> None:
        """All batches below i have arrived."""
        now = self._now or self._past
        if now is not None:
            self.session.done(min(now.origin + i, self._next))

    def left(self) -> None:
        """The epoch is over, or was left: nobody reads more of it."""
        if self._now is not None and self._next < self._now.stop:
            self.session.truncate(self._next)
            self._ahead.clear()
        self.session.done(self._next)

    def count(self, first: int, last: int, more: dict[str, int]) -> None:
        """Batches [first, last) of the epoch, as foreseen, were delivered: for `creel stats`."""
        board, now = self.session.board, self._now or self._past
        before, self._told_at = self._told_at, time.monotonic_ns()
        for name, value in more.items():
            board.add(name, value)
        if now is None or last <= first or last > len(now.ends):
            return
        board.add("batches", last - first)
        begin = now.ends[first - 1] if first else 0
        ids = now.objects[begin : now.ends[last - 1]]
        board.add("nbytes", int(self.session.table.length.take(ids).clip(0).sum()))
        samples = now.plan.ends[last - 1] - (now.plan.ends[first - 1] if first else 0)
        board.add("samples", int(samples))
        # How long a ready batch waits to be taken: as many as are ready, at the last ones' pace.
        ahead = max(board[READY] - (now.origin + last), 0)
        board.add("lead_ns", ahead * (self._told_at - before))

    def close(self) -> None:
        """End the session."""
        self.session.close()


def open_feed(binding: Binding, config: Config) -> Feed | None:
    """A session of this node's daemon for a dataset; None where there is no daemon."""
    client = client_of(config)
    if client is None:
        return None
    rank, world = rank_and_world()
    try:
        dataset = client.register(binding.manifest)
        session = client.open(dataset, job_name(), rank, world)
    except (UnavailableError, OSError) as e:  # OSError: no descriptor, or no room for a mapping
        _log.warning("creel reads directly, without a cache: %s", e)
        return None
    return Feed(client, session, binding, config.daemon.name)


def job_name() -> str:
    """What names this training run: torchrun's or Slurm's id, else nothing."""
    env = os.environ
    if run := env.get("TORCHELASTIC_RUN_ID"):
        return run
    job = env.get("SLURM_JOB_ID", "")
    return f"{job}.{env['SLURM_STEP_ID']}" if job and "SLURM_STEP_ID" in env else job


def rank_and_world() -> tuple[int, int]:
    """(rank, world) as torch.distributed or torchrun's environment has them."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


#: After a failure to reach or start a daemon, seconds until it is tried again.
_RETRY_S = 30.0
_not_before: dict[tuple[int, str], float] = {}
_clients: dict[tuple[int, str], Client | None] = {}
_starts: dict[tuple[int, str], Start] = {}
_lock = threading.Lock()


def client_of(config: Config) -> Client | None:
    """This process's connection to the daemon of that name; tried again when it was lost."""
    key = (os.getpid(), config.daemon.name)
    with _lock:
        client = _clients.get(key)
        if time.monotonic() < _not_before.get(key, 0.0):
            return None
        if client is None or not client.alive:
            if client is not None:
                _log.warning("the creel daemon is gone; looking for another")
                client.close()
            client = _clients[key] = connect_or_start(config, start=_starts.pop(key, None))
            if client is None:
                _not_before[key] = time.monotonic() + _RETRY_S
        return client


def expect_daemon(config: Config) -> None:
    """A loader was made: have a daemon come up beside what the person does before reading.

    Making a model and moving it to a device takes longer than a daemon's start
    (benchmarks/startup.py).
    """
    key = (os.getpid(), config.daemon.name)
    with _lock:
        if key in _clients or key in _starts:
            return
        start = start_early(config)
        if start is not None:
            _starts[key] = start


def foreseen(order: Order, epochs: int) -> Plan | None:
    """`order.predict`, or None whatever goes wrong: it must never cost a batch."""
    try:
        return order.predict(epochs)
    except Exception:  # noqa: BLE001  (the person's sampler code may run here)
        _log.debug("cannot foresee an epoch", exc_info=True)
        return None


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  another thread of the parent may have held it
    _lock = threading.Lock()
    while _starts:
        _starts.popitem()[1].disown()


def _close_all() -> None:
    for (pid, _), client in _clients.items():
        if pid == os.getpid() and client is not None:
            client.close()
    _clients.clear()
    while _starts:
        _starts.popitem()[1].close()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(_close_all)
