"""Simulate epochs of a job on the plans of `placement`: reads, transfers, memory, time. Pure.

The order is a random permutation per epoch, dealt out to ranks as DistributedSampler does. Time is
that of a pipeline: the bytes of each step pass the source and the nodes' links, each at its own
speed and in the order of steps, up to a window ahead; then all ranks compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Floats, Ints
from creel.policies.cluster import placement
from creel.policies.cluster.job_order import by_rank
from creel.policies.eviction.sampling import Nodes
from creel.policies.order.remap import Exchange

#: Nodes whose second copies are simulated; the others are assumed to be like them.
_FOLLOWED = 8


@dataclass(frozen=True)
class Scenario:
    """A job and its cluster.

    Args:
        samples: objects of `nbytes` bytes, each read once per epoch; a remainder that fills no
            global batch is dropped. There is at least one global batch.
        ranks: per node.
        batch: samples per rank and step.
        memory: bytes per node.
        link_speed: bytes per second in each direction of each node; 0: unlimited.
        source_speed, source_opens: bytes and opens per second of the source; 0: unlimited.
        step_s: time to compute a step.
        window: steps that are read ahead.
        depth: epochs that placement looks ahead; 0: as many as are useful.
        remap: ranks exchange samples within each global batch (`remap.Exchange`).
    """

    nodes: int  # which run the job
    samples: int
    nbytes: int
    memory: int
    batch: int
    ranks: int = 1
    epochs: int = 10
    link_speed: float = 0.0
    source_speed: float = 0.0
    source_opens: float = 0.0
    step_s: float = 0.0
    window: int = 8
    depth: int = 0
    seed: int = 0  # of the permutations
    remap: bool = False

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.samples // (self.world * self.batch)

    @property
    def objects(self) -> int:
        """Samples that an epoch reads."""
        return self.steps * self.world * self.batch

    @property
    def capacity(self) -> float:
        """Memory of all nodes, in datasets."""
        return self.memory * self.nodes / (self.objects * self.nbytes)

    @property
    def lookahead(self) -> int:
        """Epochs that placement looks ahead."""
        return self.depth or placement.useful_depth(self.nodes, self.capacity)

    @property
    def plan_nbytes(self) -> int:
        """Most bytes of placement on each node: holders now and for two epoch ends, and marks.

        To these come lists: for two epochs ahead, objects to get from peers and objects that peers
        get here; for three epochs, second copies. There are fewer transfers than if chance decided
        who holds what.
        """
        columns = 3 * placement.node_type(self.nodes).itemsize + 1
        held, beyond = min(self.capacity, 1.0), max(self.capacity - 1, 0.0)
        lists = 18 * held * (1 - 1 / self.nodes) + 12 * min(beyond, self.nodes - 1)
        return int((columns + lists / self.nodes) * self.objects)


@dataclass(frozen=True)
class Epoch:
    """What an epoch cost; shares are of all samples.

    Args:
        local, remote, source: shares of samples by where they came from.
        handed: share of objects that their reader handed on to a third node.
        slowest: source reads of the slowest rank within `window` steps, divided by the mean.
        occupancy: the most that a node held, divided by its memory.
        seconds: from the first read to the end of the last step.
    """

    local: float
    remote: float
    source: float
    handed: float
    slowest: float
    occupancy: float
    seconds: float


def replay(scenario: Scenario) -> Iterator[Epoch]:
    """Yield what each epoch costs.

    >>> job = Scenario(nodes=2, samples=4096, nbytes=100, memory=102400, batch=32, epochs=3)
    >>> [round(epoch.source, 2) for epoch in replay(job)]
    [1.0, 0.5, 0.5]
    """
    job = _Replay(scenario)
    for _ in range(scenario.epochs):
        yield job.epoch()


class _Replay:
    def __init__(self, scenario: Scenario) -> None:
        self.job = scenario
        self._rng = np.random.default_rng(scenario.seed)
        self._node_of = np.repeat(np.arange(scenario.nodes), scenario.ranks).tolist()
        dtype = placement.node_type(scenario.nodes)
        self._holder: Nodes = np.full(scenario.objects, np.iinfo(dtype).max, dtype)
        followed = min(_FOLLOWED, scenario.nodes) if scenario.capacity > 1 else 0
        self._copies = {
            node: np.zeros(scenario.objects, np.bool_)
            for node in np.linspace(0, scenario.nodes - 1, followed).astype(int).tolist()
        }
        self._uses: deque[placement.Uses] = deque()
        self._orders: deque[NDArray[np.int32]] = deque()  # of this epoch and the next
        for _ in range(1 + scenario.lookahead):
            self._draw()

    def _draw(self) -> None:
        """Draw one more epoch's order; only the first two orders are kept."""
        order = np.arange(self.job.objects, dtype=np.int32)
        self._rng.shuffle(order)
        if self.job.remap:
            order = Exchange(tuple(self._node_of), self.job.batch).apply(order)
        ranks = by_rank(order, self.job.world)
        job = self.job
        uses = placement.uses_of(
            ranks, self._node_of, job.batch, objects=job.objects, nodes=job.nodes
        )
        self._uses.append(uses)
        self._orders.append(order)

    def epoch(self) -> Epoch:
        job, now, order = self.job, self._uses[0], self._orders[0]
        owners = [uses.owner for uses in list(self._uses)[1:]]
        planned = placement.next_holders(
            self._holder,
            now,
            owners,
            by_rank(self._orders[1], job.world),
            np.array([job.nbytes]),
            np.full(job.nodes, job.memory),
            lead=placement.lead_of(job.steps),
        )
        nobody = placement.nobody(planned)
        second = self._second_copies(planned, owners)
        steps = _StepSamples.of(job, self._holder[order], now.owner[order], nobody)
        local, remote = steps.local.sum(), steps.remote.sum() * (1 - second)
        handed = (planned != nobody) & (planned != now.owner) & (planned != self._holder)
        out = Epoch(
            local=float(local + steps.remote.sum() * second) / job.objects,
            remote=float(remote) / job.objects,
            source=float(steps.missed.sum()) / job.objects,
            handed=int(np.count_nonzero(handed)) / job.objects,
            slowest=steps.slowest(job.window),
            occupancy=self._occupancy(planned, now, nobody),
            seconds=steps.seconds(second),
        )
        self._holder = planned
        self._uses.popleft()
        self._orders.popleft()
        self._draw()
        return out

    def _second_copies(self, planned: Nodes, owners: list[Nodes]) -> float:
        """Plan second copies; return the share of remote reads that they spared in this epoch."""
        now, copies, remote = self._uses[0], 0, 0
        size = np.array([self.job.nbytes])
        for node, held in self._copies.items():
            reads = (now.owner == node) & (self._holder != node)
            reads &= self._holder != placement.nobody(planned)
            copies += int(np.count_nonzero(reads & held))
            remote += int(np.count_nonzero(reads))
            self._copies[node] = placement.replicas(
                node, held, self._holder, planned, now, owners, size, self.job.memory
            )
        return copies / max(remote, 1)

    def _occupancy(self, planned: Nodes, now: placement.Uses, nobody: int) -> float:
        """Return the most first copies that a node holds after any step, by its memory."""
        job = self.job
        step = -(-now.when.astype(np.int64) * job.steps // placement.EPOCH)
        most = 0
        change = np.zeros((job.nodes, job.steps + 1), np.int64)
        for nodes, sign in ((self._holder, -1), (planned, 1)):
            held = np.flatnonzero(nodes != nobody)
            np.add.at(change, (nodes[held], step[held] + 1), sign)
        begin = np.bincount(self._holder[self._holder != nobody], minlength=job.nodes)
        most = int((begin[:, None] + change.cumsum(1)).max())
        return most * job.nbytes / job.memory


@dataclass(frozen=True)
class _StepSamples:
    """Samples by step, (steps, ranks) or (steps, nodes)."""

    job: Scenario
    local: Ints  # by rank
    remote: Ints  # by rank
    missed: Ints  # by rank
    served: Ints  # by node that sends

    @classmethod
    def of(cls, job: Scenario, holder: Nodes, owner: Nodes, nobody: int) -> _StepSamples:
        """Count samples, from the holder and the reader of each in global order."""
        shape = (job.steps, job.batch, job.world)
        missed = (holder == nobody).reshape(shape).sum(1)
        local = (holder == owner).reshape(shape).sum(1)
        sent = np.flatnonzero((holder != nobody) & (holder != owner))
        at = sent // (job.batch * job.world) * job.nodes + holder[sent]
        served = np.bincount(at, minlength=job.steps * job.nodes).reshape(job.steps, -1)
        return cls(job, local, job.batch - local - missed, missed, served)

    def slowest(self, window: int) -> float:
        """Return the source reads of the slowest rank, divided by the mean; 1 without any."""
        full = max(len(self.missed) // window, 1)
        summed = self.missed[: full * window].reshape(full, -1, self.missed.shape[1]).sum(1)
        mean = float(summed.mean())
        return float(summed.max(1).mean()) / mean if mean else 1.0

    def seconds(self, second: float) -> float:
        """Return the time of the epoch; `second`: share of remote reads that copies spare."""
        job = self.job
        by_node = (job.steps, job.nodes, job.ranks)
        fetched = (self.remote * (1 - second) + self.missed).reshape(by_node).sum(2)
        misses = self.missed.sum(1)
        links = np.stack([fetched.max(1), self.served.max(1) * (1 - second)], 1) * job.nbytes
        source = np.maximum(
            _time(misses * job.nbytes, job.source_speed), _time(misses, job.source_opens)
        )
        work = np.column_stack([_time(links, job.link_speed), source])
        ready, done = np.zeros(3), np.zeros(job.steps + 1)
        for step in range(job.steps):
            ready = np.maximum(ready, done[max(step - job.window, 0)]) + work[step]
            done[step + 1] = max(done[step], float(ready.max())) + job.step_s
        return float(done[-1])


def _time(amount: Ints | Floats, speed: float) -> Floats:
    return amount / speed if speed else np.zeros(amount.shape)
