"""Small clusters with random jobs and faults: every rank gets all its steps, and soon."""

from __future__ import annotations

import numpy as np
import pytest
from nodes import Nodes
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import (
    Action,
    EpochDealt,
    EpochFollowed,
    FetchObjects,
    PlanExtended,
    Progressed,
    Publish,
    SessionOpened,
    SetReady,
    SpillObjects,
)
from creel.policies.cluster.job_order import JobOrder
from kit import seeds

SIZE = 1000
#: Seeds in which objects were once read again endlessly, as each was evicted for another.
_FOUND = 8, 23, 26, 1595


class Anything(Nodes):
    """A cluster, one or two jobs and their faults, all drawn by a seed.

    After each event no object that a reader holds has left. When all reads and writes of a moment
    are done, every rank has the step that it waits for.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        nodes, batch, steps = (int(rng.integers(a, b)) for a, b in ((2, 6), (1, 9), (2, 9)))
        each = batch * steps - int(rng.integers(batch))
        samples = max(nodes * each + int(rng.integers(-nodes, nodes + 1)), nodes)
        self.kind = str(rng.choice(["dealt", "shared", "own"]))
        self.jobs = range(1, int(rng.integers(2, 4)))
        self.pace = int(rng.integers(1, 4))
        self.ahead = int(rng.integers(3))
        self.uneven = int(
            rng.integers(2) * (seed + 1)
        )  # seed of the sizes of objects; 0: all equal
        self.faults = float(rng.choice([0.0, 0.02]))  # share of failing reads and writes
        memory = int(batch * 2 ** rng.uniform(-1, 1 + np.log2(steps))) + 1
        disk = float(rng.choice([0.0, rng.uniform(0, 1)]))
        self.plans: dict[tuple[int, int], NDArray[np.int32]] = {}
        self.ready_of: dict[tuple[int, int], int] = {}
        self.done_of: dict[tuple[int, int], int] = {}
        order = JobOrder(samples, nodes, each, batch, 100 * seed)
        super().__init__(nodes, order, (memory + 0.5) * nodes / samples, SIZE, disk)
        self.chance = rng if seed % 4 else None
        if disk and rng.random() < 0.3:
            self.lose_disk(0)
        if rng.random() < 0.3:
            self.late.add(int(rng.integers(nodes)))

    def live(self, epochs: int) -> None:
        """Run, with one fault or none in each epoch."""
        for _ in range(epochs):
            faults = self.fail_node, self.join, self.fail_disk, self.replace, self.cut, lambda: None
            then = faults[self.rng.integers(len(faults))]
            self.run(1, then, float(self.rng.random()))
            self.late.clear()

    def fail_node(self) -> None:
        if len(self.alive) > 2:
            self.lose(int(self.rng.choice(self.alive)))

    def fail_disk(self) -> None:
        self.lose_disk(int(self.rng.choice(self.alive)))

    def join(self) -> None:
        self.pace = 1 if not self.dead else self.pace
        if self.dead and self.pace == 1:
            self.restart(min(self.dead))

    def replace(self) -> None:
        """Let another daemon take the place of one that is killed."""
        if len(self.alive) > 2 and self.pace == 1:
            node = int(self.rng.choice(self.alive))
            self.lose(node)
            self.restart(node)

    def cut(self) -> None:
        """Cut some ways between nodes, not always both ways; not all nodes notice."""
        pairs = [(a, b) for a in self.alive for b in self.alive if a != b]
        apart = {pair for pair in pairs if self.rng.random() < 0.4}
        self.part(apart, {pair for pair in sorted(apart) if self.rng.random() < 0.5})

    def _lengths(self) -> NDArray[np.int64]:
        if not self.uneven:
            return super()._lengths()
        sizes = np.random.default_rng(self.uneven).lognormal(0, 0.6, self.order.samples)
        return (SIZE * sizes).astype(np.int64) + 1

    def _read(self, action: FetchObjects) -> NDArray[np.int64]:
        failed = self.rng.random(len(action.ids)) < self.faults
        return np.where(failed, -1, action.length)

    def _write(self, action: SpillObjects) -> NDArray[np.bool_]:
        full = self.rng.random() < self.faults
        return np.arange(len(action.ids)) < len(action.ids) * (1 - 0.5 * full)

    def _begin(self, node: int) -> None:
        for job in self.jobs:
            self.ready_of[node, job] = self.done_of[node, job] = 0
            self.plans[node, job] = np.empty(0, np.int32)
        super()._begin(node)
        for job in self.jobs[1:]:
            self._feed(node, SessionOpened(job, "d", f"j{job}", node, len(self.cores), "never"))

    def _tell(self, node: int, epoch: int) -> None:
        number = epoch - self._began[node]
        ends = np.minimum(np.arange(1, self.order.steps + 1) * self.order.batch, self.order.each)
        for other in self.alive:
            self.silence[node].heard(other, self._now)
        for job in self.jobs:
            order = self.order._replace(seed=self.order.seed + 10 * job + epoch)
            if self.kind == "own":
                order = order._replace(seed=order.seed + 1000 * (node + 1))
            ids = order.by_rank(range(len(self.cores)))[node]
            self.plans[node, job] = np.concatenate([self.plans[node, job], ids])
            first = number * self.order.steps
            self._feed(
                node,
                PlanExtended(
                    job, number, first, ids.copy(), ends.astype(np.int64), unplanned=False
                ),
            )
            if node in self.late:
                continue
            if self.kind == "dealt":
                self._feed(node, EpochDealt(job, number, order, self._view(node)))
            else:
                self._feed(node, EpochFollowed(job, self._view(node)))

    def _step(self, epoch: int, step: int) -> None:
        self._now += 0.1
        at = {}
        for node in self.alive:
            tick = (epoch - self._began[node]) * self.order.steps + step
            for job in self.jobs if tick >= 0 else []:
                at[node, job] = tick if job == 1 else tick // self.pace
        for (node, job), done in at.items():
            self.done_of[node, job] = done
            self._feed(
                node, Progressed(job, done, done + 1 + int(self.rng.integers(self.ahead + 1)))
            )
        self._settle()
        late = [key for key, done in at.items() if self.ready_of[key] <= done]
        assert not late, f"not ready, and nothing is awaited: {late}"

    def _do(self, node: int, action: Action) -> None:
        if isinstance(action, SetReady):
            self.ready_of[node, action.session] = action.ready
        elif isinstance(action, Publish) and isinstance(action.offset, int):
            assert action.offset == NOWHERE
            left = np.arange(self.order.samples)[action.ids]
            for job in self.jobs:
                held = (
                    self._positions(self.done_of[node, job]),
                    self._positions(self.ready_of[node, job]),
                )
                reading = self.plans[node, job][slice(*held)]
                assert not np.isin(left, reading).any(), "it leaves under a reader"
        super()._do(node, action)

    def _positions(self, step: int) -> int:
        epoch, left = divmod(step, self.order.steps)
        return epoch * self.order.each + left * self.order.batch


@pytest.mark.parametrize("seed", sorted({*seeds(4), *_FOUND}))
def test_whatever_happens_every_rank_gets_its_steps(seed: int) -> None:
    Anything(seed).live(4)
