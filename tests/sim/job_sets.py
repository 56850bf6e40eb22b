"""Several jobs on one dataset, each on nodes of its own choice; some nodes have several."""

from __future__ import annotations

from collections import Counter

import numpy as np
from nodes import Nodes
from numpy.typing import NDArray

from creel.daemon.core.events import (
    SOURCE,
    Action,
    ClusterChanged,
    EpochDealt,
    EpochFollowed,
    FetchObjects,
    PeerAsked,
    PlanDoubted,
    PlanExtended,
    Progressed,
    SessionClosed,
    SessionOpened,
    SetReady,
)
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.members import differing

SAMPLES, BATCH = 960, 4
_STEP_S = 0.1
#: Each job's peers have numbers of their own as origins.
_ORIGINS = 1000


class JobSets(Nodes):
    """Job j runs a rank on each of the nodes `sets[j]`; each job takes a step at each tick.

    Attributes:
        reads: objects that each node has read from the source.
        following: jobs that tell no node how all ranks read.
    """

    def __init__(self, sets: list[list[int]], memory: float, disk: float = 0.0) -> None:
        """memory, disk: what each node holds of the dataset."""
        self.sets = sets
        self.ready_of: dict[tuple[int, int], int] = {}
        self.told = [0] * len(sets)  # epochs of each job
        self.running: set[int] = set()
        self.tick = 0
        self.began = [0] * len(sets)  # the tick at which each job began
        self.following: set[int] = set()
        self.homed: list[frozenset[str]] = [frozenset() for _ in sets]
        nodes = len({node for one in sets for node in one})
        self.reads = [0] * nodes
        super().__init__(nodes, JobOrder(SAMPLES, 1, SAMPLES, BATCH, 0), memory * nodes, disk=disk)

    def job_order(self, job: int, epoch: int) -> JobOrder:
        world = len(self.sets[job])
        return JobOrder(SAMPLES, world, SAMPLES // world, BATCH, 1000 * (job + 1) + epoch)

    def _begin(self, node: int) -> None:
        super()._begin(node)
        self._feed(node, SessionClosed(1))

    def view_of(self, job: int, node: int) -> ClusterView:
        """The nodes of a job, as one of them sees them."""
        nodes = self.sets[job]
        me, count = nodes.index(node), len(nodes)
        origin = np.array(nodes) + _ORIGINS * job
        origin[me] = SOURCE
        disks = np.array([(self._disks[one], 1) for one in nodes], np.int64)
        capacity = np.full(count, self.capacity)
        names, homed = tuple(f"n{one}" for one in nodes), self.homed[job]
        rest = disks, f"c{job}", (), names, homed
        return ClusterView(me, np.arange(count), capacity, origin, *rest)

    def go(self, ticks: int) -> Counter[str]:
        """Let all running jobs take as many steps; what was counted."""
        self.counts.clear()
        self.reads = [0] * len(self.cores)
        for _ in range(ticks):
            self._now += _STEP_S
            for job in sorted(self.running):
                self._tell_job(job)
            for job in sorted(self.running):
                at = self.tick - self.began[job]
                for node in self.sets[job]:
                    self._feed(node, Progressed(job + 2, at, at + 1))
            self._settle()
            for job in self.running:
                at = self.tick - self.began[job]
                for node in self.sets[job]:
                    assert self.ready_of[node, job] > at, "not ready, and nothing is awaited"
            self.tick += 1
            if self.tick % 10 == 0:
                self.beat()
        for core in self.cores:
            core.check()
        return self.counts.copy()

    def _tell_job(self, job: int) -> None:
        while self.told[job] < (self.tick - self.began[job]) // self.job_order(job, 0).steps + 2:
            epoch, nodes = self.told[job], self.sets[job]
            order = self.job_order(job, epoch)
            ends, first = np.arange(1, order.steps + 1) * BATCH, epoch * order.steps
            for rank, node in enumerate(nodes):
                ids = order.by_rank(range(len(nodes)))[rank].copy()
                self._feed(node, PlanExtended(job + 2, epoch, first, ids, ends))
                if len(nodes) > 1:
                    view = self.view_of(job, node)
                    self._feed(
                        node,
                        EpochFollowed(job + 2, view)
                        if job in self.following
                        else EpochDealt(job + 2, epoch, order, view),
                    )
            self.told[job] += 1

    def beat(self) -> None:
        """Each node hears what the others of each of its clusters say of their plans."""
        for job in self.running:
            nodes = self.sets[job]
            plans = {node: self.cores[node].digests(f"c{job}") for node in nodes}
            for node in nodes:
                for other in nodes:
                    authority = other == nodes[0]
                    for plan in differing(plans[node], plans[other], authority=authority):
                        self._feed(node, PlanDoubted(plan.dataset, plan.seed))
            homed = self.homed[job].union(*(self.cores[node].homed(f"c{job}") for node in nodes))
            if homed != self.homed[job]:
                self.homed[job] = homed
                for node in nodes:
                    self._feed(node, ClusterChanged(f"c{job}", self.view_of(job, node)))
        self._settle()

    def start(self, *jobs: int) -> None:
        """These jobs begin."""
        for job in jobs:
            self.began[job] = self.tick
            self.running.add(job)
            nodes = self.sets[job]
            for rank, node in enumerate(nodes):
                self._feed(node, SessionOpened(job + 2, "d", f"job{job}", rank, len(nodes)))

    def end(self, job: int) -> None:
        """A job ends on all of its nodes."""
        self.running.discard(job)
        for node in self.sets[job]:
            self._feed(node, SessionClosed(job + 2))
        self._settle()

    def _do(self, node: int, action: Action) -> None:
        if isinstance(action, SetReady):
            self.ready_of[node, action.session - 2] = action.ready
        else:
            super()._do(node, action)

    def _from_peer(self, node: int, action: FetchObjects) -> None:
        self._requests += 1
        self._asked[self._requests] = node, action
        self.counts["asked"] += len(action.ids)
        peer = action.origin % _ORIGINS
        self._feed(peer, PeerAsked(self._requests, action.dataset, action.ids))

    def _read(self, action: FetchObjects) -> NDArray[np.int64]:
        return action.length.copy()
