"""The node: all parts of a daemon but its loop and sockets, connected to each other.

Runs only on the loop thread; other threads deliver their results through `Loop.call_soon`.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import partial

from creel.cache.memory.arena import Arena
from creel.cache.memory.memfd import Descriptor
from creel.cache.memory.pools.allocator import Allocator
from creel.config import Config, memory_budget, memory_reserve
from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.reporting.bad_samples import BadSamples
from creel.daemon.service import sessions, stats
from creel.daemon.service.background import BackgroundThread
from creel.daemon.service.cluster_service import ClusterService
from creel.daemon.service.core_shell import CoreShell, Loop
from creel.daemon.service.datasets import Datasets
from creel.daemon.service.memory.memory_guard import MemoryGuard
from creel.daemon.service.memory.restart_memory import RestartMemory, packed, write_index
from creel.daemon.service.registry import Registry
from creel.daemon.service.sessions import Sessions
from creel.daemon.service.storage.disk import Disk, DiskSource
from creel.daemon.service.storage.fetcher import Fetcher
from creel.messages import (
    PROTOCOL,
    Hosting,
    Joined,
    JointJournal,
    Opened,
    Refused,
    Registered,
    Welcome,
)
from creel.policies.memory import reserve
from creel.policies.prefetch import Window
from creel.system import limits

log = logging.getLogger("creel.node")

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
        loop: what runs it, and answers.
        embedded: whether this daemon ends with its last client.
        returns: whether a service manager starts another after it, which takes its memory.
        kept: what the last daemon of this service has left.
    """

    def __init__(
        self,
        config: Config,
        loop: Loop,
        *,
        embedded: bool,
        returns: bool = False,
        kept: RestartMemory | None = None,
    ) -> None:
        memory = limits.memory()
        self.config = config
        #: Settings in effect: most changes need a restart.
        self.effective = config
        self.embedded, self.returns = embedded, returns
        #: How long it stays at least, embedded, for what was loaded ahead.
        self.linger_s = 0.0
        self.started = time.monotonic()  # for `creel stats`
        self.bad_samples = BadSamples()
        self.ranks = stats.Ranks()
        self.loop, self._total = loop, memory.total
        if kept:
            self.arena = Arena(kept.arena, kept.space.nbytes)
        else:
            self.arena = Arena.create(
                memory_budget(config.memory, total=memory.total, available=memory.available)
            )
        self.registry = Registry(
            max_datasets=config.daemon.max_datasets, max_sessions=config.daemon.max_sessions
        )
        window = Window.of(config.window, config.fetch)
        self.core = Core(kept.space if kept else Allocator(self.arena.nbytes), window)
        self.shell = CoreShell(
            self.core,
            loop,
            beat=self.registry.beat,
            lose=partial(sessions.lose, self.registry, self.ranks),
        )
        kept_free = memory_reserve(config.memory, total=memory.total, auto=reserve(memory.total))
        self.memory_guard = MemoryGuard(self.core, self.shell.handle, kept_free)
        self.disk = Disk(config.disk, self.arena, self.shell.hand_in)
        self.fetcher = Fetcher(
            self.arena,
            lambda event: loop.call_soon(lambda: self._fetched(event)),
            self._other_source,
            threads=config.fetch.threads,
        )
        self.clusters = ClusterService(
            self.arena,
            config.cluster,
            self.core,
            handle=self.shell.handle,
            call_soon=loop.call_soon,
            unreachable=self.fetcher.remove_peer,
        )
        self.datasets = Datasets(
            self.arena.nbytes,
            self.registry,
            self.shell,
            loop,
            self.disk,
            self.fetcher,
            config=lambda: self.config,
        )
        self.sessions = Sessions(
            self.registry,
            self.shell,
            self.datasets,
            self.clusters,
            self.fetcher,
            loop,
            self.ranks,
            count=lambda: stats.stats(self),
            returns=returns,
        )
        self.quota = self.datasets.quota
        self._planner = BackgroundThread("creel-plan")
        self.shell.execute = {
            events.Publish: self._publish,
            events.ReleaseMemory: lambda action: self.arena.release(action.ranges),
            events.SetReady: self.sessions.set_ready,
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

    # --- the core's actions -------------------------------------------------------------------

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
            self.shell.hand_in(planned)

    def _fetched(self, event: events.Fetched | events.Checked) -> None:
        with self.fetcher.landing(event):
            self.shell.handle(event, settles=False)

    def _other_source(self, origin: int, dataset: str) -> PeerSource | DiskSource:
        if origin == events.DISK:
            return self.disk.source(dataset)
        return self.clusters.source(origin, dataset)

    # --- its life -----------------------------------------------------------------------------

    def tick(self) -> None:
        self.fetcher.tick()
        self.shell.handle(events.Tick())
        self.datasets.grow()

    def welcome(self, token: str) -> tuple[Welcome, int]:
        """Return the greeting and the arena's descriptor."""
        return Welcome(
            PROTOCOL, token, self.loop.request_address, self.arena.nbytes, os.getpid(), self.returns
        ), self.arena.fd

    def client_left(self, token: str) -> None:
        """Close the sessions of a client that has disconnected, and drop its claims."""
        self.sessions.client_left(token)
        self.registry.client_left(token)
        self.clusters.client_left(token)

    def drain(self) -> None:
        """Change no plan and move no byte any more."""
        self.shell.state = "draining"
        self.registry.drain()

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
        if not self.shell.sound:
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

    def close(self) -> None:
        self.fetcher.close()
        self.datasets.close()
        self._planner.close()
        self.clusters.close()
        self.fetcher.join(0.5)
        self.disk.close(self.core.end if self.shell.sound else list)
        self.registry.close()
        self.arena.close()
