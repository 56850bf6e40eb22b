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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.cache.board import READY
from creel.config import Config
from creel.errors import UnavailableError
from creel.forks import at_fork
from creel.loader.base import Ids
from creel.loader.client import Client
from creel.loader.embed import Start, connect_or_start, start_early
from creel.loader.follow import Followed, Given, indices_of
from creel.loader.publish import PlanPublisher, Told
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


class Feed:
    """A session and the plan it was told. Lives over many epochs, for one iterator at a time."""

    def __init__(self, client: Client, session: Session, binding: Binding, name: str) -> None:
        self.client = client
        self.session = session
        self.binding = binding
        self.ticket: Ticket = (name, session.token, session.id)
        self._epoch = -1
        self._publisher = PlanPublisher(session, binding.objects, apart=binding.apart)
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

    def begin(self, order: Order, skip: int = 0) -> None:
        """An epoch begins, `skip` batches after its start."""
        self._epoch += 1
        self._now, self._past, self._followed = None, None, Followed()
        self._ahead = [told for told in self._ahead if not self._publisher.unlike(told)]
        first = self._ahead.pop(0) if self._ahead else None
        plan = foreseen(order, 0)
        if (
            first is not None
            and plan is not None
            and not skip
            and first.plan.opened
            and plan.same(first.plan)
            and self._publisher.turns(first, self._next)
        ):
            first.open()
            self._now = first
            self.session.begin(self._epoch)
            return
        # An iterator that begins anew has not left what it never read.
        self._publisher.cancel(self._next)
        self._ahead.clear()
        self.session.done(self._next)
        self.session.begin(self._epoch)
        if plan is not None:
            self._now = self._publisher.begin(plan, self._epoch, skip)

    def foresee(self, order: Order) -> None:
        """Tell the daemon of the epochs after this one, where they can be known.

        One is enough where every epoch reads everything once (law L1). Where it reads some samples
        more often than others, the best choice of what to keep needs two (law L3): that is known
        when all of this one is told.
        """
        now = self._now
        while now is not None and len(self._ahead) < 2:
            second = len(self._ahead) == 1
            if second and not order.known and not now.repeats:
                return  # it would run the person's sampler
            plan = foreseen(order, len(self._ahead) + 1)
            if plan is None:
                return
            epoch = self._epoch + len(self._ahead) + 1
            self._ahead.append(self._publisher.add(plan, epoch, now if second else None))

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
        if now is not None:
            known = self._publisher.reach(now, i)
            if known and now.reads(i, index):
                self._next = now.step(i) + 1
                return self._next - 1
            if not known and i < now.total:
                return -1  # the daemon is lost
            # Steps given out before may still be read by workers: only what comes after is void.
            self._ahead.clear()
            self._publisher.cancel(self._next)
            now.total = i
            self._past, self._now = now, None
        return self._follow(i, index)

    def _follow(self, i: int, index: object) -> int:
        """Tell the daemon of batch i now, as nobody did before."""
        indices = indices_of(index)
        found = None if indices is None else self._objects(indices)
        if indices is None or found is None or not len(found[0]):
            return -1
        step = self._publisher.blind(self._epoch, found[0])
        if step >= 0:
            self._next = step + 1
            self._followed.add(i, Given(step, found[0], len(indices)))
        return step

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
            step = max(step, min(told.step(i), told.stop, self._next))
        self.session.done(step)
        self._publisher.pump()

    def left(self) -> None:
        """The epoch is over, or was left: nobody reads more of it."""
        if self._now is not None and self._next < self._now.stop:
            self._publisher.cancel(self._next)
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
        last = min(last, 0 if told is None else min(told.known, told.total))
        if told is not None and last > first:
            for k, objects in told.take(first, last):
                samples += k
                ids.append(objects)
            batches += last - first
            step = max(step, told.step(last))
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
        self._publisher.stop()
        self.session.close()


def open_feed(binding: Binding, config: Config) -> Feed | None:
    """A session of this node's daemon for a dataset; None where there is no daemon."""
    client = client_of(config)
    if client is None:
        return None
    rank, world = rank_and_world()
    try:
        dataset = client.register(binding.manifest)
        recheck = config.loader.recheck
        session = client.open(dataset, job_name(), rank, world, recheck=recheck)
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
