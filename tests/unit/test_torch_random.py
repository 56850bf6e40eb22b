"""The pure re-creation of torch's draws, against torch itself."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler

from creel.policies import torch_random


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy().tobytes())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, 2**64 - 1, -1, -(2**62)])
def test_a_seed_gives_torch_s_draws(seed: int) -> None:
    want = torch.empty(2000, dtype=torch.int64).random_(generator=torch_generator(seed))
    got = torch_random.TorchRandom(seed).random64(2000) & np.uint64(2**63 - 1)
    assert got.tolist() == want.tolist()
    rng, ours = torch_generator(seed), torch_random.TorchRandom(seed)
    for _ in range(5):
        drawn = torch.empty((), dtype=torch.int64).random_(generator=rng).item()
        assert torch_random.draw_seed(ours) == drawn


@pytest.mark.parametrize("case", range(60))
def test_a_generator_goes_to_numpy_and_back_at_any_point(case: int) -> None:
    rng = random.Random(case)
    source = torch_generator(rng.getrandbits(60))
    before = rng.choice([0, 1, 623, 624, 625, rng.randrange(5000)])
    torch.empty(before, dtype=torch.int32).random_(generator=source)
    if rng.random() < 0.5:
        torch.randn(3, generator=source)  # leaves a kept normal deviate behind
    ours = torch_random.TorchRandom.from_state(source.get_state().numpy())
    k = rng.choice([1, 2, 311, 624, rng.randrange(1, 4000)])
    twin = ours.copy()
    ours.skip(k)
    old = source.get_state().numpy().tobytes()
    want = torch.empty(k, dtype=torch.int64).random_(0, 2**20, generator=source)
    assert (twin.random(k) % 2**20).tolist() == want.tolist()
    assert ours.into_state(old) == state(source) == twin.into_state(old)


def test_what_is_no_generator_state_is_refused() -> None:
    with pytest.raises(ValueError, match="5056"):
        torch_random.TorchRandom.from_state(b"x")
    with pytest.raises(ValueError, match="words left"):
        torch_random.TorchRandom.from_state(bytes(5056))


@pytest.mark.parametrize("case", range(100))
def test_permutations_and_their_prefixes_are_torch_s(case: int) -> None:
    rng = random.Random(case)
    n = rng.choice([0, 1, 2, 3, rng.randrange(50), rng.randrange(3000), rng.randrange(200_000)])
    seed = rng.getrandbits(63)
    source = torch_generator(seed)
    want = torch.randperm(n, generator=source).numpy()
    ours = torch_random.TorchRandom(seed)
    got = torch_random.permutation(n, ours)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    assert ours.into_state(state(source))[24:] == state(source)[24:]  # and leaves it there
    k = rng.randrange(n + 3)
    np.testing.assert_array_equal(torch_random.permutation_prefix(n, seed, k), want[:k])


def test_the_head_of_a_huge_permutation_costs_its_own_draws_only() -> None:
    n, seed = 3_000_000, 5
    rng = torch_random.TorchRandom(seed)
    tracemalloc.start()
    head = torch_random.permutation_prefix(n, rng, 2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n // 4  # nothing has a place for each entry
    assert rng.random(1) == torch_random.TorchRandom(seed).random(2001)[-1]
    whole = torch.randperm(n, generator=torch_generator(seed), dtype=torch.int32)
    np.testing.assert_array_equal(head, whole[:2000].numpy())


@pytest.mark.parametrize("n", [-1, torch_random.SHUFFLE_LIMIT])
def test_a_permutation_that_torch_draws_otherwise_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="cannot re-create"):
        torch_random.permutation_prefix(n, 0, 3)


@pytest.mark.parametrize("case", range(40))
def test_draws_with_replacement_are_torch_s(case: int) -> None:
    rng = random.Random(case)
    n = rng.choice([1, 7, 1000, 2**28 - 1, 2**28, 2**31 - 1])
    if n >= torch_random.WIDE_RANGE and torch.__version__ < "2.6":
        pytest.skip("drawn otherwise: followed batch by batch, as any wrong prediction")
    k = rng.choice([1, 31, 32, 33, rng.randrange(1, 3000)])
    seed = rng.getrandbits(63)
    sampler = RandomSampler(range(n), True, k, torch_generator(seed))
    assert torch_random.with_replacement(n, k, seed).tolist() == list(sampler)


@pytest.mark.parametrize("case", range(20))
def test_a_shuffled_subset_is_torch_s(case: int) -> None:
    rng = random.Random(case)
    chosen = rng.sample(range(10_000), rng.randrange(500))
    got = torch_random.subset_random(np.array(chosen, dtype=np.int32), case)
    assert got.tolist() == list(SubsetRandomSampler(chosen, torch_generator(case)))


@pytest.mark.parametrize("case", range(80))
def test_every_rank_reads_what_the_distributed_sampler_says(case: int) -> None:
    rng = random.Random(case)
    n, world = rng.choice([1, 2, 5, rng.randrange(1, 400)]), rng.randrange(1, 12)
    shuffle, drop_last = rng.random() < 0.7, rng.random() < 0.5
    seed, epoch = rng.randrange(-3, 100), rng.randrange(5)
    ranks = []
    for rank in range(world):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(n),  # type: ignore[arg-type]  # sized
            world,
            rank,
            shuffle,
            seed,
            drop_last,
        )
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        got = torch_random.distributed(
            n, seed, epoch, rank, world, shuffle=shuffle, drop_last=drop_last
        )
        assert got.tolist() == ranks[-1]
    order = torch_random.permutation(n, seed + epoch) if shuffle else torch_random.sequential(n)
    assert torch_random.rank_slices(order, world, drop_last=drop_last).tolist() == ranks
    given = torch_random.distributed(n, 0, 0, 0, world, drop_last=drop_last, order=order)
    assert given.tolist() == ranks[0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("total, size", [(0, 3), (1, 3), (3, 3), (7, 3), (9, 3), (100, 1)])
def test_batches_end_where_torch_s_end(total: int, size: int, drop_last: bool) -> None:
    want = torch.utils.data.BatchSampler(range(total), size, drop_last)
    ends = torch_random.batches(total, size, drop_last=drop_last)
    got = [list(range(a, b)) for a, b in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
    assert got == list(want)


@pytest.mark.parametrize("case", range(30))
def test_next_use_is_the_next_place_of_the_same_sample(case: int) -> None:
    rng = random.Random(case)
    trace = [rng.randrange(20) for _ in range(rng.randrange(60))]
    want = [
        next((j for j in range(i + 1, len(trace)) if trace[j] == trace[i]), torch_random.NEVER)
        for i in range(len(trace))
    ]
    assert torch_random.next_use(np.array(trace, dtype=np.int32)).tolist() == want
