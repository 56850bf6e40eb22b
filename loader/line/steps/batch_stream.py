"""BatchStream: one iterator's session with the daemon, over many epochs.

It publishes the objects that each step will read, epoch by epoch and ahead of use, so that readers
find them in the arena. Any failure or wrong prediction here only costs speed: the same batches are
then read directly from the source.
"""

from __future__ import annotations

import logging
import operator
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.shared_words import READY
from creel.cache.storage.stores.retry import public
from creel.config import Config
from creel.errors import ConfigError, UnavailableError
from creel.loader.client.claim import DIRECT, Claim
from creel.loader.client.cluster.join import join_cluster
from creel.loader.client.cluster.ranks import job_name, rank_and_world
from creel.loader.client.connections import open_session, running_client
from creel.loader.client.session import SAMPLES, Session
from creel.loader.data.binding.bind import empty_binding
from creel.loader.data.reading.bad_samples import printable
from creel.loader.data.rehearsed import numbers_of
from creel.loader.line.steps.publish import PlanPublisher, PublishedEpoch

if TYPE_CHECKING:
    from creel.loader.data.binding.bind import Binding
    from creel.loader.line.order.epoch_order import EpochOrder
    from creel.loader.line.order.epoch_plan import EpochPlan

_log = logging.getLogger("creel.loader")

#: What a worker needs to join the trainer's session: daemon name, token, session id.
Ticket = tuple[str, str, int]


class BatchStream:
    """A session and its published plan. Used by one iterator at a time, over many epochs."""

    def __init__(self, session: Session, binding: Binding, name: str) -> None:
        self.session = session
        self.binding = binding
        #: With which workers join the session.
        self.ticket: Ticket = (name, session.token, session.id)
        self._dealt = -1  # last epoch whose dealing the cluster knows
        # Whether the daemon should know, and knows, all that an extended order may read.
        self._asked = self._informed = False
        # Weak: a cycle would keep the session's mappings until Python's cyclic collector runs.
        deal = weakref.WeakMethod(self._deal)
        self._publisher = PlanPublisher(
            session,
            binding.objects,
            lambda epoch: (method := deal()) and method(epoch),
            allowed=binding.allowed,
            thread_safe=binding.thread_safe,
        )
        self._now = PublishedEpoch(-1, None)
        self._order: EpochOrder | None = None  # of this epoch
        self._upcoming: list[PublishedEpoch] = []  # the epochs after this one, in order
        self._next = 0  # first step that was not given out
        self._claimed: deque[tuple[int, Claim]] = deque()  # (batch, claim) if not yet arrived
        self._counted_at = time.monotonic_ns()  # ns, when `count` was called last
        self._own_file = ""  # as the daemon knows it

    @property
    def alive(self) -> bool:
        """Whether the daemon still serves."""
        return self.session.alive

    def begin(self, order: EpochOrder, skip: int = 0) -> None:
        """Begin an epoch, `skip` batches after its start."""
        epoch, self._order = self._now.epoch + 1, order
        self._claimed.clear()
        plan = try_predict(order, 0)
        first = self._upcoming.pop(0) if self._upcoming else None
        if (
            first is not None
            and not skip
            and first.foresaw(plan)
            and self._publisher.begin_added(first, self._next)
        ):
            self._now = first
            self._begin(epoch)
            return
        self._cancel()  # a restarted iterator leaves published steps that it never read
        self.session.done(self._next)
        self._begin(epoch)
        self._now = PublishedEpoch(epoch, plan, skip)
        if plan is None:
            self._deal(self._now)
        self._publisher.begin(self._now)

    def _begin(self, epoch: int) -> None:
        """Begin an epoch at the daemon, which reads with this process's present keys."""
        with suppress(UnavailableError, ConfigError):  # it reads with the keys it has, or is lost
            self.session.client.renew(self.binding.manifest)
        self.session.begin(epoch)

    def _cancel(self) -> None:
        """Cancel all steps not given out; workers may still read the others."""
        self._upcoming.clear()
        self._publisher.cancel(self._next)

    def publish_upcoming(self, order: EpochOrder) -> None:
        """Publish the next epochs, up to the order's lookahead, if they can be predicted."""
        while self._now.planned and len(self._upcoming) < order.lookahead:
            k = len(self._upcoming) + 1
            plan = try_predict(order, k)
            if plan is None:
                return
            self._upcoming.append(PublishedEpoch(self._now.epoch + k, plan))
            self._publisher.add(self._upcoming[-1])

    def claim(self, i: int, index: object) -> Claim:
        """Claim the step of batch i, which the caller is about to read; DIRECT if there is none."""
        now = self._now
        claim = (now.claim_of(i, index) if now.planned else None) or self._published_now(i, index)
        if claim is None:
            return DIRECT
        self._next = claim.step + 1
        session = self.session
        if session.lost or (session.truncating and not session.settle()):
            return DIRECT
        self._claimed.append((i, claim))
        return claim

    def _published_now(self, i: int, index: object) -> Claim | None:
        """Publish batch i, or the plan up to it, and return its claim; None on failure."""
        now = self._now
        if self._publisher.passes_by(now, i, samples_in(index)):
            return None
        if now.planned:
            known = self._publisher.reach(now, i)
            claim = now.claim_of(i, index) if known else None
            if claim is not None:
                return claim
            if not known and i < now.total:
                return None  # the daemon is lost
            self._cancel()
            now.leave_plan(i)
            if self._order is not None:
                self._order.note_wrong_prediction()
        indices = samples_of(index)
        if indices is None:
            return None
        try:
            objects = self.binding.objects(indices)[0]
        except Exception:  # noqa: BLE001  user code may run here; the read reports its error
            _log.debug("the objects of a batch cannot be determined", exc_info=True)
            return None
        if not len(objects):
            return None
        step = self._publisher.publish_pulled(now, i, indices, objects)
        return None if step < 0 else Claim(step, objects)

    def done(self, i: int) -> None:
        """Record that all batches below i have arrived."""
        step, claimed = 0, self._claimed
        while claimed and claimed[0][0] < i:
            step = claimed.popleft()[1].step + 1
        if step:
            self.session.done(step)
        if self._publisher.epochs:
            self._publisher.pump()
        if self._dealt < self._now.epoch and self.session.client.cluster and not self._untold:
            self._deal(self._now)  # published before the nodes had joined

    def pump(self) -> None:
        """Publish what may be fetched by now."""
        self._publisher.pump()

    def _deal(self, epoch: PublishedEpoch) -> None:
        """Tell the daemon how an epoch is dealt to the job's ranks, once there is a cluster.

        Called before the epoch's plan is published, so that objects that peers will have are not
        read from the source. If the nodes cannot all know the order, they ask each other without a
        plan (`follow`).
        """
        plan = epoch.plan
        if self._untold and not self._tell_samples(at_once=plan is None):
            return
        if not self.session.client.cluster or epoch.epoch <= self._dealt:
            return
        if plan is not None and not plan.opened:
            return
        if self._dealt < self._now.epoch < epoch.epoch:
            self._deal(self._now)  # the nodes have joined since it was published
        self._dealt = epoch.epoch
        try:
            deal = None if plan is None else plan.deal
            order = None if deal is None else self.binding.in_objects(deal)
            if order is None:
                self.session.follow()
            else:
                self.session.deal(epoch.epoch, order)
        except Exception:  # noqa: BLE001  the user's `objects` may run here; a read reports it
            _log.debug("the daemon was not told how an epoch is dealt to the ranks", exc_info=True)

    @property
    def _untold(self) -> bool:
        """Whether the daemon does not know yet all that an extended order may read."""
        return self._order is not None and self._order.extended and not self._informed

    def _tell_samples(self, *, at_once: bool) -> bool:
        """Tell the daemon all that the job may read in later epochs, so that all else leaves first.

        Returns False at the first call if there are many samples: the planner thread makes the next
        one, with the second piece of the plan (14 million take 2 s). `at_once`: there is no plan.
        """
        wait, self._asked = not (self._asked or at_once), True
        try:
            samples = numbers_of(self.binding.dataset)
            if wait and samples > SAMPLES:
                return False
            self._informed = True
            object_of = self.binding.of_samples(samples)
            if object_of is not None:
                self.session.tell_samples(object_of, rehearsed=True)
        except Exception:  # noqa: BLE001  the user's code may run here; a read reports its errors
            _log.debug("the objects of all samples cannot be determined", exc_info=True)
        return True

    @property
    def joining(self) -> bool:
        """Whether the nodes of the job are about to join and share their memories."""
        return time.monotonic() < self.session.client.joining_until

    def skip(self) -> None:
        """Read nothing of the epoch that begins, nor of what was published of it."""
        self._cancel()
        self.session.done(self._next)

    def leave(self) -> None:
        """End the epoch, complete or not: no more of it is read."""
        now = self._now
        if now.planned and not (now.complete and now.step(now.total) <= self._next):
            self._cancel()
        self.session.done(self._next)

    def count(self, first: int, last: int, more: dict[str, int], workers: int) -> None:
        """Count delivered batches [first, last) of the epoch for `creel stats`.

        Batches without a claim (DIRECT) are not counted here; the caller adds them to
        `more`, as other counters. `workers`: how many make batches at the moment.
        """
        words = self.session.words
        words.set("workers", workers)
        before, self._counted_at = self._counted_at, time.monotonic_ns()
        pieces = self._now.take(first, last)
        for name, value in more.items():
            words.add(name, value)
        if not pieces:
            return
        words.add("batches", sum(len(piece.ends) for piece in pieces))
        words.add("samples", sum(len(piece.indices) for piece in pieces))
        words.add("nbytes", sum(self.session.nbytes(piece.objects) for piece in pieces))
        # How long a ready batch waits to be taken: ready steps times the time since the last count.
        step = pieces[-1].step + len(pieces[-1].ends)
        words.add("lead_ns", max(words[READY] - step, 0) * (self._counted_at - before))

    def report_bad(self, rows: Sequence[tuple[int, str, str]]) -> None:
        """Report unreadable samples to the daemon: (number, address, reason) of each."""
        self._tell("bad_samples", rows=rows)

    def report_own_file(self, path: str, remedy: str) -> None:
        """Tell the daemon of a file that the dataset reads itself, once (`creel stats --why`)."""
        if not path or path == self._own_file:
            return
        self._own_file = path
        self._tell("own_file", path=path, remedy=remedy)

    def absent(self, i: int) -> str:
        """Return the address of an object of claimed batch i that is not there; "" if all are."""
        session = self.session
        claim = next((claim for batch, claim in self._claimed.copy() if batch == i), DIRECT)
        if claim.step < 0 or not session.alive or session.ready(claim.step):
            return ""
        absent = claim.ids[session.table.offset[claim.ids] == NOWHERE]
        if not len(absent):
            return ""
        return printable(public(self.binding.manifest.location(int(absent[0]))[0]))

    def _tell(self, command: str, **args: Any) -> None:
        """Have the daemon note something of this session; it is no loss if it does not."""
        try:
            self.session.client.ask(command, timeout_s=1.0, session=self.session.id, **args)
        except (ConfigError, UnavailableError):
            _log.debug("the daemon did not note %s", command, exc_info=True)

    def close(self) -> None:
        self._publisher.cancel()
        self.session.close()


def open_batch_stream(
    binding: Binding, config: Config, origins: Mapping[str, str]
) -> BatchStream | None:
    """Open a session with this node's daemon for a dataset; None if there is no daemon."""
    rank, world = rank_and_world()
    recheck = config.loader.recheck
    session = open_session(
        binding.manifest,
        config,
        origins,
        job_name(),
        rank,
        world,
        recheck=recheck,
        decoded=binding.kept_objects(),
    )
    if session is None:
        return None
    if config.loader.cluster:
        join_cluster(session.client, config.cluster, rank, world)
    return BatchStream(session, binding, config.daemon.name)


def open_counting_stream(config: Config) -> BatchStream | None:
    """Open a session that only counts, for a dataset without objects, if a daemon runs already."""
    client = running_client(config)
    if client is None:
        return None
    (rank, world), binding = rank_and_world(), empty_binding()
    try:
        session = client.open_manifest(binding.manifest, job_name(), rank, world, recheck="never")
    except (UnavailableError, OSError):
        return None
    return BatchStream(session, binding, config.daemon.name)


def try_predict(order: EpochOrder, epochs: int) -> EpochPlan | None:
    """Return `order.predict`, or None if it raises: a prediction must never cost a batch."""
    try:
        return order.predict(epochs)
    except Exception:  # noqa: BLE001  the user's sampler code may run here
        _log.debug("an epoch cannot be predicted", exc_info=True)
        return None


def samples_of(pulled: object) -> NDArray[np.int64] | None:
    """Return the (n,) samples of a sampler's item: an index or a flat group of them; else None."""
    try:
        numbers = np.atleast_1d(np.asarray(pulled))
    except Exception:  # noqa: BLE001  numpy raises anything if it cannot convert it
        return None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        return None
    numbers = numbers.astype(np.int64)
    return None if numbers.min() < 0 else numbers


def samples_in(pulled: object) -> int:
    """Return the number of samples in a batch of any type; 1 if it has no length."""
    try:
        return operator.length_hint(pulled, 1)
    except Exception:  # noqa: BLE001  user code may run here
        return 1
