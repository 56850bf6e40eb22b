"""Loaders that share a daemon: wrong predictions, two trainers, a restart, large batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.cli import main
from creel.loader.client import connections
from creel.loader.data.binding.bind import bind
from creel.loader.data.binding.gather import Gatherer
from creel.loader.data.buffers import BufferPool
from creel.loader.line.batches import epoch_run, places
from creel.loader.making.places.processes import WorkerPool
from creel.loader.making.places.threads import Threads
from creel.loader.making.transport.batch_message import Outbox
from daemons import Running, opened, plan
from kit import until
from programs import Program

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, NBYTES, BATCH = 160, 600, 8


@pytest.fixture
def name(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a daemon that the test starts, not a loader."""
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    yield daemon_name
    connections.disconnect(daemon_name)


@pytest.fixture
def daemon(name: str) -> Iterator[Running]:
    with Running(name) as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> creel.FileDataset:
    path = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for i in range(N):
        (path / f"{i:03}").write_bytes(rng.bytes(NBYTES))
    return creel.FileDataset(sorted(map(str, path.iterdir())))


def stats_of(daemon: Running) -> Any:
    with daemon.client("cli") as client:
        return client.ask("stats")


def reads(daemon: Running) -> int:
    """Return the daemon's reads of the source."""
    return sum(int(source["reads"]) for source in stats_of(daemon)["sources"])


# --- batches made by workers out of rows -----------------------------------------------------


def no_sample(*_: object) -> None:
    raise AssertionError("a batch was not made of rows, but sample by sample")


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_epochs_batches_are_made_in_this_ones_memory(
    rows: creel.RecordDataset, workers: int
) -> None:
    loader = creel.DataLoader(rows, 10, num_workers=workers)
    first, second = ({batch.data_ptr() for batch in loader} for _ in range(2))
    assert len(first) <= 3  # and in no more slots than necessary
    assert first & second
    held = [*loader]
    assert len({batch.data_ptr() for batch in held}) == len(held) == ROWS // 10
    assert torch.equal(torch.cat(held), torch.cat([*loader]))
    assert loader.stats()["direct_reads"] == 0


@pytest.mark.parametrize(
    "labelled, kind", [(False, "process"), (True, "process"), (True, "thread")]
)
def test_workers_make_large_batches_of_rows(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labelled: bool, kind: str
) -> None:
    rows, shape, batch = 100, (64, 1024), 40  # float16: 5 MB a batch, the last one 2.6 MB
    values = np.random.default_rng(1).integers(0, 1 << 15, (rows, 64 * 1024), np.uint16)
    values.tofile(tmp_path / "rows")
    labels = range(rows) if labelled else None
    data = creel.RecordDataset(tmp_path / "rows", torch.int16, shape, labels=labels)

    def loader(cls: Any, **more: Any) -> Any:
        return cls(data, batch, True, generator=torch.Generator().manual_seed(3), **more)

    plain = loader(DataLoader)
    theirs = [*plain, *plain]
    monkeypatch.setattr("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", no_sample)
    init = no_init if kind == "process" else None
    more: Any = {"multiprocessing_context": "fork", "worker_init_fn": init}
    kept = loader(creel.DataLoader, num_workers=2, **more)
    iterator = iter(kept)
    place: type = WorkerPool if kind == "process" else Threads
    assert type(iterator._place) is place
    ours = [*iterator, *kept]  # all are held while slots are reused
    assert len(ours) == len(theirs) == 6
    for mine, his in zip(ours, theirs, strict=True):
        pairs = zip(mine, his, strict=True) if labelled else [(mine, his)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert kept.stats()["direct_reads"] == 0
    assert stats_of(daemon)["sources"][0]["nbytes"] == rows * values[0].nbytes


# --- wrong predictions -----------------------------------------------------------------------


class Moody:
    """An unpredictable sampler: any question in between may change its order."""

    shift = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return ((i + Moody.shift) % N for i in range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrong_prediction_leaves_no_step_pinned(
    daemon: Running, files: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epoch(loader: Any, at: dict[int, Any]) -> list[Any]:
        out = []
        for i, batch in enumerate(loader):
            out.append(batch.tolist())
            at.get(i, lambda: None)()
        return out

    def change_its_mind() -> None:
        monkeypatch.setattr(Moody, "shift", Moody.shift + 7)

    def all_given_back() -> bool:
        (session,) = stats_of(daemon)["sessions"]
        return bool(session["known"] - session["done"] <= 2 * workers)  # torch's lead

    def nothing_pinned() -> None:
        until(all_given_back, event="no step of a plan that is void is held")

    monkeypatch.setattr(Moody, "shift", 0)
    loader = creel.DataLoader(files, BATCH, sampler=Moody(), num_workers=workers)
    ours = epoch(loader, {})
    change_its_mind()
    ours += epoch(loader, {5: change_its_mind, 12: nothing_pinned})
    ours += epoch(loader, {0: change_its_mind, 15: nothing_pinned})
    nothing_pinned()
    with daemon.client("cli") as client:
        (dataset,) = client.ask("datasets")["datasets"]

        def forgotten() -> bool:
            assert main.main(["--name", daemon.name, "drop", dataset["dataset"][:12]]) == 0
            (held,) = client.ask("datasets")["datasets"]
            return bool(held["resident_objects"] == 0)

        until(forgotten, event="it forgets what nobody has pinned")

    monkeypatch.setattr(Moody, "shift", 0)
    theirs: Any = DataLoader(files, BATCH, sampler=Moody(), num_workers=workers)
    expected = epoch(theirs, {})
    change_its_mind()
    expected += epoch(theirs, {5: change_its_mind})
    expected += epoch(theirs, {0: change_its_mind})
    assert ours == expected


# --- two trainers ----------------------------------------------------------------------------

_TRAINER = """
import sys
from pathlib import Path
import torch, creel
folder, seed = sys.argv[1], int(sys.argv[2])
paths = sorted(Path(folder).iterdir())
torch.set_num_threads(1)
loader = creel.DataLoader(
    creel.FileDataset(list(map(str, paths)), labels=range(len(paths))), 8, True, num_workers=1,
    generator=torch.Generator().manual_seed(seed),
)
for epoch in range(3):
    order = []
    for data, numbers in loader:
        for one, i in zip(data, numbers.tolist()):
            assert one.numpy().tobytes() == paths[i].read_bytes(), i
            order.append(i)
        if len(order) == 8:
            print(*order, flush=True)
            sys.stdin.readline()
    assert sorted(order) == list(range(len(paths)))
print(loader.stats()["direct_reads"], flush=True)
"""


def test_two_trainers_with_orders_of_their_own_share_one_read(daemon: Running, files: Any) -> None:
    folder = str(Path(files.paths[0]).parent)
    both = [Program(_TRAINER, folder, seed) for seed in "12"]
    for _ in range(3):  # each epoch begins at the same time
        first, second = (process.stdout.readline() for process in both)
        assert first
        assert first != second
        for process in both:
            process.stdin.write("go\n")
            process.stdin.flush()
    assert [process.communicate()[0] for process in both] == ["0\n", "0\n"]
    assert [process.returncode for process in both] == [0, 0]
    assert reads(daemon) == N


# --- a restart -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, workers, persistent",
    [("files", 0, False), ("rows", 0, False), ("files", 2, False), ("rows", 2, True)],
)
def test_a_daemon_restarted_between_epochs_is_found_again(
    name: str,
    kind: str,
    workers: int,
    persistent: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "RETRY_S", 0)
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    rng = np.random.default_rng(2)
    paths = [str(tmp_path / str(i)) for i in range(N if kind == "files" else 1)]

    def write() -> None:
        """Write other bytes each time, so that a batch from a lost daemon shows."""
        for path in paths:
            Path(path).write_bytes(rng.bytes(NBYTES * N // len(paths)))

    write()
    data: Any = (
        creel.FileDataset(paths, nbytes=[NBYTES] * N)
        if kind == "files"
        else creel.RecordDataset(paths[0], torch.uint8, NBYTES)
    )

    def loader(cls: Any) -> Any:
        return cls(data, BATCH, True, generator=torch.Generator().manual_seed(6), **more)

    ours, theirs = loader(creel.DataLoader), loader(DataLoader)

    def read_all(daemon: Running) -> bool:
        return bool(stats_of(daemon)["sources"][0]["nbytes"] == N * NBYTES)

    def same_epoch() -> None:
        for mine, his in itertools.zip_longest(ours, theirs):
            assert torch.equal(mine, his)

    with Running(name) as first:
        same_epoch()
        assert read_all(first)
    write()
    with Running(name) as second:  # another one at once
        same_epoch()
        assert read_all(second)
    assert ours.stats()["direct_reads"] == 0
    write()
    same_epoch()  # none for a while
    write()
    with Running(name) as third:
        same_epoch()
        assert read_all(third)


@pytest.mark.parametrize(
    "kind, workers", [("files", 0), ("files", 2), ("rows", 0), ("rows", 2), ("large rows", 2)]
)
def test_a_daemon_restarted_in_mid_epoch_serves_the_rest(
    name: str, kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also large rows, which threads copy."""
    monkeypatch.setattr(connections, "RETRY_S", 0)
    monkeypatch.setattr(places, "INLINE_NBYTES", 0 if kind == "large rows" else 1 << 20)
    monkeypatch.setattr(epoch_run, "COUNT_S", 0)  # check after each batch whether it is alive
    paths = [tmp_path / str(i) for i in range(N)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * NBYTES)
    data: Any = (
        creel.FileDataset(paths, nbytes=[NBYTES] * N)
        if kind == "files"
        else creel.RecordDataset(paths, torch.uint8, NBYTES)
    )
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3)).tolist()
    loader = creel.DataLoader(data, BATCH, sampler=order, num_workers=workers)
    batches = []
    with Running(name):
        it = iter(loader)
        batches += [next(it) for _ in range(3)]
    with Running(name) as second:
        batches += [next(it) for _ in range(2)]
        until(lambda: len(stats_of(second)["sessions"]) == 1)
        until(lambda: "creel-reattach" not in {t.name for t in threading.enumerate()})
        batches += [next(it) for _ in range(5)]
        direct = loader.stats()["direct_reads"]
        batches += it
        assert loader.stats()["direct_reads"] == direct
        assert stats_of(second)["sources"][0]["nbytes"] >= 10 * BATCH * NBYTES
        assert len(list(loader)) == N // BATCH
        assert loader.stats()["direct_reads"] == direct
    assert [int(row[0]) for batch in batches for row in batch] == order


@pytest.mark.parametrize("kind", ["files", "rows"])
def test_workers_that_live_on_keep_their_dataset_whatever_daemon_there_is(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not see changes between epochs, and must not read by the new numbers."""
    monkeypatch.setattr(connections, "RETRY_S", 0)
    both: list[Any] = []
    for i in range(2):
        path = tmp_path / str(i)
        path.write_bytes(np.random.default_rng(i).bytes(N * 8))
        paths = [str(path)] if kind == "rows" else [str(path)] * N
        both += [
            creel.RecordDataset(paths, torch.uint8, 8)
            if kind == "rows"
            else creel.FileDataset(paths, transform=lambda data: data[:8])
        ]

    def epochs(cls: Any) -> list[Any]:
        subset = torch.utils.data.Subset(both[0], range(N))
        loader = cls(subset, BATCH, num_workers=1, persistent_workers=True)
        out = []
        for dataset in both:
            subset.dataset = dataset
            with Running(name):
                out += [batch.tolist() for batch in loader]
        return out

    assert epochs(creel.DataLoader) == epochs(DataLoader)


# --- readers and pins ------------------------------------------------------------------------

ROWS, ROW_NBYTES, FEW = 400, 16384, 4


def no_init(worker: int) -> None:
    """A `worker_init_fn`: with it, processes make batches instead of threads."""


class Gate:
    """Stops a reader that has looked up a batch's rows, just before it copies them.

    Meanwhile a test may overwrite memory that is not pinned.
    """

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[list[int]], bool]
    ) -> None:
        """Stop the first batch whose objects are `chosen`, in loaders started later."""
        self.arrived, self.opened, self.passed = (path / n for n in ("here", "open", "past"))
        rows = Gatherer.rows
        stops = False

        def watched_rows(gatherer: Any, ids: Any, indices: Any) -> Any:
            nonlocal stops
            stops = not self.arrived.exists() and chosen(ids.tolist())
            rows_read = rows(gatherer, ids, indices)
            if stops:
                self.passed.touch()
            return rows_read

        def watched(memory: Any) -> Any:
            def take(owner: Any, nbytes: int) -> Any:
                if stops:
                    self.arrived.touch()
                    until(self.opened.exists, event="the gate opens")
                return memory(owner, nbytes)

            return take

        monkeypatch.setattr(places, "INLINE_NBYTES", 0)  # threads gather even small batches
        monkeypatch.setattr(Gatherer, "rows", watched_rows)
        monkeypatch.setattr(Outbox, "memory", watched(Outbox.memory))
        monkeypatch.setattr(BufferPool, "array", watched(BufferPool.array))

    def let_through(self) -> None:
        """Let the reader continue, if there is one, and wait until it has copied."""
        self.opened.touch()
        if self.arrived.exists():
            until(self.passed.exists, event="the rows are copied")


@pytest.fixture
def tight(name: str) -> Iterator[Running]:
    """A daemon with memory for 64 of the rows."""
    with Running(name, memory="1MiB") as running:
        yield running


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> creel.RecordDataset:
    path = tmp_path_factory.mktemp("rows") / "rows"
    np.arange(ROWS).repeat(ROW_NBYTES // 8).tofile(path)
    return creel.RecordDataset(path, torch.int64, ROW_NBYTES // 8)


def by_one(kind: str, rows: Any, sampler: Any) -> Any:
    """Return the batches, read by one worker process or by one thread."""
    more: Any = {"prefetch_factor": 2, "multiprocessing_context": "fork"}
    more["worker_init_fn"] = no_init if kind == "process" else None
    return creel.DataLoader(rows, FEW, sampler=sampler, num_workers=1, **more)


def numbers(batches: Any) -> list[int]:
    """Return the numbers of the rows, each of which must be whole."""
    samples = []
    for batch in batches:
        assert (batch == batch[:, :1]).all()
        samples += batch[:, 0].tolist()
    return samples


def write_over(daemon: Running, rows: Any) -> None:
    """Put other rows into all memory that is not pinned."""
    manifest = bind(rows).manifest  # type: ignore[union-attr]  # it is bound
    with daemon.client() as client:
        for dataset in client.ask("datasets")["datasets"]:
            client.ask("drop", dataset=dataset["dataset"])
        session = opened(client, manifest)
        ids = np.arange(ROWS)[::-1]
        plan(session, ids, FEW)
        for step in range(ROWS // FEW):
            assert session.wait(step, 20)
            session.done(step + 1)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_rows_copied_while_the_session_closes_are_read_anew(
    tight: Running, rows: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tmp_path, monkeypatch, lambda ids: ids[0] == 3 * FEW)
    loader = by_one(kind, rows, range(40))
    batches = iter(loader)
    ours = numbers(itertools.islice(batches, 3))
    until(gate.arrived.exists, event="the batch is being made")
    connections.disconnect(tight.name)  # as after a late reply
    until(lambda: not stats_of(tight)["sessions"], event="the daemon takes everything back")
    write_over(tight, rows)
    gate.let_through()
    assert ours + numbers(batches) == list(range(40))


@pytest.mark.parametrize("kind", ["rows", "files"])
def test_a_thread_that_hangs_up_costs_the_others_no_batch(
    tight: Running, rows: Any, files: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows if kind == "rows" else creel.FileDataset(files.paths, decode=lambda b: hear(b)[0])
    loader: Any = creel.DataLoader(data, FEW, sampler=range(40))
    heard = itertools.count()

    def hear(thing: Any) -> Any:
        """Disturb this process in the middle of the fourth batch."""
        if next(heard) == (3 if kind == "rows" else 3 * FEW + 1):
            connections.disconnect(tight.name)
            until(lambda: not stats_of(tight)["sessions"], event="the daemon takes everything back")
            write_over(tight, rows)
        return thing

    array = BufferPool.array
    monkeypatch.setattr(BufferPool, "array", lambda ring, nbytes: hear(array(ring, nbytes)))
    if kind == "rows":
        assert numbers(loader) == list(range(40))
    else:
        first = [Path(path).read_bytes()[0] for path in files.paths[:40]]
        assert torch.cat(list(loader)).tolist() == first
