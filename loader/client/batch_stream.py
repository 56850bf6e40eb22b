"""BatchStream: one iterator's session with the daemon, over many epochs.

It publishes which objects each step will read, epoch by epoch and ahead of use, so that readers
find them in the arena. Any failure or wrong prediction here only costs speed: the same batches are
then read directly from the source.
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

from creel.cache.memory.shared_words import READY
from creel.config import Config
from creel.errors import UnavailableError
from creel.forks import at_fork
from creel.loader.client.client import Client
from creel.loader.client.embed import DaemonStart, connect_or_start, start_early
from creel.loader.client.publish import PlanPublisher, PublishedEpoch
from creel.loader.client.ranks import job_name, rank_and_world
from creel.loader.client.session import Session
from creel.loader.client.unplanned import UnplannedBatch, UnplannedBatches, indices_of
from creel.loader.datasets.base import Ids

if TYPE_CHECKING:
    from creel.loader.binding.bind import Binding
    from creel.loader.order.orders import EpochOrder
    from creel.loader.order.prediction import EpochPlan

_NONE = np.empty(0, np.int32)
_log = logging.getLogger("creel.loader")

#: What a worker needs to join the trainer's session: daemon name, token, session id.
Ticket = tuple[str, str, int]


class BatchStream:
    """A session and its published plan. Used by one iterator at a time, over many epochs."""

    def __init__(self, client: Client, session: Session, binding: Binding, name: str) -> None:
        self.client = client
        self.session = session
        self.binding = binding
        self.ticket: Ticket = (name, session.token, session.id)
        self._epoch = -1
        self._publisher = PlanPublisher(session, binding.objects, apart=binding.apart)
        self._now: PublishedEpoch | None = None
        self._ahead: list[PublishedEpoch] = []  # the epochs after this one, in order
        self._past: PublishedEpoch | None = None  # this epoch's plan, if it turned out wrong
        self._followed = UnplannedBatches()  # unplanned batches of this epoch
        self._told_at = time.monotonic_ns()
        self._next = 0  # all steps below were given out

    @property
    def alive(self) -> bool:
        """Whether the daemon still serves."""
        return self.session.alive

    @property
    def mistaken(self) -> bool:
        """Whether the current epoch differed from its prediction."""
        return self._past is not None

    def begin(self, order: EpochOrder, skip: int = 0) -> None:
        """Begin an epoch, `skip` batches after its start."""
        self._epoch += 1
        self._now, self._past, self._followed = None, None, UnplannedBatches()
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
        # An iterator that restarts leaves published steps that it never read.
        self._publisher.cancel(self._next)
        self._ahead.clear()
        self.session.done(self._next)
        self.session.begin(self._epoch)
        if plan is not None:
            self._now = self._publisher.begin(plan, self._epoch, skip)

    def foresee(self, order: EpochOrder) -> None:
        """Publish the epochs after this one, if they can be predicted.

        One is enough if every epoch reads everything once (law L1). If it reads some samples more
        often than others, the best retention needs two (law L3); whether it does is known once all
        of this epoch is published.
        """
        now = self._now
        while now is not None and len(self._ahead) < 2:
            second = len(self._ahead) == 1
            if second and not order.known and not now.repeats:
                return  # predicting would run the user's sampler
            plan = foreseen(order, len(self._ahead) + 1)
            if plan is None:
                return
            epoch = self._epoch + len(self._ahead) + 1
            self._ahead.append(self._publisher.add(plan, epoch, now if second else None))

    def _objects(self, indices: NDArray[np.integer]) -> tuple[Ids, NDArray[np.int64]] | None:
        """`Binding.objects`, or None if it raises: the read of wrong indices reports the error."""
        try:
            return self.binding.objects(indices.astype(np.int64))
        except Exception:  # noqa: BLE001  (the user's own `objects` may run here)
            _log.debug("cannot tell what samples are made of", exc_info=True)
            return None

    def give(self, i: int, index: object) -> int:
        """Return the step of batch i, which is about to be read; -1: read it directly."""
        step = self._give(i, index)
        return step if step < 0 or self.session.settle() else -1

    def _give(self, i: int, index: object) -> int:
        now = self._now
        if now is not None:
            known = self._publisher.reach(now, i)
            if known and now.reads(i, index):
                self._next = now.step(i) + 1
                return self._next - 1
            if not known and i < now.total:
                return -1  # the daemon is lost
            # Workers may still read steps given out before: cancel only the later ones.
            self._ahead.clear()
            self._publisher.cancel(self._next)
            now.total = i
            self._past, self._now = now, None
        return self._follow(i, index)

    def _follow(self, i: int, index: object) -> int:
        """Publish batch i as an unplanned step; returns the step, or -1."""
        indices = indices_of(index)
        found = None if indices is None else self._objects(indices)
        if indices is None or found is None or not len(found[0]):
            return -1
        step = self._publisher.blind(self._epoch, found[0])
        if step >= 0:
            self._next = step + 1
            self._followed.add(i, UnplannedBatch(step, found[0], len(indices)))
        return step

    def ids(self, i: int) -> NDArray[np.int32]:
        """Return the (k,) objects of batch i, for which `give` returned a step."""
        ids = self._followed.ids(i)
        told = self._now or self._past
        if ids is None:
            ids = _NONE if told is None else told.ids(i)
        return ids

    def done(self, i: int) -> None:
        """Record that all batches below i have arrived."""
        told = self._now or self._past
        step = self._followed.done(i)
        if told is not None:
            step = max(step, min(told.step(i), told.stop, self._next))
        self.session.done(step)
        self._publisher.pump()

    def left(self) -> None:
        """End the epoch, complete or not: no more of it is read."""
        if self._now is not None and self._next < self._now.stop:
            self._publisher.cancel(self._next)
            self._ahead.clear()
        self.session.done(self._next)

    def count(self, first: int, last: int, more: dict[str, int]) -> None:
        """Count delivered batches [first, last) of the epoch for `creel stats`.

        Batches for which `give` returned -1 are not counted here; the caller adds them, and other
        counters, in `more`.
        """
        words, told = self.session.words, self._now or self._past
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
            words.add(name, value)
        if not batches:
            return
        words.add("batches", batches)
        words.add("samples", samples)
        length = self.session.table.length
        words.add("nbytes", sum(int(length[part].clip(0).sum()) for part in ids))
        # How long a ready batch waits to be taken: ready steps times the time since the last count.
        words.add("lead_ns", max(words[READY] - step, 0) * (self._told_at - before))

    def close(self) -> None:
        """End the session."""
        self._publisher.stop()
        self.session.close()


def open_stream(binding: Binding, config: Config) -> BatchStream | None:
    """Open a session with this node's daemon for a dataset; None if there is no daemon."""
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
    return BatchStream(client, session, binding, config.daemon.name)


#: Seconds between a failure to reach or start a daemon and the next attempt.
_RETRY_S = 30.0
_not_before: dict[tuple[int, str], float] = {}
_clients: dict[tuple[int, str], Client | None] = {}
_starts: dict[tuple[int, str], DaemonStart] = {}
_lock = threading.Lock()


def client_of(config: Config, *, patron: int = 0) -> Client | None:
    """Return this process's connection to the daemon of that name, reconnecting after a loss.

    Returns None if there is no daemon, and for `_RETRY_S` after a failure.

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
    """Start a daemon early, when a loader is made, so that it is up at the first read.

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
            import zmq  # 15 ms, while the daemon comes up

            del zmq


def on_its_way(config: Config) -> bool:
    """Whether a daemon is starting that `client_of` would wait for; starts one if there is none.

    For callers that have other work to do meanwhile.
    """
    key = (os.getpid(), config.daemon.name)
    if time.monotonic() < _not_before.get(key, 0.0):
        return False
    expect_daemon(config)
    with _lock:
        start = _starts.get(key)
        return start is not None and not start.over


def foreseen(order: EpochOrder, epochs: int) -> EpochPlan | None:
    """`order.predict`, or None if it raises: a prediction must never cost a batch."""
    try:
        return order.predict(epochs)
    except Exception:  # noqa: BLE001  (the user's sampler code may run here)
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
