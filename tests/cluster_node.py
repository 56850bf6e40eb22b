"""A daemon as far as its clusters are concerned: what reaches the core and the loop is noted."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.allocator import Allocator
from creel.daemon.core.core import Core
from creel.daemon.core.events import Event
from creel.daemon.service.cluster_service import ClusterService
from creel.settings import ClusterSettings
from kit import default_window


class ClusterNode:
    """The service of a node's clusters, and in place of the core's shell a test.

    Attributes:
        events: what the core was told.
        ended: origins whose fetches were ended.
    """

    def __init__(self, settings: ClusterSettings | None = None, nbytes: int = 1 << 20) -> None:
        self.arena = Arena.create(nbytes)
        self.events: list[Event] = []
        self.ended: list[int] = []
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.core = Core(Allocator(nbytes), default_window())
        self.clusters = ClusterService(
            self.arena,
            settings or ClusterSettings(),
            self.core,
            handle=self._handle,
            call_soon=self._calls.put,
            unreachable=self.ended.append,
        )

    def _handle(self, event: Event) -> bool:
        self.events.append(event)
        return True

    def settle(self) -> None:
        """Do what the loop does once: what other threads have left to it, and a tick."""
        while not self._calls.empty():
            self._calls.get()()
        self.clusters.tick(time.monotonic())

    def close(self) -> None:
        self.clusters.close()
        self.arena.close()
