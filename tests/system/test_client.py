"""Clients: started daemons, forks, workers, races; a client never blocks or breaks its process."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import zmq

import creel
from creel.addresses import first_address
from creel.cache.memory.shared_words import DONE, WANTED
from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.errors import DaemonLostError, NoDaemonError
from creel.loader.binding.bind import bind
from creel.loader.client import client as client_module
from creel.loader.client import connections
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start
from creel.loader.client.session import MessageSizes
from creel.loader.plan.batch_stream import open_batch_stream
from daemons import Running, content, folder, plan, read_steps, status
from kit import descriptors, gone, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def config(name: str, **daemon: object) -> Config:
    """Small, and gone quickly."""
    settings = {"name": name, "linger_s": 0.3, "log_level": "warning", **daemon}
    return msgspec.convert({"daemon": settings, "memory": {"budget": "16MiB"}}, Config)


# --- connecting -------------------------------------------------------------------------------


def test_a_line_is_not_begun_where_no_thread_can_be(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq would end the process. Nothing is left of what was tried; the next call is whole."""
    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def scarce(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    with Client.connect(daemon.name) as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", scarce)
            with pytest.raises(DaemonLostError, match="no threads"):
                client.ask("status")
        assert not any(thread.is_alive() for thread in begun)
        assert client.ask("status")


def test_without_a_daemon_there_is_an_error_that_says_so(daemon_name: str) -> None:
    with pytest.raises(NoDaemonError, match=f"creel/{os.getuid()}/{daemon_name}"):
        Client.connect()


def test_the_name_comes_from_the_environment(daemon: Running) -> None:
    with Client.connect() as client:
        assert client.daemon_pid == daemon.pid


def test_who_answers_nonsense_means_direct_reads(
    daemon_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    squatter.bind(first_address(daemon_name))
    squatter.listen()

    def babble() -> None:
        peer, _ = squatter.accept()
        with peer:
            peer.recv(1000)
            peer.send(b"\xc1")

    thread = threading.Thread(target=babble)
    thread.start()
    with squatter, caplog.at_level(logging.WARNING):
        assert connect_or_start(config(daemon_name)) is None
        thread.join()
    (said,) = caplog.messages
    assert "is not a daemon of this version" in said


# --- threads ---------------------------------------------------------------------------------


def test_a_thread_that_listens_holds_up_nobody_who_sends(daemon: Running, tmp_path: Path) -> None:
    """A wait of one feed must not be a wait of all feeds of the process."""
    manifest = folder(tmp_path, [100] * 40)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        assert client.ask("status")  # the line is made
        received, before = client.received, len(descriptors(eventfds=True))
        listening = threading.Thread(target=client.listen, args=(100.0, received))
        listening.start()
        until(lambda: len(descriptors(eventfds=True)) > before, what="it listens")
        sending = threading.Thread(target=plan, args=(session, np.arange(40), 5))  # no answer
        sending.start()
        sending.join(20)
        assert not sending.is_alive(), "it waits for who listens"
        assert listening.is_alive()
        assert client.ask("status")  # an answer, taken in by whoever: all who listen look again
        listening.join(20)
        assert not listening.is_alive()
        assert len(descriptors(eventfds=True)) == before


def test_threads_that_wait_at_once_each_get_their_answer(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 40)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        assert client.ask("status")  # the line is made
        before = len(descriptors(eventfds=True))

        def wait(step: int) -> bool:
            return session.wait(step, 60)

        def ask(_: int) -> bool:
            return bool(client.ask("status")["sessions"] == 1)

        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(wait, step) for step in range(8)]
            asking = [pool.submit(ask, i) for i in range(100)]
            assert all(one.result(60) for one in asking)
            plan(session, np.arange(40), 5)
            assert all(one.result(60) for one in waiting)
        assert len(descriptors(eventfds=True)) <= before


# --- fork and workers -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("always::ResourceWarning")
def test_python_dev_mode_finds_nothing_left_open_in_a_forked_child(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *what: told.append(what))
    with daemon.client() as client:
        assert client.ask("status")["sessions"] == 0
        pid = os.fork()
        if pid == 0:
            os._exit(sum(issubclass(what[1], ResourceWarning) for what in told))  # type: ignore[index]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_client_is_dead_in_a_forked_child_and_alive_in_its_parent(
    daemon: Running, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 10)
        pid = os.fork()
        if pid == 0:
            ids, ends = np.arange(5, dtype=np.int32), np.array([5])
            wrong = client.alive or session.alive or session.extend(0, 2, ids, ends)
            wrong = wrong or session.wait(7, 0.1)
            try:
                client.ask("status", timeout_s=0.1)
                wrong = True
            except DaemonLostError:
                pass
            os._exit(int(wrong))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.alive
        assert client.ask("status")["sessions"] == 1
        assert content(session, 3) == (tmp_path / "0003").read_bytes()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hide_its_parents_death(daemon: Running) -> None:
    code = (
        "import os, time\n"
        "from creel.loader.client.client import Client\n"
        "client = Client.connect()\n"
        "pid = os.fork()\n"
        "print(pid, flush=True) if pid else None\n"
        "time.sleep(150)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            with daemon.client("cli") as client:
                until(lambda: client.ask("status")["clients"] == 1, what="the parent is gone")
                assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


_WORKER = """
import json, sys
import numpy as np
from creel.loader.client.client import Client
token, session_id, first, last = json.loads(sys.argv[1])
client = Client.connect("", "worker", token)
session = client.attach(session_id)
assert "torch" not in sys.modules
for step in range(first, last):
    assert session.wait(step, 20)
    print(session.pieces(np.array([step]))[step][0][0], flush=True)
client.close()
"""


def test_a_worker_waits_for_its_trainers_steps(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        job = json.dumps([client.token, session.id, 0, 10])
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, job], stdout=subprocess.PIPE, text=True
        )
        until(lambda: status(daemon)["clients"] == 3, what="the worker is there")
        plan(session, np.arange(10, dtype=np.int32), 1)
        told, _ = worker.communicate()
        assert worker.returncode == 0
    assert [int(x) for x in told.split()] == [
        (tmp_path / f"{i:04}").read_bytes()[0] for i in range(10)
    ]


def test_a_worker_outlives_its_trainer_without_harm(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    trainer = daemon.client()
    session = trainer.open(trainer.register(manifest))
    with daemon.client("worker", trainer.token) as worker:
        same = worker.attach(session.id)
        assert same.alive
        trainer.close()
        until(lambda: not same.alive, what="the board says closed")
        assert not same.wait(3, 5)


# --- sessions ---------------------------------------------------------------------------------


def test_waiting_has_a_deadline(daemon: Running, tmp_path: Path) -> None:
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10])))
        start = time.monotonic()
        assert not session.wait(0, 0.3)
        assert time.monotonic() - start > 0.25
        assert session.words[WANTED] == 1


def test_a_plan_that_never_reaches_the_daemon_is_not_waited_for(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no descriptor is left for libzmq's connection, which is made in the background."""
    monkeypatch.setattr("creel.loader.client.session.ARRIVAL_S", 0.2)
    with daemon.client() as client:
        dataset = client.register(folder(tmp_path, [10] * 4))
        session, other = client.open(dataset), client.open(dataset)
        with monkeypatch.context() as patch:
            patch.setattr(client, "send", lambda *_: None)
            plan(session, np.arange(4), 2)
            start = time.monotonic()
            assert not session.wait(0, 60)
            assert time.monotonic() - start < 30
            assert not session.alive
        plan(other, np.arange(4), 2)
        assert other.wait(1, 60)
        assert other.alive


@pytest.mark.parametrize("inside", ["recv_multipart", "send_multipart", "exchange"])
def test_a_finaliser_may_end_a_session_wherever_its_client_is(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """An iterator in a cycle with its own traceback ends when garbage is collected: in any call."""
    ids = np.arange(10, dtype=np.int32)
    with daemon.client() as client:
        dataset = client.register(folder(tmp_path, [10] * 10))
        left, other = client.open(dataset), client.open(dataset)
        plan(left, ids, 5)
        owner: Any = client_module if inside == "exchange" else zmq.Socket
        call = getattr(owner, inside)
        truncated = []

        def collecting(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            truncated.append(left.truncate(0))
            left.close()
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, inside, collecting)
        if inside == "exchange":
            other = client.open(dataset)
        elif inside == "recv_multipart":
            assert not other.wait(0, 0.1)
        plan(other, ids, 5)
        assert other.wait(1, 20)
        # Between the frames of another message there is no room for it: the session is lost.
        assert truncated == [inside != "send_multipart"]
        assert not left.ready(0)


def test_a_plan_that_cannot_be_taken_back_is_not_believed_any_more(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10] * 10)))
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 20)
        with monkeypatch.context() as patch:
            patch.setattr(client, "send", mock.Mock(side_effect=DaemonLostError("full")))
            assert not session.truncate(0)
        assert not session.ready(0)


def test_who_answers_in_another_language_is_no_daemon(
    daemon_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(first_address(daemon_name))
        listener.listen()

        def babble() -> None:
            with listener.accept()[0] as stranger:
                stranger.recv(1 << 16)
                stranger.send(b"babble")

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            assert connect_or_start(config(daemon_name)) is None
        finally:
            thread.join()
    assert [r.levelname for r in caplog.records] == ["WARNING"]


_FEW_DESCRIPTORS = """
import os, resource, sys
from creel.errors import DaemonLostError
from creel.loader.client.client import Client
client = Client.connect()
top = os.dup(0)
while os.open("/dev/null", os.O_RDONLY) < top + 32:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 33 + int(sys.argv[1]),) * 2)
try:
    client.ask("status")
except DaemonLostError as e:
    print(e)
"""


@pytest.mark.parametrize("free", [0, 3, 5])
def test_where_descriptors_run_out_the_line_is_not_made(daemon: Running, free: int) -> None:
    """libzmq would end the process: "Too many open files (src/epoll.cpp:38)"."""
    assert daemon.pid
    done = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS, str(free)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Too many open files" in done.stdout


def test_ctrl_c_amid_a_question_leaves_no_answer_to_the_next(daemon: Running) -> None:
    with daemon.client() as client:
        amid = mock.patch.object(socket, "recv_fds", side_effect=KeyboardInterrupt)
        with amid, pytest.raises(KeyboardInterrupt):
            client.register(Manifest.of_files(["/a"]))
        with pytest.raises(DaemonLostError):
            client.register(Manifest.of_files(["/b"]))


def test_closing_ends_a_question_of_another_thread_in_silence(
    daemon: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    binding = bind(creel.FileDataset([str(tmp_path / "a")]))
    assert binding is not None
    settings, asked = config(daemon.name), threading.Event()
    client = connections.client_of(settings)
    assert client is not None
    receive = socket.recv_fds

    def asking(*args: Any) -> Any:
        asked.set()
        return receive(*args)

    daemon.signal(signal.SIGSTOP)
    try:
        with mock.patch.object(socket, "recv_fds", asking), ThreadPoolExecutor() as threads:
            opened = threads.submit(open_batch_stream, binding, settings)
            assert asked.wait(20)
            connections.disconnect(daemon.name)
            assert opened.result(20) is None  # it would have waited for 120 s
    finally:
        daemon.signal(signal.SIGCONT)
    assert not caplog.records


def test_a_session_that_cannot_be_mapped_is_not_left_open(daemon: Running) -> None:
    with daemon.client() as client:
        key = client.register(Manifest.of_files(["/a"]))
        none = OSError(errno.ENOMEM, "Cannot allocate memory")
        unmapped = mock.patch.object(client_module, "LocationTable", side_effect=none)
        with unmapped, pytest.raises(OSError):  # noqa: PT011
            client.open(key)
        client.open(key)  # the daemon has dealt with all that was said before
        assert client.ask("status")["sessions"] == 1


def test_done_never_goes_back(daemon: Running, tmp_path: Path) -> None:
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10])))
        session.done(5)
        session.done(3)
        assert session.words[DONE] == 5


def test_a_long_plan_travels_in_pieces(daemon: Running, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(3_000_000))
    one = np.ones(1, np.int64)
    manifest = Manifest.of_runs([str(tmp_path / "rows")], one * 0, one, one * 3_000_000)
    with daemon.client() as client:
        session = client.open(client.register(manifest))
        ids = np.random.default_rng(0).permutation(3_000_000).astype(np.int32)
        assert plan(session, ids, 1000) == 3000
        assert session.wait(0, 20)
        assert session.alive
        until(lambda: client.ask("stats")["sessions"][0]["known"] == 3000, what="all of it")


def test_each_epoch_is_told_in_small_messages_at_first(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For these the daemon touches memory anew; and libzmq keeps but so many messages."""
    sizes = MessageSizes(limit=20, fresh=4, fresh_part=4, messages=50)
    monkeypatch.setattr("creel.loader.client.session.SIZES", sizes)
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10] * 64)))
        sent, send = [], client.send

        def spied(message: Any, *arrays: Any) -> None:
            sent.append(len(arrays[0]))
            send(message, *arrays)

        monkeypatch.setattr(client, "send", spied)
        ids, at = np.arange(64, dtype=np.int32), 0
        for epoch in range(2):
            at = plan(session, ids, 2, epoch=epoch, at=at)
        assert sent == 2 * [2, 4, 4, 4, 4, 20, 20, 6]
        sent.clear()
        plan(session, np.tile(ids, 10), 2, epoch=2, at=at)
        assert sent[:3] == [2, 12, 12]  # 640 in no more than 50 messages or so
        assert sum(sent) == 640


def test_a_session_is_lost_with_a_plan_that_was_told_in_part(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("creel.loader.client.session.SIZES", MessageSizes(limit=4))
    with daemon.client() as client:
        session = client.open(client.register(folder(tmp_path, [10] * 12)))
        says = iter([client.send])

        def send(*args: Any) -> None:
            next(says, nobody)(*args)

        def nobody(*_: object) -> None:
            raise DaemonLostError("the line is full")

        monkeypatch.setattr(client, "send", send)
        assert not session.extend(0, 0, np.arange(12), np.arange(2, 13, 2))
        assert not session.alive


def test_many_threads_may_use_one_client(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [500] * 40)
    errors: list[BaseException] = []
    with daemon.client() as client:
        key = client.register(manifest)

        def work(seed: int) -> None:
            try:
                session = client.open(key, "job", seed, 4)
                ids = np.random.default_rng(seed).permutation(40).astype(np.int32)
                plan(session, ids, 4)
                assert read_steps(session, manifest, ids, 4) == 40
                assert client.ask("status")["state"] == "serving"
                session.close()
            except BaseException as e:  # noqa: BLE001  shown by the main thread
                errors.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not errors


@pytest.mark.usefixtures("clean")
def test_a_client_leaves_nothing_behind(daemon_name: str, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name) as daemon:
        for _ in range(5):
            with daemon.client() as client:
                session = client.open(client.register(manifest))
                plan(session, np.arange(10, dtype=np.int32), 5)
                assert read_steps(session, manifest, np.arange(10), 5) == 10
        daemon.end()


def test_importing_a_client_loads_no_torch() -> None:
    code = (
        "import sys, creel, creel.loader.client.client, creel.loader.client.embed\n"
        "late = {'torch', 'creel.daemon', 'pyarrow.fs', 'fsspec', 'zmq'}\n"
        "assert not late & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
