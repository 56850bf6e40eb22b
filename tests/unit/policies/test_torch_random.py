"""The reproduction of torch's draws, against torch itself."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from creel.policies.order import torch_random
from creel.policies.order.division import Division
from kit import seeds


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy().tobytes())


@pytest.mark.parametrize("case", seeds(30))
def test_a_generator_goes_to_numpy_at_any_point(case: int) -> None:
    rng = random.Random(case)
    source = torch_generator(rng.getrandbits(60))
    before = rng.choice([0, 1, 623, 624, 625, rng.randrange(5000)])
    torch.empty(before, dtype=torch.int32).random_(generator=source)
    if rng.random() < 0.5:
        torch.randn(3, generator=source)  # leaves a cached normal deviate in the state
    ours = torch_random.TorchRandom(source.get_state().numpy())
    k = rng.choice([1, 2, 311, 624, rng.randrange(1, 4000)])
    want = torch.empty(k, dtype=torch.int64).random_(0, 2**20, generator=source)
    assert (ours.random(k) % 2**20).tolist() == want.tolist()
    assert ours.random(1) == torch_random.TorchRandom(state(source)).random(1)


def test_bytes_that_are_no_generator_s_state_are_refused() -> None:
    with pytest.raises(ValueError, match="5056"):
        torch_random.TorchRandom(b"x")
    with pytest.raises(ValueError, match="words left"):
        torch_random.TorchRandom(bytes(5056))


@pytest.mark.parametrize("case", seeds(60))
def test_permutations_and_their_prefixes_are_torch_s(case: int) -> None:
    rng = random.Random(case)
    n = rng.choice([0, 1, 2, 3, rng.randrange(50), rng.randrange(3000), rng.randrange(200_000)])
    seed = rng.getrandbits(63)
    source = torch_generator(seed)
    ours, again = (torch_random.TorchRandom(state(source)) for _ in range(2))
    want = torch.randperm(n, generator=source).numpy()
    got = torch_random.Shuffle(n, ours).more(n)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    assert ours.random(1) == torch_random.TorchRandom(state(source)).random(1)
    k = rng.randrange(n + 3)
    shuffle = torch_random.Shuffle(n, again)
    pieces: list[NDArray[np.int32]] = []
    while sum(map(len, pieces)) < min(k, n):
        pieces.append(shuffle.more(rng.randrange(1, k + 1)))
    np.testing.assert_array_equal(np.concatenate([*pieces, got[:0]])[:k], want[:k])


def test_the_head_of_a_huge_permutation_costs_its_own_draws_only() -> None:
    n, seed = 3_000_000, 5
    rng, twin = (torch_random.TorchRandom(state(torch_generator(seed))) for _ in range(2))
    tracemalloc.start()
    head = torch_random.Shuffle(n, rng).more(2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n // 4  # no array has an entry for each place
    assert rng.random(1) == twin.random(2001)[-1]
    whole = torch.randperm(n, generator=torch_generator(seed), dtype=torch.int32)
    np.testing.assert_array_equal(head, whole[:2000].numpy())


@pytest.mark.parametrize("n", [-1, torch_random.SHUFFLE_LIMIT])
def test_a_permutation_that_torch_draws_otherwise_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="cannot re-create"):
        torch_random.Shuffle(n, torch_random.TorchRandom(state(torch_generator(0))))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("total, size", [(0, 3), (1, 3), (3, 3), (7, 3), (9, 3), (100, 1)])
def test_batches_end_where_torch_s_end(total: int, size: int, drop_last: bool) -> None:
    want = torch.utils.data.BatchSampler(range(total), size, drop_last)
    division = Division(size, drop_last)
    ends = division.ends(0, division.steps(total), total)
    got = [list(range(a, b)) for a, b in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
    assert got == list(want)
