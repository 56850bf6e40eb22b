"""A service's memory outlives the daemon: a restart reads nothing again, and no byte is wrong."""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from creel.cache.memory.memfd import Descriptor, sealed_memfd
from creel.cache.memory.shared_words import STATE
from creel.cache.storage.manifest import Manifest
from creel.daemon.service.memory import restart_memory
from creel.errors import NoDaemonError
from creel.loader.client.client import Client
from creel.settings import MemorySettings
from daemons import content, folder, opened, plan, read_steps
from kit import until
from testbed.dead_mount import dead_file
from testbed.same import needs_fuse

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

IDS = np.arange(200, dtype=np.int32)
N = len(IDS)


class Manager:
    """As much of a service manager as keeps descriptors between two daemons of one name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.store: dict[str, int] = {}
        self._path = str(path / "notify")
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(self._path)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, memory: str = "32MiB") -> Client:
        """Start a daemon with what is stored; return a client once it serves."""
        given = list(self.store.items())
        into = " ".join(f"{3 + i}<&{fd} {fd}<&-" for i, (_, fd) in enumerate(given))
        env = os.environ | {
            "NOTIFY_SOCKET": self._path,
            "LISTEN_FDS": str(len(given)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in given),
        }
        line = ["-m", "creel.daemon", "--name", self.name, "--memory", memory]
        self.process = subprocess.Popen(
            ["bash", "-c", f'LISTEN_PID=$$ exec "$0" "$@" {into}', sys.executable, *line],
            env=env,
            pass_fds=[fd for _, fd in given],
            stderr=self._log,
        )
        until(self._serves, 60, event="the daemon serves")
        self._hear()
        return Client.connect(self.name)

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            Client.connect(self.name, "cli").close()
        except NoDaemonError:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon, and store what it leaves."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(30)
        self._hear()

    def _hear(self) -> None:
        self._ear.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                text, along, _, _ = self._ear.recvmsg(4096, socket.CMSG_SPACE(4))
                lines = dict(x.split("=", 1) for x in text.decode().splitlines())
                if "FDSTOREREMOVE" in lines and lines["FDNAME"] in self.store:
                    os.close(self.store.pop(lines["FDNAME"]))
                for _, _, data in along:
                    self.store[lines["FDNAME"]] = array.array("i", data)[0]

    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in self.store.values():
            os.close(fd)
        self._ear.close()
        self._log.close()


@pytest.fixture
def manager(daemon_name: str, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(daemon_name, tmp_path)
    yield manager
    manager.close()


def data(path: Path, kind: str) -> Manifest:
    (path / "data").mkdir()
    path = path / "data"
    if kind == "records":
        (path / "all").write_bytes(np.random.default_rng(0).bytes(N * 3000))
        numbers = [np.array([n]) for n in (0, 3000, N)]
        return Manifest.of_runs(["all"], *numbers, root=str(path))
    sizes = np.random.default_rng(1).integers(1, 20_000, N).tolist()
    return folder(path, sizes, known=kind == "files")


def held_by_the_last(manager: Manager, path: Path) -> Manifest:
    """Return files that a daemon which has ended had all in memory."""
    manifest = data(path, "files")
    with manager.start() as client:
        session = opened(client, manifest)
        plan(session, IDS, 10)
        assert session.wait(N // 10 - 1, 30)
        manager.stop()
    return manifest


def reads(client: Client) -> int:
    return sum(int(source["reads"]) for source in client.ask("stats")["sources"])


def expected(manifest: Manifest, i: int) -> bytes:
    uri, offset, nbytes = manifest.location(i)
    return Path(uri).read_bytes()[offset : offset + nbytes if nbytes >= 0 else None]


@pytest.mark.parametrize("kind", ["records", "files", "unknown"])
def test_a_restart_reads_nothing_again(manager: Manager, tmp_path: Path, kind: str) -> None:
    manifest = data(tmp_path, kind)
    with manager.start() as client:
        session = opened(client, manifest)
        plan(session, IDS, 10)
        for step in range(N // 10):
            assert session.wait(step, 20)
            session.done(step + 1)
        assert reads(client) > 0
        manager.stop()
    assert sorted(manager.store) == ["creel-arena", "creel-index"]
    with manager.start() as client:
        until(lambda: len(client.ask("datasets")["datasets"]) == 1, event="registered")
        (row,) = client.ask("datasets")["datasets"]
        assert row["resident_objects"] == N
        assert manager.store == {}, "nothing is left with the manager"
        session = opened(client, manifest.key, recheck="epoch")
        session.begin(0)
        plan(session, IDS[::-1].copy(), 10)
        for step in range(N // 10):
            assert session.wait(step, 20)
            for i in IDS[::-1][step * 10 : step * 10 + 10].tolist():
                assert content(session, i) == expected(manifest, i)
            session.done(step + 1)
        assert reads(client) == 0
        manager.stop()
    assert "bug" not in manager.log()


def test_a_dataset_that_grew_survives_a_restart(manager: Manager, tmp_path: Path) -> None:
    """Its memory is divided as that of the first task, whose files are smaller by far."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = folder(tmp_path / "a", [100 + i % 7 for i in range(50)])
    both = Manifest.concat([first, folder(tmp_path / "b", [400_000 + i for i in range(20)])])
    ids = np.arange(len(both), dtype=np.int32)
    with manager.start() as client:
        session = opened(client, first)
        plan(session, ids[:50], 10)
        assert session.wait(4, 20)
        session = opened(client, both)
        plan(session, ids, 10)
        assert session.wait(6, 20)
        manager.stop()
    with manager.start() as client:
        until(lambda: len(client.ask("datasets")["datasets"]) == 2, event="registered")
        rows = client.ask("datasets")["datasets"]
        assert [row["resident_objects"] for row in rows if row["objects"] == len(both)] == [70]
        session = opened(client, both)
        plan(session, ids, 10)
        assert read_steps(session, both, ids, 10) == len(both)
        assert reads(client) == 0


def test_a_file_that_changes_between_two_daemons_is_read_anew(
    manager: Manager, tmp_path: Path
) -> None:
    manifest = held_by_the_last(manager, tmp_path)
    Path(manifest.uri(7)).write_bytes(b"y" * len(expected(manifest, 7)))
    with manager.start() as client:
        session = opened(client, manifest, recheck="epoch")
        session.begin(0)
        plan(session, IDS, 10)
        assert read_steps(session, manifest, IDS, 10) >= N - 1
        assert 0 < reads(client) < 10


def test_a_killed_daemon_leaves_nothing_and_uses_nothing_twice(
    manager: Manager, tmp_path: Path
) -> None:
    manifest = held_by_the_last(manager, tmp_path)
    twice = {name: os.dup(fd) for name, fd in manager.store.items()}
    with manager.start() as client:
        opened(client, manifest)
        manager.stop(signal.SIGKILL)
    assert manager.store == {}
    manager.store |= twice  # as if the manager had not heard that they are taken
    with manager.start() as client:
        session = opened(client, manifest)
        assert client.ask("datasets")["datasets"][0]["resident_objects"] == 0
        plan(session, IDS, 10)
        assert read_steps(session, manifest, IDS, 10) == N


def test_another_budget_begins_with_an_empty_arena(manager: Manager, tmp_path: Path) -> None:
    manifest = held_by_the_last(manager, tmp_path)
    with manager.start("16MiB") as client:
        opened(client, manifest)
        assert client.ask("datasets")["datasets"][0]["resident_objects"] == 0
        assert client.ask("status")["memory"]["budget_nbytes"] == 16 << 20
        files = [
            fd.stat() for fd in Path(f"/proc/{client.daemon_pid}/fd").iterdir() if _is_arena(fd)
        ]
        assert {(status.st_ino, status.st_size) for status in files} == {
            (files[0].st_ino, 16 << 20)
        }


def _is_arena(fd: Path) -> bool:
    return "memfd:creel-arena" in str(fd.readlink())


def test_a_reader_of_the_last_daemon_takes_no_byte_of_the_next_ones(
    manager: Manager, tmp_path: Path
) -> None:
    """It has mapped the same memory; its steps are not ready any more before that is written to."""
    manifest = data(tmp_path, "files")
    client = manager.start()
    session = opened(client, manifest)
    plan(session, IDS, 10)
    assert session.wait(3, 30)
    stamp = session.hold(3)
    assert session.held(3, stamp)
    manager.stop()
    assert session.hold(3) == -1
    assert not session.held(3, stamp), "what was being copied is discarded"
    client.close()


def test_a_reader_whose_session_closes_while_the_daemon_drains_takes_no_byte_of_the_next_ones(
    manager: Manager, tmp_path: Path
) -> None:
    """As when a trainer begins another epoch then, and its workers still read the last one."""
    manifest = data(tmp_path, "files")
    with manager.start() as client:
        session = opened(client, manifest)
        plan(session, IDS, 10)
        assert session.wait(3, 30)
        assert manager.process is not None
        with Client.connect(manager.name, "worker", client.token) as worker:
            theirs = worker.attach(session.id)
            stamp = theirs.hold(3)
            assert theirs.held(3, stamp)
            manager.process.send_signal(signal.SIGTERM)
            until(lambda: session.words[STATE] == 1, event="it drains")
            session.close()
            manager.process.wait(30)
            assert not theirs.held(3, stamp), "what was being copied is discarded"
            assert theirs.hold(3) == -1


@pytest.mark.parametrize("damage", ["columns", "ranges", "manifest", "places", "nothing"])
def test_a_damaged_index_costs_the_memory_alone(
    manager: Manager, tmp_path: Path, damage: str
) -> None:
    manifest = data(tmp_path, "files")
    held = [manifest.location(i)[2] for i in range(2)]
    columns = np.array([[64 if damage == "places" else 0, 1 << 20], held, [0, 0]]).tobytes()
    sizes = -(-np.array(held) // 64) * 64
    ranges = np.array([[1 << 20 if damage == "ranges" else 0, 1 << 20], sizes]).tobytes()
    arena = Descriptor(sealed_memfd(restart_memory.ARENA, 32 << 20))
    columns = columns[: -5 if damage == "columns" else None]
    table = manifest.to_arrow()[: 200 if damage == "manifest" else None]
    ids = IDS[:2].tobytes()
    dataset = restart_memory.StoredDataset(manifest.key, table, ids, columns, ranges, {}, 64)
    memory = MemorySettings(budget="32MiB")
    index = restart_memory.write_index(memory, 1 << 40, 32 << 20, [dataset])
    manager.store = {restart_memory.ARENA: os.dup(arena.fd), restart_memory.INDEX: os.dup(index.fd)}
    with manager.start() as client:
        session = opened(client, manifest, recheck="epoch")
        held_now = client.ask("datasets")["datasets"][0]["resident_objects"]
        assert held_now == (2 if damage == "nothing" else 0)
        assert ("of no use" in manager.log()) is (damage in ("columns", "ranges", "places"))
        session.begin(0)
        plan(session, IDS, 10)
        assert read_steps(session, manifest, IDS, 10) == N
    assert "bug" not in manager.log()


@needs_fuse
def test_memory_that_a_hung_read_could_write_to_is_not_kept(
    manager: Manager, tmp_path: Path
) -> None:
    manifest = data(tmp_path, "unknown")
    with dead_file(tmp_path) as file, manager.start() as client:
        hanging = Path(manifest.uri(7))
        hanging.unlink()
        hanging.symlink_to(file)
        session = opened(client, manifest)
        plan(session, IDS, 10)
        assert not session.wait(0, 1)
        manager.stop()
    assert manager.store == {}
    assert "a read that hangs" in manager.log()
