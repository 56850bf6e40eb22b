"""A real daemon: its bytes are right, and it survives deaths of clients."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from creel.cache.memory.shared_words import FAILED, HEARTBEAT, READY
from creel.cache.storage.manifest import Manifest
from creel.errors import NoDaemonError, UnavailableError
from creel.loader.client.client import Client
from creel.loader.client.session import STALE_NS, Session
from daemons import COMMAND, Running, content, folder, opened, plan, read_steps, status
from kit import until
from testbed.dead_mount import dead_file
from testbed.same import needs_fuse

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


# --- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["known lengths", "unknown lengths"])
def test_bytes_in_the_arena_equal_the_files(daemon: Running, tmp_path: Path, known: bool) -> None:
    rng = np.random.default_rng(7)
    manifest = folder(tmp_path, rng.integers(0, 9000, 150).tolist(), known=known)
    with daemon.client() as client:
        session = opened(client, manifest, "job", 0, 1)
        at = 0
        for epoch in range(3):
            ids = rng.permutation(150).astype(np.int32)
            plan(session, ids, 8, epoch, at)
            assert read_steps(session, manifest, ids, 8, at) == 150
            at += 19
        stats = client.ask("stats")
    assert stats["sources"][0]["reads"] == 150  # every file once in three epochs
    assert stats["sessions"][0]["ready"] == at


def test_records_of_one_file_are_dense_rows(daemon: Running, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (500, 384), np.uint8)
    (tmp_path / "rows").write_bytes(data.tobytes())
    ones = np.ones(1, np.int64)
    manifest = Manifest.of_runs([str(tmp_path / "rows")], ones * 0, ones * 384, ones * 500)
    with daemon.client() as client:
        session = opened(client, manifest)
        ids = np.random.default_rng(1).permutation(500).astype(np.int32)
        plan(session, ids, 50)
        rows = client.arena.rows(384)
        for step in range(10):
            assert session.wait(step, 10)
            some = ids[step * 50 : step * 50 + 50]
            assert (rows[session.table.offset[some] // 384] == data[some]).all()
            session.done(step + 1)


def test_a_small_budget_evicts_and_stays_right(daemon_name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    manifest = folder(tmp_path, [20_000] * 200)  # 4 MB through 1 MiB
    with Running(daemon_name, memory="1MiB") as daemon, daemon.client() as client:
        session = opened(client, manifest)
        at = 0
        for epoch in range(3):
            ids = rng.permutation(200).astype(np.int32)
            plan(session, ids, 5, epoch, at)
            assert read_steps(session, manifest, ids, 5, at) == 200
            at += 40
        reads = client.ask("stats")["sources"][0]["reads"]
    assert 200 < reads <= 600
    assert reads <= 200 + 2 * 200 * 0.95  # objects stayed from epoch to epoch


def test_a_missing_file_is_absent_and_holds_up_nobody(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    (tmp_path / "0007").unlink()
    with daemon.client() as client:
        session = opened(client, manifest)
        plan(session, np.arange(20, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(20), 5) == 19
        assert content(session, 7) is None
        assert session.words[FAILED] == 1
        assert client.ask("stats")["sources"][0]["errors_by_kind"] == {"ENOENT": 1}


def test_two_ranks_share_one_read(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 64)
    with daemon.client() as a, daemon.client() as b:
        key = a.register(manifest)
        assert b.register(manifest) == key
        first, second = opened(a, key, "j", 0, 2), opened(b, key, "j", 1, 2)
        ids = np.arange(64, dtype=np.int32)
        plan(first, ids, 8)
        plan(second, ids, 8)
        assert read_steps(first, manifest, ids, 8) == 64
        assert read_steps(second, manifest, ids, 8) == 64
        assert a.ask("stats")["sources"][0]["reads"] == 64


def test_a_truncated_plan_goes_on_differently(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [500] * 40)
    with daemon.client() as client:
        key = client.register(manifest)
        ids = np.arange(40, dtype=np.int32)
        backwards = ids[::-1].copy()
        for _ in range(20):
            session = opened(client, key)
            plan(session, ids, 4)
            assert session.wait(1, 10)
            session.done(2)
            assert session.truncate(2)
            assert not session.ready(2)
            assert session.settle()
            assert session.words[READY] <= 2  # it is about the new plan
            plan(session, backwards, 4, epoch=1, at=2)
            assert read_steps(session, manifest, backwards, 4, at=2) == 40
            session.close()


def ten_steps(client: Client, tmp_path: Path) -> Session:
    """Return a session of ten steps, all ready."""
    session = opened(client, folder(tmp_path, [500] * 40))
    plan(session, np.arange(40, dtype=np.int32), 4)
    assert session.wait(9, 10)
    return session


def test_a_step_that_is_done_is_not_ready_and_not_waited_for(
    daemon: Running, tmp_path: Path
) -> None:
    """Workers of an iterator that begins again have such steps: they read directly."""
    with daemon.client() as client:
        session = ten_steps(client, tmp_path)
        stamp = session.hold(1)
        assert session.held(1, stamp)
        session.done(2)
        assert [session.ready(step) for step in (0, 1, 2)] == [False, False, True]
        assert session.hold(1) == -1
        assert not session.held(1, stamp)
        assert not session.wait(1, 1000)  # longer than this test may take


def test_a_plan_is_taken_back_without_waiting_for_the_daemon(
    daemon: Running, tmp_path: Path
) -> None:
    with daemon.client() as client:
        session = ten_steps(client, tmp_path)
        daemon.signal(signal.SIGSTOP)
        try:
            assert session.truncate(7)
            assert session.truncate(4)
            assert [session.ready(step) for step in (3, 4, 9)] == [True, False, False]
            assert session.words[READY] == 10
        finally:
            daemon.signal(signal.SIGCONT)
        assert session.settle()
        assert session.words[READY] == 4


def test_ready_is_never_ahead_of_the_bytes(daemon: Running, tmp_path: Path) -> None:
    """A client that sees READY = r finds the objects of all steps below r at any moment."""
    manifest = folder(tmp_path, [3000] * 200)
    with daemon.client() as client:
        session = opened(client, manifest)
        ids = np.random.default_rng(2).permutation(200).astype(np.int32)
        plan(session, ids, 4)
        seen = 0
        while seen < 50:
            ready = session.words[READY]
            for step in range(seen, ready):
                for i in ids[step * 4 : step * 4 + 4].tolist():
                    assert content(session, i) == (tmp_path / f"{i:04}").read_bytes()
                session.done(step + 1)
            seen = max(seen, ready)


# --- deaths -----------------------------------------------------------------------------------

_HOLDER = """
import os, sys, time
import numpy as np
from creel.cache.storage.manifest import Manifest
from creel.loader.client.client import Client
root, n = sys.argv[1], int(sys.argv[2])
client = Client.connect(os.environ["CREEL_SOCKET"])
manifest = Manifest.of_files([f"{i:04}" for i in range(n)], root=root)
session = client.open(client.register(manifest), "", 0, 1, "never")
session.extend(0, 0, np.arange(n, dtype=np.int32), np.arange(1, n + 1))
assert session.wait(0, 20)
print("holding", flush=True)
time.sleep(150)
"""


def test_a_killed_client_gives_everything_back(daemon: Running, tmp_path: Path) -> None:
    folder(tmp_path, [2000] * 30)
    before = daemon.fds()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path), "30"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"holding\n"
        assert status(daemon)["sessions"] == 1
        holder.kill()
        holder.wait()
    until(lambda: status(daemon)["sessions"] == 0, event="the session ends")
    # The dataset's descriptors stay: manifest, table, its mapping.
    until(lambda: daemon.fds() <= before + 3, event="all but the dataset's")


def test_a_killed_daemon_is_noticed_at_once_and_its_bytes_stay(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("creel.loader.client.session.STALE_NS", 10**12)  # beyond any heartbeat
    manifest = folder(tmp_path, [100] * 10)
    client = daemon.client()
    session = opened(client, manifest)
    plan(session, np.arange(5, dtype=np.int32), 5)
    assert session.wait(0, 10)
    threading.Timer(0.2, daemon.process.kill).start()
    assert not session.wait(1, 1000)
    assert not session.alive
    assert not client.alive
    assert session.ready(0)
    assert content(session, 3) == (tmp_path / "0003").read_bytes()
    assert not session.extend(0, 1, np.arange(5, dtype=np.int32), np.array([5]))
    with pytest.raises(UnavailableError):
        client.register(manifest)
    client.close()
    client.close()


def test_a_stopped_daemon_is_given_up_after_two_seconds(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        assert session.alive
        daemon.signal(signal.SIGSTOP)
        try:
            assert not session.wait(0, 1000)
            assert time.monotonic_ns() - session.words[HEARTBEAT] >= STALE_NS
            until(lambda: not session.alive, 0, "it counts as lost")
        finally:
            daemon.signal(signal.SIGCONT)
        until(lambda: session.alive, event="it comes back")


def test_a_machine_that_stood_still_gives_no_daemon_up(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of all processes the heartbeat is old at first, but the daemon lives."""
    monkeypatch.setattr("creel.loader.client.session.STALE_CONFIRM_NS", 10**12)
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [100] * 10))
        daemon.signal(signal.SIGSTOP)
        until(lambda: time.monotonic_ns() - session.words[HEARTBEAT] > STALE_NS)
        old = session.words[HEARTBEAT]
        assert session.alive
        daemon.signal(signal.SIGCONT)
        until(lambda: session.words[HEARTBEAT] > old, event="it goes on")
        assert session.wait(0, 0.001) is False  # no plan: the daemon has answered
        assert session.alive


def test_sigterm_drains(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 10)
        daemon.end()
        assert session.ready(1)
        assert not session.alive
        assert not session.wait(2, 5)
    with pytest.raises(NoDaemonError):
        daemon.client()


def test_stop_waits_for_the_clients_or_not(daemon_name: str, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name) as daemon:
        client = daemon.client()
        session = opened(client, manifest)
        client.ask("stop", now=False)
        time.sleep(0.3)  # in which a daemon that does not wait would end
        assert session.alive
        client.close()
        assert daemon.process.wait(30) == 0
    with Running(daemon_name) as daemon, daemon.client() as client:
        client.ask("stop", now=True)
        assert daemon.process.wait(30) == 0


def test_a_second_daemon_of_the_name_is_turned_away(daemon: Running) -> None:
    command = [sys.executable, *COMMAND, "--name", daemon.name, "--memory", "1MiB"]
    second = subprocess.run(command, capture_output=True, timeout=110, check=False)
    assert second.returncode == 1
    assert b"is already running" in second.stderr
    assert status(daemon)["state"] == "serving"


@needs_fuse
def test_a_thread_in_a_dead_mount_holds_up_neither_others_nor_the_end(
    daemon: Running, tmp_path: Path
) -> None:
    (tmp_path / "live").mkdir()
    live = folder(tmp_path / "live", [1000] * 50)
    with dead_file(tmp_path) as file, daemon.client() as client:
        dead = Manifest.of_files([file.name], root=str(file.parent))
        stuck = opened(client, dead)
        plan(stuck, np.zeros(1, np.int32), 1)
        assert not stuck.wait(0, 0.3)
        session = opened(client, live)
        plan(session, np.arange(50, dtype=np.int32), 10)
        assert read_steps(session, live, np.arange(50), 10) == 50
        client.close()
        daemon.end()


@needs_fuse
def test_hung_reads_of_a_source_do_not_hold_up_its_other_reads(
    daemon: Running, tmp_path: Path
) -> None:
    live = folder(tmp_path, [1000] * 50)
    dead = Manifest.of_files([f"dead{i}" for i in range(3)], root=str(tmp_path))
    manifest = Manifest.concat([live, dead])
    with dead_file(tmp_path) as file, daemon.client() as client:
        for i in range(3):
            (tmp_path / f"dead{i}").symlink_to(file)
        key = client.register(manifest)
        stuck, session = opened(client, key, "a"), opened(client, key, "b")
        plan(stuck, np.arange(50, 53, dtype=np.int32), 1)
        assert not stuck.wait(0, 0.3)
        plan(session, np.arange(50, dtype=np.int32), 10)
        assert read_steps(session, manifest, np.arange(50), 10) == 50
