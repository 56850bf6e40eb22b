"""No client can harm the daemon, or see or change what belongs to another user or client."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from creel.addresses import first_address
from creel.cache.memory.shared_words import DONE, WANTED
from creel.cache.storage.manifest import Manifest
from creel.errors import UnavailableError
from creel.loader.client.packets import exchange
from creel.messages import (
    PROTOCOL,
    Attach,
    Close,
    Command,
    Deal,
    DealtSamples,
    Extend,
    Hello,
    Open,
    Register,
    Registered,
    Truncate,
    Wait,
    Welcome,
    encode,
)
from creel.system.fd_packets import close_all
from daemons import Running, content, folder, opened, plan, read_steps, status
from kit import knock, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture
def daemon(daemon_name: str) -> Iterator[Running]:
    with Running(daemon_name) as running:
        yield running


# --- strangers --------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused(daemon: Running) -> None:
    code = f"""
import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({first_address(daemon.name)!r})
try:
    s.send({encode(Hello(PROTOCOL, "cli"))!r})
except OSError:
    pass
print(s.recv(1000))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    assert "belongs to user 0" in run.stdout
    assert status(daemon)["state"] == "serving"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_users_knocking_keeps_nobody_out(daemon_name: str) -> None:
    code = f"""
import os, socket, sys
os.setuid(65534)
kept = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
for s in kept:
    s.connect({first_address(daemon_name)!r})
print("knocked", flush=True)
sys.stdin.read()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        Running(daemon_name, env={"CREEL_DAEMON__MAX_CONNECTIONS": "2"}) as daemon,
        subprocess.Popen([sys.executable, "-c", code], **pipes) as stranger,
    ):
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"knocked\n"
        assert status(daemon)["state"] == "serving"
        stranger.kill()


def test_a_client_that_does_not_say_hello_is_not_served(daemon: Running) -> None:
    for first in (
        Open("x", "", 0, 1, "never"),
        Attach(1),
        Close(1),
        Register(5),
        Hello(PROTOCOL, "king"),
    ):
        with knock(first_address(daemon.name)) as s:
            s.send(encode(first))
            assert s.recv(1000) == b""


@pytest.mark.parametrize(
    "fields", [[], ["cli", 1], [{}, "cli", None, 7], ["cli", "", PROTOCOL + 1]]
)
def test_another_protocol_is_told_what_to_do(daemon: Running, fields: list[object]) -> None:
    """Whatever its Hello has beside the number: it heard only that the connection was closed."""
    with knock(first_address(daemon.name)) as s:
        s.send(msgspec.msgpack.encode(["Hello", PROTOCOL + 1, *fields]))
        assert b"restart the daemon" in s.recv(1000)


def test_a_worker_may_only_attach(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as trainer:
        dataset = trainer.register(manifest)
        session = opened(trainer, dataset)
        with pytest.raises(UnavailableError, match="not connected"):
            daemon.client("worker", "no such token")
        with daemon.client("worker", trainer.token) as worker:
            with pytest.raises(UnavailableError, match="must not"):
                worker.register(manifest)
            with pytest.raises(UnavailableError, match="must not"):
                opened(worker, dataset)
            with pytest.raises(UnavailableError, match="no session"):
                worker.attach(session.id + 1)
            same = worker.attach(session.id)
            plan(session, np.arange(10, dtype=np.int32), 5)
            assert same.wait(1, 10)
            assert content(same, 9) == (tmp_path / "0009").read_bytes()


def test_the_arena_and_the_table_cannot_be_written_by_clients(
    daemon: Running, tmp_path: Path
) -> None:
    import mmap

    with knock(first_address(daemon.name)) as s:
        s.send(encode(Hello(PROTOCOL, "cli")))
        _, fds, _, _ = socket.recv_fds(s, 1000, 4)
        arena = fds[0]
        for write, error in (
            (lambda: mmap.mmap(arena, 4096), errno.EACCES),
            (lambda: os.pwrite(arena, b"x", 0), errno.EBADF),
            (lambda: os.ftruncate(arena, 0), errno.EINVAL),
        ):
            with pytest.raises(OSError) as refused:  # noqa: PT011  the number is checked
                write()
            assert refused.value.errno == error
        os.close(arena)
    with daemon.client() as client:
        session = opened(client, folder(tmp_path, [10]))
        with pytest.raises(ValueError, match="read-only"):
            session.table.offset[0] = 5
        with pytest.raises(ValueError, match="read-only"):
            client.arena.array[0] = 5


def test_a_sessions_owner_alone_commands_it(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as a, daemon.client() as b:
        session = opened(a, manifest)
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
        (1, [0], [1]),  # a gap in the steps
        (0, [10], [1]),  # no such object
        (0, [-1], [1]),
        (0, [0, 1], [1]),  # ends before the last object
        (0, [0, 1], [2, 1, 2]),
        (0, [0], []),
        (0, [0], [-1, 1]),
        (0, [0], [3, -(1 << 63), -1, 1]),  # no difference of two neighbours is below 0 in int64
    ],
)
def test_an_impossible_plan_costs_its_sender_the_connection(
    daemon: Running, tmp_path: Path, step: int, ids: list[int], ends: list[int]
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        where = Extend(client.token, session.id, 0, step)
        client.send(where, np.array(ids, "<i4"), np.array(ends, "<i8"))
        until(lambda: not client.alive, event="the daemon hangs up")
    assert status(daemon)["sessions"] == 0


@pytest.mark.parametrize(
    "samples, first, ids",
    [(3, 0, []), (3, 0, [10]), (3, 0, [-1]), (3, -1, [1]), (3, 2, [1, 2]), (1 << 40, 0, [1])],
)
def test_impossible_samples_cost_their_sender_the_connection(
    daemon: Running, tmp_path: Path, samples: int, first: int, ids: list[int]
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        client.send(DealtSamples(client.token, session.id, samples, first), np.array(ids, "<i4"))
        until(lambda: not client.alive, event="the daemon hangs up")


def test_samples_that_leave_a_gap_or_take_too_much_memory_are_forgotten(
    daemon: Running, tmp_path: Path
) -> None:
    """Its order is then unknown to the other nodes; the session goes on."""
    manifest = folder(tmp_path, [100] * 10)
    ids = np.arange(3, dtype="<i4")
    with daemon.client() as client:
        session = opened(client, manifest)
        for samples, first in ((3, 0), (6, 0), (6, 1), ((1 << 31) - 1, 0), ((1 << 31) - 1, 3)):
            client.send(DealtSamples(client.token, session.id, samples, first), ids)
        client.send(Deal(client.token, session.id, 0, "", 6, 1, 6, 1, 0, object_of=True))
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(10), 5) == 10


def test_arrays_where_none_belong_cost_their_sender_the_connection(daemon: Running) -> None:
    with daemon.client() as client:
        client.send(Command(client.token, 1, "status"), np.zeros(1, np.int32))
        until(lambda: not client.alive, event="the daemon hangs up")


def test_lies_in_shared_words_are_bounded(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    with daemon.client() as client:
        session = opened(client, manifest)
        plan(session, np.arange(20, dtype=np.int32), 5)
        for lie in (1 << 62, -(1 << 62), -1):
            session.words[DONE] = session.words[WANTED] = lie
            time.sleep(0.15)
        assert session.alive
    with daemon.client() as client:
        session = opened(client, manifest)
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
        sessions = [opened(a, key), opened(b, key)]
        with pytest.raises(UnavailableError, match="max_sessions"):
            opened(a, key)
        with daemon.client(), pytest.raises(UnavailableError, match="max_connections"):
            daemon.client()
        sessions[0].close()
        until(lambda: a.ask("status")["sessions"] == 1, event="closed")
        opened(a, key)


# --- hostile bytes ----------------------------------------------------------------------------


def _mutations(rng: np.random.Generator, good: list[bytes], count: int) -> Iterator[bytes]:
    """Yield random bytes, and real messages with bits changed, cut or lengthened."""
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
def test_no_packet_at_the_control_socket_hurts_the_daemon(
    daemon: Running, tmp_path: Path, hello: bool
) -> None:
    rng = np.random.default_rng(11 + hello)
    messages = [
        Hello(PROTOCOL, "cli"),
        Register(1000),
        Open("x" * 30, "job", 1, 2, "never"),
        Attach(1),
        Close(7),
    ]
    good = [encode(m) for m in messages]
    junk = [tmp_path / "junk", tmp_path]
    junk[0].write_bytes(rng.bytes(1000))
    before = daemon.fds()
    for data in _mutations(rng, good, 400):
        with knock(first_address(daemon.name)) as s:
            fds = [os.open(junk[rng.integers(2)], os.O_RDONLY) for _ in range(rng.integers(4))]
            try:
                if hello:
                    s.send(good[0])
                    s.recv(1000)
                socket.send_fds(s, [data], fds)
            except OSError:
                pass  # the daemon has hung up
            finally:
                for fd in fds:
                    os.close(fd)
    until(lambda: daemon.fds() <= before, event="every descriptor that was sent is closed")
    _still_serves(daemon, tmp_path)


@pytest.mark.faults
def test_no_frame_at_the_request_socket_hurts_the_daemon(daemon: Running, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    context = zmq.Context()
    line = context.socket(zmq.DEALER)
    line.linger = 0
    with daemon.client() as client:
        line.connect(client.request_address)
        messages = [
            Extend("t" * 32, 1, 0, 0),
            Truncate("t" * 32, 1, 0),
            Wait("t" * 32, 1, 1, 0),
            Command("t" * 32, 1, "status"),
            Command(client.token, 1, "warm", {"dataset": 5}),
            Command(client.token, 1, "nonsense", {"a": [1, {"b": None}]}),
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
def test_a_flood_at_the_request_socket_starves_nobody(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 40)
    context = zmq.Context()
    stop = threading.Event()
    with daemon.client("cli") as knowing:
        address = knowing.request_address

    def flood() -> None:
        line = context.socket(zmq.DEALER)
        line.linger = 0
        line.connect(address)
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                line.send_multipart([b"x" * 50, b"y"], zmq.DONTWAIT)
        line.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with daemon.client() as client:
            session = opened(client, manifest)
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
        session = opened(client, manifest)
        plan(session, np.arange(20, dtype=np.int32), 5)
        assert read_steps(session, manifest, np.arange(20), 5) == 20


def test_a_manifest_that_is_none_is_refused(daemon: Running, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"ARROW1" + bytes(1000))
    for nbytes in (1006, 5, 10**15):
        fd = os.open(tmp_path / "junk", os.O_RDONLY)
        with knock(first_address(daemon.name)) as s:
            _, fds = exchange(s, Hello(PROTOCOL, "cli"), Welcome)
            close_all(fds)
            with pytest.raises(UnavailableError):
                exchange(s, Register(nbytes), Registered, (fd,))
        os.close(fd)
    _still_serves(daemon, tmp_path)
