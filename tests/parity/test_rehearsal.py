"""Batches with rows of a rehearsal memory: against torch, and what is read for them."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    get_worker_info,
)

import creel
from creel.errors import ConfigError
from creel.loader.client import connections
from creel.loader.client.session import Session
from creel.loader.data.rehearsed import new_data
from creel.loader.line.steps import batch_stream
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
    memory_of_old = creel.Rehearsal(per_batch, budget=budget)
    old = Noisy(OLD, 1000)
    memory_of_old.add(old, old.targets)
    return memory_of_old


def switched_off(monkeypatch: pytest.MonkeyPatch, mode: str) -> dict[str, Any]:
    """Return the options of a loader that is served by creel, by creel alone, or by torch."""
    if mode == "disabled":
        monkeypatch.setenv("CREEL_DISABLE", "1")
    return {"creel": False} if mode == "no daemon" else {}


@pytest.mark.parametrize("mode", ["creel", "no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_new_samples_are_those_of_a_loader_without_a_memory(
    workers: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, mode) | {"num_workers": workers, "shuffle": True}
    data, rows = Noisy(NEW), memory()
    seeded = [torch.Generator().manual_seed(1) for _ in range(2)]
    alone: Any = DataLoader(data, 8, True, generator=seeded[0], num_workers=workers)
    wanted = [batch[0].tolist() for _ in range(2) for batch in alone]
    loader: Any = creel.DataLoader(data, 8, generator=seeded[1], rehearsal=rows, **options)
    assert len(loader) == 5
    assert len(loader.dataset) == NEW
    assert loader.indices.tolist() == loader.replayed.tolist() == []
    batches = []
    for batch in itertools.chain(loader, loader):
        new, old = batch[0][:-4].tolist(), batch[0][-4:].tolist()
        batches.append(new)
        assert loader.indices.tolist() == [*new, *(NEW + loader.replayed)]
        assert old == [rows.dataset[row][0] for row in loader.replayed.tolist()]
        assert [1000 + uid for uid in rows.uids[loader.replayed].tolist()] == old
    assert batches == wanted


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
    assert new_data(again.dataset) is data
    shown.new = shown.kept = shown._mine = 3
    assert (data.new, data.kept, data._mine) == (3, 3, 3)
    del shown._mine
    assert not hasattr(data, "_mine")
    assert not hasattr(shown, "_mine")
    rows.add(shown)
    assert rows.uids.max() < OLD + NEW
    copied = pickle.loads(pickle.dumps(loader))
    assert len(copy.deepcopy(shown)) == NEW
    torch.manual_seed(0)
    batches = [plain(batch) for batch in loader]
    torch.manual_seed(0)
    assert batches == [plain(batch) for batch in copied]


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, which `set_up` sets; notes whose sample it is."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first, self.calls = n, first, 0
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        mine = info.dataset is self or getattr(info.dataset, "dataset", None) is self
        return self.first + index, self.rng.random(), info.seed, self.calls, mine


def columns(loader: Any) -> list[list[list[Any]]]:
    return [[column.tolist() for column in batch] for batch in loader]


def set_up(worker: int) -> None:
    """As people write it, for a dataset or a Subset of one; draws from a global generator, too."""
    info: Any = get_worker_info()
    data = info.dataset.dataset if isinstance(info.dataset, Subset) else info.dataset
    assert type(data) is Drawing
    assert info.id == worker
    data.rng = random.Random(info.seed + torch.randint(99, ()).item())
    data.calls += 1


@pytest.mark.parametrize("mode", ["no daemon", "disabled"])
@pytest.mark.parametrize("seeding", [None, "sample"])
@pytest.mark.parametrize("subsets", [False, True])
def test_a_worker_init_fn_sets_up_the_dataset_of_each_task(
    subsets: bool, seeding: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called with each of them, and leaves the worker as without a memory."""
    tasks: list[Any] = [Drawing(n, first) for n, first in ((NEW, 0), (20, 1000), (20, 2000))]
    if subsets:
        tasks = [Subset(Drawing(90), range(a, b)) for a, b in ((0, NEW), (40, 60), (60, 80))]
        tasks[1].dataset = tasks[2].dataset = tasks[0].dataset
    rows = creel.Rehearsal(4)
    for old in tasks[1:]:
        rows.add(old)
    options = {"num_workers": 2, "worker_init_fn": set_up, "seeding": seeding}
    torch.manual_seed(3)
    theirs = columns(creel.DataLoader(tasks[0], 8, creel=False, **options))
    options |= switched_off(monkeypatch, mode)
    torch.manual_seed(3)
    ours = columns(creel.DataLoader(tasks[0], 8, rehearsal=rows, **options))
    for batch, alone in zip(ours, theirs, strict=True):
        assert subsets or [column[:-4] for column in batch] == alone, "they are as without one"
        assert set(batch[3]) == {1}, "of several Subsets of a dataset one is set up"
        assert all(batch[4])
    assert not set(ours[0][1]) & set(ours[1][1]), "workers augment differently"
    assert all(task.calls == 0 for task in tasks if not subsets)


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


# --- reads of storage ---------------------------------------------------------------------------


@pytest.fixture
def daemon() -> Iterator[dict[str, Any]]:
    name = unique_name()
    yield {"daemon.name": name, "memory.budget": "64MB", "loader.direct": "never"}
    connections.disconnect(name)


def varied(i: int) -> int:
    return 300 + i


def files(folder: Path, count: int, nbytes: Callable[[int], int] = varied) -> creel.FileDataset:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.bin").write_bytes(bytes([i]) * nbytes(i))
    return creel.FileDataset(folder, "*.bin", decode=bytes)


def parts(data: Any) -> list[Any]:
    return [Subset(data, range(first, first + 30)) for first in range(0, 120, 30)]


def reads(
    tasks: list[Any], daemon: dict[str, Any], nbytes: Callable[[int], int] = varied, **options: Any
) -> list[int]:
    """Train on tasks, four epochs each; return how often a file of each source was read."""
    rows = creel.Rehearsal(6, budget=40)
    for task in tasks:
        loader = creel.DataLoader(
            task, 6, True, collate_fn=list, rehearsal=rows, creel=daemon, **options
        )
        for _ in range(4):
            for batch in loader:
                assert [len(sample) for sample in batch] == [nbytes(sample[0]) for sample in batch]
        assert loader.stats()["direct_reads"] == 0
        del loader
        rows.add(task)
    client = connections.connected(daemon["daemon.name"])
    assert client is not None
    return [source["reads"] for source in client.ask("stats")["sources"]]


@pytest.mark.parametrize("persistent", [False, True])
def test_four_tasks_read_each_object_once(
    tmp_path: Path, daemon: dict[str, Any], persistent: bool
) -> None:
    """Row 5 of the goals: tasks that are Subsets of one dataset, where all fits into memory."""
    tasks = parts(files(tmp_path / "data", 120))
    assert reads(tasks, daemon, num_workers=2, persistent_workers=persistent) == [120]


def test_objects_that_no_later_step_can_need_leave_memory_first(
    tmp_path: Path, daemon: dict[str, Any]
) -> None:
    """Memory holds .7 of the files; .58 of them may still be read, others must make room."""

    def equal(_: int) -> int:
        return 50_000

    tasks = parts(files(tmp_path / "data", 120, equal))
    assert reads(tasks, daemon | {"memory.budget": str(84 * equal(0))}, equal) == [120]


@pytest.mark.parametrize("workers", [0, 2])
def test_four_folders_read_each_file_once(
    tmp_path: Path, daemon: dict[str, Any], workers: int
) -> None:
    """Each task's dataset begins with those of the tasks before it, and takes over their files."""
    # All first: a file that has just been written is read again.
    tasks = [files(tmp_path / f"task-{number}", 30) for number in range(4)]
    assert reads(tasks, daemon, num_workers=workers) == 4 * [30]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_that_comes_back_reads_nothing(
    tmp_path: Path, daemon: dict[str, Any], workers: int
) -> None:
    """As a new dataset of the same files, which the memory knows by the old one."""
    tasks = [files(tmp_path / f"task-{number}", 30) for number in range(3)]
    again = [tmp_path / "task-1", tmp_path / "task-0"]
    tasks += [creel.FileDataset(folder, "*.bin", decode=bytes) for folder in again]
    assert sum(reads(tasks, daemon, num_workers=workers)) == 3 * 30


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
        event="the policy of a job that rehearses",
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
    options = []
    monkeypatch.setattr(Session, "tell_samples", lambda *_, **given: options.append(given))
    task, memory = files(tmp_path / "data", 60), creel.Rehearsal(2)
    loader = creel.DataLoader(
        task, 6, sampler=OwnOrder(), collate_fn=list, rehearsal=memory, creel=daemon
    )
    assert len(list(loader)) == 10
    assert options == [{"rehearsed": True}]


# --- ranks --------------------------------------------------------------------------------------


def replayed(_rank: int, **options: Any) -> Any:
    """Return the rows that this rank of a job replays in each step of two epochs."""
    generator = torch.Generator().manual_seed(3)
    options |= {"generator": generator, "rehearsal": memory(3, 40), "creel": False}
    loader: Any = creel.DataLoader(Noisy(NEW), 8, True, **options)
    return [loader.replayed.tolist() for _ in range(2) for _ in loader]


def test_ranks_without_a_distributed_sampler_replay_disjoint_rows(tmp_path: Path) -> None:
    rows_of = ranks(replayed, tmp_path, 4)
    for step in zip(*rows_of, strict=True):
        assert len({row for rows in step for row in rows}) == 12


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_of_a_group_replay_alike_and_other_groups_other_rows(
    tmp_path: Path, workers: int
) -> None:
    def act(rank: int) -> Any:
        return replayed(rank, replicate=2, num_workers=workers)

    rows_of = ranks(act, tmp_path, 4)
    assert rows_of[0] == rows_of[1]
    assert rows_of[2] == rows_of[3]
    for row, other in zip(rows_of[0], rows_of[2], strict=True):
        assert len({*row, *other}) == 6


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
    names = runpy.run_path(str(EXAMPLE))
    ways, final = names["WAYS"], names["final"]
    assert final(ways["incremental"], 0) <= 25
    assert final(ways["rehearsal, 20 %"], 0) >= 80


def test_the_examples_check_fails_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # cannot be imported
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setattr(sys, "argv", ["continual.py"])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", ["continual.py", "--check"])
    assert main() == 1
