"""Sessions of a node: opened, planned, waited for and closed, as their clients ask."""

from __future__ import annotations

import fcntl
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import F_GET_SEALS, F_SEAL_SHRINK, mapped
from creel.cache.memory.shared_words import KNOWN, OBJECT_NS
from creel.daemon.core import events
from creel.daemon.core.readers.twin import Twin
from creel.daemon.reporting.runs import Runs
from creel.daemon.service import stats
from creel.daemon.service.cluster_service import ClusterService
from creel.daemon.service.core_shell import CoreShell, Loop
from creel.daemon.service.datasets import Datasets
from creel.daemon.service.registry import Registry, SessionRecord
from creel.daemon.service.storage.fetcher import Fetcher
from creel.errors import UnavailableError
from creel.messages import Close, Deal, DealtSamples, Extend, Follow, Open, Ready, Truncate
from creel.policies.cluster.job_order import JobOrder, JobReplays
from creel.policies.rehearsal.replay_passes import Passes

log = logging.getLogger("creel.node")


class Sessions:
    """Gives the core what trainers plan and have reached, and tells them what is ready.

    Args:
        registry: has the sessions, and their datasets.
        shell: has the core.
        count: returns the answer of `stats`.
        returns: whether another daemon follows this one, and takes its memory.
    """

    def __init__(
        self,
        registry: Registry,
        shell: CoreShell,
        datasets: Datasets,
        clusters: ClusterService,
        fetcher: Fetcher,
        loop: Loop,
        ranks: stats.Ranks,
        *,
        count: Callable[[], dict[str, Any]],
        returns: bool,
    ) -> None:
        self.runs = Runs()
        self._registry, self._ranks, self._datasets = registry, ranks, datasets
        self._shell, self._clusters, self._fetcher = shell, clusters, fetcher
        self._loop, self._count, self._returns = loop, count, returns

    def open(self, token: str, request: Open, fds: Sequence[int] = ()) -> SessionRecord:
        """Open a session; `fds`: descriptors that came with the request.

        Raises:
            UnavailableError: the daemon is draining, memory is short, or from `Registry.open`.
            MalformedError: from `Registry.open`.
        """
        self._shell.check_serving()
        dataset = self._registry.datasets.get(request.dataset)
        if dataset is not None:
            self._datasets.quota.check(
                4 * len(dataset.manifest), f"the plans of {len(dataset.manifest)} objects"
            )
        alone = not self._registry.sessions
        session = self._registry.open(token, request)
        twin = twin_of(request, fds, len(session.dataset.manifest))
        if not self._shell.handle(events.SessionOpened(session.id, request, twin)):
            raise UnavailableError("this daemon cannot open another session")
        owner = request.job or self._loop.pids().get(token, 0)
        self.runs.opened(owner, time.monotonic(), self._count, alone=alone)
        session.words[OBJECT_NS] = self._fetcher.object_ns(request.dataset)
        return session

    def close(self, session: SessionRecord) -> None:
        """Close a session; the core unpins its objects."""
        self._ranks.add_closed(session)
        # While draining, this daemon writes to the arena no more; one that it is kept for will.
        if self._shell.state != "draining" or self._returns:
            session.unready(0)
        self._registry.remove(session)
        self._shell.handle(Close(session.id))
        self._datasets.grow()

    def client_left(self, token: str) -> None:
        """Close the sessions of a client that has disconnected."""
        for session in self._registry.sessions_of(token):
            self.close(session)

    def extended(self, session: SessionRecord, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """Append to a session's plan.

        If memory is short for the next uses of another epoch, the session becomes unplanned. If it
        is short for the plan itself, the session ends and its client reads directly.
        """
        quota = self._datasets.quota
        objects, ends = arrays
        nbytes = objects.nbytes + ends.nbytes
        unplanned = message.unplanned
        try:
            if message.epoch != session.epoch and not unplanned:
                unplanned = not quota.fits(nbytes + 5 * len(session.dataset.manifest))
            quota.check(nbytes, f"{len(objects)} reads to come")
        except UnavailableError as e:
            pid = self._loop.pids().get(session.token, 0)
            log.warning("session %d of process %d ends: %s", session.id, pid, e)
            self.close(session)
            return
        if not unplanned:
            session.epoch = message.epoch
        if self._shell.handle(
            events.PlanExtended(session.id, message.epoch, message.step, objects, ends, unplanned)
        ):
            session.words[KNOWN] = self._shell.core.planned(session.id)[1]
            self.waiting(session)

    def sampled(
        self, session: SessionRecord, message: DealtSamples, objects: NDArray[np.int32]
    ) -> None:
        """Take which object each of the next samples is; without room for all, none is known."""
        if message.first == 0:
            session.remove_samples()
            if not self._datasets.quota.fits(4 * message.samples):
                log.info("session %d: %d samples are too many", session.id, message.samples)
                return
        session.learn(message.first, message.samples, objects)
        self._registry.share_samples(session)
        if message.rehearsed and session.object_of is not None:
            self._shell.handle(events.SamplesTold(session.id, session.object_of))
            session.rehearses, session.dataset.drained = True, False
            self._datasets.grow()

    def dealt(self, session: SessionRecord, message: Deal | Follow) -> None:
        """Tell the core how an epoch is dealt to the ranks of a job, or that this is not known."""
        view = self._clusters.view(message.cluster)
        if view is None:
            return
        if isinstance(message, Follow) or _lacks(session, message, len(view.nodes)):
            self._shell.handle(events.EpochFollowed(session.id, view))
            return
        object_of = session.object_of if message.object_of else None
        order = JobOrder(
            message.samples,
            message.world,
            message.each,
            message.batch,
            message.seed,
            message.remapped,
            object_of,
            _replays(message),
        )
        if order.sound() and (
            message.object_of or message.samples == len(session.dataset.manifest)
        ):
            dealt = events.EpochDealt(session.id, message.epoch, order, view)
            self._shell.handle(dealt if order.quick else events.EpochFollowed(session.id, view))

    def truncated(self, session: SessionRecord, message: Truncate) -> None:
        session.truncate(message.step)
        if self._shell.handle(message):
            session.acknowledge(self._shell.core.planned(session.id)[1])

    def waiting(self, session: SessionRecord) -> None:
        """Answer waits that are over, and tell the core of the others."""
        for client, call, step in session.over():
            self._loop.send(client, Ready(call, session.id, step))
        self._progressed(session)

    def poll_words(self) -> bool:
        """Give the core the trainers' progress; return whether there was any."""
        moved = [self._progressed(s) for s in list(self._registry.sessions.values())]
        return any(moved)

    def _progressed(self, session: SessionRecord) -> bool:
        """Give the core a trainer's progress; return whether there was any."""
        claimed = session.claimed()
        if self._shell.state == "draining" or not self._shell.core.would_move(session.id, *claimed):
            return False
        self._shell.handle(events.Progressed(session.id, *claimed), settles=False)
        return True

    def set_ready(self, action: events.SetReady) -> None:
        session = self._registry.sessions.get(action.session)
        if session is None:
            return
        session.words[OBJECT_NS] = self._fetcher.object_ns(session.dataset.key)
        for client, call, step in session.set_ready(action.ready, action.failed, action.early):
            self._loop.send(client, Ready(call, session.id, step))


def lose(registry: Registry, ranks: stats.Ranks, number: int) -> None:
    """End a session without the core: its client reads directly. 0, or one that is gone: none."""
    session = registry.sessions.get(number)
    if session is not None:
        ranks.add_closed(session)
        session.unready(0)
        registry.remove(session)


def twin_of(request: Open, fds: Sequence[int], objects: int) -> Twin | None:
    """Map what a client keeps decoded of a dataset of `objects`; None if that cannot be used.

    It must not be able to shrink, as a read beyond its end would kill this process.
    """
    parts = []
    for part, fd in zip(request.decoded, fds, strict=False):
        if not (0 <= part.first < part.first + part.objects <= objects and part.at >= 0):
            return None
        try:
            if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
                return None
            memory = mapped(fd, 8 * part.objects, mmap.PROT_READ, offset=part.at)
        except (OSError, ValueError):  # no memfd, or no addresses left
            return None
        parts.append((part.first, np.frombuffer(memory, np.int64)))
    return Twin(parts) if parts else None


def _replays(message: Deal) -> JobReplays | None:
    replays = message.replays
    if replays is None:
        return None
    return JobReplays(
        Passes(replays.kept, replays.each, message.world, replays.seed), replays.first_step
    )


def _lacks(session: SessionRecord, message: Deal, world: int) -> bool:
    """Return whether it is not known where each rank is, or which object each sample is."""
    return message.world != world or (message.object_of and session.object_of is None)
