"""The laws for memory and disk together, on the real core and a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from simulate import CoreNode, Job, Outcome, Replay

pytestmark = pytest.mark.timeout(120)

N, BATCH = 4_000, 16


def shuffled(epochs: int, ranks: int = 1) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.permutation(N).reshape(-1, ranks).T.astype(np.int32).copy() for _ in range(epochs)]


def replay(
    lengths: NDArray[np.int64], memory: float, disk: float, epochs: int = 4, ranks: int = 1
) -> tuple[list[Outcome], CoreNode]:
    """`memory`, `disk`: parts of the data; a record on disk is 64 bytes longer than its object."""
    total = int(lengths.sum())
    room = int(disk * (total + 64 * N))
    node = CoreNode(lengths, int(memory * total), range(ranks), ranks, disk=room)
    job = Job(shuffled(epochs, ranks), BATCH, ranks_per_node=ranks)
    replay = Replay(job, [node], watch=lambda: None)
    out = replay.run()
    node.core.check()
    return out, node


def images() -> NDArray[np.int64]:
    rng, spread = np.random.default_rng(1), np.log(1 + (100 / 110) ** 2)
    sizes = rng.lognormal(np.log(11e3) - spread / 2, np.sqrt(spread), N)
    return sizes.astype(np.int64) + 1


@pytest.mark.parametrize(("memory", "disk", "same"), [(0.1, 1.0, False), (0.5, 0.65, True)])
def test_objects_that_memory_and_disk_hold_together_are_read_once(
    memory: float, disk: float, same: bool
) -> None:
    lengths = np.full(N, 10_000) if same else images()
    out, _ = replay(lengths, memory, disk)
    assert [e.reads for e in out] == [N, 0, 0, 0]
    assert sum(e.direct for e in out) == 0


@pytest.mark.parametrize(("memory", "disk"), [(0.3, 0.3), (0.05, 0.7)])
def test_objects_that_do_not_fit_into_both_are_all_that_is_read(memory: float, disk: float) -> None:
    """L1 for the sum of both; objects on their way between them use 1/16 of the memory twice."""
    out, _ = replay(np.full(N, 10_000), memory, disk)
    f = memory + disk
    for epoch in out[2:]:
        assert (1 - f) * N * 0.99 <= epoch.reads + epoch.direct
        assert epoch.reads + epoch.direct <= (1 - f + memory / 8 + 0.01) * N


def test_a_disk_that_holds_all_is_written_once() -> None:
    """Whatever memory holds, objects read from disk are not written again."""
    _, node = replay(np.full(N, 10_000), 0.2, 1.05, epochs=5)
    assert node.spilled == N


def test_four_ranks_on_a_node_share_one_disk() -> None:
    out, _ = replay(np.full(N, 10_000), 0.3, 0.9, ranks=4)
    assert [e.reads for e in out] == [N, 0, 0, 0]


def test_without_a_disk_nothing_is_written() -> None:
    _, node = replay(np.full(N, 10_000), 0.3, 0.0)
    assert node.spilled == node.disk_reads == 0


@pytest.mark.parametrize(("memory", "disk"), [(0.2, 1.05), (0.5, 0.65)])
def test_memory_serves_its_share_of_the_reads(memory: float, disk: float) -> None:
    """The best that any policy achieves between two reads is the part that memory holds.

    Objects on disk are not read so far ahead that they take the room of objects read again soon.
    """
    epochs = 4
    _, node = replay(np.full(N, 10_000), memory, disk, epochs)
    assert node.disk_reads <= (epochs - 1) * (1 - memory + 0.03) * N
