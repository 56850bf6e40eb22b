"""Replay of a training job on a virtual clock: what retention and prefetch would do. Pure.

The nodes are whatever speaks `Node`: the daemon's own core (`creel.daemon.replay`) or a stand-in.
Beside it the classic policies on a plain trace, for comparison: `lru`, `fifo`, `pin`, `chance`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class Started(NamedTuple):
    """A node began to fetch: its number for it, objects and bytes."""

    fetch: int
    objects: int
    nbytes: int


class Node(Protocol):
    """A node's mind as the replay sees it; each call returns the fetches that it starts."""

    def extend(
        self, rank: int, epoch: int, objects: Ids, ends: NDArray[np.int64], now: float
    ) -> list[Started]:
        """A rank will read these next."""

    def progress(self, rank: int, done: int, wanted: int, now: float) -> list[Started]:
        """A rank has done so many steps and waits for step wanted-1 (or does not)."""

    def landed(self, fetch: int, now: float) -> list[Started]:
        """A fetch is through."""

    def ready(self, rank: int) -> int:
        """Steps that a rank may read."""

    def failed(self) -> int:
        """Objects given up so far; each is one more read of the source, by its reader."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is replayed.

    Args:
        epochs: for each epoch (ranks, k) object ids: what each rank reads, in order.
        batch: objects per step and rank.
        ranks_per_node: ranks r*n .. r*n+n-1 live on node r.
        nbytes: of one object.
        step_s: compute time of a step; all ranks begin a step together.
        bandwidth_Bps, latency_s: of the source, shared by all nodes.
        held: steps whose bytes readers hold beyond the one in work (workers decode ahead).
        ahead: epochs told beyond the present one.
    """

    epochs: Sequence[Ids]
    batch: int
    ranks_per_node: int = 1
    nbytes: int = 1
    step_s: float = 1.0
    bandwidth_Bps: float = math.inf  # noqa: N815  the unit's own spelling
    latency_s: float = 0.0
    held: int = 1
    ahead: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return int(self.epochs[0].shape[0])


@dataclass(frozen=True)
class Outcome:
    """One epoch: objects read by the daemons and directly by readers, its time and its waiting.

    `nbytes` is what the daemons read.
    """

    reads: int
    direct: int
    time_s: float
    stall_s: float
    nbytes: int


class Replay:
    """A job over some nodes; `run` gives one Outcome per epoch.

    Args:
        nodes: one per `ranks_per_node` ranks.
        watch: called after every event, for tests that check invariants.
    """

    def __init__(
        self, job: Job, nodes: Sequence[Node], watch: Callable[[], None] = lambda: None
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._watch = watch
        self._free = 0.0  # when the source has read all that was asked for
        self._landings: list[tuple[float, int, int, int]] = []  # time, number, node, fetch
        self._number = 0
        self._reads = 0
        self._nbytes = 0
        self._told = 0
        self._step = 0
        self._now = 0.0

    def run(self) -> list[Outcome]:
        """Play all epochs, one step of all ranks after the other."""
        return [self._epoch(epoch) for epoch in range(len(self._job.epochs))]

    def _epoch(self, epoch: int) -> Outcome:
        job = self._job
        reads, direct, begun, stall = self._reads, self._failed(), self._now, 0.0
        nbytes = self._nbytes
        while self._told < min(epoch + 1 + job.ahead, len(job.epochs)):
            self._tell(self._told)
            self._told += 1
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
        """Let time pass until all ranks may begin the step; how much did."""
        begun = self._now
        if not self._ready():
            self._progress(wanted=self._step + 1)
        while not self._ready():
            if not self._landings:
                raise RuntimeError(f"step {self._step} can never be ready: nothing is under way")
            self._until(self._landings[0][0])
        return self._now - begun

    def _ready(self) -> bool:
        return all(self._nodes[n].ready(rank) > self._step for rank, n in self._ranks())

    def _progress(self, wanted: int) -> None:
        done = max(self._step - self._job.held, 0)
        for rank, node in self._ranks():
            self._began(node, self._nodes[node].progress(rank, done, wanted, self._now))

    def _until(self, time: float) -> None:
        """All landings up to `time`, each followed by what it starts."""
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


# --- classic policies on a plain trace, one object after the other ------------------------------


def lru(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """(t,) hits of least recently used.

    >>> lru(np.array([1, 2, 1, 3, 2]), 2).tolist()
    [False, False, True, False, False]
    """
    return _recency(trace, capacity, renew=True)


def fifo(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """(t,) hits of first in, first out."""
    return _recency(trace, capacity, renew=False)


def _recency(trace: NDArray[np.integer], capacity: int, *, renew: bool) -> NDArray[np.bool_]:
    held: OrderedDict[int, None] = OrderedDict()
    hit = np.zeros(len(trace), np.bool_)
    for t, x in enumerate(trace.tolist()):
        if x in held:
            hit[t] = True
            if renew:
                held.move_to_end(x)
        elif capacity:
            if len(held) >= capacity:
                held.popitem(last=False)
            held[x] = None
    return hit


def pin(trace: NDArray[np.integer], capacity: int) -> NDArray[np.bool_]:
    """(t,) hits when the first `capacity` objects stay for ever (MinIO in CoorDL, VLDB 2021)."""
    ids, first = np.unique(trace, return_index=True)
    kept = ids[first.argsort()[:capacity]]
    hit = np.isin(trace, kept)
    hit[first] = False
    return hit


def chance(
    trace: NDArray[np.integer], capacity: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """(t,) hits of random eviction."""
    place: dict[int, int] = {}
    held: list[int] = []
    victims = rng.integers(0, max(capacity, 1), len(trace)).tolist()
    hit = np.zeros(len(trace), np.bool_)
    for t, x in enumerate(trace.tolist()):
        if x in place:
            hit[t] = True
        elif len(held) < capacity:
            place[x] = len(held)
            held.append(x)
        elif capacity:
            at = victims[t]
            del place[held[at]]
            held[at], place[x] = x, at
    return hit


def lru_hits(f: float) -> float:
    """Hit ratio of LRU over shuffled epochs, a share f of the dataset held.

    >>> round(lru_hits(0.5), 3)
    0.153
    """
    return f + (1 - f) * math.log(1 - f) if f < 1 else 1.0
