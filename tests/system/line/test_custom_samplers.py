"""Custom samplers: run as by torch, their batches cached; run ahead only on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from creel.loader.client import connections
from daemons import Running
from kit import until
from testbed.same import same

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, NBYTES, BATCH = 160, 14_000, 8

#: A shared generator: each draw advances it for all.
OUTSIDE = torch.Generator()


class Drawing:
    """A shuffle that draws for each sample from a generator that is not its own."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        left = list(range(N))
        while left:
            yield left.pop(int(torch.randint(len(left), (1,), generator=OUTSIDE)))


class Batches(Drawing):
    """The same in batches, some of which cannot be published to a daemon."""

    kinds = (list, tuple, np.array, torch.tensor)

    def __iter__(self) -> Iterator[Any]:
        all_ = list(super().__iter__())
        for i in range(0, N, BATCH):
            yield self.kinds[i // BATCH % 4](all_[i : i + BATCH])
            if i % 40 == 0:
                yield [-1 - all_[i], all_[i]]
                yield []

    def __len__(self) -> int:
        return N // BATCH + 2 * (N // 40)


class OfATable:
    """Looks up its attributes in a table that has none of creel's."""

    def __init__(self, items: list[Any]) -> None:
        self.table = {"items": items}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __getattr__(self, name: str) -> Any:
        return self.table[name]


class Mining:
    """Repeats samples that the training loop reports as hard, immediately."""

    def __init__(self) -> None:
        self.hard: list[int] = []

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for i in range(N):
            yield self.hard.pop() if self.hard else i


@pytest.fixture
def budget() -> int:
    return 1 << 24


@pytest.fixture
def daemon(daemon_name: str, monkeypatch: pytest.MonkeyPatch, budget: int) -> Iterator[Running]:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    with Running(daemon_name, memory=str(budget)) as running:
        yield running
    connections.disconnect(daemon_name)


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset[Any]:
    """Files, unless the test's parameter says "records"."""
    rng = np.random.default_rng(0)
    if getattr(request, "param", "files") == "records":
        (tmp_path / "records").write_bytes(rng.bytes(N * NBYTES))
        return creel.RecordDataset(tmp_path / "records", "uint8", NBYTES, labels=range(N))
    for i in range(N):
        (tmp_path / f"{i:03}").write_bytes(rng.bytes(NBYTES))
    return creel.FileDataset(sorted(map(str, tmp_path.iterdir())), labels=range(N))


def stats_of(daemon: Running) -> Any:
    with daemon.client("cli") as client:
        return client.ask("stats")


@pytest.mark.parametrize(
    ("data", "workers"), [("files", 0), ("files", 2), ("records", 2)], indirect=["data"]
)
def test_each_sample_is_read_once_from_the_source(
    daemon: Running, data: Dataset[Any], workers: int
) -> None:
    theirs = DataLoader(data, BATCH, sampler=Drawing(), num_workers=workers)
    OUTSIDE.manual_seed(5)
    expected = [*theirs, *theirs, *theirs]
    ours = creel.DataLoader(data, BATCH, sampler=Drawing(), num_workers=workers)
    OUTSIDE.manual_seed(5)
    got = [*ours, *ours, *ours]
    assert len(got) == len(expected)
    assert same(got, expected)
    assert ours.stats()["direct_reads"] == 0
    stats = stats_of(daemon)
    assert [s["nbytes"] for s in stats["sources"]] == [N * NBYTES]
    (session,) = stats["sessions"]
    assert session["known"] == session["done"] == 3 * N // BATCH
    assert (session["batches"], session["samples"]) == (3 * N // BATCH, 3 * N)
    assert session["nbytes"] == 3 * N * NBYTES
    (core,) = stats["core"]["sessions"].values()
    assert (core["misses"], core["hits"] + core["joined"]) == (N, 2 * N)
    assert stats["core"]["datasets"][core["dataset"]]["policy"] == "recent"


@pytest.mark.parametrize("budget", [N * NBYTES // 2])
@pytest.mark.parametrize(("data", "workers"), [("records", 0), ("files", 2)], indirect=["data"])
def test_with_half_the_memory_half_is_read(
    daemon: Running, data: Dataset[Any], workers: int
) -> None:
    """L1 holds although the order is unknown, except for objects pinned while they are read."""
    ours = creel.DataLoader(data, BATCH, sampler=Drawing(), num_workers=workers)
    epochs = 6
    for _ in range(epochs):
        assert sum(len(batch[1]) for batch in ours) == N
    nbytes = sum(s["nbytes"] for s in stats_of(daemon)["sources"])
    pinned = BATCH * (2 * workers + 2)
    assert nbytes <= (N + (epochs - 1) * (N / 2 + pinned)) * NBYTES
    assert ours.stats()["direct_reads"] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_any_type_or_number_are_torch_s(
    daemon: Running, data: Dataset[Any], workers: int
) -> None:
    def loader(cls: Any) -> Any:
        OUTSIDE.manual_seed(6)
        return cls(data, batch_sampler=Batches(), collate_fn=list, num_workers=workers)

    theirs, ours = loader(DataLoader), None
    expected = [*theirs, *theirs]
    ours = loader(creel.DataLoader)
    got = [*ours, *ours]
    assert [len(batch) for batch in got] == [len(batch) for batch in expected]
    for mine, his in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) and x == y for (a, x), (b, y) in zip(mine, his, strict=True))
    (session,) = stats_of(daemon)["sessions"]
    assert session["batches"] == len(expected)
    assert session["samples"] == sum(map(len, expected))
    # Only negative numbers are read directly.
    assert ours.stats()["direct_reads"] == 2 * 2 * (N // 40)


class Lone:
    """A batch sampler that yields no groups: torch cannot make a batch of these."""

    def __init__(self, index: object, *, foreseen: bool) -> None:
        self.index, self.foreseeable = index, foreseen

    def __iter__(self) -> Iterator[object]:
        for _ in range(3):
            yield self.index


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_index_that_is_no_group_is_refused_as_by_torch(data: Dataset[Any], workers: int) -> None:
    def words(cls: Any, sampler: Any) -> list[str]:
        iterator = iter(cls(data, batch_sampler=sampler, num_workers=workers))
        out = []
        for _ in range(3):
            with pytest.raises(TypeError) as raised:
                next(iterator)
            out.append(str(raised.value).splitlines()[-1])
        if workers:
            iterator._shutdown_workers()  # the garbage collector would take torch 5 s
        return out

    for index in (3, np.array(3), torch.tensor(3), torch.tensor(-1))[:: 1 + 2 * workers]:
        for sampler in ([index] * 3, Lone(index, foreseen=True), Lone(index, foreseen=False)):
            assert words(creel.DataLoader, sampler) == words(DataLoader, sampler)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_without_an_attribute_may_raise_any_error(
    data: Dataset[Any], workers: int
) -> None:
    uses: list[dict[str, Any]] = [
        {"sampler": OfATable([3, 1, 2])},
        {"sampler": OfATable([3, 1, 2]), "batch_size": 2},
        {"batch_sampler": OfATable([[3, 1], [2]])},
    ]
    for options in uses:
        ours: Any = creel.DataLoader(data, num_workers=workers, **options)
        theirs: Any = DataLoader(data, **options)
        for _ in range(2):
            assert same(list(ours), list(theirs))
        ours.state_dict()


@pytest.mark.parametrize(("data", "workers"), [("records", 0), ("files", 2)], indirect=["data"])
def test_a_step_that_reads_nothing_is_part_of_a_plan(
    daemon: Running, data: Dataset[Any], workers: int
) -> None:
    batches = [[], *(list(range(i, i + BATCH)) for i in range(0, N, BATCH)), []]
    ours = creel.DataLoader(data, batch_sampler=batches, collate_fn=list, num_workers=workers)
    for _ in range(2):
        assert [[y for _, y in batch] for batch in ours] == batches
    assert ours.stats()["direct_reads"] == 0
    assert [s["nbytes"] for s in stats_of(daemon)["sources"]] == [N * NBYTES]


SEEN = [0]


class Logging:
    """Writes a line for each run of itself, and uses a list of its module."""

    def __init__(self, log: Path, generator: torch.Generator | None = None) -> None:
        self.log, self.generator = log, generator

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        with self.log.open("a") as log:
            log.write("run\n")
        for i in torch.randperm(N, generator=self.generator).tolist():
            SEEN[0] += 1
            yield i


class Declared(Logging):
    foreseeable = True


class NoGenerator(Logging):
    """Its body runs when `iter` is called."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("kind", "workers"), [(Logging, 0), (Logging, 2), (NoGenerator, 0)])
def test_a_sampler_runs_as_often_as_under_torch(
    data: Dataset[Any], workers: int, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epochs(cls: Any, log: Path) -> tuple[Any, ...]:
        torch.manual_seed(4)
        monkeypatch.setattr(f"{__name__}.SEEN", [0])
        loader = cls(data, BATCH, sampler=kind(log), num_workers=workers)
        batches = [batch[1].tolist() for _ in range(3) for batch in loader]
        return batches, SEEN[0], log.read_text().count("run"), torch.get_rng_state().tolist()

    ours = epochs(creel.DataLoader, tmp_path / "ours.log")
    assert ours == epochs(DataLoader, tmp_path / "theirs.log")
    assert ours[2] == 3


class Counting(Logging):
    """Draws another order in each epoch, at once; counts epochs at their end."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return self.run(np.random.default_rng(self.epoch).permutation(N).tolist())

    def run(self, order: list[int]) -> Iterator[int]:
        try:
            yield from order
        finally:
            self.epoch += 1


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_is_cut_short_ends_with_its_iterator(
    data: Dataset[Any], workers: int, tmp_path: Path
) -> None:
    def beginnings(cls: Any) -> Any:
        sampler: Any = Counting(tmp_path / "log")
        loader = cls(data, BATCH, sampler=sampler, num_workers=workers)
        for _ in range(3):
            for batch in loader:
                first = batch[1].tolist()
                break
            yield first, sampler.epoch

    assert list(beginnings(creel.DataLoader)) == list(beginnings(DataLoader))


@pytest.mark.parametrize(("mode", "workers"), [("declared", 2), ("set", 0)])
def test_a_sampler_is_predicted_where_that_is_asked_for(
    daemon: Running, data: Dataset[Any], workers: int, mode: str, tmp_path: Path
) -> None:
    def epoch(cls: Any, **more: Any) -> tuple[Any, ...]:
        torch.manual_seed(4)
        make: Any = Declared if mode == "declared" else Logging
        sampler = make(tmp_path / "log", torch.Generator().manual_seed(9))
        loader = cls(data, BATCH, sampler=sampler, num_workers=workers, **more)
        iterator = iter(loader)
        first = next(iterator)[1].tolist()
        if cls is creel.DataLoader:
            until(all_told, event="the daemon is told of the whole epoch")
        return first, [batch[1].tolist() for batch in iterator], torch.get_rng_state().tolist()

    def all_told() -> bool:
        (session,) = stats_of(daemon)["sessions"]
        return bool(session["known"] >= N // BATCH)

    more = {} if mode == "declared" else {"creel": {"loader.foresee": True}}
    assert epoch(creel.DataLoader, **more) == epoch(DataLoader)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_declared_sampler_that_draws_globally_changes_no_draw_of_the_training(
    data: Dataset[Any], workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def epochs(cls: Any) -> Iterator[list[tuple[list[int], float]]]:
        torch.manual_seed(4)
        loader = cls(data, BATCH, sampler=Declared(tmp_path / "log"), num_workers=workers)
        for _ in range(3):
            yield [(batch[1].tolist(), float(torch.rand(1))) for batch in loader]

    assert list(epochs(creel.DataLoader)) == list(epochs(DataLoader))
    assert caplog.text.count("draws from a global generator") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_decides_as_it_goes_is_run_ahead_no_more(
    daemon: Running, data: Dataset[Any], workers: int
) -> None:
    def epochs(cls: Any, **more: Any) -> Iterator[list[list[int]]]:
        sampler = Mining()
        loader = cls(data, BATCH, sampler=sampler, num_workers=workers, **more)
        for _ in range(4):
            seen = []
            for i, batch in enumerate(loader):
                seen.append(batch[1].tolist())
                if i % 5 == 1:
                    sampler.hard += seen[-1][:3]
            yield seen

    ran_ahead = []
    ours = epochs(creel.DataLoader, creel={"loader.foresee": True})
    for seen, expected in zip(ours, epochs(DataLoader), strict=True):
        assert seen == expected
        (core,) = stats_of(daemon)["core"]["sessions"].values()
        ran_ahead.append(core["misses"] + core["hits"] + core["joined"])
    # One epoch was predicted, wrongly; the plan of another would have been fetched ahead.
    assert ran_ahead[3] - ran_ahead[2] == N
    assert sum(s["nbytes"] for s in stats_of(daemon)["sources"]) <= N * NBYTES


def test_an_epoch_left_early_holds_nothing(daemon: Running, data: Dataset[Any]) -> None:
    ours = creel.DataLoader(data, BATCH, sampler=Drawing(), num_workers=2)
    for _ in range(3):
        iterator = iter(ours)
        next(iterator)
        del iterator

    def given_back() -> bool:
        (session,) = stats_of(daemon)["sessions"]
        return bool(session["known"] == session["done"] > 0)

    until(given_back, event="all steps are given back")
    OUTSIDE.manual_seed(7)
    got = list(ours)
    OUTSIDE.manual_seed(7)
    expected = list(DataLoader(data, BATCH, sampler=Drawing(), num_workers=2))
    assert same(got, expected)
