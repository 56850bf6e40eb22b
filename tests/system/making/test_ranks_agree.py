"""Two real ranks, each on a node of its own by name, agree on how they exchange samples."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import creel
from creel.errors import ConfigError
from creel.loader.making.groups import exchange
from testbed.ranks import ranks

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(120)]

SAMPLES, BATCH = 203, 10


def loader_of(rank: int, batch: int = BATCH, workers: int = 0, **more: Any) -> Any:
    exchange.node_name = lambda: f"n{rank}"  # type: ignore[attr-defined]  # in the module that uses it
    data = TensorDataset(torch.arange(SAMPLES))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, rank, seed=3)
    more = {"remap": "global-batch", **more}
    return creel.DataLoader(data, batch, sampler=sampler, num_workers=workers, creel=False, **more)


def torchs(epoch: int) -> list[list[list[int]]]:
    """Return for each rank the batches that torch deals to it."""
    loaders = [loader_of(rank, remap=None) for rank in range(2)]
    for loader in loaders:
        loader.set_epoch(epoch)
    return [[batch.tolist() for (batch,) in loader] for loader in loaders]


def together(batches: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(chain(*step)) for step in zip(*batches, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_step_has_torchs_samples_also_where_another_loader_goes_on(
    workers: int, tmp_path: Path
) -> None:
    def read(rank: int) -> list[list[list[int]]]:
        loader, out = loader_of(rank, workers=workers), []
        for epoch in range(2):
            loader.set_epoch(epoch)
            out.append([batch.tolist() for (batch,) in loader])
        it = iter(loader)
        head = [next(it)[0].tolist() for _ in range(3)]
        resumed = loader_of(rank)
        resumed.load_state_dict(loader.state_dict())
        out.append(head + [batch.tolist() for (batch,) in resumed])
        return out

    said = ranks(read, tmp_path)
    for epoch, batches in enumerate(zip(*said, strict=True)):
        assert together(list(batches)) == together(torchs(min(epoch, 1)))
        assert list(batches) != torchs(min(epoch, 1)), "nothing was exchanged"


def test_ranks_that_differ_all_raise(tmp_path: Path) -> None:
    def read(rank: int) -> str:
        with pytest.raises(ConfigError) as e:
            iter(loader_of(rank, batch=BATCH + rank))
        return str(e.value)

    first, other = ranks(read, tmp_path)
    assert first == other
    assert "batch_size" in first


def test_a_rank_whose_batch_size_changes_later_raises(tmp_path: Path) -> None:
    def read(rank: int) -> bool:
        loader = loader_of(rank)
        list(loader)
        loader.batch_sampler.batch_size = BATCH + 1
        with pytest.raises(ConfigError, match="batch_size"):
            iter(loader)
        return True

    assert ranks(read, tmp_path) == [True, True]
