"""Clients: answers, threads, descriptors; none may block or break its process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

import creel
from creel.addresses import first_address
from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.errors import DaemonLostError, NoDaemonError
from creel.loader.client import connections, packets
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start
from creel.loader.data.binding.bind import bind
from creel.loader.line.steps.batch_stream import open_batch_stream
from creel.system import fd_packets
from daemons import Running, folder, opened, plan, read_steps
from kit import descriptors, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def config(name: str, **daemon: object) -> Config:
    """Return settings for a small daemon that ends quickly."""
    settings = {"name": name, "linger_s": 0.3, "log_level": "warning", **daemon}
    return msgspec.convert({"daemon": settings, "memory": {"budget": "16MiB"}}, Config)


def test_a_line_is_not_begun_where_no_thread_can_be(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq would end the process. The attempt leaves nothing, and the next call works."""
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
        Client.connect(daemon_name)


@pytest.mark.parametrize("nonsense", [b"\xc1", b"babble"])
def test_a_server_that_answers_nonsense_means_direct_reads(
    daemon_name: str, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    squatter.bind(first_address(daemon_name))
    squatter.listen()

    def babble() -> None:
        peer, _ = squatter.accept()
        with peer:
            peer.recv(1000)
            peer.send(nonsense)

    thread = threading.Thread(target=babble)
    thread.start()
    with squatter, caplog.at_level(logging.WARNING):
        assert connect_or_start(config(daemon_name)) is None
        thread.join()
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "is not a daemon of this version" in said.getMessage()


def test_a_thread_that_listens_holds_up_nobody_who_sends(daemon: Running, tmp_path: Path) -> None:
    """A wait of one stream must not make all streams of the process wait."""
    manifest = folder(tmp_path, [100] * 40)
    with daemon.client() as client:
        session = opened(client, manifest)
        assert client.ask("status")  # the line is made
        received, before = client.received, descriptors(eventfds=True)
        listening = threading.Thread(target=client.listen, args=(100.0, received))
        listening.start()
        until(lambda: bool(descriptors(eventfds=True) - before), event="it listens")
        sending = threading.Thread(target=plan, args=(session, np.arange(40), 5))  # no answer
        sending.start()
        sending.join(20)
        assert not sending.is_alive(), "it waits for who listens"
        assert listening.is_alive()
        assert client.ask("status")  # any thread takes the answer; all that listen look again
        listening.join(20)
        assert not listening.is_alive()
        assert not descriptors(eventfds=True) - before


def test_threads_that_wait_at_once_each_get_their_answer(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 40)
    with daemon.client() as client:
        session = opened(client, manifest)
        assert client.ask("status")  # the line is made
        before = descriptors(eventfds=True)

        def wait(step: int) -> bool:
            return session.wait(step, 60)

        def ask(_: int) -> bool:
            return bool(client.ask("status")["sessions"] == 1)

        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(wait, step) for step in range(8)]
            asking = [pool.submit(ask, i) for i in range(100)]
            assert all(future.result(60) for future in asking)
            plan(session, np.arange(40), 5)
            assert all(future.result(60) for future in waiting)
        assert not descriptors(eventfds=True) - before


_FEW_DESCRIPTORS = """
import os, resource, sys
from creel.errors import DaemonLostError
from creel.loader.client.client import Client
client = Client.connect(os.environ["CREEL_SOCKET"])
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
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Too many open files" in done.stdout


def test_ctrl_c_amid_a_question_leaves_no_answer_to_the_next(daemon: Running) -> None:
    with daemon.client() as client:
        amid = mock.patch.object(packets, "receive", side_effect=KeyboardInterrupt)
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
    receive = fd_packets.receive

    def asking(*args: Any) -> Any:
        asked.set()
        return receive(*args)

    daemon.signal(signal.SIGSTOP)
    try:
        with mock.patch.object(packets, "receive", asking), ThreadPoolExecutor() as threads:
            opened = threads.submit(open_batch_stream, binding, settings, {})
            assert asked.wait(20)
            connections.disconnect(daemon.name)
            assert opened.result(20) is None  # instead of waiting for 120 s
    finally:
        daemon.signal(signal.SIGCONT)
    assert not caplog.records


def test_many_threads_may_use_one_client(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [500] * 40)
    errors: list[BaseException] = []
    with daemon.client() as client:
        key = client.register(manifest)

        def work(seed: int) -> None:
            try:
                session = opened(client, key, "job", seed, 4)
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
                session = opened(client, manifest)
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
