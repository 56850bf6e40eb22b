"""Simulate a training job on a virtual clock; each node is the daemon's own core."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core_shell import CoreShell
from creel.daemon.core import events
from creel.policies.arrays import Ids, Ints
from creel.policies.prefetch import Window


class Started(NamedTuple):
    """A fetch that a node started: its number, objects and bytes."""

    fetch: int
    objects: int
    nbytes: int


class CoreNode(CoreShell):
    """One node: the daemon's own core. Each call returns the fetches that it starts.

    Args:
        lengths: (n,) bytes of each object of the dataset, all known.
        capacity: bytes of memory.
        ranks: the ranks on this node, of `world`.
        jobs: the job of each rank; empty: all ranks are of one job.
        disk: bytes of disk, whose reads and writes take no time.
    """

    def __init__(
        self,
        lengths: Ints,
        capacity: int,
        ranks: range,
        world: int,
        window: Window | None = None,
        jobs: Sequence[str] = (),
        disk: int = 0,
    ) -> None:
        super().__init__(capacity, window)
        self._fetches: dict[int, events.FetchObjects] = {}
        self.disk_reads = self.spilled = 0
        self.add("data", lengths.astype(np.int64))
        if disk:
            self.feed(events.DiskOpened(disk, 1))
        for rank, job in zip(ranks, jobs or ["job"] * len(ranks), strict=True):
            self.open(rank, "data", job, rank, world)

    def extend(
        self, rank: int, epoch: int, objects: Ids, ends: NDArray[np.int64], now: float
    ) -> list[Started]:
        """Append steps to a rank's plan."""
        self.now = now
        self.tell(rank, epoch, objects, ends)
        return self._started()

    def progress(self, rank: int, done: int, wanted: int, now: float) -> list[Started]:
        """Note that a rank has done `done` steps and waits for step wanted-1 (or for none)."""
        self.now = now
        self.feed(events.Progressed(rank, done, wanted))
        return self._started()

    def landed(self, fetch: int, now: float) -> list[Started]:
        """Note that a fetch ended."""
        self.now = now
        self.fulfil(self._fetches.pop(fetch))
        return self._started()

    def failed(self) -> int:
        """Return the number of objects given up so far."""
        return sum(words.failed for words in self.ready.values())

    def _started(self) -> list[Started]:
        """Let the disk and the planner answer at once; return what the source is asked for."""
        started = []
        while self.waiting:
            action = self.waiting.popleft()
            if isinstance(action, events.FetchObjects) and action.origin != events.DISK:
                self._fetches[action.fetch] = action
                nbytes = int(action.length.sum())
                started.append(Started(action.fetch, len(action.ids), nbytes))
                continue
            if isinstance(action, events.FetchObjects):
                self.disk_reads += len(action.ids)
            elif isinstance(action, events.SpillObjects):
                self.spilled += len(action.ids)
            self.fulfil(action)
        return started


@dataclass(frozen=True, eq=False)
class Job:
    """The job to simulate.

    Args:
        epochs: for each epoch, (ranks, k) ids of the objects that each rank reads, in order.
        batch: objects per step and rank.
        ranks_per_node: ranks r*n .. r*n+n-1 are on node r.
        nbytes: bytes of one object.
        step_s: compute time of a step; all ranks begin a step together.
        bandwidth_Bps, latency_s: of the source, which all nodes share.
        held: steps after the current one whose bytes readers hold (workers decode ahead).
        ahead: epochs published after the current one.
    """

    epochs: Sequence[Ids]
    batch: int
    ranks_per_node: int = 1
    nbytes: int = 1
    step_s: float = 1.0
    bandwidth_Bps: float = math.inf  # noqa: N815  the spelling of the unit
    latency_s: float = 0.0
    held: int = 1
    ahead: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return int(self.epochs[0].shape[0])


@dataclass(frozen=True)
class Outcome:
    """Results of one epoch: reads by daemons and by readers, total time and waiting time.

    `nbytes` are the bytes that the daemons read.
    """

    reads: int
    direct: int
    time_s: float
    stall_s: float
    nbytes: int


class Replay:
    """A job over some nodes; `run` returns one Outcome per epoch.

    Args:
        nodes: one per `ranks_per_node` ranks.
        watch: called after every event, for tests that check invariants.
    """

    def __init__(
        self, job: Job, nodes: Sequence[CoreNode], watch: Callable[[], None] = lambda: None
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._watch = watch
        self._free = 0.0  # when the source has read all objects requested so far
        self._landings: list[tuple[float, int, int, int]] = []  # time, number, node, fetch
        self._number = 0
        self._reads = 0
        self._nbytes = 0
        self._published = 0
        self._step = 0
        self._now = 0.0

    def run(self) -> list[Outcome]:
        """Simulate all epochs, step by step, all ranks together."""
        return [self._epoch(epoch) for epoch in range(len(self._job.epochs))]

    def _epoch(self, epoch: int) -> Outcome:
        job = self._job
        reads, direct, begun, stall = self._reads, self._failed(), self._now, 0.0
        nbytes = self._nbytes
        while self._published < min(epoch + 1 + job.ahead, len(job.epochs)):
            self._tell(self._published)
            self._published += 1
        for _ in range(_steps(job, epoch)):
            stall += self._wait()
            self._step += 1
            self._until(self._now + job.step_s)
            self._progress(wanted=0)
        took, direct = self._now - begun, self._failed() - direct
        return Outcome(self._reads - reads, direct, took, stall, self._nbytes - nbytes)

    def _tell(self, epoch: int) -> None:
        ids = self._job.epochs[epoch]
        cuts = np.arange(1, _steps(self._job, epoch) + 1, dtype=np.int64) * self._job.batch
        ends = np.minimum(cuts, ids.shape[1])
        for rank, node in self._ranks():
            self._began(node, self._nodes[node].extend(rank, epoch, ids[rank], ends, self._now))

    def _wait(self) -> float:
        """Advance time until all ranks may begin the step; return the seconds waited."""
        begun = self._now
        if not self._ready():
            self._progress(wanted=self._step + 1)
        while not self._ready():
            if not self._landings:
                raise RuntimeError(f"step {self._step} can never be ready: nothing is under way")
            self._until(self._landings[0][0])
        return self._now - begun

    def _ready(self) -> bool:
        return all(self._nodes[n].ready[rank].ready > self._step for rank, n in self._ranks())

    def _progress(self, wanted: int) -> None:
        done = max(self._step - self._job.held, 0)
        for rank, node in self._ranks():
            self._began(node, self._nodes[node].progress(rank, done, wanted, self._now))

    def _until(self, time: float) -> None:
        """Handle all landings up to `time`, and start the fetches that each leads to."""
        while self._landings and self._landings[0][0] <= time:
            self._now, _, node, fetch = heapq.heappop(self._landings)
            self._began(node, self._nodes[node].landed(fetch, self._now))
        self._now = max(self._now, time)

    def _began(self, node: int, started: list[Started]) -> None:
        for fetch, objects, nbytes in started:
            self._reads += objects
            self._nbytes += nbytes
            self._free = max(self._free, self._now) + nbytes / self._job.bandwidth_Bps
            self._number += 1
            landing = self._free + self._job.latency_s, self._number, node, fetch
            heapq.heappush(self._landings, landing)
        self._watch()

    def _ranks(self) -> list[tuple[int, int]]:
        each = self._job.ranks_per_node
        return [(rank, rank // each) for rank in range(self._job.ranks)]

    def _failed(self) -> int:
        return sum(node.failed() for node in self._nodes)


def _steps(job: Job, epoch: int) -> int:
    return -(-int(job.epochs[epoch].shape[1]) // job.batch)
