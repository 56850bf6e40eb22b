"""The cores of several nodes on one clock, with the bytes that move between them."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.allocator import Allocator, Lengths
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    SOURCE,
    Action,
    DatasetAdded,
    EpochDealt,
    Event,
    Fetched,
    FetchObjects,
    PeerAsked,
    PeerServed,
    PlanExtended,
    PlanRetention,
    Progressed,
    Publish,
    RetentionPlanned,
    ServeObjects,
    SessionOpened,
    SetReady,
)
from creel.daemon.core.versions import Versions
from creel.policies.cluster.eviction import ClusterView
from creel.policies.cluster.job_order import JobOrder

_VERSION = 5 << 40 | 1


class Nodes:
    """One rank on each node reads epochs of equal objects, all in step.

    Attributes:
        counts: "source", "peer" and "refused" objects, of this epoch.
    """

    def __init__(self, nodes: int, order: JobOrder, held: float, size: int = 1000) -> None:
        """held: objects that all memories together hold, in datasets."""
        self.order, self.size = order, size
        self.capacity = int(held * order.samples * size / nodes)
        self.counts: Counter[str] = Counter()
        self.gone: set[int] = set()  # nodes that answer nobody
        self._now, self._requests = 0.0, 0
        self._queue: deque[tuple[int, FetchObjects | PlanRetention]] = deque()
        self._served: dict[int, ServeObjects] = {}
        self.ready = [0] * nodes
        self.places: list[NDArray[np.int64]] = []
        self.cores: list[Core] = []
        self._known = 0  # epochs
        length = np.broadcast_to(np.int64(size), (order.samples,))
        for node in range(nodes):
            self.places.append(np.full(order.samples, -1, np.int64))
            seen = self.places[node].view()
            seen.flags.writeable = False
            self.cores.append(Core(Allocator(self.capacity)))
            added = Lengths.of(length), Versions(order.samples)
            self._feed(node, DatasetAdded("d", seen, length, *added))
            self._feed(node, SessionOpened(1, "d", "j", node, nodes))

    def run(self, epochs: int) -> list[Counter[str]]:
        """Run further epochs; the counts of each."""
        out = []
        for _ in range(epochs):
            self.counts.clear()
            first = self._known - 1 if self._known else 0
            while self._known < first + 2:
                self._tell(self._known)
                self._known += 1
            self._settle()
            for step in range(first * self.order.steps, (first + 1) * self.order.steps):
                for node in range(len(self.cores)):
                    self._feed(node, Progressed(1, step, step + 1))
                self._settle()
                assert min(self.ready) > step, "a step that nothing is awaited for is not ready"
            out.append(self.counts.copy())
        for core in self.cores:
            core.check()
        return out

    def _tell(self, epoch: int) -> None:
        order = self.order._replace(seed=self.order.seed + epoch)
        nodes = len(self.cores)
        ends = np.minimum(np.arange(1, order.steps + 1) * order.batch, order.each)
        for node, ids in enumerate(order.by_rank()):
            first = epoch * order.steps
            self._feed(node, PlanExtended(1, epoch, first, ids.copy(), ends.astype(np.int64)))
            origin = np.arange(nodes)
            origin[node] = SOURCE
            view = ClusterView(node, np.arange(nodes), np.full(nodes, self.capacity), origin)
            self._feed(node, EpochDealt(1, epoch, order, view))

    def _feed(self, node: int, event: Event) -> None:
        self._now += 1e-4
        for action in self.cores[node].handle(event, self._now):
            self._do(node, action)

    def _do(self, node: int, action: Action) -> None:
        if isinstance(action, FetchObjects | PlanRetention):
            self._queue.append((node, action))
        elif isinstance(action, Publish):
            self.places[node][action.ids] = action.offset
        elif isinstance(action, SetReady):
            self.ready[node] = action.ready
        elif isinstance(action, ServeObjects):
            self._served[action.request] = action

    def _settle(self) -> None:
        """Until nothing is under way."""
        while self._queue:
            node, action = self._queue.popleft()
            if isinstance(action, PlanRetention):
                kept = action.turn.plan()
                self._feed(node, RetentionPlanned(action.dataset, action.turn, kept))
            elif action.origin == SOURCE:
                self.counts["source"] += len(action.ids)
                version = np.full(len(action.ids), _VERSION)
                self._feed(node, Fetched(action.fetch, action.length.copy(), version))
            else:
                self._from_peer(node, action)

    def _from_peer(self, node: int, action: FetchObjects) -> None:
        if action.origin in self.gone:
            self.counts["refused"] += len(action.ids)
            self._feed(node, Fetched(action.fetch, np.full(len(action.ids), -1)))
            return
        self._requests += 1
        self._feed(action.origin, PeerAsked(self._requests, action.dataset, action.ids))
        answer = self._served.pop(self._requests)
        here = answer.nbytes >= 0
        held = self.places[action.origin][action.ids]
        assert (answer.place[here] == held[here]).all(), "sent from where it is not"
        self.counts["peer"] += int(here.sum())
        self.counts["refused"] += int((~here).sum())
        self._feed(node, Fetched(action.fetch, answer.nbytes.copy(), answer.version.copy()))
        self._feed(action.origin, PeerServed(self._requests))
