"""Batches with rows of a rehearsal memory: against torch, and what is said of them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
import runpy
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import creel
from creel.errors import ConfigError
from creel.loader.client import connections
from creel.loader.client.session import Session
from creel.loader.plan import batch_stream
from kit import unique_name, until
from shown import plain
from testbed.ranks import ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

OLD, NEW = 50, 33


class Noisy(Dataset[Any]):
    """Sample i is (first + i, a random number)."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first
        self.targets = [i % 5 for i in range(n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self.first + index, torch.rand(1)


def memory(per_batch: int = 4, budget: int | None = 20) -> creel.Rehearsal:
    made = creel.Rehearsal(per_batch, budget=budget)
    old = Noisy(OLD, 1000)
    made.add(old, old.targets)
    return made


def switched_off(monkeypatch: pytest.MonkeyPatch, how: str) -> dict[str, Any]:
    """Return the options of a loader that is served by creel, by creel alone, or by torch."""
    if how == "disabled":
        monkeypatch.setenv("CREEL_DISABLE", "1")
    return {"creel": False} if how == "no daemon" else {}


@pytest.mark.parametrize("how", ["creel", "no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_new_samples_are_those_of_a_loader_without_a_memory(
    workers: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, how) | {"num_workers": workers, "shuffle": True}
    data, rows = Noisy(NEW), memory()
    seeded = [torch.Generator().manual_seed(1) for _ in range(2)]
    alone: Any = DataLoader(data, 8, True, generator=seeded[0], num_workers=workers)
    wanted = [batch[0].tolist() for _ in range(2) for batch in alone]
    loader: Any = creel.DataLoader(data, 8, generator=seeded[1], rehearsal=rows, **options)
    assert len(loader) == 5
    assert len(loader.dataset) == NEW
    assert loader.indices.tolist() == loader.replayed.tolist() == []
    found = []
    for batch in itertools.chain(loader, loader):
        new, old = batch[0][:-4].tolist(), batch[0][-4:].tolist()
        found.append(new)
        assert loader.indices.tolist() == [*new, *(NEW + loader.replayed)]
        assert old == [rows.dataset[row][0] for row in loader.replayed.tolist()]
        assert [1000 + uid for uid in rows.uids[loader.replayed].tolist()] == old
    assert found == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_read_like_samples_of_a_concat_dataset(workers: int) -> None:
    """Also their augmentation: random numbers are drawn in the order of the batch."""
    data, rows = Noisy(NEW), memory()
    seen, batches = rows.over(data, RandomSampler(data), 8)
    both: Any = ConcatDataset([data, rows.dataset])
    torch.manual_seed(3)
    theirs = [plain(b) for b in DataLoader(both, batch_sampler=batches, num_workers=workers)]
    torch.manual_seed(3)
    batches = rows.over(data, RandomSampler(data), 8)[1]
    assert theirs == [
        plain(b) for b in DataLoader(seen, batch_sampler=batches, num_workers=workers)
    ]
    torch.manual_seed(3)
    ours = creel.DataLoader(data, 8, True, num_workers=workers, rehearsal=rows)
    assert theirs == [plain(batch) for batch in ours]


def test_over_may_be_given_to_creels_loader_too() -> None:
    data, rows = Noisy(NEW), memory()
    torch.manual_seed(3)
    theirs = [plain(batch) for batch in creel.DataLoader(data, 8, True, rehearsal=rows)]
    torch.manual_seed(3)
    over, batches = rows.over(data, RandomSampler(data), 8)
    loader = creel.DataLoader(over, batch_sampler=batches)
    assert theirs == [plain(batch) for batch in loader]
    assert len(loader.replayed) == 4
    with pytest.raises(ConfigError, match="has rows of a memory already"):
        creel.DataLoader(over, batch_sampler=batches, rehearsal=rows)


class Epochs(BatchSampler):
    """A person's batch sampler around one of torch's, which is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_set_epoch_reaches_a_persons_batch_sampler_below_over() -> None:
    inner: DistributedSampler[Any] = DistributedSampler(Noisy(NEW), 1, 0)
    own = Epochs(inner, 8, False)
    over, batches = memory().over(Noisy(NEW), own, None)
    loader = creel.DataLoader(over, batch_sampler=batches, creel=False)
    loader.set_epoch(3)
    assert own.epoch == inner.epoch == 3


class Grouped(Sampler[list[int]]):
    """A batch sampler that names no size, as some do."""

    batch_size = None

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3, 4])


def test_batches_of_no_one_size_have_rows_too() -> None:
    over, batches = memory().over(Noisy(NEW), Grouped(), None)
    loader: Any = creel.DataLoader(over, batch_sampler=batches, creel=False)
    assert [len(batch[0]) for batch in loader] == [6, 7]


def test_the_memory_is_taken_as_it_is_when_the_loader_is_made() -> None:
    data, rows = Noisy(NEW), creel.Rehearsal(3)
    first = creel.DataLoader(data, 8, rehearsal=rows, creel=False)
    assert first.dataset is data
    rows.add(data)
    second = creel.DataLoader(data, 8, rehearsal=rows, creel=False)
    rows.add(Noisy(9, 2000))
    assert [len(batch[0]) for batch in first] == [8, 8, 8, 8, 1]
    assert [len(batch[0]) for batch in second] == [11, 11, 11, 11, 4]
    assert max(max(batch[0]) for batch in second) < 2000


def test_the_dataset_shows_the_new_data_and_may_be_given_back() -> None:
    data, rows = Noisy(NEW), memory()
    loader = creel.DataLoader(data, 8, rehearsal=rows, creel=False)
    shown: Any = loader.dataset
    assert shown.targets is data.targets
    sampler: DistributedSampler[Any] = DistributedSampler(shown, 2, 1)
    again = creel.DataLoader(shown, 8, sampler=sampler, rehearsal=rows, creel=False)
    assert again.dataset.new is data  # type: ignore[attr-defined]  # it is Rehearsed
    rows.add(shown)
    assert rows.uids.max() < OLD + NEW
    copied = pickle.loads(pickle.dumps(loader))
    assert len(copy.deepcopy(shown)) == NEW
    torch.manual_seed(0)
    batches = [plain(batch) for batch in loader]
    torch.manual_seed(0)
    assert batches == [plain(batch) for batch in copied]


def test_numbers_of_subsets_are_those_of_the_dataset_below() -> None:
    data = Noisy(60, 100)
    nested = Subset(Subset(data, range(10, 60)), list(range(0, 50, 2)))
    rows = creel.Rehearsal(5, budget=8)
    rows.add(nested)
    rows.add(Subset(data, [1, 3]))
    kept: Any = rows.dataset
    assert kept.datasets == [data]
    both = [*range(10, 60, 2), 1, 3]
    assert [kept[k][0] for k in range(8)] == [100 + both[uid] for uid in rows.uids.tolist()]
    assert kept[-1][0] == kept[7][0]
    with pytest.raises(IndexError):
        kept[8]


class Batched(Noisy):
    """Makes samples of a whole batch at once, and says how many."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.first + i, torch.tensor([len(indices)])) for i in indices]


def test_datasets_that_read_many_samples_at_once_do_so() -> None:
    rows = creel.Rehearsal(4)
    rows.add(Batched(30, 1000))
    loader = creel.DataLoader(Batched(16), 8, rehearsal=rows, creel=False)
    for _, many in loader:
        assert many.ravel().tolist() == [8] * 8 + [4] * 4


@pytest.fixture
def daemon() -> Iterator[dict[str, Any]]:
    name = unique_name()
    yield {"daemon.name": name, "memory.budget": "64MB", "loader.direct": "never"}
    connections.disconnect(name)


def files(folder: Path, count: int) -> creel.FileDataset:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.bin").write_bytes(bytes([i]) * (300 + i))
    return creel.FileDataset(folder, "*.bin", decode=bytes)


@pytest.mark.parametrize("persistent", [False, True])
def test_four_tasks_read_each_object_once(
    tmp_path: Path, daemon: dict[str, Any], persistent: bool
) -> None:
    """Row 5 of the goals: tasks that are Subsets of one dataset, where all fits into memory."""
    data = files(tmp_path / f"data-{persistent}", 120)
    rows = creel.Rehearsal(6, budget=40)
    for task in (Subset(data, range(first, first + 30)) for first in range(0, 120, 30)):
        loader = creel.DataLoader(
            task, 6, True, num_workers=2, persistent_workers=persistent, collate_fn=list,
            rehearsal=rows, creel=daemon,
        )  # fmt: skip
        for _ in range(3):
            for batch in loader:
                assert [len(one) - 300 for one in batch] == [one[0] for one in batch]
        assert loader.stats()["direct_reads"] == 0
        del loader
        rows.add(task)
    client = connections.connected(daemon["daemon.name"])
    assert client is not None
    assert [one["reads"] for one in client.ask("stats")["sources"]] == [120]


@pytest.mark.parametrize("at_once", [10, 1 << 18])
def test_the_daemon_knows_in_the_first_epoch_that_a_job_rehearses(
    tmp_path: Path, daemon: dict[str, Any], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Also if there are more samples than it is told of before the first steps."""
    monkeypatch.setattr(batch_stream, "SAMPLES", at_once)
    task = files(tmp_path / "data", 60)
    loader = creel.DataLoader(
        task, 6, True, collate_fn=list, rehearsal=creel.Rehearsal(2), creel=daemon
    )
    batches = iter(loader)
    next(batches)
    client = connections.connected(daemon["daemon.name"])
    assert client is not None
    until(
        lambda: [d["policy"] for d in client.ask("stats")["core"]["datasets"].values()] == ["far"],
        what="the policy of a job that rehearses",
    )
    assert len(list(batches)) == 9


class OwnOrder(Sampler[int]):
    """An order that nobody can predict."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(60).tolist())

    def __len__(self) -> int:
        return 60


def test_a_daemon_is_told_so_in_the_first_epoch_without_a_plan(
    tmp_path: Path, daemon: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece of a plan comes with which it could be told, and the nodes ask each other then."""
    monkeypatch.setattr(batch_stream, "SAMPLES", 10)
    told = []
    monkeypatch.setattr(Session, "tell_samples", lambda *_, **how: told.append(how))
    task, memory = files(tmp_path / "data", 60), creel.Rehearsal(2)
    loader = creel.DataLoader(
        task, 6, sampler=OwnOrder(), collate_fn=list, rehearsal=memory, creel=daemon
    )
    assert len(list(loader)) == 10
    assert told == [{"rehearsed": True}]


def test_what_no_later_step_can_need_leaves_memory_first(tmp_path: Path) -> None:
    """Memory holds .7 of the files; .58 of them may still be read, others must make room."""
    name, nbytes = unique_name(), 50_000
    for i in range(120):
        (tmp_path / f"{i:03}.bin").write_bytes(bytes([i]) * nbytes)
    data = creel.FileDataset(tmp_path, "*.bin", decode=bytes)
    held = {"daemon.name": name, "memory.budget": str(84 * nbytes), "loader.direct": "never"}
    rows = creel.Rehearsal(6, budget=40)
    for task in (Subset(data, range(first, first + 30)) for first in range(0, 120, 30)):
        loader = creel.DataLoader(task, 6, True, collate_fn=list, rehearsal=rows, creel=held)
        for _ in range(4):
            assert all(len(one) == nbytes for batch in loader for one in batch)
        del loader
        rows.add(task)
    client = connections.connected(name)
    assert client is not None
    reads = [one["reads"] for one in client.ask("stats")["sources"]]
    connections.disconnect(name)
    assert reads == [120]


@pytest.mark.parametrize("workers", [0, 2])
def test_four_folders_read_each_file_once(
    tmp_path: Path, daemon: dict[str, Any], workers: int
) -> None:
    """Each task's dataset begins with those of the tasks before it, and takes over their files."""
    rows = creel.Rehearsal(6, budget=40)
    # All first: a file that has just been written is read again.
    for task in [files(tmp_path / f"task-{number}", 30) for number in range(4)]:
        loader = creel.DataLoader(
            task, 6, True, num_workers=workers, collate_fn=list, rehearsal=rows, creel=daemon
        )
        for _ in range(3):
            for batch in loader:
                assert [len(one) - 300 for one in batch] == [one[0] for one in batch]
        assert loader.stats()["direct_reads"] == 0
        del loader
        rows.add(task)
    client = connections.connected(daemon["daemon.name"])
    assert client is not None
    assert [one["reads"] for one in client.ask("stats")["sources"]] == 4 * [30]


# --- what is returned ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["creel", "no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_name_the_samples_of_each_batch(
    workers: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, how)
    loader: Any = creel.DataLoader(Noisy(NEW), 4, True, num_workers=workers, **options)
    for _ in range(2):
        for step, batch in enumerate(loader):
            assert loader.indices.tolist() == batch[0].tolist()
            assert loader.indices.dtype == np.int64
            assert len(loader.replayed) == 0
            if step == 4:
                break
    single: Any = creel.DataLoader(Noisy(NEW), None, sampler=[5, 3], num_workers=workers, **options)
    assert [loader.indices.tolist() for loader in [single] for _ in single] == [[5], [3]]


@pytest.mark.parametrize("how", ["no daemon", "disabled"])
def test_indices_fit_batches_that_come_as_they_are_ready(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, how)
    loader: Any = creel.DataLoader(
        Noisy(NEW), 3, True, num_workers=3, in_order=False, rehearsal=memory(2), **options
    )
    for batch in loader:
        assert loader.indices[:-2].tolist() == batch[0][:-2].tolist()
        old = loader.rehearsal.dataset
        assert [old[k][0] for k in loader.replayed.tolist()] == batch[0][-2:].tolist()


class Meeting(BatchSampler):
    """Its iterators are begun by three threads at the same time."""

    barrier = threading.Barrier(3)

    def __iter__(self) -> Iterator[list[int]]:
        self.barrier.wait(30)
        return super().__iter__()


def test_a_loader_that_is_switched_off_counts_and_serves_threads_as_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = switched_off(monkeypatch, "disabled")
    batches = Meeting(SequentialSampler(range(NEW)), 4, False)
    loader: Any = creel.DataLoader(Noisy(NEW), batch_sampler=batches, **options)
    with ThreadPoolExecutor(3) as pool:
        iterators = [found.result(30) for found in [pool.submit(iter, loader) for _ in range(3)]]
    assert [len(it) for it in iterators] == [len(loader)] * 3
    for it in iterators:
        assert [loader.indices.tolist() for batch in it] == [
            list(range(first, min(first + 4, NEW))) for first in range(0, NEW, 4)
        ]


class Keyed(Dataset[Any]):
    def __getitem__(self, key: str) -> str:
        if key == "b":
            raise KeyError(key)
        return key


@pytest.mark.parametrize("how", ["no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raised_is_not_the_last_one(
    workers: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, how)

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise ValueError("broken")
            return super().__getitem__(index)

    loader: Any = creel.DataLoader(Broken(12), 2, num_workers=workers, **options)
    it, shown = iter(loader), []
    for _ in range(6):
        with contextlib.suppress(ValueError):
            assert next(it)[0].tolist() == loader.indices.tolist()
        shown.append(loader.indices.tolist())
    assert shown == [[0, 1], [2, 3], [2, 3], [6, 7], [8, 9], [10, 11]]


def test_keys_are_no_numbers() -> None:
    loader: Any = creel.DataLoader(Keyed(), 1, sampler=["a", "c"], creel=False)
    for _ in loader:
        with pytest.raises(ConfigError, match="no numbers"):
            _ = loader.indices
    stream: Any = creel.DataLoader(Stream(), creel=False)
    with pytest.raises(ConfigError, match="no numbers"):
        _ = stream.indices


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Bad(Noisy):
    """Every seventh sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise OSError(f"cannot read {index}")
        return self.first + index, index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_indices_and_rows_fit_batches_without_bad_samples(workers: int, on_error: Any) -> None:
    rows = creel.Rehearsal(4)
    rows.add(Bad(OLD, 1000))
    loader: Any = creel.DataLoader(
        Bad(NEW), 8, True, num_workers=workers, rehearsal=rows, on_error=on_error, creel=False
    )
    for batch in itertools.chain(loader, loader):
        old = (1000 + loader.replayed).tolist()
        new = loader.indices[loader.indices < NEW].tolist()
        assert batch[0].tolist() == new + old
        if on_error == "substitute":
            assert len(old) == 4, "a row takes the place of a row"


def test_a_memory_that_grows_replays_what_was_just_read() -> None:
    """One pass over new data: no task ends, and the first block has nothing to replay."""
    rows = creel.Rehearsal(3, budget=10, every=2)
    data = Noisy(40, 500)
    loader: Any = creel.DataLoader(data, 5, True, rehearsal=rows, creel=False)
    assert loader.dataset is data
    next(iter(loader))
    loader.set_epoch(1)
    read: list[int] = []
    for step, batch in enumerate(loader):
        assert loader.indices.tolist() == [x - 500 for x in batch[0].tolist()]
        assert len(batch[0]) == (5 if step < 2 else 8)
        assert set(batch[0][5:].tolist()) <= set(read[: step // 2 * 10])
        assert len(loader.replayed) == 0, "they are no rows of the memory"
        read += batch[0][:5].tolist()
    assert [len(batch[0]) for batch in loader] == [5] * 8, "the memory keeps nothing of it"
    rows.add(data)
    assert len(rows.uids) == 10


# --- errors and warnings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: creel.Rehearsal(0), "per_batch=0"),
        (lambda: creel.Rehearsal(4, budget=0), "budget=0"),
        (lambda: creel.Rehearsal(4, seed=-1), "seed=-1"),
        (lambda: creel.Rehearsal(4, every=0), "every=0"),
        (lambda: creel.Rehearsal(4, every=5).add(Noisy(2), order=[1, 2]), "every="),
        (lambda: creel.Rehearsal(4).add(Noisy(5), [1, 2]), r"shape \(2,\)"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), [1.5, 2.0]), "numbers or texts"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), order=[1.0, float("nan")]), "NaN"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), order=[1.0]), r"shape \(1,\)"),
        (lambda: creel.Rehearsal(4).add(Stream()), "map-style"),
        (lambda: creel.Rehearsal(4).add(Keyed()), "with a length"),
        (lambda: creel.DataLoader(Stream(), rehearsal=memory()), "IterableDataset"),
        (lambda: creel.DataLoader(Noisy(5), None, rehearsal=memory()), "needs batches"),
        (lambda: creel.DataLoader(Noisy(5), remap="global-batch", rehearsal=memory()), "remap"),
        (lambda: creel.DataLoader(Keyed(), sampler=["a"], rehearsal=memory()), "with a length"),
    ],
)
def test_what_does_not_fit_is_said(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_an_order_is_given_to_all_or_none() -> None:
    rows = creel.Rehearsal(4)
    rows.add(Noisy(3), order=[1, 2, 3])
    with pytest.raises(ConfigError, match="order="):
        rows.add(Noisy(3))


def test_a_dataset_that_grows_is_said() -> None:
    data = Noisy(8)
    loader = creel.DataLoader(data, 4, True, rehearsal=memory(), creel=False)
    data.n = 9
    with pytest.raises(ConfigError, match="8 samples"):
        list(loader)


def test_a_memory_that_nothing_is_added_to_is_said_once() -> None:
    rows = creel.Rehearsal(4)
    creel.DataLoader(data := Noisy(5), rehearsal=rows, creel=False)
    creel.DataLoader(data, rehearsal=rows, creel=False)
    with pytest.warns(UserWarning, match="nothing was added"):
        creel.DataLoader(Noisy(5), rehearsal=rows, creel=False)
    creel.DataLoader(Noisy(5), rehearsal=rows, creel=False)


def test_a_rehearsed_dataset_without_its_memory_is_said() -> None:
    """As accelerate makes a loader again: without arguments that it does not know."""
    loader = creel.DataLoader(Noisy(8), 4, rehearsal=memory(), creel=False)
    with pytest.warns(UserWarning, match="nothing replays them"):
        again: Any = creel.DataLoader(loader.dataset, 4, creel=False)
    assert [len(batch[0]) for batch in again] == [4, 4]


def test_a_memory_smaller_than_a_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = creel.Rehearsal(16, budget=7, seed=1234)
    rows.add(Noisy(20, 1000), ["text", "other"] * 10)
    with caplog.at_level(logging.WARNING, "creel.loader"):
        for _ in range(2):
            loader: Any = creel.DataLoader(Noisy(8), 4, rehearsal=rows, creel=False)
            for batch in loader:
                counts = np.unique(batch[0][-16:].numpy(), return_counts=True)[1]
                assert sorted(counts.tolist()) == [2, 2, 2, 2, 2, 3, 3]
    assert caplog.text.count("it repeats them") == 1


def test_texts_are_balanced_like_numbers() -> None:
    rows = creel.Rehearsal(1, budget=9)
    rows.add(Noisy(90), ["a"] * 80 + ["b", "c"] * 5)
    labels = np.array(["a"] * 80 + ["b", "c"] * 5)[rows.uids]
    assert np.unique(labels, return_counts=True)[1].tolist() == [3, 3, 3]


def test_rows_of_tensors_are_read_like_any() -> None:
    rows = creel.Rehearsal(2)
    rows.add(TensorDataset(torch.arange(100, 110)))
    data = TensorDataset(torch.arange(4))
    loader: Any = creel.DataLoader(data, 2, sampler=SequentialSampler(data), rehearsal=rows)
    found = [(batch[0].tolist(), (100 + loader.replayed).tolist()) for batch in loader]
    assert found == [([0, 1, *found[0][1]], found[0][1]), ([2, 3, *found[1][1]], found[1][1])]
    assert len({*found[0][1], *found[1][1]}) == 4


# --- ranks --------------------------------------------------------------------------------------


def replayed(_rank: int, **options: Any) -> Any:
    """Return the rows that this rank of a job replays in each step of two epochs."""
    generator = torch.Generator().manual_seed(3)
    options |= {"generator": generator, "rehearsal": memory(3, 40), "creel": False}
    loader: Any = creel.DataLoader(Noisy(NEW), 8, True, **options)
    return [loader.replayed.tolist() for _ in range(2) for _ in loader]


def test_ranks_without_a_distributed_sampler_replay_disjoint_rows(tmp_path: Path) -> None:
    found = ranks(replayed, tmp_path, 4)
    for step in zip(*found, strict=True):
        assert len({row for rows in step for row in rows}) == 12


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_of_a_group_replay_alike_and_other_groups_other_rows(
    tmp_path: Path, workers: int
) -> None:
    def act(rank: int) -> Any:
        return replayed(rank, replicate=2, num_workers=workers)

    found = ranks(act, tmp_path, 4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for one, other in zip(found[0], found[2], strict=True):
        assert len({*one, *other}) == 6


# --- the example --------------------------------------------------------------------------------


EXAMPLE = Path(__file__).parent.parent.parent / "examples/continual.py"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the example: for so small a network, more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_memory_keeps_the_examples_network_from_forgetting() -> None:
    """One seed; `examples/continual.py --check` has ten, and more ways."""
    pytest.importorskip("sklearn")
    found = runpy.run_path(str(EXAMPLE))
    ways, final = found["WAYS"], found["final"]
    assert final(ways["incremental"], 0) <= 25
    assert final(ways["rehearsal, 20 %"], 0) >= 80


def test_the_examples_check_fails_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # cannot be imported
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setattr(sys, "argv", ["continual.py"])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", ["continual.py", "--check"])
    assert main() == 1
