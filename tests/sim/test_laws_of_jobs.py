"""Several jobs on one dataset over several nodes: their plans are merged (law L4)."""

from __future__ import annotations

import numpy as np
import pytest
from classics import min_reads
from nodes import Nodes
from numpy.typing import NDArray

from creel.daemon.core.events import EpochDealt, Progressed
from creel.policies.cluster.boundary import Deals
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.jobs import DealtJob, JobsTask
from creel.policies.next_use import NextUses

SAMPLES, BATCH = 960, 4
STEP_S = 0.1


class Jobs(Nodes):
    """Two jobs with a rank on each node; the second job only steps at every `pace`-th tick."""

    def __init__(self, nodes: int, held: float, pace: int = 1, disk: float = 0.0) -> None:
        self.jobs, self.pace = (1, 2), pace
        order = JobOrder(SAMPLES, nodes, SAMPLES // nodes, BATCH, 0)
        super().__init__(nodes, order, held, disk=disk)

    def job_order(self, job: int, epoch: int) -> JobOrder:
        return self.order._replace(seed=1000 * job + epoch)

    def _begin(self, node: int) -> None:
        super()._begin(node)
        self.shells[node].open(2, "d", "another", node, len(self.shells))

    def _tell(self, node: int, epoch: int) -> None:
        for job in self.jobs:
            order = self.job_order(job, epoch)
            ids = order.by_rank(range(len(self.shells)))[node].copy()
            self._hear(node)
            self.shells[node].tell(job, epoch, ids, self._ends())
            self.shells[node].feed(EpochDealt(job, epoch, order, self._view(node)))

    def _step(self, epoch: int, step: int) -> None:
        self.now += STEP_S
        due = self.steps(epoch * self.order.steps + step)
        for job, at in due:
            for node in self.alive:
                self.shells[node].feed(Progressed(job, at, at + 1))
        self._settle()
        for node in self.alive:
            for job, at in due:
                ready = self.shells[node].ready[job].ready
                assert ready > at, "not ready, and nothing is awaited"

    def steps(self, tick: int) -> list[tuple[int, int]]:
        """Return the jobs that take a step at this tick, and which step."""
        return [(1, tick), (2, tick // self.pace)][: 1 if tick % self.pace else 2]

    def least_reads(self, capacity: int, epochs: int) -> NDArray[np.int64]:
        """Return the reads of one memory in each epoch of the first job, by MIN over both plans."""
        steps, width = self.order.steps, self.order.world * BATCH
        orders = {(j, e): self.job_order(j, e).permutation() for j in self.jobs for e in range(9)}
        trace: list[int] = []
        for tick in range((epochs + 1) * steps):
            for job, at in self.steps(tick):
                first = at % steps * width
                trace += orders[job, at // steps][first : first + width].tolist()
        return min_reads(trace, capacity, len(trace) // (epochs + 1))[:epochs]


@pytest.mark.parametrize("nodes, held, pace", [(3, 0.9, 1), (2, 0.6, 3)])
def test_two_jobs_read_hardly_more_than_one_memory_would_that_knew_both_plans(
    nodes: int, held: float, pace: int
) -> None:
    """Of N = 960 objects, .02 N are held in transit, and .01 N between nodes."""
    jobs, epochs = Jobs(nodes, held, pace), 3
    jobs.chance = np.random.default_rng(nodes)
    runs = jobs.run(epochs)
    best = jobs.least_reads(int((held - 0.06) * SAMPLES), epochs)
    for counts, least in zip(runs[1:], best[1:].tolist(), strict=True):
        assert counts["source"] <= least + 0.03 * SAMPLES
        assert counts["refused"] <= 0.005 * SAMPLES


def test_memories_and_disks_that_hold_all_read_it_once_for_both_jobs() -> None:
    runs = Jobs(2, 0.3, disk=0.5).run(3)
    assert runs[0]["source"] <= 1.02 * SAMPLES
    assert sum(counts["source"] for counts in runs[1:]) <= 0.005 * SAMPLES


def test_an_epoch_begins_where_the_next_one_says_also_when_its_plan_is_made_anew() -> None:
    order = JobOrder(40, 2, 20, 4, 7)
    uses, deals = NextUses(40), Deals(orders={0: order, 1: order})
    steps = np.arange(5, dtype=np.int32)
    uses.extend(0, steps[2:], np.arange(3))  # two steps are done already
    uses.extend(1, steps + 5, np.arange(5))
    job = DealtJob(uses, deals, lambda: 2)
    assert {epoch: base for epoch, (base, _) in job.orders.items()} == {0: 0, 1: 5}


@pytest.mark.parametrize("samples", [960, 140_000])
def test_when_an_epoch_reads_what_takes_two_bytes_an_object(samples: int) -> None:
    """An epoch with more steps than two bytes can count is exact to within a few steps."""
    order = JobOrder(samples, 2, samples // 2, 1, 7)
    (epochs,) = JobsTask(samples, [[0, 1]], [{0: (50, order)}]).plan().jobs
    ids = np.arange(samples)
    read = np.empty(samples, np.int64)
    read[order.permutation()] = 50 + ids // 2  # dealt to two ranks alternately
    late = read - epochs[0].steps(ids)
    assert epochs[0].after.nbytes == 2 * samples
    assert 0 <= late.min() <= late.max() <= order.steps // 65_535
