"""Nodes without each other's orders: each object is read once if all fit together."""

from __future__ import annotations

import numpy as np
import pytest
from nodes import Nodes
from numpy.typing import NDArray

from creel.daemon.core.events import EpochFollowed
from creel.policies.cluster.homes import Homes
from creel.policies.cluster.job_order import JobOrder
from kit import cluster_view

SAMPLES, BATCH = 480, 4


class Followers(Nodes):
    """Nodes whose ranks each read in an order of their own, which no other node knows.

    `shares`: together the ranks read each object once per epoch; otherwise each rank reads all.
    """

    def __init__(
        self, nodes: int, held: float, *, shares: bool, disk: float = 0.0, samples: int = SAMPLES
    ) -> None:
        self.shares = shares
        each = samples // nodes if shares else samples
        super().__init__(nodes, JobOrder(samples, nodes, each, BATCH, 0), held, disk=disk)

    def _tell(self, node: int, epoch: int) -> None:
        seed = epoch if self.shares else 1000 * node + epoch
        order = np.random.default_rng(seed).permutation(self.order.samples).astype(np.int32)
        ids = order[node :: len(self.shells)].copy() if self.shares else order
        self._hear(node)
        if node not in self.late:
            self.shells[node].feed(EpochFollowed(1, self._view(node)))
        self.shells[node].tell(1, epoch - self._began[node], ids, self._ends())


@pytest.mark.parametrize("nodes, shares", [(2, False), (3, True)])
def test_objects_that_all_memories_hold_are_read_once(nodes: int, *, shares: bool) -> None:
    runs = Followers(nodes, 1.2, shares=shares).run(3)
    assert sum(counts["source"] for counts in runs) <= 1.005 * SAMPLES
    assert sum(counts["refused"] for counts in runs) <= 0.005 * SAMPLES


@pytest.mark.parametrize("held, shares", [(0.3, True), (0.7, False)])
def test_the_part_that_memories_hold_is_not_read_again(held: float, *, shares: bool) -> None:
    runs = Followers(2, held, shares=shares).run(3)
    reads = 1 if shares else 2
    for counts in runs[1:]:
        assert counts["source"] <= reads * (1 - held + 0.05) * SAMPLES


@pytest.mark.parametrize("nodes, held, disk, shares", [(2, 0.5, 0.4, False), (3, 0.2, 0.3, True)])
def test_memories_and_disks_hold_what_is_at_home_there(
    nodes: int, held: float, disk: float, *, shares: bool
) -> None:
    """A disk has the objects that its node is home of: each object is on one disk only."""
    n = 840
    first, *later = runs = Followers(nodes, held, shares=shares, disk=disk, samples=n).run(3)
    assert first["source"] <= 1.005 * n
    assert sum(counts["source"] for counts in later) <= 0.002 * n
    assert sum(counts["refused"] for counts in runs) <= 0.002 * n
    assert all(counts["disk"] > 0.5 * n for counts in later)


@pytest.mark.parametrize("held, disk, shares", [(0.3, 0.3, False), (0.5, 0.4, True)])
def test_no_node_waits_for_what_only_another_reader_could_end(
    held: float, disk: float, *, shares: bool
) -> None:
    """In any order of events a node waits only for reads, writes and objects being sent.

    Once all of these are done, `_step` finds each step ready, without a look at the clock.
    """
    nodes = Followers(2, held, shares=shares, disk=disk)
    nodes.chance = np.random.default_rng(3)
    nodes.run(2)


@pytest.mark.parametrize("held, shares", [(0.3, False), (0.7, True)])
def test_no_epoch_reads_more_than_without_peers(held: float, *, shares: bool) -> None:
    together, alone = (Followers(2, held, shares=shares) for _ in range(2))
    alone.late |= {0, 1}
    for counts, otherwise in zip(together.run(3), alone.run(3), strict=True):
        assert counts["source"] <= 1.02 * otherwise["source"]


def test_objects_at_home_on_a_lost_node_are_read_once_again() -> None:
    nodes = Followers(4, 1.6, shares=False)
    nodes.run(2)
    lost = int(nodes.shells[3].held().sum())
    (during, *later) = nodes.run(1, lambda: nodes.lose(3)) + nodes.run(2)
    assert sum(counts["source"] for counts in (during, *later)) <= 1.05 * lost
    assert later[-1]["refused"] <= 0.01 * SAMPLES


def test_homes_are_shared_out_evenly_and_move_only_where_they_must() -> None:
    ids = np.arange(0, 40_000, 2)  # every second object, such as the images of pairs
    origin = np.array([-1, 5, 6, 7])

    def homes(origin: NDArray[np.int64]) -> NDArray[np.int64]:
        return Homes([cluster_view(origin, 100)]).origins(ids)

    before, after = homes(origin), homes(np.array([-1, 5, -1, 7]))
    assert min((before == x).sum() for x in origin) >= 0.24 * len(ids)
    assert (before[before != 6] == after[before != 6]).all()
    assert min((after == x).sum() for x in (-1, 5, 7)) >= 0.31 * len(ids)
