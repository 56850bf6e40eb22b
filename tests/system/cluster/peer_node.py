"""A node that serves objects to peers, and a proxy between two nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import chained, headers
from creel.daemon.core.events import Event, PeerAsked, PeerServed, ServeObjects
from creel.daemon.peers.connections import PeerConnection
from creel.daemon.peers.link import PeerLink
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.server import PeerServer
from creel.daemon.peers.wire import Credentials
from kit import until

KEY = bytes(range(32))
WHO = Credentials("reader", "cluster", KEY, encrypt=False)
SECRET = WHO._replace(encrypt=True)
ARENA_NBYTES = 48 << 20
I64 = NDArray[np.int64]


class Node:
    """A node that serves `objects`; a thread answers as a daemon's loop does."""

    def __init__(
        self,
        objects: list[bytes | None],
        *,
        runs: bool = False,
        port: int = 0,
        encrypt: bool = False,
    ) -> None:
        self.objects = objects
        self.arena = Arena.create(ARENA_NBYTES)
        self.place = np.full(len(objects), NOWHERE, np.int64)
        self.nbytes = np.full(len(objects), -1, np.int64)
        self._store(runs=runs)
        self.asked: list[PeerAsked] = []
        self.answered = Counter[int]()
        self.served = Counter[int]()
        self.held: list[PeerAsked] | None = None  # requests that the test answers itself
        self._queue: SimpleQueue[PeerAsked | None] = SimpleQueue()
        self.server = PeerServer(
            "127.0.0.1",
            port,
            "node",
            self.arena,
            self._take,
            lambda cluster, beat: None,  # noqa: ARG005
            encrypt=encrypt,
        )
        self.credentials = WHO._replace(encrypt=encrypt)
        self.server.admit("cluster", KEY, "node")
        self._loop = threading.Thread(target=self._answer)
        self._loop.start()

    def _store(self, *, runs: bool) -> None:
        at = 0
        for i, data in enumerate(self.objects):
            if data is None:
                continue
            self.nbytes[i] = len(data)
            if runs and len(data) > 200:
                at = self._store_in_runs(i, at, data)
            else:
                self.place[i] = at
                self.arena.write(at, memoryview(data))
                at += len(data)

    def _store_in_runs(self, i: int, at: int, data: bytes) -> int:
        half = -(-len(data) // 128) * 64 + 64
        where = np.array([[at + half, half], [at, half]])  # the second half comes first
        view = memoryview(data)
        for start, header in headers(where, len(data)):
            held = int.from_bytes(header[:8], "little")
            self.arena.write(start, memoryview(header + view[:held]))
            view = view[held:]
        self.place[i] = chained(at + half)
        return at + 2 * half

    def _take(self, event: Event) -> None:
        if isinstance(event, PeerServed):
            self.served[event.request] += 1
        elif isinstance(event, PeerAsked):
            self._queue.put(event)

    def _answer(self) -> None:
        while (asked := self._queue.get()) is not None:
            self.asked.append(asked)
            if self.held is None:
                self.answer(asked)
            else:
                self.held.append(asked)

    def answer(self, asked: PeerAsked) -> None:
        ids = asked.ids
        self.answered[asked.request] += 1
        version, age = ids.astype(np.int64) + 7, np.where(ids % 2, ids / 4, np.inf)
        self.server.serve(
            ServeObjects(asked.request, self.place[ids], self.nbytes[ids], version, age)
        )

    @property
    def connections(self) -> list[PeerConnection]:
        """Return the open connections."""
        return list(self.server.connections.values())

    def source(self) -> PeerSource:
        return PeerSource(self.server.address, "node", "data", self.credentials)

    def link(self, credentials: Credentials = WHO) -> PeerLink:
        return PeerLink(self.server.address, "node", credentials)

    def close(self) -> None:
        """End; each answer must have been served exactly once."""
        self._queue.put(None)
        self._loop.join()
        self.server.close()
        assert self.served == self.answered
        self.arena.close()


def node_of(
    stack: ExitStack, objects: list[bytes | None], *, runs: bool = False, encrypt: bool = False
) -> Node:
    if encrypt:
        pytest.importorskip("cryptography")
    node = Node(objects, runs=runs, encrypt=encrypt)
    stack.callback(node.close)
    return node


def source_of(stack: ExitStack, node: Node) -> PeerSource:
    source = node.source()
    stack.callback(source.close)
    return source


def data_of(*sizes: int) -> list[bytes | None]:
    rng = np.random.default_rng(len(sizes))
    return [rng.bytes(size) for size in sizes]


def soon() -> float:
    """Return the time at which a test gives up."""
    return time.monotonic() + 20


def check_read(source: PeerSource, objects: list[bytes | None], ids: NDArray[np.int32]) -> None:
    """Read objects into an arena and compare; absent ones must be reported as such."""
    wanted = [objects[i] for i in ids.tolist()]
    length = np.array([len(data or b"") for data in wanted], np.int64)
    with closing(Arena.create(max(int(length.sum()), 1))) as arena:
        parts = arena.parts(length.cumsum() - length, length)
        read = source.read_parts(ids, length, parts)
        for data, part, nbytes in zip(wanted, parts, read.nbytes.tolist(), strict=True):
            assert nbytes == (-1 if data is None else len(data))
            assert data is None or b"".join(part) == data
        here = read.nbytes >= 0
        assert (read.version[here] == ids[here] + 7).all()
        ages = time.monotonic() - read.asked[here]
        assert ((ages >= ids[here] / 4) & (ages < ids[here] / 4 + 60))[ids[here] % 2 == 1].all()
        assert (read.asked[here][ids[here] % 2 == 0] == 0).all()
        del parts, part


SIZES = [0, 1, 63, 64, 3000, 150_528, 4096, 0, 65_537, 1 << 20, 5_000_000, 17, 3000, 3000]


class Proxy:
    """Forwards one connection at a time to a server: `limit` bytes of its answers, then `then`.

    "flip": changes one bit of the next byte, and forwards all others as they are.
    """

    def __init__(self, target: tuple[str, int], limit: int, then: str) -> None:
        self._target, self._limit, self._then = target, limit, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.said = b""  # by clients
        self.heard = b""  # by clients
        self.connections = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._end.is_set():
                client.close()
                return
            self.connections += 1
            with client, socket.create_connection(self._target) as upstream:
                up = threading.Thread(target=self._forward_up, args=(client, upstream))
                up.start()
                self._forward_down(upstream, client)
                for s in client, upstream:
                    with suppress(OSError):
                        s.shutdown(socket.SHUT_RDWR)
                up.join()

    def _forward_up(self, client: socket.socket, upstream: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                self.said += data
                upstream.sendall(data)
        with suppress(OSError):  # the client may have reset its connection
            upstream.shutdown(socket.SHUT_RDWR)

    def _forward_down(self, upstream: socket.socket, client: socket.socket) -> None:
        left = self._limit
        with suppress(OSError):
            while left and (data := upstream.recv(min(left, 1 << 16))):
                self.heard += data
                client.sendall(data)
                left -= len(data)
            while self._then == "flip" and (data := upstream.recv(1 << 16)):
                client.sendall(data if left else bytes([data[0] ^ 1]) + data[1:])
                left = -1
            if self._then == "stall" and not left:
                self._end.wait()
            if self._then == "garbage" and not left:
                client.sendall(b"\xa5" * (1 << 20))

    def close(self) -> None:
        self._end.set()
        socket.create_connection(self.address).close()
        self._thread.join()
        self._listener.close()


def blocked(node: Node) -> Callable[[], bool]:
    """Return whether the server has a connection that takes no more bytes."""
    return lambda: any(connection.blocked_since for connection in node.connections)


def large(node: Node, link: PeerLink, *, times: int = 1) -> None:
    """Ask for more bytes than the kernel buffers for a connection that is not read."""
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    for number in range(times):
        link.ask(number, "data", np.zeros(1, np.int32), 10.0)
    until(blocked(node), event="a blocked connection")
