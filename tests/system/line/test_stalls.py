"""What training waited for, as reported by the daemon: each cause is made the greatest by force.

On a machine that is busy for a second, training waits for whatever comes next. So the slow part
continues until it is the greatest cause: a cause that is not counted never becomes that.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler, default_collate

import creel
from creel.cli import main
from creel.loader.client import connections
from daemons import Running
from kit import until
from testbed.http_server import Server
from testbed.same import needs_fuse
from testbed.slowfs import SlowFS

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, NBYTES = 64, 16_384
PAUSE_S = 0.01  # per sample or per batch's draw: 64 of them exceed all other waits together
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def decode(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_slowly(data: bytes) -> torch.Tensor:
    time.sleep(PAUSE_S)
    return decode(data)


def collate_slowly(samples: list[Any]) -> Any:
    time.sleep(PAUSE_S * len(samples))
    return default_collate(samples)


class SlowSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for i in range(FILES):
            time.sleep(PAUSE_S)
            yield i

    def __len__(self) -> int:
        return FILES


class Endless(SlowSampler):
    """A sampler that cannot be predicted: it has no length, and a copy of it never ends.

    The daemon does not get its batches one by one, either: it counts from the end.
    """

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(FILES, ())) - FILES

    def __reduce__(self) -> Any:
        raise TypeError("there is only one of me")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(FILES):
        (tmp_path / f"{i:03}.raw").write_bytes(rng.bytes(NBYTES))
    return tmp_path


@pytest.fixture
def node(daemon_name: str) -> Iterator[Running]:
    """A daemon that reads few steps ahead, so that training needs it all the time."""
    few = {"CREEL_WINDOW__MIN_STEPS": "1", "CREEL_WINDOW__MAX_STEPS": "2"}
    with Running(daemon_name, env=few) as running:
        yield running
        connections.disconnect(daemon_name)


def stats_of(node: Running) -> dict[str, Any]:
    """Return the only session from `creel stats`."""
    with node.client("cli") as client:
        (session,) = client.ask("stats")["sessions"]
    return dict(session)


def worst(seconds: dict[str, float]) -> str:
    """Return where most of the time went."""
    return max(seconds, key=seconds.__getitem__)


def worst_since(before: dict[str, float], node: Running) -> str:
    """Return the greatest cause of stalls since `before`."""
    now = stats_of(node)["stall_s"]
    return worst({cause: now[cause] - before[cause] for cause in now})


def forget(node: Running) -> None:
    """Make the daemon read its objects again, if it has any."""
    with node.client("cli") as client:
        for dataset in client.ask("datasets")["datasets"]:
            client.ask("drop", dataset=dataset["dataset"])


def epoch(loader: creel.DataLoader[Any]) -> None:
    for _ in loader:
        pass


def kept(workers: int) -> dict[str, Any]:
    """Arguments for workers that stay: to start them counts as a wait, for each epoch anew."""
    return {"num_workers": workers, "persistent_workers": workers > 0}


@WORKERS
@pytest.mark.parametrize(
    ("cause", "decoding", "options"),
    [
        ("decode", decode_slowly, {}),
        ("collate", decode, {"collate_fn": collate_slowly}),
        ("sampler", decode, {"sampler": SlowSampler()}),
    ],
)
def test_slow_code_of_a_person_is_named(
    cause: str,
    decoding: Callable[[bytes], torch.Tensor],
    options: dict[str, Any],
    workers: int,
    node: Running,
    folder: Path,
) -> None:
    files = creel.FileDataset(folder, "*.raw", decode=decoding)
    loader = creel.DataLoader(files, 4, **kept(workers), **options)
    epoch(loader)  # workers start, files are read
    before = stats_of(node)["stall_s"]

    def named() -> bool:
        epoch(loader)
        counted: Any = loader.stats()["stall_s"]
        return worst_since(before, node) == worst(counted) == cause

    until(named, event=f"{cause} is the greatest")


@WORKERS
def test_a_slow_sampler_of_rows_is_named(workers: int, node: Running, folder: Path) -> None:
    rows = creel.RecordDataset(folder / "000.raw", torch.uint8, NBYTES // FILES)
    loader = creel.DataLoader(rows, 4, sampler=SlowSampler(), **kept(workers))

    def named() -> bool:
        epoch(loader)
        return worst(stats_of(node)["stall_s"]) == "sampler"

    until(named, event="the sampler is the greatest")


@pytest.mark.parametrize("workers", [2])
def test_a_slow_source_is_named(workers: int, node: Running, folder: Path) -> None:
    with Server(folder, bandwidth_Bps=FILES * NBYTES) as server:
        urls = [f"{server.url}/{i:03}.raw" for i in range(FILES)]
        files = creel.FileDataset(urls, decode=decode)
        loader = creel.DataLoader(files, 4, **kept(workers))

        def named() -> bool:
            forget(node)
            epoch(loader)
            return worst(stats_of(node)["stall_s"]) == "source"

        until(named, event="the source is the greatest")


@pytest.mark.parametrize("workers", [0])
def test_a_slow_source_is_named_where_the_loader_reads_it_itself(
    workers: int, node: Running, folder: Path
) -> None:
    with Server(folder, latency_s=PAUSE_S) as server:
        urls = [f"{server.url}/{i:03}.raw" for i in range(FILES)]
        files = creel.FileDataset(urls, decode=decode)
        loader = creel.DataLoader(files, 4, sampler=Endless(), **kept(workers))

        def named() -> bool:
            batches = iter(loader)
            for _ in range(17):
                next(batches)
            del batches
            return worst(stats_of(node)["stall_s"]) == "source"

        until(named, event="the source is the greatest")
        session = stats_of(node)
    assert session["direct_reads"] >= 17 * 4
    assert session["direct_nbytes"] == session["direct_reads"] * NBYTES


@WORKERS
def test_a_stopped_daemon_is_named(workers: int, node: Running, folder: Path) -> None:
    files = creel.FileDataset(folder, "*.raw", decode=decode)
    loader = creel.DataLoader(files, 4, **kept(workers))
    epoch(loader)
    before = stats_of(node)["stall_s"]

    def named() -> bool:
        node.signal(signal.SIGSTOP)
        try:
            epoch(loader)
        finally:
            node.signal(signal.SIGCONT)
        assert stats_of(node)["pid"] == os.getpid()  # the daemon serves again
        epoch(loader)  # and gets the counts of the time when it was stopped
        return worst_since(before, node) == "daemon"

    until(named, event="the daemon is the greatest")


@WORKERS
def test_batches_that_were_not_foreseen_are_counted_exactly(
    workers: int, node: Running, folder: Path
) -> None:
    files = creel.FileDataset(folder, "*.raw", decode=decode)
    loader = creel.DataLoader(files, 4, sampler=Endless(), num_workers=workers)
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    del batches
    session = stats_of(node)
    assert (session["batches"], session["samples"]) == (40, 160)


class Own(Dataset[torch.Tensor]):
    """A dataset that knows nothing of creel."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{i:03}.raw") for i in range(FILES)]

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, i: int) -> torch.Tensor:
        return decode(Path(self.paths[i]).read_bytes())


@needs_fuse
@WORKERS
@pytest.mark.parametrize("own", [False, True])
def test_a_wait_that_has_not_ended_is_told_while_storage_hangs(
    own: bool,
    workers: int,
    node: Running,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mount = tmp_path_factory.mktemp("mount")
    with SlowFS(str(folder), str(mount)) as slow:  # type: ignore[no-untyped-call]
        paths = [str(mount / f"{i:03}.raw") for i in range(FILES)]
        files: Any = Own(mount) if own else creel.FileDataset(paths, decode=decode)
        loader = creel.DataLoader(files, 4, num_workers=workers)
        slow.set(stall=600)
        training = threading.Thread(target=epoch, args=(loader,))
        training.start()
        try:
            until(lambda: awaits_storage(overdue(node)), 60, event="the file is named")
            session = overdue(node)
            assert main.main(["--name", node.name, "stats", "--why"]) == 0
        finally:
            slow.set(stall=0)
            training.join()
    assert session["overdue_file"] in paths
    assert f"storage has not delivered {mount}/" in capsys.readouterr().out
    with node.client("cli") as client:
        (rank,) = client.ask("stats")["ranks"]
    assert rank["overdue_s"] == 0, "it has ended"
    assert rank["stall_s"]["source"] >= session["stall_s"]["source"]
    counted: Any = loader.stats()["stall_s"]
    assert sum(rank["stall_s"].values()) == pytest.approx(sum(counted.values()))


def overdue(node: Running) -> dict[str, Any]:
    """Return the session of the only loader, once it has one."""
    with node.client("cli") as client:
        return next(iter(client.ask("stats")["sessions"]), {})


def awaits_storage(session: dict[str, Any]) -> bool:
    """Whether a session has a wait that is counted, of this cause and with its file."""
    cause_and_file = session.get("overdue_cause"), bool(session.get("overdue_file"))
    return cause_and_file == ("source", True) and session["stall_s"]["source"] > 1


@WORKERS
def test_work_of_workers_is_told_by_stage(workers: int, node: Running, folder: Path) -> None:
    files = creel.FileDataset(folder, "*.raw", decode=decode_slowly)
    loader = creel.DataLoader(files, 4, num_workers=workers)

    def named() -> bool:
        epoch(loader)
        return not workers or worst(stats_of(node)["busy_s"]) == "decode"

    until(named, event="decoding is the greatest")
    session = stats_of(node)
    busy = session["busy_s"]
    assert set(busy) == {"source", "decode", "collate", "handover"}
    assert all(seconds >= 0 for seconds in busy.values())
    if workers:
        assert busy["decode"] > FILES * PAUSE_S
    else:
        assert sum(busy.values()) == 0
    assert loader.stats()["busy_s"] == pytest.approx(busy)


@WORKERS
def test_a_wrapped_dataset_counts_below_torchs_loader(
    workers: int, node: Running, folder: Path
) -> None:
    files = creel.wrap(creel.FileDataset(folder, "*.raw", decode=decode))
    for _ in torch.utils.data.DataLoader(files, 4, num_workers=workers):
        pass
    with node.client("cli") as client:
        (rank,) = client.ask("stats")["ranks"]  # its workers' sessions are gone
    assert (rank["batches"], rank["samples"]) == (FILES // 4, FILES)
    assert rank["nbytes"] == FILES * NBYTES
    assert rank["direct_reads"] == 0
    waited = {"here": rank["stall_s"]["source"], "there": rank["busy_s"]["source"]}
    assert worst(waited) == ("there" if workers else "here")
