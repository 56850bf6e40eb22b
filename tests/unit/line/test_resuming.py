"""Resume an epoch in another way than it was saved: other ranks or batches, or without some."""

from __future__ import annotations

import itertools
import json
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import creel
from creel.errors import ConfigError

N = 103


def ranks(world: int, batch: int, *, drop_last: bool = False, shuffle: bool = True) -> list[Any]:
    """Return a loader for each rank, which reads directly."""
    data = TensorDataset(torch.arange(N))
    loaders = []
    for rank in range(world):
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, world, rank, shuffle, 7, drop_last
        )
        loaders.append(creel.DataLoader(data, batch, sampler=sampler, creel=False))
    return loaders


def order(epoch: int, *, shuffle: bool = True) -> list[int]:
    """Return the global order, without padding."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        TensorDataset(torch.arange(N)), 1, 0, shuffle, 7
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def read(loaders: list[Any], epoch: int, steps: int = -1) -> list[int]:
    """Return the samples of the next steps of all ranks (-1: all that are left), as dealt."""
    out: list[int] = []
    for loader in loaders:
        loader.set_epoch(epoch)
    for number, batches in enumerate(zip(*loaders, strict=True), 1):
        rows = [batch[0].tolist() for batch in batches]
        out += [x for dealt in zip_longest(*rows) for x in dealt if x is not None]
        if number == steps:
            break
    return out


def resumed(state: Any, loaders: list[Any]) -> list[Any]:
    for loader in loaders:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("old, new", [((2, 4), (4, 2)), ((4, 2), (1, 8)), ((3, 5), (2, 7))])
def test_the_rest_of_the_epoch_goes_on_in_the_global_order(
    old: tuple[int, int], new: tuple[int, int], *, shuffle: bool
) -> None:
    before = ranks(*old, shuffle=shuffle)
    head = read(before, 3, steps=4)
    after = resumed(before[-1].state_dict(), ranks(*new, shuffle=shuffle))
    remaining = read(after, 3)
    whole = order(3, shuffle=shuffle)
    assert (head + remaining)[:N] == whole
    padding = len(head + remaining) - N
    assert padding < new[0]
    assert (head + remaining)[N:] == whole[:padding]
    later = read(after, 4)
    assert later[:N] == order(4, shuffle=shuffle), "the next epoch is a whole one"


def test_ranks_that_change_twice_in_one_epoch_read_nothing_twice() -> None:
    first = ranks(4, 3)
    head = read(first, 1, steps=2)
    second = resumed(first[0].state_dict(), ranks(3, 4))
    middle = read(second, 1, steps=3)
    third = resumed(second[1].state_dict(), ranks(5, 2))
    assert (head + middle + read(third, 1))[:N] == order(1)


def test_a_rank_that_resumes_in_the_same_number_goes_on_within_the_rest() -> None:
    first = ranks(4, 3)
    read(first, 1, steps=2)
    second = resumed(first[0].state_dict(), ranks(2, 6))
    read(second, 1, steps=2)
    third = resumed(second[0].state_dict(), ranks(2, 6))
    assert read(third, 1)[: N - 48] == order(1)[48:]


def test_samples_that_cannot_be_dealt_evenly_are_dropped_where_the_sampler_says_so() -> None:
    first = ranks(2, 4, drop_last=True)
    head = read(first, 0, steps=3)
    remaining = read(resumed(first[0].state_dict(), ranks(4, 2, drop_last=True)), 0)
    assert head + remaining == order(0)[: 24 + (N - 24) // 4 * 4]


def test_an_epoch_that_was_read_to_its_end_is_followed_by_the_next_one() -> None:
    first = ranks(2, 4)
    read(first, 0)
    assert read(resumed(first[0].state_dict(), ranks(3, 4)), 1)[:N] == order(1)


def test_a_state_of_other_data_is_refused() -> None:
    first = ranks(2, 4)
    read(first, 0, steps=2)
    state = first[0].state_dict()
    data = TensorDataset(torch.arange(N + 10))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 4, 0)
    loader: Any = creel.DataLoader(data, 4, sampler=sampler, creel=False)
    with pytest.raises(ConfigError, match="other data than this loader's 113 samples"):
        loader.load_state_dict(state)


# --- without some batches ---------------------------------------------------------------------


def loader(workers: int = 0, **options: Any) -> Any:
    data = TensorDataset(torch.arange(N))
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"shuffle": True, "generator": generator} | options
    return creel.DataLoader(data, 5, num_workers=workers, creel=False, **given)


def rows(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_that_are_left_out_are_not_read(workers: int, *, drop_last: bool) -> None:
    whole = rows(loader(drop_last=drop_last))
    first = loader(drop_last=drop_last)
    it = iter(first)
    head = [next(it)[0].tolist() for _ in range(4)]
    resumed = loader(workers, drop_last=drop_last)
    resumed.load_state_dict(first.state_dict(), leave_out=[2, 6, 7, 20, 99])
    remaining = rows(resumed)
    assert head + remaining == [b for k, b in enumerate(whole) if k not in {6, 7, 20}]
    assert len(rows(resumed)) == len(whole), "the next epoch is a whole one"


def test_more_batches_are_left_out_of_what_was_left() -> None:
    whole = rows(loader())
    first = loader()
    next(iter(first))
    second = loader()
    second.load_state_dict(first.state_dict(), leave_out=[3, 4])
    it = iter(second)
    assert [next(it)[0].tolist() for _ in range(3)] == [whole[1], whole[2], whole[5]]
    third = loader()
    third.load_state_dict(json.loads(json.dumps(second.state_dict())), leave_out=[4])
    assert rows(third) == whole[7:], "its fifth batch was whole[6]"


def test_all_ranks_leave_out_the_same_global_batches() -> None:
    first = ranks(2, 4)
    read(first, 0, steps=2)
    after = ranks(2, 4)
    for loader in after:
        loader.load_state_dict(first[1].state_dict(), leave_out=range(3, 5))
    assert read(after, 0)[: N - 32] == order(0)[16:24] + order(0)[40:]
    again = ranks(2, 4)[0]
    again.load_state_dict(first[0].state_dict(), leave_out=[3])
    with pytest.raises(ConfigError, match="the same number of ranks"):
        ranks(3, 4)[0].load_state_dict(again.state_dict())
    with pytest.raises(ConfigError, match=r"batches of the 2 ranks that saved .*, not of 3"):
        ranks(3, 4)[0].load_state_dict(first[0].state_dict(), leave_out=[3])


def test_the_last_and_incomplete_batch_can_be_left_out() -> None:
    whole = rows(loader())
    assert len(whole[-1]) == N % 5
    first = loader()
    next(iter(first))
    resumed = loader()
    resumed.load_state_dict(first.state_dict(), leave_out=[len(whole) - 1])
    assert rows(resumed) == whole[1:-1]


def test_wrong_numbers_are_one_sentence() -> None:
    first = loader()
    next(iter(first))
    for wrong in ([-1], [1.5], ["a"]):
        with pytest.raises(ConfigError, match="from 0 on"):
            loader().load_state_dict(first.state_dict(), leave_out=wrong)
    listed = creel.DataLoader(TensorDataset(torch.arange(4)), sampler=Own(), creel=False)
    next(iter(listed))
    with pytest.raises(ConfigError, match="one of torch's samplers"):
        listed.load_state_dict(listed.state_dict(), leave_out=[2])


class Own:
    def __iter__(self) -> Any:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


# --- another batch size --------------------------------------------------------------------------


def sized(kind: str, batch: int | None) -> Any:
    """Return a loader that reads directly, in batches of this size (None: single samples)."""
    data = TensorDataset(torch.arange(N))
    generator = torch.Generator().manual_seed(5)
    samplers: dict[str, Any] = {
        "in order": SequentialSampler(data),
        "shuffled": RandomSampler(data, generator=generator),
        "drawn": RandomSampler(data, replacement=True, num_samples=N, generator=generator),
        "weighted": WeightedRandomSampler([1.0] * N, N, generator=generator),
        "distributed": DistributedSampler(data, 2, 1, seed=3),
        "own": Own(),
    }
    return creel.DataLoader(data, batch, sampler=samplers[kind], creel=False)


def samples(batches: Any) -> list[int]:
    return [int(x) for (batch,) in batches for x in batch.reshape(-1)]


@pytest.mark.parametrize("old, new", [(4, 3), (3, 8), (5, None), (None, 7), (N, 2), (2, N)])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "drawn", "weighted", "distributed"])
def test_another_batch_size_reads_the_rest_of_the_epoch(
    kind: str, old: int | None, new: int | None
) -> None:
    """Skipping as many batches as were read would read samples twice, or leave some out."""
    for read_before in (0, 1, 2, 7):
        first = sized(kind, old)
        it = iter(first)
        samples(itertools.islice(it, read_before))
        state = json.loads(json.dumps(first.state_dict()))
        remaining, later = samples(it), samples(first)
        second = sized(kind, new)
        second.load_state_dict(state)
        if not state["finished"]:
            assert samples(second) == remaining
        assert samples(second) == later, "the next epoch is a whole one"


def test_a_batch_size_may_change_once_in_an_epoch() -> None:
    first = sized("shuffled", 4)
    it = iter(first)
    samples(itertools.islice(it, 3))
    second = sized("shuffled", 5)
    second.load_state_dict(first.state_dict())
    assert samples(itertools.islice(iter(second), 2)) == samples(it)[:10]
    third = sized("shuffled", 5)
    third.load_state_dict(second.state_dict())
    with pytest.raises(ConfigError, match="another batch_size"):
        sized("shuffled", 4).load_state_dict(second.state_dict())
    assert samples(third) == samples(sized("shuffled", None))[22:]


def test_a_sampler_of_ones_own_is_resumed_at_whole_batches() -> None:
    first = sized("own", 2)
    next(iter(first))
    with pytest.raises(ConfigError, match="1 batches of 2"):
        sized("own", 3).load_state_dict(first.state_dict())
    second = sized("own", 1)
    with pytest.warns(UserWarning, match="not resumed"):
        second.load_state_dict(first.state_dict())
    assert samples(second) == [2, 3]


# --- a dataset of another length than its sampler knows -----------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 5, 30])
def test_a_sampler_of_other_data_raises_as_under_torch(length: int, *, drop_last: bool) -> None:
    def batches(kind: Any, **more: Any) -> Any:
        data = list(range(10))
        sampler: DistributedSampler[Any] = DistributedSampler(
            data,  # type: ignore[arg-type]  # its length is enough
            2,
            1,
            True,
            0,
            drop_last,
        )
        data[:] = range(length)
        loader = kind(data, 2, sampler=sampler, **more)
        try:
            return [batch.tolist() for batch in loader]
        except AssertionError as e:
            return str(e)

    ours = batches(creel.DataLoader, creel=False)
    assert ours == batches(torch.utils.data.DataLoader)
