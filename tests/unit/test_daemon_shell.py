"""The daemon's shell performs the core's actions in order, and reports those that failed."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import zmq

from creel.cache.memory import shared_words
from creel.cache.memory.arena import Arena
from creel.cache.memory.free_ranges import NOWHERE
from creel.cache.memory.runs import Runs, chained, pieces
from creel.cache.memory.shared_words import (
    HEARTBEAT,
    READY,
    REVOKED,
    WANTED,
    WORDS_NBYTES,
    SharedWords,
    sealed_memfd,
)
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Read, Source
from creel.config import Config
from creel.daemon.core.events import HELD, CancelFetches, Fetched, FetchObjects, Publish, Tick
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.wire import Credentials
from creel.daemon.service.control_socket import ControlSocket
from creel.daemon.service.node import Node
from creel.daemon.service.registry import DatasetRecord, Registry, SessionRecord
from creel.daemon.service.request_socket import RequestSocket
from creel.daemon.service.storage.fetcher import Fetcher
from creel.errors import UnavailableError
from creel.messages import Command, Extend, Open, encode
from creel.settings import MemorySettings
from kit import descriptors, until


def no_peers(origin: int, dataset: str) -> PeerSource:
    raise AssertionError(f"peer {origin} is asked for {dataset}")


pytestmark = pytest.mark.timeout(120)


class Shell:
    """A fetcher, files of unknown lengths that it has read, and room for them."""

    def __init__(self, folder: Path, contents: list[bytes], nbytes: int = 8192) -> None:
        paths = [folder / str(i) for i in range(len(contents))]
        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)
        self.ids = np.arange(len(contents), dtype=np.int32)
        self.length = np.array([len(data) for data in contents])
        self.arena, self.done = Arena.create(nbytes), queue.SimpleQueue[Any]()
        self.fetcher = Fetcher(self.arena, self.done.put, no_peers)
        self.source = Source(Manifest.of_files([str(path) for path in paths]))
        self.fetcher.add("d", self.source)

    def read(self) -> Fetched:
        """Read all of them, to private memory."""
        nowhere = np.full(len(self.ids), NOWHERE)
        self.fetcher.submit(FetchObjects(7, "d", self.ids, nowhere, nowhere, 0.0))
        event: Fetched = self.done.get(timeout=20)
        assert event.nbytes.tolist() == self.length.tolist()
        assert self.fetcher.held_nbytes() == self.length.sum()
        return event

    def copy(self, place: list[int], runs: Runs | None = None) -> Fetched:
        """Copy all of them to these places."""
        read = self.read()
        with self.fetcher.landing(read):
            room = np.array(place), self.length, 0.0, runs or {}, HELD
            self.fetcher.submit(FetchObjects(8, "d", self.ids, *room))
        event: Fetched = self.done.get(timeout=20)
        with self.fetcher.landing(event):
            assert self.fetcher.held_nbytes() == self.fetcher.pending == 0
        assert read.version is not None
        assert event.version is not None
        assert event.version[event.nbytes >= 0].tolist() == read.version[event.nbytes >= 0].tolist()
        return event


def test_what_was_read_before_its_length_was_known_is_copied_to_its_place(tmp_path: Path) -> None:
    shell = Shell(tmp_path, [b"de", b"fghi", b"abc"])
    assert shell.copy([9, 11, 4]).nbytes.tolist() == [2, 4, 3]
    assert bytes(shell.arena.view[4:15]) == b"abc\0\0defghi"
    shell.fetcher.close()


def test_who_opened_a_source_closes_it_and_the_fetcher_what_it_made(tmp_path: Path) -> None:
    """Also after a queue that copies, which has the source of another."""
    shell = Shell(tmp_path, [b"de", b"fghi", b"abc"])
    closed: list[str] = []
    with mock.patch.object(shell.source, "close", side_effect=lambda: closed.append("source")):
        shell.copy([9, 11, 4])
        shell.fetcher.remove("d")
    assert not closed
    peer = mock.Mock(spec=PeerSource, close=lambda: closed.append("peer"))
    fetcher = Fetcher(shell.arena, shell.done.put, lambda origin, dataset: peer)  # noqa: ARG005
    fetcher.add("d", shell.source)
    one = np.ones(1, np.int64)
    fetcher.submit(FetchObjects(9, "d", shell.ids[:1], one, one, 0.0, origin=5))
    shell.done.get(timeout=20)
    fetcher.remove("d")
    assert closed == ["peer"]


def test_what_is_not_copied_is_not_held_any_more(tmp_path: Path) -> None:
    shell = Shell(tmp_path, [b"de", b"fghi", b"abc"])
    with shell.fetcher.landing(shell.read()):
        pass
    assert shell.fetcher.held_nbytes() == shell.fetcher.pending == 0
    shell.fetcher.close()


def test_a_machine_without_memory_copies_no_more_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shell = Shell(tmp_path, [b"abc", b"de", b"f"])
    write = shell.arena.write

    def short(offset: int, data: memoryview) -> None:
        if offset == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(offset, data)

    monkeypatch.setattr(shell.arena, "write", short)
    assert shell.copy([4, 9, 20]).nbytes.tolist()[:2] == [3, -1]
    assert shell.copy([9, 20, 30]).nbytes.tolist()[0] == -1
    assert caplog.text.count("no memory") == 1
    shell.fetcher.close()


@pytest.mark.parametrize("held", [False, True])
def test_an_object_in_several_runs_is_written_as_readers_read_it(
    tmp_path: Path, *, held: bool
) -> None:
    data = np.random.default_rng(0).bytes(100)
    shell = Shell(tmp_path, [data])
    place, runs = [chained(4096)], {chained(4096): np.array([[4096, 64], [0, 64], [640, 128]])}
    if held:
        assert shell.copy(place, runs).nbytes.tolist() == [100]
    else:
        room = np.array(place), shell.length, 0.0, runs
        shell.fetcher.submit(FetchObjects(7, "d", shell.ids, *room))
        assert shell.done.get(timeout=20).nbytes.tolist() == [100]
    found = pieces(shell.arena.view, chained(4096), 100)
    assert found is not None
    assert [len(piece) for piece in found] == [48, 48, 4]
    assert b"".join(found) == data
    shell.fetcher.close()


def test_what_is_copied_behind_an_object_in_several_runs_goes_to_its_own_place(
    tmp_path: Path,
) -> None:
    """The place of the first, as a number, plus its length is where the second lies."""
    contents = [b"a" * 66, b"b" * 50]
    shell = Shell(tmp_path, contents)
    places = [chained(0), 64]
    shell.copy(places, {chained(0): np.array([[0, 64], [128, 64]])})
    for place, data in zip(places, contents, strict=True):
        assert b"".join(pieces(shell.arena.view, place, len(data)) or []) == data
    shell.fetcher.close()


@pytest.mark.parametrize("draining", [True, False])
def test_a_node_that_drains_leaves_all_bytes_where_they_lie(*, draining: bool) -> None:
    """READY stays up for those who hang up then, and readers of theirs may still be copying."""
    config = Config(memory=MemorySettings(budget="1MiB"))
    node = Node(config, call_soon=lambda job: job(), send=lambda *_: None, embedded=True)
    manifest = Manifest.of_files(["/a", "/b"])
    dataset = DatasetRecord.create(manifest, Source(manifest), 1 << 20)
    node.registry.add(dataset)
    offset = dataset.table.offset
    if draining:
        node.state = "draining"
    with mock.patch.object(node.core, "handle") as handle:
        handle.return_value = [Publish(dataset.key, np.array([0], np.int32), np.array([200]))]
        node.handle_event(Tick())
    # Who decides is not asked: what it thought done and was not would put its tables wrong.
    assert handle.called is not draining
    assert (offset[:].tolist() == [-1, -1]) is draining
    node.close()


def test_a_system_that_gives_no_threads_does_not_end_the_daemon(tmp_path: Path) -> None:
    """Limits on processes count threads, too. Readers wait for what is not fetched."""
    (tmp_path / "x").write_bytes(b"x" * 3000)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    config = Config(memory=MemorySettings(budget="1MiB"))
    node = Node(config, call_soon=calls.put, send=lambda *_: None, embedded=True)
    answers: list[Any] = []
    refused = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=refused):
        files = [str(tmp_path / name) for name in ("x", "another, which fills the memory")]
        manifest = Manifest.of_files(files, lengths=[3000, 1 << 20])
        node.register("token", lambda: manifest, answers.append)
        while not answers:
            calls.get_nowait()()
        session = node.open("token", Open(manifest.key))
        node.extended(session, Extend("token", 1, 0, 0), [np.zeros(1, np.int32), np.ones(1, int)])
        node.tick()
        calls.get_nowait()()
    assert (node.fetcher.pending, session.ready) == (0, 1)
    node.close()


def test_a_session_that_finds_no_descriptor_keeps_none() -> None:
    """Else all that become free go, one for each who asks; who asks keeps what it has."""
    registry = Registry(max_datasets=1, max_sessions=1)
    manifest = Manifest.of_files(["/a"])
    registry.add(DatasetRecord.create(manifest, Source(manifest), 1 << 20))
    before = descriptors()
    none = OSError(errno.EMFILE, "Too many open files")
    with mock.patch("mmap.mmap", side_effect=none), pytest.raises(UnavailableError, match="Too"):
        registry.open("token", Open(manifest.key))
    assert not descriptors() - before
    registry.close()


def test_the_heart_beats_between_events_of_one_turn() -> None:
    """Many plans in one turn, or many clients that leave, are no reason to give a daemon up."""
    config = Config(memory=MemorySettings(budget="1MiB"))
    node = Node(config, call_soon=lambda job: job(), send=lambda *_: None, embedded=True)
    manifest = Manifest.of_files(["/a"])
    node.register("token", lambda: manifest, lambda _: None)
    until(lambda: manifest.key in node.registry.datasets, what="it is registered")
    session = node.open("token", Open(manifest.key))
    slow = [2.0 * i for i in range(1 << 20, (1 << 20) + 100)]  # each event takes two seconds
    with mock.patch("creel.daemon.service.node.time.monotonic", side_effect=slow):
        for _ in range(3):
            session.words[HEARTBEAT] = 0
            node.handle_event(Tick())
            assert session.words[HEARTBEAT] > 0
    node.close()


def test_who_knocks_while_descriptors_are_short_keeps_nobody_awake(tmp_path: Path) -> None:
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        address = str(tmp_path / "desk")
        host: Any = None  # nobody gets as far as to ask it
        control_socket = ControlSocket(address, host, epoll, limit=4)
        client.connect(address)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (1 + max(int(fd) for fd, _ in descriptors(eventfds=True)), limits[1]),
        )
        try:
            taken = _all_free()
            assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
            control_socket.ready(control_socket.fd, 0.0)
            assert epoll.poll(0) == []
            assert control_socket.clients == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
        control_socket.sweep(1.0)
        assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
        control_socket.ready(control_socket.fd, 1.0)
        client.send(b"I am in")
        ((fd, _),) = epoll.poll(10)
        assert fd != control_socket.fd
        assert control_socket.handles(fd)
        control_socket.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOBUFS, errno.ENFILE])
def test_who_knocks_while_the_system_is_short_ends_no_daemon(number: int, tmp_path: Path) -> None:
    address, short = str(tmp_path / "desk"), OSError(number, os.strerror(number))
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        host: Any = None
        control_socket = ControlSocket(address, host, epoll, limit=8)
        client.connect(address)
        with mock.patch.object(socket.socket, "accept", side_effect=short):
            control_socket.ready(control_socket.fd, 0.0)
        assert epoll.poll(0) == []
        control_socket.sweep(0.0)
        assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
        control_socket.close()


def _all_free() -> list[int]:
    fds = []
    with contextlib.suppress(OSError):
        while True:
            fds.append(os.dup(0))
    return fds


def test_parts_of_a_fetch_are_as_long_as_is_known_when_they_begin() -> None:
    """What the first ones teach counts for the rest of it."""

    class Quick:
        parts: ClassVar[list[int]] = []

        def read_parts(self, ids: Any, length: Any, parts: list[list[memoryview]]) -> Any:
            self.parts.append(len(ids))
            for part in parts:
                part[0][:] = b"x" * len(part[0])
            return Read(length.copy(), np.ones(len(ids), np.int64), np.zeros(len(ids)))

        def close(self) -> None:
            pass

    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arena = Arena.create(8192)
    fetcher = Fetcher(arena, done.put, no_peers, threads=1)
    source: Any = Quick()
    fetcher.add("d", source)
    ids, ones = np.arange(2000, dtype=np.int32), np.ones(2000, np.int64)
    fetcher.submit(FetchObjects(1, "d", ids, np.arange(2000), ones, 0.0))
    assert (done.get(timeout=60).nbytes == 1).all()
    assert sum(Quick.parts) == 2000
    assert Quick.parts[0] < Quick.parts[-2]
    assert bytes(arena.view[:2000]) == b"x" * 2000
    fetcher.close()
    assert fetcher.join(60)


def test_of_a_cancelled_fetch_only_what_a_thread_has_begun_is_read() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Held:
        def read_parts(self, ids: Any, length: Any, parts: Any) -> Any:  # noqa: ARG002
            begun.set()
            assert goes_on.wait(60)
            return Read(length.copy(), np.ones(len(ids), np.int64), np.zeros(len(ids)))

        def close(self) -> None:
            pass

    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    fetcher = Fetcher(Arena.create(8192), done.put, no_peers, threads=1)
    source: Any = Held()
    fetcher.add("d", source)
    for number in (1, 2, 3):
        ids, ones = np.arange(2000, dtype=np.int32), np.ones(2000, np.int64)
        fetcher.submit(FetchObjects(number, "d", ids, np.arange(2000), ones, float(number)))
    assert begun.wait(60)
    fetcher.cancel(CancelFetches("d", frozenset({1, 2, 9})))
    assert (answer := done.get(timeout=60)).fetch == 2
    assert (answer.nbytes == -1).all()
    goes_on.set()
    first, last = done.get(timeout=60), done.get(timeout=60)
    assert (first.fetch, last.fetch) == (1, 3)
    assert 0 < np.count_nonzero(first.nbytes == 1) < 2000
    assert (last.nbytes == 1).all()
    fetcher.close()
    assert fetcher.join(60)


def test_fetches_from_a_peer_that_is_gone_fail_at_once() -> None:
    """Those that a thread waits for, and those that wait for a thread."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    made: list[PeerSource] = []

    with socket.create_server(("127.0.0.1", 0)) as silent, Arena.create(8192) as arena:

        def peer(origin: int, dataset: str) -> PeerSource:
            who = Credentials("me", "cluster", bytes(32))
            made.append(PeerSource(silent.getsockname(), str(origin), dataset, who))
            return made[-1]

        fetcher = Fetcher(arena, done.put, peer)
        numbers = range(20)
        for i in numbers:
            ids, ones = np.arange(10, dtype=np.int32), np.ones(10, np.int64)
            fetcher.submit(FetchObjects(i, "d", ids, np.arange(10), ones, float(i), origin=i % 2))
        until(lambda: len(made) == 2)
        began = time.monotonic()
        fetcher.remove_peer(0)
        fetcher.remove_peer(1)
        answers = [done.get(timeout=60) for _ in numbers]
        assert time.monotonic() - began < 1.0  # a handshake may take 2 s
        assert {a.fetch for a in answers} == set(numbers)
        assert all((a.nbytes == -1).all() for a in answers)
        fetcher.submit(FetchObjects(99, "d", ids, np.arange(10), ones, 0.0, origin=0))
        until(lambda: len(made) == 3, what="the number stands for another peer")
        fetcher.close()
        assert fetcher.join(60)


def _record(steps: int) -> SessionRecord:
    """A session that nobody but the test knows; to be closed."""
    fd = sealed_memfd("words", WORDS_NBYTES)
    return SessionRecord(1, "token", mock.Mock(), Open("d"), SharedWords(fd), fd, steps=steps)


def test_ready_is_lowered_where_no_later_step_is_complete_either() -> None:
    session = _record(10)
    session.set_ready(5, 0)
    revoked = session.words[REVOKED]
    session.set_ready(3, 0)
    assert session.words[READY] == session.ready == 3
    assert session.words[REVOKED] == revoked + 1


def test_nobody_waits_for_steps_of_a_plan_that_is_void() -> None:
    """Else the next plan's step of that number would count as a stall before its time."""
    session = _record(10)
    words = session.words
    assert session.wait(b"who", 1, 7)
    words[WANTED] = 9
    assert session.progress() == (0, 9)
    words[WANTED] = 3  # as its client's `truncate` does
    session.truncate(3)
    session.steps = 10  # another plan
    assert session.progress() is None
    assert session.wait(b"who", 2, 5)
    assert session.progress() == (0, 6)
    session.close()


def test_early_steps_end_waits_and_are_withdrawn_like_others() -> None:
    session = _record(300)
    for call, step in enumerate((1, 3, 4, 70)):
        assert session.wait(b"who", call, step)
    assert session.set_ready(1, 0, early=(3, 4, 64)) == [(b"who", 1, 3), (b"who", 2, 4)]
    ready = session.words.ready
    assert [step for step in range(200) if ready(step)] == [0, 3, 4, 64]
    stamp = session.words[shared_words.REVOKED]
    assert session.set_ready(1, 0, early=(3,)) == []
    assert [step for step in range(200) if ready(step)] == [0, 3]
    assert session.words[shared_words.REVOKED] > stamp
    assert session.set_ready(60, 0, early=(67, 70)) == [(b"who", 0, 1), (b"who", 3, 70)]
    assert [step for step in range(58, 200) if ready(step)] == [58, 59, 67, 70]
    session.truncate(0)
    assert not any(map(ready, range(200)))
    session.close()


def test_each_shared_word_has_a_number_of_its_own() -> None:
    sizes = {"NOWHERE", "WORDS_NBYTES", "EARLY_STEPS", "FAILED"}  # FAILED is a counter's
    constants = {k: v for k, v in vars(shared_words).items() if k.isupper() and isinstance(v, int)}
    numbers = [v for k, v in constants.items() if k not in sizes and not k.startswith("_")]
    assert len(numbers) > 8
    numbers += range(shared_words.EARLY + 1, shared_words.EARLY + shared_words.EARLY_STEPS)
    numbers += shared_words.COUNTER.values()
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < shared_words.WORDS_NBYTES / 8


def test_a_busy_client_does_not_hold_up_the_messages_of_others(tmp_path: Path) -> None:
    heard: list[str] = []
    control_socket = mock.Mock()
    control_socket.knows.side_effect = heard.append  # so that it knows nobody

    def message(token: str) -> bytes:
        return encode(Command(token, 1, "status", {}))

    with zmq.Context(io_threads=1) as context, contextlib.ExitStack() as stack:
        requests = RequestSocket(mock.Mock(), control_socket, context)
        stack.callback(requests.close)
        busy, other, ping, pong = (
            stack.enter_context(context.socket(kind))
            for kind in (zmq.DEALER, zmq.DEALER, zmq.PUSH, zmq.PULL)
        )
        for client in (busy, other):
            client.linger = 0
            client.connect(requests.address)
        pong.bind(f"ipc://{tmp_path}/pong")
        ping.connect(f"ipc://{tmp_path}/pong")

        def moved() -> None:
            """The thread that moves all messages has moved those that were sent."""
            for _ in range(3):
                ping.send(b"")
                pong.recv()

        other.send(message("other"))
        until(requests.more)
        assert not requests.turn()
        for _ in range(500):
            busy.send(message("busy"))
        moved()
        assert requests.more()
        other.send(message("other"))
        moved()
        requests.turn()
        assert "other" in heard[1:10]
