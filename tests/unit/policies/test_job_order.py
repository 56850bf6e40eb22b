"""The order of a whole job, computed from a few numbers, is what torch's sampler deals."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, Subset

from creel.policies.cluster.job_order import IN_ORDER, JobOrder, SampleObjects, hash_of


@pytest.mark.parametrize("samples, world", [(1, 1), (2, 3), (101, 4), (1000, 7), (40_000, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_reads_what_torchs_sampler_deals(
    samples: int, world: int, drop_last: bool, shuffle: bool
) -> None:
    if drop_last and samples < world:
        return
    for rank in range(world):
        sampler: DistributedSampler[object] = DistributedSampler(
            range(samples),  # type: ignore[arg-type]  # its length is all that is needed
            world,
            rank,
            shuffle,
            5,
            drop_last,
        )
        sampler.set_epoch(3)
        seed = 8 if shuffle else IN_ORDER
        order = JobOrder(samples, world, len(sampler), 16, seed)
        assert order.sound()
        assert order.by_rank(range(world))[rank].tolist() == list(sampler)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_read_the_objects_of_a_subset(shuffle: bool) -> None:
    objects = np.random.default_rng(0).permutation(400)[:101].astype(np.int32)
    subset: Subset[int] = Subset(range(400), objects.tolist())  # type: ignore[arg-type]
    seed = 5 if shuffle else IN_ORDER
    order = JobOrder(101, 3, 34, 16, seed, object_of=SampleObjects(objects))
    assert order.sound()
    for rank in range(3):
        sampler: DistributedSampler[int] = DistributedSampler(subset, 3, rank, shuffle, 5)
        assert order.by_rank(range(3))[rank].tolist() == [subset[i] for i in sampler]
    assert not order._replace(samples=100).sound()


def test_jobs_that_read_other_parts_are_told_apart() -> None:
    parts = [SampleObjects(np.arange(k, k + 10, dtype=np.int32)) for k in (0, 0, 10)]
    first, same, other = (JobOrder(10, 1, 10, 1, 7, object_of=part) for part in parts)
    assert first == same != other
    assert first.mark == same.mark != other.mark
    assert hash(first) == hash(same)
    assert JobOrder(10, 1, 10, 1, 7).mark == 7


def test_parts_are_compared_without_a_copy() -> None:
    """In the loop's thread: of a hundred million samples, a copy alone takes a second."""
    first, same = (SampleObjects(np.arange(1 << 20, dtype=np.int32)) for _ in range(2))
    assert first.digest == SampleObjects(first.objects, hash_of(first.objects)).digest
    tracemalloc.start()
    try:
        assert first == same
        assert tracemalloc.get_traced_memory()[1] < 1 << 12
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32 + 7, 10**15])
def test_a_seed_counts_as_in_torch(seed: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(seed)
    expected = torch.randperm(3000, generator=generator).numpy()
    assert np.array_equal(JobOrder(3000, 1, 3000, 1, seed).permutation(), expected)


def test_later_epochs_follow_from_two() -> None:
    first, second = (JobOrder(10, 1, 10, 1, seed) for seed in (20, 21))
    assert second.after(first, 3).seed == 24
    assert first.after(first, 3).seed == 20  # set_epoch was not called: the same order again
    assert JobOrder(10, 1, 10, 1, IN_ORDER).after(first, 3).seed == IN_ORDER


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"world": 0},
        {"each": 1 << 31},
        {"batch": -1},
        {"each": 10_000},
        {"seed": -2},
        {"seed": 1 << 64},
        {"samples": 1 << 30, "each": 1 << 29},
    ],
)
def test_impossible_numbers_are_no_order(wrong: dict[str, Any]) -> None:
    assert not JobOrder(100, 4, 25, 8, 1)._replace(**wrong).sound()
