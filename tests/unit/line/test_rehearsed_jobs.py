"""What daemons are told of a job that rehearses: what its ranks read, and what they may read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import observe
from torch.utils.data import DistributedSampler, Subset

import creel
from core_shell import CoreShell
from creel.daemon.core.events import Progressed, SamplesTold
from creel.loader.data.binding.bind import Binding, bind
from creel.loader.line.order.epoch_plan import EpochPlan
from creel.messages import Close
from creel.policies.cluster.job_order import JobOrder, JobReplays, SampleObjects
from creel.policies.rehearsal.replay_passes import Passes

FILES, TASK = 130, 37


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> creel.FileDataset:
    folder = tmp_path_factory.mktemp("files")
    for i in range(FILES):
        Path(folder, f"{i:03}").write_bytes(bytes(1 + i % 3))
    return creel.FileDataset(str(folder))


def parts(data: Any) -> list[Subset[Any]]:
    order = torch.randperm(FILES, generator=torch.Generator().manual_seed(1)).tolist()
    return [Subset(data, order[k : k + TASK]) for k in range(0, 3 * TASK, TASK)]


def loader_of(task: Any, memory: creel.Rehearsal, rank: int, world: int, **more: Any) -> Any:
    sampler: DistributedSampler[Any] = DistributedSampler(task, world, rank, seed=3, **more)
    return creel.DataLoader(task, 4, sampler=sampler, rehearsal=memory, collate_fn=list)


def order_of(plan: EpochPlan | None, binding: Binding | None) -> JobOrder:
    """Return what a daemon is told of an epoch."""
    assert plan is not None
    assert binding is not None
    deal = plan.deal
    assert deal is not None
    order = binding.in_objects(deal)
    assert order is not None
    assert order.sound()
    return order


@pytest.mark.parametrize("per_batch, budget, world", [(3, 20, 1), (2, None, 3), (5, 9, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_read_what_daemons_are_told(
    data: Any, per_batch: int, budget: int | None, world: int, shuffle: bool
) -> None:
    """Also with fewer rows than the ranks replay in a step, and in epochs to come."""
    first, second, third = parts(data)
    memory = creel.Rehearsal(per_batch, budget=budget)
    memory.add(first)
    memory.add(third)
    loaders = [loader_of(second, memory, rank, world, shuffle=shuffle) for rank in range(world)]
    epochs = [observe(loader) for loader in loaders]
    for ahead in range(3):
        plans = [epoch.predict(ahead) for epoch in epochs]
        bindings = [bind(loader.dataset) for loader in loaders]
        orders = list(map(order_of, plans, bindings))
        assert len(set(orders)) == 1, "ranks do not say the same"
        assert orders[0].replays is not None
        for plan, binding, read in zip(
            plans, bindings, orders[0].by_rank(range(world)), strict=True
        ):
            assert plan is not None
            assert binding is not None
            indices, ends = plan.cut(0, plan.steps)
            assert read.tolist() == binding.objects(indices.astype(np.int64))[0].tolist()
            assert orders[0].ends.tolist() == ends.tolist()


def test_while_a_memory_grows_within_an_epoch_nobody_is_told(data: Any) -> None:
    first, second, _ = parts(data)
    memory = creel.Rehearsal(2, every=2)
    memory.add(first)
    epoch = observe(loader_of(second, memory, 0, 2))
    plans = [epoch.predict(k) for k in range(2)]
    assert [plan is not None and plan.deal is None for plan in plans] == [True, False]


def test_before_anything_was_added_a_loader_rehearses_but_replays_nothing(data: Any) -> None:
    loader = loader_of(parts(data)[0], creel.Rehearsal(2), 0, 2)
    epoch = observe(loader)
    assert order_of(epoch.predict(), bind(loader.dataset)).replays is None
    assert epoch.extended


def test_a_job_may_read_its_samples_and_the_kept_ones(data: Any) -> None:
    first, second, _ = parts(data)
    memory = creel.Rehearsal(2, budget=5)
    memory.add(first)
    binding = bind(loader_of(second, memory, 0, 1).dataset)
    assert binding is not None
    object_of = binding.of_samples(TASK + 5)
    assert object_of is not None
    kept = [first.indices[uid] for uid in memory.uids]
    assert object_of.objects.tolist() == [*second.indices, *kept]


@pytest.mark.parametrize("lacks", ["among", "world", "rows", "steps", "seed", "first_step"])
def test_impossible_replays_are_not_sound(data: Any, lacks: str) -> None:
    first, second, _ = parts(data)
    memory = creel.Rehearsal(2)
    memory.add(first)
    loader = loader_of(second, memory, 0, 2)
    order = order_of(observe(loader).predict(), bind(loader.dataset))
    replays = order.replays
    assert replays is not None
    wrong = {
        "among": order._replace(object_of=None),
        "world": order._replace(replays=replays._replace(passes=replays.passes._replace(world=3))),
        "rows": order._replace(replays=replays._replace(passes=replays.passes._replace(kept=1))),
        "steps": order._replace(
            replays=replays._replace(passes=replays.passes._replace(each=1 << 29))
        ),
        "seed": order._replace(replays=replays._replace(passes=replays.passes._replace(seed=-1))),
        "first_step": order._replace(replays=replays._replace(first_step=1 << 63)),
    }
    assert not wrong[lacks].sound()
    assert np.concatenate(order.by_rank([0, 1])).max() < FILES


def test_a_rank_that_goes_on_to_the_next_task_leaves_the_others_behind() -> None:
    """Its epochs begin anew, while the other rank still reads the last one of its task."""
    shell = CoreShell(100)
    shell.add("d", np.ones(8, np.int64))
    ids, ends = np.arange(8, dtype=np.int32).repeat(3), np.arange(1, 25, dtype=np.int64)
    for rank in (0, 1):
        shell.open(1 + rank, "d", "j", rank, 2)
        shell.feed(SamplesTold(1 + rank, SampleObjects(ids)))
        shell.tell(1 + rank, 0, ids, ends)
        shell.settle()
        shell.feed(Progressed(1 + rank, 20, 21))
    shell.feed(Close(1))
    shell.open(3, "d", "j", 0, 2)
    shell.feed(Close(2))
    shell.open(4, "d", "j", 1, 2)
    groups = shell.core._readers["d"].groups
    assert [sorted(s.id for s in group.sessions.values()) for group in groups] == [[3, 4]]
    assert {s.shift for group in groups for s in group.sessions.values()} == {0}


@pytest.mark.parametrize(
    "kept, each, steps, quick",
    [
        (200, 8, 10_000, True),
        (200, 256, 10_000, False),
        (10, 10, 100_000, False),
        (1000, 1 << 20, 2000, False),
        (1 << 20, 32, 100_000, True),
    ],
)
def test_an_order_that_takes_long_to_compute_is_followed(
    kept: int, each: int, steps: int, quick: bool
) -> None:
    """The planner serves all jobs of a node."""
    replays = JobReplays(Passes(kept, each, 1, seed=1), 0)
    assert replays.quick(steps) == quick
