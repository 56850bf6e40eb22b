"""A real daemon: bytes are right, deaths are met, nobody can hurt it, nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from daemons import COMMAND, Running, folder, plan, read_steps

from creel.cache.board import DONE, FAILED, READY, WANTED
from creel.cache.manifest import Manifest
from creel.errors import ConfigError, NoDaemonError, UnavailableError
from creel.loader.client import Client
from creel.loader.packets import resolve
from creel.messages import (
    PROTOCOL,
    Ask,
    Attach,
    Close,
    Extend,
    Hello,
    Open,
    Register,
    Registered,
    Truncate,
    Wait,
    encode,
    line_address,
)
from kit import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]


@pytest.fixture
def daemon(daemon_name: str) -> Iterator[Running]:
    with Running(daemon_name) as running:
        yield running


def status(daemon: Running) -> dict[str, object]:
    with daemon.client("cli") as client:
        return client.ask("status")


# --- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["known lengths", "unknown lengths"])
def test_bytes_in_the_arena_equal_the_files(daemon: Running, tmp_path: Path, known: bool) -> None:
    rng = np.random.default_rng(7)
    manifest = folder(tmp_path, rng.integers(0, 9000, 150).tolist(), known=known)
    with daemon.client() as client:
        session = client.open(client.register(manifest), "job", 0, 1)
        at = 0
        for epoch in range(3):
            ids = rng.permutation(150).astype(np.int32)
            plan(session, ids, 8, epoch, at)
            assert read_steps(session, manifest, ids, 8, at) == 150
            at += 19
        told = client.ask("stats")
    assert told["sources"][0]["reads"] == 150  # every file once in three epochs
    assert told["sessions"][0]["ready"] == at


def test_records_of_one_file_are_dense_rows(daemon: Running, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (500, 384), np.uint8)
    (tmp_path / "rows").write_bytes(data.tobytes())
    one = np.ones(1, np.int64)
    manifest = Manifest.of_runs([str(tmp_path / "rows")], one * 0, one * 384, one * 500)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
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
        session = client.open(client.register(manifest))
        at = 0
        for epoch in range(3):
            ids = rng.permutation(200).astype(np.int32)
            plan(session, ids, 5, epoch, at)
            assert read_steps(session, manifest, ids, 5, at) == 200
            at += 40
        reads = client.ask("stats")["sources"][0]["reads"]
    assert 200 < reads <= 600
    assert reads <= 200 + 2 * 200 * 0.95  # something was kept from epoch to epoch


def test_a_missing_file_is_absent_and_holds_up_nobody(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    (tmp_path / "0007").unlink()
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(20, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(20), 5) == 19
        assert session.view(7) is None
        assert session.board[FAILED] == 1
        assert client.ask("stats")["sources"][0]["errors_by_kind"] == {"ENOENT": 1}


def test_two_ranks_share_one_read(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 64)
    with daemon.client() as a, daemon.client() as b:
        key = a.register(manifest)
        assert b.register(manifest) == key
        first, second = a.open(key, "j", 0, 2), b.open(key, "j", 1, 2)
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
            session = client.open(key)
            plan(session, ids, 4)
            assert session.wait(1, 10)
            session.done(2)
            assert session.truncate(2)
            assert session.board[READY] <= 2  # it speaks of the new plan
            plan(session, backwards, 4, epoch=1, at=2)
            assert read_steps(session, manifest, backwards, 4, at=2) == 40
            session.close()


# --- deaths -----------------------------------------------------------------------------------

_HOLDER = """
import sys, time
import numpy as np
from creel.cache.manifest import Manifest
from creel.loader.client import Client
root, n = sys.argv[1], int(sys.argv[2])
client = Client.connect()
manifest = Manifest.of_files([f"{i:04}" for i in range(n)], root=root)
session = client.open(client.register(manifest))
session.extend(0, 0, np.arange(n, dtype=np.int32), np.arange(1, n + 1))
assert session.wait(0, 20)
print("holding", flush=True)
time.sleep(60)
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
    until(lambda: status(daemon)["sessions"] == 0, 5, "the session ends")
    until(
        lambda: daemon.fds() <= before + 3, 5, "all but the data set's"
    )  # manifest, table, its mapping


def test_a_killed_daemon_is_noticed_at_once_and_its_bytes_stay(
    daemon: Running, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    client = daemon.client()
    session = client.open(client.register(manifest))
    plan(session, np.arange(5, dtype=np.int32), 5)
    assert session.wait(0, 10)
    threading.Timer(0.2, daemon.process.kill).start()
    start = time.monotonic()
    assert not session.wait(1, 30)
    assert time.monotonic() - start < 1.0
    assert not session.alive
    assert not client.alive
    assert session.ready(0)
    assert bytes(session.view(3) or b"") == (tmp_path / "0003").read_bytes()
    assert not session.extend(0, 1, np.arange(5, dtype=np.int32), np.array([5]))
    with pytest.raises(UnavailableError):
        client.register(manifest)
    client.close()
    client.close()


def test_a_stopped_daemon_is_given_up_after_two_seconds(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        assert session.alive
        daemon.signal(signal.SIGSTOP)
        try:
            start = time.monotonic()
            assert not session.wait(0, 30)
            assert 1.0 < time.monotonic() - start < 4.0
            until(lambda: not session.alive, 0, "it counts as lost")
        finally:
            daemon.signal(signal.SIGCONT)
        until(lambda: session.alive, 5, "it comes back")


def test_sigterm_drains(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 10)
        start = time.monotonic()
        daemon.end()
        assert time.monotonic() - start < 5
        assert session.ready(1)
        assert not session.alive
        assert not session.wait(2, 5)
    with pytest.raises(NoDaemonError):
        daemon.client()


def test_stop_waits_for_the_clients_or_not(daemon_name: str, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name) as daemon:
        client = daemon.client()
        session = client.open(client.register(manifest))
        client.ask("stop", now=False)
        time.sleep(0.3)
        assert session.alive
        client.close()
        assert daemon.process.wait(5) == 0
    with Running(daemon_name) as daemon, daemon.client() as client:
        client.ask("stop", now=True)
        assert daemon.process.wait(5) == 0


def test_a_second_daemon_of_the_name_is_turned_away(daemon: Running) -> None:
    command = [sys.executable, *COMMAND, "--name", daemon.name, "--memory", "1MiB"]
    second = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert second.returncode == 1
    assert b"serves you already" in second.stderr
    assert status(daemon)["state"] == "serving"


def test_a_thread_in_a_dead_mount_holds_up_neither_others_nor_the_end(
    daemon: Running, tmp_path: Path
) -> None:
    """A named pipe that nobody writes stands for the mount: open(2) never returns."""
    (tmp_path / "dead").mkdir()
    os.mkfifo(tmp_path / "dead/0000")
    (tmp_path / "live").mkdir()
    live = folder(tmp_path / "live", [1000] * 50)
    dead = Manifest.of_files(["0000"], root=str(tmp_path / "dead"))
    with daemon.client() as client:
        stuck = client.open(client.register(dead))
        plan(stuck, np.zeros(1, np.int32), 1)
        assert not stuck.wait(0, 0.3)
        session = client.open(client.register(live))
        plan(session, np.arange(50, dtype=np.int32), 10)
        assert read_steps(session, live, np.arange(50), 10) == 50
    daemon.end()


def test_hung_reads_of_a_source_do_not_hold_up_its_other_reads(
    daemon: Running, tmp_path: Path
) -> None:
    live = folder(tmp_path, [1000] * 50)
    for i in range(8):
        os.mkfifo(tmp_path / f"dead{i}")
    dead = Manifest.of_files([f"dead{i}" for i in range(8)], root=str(tmp_path))
    manifest = Manifest.concat([live, dead])
    with daemon.client() as client:
        key = client.register(manifest)
        stuck, session = client.open(key, "a"), client.open(key, "b")
        plan(stuck, np.arange(50, 58, dtype=np.int32), 1)
        assert not stuck.wait(0, 0.3)
        plan(session, np.arange(50, dtype=np.int32), 10)
        assert read_steps(session, manifest, np.arange(50), 10) == 50
    daemon.end()


# --- strangers --------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused(daemon: Running) -> None:
    code = f"""
import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({resolve(daemon.name)!r})
try:
    s.send({encode(Hello(PROTOCOL, "cli", 1))!r})
except OSError:
    pass
print(s.recv(1000))
"""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert "serves user 0 alone" in told.stdout
    assert status(daemon)["state"] == "serving"


def test_who_does_not_say_hello_is_not_served(daemon: Running) -> None:
    for first in (Open("x"), Attach(1), Close(1), Register(5), Hello(PROTOCOL, "king", 1)):
        with _knock(daemon) as s:
            s.send(encode(first))
            assert s.recv(1000) == b""


def test_another_protocol_is_told_what_to_do(daemon: Running) -> None:
    with _knock(daemon) as s:
        s.send(encode(Hello(PROTOCOL + 1, "cli", 1)))
        assert b"restart the daemon" in s.recv(1000)


def test_a_worker_may_only_attach(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as trainer:
        session = trainer.open(trainer.register(manifest))
        with pytest.raises(UnavailableError, match="not connected"):
            daemon.client("worker", "no such token")
        with daemon.client("worker", trainer.token) as worker:
            with pytest.raises(UnavailableError, match="may not"):
                worker.register(manifest)
            with pytest.raises(UnavailableError, match="may not"):
                worker.open(session.dataset)
            with pytest.raises(UnavailableError, match="no session"):
                worker.attach(session.id + 1)
            same = worker.attach(session.id)
            plan(session, np.arange(10, dtype=np.int32), 5)
            assert same.wait(1, 10)
            assert bytes(same.view(9) or b"") == (tmp_path / "0009").read_bytes()


def test_the_arena_and_the_table_cannot_be_written_by_clients(
    daemon: Running, tmp_path: Path
) -> None:
    import mmap

    with _knock(daemon) as s:
        s.send(encode(Hello(PROTOCOL, "cli", 1)))
        _, fds, _, _ = socket.recv_fds(s, 1000, 4)
        arena = fds[0]
        for write in (
            lambda: mmap.mmap(arena, 4096),
            lambda: os.pwrite(arena, b"x", 0),
            lambda: os.ftruncate(arena, 0),
        ):
            with pytest.raises(PermissionError):
                write()
        os.close(arena)
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10])))
        with pytest.raises(ValueError, match="read-only"):
            session.table.offset[0] = 5
        with pytest.raises(ValueError, match="read-only"):
            client.arena.array[0] = 5


def test_a_sessions_owner_alone_commands_it(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as a, daemon.client() as b:
        session = a.open(a.register(manifest))
        ids, ends = np.arange(10, dtype=np.int32), np.array([5, 10])
        b.send(Extend(b.token, session.id, 0, 0), ids, ends)
        b.send(Truncate(b.token, session.id, 0))
        with pytest.raises(UnavailableError):
            b.attach(session.id)
        assert b.ask("stats")["sessions"][0]["known"] == 0
        plan(session, ids, 5)
        assert read_steps(session, manifest, ids, 5) == 10


@pytest.mark.parametrize(
    "step, ids, ends",
    [
        (1, [0], [1]),  # steps are missing
        (0, [10], [1]),  # no such object
        (0, [-1], [1]),
        (0, [0, 1], [1]),  # ends that do not cover
        (0, [0, 1], [2, 1, 2]),
        (0, [0], []),
        (0, [0], [-1, 1]),
    ],
)
def test_an_impossible_plan_costs_its_sender_the_connection(
    daemon: Running, tmp_path: Path, step: int, ids: list[int], ends: list[int]
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        where = Extend(client.token, session.id, 0, step)
        client.send(where, np.array(ids, "<i4"), np.array(ends, "<i8"))
        until(lambda: not client.alive, 5, "the daemon hangs up")
    assert status(daemon)["sessions"] == 0


def test_lies_on_the_board_are_bounded(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(20, dtype=np.int32), 5)
        for lie in (1 << 62, -(1 << 62), -1):
            session.board[DONE] = session.board[WANTED] = lie
            time.sleep(0.15)
        assert session.alive
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(20, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(20), 5) == 20


def test_limits_refuse_and_hold(daemon_name: str, tmp_path: Path) -> None:
    limits = {
        "CREEL_DAEMON__MAX_CONNECTIONS": "3",
        "CREEL_DAEMON__MAX_SESSIONS": "2",
        "CREEL_DAEMON__MAX_DATASETS": "1",
    }
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name, env=limits) as daemon, daemon.client() as a, daemon.client() as b:
        key = a.register(manifest)
        with pytest.raises(UnavailableError, match="max_datasets"):
            a.register(Manifest.of_files(["0001"], root=str(tmp_path)))
        assert b.register(manifest) == key
        sessions = [a.open(key), b.open(key)]
        with pytest.raises(UnavailableError, match="max_sessions"):
            a.open(key)
        with daemon.client(), pytest.raises(UnavailableError, match="max_connections"):
            daemon.client()
        sessions[0].close()
        until(lambda: a.ask("status")["sessions"] == 1, 5, "closed")
        a.open(key)


# --- hostile bytes ----------------------------------------------------------------------------


def _knock(daemon: Running) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(5)
    s.connect(resolve(daemon.name))
    return s


def _mutations(rng: np.random.Generator, good: list[bytes], count: int) -> Iterator[bytes]:
    """Random bytes, and real messages with bits changed, cut or lengthened."""
    for _ in range(count):
        data = bytearray(good[rng.integers(len(good))])
        kind = rng.integers(4)
        if kind == 0:
            data = bytearray(rng.bytes(int(rng.integers(0, 200))))
        elif kind == 1:
            for _ in range(int(rng.integers(1, 5))):
                data[rng.integers(len(data))] = rng.integers(256)
        elif kind == 2:
            del data[int(rng.integers(len(data))) :]
        else:
            data += rng.bytes(int(rng.integers(1, 50)))
        yield bytes(data)


@pytest.mark.faults
@pytest.mark.parametrize("hello", [False, True], ids=["stranger", "trainer"])
def test_no_packet_at_the_desk_hurts_the_daemon(
    daemon: Running, tmp_path: Path, hello: bool
) -> None:
    rng = np.random.default_rng(11 + hello)
    messages = [
        Hello(PROTOCOL, "cli", 5),
        Register(1000),
        Open("x" * 30, "job", 1, 2),
        Attach(1),
        Close(7),
    ]
    good = [encode(m) for m in messages]
    junk = [tmp_path / "junk", tmp_path]
    junk[0].write_bytes(rng.bytes(1000))
    before = daemon.fds()
    for data in _mutations(rng, good, 400):
        with _knock(daemon) as s:
            fds = [os.open(junk[rng.integers(2)], os.O_RDONLY) for _ in range(rng.integers(4))]
            try:
                if hello:
                    s.send(good[0])
                    s.recv(1000)
                socket.send_fds(s, [data], fds)
            except OSError:
                pass  # it hung up already
            finally:
                for fd in fds:
                    os.close(fd)
    until(lambda: daemon.fds() <= before, 5, "every descriptor that was sent is closed")
    _still_serves(daemon, tmp_path)


@pytest.mark.faults
def test_no_frame_on_the_line_hurts_the_daemon(daemon: Running, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    context = zmq.Context()
    line = context.socket(zmq.DEALER)
    line.linger = 0
    line.connect(line_address(os.getuid(), daemon.name))
    with daemon.client() as client:
        messages = [
            Extend("t" * 32, 1, 0, 0),
            Truncate("t" * 32, 1, 0),
            Wait("t" * 32, 1, 1, 0),
            Ask("t" * 32, 1, "status"),
            Ask(client.token, 1, "warm", {"dataset": 5}),
            Ask(client.token, 1, "nonsense", {"a": [1, {"b": None}]}),
        ]
        good = [encode(m) for m in messages]
        for i, data in enumerate(_mutations(rng, good, 600)):
            extra = [rng.bytes(int(rng.integers(0, 40))) for _ in range(rng.integers(4))]
            line.send_multipart([data, *extra])
            if i % 100 == 0:
                assert client.ask("status")["state"] == "serving"
    line.close()
    context.term()
    _still_serves(daemon, tmp_path)


@pytest.mark.faults
def test_a_flood_on_the_line_starves_nobody(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 40)
    context = zmq.Context()
    stop = threading.Event()

    def flood() -> None:
        line = context.socket(zmq.DEALER)
        line.linger = 0
        line.connect(line_address(os.getuid(), daemon.name))
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                line.send_multipart([b"x" * 50, b"y"], zmq.DONTWAIT)
        line.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with daemon.client() as client:
            session = client.open(client.register(manifest))
            for epoch in range(5):
                plan(session, np.arange(40, dtype=np.int32), 4, epoch, at=epoch * 10)
                assert read_steps(session, manifest, np.arange(40), 4, at=epoch * 10) == 40
            assert session.alive
    finally:
        stop.set()
        thread.join()
        context.term()


def _still_serves(daemon: Running, path: Path) -> None:
    (path / "after").mkdir()
    manifest = folder(path / "after", [300] * 20)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(20, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(20), 5) == 20


def test_a_manifest_that_is_none_is_refused(daemon: Running, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"ARROW1" + bytes(1000))
    with daemon.client() as client:
        for nbytes in (1006, 5, 10**15):
            fd = os.open(tmp_path / "junk", os.O_RDONLY)
            with pytest.raises(UnavailableError):
                client._call(Register(nbytes), Registered, (fd,))
            os.close(fd)
    _still_serves(daemon, tmp_path)


# --- commands, quiet, leftovers ---------------------------------------------------------------


def test_commands_are_answered(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 10)
    with daemon.client("cli") as client:
        key = client.register(manifest)
        assert client.ask("config")["settings"]["memory.budget"] == "32MiB"
        assert client.ask("datasets")["datasets"][0]["nbytes"] == 10_000
        client.ask("warm", dataset=key[:8])
        until(lambda: client.ask("datasets")["datasets"][0]["resident_objects"] == 10, 10, "warm")
        client.ask("drop", dataset=key)
        until(lambda: client.ask("datasets")["datasets"][0]["resident_objects"] == 0, 10, "dropped")
        told = client.ask("status")
        assert (told["name"], told["pid"]) == (daemon.name, daemon.pid)
        assert msgspec.json.encode(client.ask("stats"))
        with pytest.raises(ConfigError, match="which data set"):
            client.ask("warm")
        with pytest.raises(ConfigError, match="no such command"):
            client.ask("fly")


def test_an_idle_daemon_is_quiet_and_small(daemon: Running, tmp_path: Path) -> None:
    process = psutil.Process(daemon.pid)
    # Its own memory: of Arrow's libraries the kernel maps 35 MB more or less as it likes.
    assert process.memory_full_info().uss < 60e6
    with daemon.client() as client:
        client.open(client.register(folder(tmp_path, [10])))
        time.sleep(1)
        before = process.cpu_times()
        time.sleep(4)
        after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used <= 0.4, "it polls: 0.3 % of a core was measured on a quiet machine"


@pytest.mark.usefixtures("clean")
def test_nothing_is_left(daemon_name: str, tmp_path: Path) -> None:
    before = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()}
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name) as daemon:
        idle = daemon.fds()
        for _ in range(5):
            with daemon.client() as client:
                session = client.open(client.register(manifest))
                plan(session, np.arange(10, dtype=np.int32), 5)
                assert read_steps(session, manifest, np.arange(10), 5) == 10
        until(lambda: daemon.fds() <= idle + 3, 5, "one data set stays")
        daemon.end()
    left = {*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()} - before
    assert not [path for path in left if "creel" in path.name or daemon_name in path.name]


def test_sighup_reads_the_settings_again(daemon_name: str, tmp_path: Path) -> None:
    settings = tmp_path / "creel.toml"
    settings.write_text('[daemon]\nlog_level = "info"\n')
    with Running(daemon_name, env={"CREEL_CONFIG": str(settings)}) as daemon:
        settings.write_text('[daemon]\nlog_level = "debug"\nmax_sessions = 7\n')
        daemon.signal(signal.SIGHUP)
        with daemon.client("cli") as client:
            until(
                lambda: client.ask("config")["settings"]["daemon.max_sessions"] == 7, 5, "reloaded"
            )
        settings.write_text("[daemon]\nlog_levle = 1\n")
        daemon.signal(signal.SIGHUP)
        time.sleep(0.6)
        log = daemon.end()
    assert "daemon.log_level = 'debug' (was 'info'), from now on" in log
    assert "daemon.max_sessions = 7 (was 1024), from the next start on" in log
    assert "the settings stay as they are" in log


def test_systemd_hears_all_it_wants(daemon_name: str, tmp_path: Path) -> None:
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.settimeout(10)
    with ear:
        ear.bind(str(tmp_path / "notify"))
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        with Running(daemon_name, env=env) as daemon:
            ready = ear.recv(1000).decode()
            assert ready.startswith("READY=1\nSTATUS=serving as")
            start = time.monotonic()
            beats = [ear.recv(1000).decode() for _ in range(3)]
            assert all(b.startswith("WATCHDOG=1") for b in beats)
            assert time.monotonic() - start < 3
            daemon.signal(signal.SIGHUP)
            heard = [ear.recv(1000).decode()]
            while not heard[-1].startswith("READY=1"):
                heard.append(ear.recv(1000).decode())
            assert any(h.startswith("RELOADING=1\nMONOTONIC_USEC=") for h in heard)
            daemon.end()
            while not (last := ear.recv(1000).decode()).startswith("STOPPING=1"):
                assert last.startswith("WATCHDOG=1")


def test_prometheus_may_scrape(daemon_name: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from urllib.request import urlopen

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    manifest = folder(tmp_path, [1000] * 10)
    with (
        Running(daemon_name, "--metrics", f"127.0.0.1:{port}") as daemon,
        daemon.client() as client,
    ):
        session = client.open(client.register(manifest), "job", 3, 4)
        plan(session, np.arange(10, dtype=np.int32), 5)
        read_steps(session, manifest, np.arange(10), 5)
        session.board.add("samples", 10)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
    assert 'creel_samples_total{job="job",rank="3"} 10.0' in page
    assert 'creel_cache_budget_bytes{tier="memory"} 3.3554432e+07' in page
    assert "creel_read_seconds_bucket{le=" in page
    assert 'creel_build_info{version="' in page
    for line in page.splitlines():
        assert line.startswith(("#", "creel_")), line
        assert str(tmp_path) not in line
    typed = {x.split()[2] for x in page.splitlines() if x.startswith("# TYPE")}
    helped = {x.split()[2] for x in page.splitlines() if x.startswith("# HELP")}
    assert typed == helped


def test_ready_is_never_ahead_of_the_bytes(daemon: Running, tmp_path: Path) -> None:
    """Whoever sees READY = r finds the objects of all steps below r, however quick the look."""
    manifest = folder(tmp_path, [3000] * 200)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        ids = np.random.default_rng(2).permutation(200).astype(np.int32)
        plan(session, ids, 4)
        seen = 0
        while seen < 50:
            ready = session.board[READY]
            for step in range(seen, ready):
                for i in ids[step * 4 : step * 4 + 4].tolist():
                    assert bytes(session.view(i) or b"") == (tmp_path / f"{i:04}").read_bytes()
                session.done(step + 1)
            seen = max(seen, ready)


def test_a_client_is_served_while_others_come_and_go(daemon: Running) -> None:
    with daemon.client("cli") as client:
        for _ in range(50):
            Client.connect(daemon.name, "cli").close()
            assert client.ask("status")["clients"] in {1, 2}
