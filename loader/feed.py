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
from creel.errors import UnavailableError
from creel.forks import at_fork
from creel.loader.base import CreelDataset, Ids
from creel.loader.client import Client
from creel.loader.embed import Start, connect_or_start, start_early
from creel.loader.follow import Followed, Given, indices_of
from creel.loader.ranks import job_name, rank_and_world
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
        return planned.shape == index.shape and bool((planned == index).all())


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
        self._followed = Followed()  # what of this epoch was not foreseen
        self._told_at = time.monotonic_ns()
        self._next = 0  # all steps below were given out

    @property
    def alive(self) -> bool:
        """Whether the daemon still serves."""
        return self.session.alive

    @property
    def mistaken(self) -> bool:
        """Whether the epoch that began last was read otherwise than foreseen."""
        return self._past is not None

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
        self._past, self._followed = None, Followed()
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
        epochs = 2 if self._now.repeats else 1
        while len(self._ahead) < epochs:
            last = self._ahead[-1] if self._ahead else self._now
            number = len(self._ahead) + 1
            told = self._tell(foreseen(order, number), self._epoch + number, last.stop)
            if told is None:
                return
            self._ahead.append(told)

    def _tell(self, plan: Plan | None, epoch: int, first: int, skip: int = 0) -> Told | None:
        if plan is None or len(plan.ends) <= skip:
            return None
        found = self._objects(plan.indices)
        if found is None:
            return None
        objects, counts = found
        ends = np.concatenate([[0], np.cumsum(counts)])[plan.ends]  # a step may read nothing
        start = int(ends[skip - 1]) if skip else 0
        told = self.session.extend(epoch, first, objects[start:], ends[skip:] - start)
        return Told(plan, first - skip, objects, ends) if told else None

    def _objects(self, indices: NDArray[np.integer]) -> tuple[Ids, NDArray[np.int64]] | None:
        """`Binding.objects`; None where these are wrong: the person learns that from a read."""
        try:
            return self.binding.objects(indices.astype(np.int64))
        except Exception:  # noqa: BLE001  (the person's own `objects` may run here)
            _log.debug("cannot tell what samples are made of", exc_info=True)
            return None

    def give(self, i: int, index: object) -> int:
        """Batch i of the epoch is about to be read: its step, or -1 when it is read directly."""
        now = self._now
        if now is not None and not now.reads(i, index):
            # Steps given out before may still be read by workers: only what comes after is void.
            self._ahead.clear()
            self.session.truncate(self._next)
            self._past = now._replace(ends=now.ends[:i])
            self._now = now = None
        if now is None:
            return self._follow(i, index)
        self._next = now.origin + i + 1
        return self._next - 1

    def _follow(self, i: int, index: object) -> int:
        """Tell the daemon of batch i now, as nobody did before."""
        indices = indices_of(index)
        found = None if indices is None else self._objects(indices)
        if indices is None or found is None or not len(found[0]):
            return -1
        step, ids = self._next, found[0]
        if not self.session.extend(self._epoch, step, ids, np.array([len(ids)]), blind=True):
            return -1
        self._next += 1
        self._followed.add(i, Given(step, ids, len(indices)))
        return step

    def ahead(self) -> Told | None:
        """The next epoch as the daemon was told of it, if it was."""
        return self._ahead[0] if self._ahead else None

    def reads(self, told: Told) -> bool:
        """Whether the epoch that goes on is that one, which the daemon was never told otherwise."""
        return self._now is told

    def ids(self, i: int) -> NDArray[np.int32]:
        """(k,) objects of batch i, for which `give` gave a step."""
        ids = self._followed.ids(i)
        told = self._now or self._past
        if ids is None:
            ids = _NONE if told is None else told.ids(i)
        return ids

    def done(self, i: int) -> None:
        """All batches below i have arrived."""
        told = self._now or self._past
        step = self._followed.done(i)
        if told is not None:
            step = max(step, min(told.origin + i, told.stop, self._next))
        self.session.done(step)

    def left(self) -> None:
        """The epoch is over, or was left: nobody reads more of it."""
        if self._now is not None and self._next < self._now.stop:
            self.session.truncate(self._next)
            self._ahead.clear()
        self.session.done(self._next)

    def count(self, first: int, last: int, more: dict[str, int]) -> None:
        """Batches [first, last) of the epoch were delivered: for `creel stats`; `more` of others.

        Those for which `give` gave no step are the caller's to count.
        """
        board, told = self.session.board, self._now or self._past
        before, self._told_at = self._told_at, time.monotonic_ns()
        given = self._followed.take(first, last)
        ids = [g.ids for g in given]
        batches, samples = len(given), sum(g.samples for g in given)
        step = given[-1].step + 1 if given else 0
        last = min(last, 0 if told is None else len(told.ends))
        if told is not None and last > first:
            batches += last - first
            samples += int(told.plan.ends[last - 1] - (told.plan.ends[first - 1] if first else 0))
            ids.append(told.objects[told.ends[first - 1] if first else 0 : told.ends[last - 1]])
            step = max(step, told.origin + last)
        for name, value in more.items():
            board.add(name, value)
        if not batches:
            return
        board.add("batches", batches)
        board.add("samples", samples)
        length = self.session.table.length
        board.add("nbytes", sum(int(length.take(part).clip(0).sum()) for part in ids))
        # How long a ready batch waits to be taken: as many as are ready, at the last ones' pace.
        board.add("lead_ns", max(board[READY] - step, 0) * (self._told_at - before))

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


#: After a failure to reach or start a daemon, seconds until it is tried again.
_RETRY_S = 30.0
_not_before: dict[tuple[int, str], float] = {}
_clients: dict[tuple[int, str], Client | None] = {}
_starts: dict[tuple[int, str], Start] = {}
_lock = threading.Lock()


def client_of(config: Config, *, patron: int = 0) -> Client | None:
    """This process's connection to the daemon of that name; tried again when it was lost.

    Args:
        patron: see `Client.connect`.
    """
    key = (os.getpid(), config.daemon.name)
    with _lock:
        client = _clients.get(key)
        if time.monotonic() < _not_before.get(key, 0.0):
            return None
        if client is None or not client.alive:
            if client is not None:
                _log.warning("the creel daemon is gone; looking for another")
                client.close()
            start = _starts.pop(key, None)
            client = _clients[key] = connect_or_start(config, patron=patron, start=start)
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


at_fork(after_in_child=_renew_lock)
atexit.register(_close_all)
