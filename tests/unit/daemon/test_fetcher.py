"""The fetcher: which objects are read or copied to their places, in which parts, and errors."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import Runs, chained, pieces
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.reads import Read
from creel.cache.storage.source import Source
from creel.daemon.core.events import HELD, SOURCE, CancelFetches, Fetched, FetchObjects
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.wire import Credentials
from creel.daemon.service.storage.fetcher import Fetcher
from kit import until


def no_peers(origin: int, dataset: str) -> PeerSource:
    raise AssertionError(f"peer {origin} is asked for {dataset}")


pytestmark = pytest.mark.timeout(120)


def end(fetcher: Fetcher) -> None:
    """Close a fetcher; fail unless all its threads end."""
    began = time.monotonic()
    fetcher.close()
    fetcher.join(60)
    assert time.monotonic() - began < 60  # it returns earlier only once all have ended


class Shell:
    """A fetcher, files of unknown lengths that it has read, and room for them."""

    def __init__(self, folder: Path, contents: list[bytes], nbytes: int = 8192) -> None:
        paths = [folder / str(i) for i in range(len(contents))]
        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)
        self.ids = np.arange(len(contents), dtype=np.int32)
        self.length = np.array([len(data) for data in contents])
        self.arena, self.done = Arena.create(nbytes), queue.SimpleQueue[Any]()
        self.fetcher = Fetcher(self.arena, self.done.put, no_peers, threads=4)
        self.source = Source(Manifest.of_files([str(path) for path in paths]))
        self.fetcher.add("d", self.source)

    def read(self) -> Fetched:
        """Read all files to private memory."""
        nowhere = np.full(len(self.ids), NOWHERE)
        self.fetcher.submit(FetchObjects(7, "d", self.ids, nowhere, nowhere, 0.0))
        event: Fetched = self.done.get(timeout=20)
        assert event.nbytes.tolist() == self.length.tolist()
        assert self.fetcher.held_nbytes() == self.length.sum()
        return event

    def copy(self, place: list[int], runs: Runs | None = None) -> Fetched:
        """Copy all files to these places."""
        read = self.read()
        with self.fetcher.landing(read):
            self.fetcher.submit(
                FetchObjects(8, "d", self.ids, np.array(place), self.length, 0.0, runs or {}, HELD)
            )
        event: Fetched = self.done.get(timeout=20)
        with self.fetcher.landing(event):
            assert self.fetcher.held_nbytes() == self.fetcher.pending == 0
        assert read.version is not None
        assert event.version is not None
        assert event.version[event.nbytes >= 0].tolist() == read.version[event.nbytes >= 0].tolist()
        return event


def test_objects_read_before_their_length_was_known_are_copied_to_their_place(
    tmp_path: Path,
) -> None:
    shell = Shell(tmp_path, [b"de", b"fghi", b"abc"])
    assert shell.copy([9, 11, 4]).nbytes.tolist() == [2, 4, 3]
    assert bytes(shell.arena.view[4:15]) == b"abc\0\0defghi"
    shell.fetcher.close()


def test_sources_are_closed_by_whoever_made_them(tmp_path: Path) -> None:
    """Also after a queue that copies, which uses another queue's source."""
    shell = Shell(tmp_path, [b"de", b"fghi", b"abc"])
    closed: list[str] = []
    with mock.patch.object(shell.source, "close", side_effect=lambda: closed.append("source")):
        shell.copy([9, 11, 4])
        shell.fetcher.remove("d")
    assert not closed
    peer = mock.Mock(spec=PeerSource, close=lambda: closed.append("peer"))
    fetcher = Fetcher(shell.arena, shell.done.put, lambda origin, dataset: peer, threads=4)  # noqa: ARG005
    fetcher.add("d", shell.source)
    ones = np.ones(1, np.int64)
    fetcher.submit(FetchObjects(9, "d", shell.ids[:1], ones, ones, 0.0, origin=5))
    shell.done.get(timeout=20)
    fetcher.remove("d")
    assert closed == ["peer"]


def test_bytes_that_are_not_copied_are_not_held_any_more(tmp_path: Path) -> None:
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
        shell.fetcher.submit(
            FetchObjects(7, "d", shell.ids, np.array(place), shell.length, 0.0, runs)
        )
        assert shell.done.get(timeout=20).nbytes.tolist() == [100]
    parts = pieces(shell.arena.view, chained(4096), 100)
    assert parts is not None
    assert [len(piece) for piece in parts] == [48, 48, 4]
    assert b"".join(parts) == data
    shell.fetcher.close()


def test_bytes_copied_behind_an_object_in_several_runs_go_to_their_own_place(
    tmp_path: Path,
) -> None:
    """The first object's place plus its length equals the second one's place."""
    contents = [b"a" * 66, b"b" * 50]
    shell = Shell(tmp_path, contents)
    places = [chained(0), 64]
    shell.copy(places, {chained(0): np.array([[0, 64], [128, 64]])})
    for place, data in zip(places, contents, strict=True):
        assert b"".join(pieces(shell.arena.view, place, len(data)) or []) == data
    shell.fetcher.close()


def test_parts_of_a_fetch_are_as_long_as_is_known_when_they_begin() -> None:
    """Measurements of the first parts count for the others."""

    class Quick:
        manifest = Manifest.of_files(["a"])
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
    end(fetcher)


@pytest.mark.parametrize("origin", [SOURCE, 3])
def test_of_a_cancelled_fetch_only_what_a_thread_has_begun_is_read(origin: int) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Held:
        manifest = Manifest.of_files(["a"])

        def read_parts(self, ids: Any, length: Any, parts: Any) -> Any:  # noqa: ARG002
            begun.set()
            assert goes_on.wait(60)
            return Read(length.copy(), np.ones(len(ids), np.int64), np.zeros(len(ids)))

        def close(self) -> None:
            pass

    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source: Any = Held()
    fetcher = Fetcher(Arena.create(8192), done.put, lambda *_: source, threads=1)
    fetcher.add("d", source)
    for number in (1, 2, 3):
        ids, ones = np.arange(2000, dtype=np.int32), np.ones(2000, np.int64)
        fetcher.submit(
            FetchObjects(number, "d", ids, np.arange(2000), ones, float(number), origin=origin)
        )
    assert begun.wait(60)
    fetcher.cancel(CancelFetches("d", frozenset({1, 2, 9})))
    assert (answer := done.get(timeout=60)).fetch == 2
    assert (answer.nbytes == -1).all()
    goes_on.set()
    first, last = done.get(timeout=60), done.get(timeout=60)
    assert (first.fetch, last.fetch) == (1, 3)
    assert 0 < np.count_nonzero(first.nbytes == 1) < 2000
    assert (last.nbytes == 1).all()
    end(fetcher)


def test_fetches_from_a_peer_that_is_gone_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both those that a thread waits for and those that wait for a thread."""
    monkeypatch.setattr("creel.daemon.peers.link.CONNECT_S", 120.0)  # they do not wait for that
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    peers: list[PeerSource] = []

    with socket.create_server(("127.0.0.1", 0)) as silent, closing(Arena.create(8192)) as arena:

        def peer(origin: int, dataset: str) -> PeerSource:
            credentials = Credentials("me", "cluster", bytes(32), encrypt=False)
            peers.append(PeerSource(silent.getsockname(), str(origin), dataset, credentials))
            return peers[-1]

        fetcher = Fetcher(arena, done.put, peer, threads=4)
        numbers = range(20)
        for i in numbers:
            ids, ones = np.arange(10, dtype=np.int32), np.ones(10, np.int64)
            fetcher.submit(FetchObjects(i, "d", ids, np.arange(10), ones, float(i), origin=i % 2))
        until(lambda: len(peers) == 2)
        fetcher.remove_peer(0)
        fetcher.remove_peer(1)
        answers = [done.get(timeout=60) for _ in numbers]
        assert {a.fetch for a in answers} == set(numbers)
        assert all((a.nbytes == -1).all() for a in answers)
        fetcher.submit(FetchObjects(99, "d", ids, np.arange(10), ones, 0.0, origin=0))
        until(lambda: len(peers) == 3, event="the number stands for another peer")
        end(fetcher)
