"""Real ranks of one group (tensor, pipeline, context parallel): one per node makes the batches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import creel
from creel.errors import ConfigError
from testbed import cluster
from testbed.ranks import ranks

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(120)]

SAMPLES, BATCH, GROUP = 90, 5, 2
CLONE_NEWNET = 0x40000000


class Augmented(Dataset[Any]):
    """Samples that differ each time they are made, and then append a mark to a file."""

    def __init__(self, folder: Path, floats: int = 5000) -> None:
        self.marks, self.floats = folder / "made", floats

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with self.marks.open("ab", buffering=0) as file:
            file.write(b"x")
        if index == SAMPLES:
            raise KeyError("no such sample")
        return torch.rand(self.floats) + index, {"index": index, "name": f"s{index}"}

    def samples_made(self) -> int:
        return self.marks.stat().st_size


def loader_of(rank: int, folder: Path, workers: int, **more: Any) -> Any:
    """Return torch's or creel's loader of a rank; the sampler counts each group as one rank."""
    torch.manual_seed(3)
    data = Augmented(folder, more.pop("floats", 5000))
    given: Any = DistributedSampler(data, 2, rank // GROUP, seed=7)
    options = {"sampler": given, "num_workers": workers, **more}
    if "replicate" not in more:
        return DataLoader(data, BATCH, **options)
    return creel.DataLoader(data, BATCH, creel=False, **options)


def digest(batch: Any) -> str:
    rows, labels = batch
    return hashlib.sha256(rows.numpy().tobytes() + repr(labels).encode()).hexdigest()


def epochs(loader: Any) -> Iterator[str]:
    """Yield digests of three epochs, of which the second is left early; overwrite each batch."""
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            yield digest(batch)
            batch[0].zero_()
            if (epoch, i) == (1, 3):
                break


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 2},
        {"workers": 2, "persistent_workers": True},
        {"workers": 2, "persistent_workers": True, "in_order": False, "floats": 20},
    ],
    ids=["inline", "workers", "persistent", "small"],
)
def test_a_group_has_torchs_batches_and_makes_each_once(options: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("creel", "torch", "creels", "torchs")]
    for folder in folders:
        folder.mkdir()
    ours, theirs = (
        ranks(
            lambda rank, folder=folder, more=more: list(epochs(loader_of(rank, folder, **more))),  # type: ignore[misc]
            meeting,
            world,
        )
        for folder, meeting, world, more in (
            (folders[0], folders[2], 4, {**options, "replicate": GROUP}),
            (folders[1], folders[3], 1, options),
        )
    )
    assert ours[0] == ours[1] != ours[2] == ours[3]
    if options.get("in_order", True):
        assert ours[0] == theirs[0], "not what torch gives to a rank with the leader's seed"
        # In the epoch that is left early, two workers may be making the next batches.
        assert (
            Augmented(folders[0]).samples_made()
            <= 2 * Augmented(folders[1]).samples_made() + 8 * BATCH
        )


def test_workers_that_share_a_socket_make_a_groups_batches(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shared", "own", "shareds", "owns")]
    for folder in folders:
        folder.mkdir()

    def run(rank: int, folder: Path, **more: Any) -> list[str]:
        torch.manual_seed(3)
        given: Any = DistributedSampler(Augmented(folder), 2, rank // GROUP, seed=7)
        theirs = creel.DataLoader(given.dataset, BATCH, sampler=given, creel=False, **more)
        return list(epochs(theirs))

    shared = {"num_workers": 3, "workers": "shared", "replicate": GROUP}
    ours = ranks(lambda rank: run(rank, folders[0], **shared), folders[2], 4)
    alone = ranks(lambda rank: run(rank, folders[1], seeding="sample"), folders[3], 1)
    assert ours[0] == ours[1] == alone[0]
    assert ours[2] == ours[3] != ours[0]


class Pinnable:
    """A batch that records in which thread its memory was pinned."""

    def __init__(self, samples: list[Any]) -> None:
        self.rows = torch.stack([row for row, _ in samples])
        self.pinned = ""

    def pin_memory(self) -> Pinnable:
        self.pinned = threading.current_thread().name
        return self


@pytest.mark.skipif(
    not hasattr(getattr(torch, "accelerator", None), "current_device_index"),
    reason="torch < 2.8 asks torch.cuda",
)
@pytest.mark.parametrize("persistent", [False, True])
def test_threads_that_pin_memory_read_ahead(
    persistent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    options = {"pin_memory": True, "collate_fn": Pinnable, "persistent_workers": persistent}

    def read(rank: int) -> list[float]:
        loader = loader_of(rank, tmp_path, 2, replicate=2, **options)
        sums = []
        for epoch in range(4):
            for i, batch in enumerate(loader):
                assert batch.pinned == "pt_data_pin"
                sums.append(float(batch.rows.sum()))
                if epoch % 2 and i == 3:
                    break
        return sums

    leader, follower = ranks(read, tmp_path)
    assert leader == follower
    assert len(leader) == 2 * SAMPLES // 2 // BATCH + 8


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_where_it_was_left(workers: int, tmp_path: Path) -> None:
    def read(rank: int) -> tuple[list[list[int]], list[int]]:
        loader = loader_of(rank, tmp_path, workers, replicate=2)
        it = iter(loader)
        out = [next(it)[1]["index"].tolist() for _ in range(3)]
        other = loader_of(rank, tmp_path, workers, replicate=2)
        other.load_state_dict(loader.state_dict())
        out += [labels["index"].tolist() for _, labels in other]
        return out, list(loader.sampler)

    for batches, order in ranks(read, tmp_path):
        assert list(chain(*batches)) == order


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_one_rank_cannot_read_raise_on_all(workers: int, tmp_path: Path) -> None:
    def read(rank: int) -> str:
        broken = [*range(BATCH), SAMPLES, *range(BATCH, 2 * BATCH - 1)]
        loader = loader_of(rank, tmp_path, workers, replicate=2, sampler=broken)
        it = iter(loader)
        next(it)
        with pytest.raises(KeyError, match="no such sample") as e:
            next(it)
        return str(e.value)

    leader, follower = ranks(read, tmp_path)
    assert "no such sample" in leader
    assert "KeyError" in follower


@pytest.mark.parametrize("workers", [0, 1])
def test_a_follower_whose_sampler_reads_other_samples_raises(workers: int, tmp_path: Path) -> None:
    def read(rank: int) -> str:
        data = Augmented(tmp_path)
        sampler: Any = DistributedSampler(data, 2, rank)  # the rank instead of the group's number
        try:
            next(iter(loader_of(rank, tmp_path, workers, replicate=2, sampler=sampler)))
        except RuntimeError as e:
            return str(e)
        return ""

    leader, follower = ranks(read, tmp_path)
    assert not leader
    assert "rank 0 reads other samples" in follower


@pytest.mark.parametrize("workers", [0, 1])
def test_a_leader_that_ends_is_named_after_all_it_has_sent(workers: int, tmp_path: Path) -> None:
    def read(rank: int) -> Any:
        it = iter(loader_of(rank, tmp_path, workers, replicate=2))
        heads = [next(it)]
        dist.barrier()
        if rank == 0:
            for _ in range(3):
                next(it)
            os._exit(0)
        with pytest.raises(RuntimeError, match="rank 0, which makes this rank's batches") as e:
            heads += it
        return len(heads), str(e.value)

    gone, (count, why) = ranks(read, tmp_path)
    assert gone is None
    assert count >= 4
    assert "is lost" in why


@pytest.mark.parametrize("workers", [0, 1])
def test_a_leader_goes_on_without_a_follower(workers: int, tmp_path: Path) -> None:
    def read(rank: int) -> int:
        it = iter(loader_of(rank, tmp_path, workers, replicate=2))
        next(it)
        if rank == 1:
            os._exit(0)
        return 1 + len(list(it))

    assert ranks(read, tmp_path) == [SAMPLES // 2 // BATCH, None]


def test_an_iterator_that_the_leader_has_left_ends_at_the_followers(tmp_path: Path) -> None:
    def read(rank: int) -> str:
        loader = loader_of(rank, tmp_path, 0, replicate=2)
        it = iter(loader)
        next(it)
        if rank == 0:
            del it
            return ""
        with pytest.raises(RuntimeError, match="has ended this iterator") as e:
            next(it)
        return str(e.value)

    assert "rank 0" in ranks(read, tmp_path)[1]


def test_ranks_whose_loaders_differ_all_raise(tmp_path: Path) -> None:
    def read(rank: int) -> str:
        with pytest.raises(ConfigError) as e:
            iter(loader_of(rank, tmp_path, rank, replicate=2))
        return str(e.value)

    first, other = ranks(read, tmp_path)
    assert first == other
    assert "num_workers" in first


@pytest.mark.skipif(bool(cluster.unavailable()), reason="needs network namespaces")
def test_each_node_makes_the_batches_of_a_group_once(tmp_path: Path) -> None:
    """Two ranks are here, one is in another network namespace."""

    def read(rank: int) -> list[str]:
        if rank == 2:
            assert not ctypes.CDLL(None).unshare(CLONE_NEWNET)
        torch.manual_seed(3)
        loader = loader_of(0, tmp_path, 1, replicate=dist.group.WORLD)
        return [digest(batch) for batch in loader]

    said = ranks(read, tmp_path, 3)
    assert said[0] == said[1] == said[2], "with the same seed nodes make the same"
    assert Augmented(tmp_path).samples_made() == 2 * (SAMPLES // 2)


def test_groups_are_ranks_in_a_row_or_those_of_a_mesh(tmp_path: Path) -> None:
    def read(_: int) -> Any:
        from creel.loader.making.groups.replicate import group_of

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        given = 2, 1, mesh["tp"], mesh["dp"], mesh, mesh["tp"].get_group()
        with pytest.raises(ConfigError, match="cannot be divided"):
            group_of(3)
        return [group_of(ranks_of) for ranks_of in given]

    row, everyone = [(0, 1), (0, 1), (2, 3), (2, 3)], (0, 1, 2, 3)
    for rank, groups in enumerate(ranks(read, tmp_path, 4)):
        column = (rank % 2, rank % 2 + 2)
        assert groups == [row[rank], (rank,), row[rank], column, everyone, row[rank]]


@pytest.mark.parametrize("wrong", [0, -1, True, "tp", 1.5])
def test_values_that_are_no_group_are_refused_when_the_loader_is_made(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="replicate"):
        creel.DataLoader([1, 2], replicate=wrong)  # type: ignore[arg-type]


class Scaled(creel.FileDataset):
    """A dataset whose samples are made by a user's code."""

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(super().__getitem__(index)), dtype=torch.uint8) * 2


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_reads_what_a_daemon_holds(workers: int, tmp_path: Path) -> None:
    """Also plain bytes, of which each rank copies its own batch."""
    for i in range(20):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 20_000)
    paths = sorted(tmp_path.iterdir())

    def read(_: int) -> tuple[list[int], int]:
        numbers = []
        for data in (Scaled(paths), creel.RecordDataset(paths, dtype=torch.uint8, shape=(20_000,))):
            loader = creel.DataLoader(data, 4, num_workers=workers, replicate=2)
            numbers += [int(row[0]) for batch in loader for row in batch]
        return numbers, loader.stats()["direct_reads"]  # type: ignore[return-value]

    said = ranks(read, tmp_path)
    assert said == [([*range(0, 40, 2), *range(20)], 0)] * 2


def test_arguments_that_deal_samples_otherwise_are_refused_with_replicate() -> None:
    data: Any = [1, 2]
    with pytest.raises(ConfigError, match="cannot be combined with remap"):
        creel.DataLoader(data, replicate=2, remap="global-batch")
