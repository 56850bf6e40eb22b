"""Small clusters with random jobs and faults: every rank gets all its steps, and soon."""

from __future__ import annotations

import numpy as np
import pytest
from nodes import Nodes, Shell
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import (
    Action,
    EpochDealt,
    EpochFollowed,
    Event,
    FetchObjects,
    Progressed,
    Publish,
    SpillObjects,
)
from creel.policies.cluster.job_order import JobOrder
from kit import seeds

SIZE = 1000
#: Seeds in which objects were once read again endlessly, as each was evicted for another.
_FOUND = 8, 23, 26, 1595


class Watched(Shell):
    """A node whose reads and writes fail at times, and from which nothing leaves under a reader."""

    def __init__(self, nodes: Anything, number: int) -> None:
        super().__init__(nodes, number)
        self.cluster = nodes
        self.done = dict.fromkeys(nodes.jobs, 0)
        self.plans = dict.fromkeys(nodes.jobs, np.empty(0, np.int32))

    def tell(
        self,
        session: int,
        epoch: int,
        ids: NDArray[np.int32],
        ends: NDArray[np.int64],
        *,
        unplanned: bool = False,
    ) -> list[Action]:
        self.plans[session] = np.concatenate([self.plans[session], ids])
        return super().tell(session, epoch, ids, ends, unplanned=unplanned)

    def feed(self, event: Event) -> list[Action]:
        if isinstance(event, Progressed):
            self.done[event.session] = event.done
        return super().feed(event)

    def nbytes_read(self, fetch: FetchObjects) -> NDArray[np.int64]:
        failed = self.cluster.rng.random(len(fetch.ids)) < self.cluster.faults
        return np.where(failed, -1, fetch.length)

    def stored(self, spill: SpillObjects) -> NDArray[np.bool_]:
        full = self.cluster.rng.random() < self.cluster.faults
        return np.arange(len(spill.ids)) < len(spill.ids) * (1 - 0.5 * full)

    def do(self, action: Action) -> None:
        if isinstance(action, Publish) and isinstance(action.offset, int):
            assert action.offset == NOWHERE
            left = np.arange(len(self.offset["d"]))[action.ids]
            for job, done in self.done.items():
                assert not np.isin(
                    left,
                    self.plans[job][
                        slice(self._position(done), self._position(self.ready[job].ready))
                    ],
                ).any(), "under a reader"
        super().do(action)

    def _position(self, step: int) -> int:
        order = self.cluster.order
        epoch, left = divmod(step, order.steps)
        return epoch * order.each + left * order.batch


class Anything(Nodes):
    """A cluster, one or two jobs and their faults, all drawn by a seed.

    After each event no object that a reader holds has left. When all reads and writes of a moment
    are done, every rank has the step that it waits for.
    """

    shell = Watched

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

    def _begin(self, node: int) -> None:
        super()._begin(node)
        for job in self.jobs[1:]:
            self.shells[node].open(job, "d", f"j{job}", node, len(self.shells))

    def _tell(self, node: int, epoch: int) -> None:
        number, shell = epoch - self._began[node], self.shells[node]
        self._hear(node)
        for job in self.jobs:
            order = self.order._replace(seed=self.order.seed + 10 * job + epoch)
            if self.kind == "own":
                order = order._replace(seed=order.seed + 1000 * (node + 1))
            ids = order.by_rank(range(len(self.shells)))[node]
            shell.tell(job, number, ids.copy(), self._ends())
            if node in self.late:
                continue
            if self.kind == "dealt":
                shell.feed(EpochDealt(job, number, order, self._view(node)))
            else:
                shell.feed(EpochFollowed(job, self._view(node)))

    def _step(self, epoch: int, step: int) -> None:
        self.now += 0.1
        at = {}
        for node in self.alive:
            tick = (epoch - self._began[node]) * self.order.steps + step
            for job in self.jobs if tick >= 0 else []:
                at[node, job] = tick if job == 1 else tick // self.pace
        for (node, job), done in at.items():
            wanted = done + 1 + int(self.rng.integers(self.ahead + 1))
            self.shells[node].feed(Progressed(job, done, wanted))
        self._settle()
        late = [(n, job) for (n, job), k in at.items() if self.shells[n].ready[job].ready <= k]
        assert not late, f"not ready, and nothing is awaited: {late}"


@pytest.mark.parametrize("seed", sorted({*seeds(4), *_FOUND}))
def test_random_faults_keep_no_step_from_any_rank(seed: int) -> None:
    Anything(seed).live(4)
