"""A trainer waits for the daemon if the source is slow, and reads a quick one by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import creel
from creel.cache.memory.shared_words import DONE, KNOWN, OBJECT_NS, READY
from creel.loader.client import connections
from creel.loader.client.session import Session
from creel.loader.line.batches import epoch_run
from daemons import Running
from kit import daemon_of, stopped, until
from testbed.http_server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, NBYTES, BATCH = 640, 2_000, 16
WINDOW = 4
DIRECT = {"loader.direct": "auto"}
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}


def decode(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i:04}" for i in range(FILES)]
    for path in paths:
        path.write_bytes(rng.bytes(NBYTES))
    return list(map(str, paths))


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide from creel what is in the page cache, as on most file systems."""
    monkeypatch.setattr("creel.loader.data.binding.bind.in_page_cache", lambda _: False)


class Reads(torch.utils.data.Dataset[torch.Tensor]):
    """A user's own dataset, which declares what it reads."""

    def __init__(self, paths: list[str]) -> None:
        self.creel_uris = paths

    def __len__(self) -> int:
        return len(self.creel_uris)

    def objects(self, index: int) -> int:
        return index

    def __getitem__(self, index: int) -> torch.Tensor:
        return decode(creel.read(self.creel_uris[index]))


class Silent(Reads):
    """The same dataset without the declaration."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return decode(creel.read(self.paths[index]))


def batches(kind: Any, data: Any, **more: Any) -> Iterator[Any]:
    torch.manual_seed(3)
    return iter(kind(data, batch_size=BATCH, shuffle=True, **more))


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("kind", ["files", "rows", "own"])
def test_no_reader_waits_for_a_daemon_where_the_page_cache_is_quicker(
    daemon_name: str, paths: list[str], kind: str
) -> None:
    data: Any = creel.FileDataset(paths, nbytes=[NBYTES] * FILES)
    if kind == "files":
        data = creel.FileDataset(paths, decode=decode)
    if kind == "own":
        data = Reads(paths)
    near = {"CREEL_WINDOW__MAX_STEPS": str(WINDOW)}
    with Running(daemon_name, env=near) as daemon:
        theirs = list(batches(DataLoader, data))
        torch.manual_seed(3)
        ours: Any = creel.DataLoader(data, batch_size=BATCH, shuffle=True, creel=DIRECT)
        it = iter(ours)
        mine = [next(it)]
        session = stand_still(daemon)
        session.words[OBJECT_NS] = 20_000  # whatever a busy machine measured
        mine += list(it)
        daemon.signal(signal.SIGCONT)
        assert all(map(torch.equal, mine, theirs))
        # Steps that were ready came from memory; the reader waited for no other.
        assert ours.stats()["stall_s"]["daemon"] == 0
        assert 0 < ours.stats()["direct_reads"] < FILES
        del it, ours


@pytest.mark.usefixtures("unsaid")
def test_a_daemon_without_processors_is_not_waited_for_where_reading_is_quick(
    daemon_name: str, paths: list[str]
) -> None:
    """Its own reads are slow then, too; here it is stopped, the extreme case."""
    near = {"CREEL_WINDOW__MAX_STEPS": str(WINDOW)}
    with Running(daemon_name, env=near) as daemon:
        torch.manual_seed(3)
        ours: Any = creel.DataLoader(Reads(paths), batch_size=BATCH, shuffle=True, creel=DIRECT)
        it = iter(ours)
        next(it)
        words = stand_still(daemon).words
        words[OBJECT_NS] = 20_000
        while not ours.stats()["direct_reads"]:
            next(it)
        words[OBJECT_NS] = 3_000_000
        batches = len(list(it))
        daemon.signal(signal.SIGCONT)
        assert batches > 2
        assert ours.stats()["stall_s"]["daemon"] == 0  # no wait until it counted as lost
        del it, ours


@pytest.mark.parametrize(("kind", "workers"), [("files", 2), ("own", 0), ("rows", 0), ("rows", 2)])
def test_files_in_the_page_cache_are_read_by_whoever_decodes_them(
    daemon_name: str, paths: list[str], kind: str, workers: int
) -> None:
    """No reader waits for the daemon, which is stopped; rows are copied from the arena."""
    data: Any = creel.FileDataset(paths, nbytes=[NBYTES] * FILES)
    if kind != "rows":
        data = Reads(paths) if kind == "own" else creel.FileDataset(paths, decode=decode)
    with Running(daemon_name) as daemon:
        ours: Any = creel.DataLoader(data, BATCH, shuffle=True, num_workers=workers, creel=DIRECT)
        for _ in range(2):
            torch.manual_seed(3)
            it = iter(ours)
            mine = [next(it)]
            if kind != "rows":
                daemon.signal(signal.SIGSTOP)
                until(lambda: stopped(daemon.pid), event="the daemon stands still")
            mine += list(it)
            daemon.signal(signal.SIGCONT)
            assert all(map(torch.equal, mine, batches(DataLoader, data)))
        if not workers:
            assert ours.stats()["stall_s"]["daemon"] == 0
        if kind != "rows":
            assert ours.stats()["direct_reads"] == 2 * FILES
        else:
            assert ours.stats()["direct_reads"] < 2 * FILES
        del it, ours


@pytest.mark.parametrize("workers", [0, 2])
def test_residents_are_read_in_memory_though_they_lie_in_the_page_cache_too(
    served: str, paths: list[str], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for files that another job has read, or that were not in the page cache at first."""
    monkeypatch.setattr(epoch_run, "COUNT_S", 0)  # look for the daemon in short epochs, too
    data = creel.FileDataset(paths, decode=decode)
    never: Any = creel.DataLoader(data, BATCH, creel={"loader.direct": "never"})
    assert len(list(never)) == len(never)
    del never  # ends its session
    ours: Any = creel.DataLoader(data, BATCH, shuffle=True, num_workers=workers, creel=DIRECT)
    assert sum(map(len, ours)) == FILES  # in its first epoch the loader has no session

    def is_ready() -> bool:
        """Whether the next step is ready, if it was planned: 7 ms may be too short for that."""
        client = connections.connected(served)
        assert client is not None
        words = [session.words for session in client.sessions if session.alive]
        return all(some[READY] > some[DONE] or some[KNOWN] <= some[DONE] for some in words)

    def read_directly() -> Any:
        """Return how many files are read directly in an epoch."""
        before = ours.stats()["direct_reads"]
        batches = iter(ours)
        for _ in range(len(ours)):
            until(is_ready, event="the next step is ready")
            next(batches)
        assert next(batches, None) is None
        return ours.stats()["direct_reads"] - before

    until(lambda: read_directly() == 0, event="an epoch that is read from memory alone")
    assert served


@pytest.mark.parametrize(("more"), [{}, {"num_workers": 2}, SPAWNED])
def test_a_loaders_settings_hold_below_wrap(
    daemon: Running, paths: list[str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """These files make no reader wait: without the setting they are not intercepted."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    read = []
    for setting in ("auto", "never"):
        loader: Any = creel.DataLoader(
            creel.wrap(Silent(paths)), BATCH, creel={"loader.direct": setting}, **more
        )
        for _ in range(2):
            assert sum(map(len, loader)) == FILES
        with daemon.client("cli") as client:
            read.append(sum(source["reads"] for source in client.ask("stats")["sources"]))
    assert read == [0, FILES]


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("stop", [False, True])
def test_files_changed_in_mid_epoch_are_seen_by_direct_reads(
    daemon_name: str, paths: list[str], stop: bool
) -> None:
    def changed(loader: Any, daemon: Running | None) -> list[Any]:
        torch.manual_seed(3)
        it = iter(loader)
        seen = [next(it)]
        if daemon is not None:
            daemon.signal(signal.SIGSTOP)
            until(lambda: stopped(daemon.pid), event="the daemon stands still")
            session_of(daemon_name).words[OBJECT_NS] = 20_000
        loader.dataset.indices.reverse()
        seen += list(it)
        if daemon is not None:
            daemon.signal(signal.SIGCONT)
        return seen

    def data() -> Any:
        return Subset(creel.FileDataset(paths, decode=decode), list(range(0, FILES, 2)))

    with Running(daemon_name, env={"CREEL_WINDOW__MAX_STEPS": "4"}) as daemon:
        theirs = changed(DataLoader(data(), BATCH, shuffle=True), None)
        ours: Any = creel.DataLoader(data(), BATCH, shuffle=True, creel=DIRECT)
        mine = changed(ours, daemon if stop else None)
        assert all(map(torch.equal, mine, theirs))
        del ours


@pytest.mark.usefixtures("unsaid")
def test_below_torchs_loader_nobody_asks_the_daemon_for_what_is_read_as_quickly(
    daemon_name: str, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    theirs = list(batches(DataLoader, Reads(paths)))
    wrapped = creel.wrap(Reads(paths))
    with Running(daemon_name) as daemon:
        it = batches(DataLoader, wrapped)
        mine = [next(it)]
        words = session_of(daemon_name).words
        daemon.signal(signal.SIGSTOP)
        until(lambda: stopped(daemon.pid), event="the daemon stands still")
        words[OBJECT_NS] = 20_000
        mine += list(it)
        daemon.signal(signal.SIGCONT)
        assert all(map(torch.equal, mine, theirs))
        assert words.counters()["stall_daemon_ns"] == 0


@pytest.mark.usefixtures("unsaid")
def test_a_daemons_start_is_waited_for_by_no_batch_below_torchs_loader(
    embedded: str, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    wrapped = creel.wrap(Reads(paths))
    for epoch in range(3):
        theirs = list(batches(DataLoader, Reads(paths)))
        assert all(map(torch.equal, batches(DataLoader, wrapped), theirs)), epoch
    until(lambda: bool(wrapped[0].numel()) and linked(embedded), event="the daemon is there")
    assert daemon_of(embedded).is_running()


def test_settings_that_the_daemon_has_not_are_named_though_nobody_waits_for_it(
    served: str,
    paths: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0)  # look for the daemon in short epochs, too
    assert served
    ours = creel.DataLoader(Reads(paths), BATCH, creel={**DIRECT, "memory.budget": "3GB"})
    assert sum(map(len, ours)) == FILES
    until(lambda: "memory.budget" in caplog.text, event="a warning of the other budget")


class ReadsNothing(Reads):
    def __init__(self) -> None:
        super().__init__([])

    def __len__(self) -> int:
        return 20

    def objects(self, index: int) -> Any:  # noqa: ARG002
        return []

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_a_dataset_may_declare_that_it_reads_nothing(served: str) -> None:
    ours = creel.DataLoader(ReadsNothing(), 8, creel=DIRECT)
    assert all(map(torch.equal, ours, DataLoader(ReadsNothing(), 8)))
    assert served


def test_below_torchs_loader_no_daemon_is_asked_for_what_is_in_the_page_cache(
    served: str, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    wrapped = creel.wrap(Reads(paths))
    for _ in range(2):
        theirs = list(batches(DataLoader, Reads(paths)))
        assert all(map(torch.equal, batches(DataLoader, wrapped), theirs))
    assert not linked(served)


class Opens(Silent):
    """Opens its files itself, and reports whether creel's function did it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        seen = not isinstance(open, BuiltinFunctionType)
        with open(self.paths[index], "rb") as file:  # noqa: PTH123  as users do
            return torch.cat([decode(file.read()), torch.tensor([seen], dtype=torch.uint8)])


@pytest.mark.parametrize("kind", [creel.DataLoader, DataLoader])
def test_files_that_nobody_waits_for_are_opened_as_without_creel(
    served: str, paths: list[str], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    wrapped = creel.wrap(Opens(paths))
    for _ in range(4):
        theirs = torch.cat(list(batches(DataLoader, Opens(paths))))
        mine = torch.cat(list(batches(kind, wrapped)))
        assert torch.equal(mine[:, :-1], theirs[:, :-1])
        # The first few are measured; a single thread waits for no other, on any busy machine.
        assert int(mine[:, -1].sum()) <= 64 + BATCH
    assert not linked(served) or kind is creel.DataLoader


def test_files_that_are_waited_for_are_learnt_and_read_once(
    served: str, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    with Server(Path(paths[0]).parent, latency_s=0.002) as server:
        wrapped = creel.wrap(Silent([f"{server.url}/{Path(path).name}" for path in paths]))
        gets = []
        for _ in range(3):
            theirs = list(batches(DataLoader, Silent(paths)))
            mine = batches(creel.DataLoader, wrapped, num_workers=2)
            assert all(map(torch.equal, mine, theirs))
            gets.append(server.stats(reset=True)["gets"])
    assert served
    by_samples, by_the_daemon, later = gets
    # The daemon begins once the list of files is proved, so it reads some of them in time.
    assert (by_samples, later) == (FILES, 0)
    assert 0 < by_the_daemon <= FILES


def linked(name: str) -> bool:
    """Return whether this process has a session with the daemon."""
    client = connections.connected(name)
    return client is not None and bool(client.sessions)


def session_of(name: str) -> Session:
    """Return this process's only session with the daemon."""
    client = connections.connected(name)
    assert client is not None
    (session,) = client.sessions
    return session


def stand_still(daemon: Running) -> Session:
    """Stop the daemon once all that may be read after the first batch is ready.

    Of a batch that memory has, and that is not said to be ready, a reader expects that at once.
    """
    session = session_of(daemon.name)
    until(lambda: session.words[READY] == 1 + WINDOW, event="all that may be read is ready")
    daemon.signal(signal.SIGSTOP)
    until(lambda: stopped(daemon.pid), event="the daemon stands still")
    return session


def test_a_slow_source_is_read_by_the_daemon_alone(daemon_name: str, paths: list[str]) -> None:
    with Server(Path(paths[0]).parent, latency_s=0.005) as server, Running(daemon_name):
        uris = [f"{server.url}/{Path(path).name}" for path in paths]
        ours = creel.DataLoader(Reads(uris), batch_size=BATCH, shuffle=True, creel=DIRECT)
        for _ in range(2):
            assert sum(len(batch) for batch in ours) == FILES
        assert server.stats()["gets"] == FILES
        assert ours.stats()["direct_reads"] == 0
        del ours
