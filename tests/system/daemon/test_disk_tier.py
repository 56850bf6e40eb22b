"""The disk tier of a real daemon: objects beyond memory, restarts, changed files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import creel
from creel.cache.storage.manifest import Manifest
from creel.cli.watching.view import status_pairs
from creel.loader.client.client import Client
from daemons import Running, folder, opened, plan, read_steps
from kit import Cores, unique_name, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

N, BATCH = 300, 10
TOTAL = 6 << 20  # about, of all files


@pytest.fixture
def files(tmp_path: Path) -> Manifest:
    """Files written so long ago that their versions are reliable."""
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    return folder(tmp_path / "data", rng.integers(5_000, 37_000, N).tolist())


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def running(
    scratch: Path, *, disk: str = "12MiB", memory: str = "2MiB", idle: str = "3600"
) -> Running:
    env = {
        "CREEL_DISK__PATH": str(scratch),
        "CREEL_DISK__BUDGET": disk,
        "CREEL_DISK__KEEP_FREE": "0",
        "CREEL_DAEMON__IDLE_S": idle,
    }
    return Running(unique_name(), memory=memory, env=env)


class Reading:
    """A session that reads whole epochs; the next epoch is always planned, too."""

    def __init__(self, daemon: Running, manifest: Manifest, recheck: str = "epoch") -> None:
        self._client = daemon.client()
        key = self._client.register(manifest)
        self._session = opened(self._client, key, "job", 0, 1, recheck)
        self._manifest = manifest
        self._rng = np.random.default_rng(1)
        self._orders: list[NDArray[np.intp]] = []
        self._epoch = self._step = self._planned = 0

    def epoch(self) -> None:
        """Read the next epoch and check every byte."""
        self.steps(-(-N // BATCH))
        self._step += -(-N // BATCH)
        self._epoch += 1

    def steps(self, count: int) -> None:
        """Read the first steps of the next epoch."""
        while len(self._orders) < self._epoch + 2:
            self._orders.append(self._rng.permutation(N))
            order = self._orders[-1]
            self._planned = plan(self._session, order, BATCH, len(self._orders) - 1, self._planned)
        self._session.begin(self._epoch)
        order = self._orders[self._epoch]
        read_steps(self._session, self._manifest, order[: count * BATCH], BATCH, self._step)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
        self._client.close()


def disk_stats(daemon: Running) -> dict[str, Any]:
    """Return the daemon's report of its one dataset, with sources."""
    with daemon.client("cli") as client:
        stats = client.ask("stats")
    (counted,) = stats["core"]["datasets"].values()
    return {**counted, "tiers": stats["tiers"]}


def written(daemon: Running) -> int:
    """Wait until nothing more is written; return the objects on disk."""
    seen = [-1]

    def same() -> bool:
        seen.append(int(disk_stats(daemon)["disk_objects"]))
        return seen[-1] == seen[-2]

    until(same)
    return seen[-1]


def test_objects_that_memory_has_no_room_for_are_read_from_disk(
    files: Manifest, scratch: Path
) -> None:
    cores = Cores()
    with running(scratch) as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        first = disk_stats(daemon)
        reading.epoch()
        reading.epoch()
        last = disk_stats(daemon)
    assert last["disk_misses"] == last["failed"] == 0
    assert last["tiers"]["disk"]["hits"] == last["disk_reads"]
    assert first["spilled"] > 0
    assert last["disk_reads"] > 0
    # The second epoch is read ahead in the first, so source reads are counted over both.
    # No reader waits for a disk that is slow, as one on a busy machine may be.
    cores.skip_unless_spare()
    assert last["reads"] == N
    assert first["spilled"] > 0.5 * N
    assert last["disk_reads"] > N


def test_memory_and_disk_together_are_one_capacity(files: Manifest, scratch: Path) -> None:
    """Neither holds all: memory has 2 MiB, the disk 5.1 of 6.3."""
    cores = Cores()
    with running(scratch, disk="5200KiB") as daemon, Reading(daemon, files) as reading:
        for _ in range(4):
            reading.epoch()
        counted = disk_stats(daemon)
    assert counted["disk_misses"] == counted["failed"] == 0
    assert counted["reads"] <= 2 * N  # with memory alone: 3
    cores.skip_unless_spare()
    assert counted["reads"] <= 1.02 * N


def test_a_killed_daemon_leaves_what_it_had_written_to_the_next(
    files: Manifest, scratch: Path
) -> None:
    cores = Cores()
    with running(scratch) as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
        on_disk = written(daemon)
    with running(scratch) as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
            reading.epoch()
        counted = disk_stats(daemon)
    assert counted["disk_misses"] == 0
    assert counted["disk_reads"] > 0
    cores.skip_unless_spare()
    assert on_disk >= 0.95 * N
    assert counted["reads"] <= N - on_disk


def test_a_daemon_killed_while_it_writes_gives_no_wrong_byte_to_the_next(
    files: Manifest, scratch: Path
) -> None:
    """`read_steps` compares every byte; the daemons are killed after a few steps each."""
    for _ in range(5):
        with running(scratch, disk="3MiB") as daemon, Reading(daemon, files) as reading:
            reading.steps(12)
    with running(scratch, disk="3MiB") as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        counted = disk_stats(daemon)
    assert counted["disk_reads"] > 0
    assert counted["failed"] == 0


def test_objects_that_only_memory_has_are_written_when_the_daemon_ends(
    files: Manifest, scratch: Path
) -> None:
    """Objects read ahead for a step that was not read yet are pinned, so not written before."""
    with running(scratch, memory="16MiB") as daemon, daemon.client() as client:
        session = opened(client, files, "job", 0, 1, "epoch")
        plan(session, np.arange(N), N, 0, 0)
        session.begin(0)
        until(lambda: disk_stats(daemon)["resident_objects"] == N, event="all is read ahead")
        assert disk_stats(daemon)["spilled"] == 0
        daemon.end()
    cores = Cores()
    with running(scratch, memory="16MiB") as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        counted = disk_stats(daemon)
    assert counted["disk_misses"] == 0
    assert counted["disk_reads"] + counted["reads"] >= N
    assert counted["disk_reads"] > 0
    cores.skip_unless_spare()
    assert counted["reads"] == 0


def test_rewritten_files_are_served_new(files: Manifest, scratch: Path) -> None:
    """In the same daemon and by the next one; same size, old times."""
    with running(scratch) as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
            rewrite(files, range(0, N, 3))
            reading.epoch()
            assert disk_stats(daemon)["reads"] >= N + N // 3
        written(daemon)
    rewrite(files, range(1, N, 3))
    cores = Cores()
    with running(scratch) as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        counted = disk_stats(daemon)
    assert counted["reads"] >= N // 3
    assert counted["disk_reads"] > 0
    cores.skip_unless_spare()
    assert counted["reads"] <= 0.5 * N


def test_a_flipped_bit_is_read_anew(files: Manifest, scratch: Path) -> None:
    cores = Cores()
    with running(scratch) as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
        on_disk = written(daemon)
    data = scratch / f"creel-{os.getuid()}" / "objects"
    with data.open("r+b") as file:
        for at in range(70_000, 5 << 20, 500_000):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    with running(scratch) as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        counted = disk_stats(daemon)
    assert 1 <= counted["disk_misses"] <= 11
    assert counted["disk_reads"] > 0
    cores.skip_unless_spare()
    assert counted["reads"] <= N - on_disk + counted["disk_misses"]


def test_a_second_daemon_goes_without_and_says_so(files: Manifest, scratch: Path) -> None:
    with running(scratch) as first, running(scratch) as second:
        for daemon in (first, second):
            with Reading(daemon, files) as reading:
                reading.epoch()
        assert disk_stats(first)["spilled"] > 0
        assert disk_stats(second)["spilled"] == 0
        assert "there is no disk tier" in second.log()
        assert second.log().count("another daemon uses it") == 1


@pytest.mark.parametrize("path", ["file", "/proc", "missing"])
def test_training_says_that_its_disk_tier_cannot_be_used(
    tmp_path: Path, embedded: str, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The daemon that it starts has a log that nobody sees."""
    (tmp_path / "file").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sample").write_bytes(bytes(100))
    given = {"disk.path": str(tmp_path / path), "daemon.name": embedded}
    list(creel.DataLoader(creel.FileDataset(tmp_path / "data", nbytes=True), creel=given))
    (said,) = [m for m in caplog.messages if "there is no disk tier" in m]
    assert str(tmp_path / path) in said
    with Client.connect(embedded, "cli") as client:
        shown = dict(status_pairs(client.ask("status")))
        assert "there is no disk tier" in shown["disk"]


def test_a_dropped_dataset_is_not_found_by_the_next_daemon(files: Manifest, scratch: Path) -> None:
    with running(scratch) as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
        assert written(daemon) > 0
        with daemon.client("cli") as client:
            (dataset,) = client.ask("datasets")["datasets"]
            client.ask("drop", dataset=dataset["dataset"])
        daemon.end()
    with running(scratch) as daemon, Reading(daemon, files) as reading:
        reading.epoch()
        assert disk_stats(daemon)["disk_reads"] == 0 or disk_stats(daemon)["reads"] == N


def test_an_idle_dataset_is_found_again_on_disk(files: Manifest, scratch: Path) -> None:
    """It left memory for good when it was forgotten; a new registration finds it on disk."""
    with running(scratch, idle="0") as daemon:
        with Reading(daemon, files) as reading:
            reading.epoch()
        until(lambda: not datasets(daemon), event="the dataset is forgotten")
        cores = Cores()
        with Reading(daemon, files) as reading:
            reading.epoch()
            counted = disk_stats(daemon)
    assert counted["disk_reads"] > 0
    cores.skip_unless_spare()
    assert counted["reads"] < 0.5 * N


def rewrite(files: Manifest, ids: range) -> None:
    for i in ids:
        path = Path(files.uri(i))
        before = path.stat()
        path.write_bytes(bytes(255 - b for b in path.read_bytes()))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = path.stat().st_ctime_ns
    until(lambda: time.time_ns() > changed + 50_000_000, event="its version may be trusted")


def datasets(daemon: Running) -> list[Any]:
    with daemon.client("cli") as client:
        rows: list[Any] = client.ask("datasets")["datasets"]
    return rows
