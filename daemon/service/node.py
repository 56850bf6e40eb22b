"""The node: connects registry, core, arena and fetch threads; called by both sockets.

Runs only on the loop thread; other threads deliver their results through `call_soon`. Every event
goes through `handle_event`, which executes the core's actions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.arena import Arena
from creel.cache.memory.memfd import Descriptor
from creel.cache.memory.pools.allocator import Allocator
from creel.cache.memory.shared_words import KNOWN, OBJECT_NS
from creel.config import Config, memory_budget, memory_reserve
from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.reporting.bad_samples import BadSamples
from creel.daemon.reporting.runs import Runs
from creel.daemon.service import stats
from creel.daemon.service.background import BackgroundThread
from creel.daemon.service.cluster_service import ClusterService
from creel.daemon.service.datasets import Datasets
from creel.daemon.service.kept_memory import KeptMemory, packed, write_index
from creel.daemon.service.memory_guard import MemoryGuard
from creel.daemon.service.registry import Registry, SessionRecord
from creel.daemon.service.storage.disk import Disk, DiskSource
from creel.daemon.service.storage.fetcher import Fetcher
from creel.errors import UnavailableError
from creel.messages import (
    PROTOCOL,
    Deal,
    DealtSamples,
    Extend,
    Follow,
    Hosting,
    Joined,
    JointJournal,
    Open,
    Opened,
    Ready,
    Refused,
    Registered,
    Welcome,
)
from creel.policies.cluster.job_order import JobOrder, JobReplays
from creel.policies.memory import reserve
from creel.policies.prefetch import Window
from creel.policies.rehearsal.passes import Passes
from creel.system import limits
from creel.version import VERSION

log = logging.getLogger("creel.node")

BEAT_S = 0.08  # clients give up on a heartbeat older than 2 s
_ENDING_S = 2.0  # for reads under way when the daemon ends; with one that hangs nothing is kept


@dataclass(frozen=True)
class Answer:
    """An answer over the control socket: a message, and descriptors that the sender keeps open."""

    message: Welcome | Registered | Opened | Hosting | Joined | JointJournal | Refused
    fds: tuple[int, ...] = ()


class Node:
    """Handles the requests of both sockets; refuses by UnavailableError or ConfigError.

    Args:
        config: all settings.
        call_soon: runs a function on the loop thread, soon; may be called from any thread.
        send: sends (client, message) over the request socket.
        embedded: whether this daemon ends with its last client.
        kept: what the last daemon of this service has left.
    """

    def __init__(
        self,
        config: Config,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        send: Callable[[bytes, Any], None],
        embedded: bool,
        kept: KeptMemory | None = None,
    ) -> None:
        memory = limits.memory()
        self.config = config
        self.effective = config  # settings in effect: most changes need a restart
        self.embedded = embedded
        self.version = VERSION
        self.state = "serving"
        self.linger_s = 0.0  # how long it stays at least, embedded, for what was loaded ahead
        self.started = time.monotonic()
        self.bad_samples = BadSamples()
        self.bugs = 0
        self._unsettled = False  # whether the core has not acted on some event yet
        self.stop: Callable[[bool, str], None] = lambda now, why: None  # noqa: ARG005  set by the loop
        self.clients: Callable[[], int] = lambda: 0
        self.pids: Callable[[], dict[str, int]] = dict
        self.request_address = ""
        self.sound = True  # whether the core's tables are consistent with the arena
        self.returns = False  # set by the loop: whether a service manager starts it again
        self._total = memory.total
        if kept:
            self.arena = Arena(kept.arena, kept.space.nbytes)
        else:
            self.arena = Arena.create(
                memory_budget(config.memory, total=memory.total, available=memory.available)
            )
        self.registry = Registry(
            max_datasets=config.daemon.max_datasets, max_sessions=config.daemon.max_sessions
        )
        self.ranks = stats.Ranks()
        self.runs = Runs()
        window = Window.of(config.window, config.fetch)
        self.core = Core(kept.space if kept else Allocator(self.arena.nbytes), window)
        kept_free = memory_reserve(config.memory, total=memory.total, auto=reserve(memory.total))
        self.memory_guard = MemoryGuard(self.core, self.handle_event, kept_free)
        self.disk = Disk(config.disk, self.arena, self._hand_in)
        self.fetcher = Fetcher(
            self.arena,
            lambda event: call_soon(lambda: self._fetched(event)),
            self._other_source,
            threads=config.fetch.threads,
        )
        self.clusters = ClusterService(
            self.arena,
            config.cluster,
            self.core,
            handle=self.handle_event,
            call_soon=call_soon,
            unreachable=self.fetcher.remove_peer,
        )
        self.datasets = Datasets(
            self.arena.nbytes,
            self.registry,
            self.core,
            self.disk,
            self.fetcher,
            config=lambda: self.config,
            handle=self.handle_event,
            call_soon=call_soon,
            check_serving=self._check_serving,
            pids=lambda: self.pids(),  # noqa: PLW0108  set by the loop
        )
        self.quota = self.datasets.quota
        self._beaten = self.started
        self._send = send
        self._call_soon = call_soon
        self._planner = BackgroundThread("creel-plan")
        self._do: dict[type[events.Action], Callable[[Any], None]] = {
            events.Publish: self._publish,
            events.ReleaseMemory: lambda action: self.arena.release(action.ranges),
            events.SetReady: self._set_ready,
            events.FetchObjects: self.fetcher.submit,
            events.CancelFetches: self.fetcher.cancel,
            events.CheckVersions: self.fetcher.check,
            events.ServeObjects: self.clusters.serve,
            events.SpillObjects: self.disk.spill,
            events.DropFromDisk: self.disk.drop,
            events.SharePlan: self.clusters.share_plan,
            events.AskPlan: self.clusters.ask_plan,
            events.PlanRetention: lambda action: self._planner.put(partial(self._plan, action)),
        }
        for key, (manifest, objects) in kept.datasets.items() if kept else ():
            self.datasets.restore(manifest, key, objects)

    # --- events and actions -------------------------------------------------------------------

    def handle_event(self, event: events.Event, *, settles: bool = True) -> bool:
        """Handle an event and execute the actions; return False if that failed.

        Does nothing while draining: no byte may move then, as clients that disconnect may keep
        their READY, and the core's tables would not match the shared ones.

        settles: False for an event that comes several times in a turn of the loop; the core then
            acts on it in `settle`, at the end of the turn.
        """
        decide = partial(self.core.handle, event, settles=settles)
        done = self._execute(decide, type(event).__name__, getattr(event, "session", 0))
        self._unsettled = not (done and settles)
        return done

    def settle(self) -> None:
        """Let the core act on the events of this turn that it has not acted on."""
        if self._unsettled:
            self._unsettled = False
            self._execute(self.core.settle, "settling", 0)

    def _execute(
        self, decide: Callable[[float], list[events.Action]], what: str, session: int
    ) -> bool:
        """Execute what the core decides, of a session or of none (0); return whether it worked.

        Writes the heartbeat first: with plans for millions of objects an event may take a second,
        and a turn of the loop handles many events.
        """
        if self.state == "draining":
            return True
        now = time.monotonic()
        self.beat(now)
        try:
            actions = decide(now)
        except Exception:
            log.exception("the core failed at %s", what)
            self._recover(session)
            return False
        try:
            for action in actions:
                self._do[type(action)](action)
        except Exception:
            log.exception("an action of the core after %s failed", what)
            self._give_up()
            return False
        return True

    def _recover(self, number: int) -> None:
        """End the session whose event made the core fail; the other sessions continue.

        The failure is a bug of ours, or a lack of memory. If the core remains inconsistent, the
        daemon ends: its clients read directly, and the next daemon starts with an empty arena.
        """
        self.bugs += 1
        session = self.registry.sessions.get(number)
        if session is not None:
            self.ranks.add_closed(session)
            session.unready(0)
            self.registry.remove(session)
        try:
            for action in self.core.recover(number):
                self._do[type(action)](action)
            self.core.check()
        except Exception:
            log.exception("the core cannot recover")
            self._give_up()

    def _give_up(self) -> None:
        log.error("this daemon ends: its state may be inconsistent")
        self.sound = False
        self.stop(True, "a bug")

    def _publish(self, action: events.Publish) -> None:
        self.registry.datasets[action.dataset].publish(action.ids, action.offset)

    def _plan(self, action: events.PlanRetention) -> None:
        """Plan retention, in the planner's thread; after a failure the core continues as before."""
        try:
            planned = events.RetentionPlanned(
                action.dataset, action.boundary, action.boundary.plan()
            )
        except Exception:
            log.exception("retention could not be planned for %s", action.dataset)
        else:
            self._hand_in(planned)

    def _set_ready(self, action: events.SetReady) -> None:
        session = self.registry.sessions.get(action.session)
        if session is None:
            return
        session.words[OBJECT_NS] = self.fetcher.object_ns(session.dataset.key)
        for who, call, step in session.set_ready(action.ready, action.failed, action.early):
            self._send(who, Ready(call, session.id, step))

    def _fetched(self, event: events.Fetched | events.Checked) -> None:
        with self.fetcher.landing(event):
            self.handle_event(event, settles=False)

    def _hand_in(self, event: events.Event) -> None:
        """Handle an event soon, on the loop thread; may be called from any thread."""

        def handle() -> None:
            self.handle_event(event)

        self._call_soon(handle)

    def _other_source(self, origin: int, dataset: str) -> PeerSource | DiskSource:
        if origin == events.DISK:
            return self.disk.source(dataset)
        return self.clusters.source(origin, dataset)

    def beat(self, now: float) -> None:
        """Write the heartbeat of all sessions if it is due."""
        if now - self._beaten >= BEAT_S / 2:
            self._beaten = now
            self.registry.beat()

    def poll_words(self) -> bool:
        """Give the core the trainers' progress; return whether there was any."""
        moved = [self._progressed(s) for s in list(self.registry.sessions.values())]
        return any(moved)

    def _progressed(self, session: SessionRecord) -> bool:
        """Give the core a trainer's progress; return whether there was any."""
        claimed = session.claimed()
        if self.state == "draining" or not self.core.would_move(session.id, *claimed):
            return False
        self.handle_event(events.Progressed(session.id, *claimed), settles=False)
        return True

    def tick(self) -> None:
        self.fetcher.tick()
        self.handle_event(events.Tick())
        self.datasets.grow()

    # --- datasets and sessions ----------------------------------------------------------------

    def welcome(self, token: str) -> tuple[Welcome, int]:
        """Return the greeting and the arena's descriptor."""
        where = self.request_address, self.arena.nbytes, os.getpid()
        return Welcome(PROTOCOL, token, *where, self.returns), self.arena.fd

    def keep(self) -> Descriptor | None:
        """Write the index of what is in the arena, for the next daemon; None if it cannot be used.

        Nothing is written to the arena any more. Sessions lose their ready steps, as the next
        daemon will move bytes: a reader that copies meanwhile notices, and reads directly. Those
        closed while draining have lost them already (`close_session`).
        """
        self.fetcher.close()
        self.fetcher.join(_ENDING_S)
        for session in self.registry.sessions.values():
            session.unready(0)
        if not self.sound:
            return None
        if not self.fetcher.ended:
            log.info("the memory is not left to the next daemon: a read that hangs may write to it")
            return None
        datasets = self.registry.datasets
        kept = self.core.kept()
        try:
            entries = [packed(k, datasets[k].manifest.to_arrow(), kept[k]) for k in kept]
            memory = self.effective.memory  # after `reload` the settings may say otherwise
            return write_index(memory, self._total, self.arena.nbytes, entries)
        except (OSError, ValueError, MemoryError):
            log.warning("the memory cannot be left to the next daemon", exc_info=True)
            return None

    def open(self, token: str, request: Open) -> SessionRecord:
        """Open a session.

        Raises:
            UnavailableError: the daemon is draining, memory is short, or from `Registry.open`.
            MalformedError: from `Registry.open`.
        """
        self._check_serving()
        dataset = self.registry.datasets.get(request.dataset)
        if dataset is not None:
            self.quota.check(
                4 * len(dataset.manifest), f"the plans of {len(dataset.manifest)} objects"
            )
        alone = not self.registry.sessions
        session = self.registry.open(token, request)
        fields = (session.id, request.dataset, request.job, request.rank, request.world)
        if not self.handle_event(events.SessionOpened(*fields, request.recheck)):
            raise UnavailableError("this daemon cannot open another session")
        who = request.job or self.pids().get(token, 0)
        self.runs.opened(who, time.monotonic(), lambda: stats.stats(self), alone=alone)
        session.words[OBJECT_NS] = self.fetcher.object_ns(request.dataset)
        return session

    def _check_serving(self) -> None:
        if self.state == "draining":
            raise UnavailableError("this daemon is stopping: connect again to reach the next one")

    def close_session(self, session: SessionRecord) -> None:
        """Close a session; the core unpins its objects."""
        self.ranks.add_closed(session)
        # While draining, this daemon writes to the arena no more; one that it is kept for will.
        if self.state != "draining" or self.returns:
            session.unready(0)
        self.registry.remove(session)
        self.handle_event(events.SessionClosed(session.id))
        self.datasets.grow()

    def client_left(self, token: str) -> None:
        """Close the sessions of a client that has disconnected, and drop its claims."""
        for session in self.registry.sessions_of(token):
            self.close_session(session)
        self.registry.client_left(token)
        self.clusters.client_left(token)

    def extended(self, session: SessionRecord, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """Append to a session's plan.

        If memory is short for the next uses of another epoch, the session becomes unplanned. If it
        is short for the plan itself, the session ends and its client reads directly.
        """
        objects, ends = arrays
        nbytes = objects.nbytes + ends.nbytes
        unplanned = message.unplanned
        try:
            if message.epoch != session.epoch and not unplanned:
                unplanned = not self.quota.fits(nbytes + 5 * len(session.dataset.manifest))
            self.quota.check(nbytes, f"{len(objects)} reads to come")
        except UnavailableError as e:
            pid = self.pids().get(session.token, 0)
            log.warning("session %d of process %d ends: %s", session.id, pid, e)
            self.close_session(session)
            return
        if not unplanned:
            session.epoch = message.epoch
        fields = (session.id, message.epoch, message.step, objects, ends, unplanned)
        if self.handle_event(events.PlanExtended(*fields)):
            session.words[KNOWN] = self.core.planned(session.id)[1]
            self.waiting(session)

    def sampled(
        self, session: SessionRecord, message: DealtSamples, objects: NDArray[np.int32]
    ) -> None:
        """Take which object each of the next samples is; without room for all, none is known."""
        if message.first == 0:
            session.forget_samples()
            if not self.quota.fits(4 * message.samples):
                log.info("session %d: %d samples are too many", session.id, message.samples)
                return
        session.learn(message.first, message.samples, objects)
        self.registry.share_samples(session)
        if message.rehearsed and session.among is not None:
            self.handle_event(events.SamplesTold(session.id, session.among))
            session.rehearses, session.dataset.drained = True, False
            self.datasets.grow()

    def dealt(self, session: SessionRecord, message: Deal | Follow) -> None:
        """Tell the core how an epoch is dealt to the ranks of a job, or that this is not known."""
        view = self.clusters.view(message.cluster)
        if view is None:
            return
        if isinstance(message, Follow) or _lacks(session, message, len(view.nodes)):
            self.handle_event(events.EpochFollowed(session.id, view))
            return
        among = session.among if message.among else None
        counts = message.samples, message.world, message.each, message.batch
        order = JobOrder(*counts, message.seed, message.remapped, among, _replays(message))
        if order.sound() and (message.among or message.samples == len(session.dataset.manifest)):
            dealt = events.EpochDealt(session.id, message.epoch, order, view)
            self.handle_event(dealt if order.quick else events.EpochFollowed(session.id, view))

    def truncated(self, session: SessionRecord, step: int) -> None:
        session.truncate(step)
        if self.handle_event(events.PlanTruncated(session.id, step)):
            session.acknowledge(self.core.planned(session.id)[1])

    def waiting(self, session: SessionRecord) -> None:
        """Answer waits that are over, and tell the core of the others."""
        for who, call, step in session.over():
            self._send(who, Ready(call, session.id, step))
        self._progressed(session)

    def close(self) -> None:
        self.fetcher.close()
        self.datasets.close()
        self._planner.close()
        self.clusters.close()
        self.fetcher.join(0.5)
        self.disk.close(self.core.end if self.sound else list)
        self.registry.close()
        self.arena.close()


def _replays(message: Deal) -> JobReplays | None:
    told = message.replays
    if told is None:
        return None
    return JobReplays(Passes(told.kept, told.each, message.world, told.seed), told.first_step)


def _lacks(session: SessionRecord, message: Deal, world: int) -> bool:
    """Return whether it is not known where each rank is, or which object each sample is."""
    return message.world != world or (message.among and session.among is None)
