"""A checkpoint of one number of ranks, resumed by another: the rest of the epoch in its order."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import creel
from creel.errors import ConfigError

N = 103


def ranks(world: int, batch: int, *, drop_last: bool = False, shuffle: bool = True) -> list[Any]:
    """A loader for each rank, which reads directly."""
    data = TensorDataset(torch.arange(N))
    loaders = []
    for rank in range(world):
        sampler: DistributedSampler[Any] = DistributedSampler(
            *(data, world, rank, shuffle, 7, drop_last)
        )
        loaders.append(creel.DataLoader(data, batch, sampler=sampler, creel=False))
    return loaders


def order(epoch: int, *, shuffle: bool = True) -> list[int]:
    """The global order, without padding."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        TensorDataset(torch.arange(N)), 1, 0, shuffle, 7
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def read(loaders: list[Any], epoch: int, steps: int = -1) -> list[int]:
    """The samples of the next steps of all ranks (-1: of the rest of the epoch), as dealt."""
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
    rest = read(after, 3)
    whole = order(3, shuffle=shuffle)
    assert (head + rest)[:N] == whole
    padding = len(head + rest) - N
    assert padding < new[0]
    assert (head + rest)[N:] == whole[:padding]
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


def test_what_cannot_be_dealt_evenly_is_dropped_where_the_sampler_says_so() -> None:
    first = ranks(2, 4, drop_last=True)
    head = read(first, 0, steps=3)
    rest = read(resumed(first[0].state_dict(), ranks(4, 2, drop_last=True)), 0)
    assert head + rest == order(0)[: 24 + (N - 24) // 4 * 4]


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
