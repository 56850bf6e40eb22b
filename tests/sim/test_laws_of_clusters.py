"""Several nodes as one memory: which node reads the source, and how much moves between nodes.

`nodes.Nodes` runs the cores of all nodes; the bounds are those of docs/cluster.md.
"""

from __future__ import annotations

import numpy as np
import pytest
from nodes import Nodes

from creel.policies.cluster.job_order import JobOrder


def job(nodes: int, samples: int = 960, batch: int = 8) -> JobOrder:
    return JobOrder(samples, nodes, samples // nodes, batch, 100)


@pytest.mark.parametrize("nodes, held", [(2, 0.5), (4, 0.9)])
def test_objects_that_the_memories_together_hold_are_not_read_again(
    nodes: int, held: float
) -> None:
    order = job(nodes, 1920)
    first, *later = Nodes(nodes, order, held).run(4)
    # Each node reads ahead into the next epoch before it ends this one.
    ahead = 0.005 * order.samples
    assert first["source"] <= order.samples + ahead
    assert not first["peer"]
    for counts in later[1:]:
        assert counts["source"] <= (1 - held) * order.samples + 2 * ahead
        assert counts["peer"] > 0
        assert counts["refused"] <= 0.001 * counts["peer"], "asked a node that had given it up"


def test_memories_and_disks_together_hold_it_all() -> None:
    """Peers also send objects from disk: from the second epoch on the source is not read."""
    order = job(4)
    runs = Nodes(4, order, 0.4, disk=0.2).run(4)
    assert sum(counts["source"] for counts in runs) <= 1.002 * order.samples
    assert all(counts["disk"] > 0.3 * order.samples for counts in runs[2:])
    assert all(counts["peer"] > 0.2 * order.samples for counts in runs[2:])
    assert all(counts["refused"] <= 0.001 * order.samples for counts in runs)


def test_a_disk_that_fails_costs_what_it_held_and_is_not_planned_with() -> None:
    order = job(4)
    nodes = Nodes(4, order, 0.4, disk=0.2)
    nodes.run(3)
    runs = [*nodes.run(1, lambda: nodes.lose_disk(3)), *nodes.run(3)]
    assert runs[0]["source"] <= 0.3 * order.samples
    for counts in runs[2:]:
        assert counts["source"] <= (1 - 0.4 - 3 * 0.2 + 0.08) * order.samples
        assert counts["refused"] <= 0.015 * order.samples


@pytest.mark.parametrize(
    "samples, batch, held, disk, part, seed",
    [
        (240, 32, 0.3, 0.1, 0.55, 409),
        (160, 16, 0.4, 0.2, 0.917, 613),
        (240, 24, 0.3, 0.3, 0.2, 692),
    ],
)
def test_memories_that_hardly_hold_a_step_wait_for_nothing_but_reads_and_writes(
    samples: int, batch: int, held: float, disk: float, part: float, seed: int
) -> None:
    """No node waits for another's readers or writes endlessly, even if a disk fails."""
    nodes = Nodes(4, job(4, samples, batch), held, disk=disk)
    nodes.chance = np.random.default_rng(seed)
    nodes.run(2)
    nodes.run(1, lambda: nodes.lose_disk(3), part)
    nodes.run(2)


def test_objects_that_neither_memories_nor_disks_hold_are_read_again() -> None:
    order = job(2)
    _, *later = Nodes(2, order, 0.3, disk=0.2).run(4)
    for counts in later[1:]:
        assert counts["source"] <= (1 - 0.3 - 2 * 0.2 + 0.06) * order.samples
        assert counts["disk"] > 0.2 * order.samples


@pytest.mark.parametrize("nodes, moved", [(2, 0.36), (4, 0.57)])
def test_with_room_for_all_the_source_is_read_once(nodes: int, moved: float) -> None:
    order = job(nodes, 1920)
    runs = Nodes(nodes, order, 1.1).run(4)
    assert sum(counts["source"] for counts in runs) <= 1.002 * order.samples
    assert all(counts["refused"] <= 0.001 * order.samples for counts in runs)
    assert all(counts["peer"] <= moved * order.samples for counts in runs[2:])
    assert not any(counts["shared"] for counts in runs), "a plan crossed the network"


def test_one_percent_of_room_is_enough_for_the_steps_in_use() -> None:
    """A node full of objects that stay would have to evict some of them in each step."""
    order = job(2, 3840)
    runs = Nodes(2, order, 1.01).run(3)
    assert sum(counts["source"] for counts in runs) <= 1.005 * order.samples
    assert all(counts["refused"] <= 0.001 * order.samples for counts in runs)


def test_memory_beyond_one_copy_of_all_makes_most_reads_local() -> None:
    """By chance a quarter of the reads would be local: the part that fits on one of 8 nodes."""
    order = job(8, 1024)
    runs = Nodes(8, order, 2.0).run(12)
    assert sum(counts["source"] for counts in runs) <= 1.002 * order.samples
    peers = [counts["peer"] / order.samples for counts in runs[6:]]
    assert sum(peers) / len(peers) <= 0.5


@pytest.mark.parametrize("nodes, held", [(2, 1.1), (4, 0.5)])
def test_ranks_that_exchange_samples_move_few(nodes: int, held: float) -> None:
    """At most .03 of the samples move, with 256 samples of a node in a step."""
    order = job(nodes, 16 * 256 * nodes, 256)._replace(remapped=True)
    runs = Nodes(nodes, order, held).run(4)
    for counts in runs[2:]:
        assert counts["peer"] <= 0.03 * order.samples
        assert counts["source"] <= (1 - min(held, 1) + 0.01) * order.samples


def test_a_peer_that_is_gone_costs_what_it_held() -> None:
    order = job(4)
    nodes = Nodes(4, order, 1.1)
    nodes.run(2)
    nodes.gone.add(3)
    (counts,) = nodes.run(1)
    held = int(nodes.shells[3].held().sum())
    assert 0 < counts["refused"] <= held
    assert counts["source"] <= counts["refused"] + 0.04 * order.samples


def test_a_node_that_stays_away_costs_what_it_should_hold_in_each_epoch() -> None:
    """Nobody plans anew: who needs such an object reads the source, and all others lie at peers."""
    order = job(4)
    nodes = Nodes(4, order, 1.4)
    nodes.run(2)
    nodes.run(1, lambda: nodes.lose(3))
    for counts in nodes.run(3):
        # Its rank reads nothing; a fourth of what the others read lay on the lost node.
        assert counts["source"] <= 3 / 4 * (1 / 4 + 0.03) * order.samples
        assert counts["refused"] <= 0.01 * order.samples
        assert counts["peer"] > 0


@pytest.mark.parametrize("held, part, node", [(0.6, 0.5, 0), (1.2, 0.02, 3), (1.6, 0.9, 3)])
def test_objects_that_a_restarted_daemon_held_are_read_once_more(
    held: float, part: float, node: int
) -> None:
    """Also that of the lowest node, whose plans count; it is told of the rest of the epoch."""
    order = job(4, 960)
    nodes = Nodes(4, order, held)
    nodes.run(2)
    lost = 0

    def restart() -> None:
        nonlocal lost
        lost = int(nodes.shells[node].held().sum())
        nodes.lose(node)
        nodes.restart(node, rested=True)

    runs = [*nodes.run(1, restart, part), *nodes.run(3)]
    assert sum(counts["shared"] for counts in runs) == 1
    undisturbed = Nodes(4, order, held).run(6)[2:]
    extra = [run["source"] - other["source"] for run, other in zip(runs, undisturbed, strict=True)]
    assert sum(extra) <= 1.05 * lost
    assert extra[-1] <= 0.01 * order.samples
    # It refuses what it is to give up in this epoch: the reader keeps it.
    assert all(counts["refused"] <= 0.05 * order.samples for counts in runs)


def test_a_daemon_that_comes_back_an_epoch_later_takes_up_its_old_role() -> None:
    order, held = job(4), 0.6
    nodes = Nodes(4, order, held)
    nodes.run(3)
    nodes.run(1, lambda: nodes.lose(3))
    nodes.run(1)
    (first,) = nodes.run(1, lambda: nodes.restart(3), part=0.02)
    later = nodes.run(3)
    assert first["shared"] == 1
    for counts in later[1:]:
        assert counts["source"] <= (1 - held) * order.samples + 0.03 * order.samples
        assert counts["refused"] <= 0.015 * order.samples
        assert counts["peer"] > 0


@pytest.mark.parametrize("both, noticed", [(False, True), (True, False)])
def test_nodes_that_do_not_reach_each_other_read_the_source_until_they_do(
    *, both: bool, noticed: bool
) -> None:
    """Also if only one of the two does not reach the other. What each is to hold stays the same."""
    order = job(4, 960)
    nodes = Nodes(4, order, 1.2)
    nodes.run(2)
    pairs = {(0, 3), (3, 0)} if both else {(0, 3)}
    nodes.part(pairs, pairs if noticed else set())
    apart = nodes.run(2)
    nodes.part(set(), set())
    later = nodes.run(2)
    for counts in apart:
        # A node reads a sixteenth of the objects on each other one.
        assert 0 < counts["source"] <= len(pairs) * (1 / 16 + 0.02) * order.samples
    assert later[1]["source"] <= 0.01 * order.samples
    assert sum(counts["shared"] for counts in apart + later) == 0


def test_a_node_that_joins_an_epoch_later_takes_over_what_the_others_know() -> None:
    order = job(4, 1920)
    nodes = Nodes(4, order, 0.9)
    nodes.late.add(0)
    nodes.run(2)
    nodes.late.clear()
    runs = nodes.run(4)
    assert sum(counts["shared"] for counts in runs) == 1
    for counts in runs[-2:]:
        assert counts["refused"] <= 0.015 * order.samples
        assert counts["source"] <= (1 - 0.9 + 0.015) * order.samples
