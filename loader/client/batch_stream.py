"""BatchStream: one iterator's session with the daemon, over many epochs.

It publishes which objects each step will read, epoch by epoch and ahead of use, so that readers
find them in the arena. Any failure or wrong prediction here only costs speed: the same batches are
then read directly from the source.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.shared_words import READY
from creel.config import Config
from creel.errors import UnavailableError
from creel.loader.client.client import Client
from creel.loader.client.cluster import join_cluster
from creel.loader.client.connections import client_of
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
        self._publisher = PlanPublisher(session, binding.objects, thread_safe=binding.thread_safe)
        self._current: PublishedEpoch | None = None
        self._upcoming: list[PublishedEpoch] = []  # the epochs after this one, in order
        self._mispredicted: PublishedEpoch | None = (
            None  # this epoch's plan, if it turned out wrong
        )
        self._unplanned = UnplannedBatches()  # unplanned batches of this epoch
        self._counted_at = time.monotonic_ns()
        self._next = 0  # all steps below were given out
        self._dealt = -1  # epochs up to here: the cluster knows how they are dealt

    @property
    def alive(self) -> bool:
        """Whether the daemon still serves."""
        return self.session.alive

    @property
    def mispredicted(self) -> bool:
        """Whether the current epoch differed from its prediction."""
        return self._mispredicted is not None

    def begin(self, order: EpochOrder, skip: int = 0) -> None:
        """Begin an epoch, `skip` batches after its start."""
        self._epoch += 1
        self._current, self._mispredicted, self._unplanned = None, None, UnplannedBatches()
        self._upcoming = [
            epoch_plan
            for epoch_plan in self._upcoming
            if not self._publisher.drop_unneeded(epoch_plan)
        ]
        first = self._upcoming.pop(0) if self._upcoming else None
        plan = try_predict(order, 0)
        if (
            first is not None
            and plan is not None
            and not skip
            and first.plan.opened
            and plan.same(first.plan)
            and self._publisher.begin_added(first, self._next)
        ):
            first.open()
            self._current = first
            self.session.begin(self._epoch)
            return
        # An iterator that restarts leaves published steps that it never read.
        self._publisher.cancel(self._next)
        self._upcoming.clear()
        self.session.done(self._next)
        self.session.begin(self._epoch)
        if plan is not None:
            self._current = self._publisher.begin(plan, self._epoch, skip)

    def publish_upcoming(self, order: EpochOrder) -> None:
        """Publish the epochs after this one, if they can be predicted.

        One is enough if every epoch reads everything once (law L1). If it reads some samples more
        often than others, the best retention needs two (law L3); whether it does is known once all
        of this epoch is published.
        """
        now = self._current
        while now is not None and len(self._upcoming) < 2:
            second = len(self._upcoming) == 1
            if second and not order.known and not now.repeats:
                return  # predicting would run the user's sampler
            plan = try_predict(order, len(self._upcoming) + 1)
            if plan is None:
                return
            epoch = self._epoch + len(self._upcoming) + 1
            self._upcoming.append(self._publisher.add(plan, epoch, now if second else None))

    def _objects(self, indices: NDArray[np.integer]) -> tuple[Ids, NDArray[np.int64]] | None:
        """`Binding.objects`, or None if it raises: the read of wrong indices reports the error."""
        try:
            return self.binding.objects(indices.astype(np.int64))
        except Exception:  # noqa: BLE001  (the user's own `objects` may run here)
            _log.debug("the objects of a batch cannot be determined", exc_info=True)
            return None

    def give(self, i: int, index: object) -> int:
        """Return the step of batch i, which is about to be read; -1: read it directly."""
        step = self._give(i, index)
        return step if step < 0 or self.session.settle() else -1

    def _give(self, i: int, index: object) -> int:
        now = self._current
        if now is not None:
            known = self._publisher.reach(now, i)
            if known and now.reads(i, index):
                self._next = now.step(i) + 1
                return self._next - 1
            if not known and i < now.total:
                return -1  # the daemon is lost
            # Workers may still read steps given out before: cancel only the later ones.
            self._upcoming.clear()
            self._publisher.cancel(self._next)
            now.total = i
            self._mispredicted, self._current = now, None
        return self._give_unplanned(i, index)

    def _give_unplanned(self, i: int, index: object) -> int:
        """Publish batch i as an unplanned step; returns the step, or -1."""
        indices = indices_of(index)
        found = None if indices is None else self._objects(indices)
        if indices is None or found is None or not len(found[0]):
            return -1
        step = self._publisher.publish_unplanned(self._epoch, found[0])
        if step >= 0:
            self._next = step + 1
            self._unplanned.add(i, UnplannedBatch(step, found[0], len(indices)))
        return step

    def ids(self, i: int) -> NDArray[np.int32]:
        """Return the (k,) objects of batch i, for which `give` returned a step."""
        ids = self._unplanned.ids(i)
        epoch_plan = self._current or self._mispredicted
        if ids is None:
            ids = _NONE if epoch_plan is None else epoch_plan.ids(i)
        return ids

    def done(self, i: int) -> None:
        """Record that all batches below i have arrived."""
        epoch_plan = self._current or self._mispredicted
        step = self._unplanned.done(i)
        if epoch_plan is not None:
            step = max(step, min(epoch_plan.step(i), epoch_plan.stop, self._next))
        self.session.done(step)
        self._publisher.pump()
        if self.client.cluster:
            self._deal()

    def _deal(self) -> None:
        """Tell the daemon how this epoch and the next ones are dealt to the job's ranks."""
        known = [e for e in (self._current, *self._upcoming) if e is not None]
        for epoch in known:
            if epoch.epoch <= self._dealt or not epoch.plan.opened:
                continue
            self._dealt = epoch.epoch
            deal = epoch.plan.deal
            if deal is not None and self.binding.one_to_one(deal.samples):
                self.session.deal(epoch.epoch, deal)

    def leave(self) -> None:
        """End the epoch, complete or not: no more of it is read."""
        if self._current is not None and self._next < self._current.stop:
            self._publisher.cancel(self._next)
            self._upcoming.clear()
        self.session.done(self._next)

    def count(self, first: int, last: int, more: dict[str, int]) -> None:
        """Count delivered batches [first, last) of the epoch for `creel stats`.

        Batches for which `give` returned -1 are not counted here; the caller adds them, and other
        counters, in `more`.
        """
        words, epoch_plan = self.session.words, self._current or self._mispredicted
        before, self._counted_at = self._counted_at, time.monotonic_ns()
        given = self._unplanned.take(first, last)
        ids = [g.ids for g in given]
        batches, samples = len(given), sum(g.samples for g in given)
        step = given[-1].step + 1 if given else 0
        last = min(last, 0 if epoch_plan is None else min(epoch_plan.known, epoch_plan.total))
        if epoch_plan is not None and last > first:
            for k, objects in epoch_plan.take(first, last):
                samples += k
                ids.append(objects)
            batches += last - first
            step = max(step, epoch_plan.step(last))
        for name, value in more.items():
            words.add(name, value)
        if not batches:
            return
        words.add("batches", batches)
        words.add("samples", samples)
        length = self.session.table.length
        words.add("nbytes", sum(int(length[part].clip(0).sum()) for part in ids))
        # How long a ready batch waits to be taken: ready steps times the time since the last count.
        words.add("lead_ns", max(words[READY] - step, 0) * (self._counted_at - before))

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
    if config.loader.cluster:
        join_cluster(client, rank, world)
    return BatchStream(client, session, binding, config.daemon.name)


def try_predict(order: EpochOrder, epochs: int) -> EpochPlan | None:
    """`order.predict`, or None if it raises: a prediction must never cost a batch."""
    try:
        return order.predict(epochs)
    except Exception:  # noqa: BLE001  (the user's sampler code may run here)
        _log.debug("an epoch cannot be predicted", exc_info=True)
        return None
