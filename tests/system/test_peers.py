"""Objects from one arena to another over TCP, whatever the other side does."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.memory.arena import Arena
from creel.cache.memory.runs import chained, headers
from creel.cache.memory.shared_words import ABSENT
from creel.cache.storage.source import parts_in
from creel.daemon.peers import connections, link, peer_source, server, wire
from creel.daemon.peers.connections import Asked
from creel.daemon.peers.link import PeerLink
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.server import PeerServer
from creel.daemon.peers.wire import Credentials
from creel.errors import MalformedError
from creel.messages import Message
from kit import until

pytestmark = pytest.mark.usefixtures("clean")

KEY = bytes(range(32))
WHO = Credentials("reader", "cluster", KEY)
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
        self.place = np.full(len(objects), ABSENT, np.int64)
        self.nbytes = np.full(len(objects), -1, np.int64)
        self._store(runs=runs)
        self.asked: list[Asked] = []
        self.answered = Counter[int]()
        self.served = Counter[int]()
        self.held: list[Asked] | None = None  # requests, where the test answers them itself
        self._queue: SimpleQueue[Asked | None] = SimpleQueue()
        self.server = PeerServer(
            *("127.0.0.1", port, "node", self.arena, self._queue.put, self._count_served),
            encrypt=encrypt,
        )
        self.credentials = WHO._replace(encrypt=encrypt)
        self.server.admit("cluster", KEY)
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

    def _count_served(self, number: int) -> None:
        self.served[number] += 1

    def _answer(self) -> None:
        while (asked := self._queue.get()) is not None:
            self.asked.append(asked)
            if self.held is None:
                self.answer(asked)
            else:
                self.held.append(asked)

    def answer(self, asked: Asked) -> None:
        ids = asked.ids
        self.answered[asked.number] += 1
        self.server.serve(asked.number, self.place[ids], self.nbytes[ids], ids.astype(np.int64) + 7)

    def source(self, **kwargs: float) -> PeerSource:
        who = self.credentials
        return PeerSource(self.server.address, "node", "data", who, **kwargs)  # type: ignore[arg-type]

    def link(self, credentials: Credentials = WHO) -> PeerLink:
        return PeerLink(self.server.address, "node", credentials)

    def close(self) -> None:
        """End; everything answered must have been served, once."""
        self._queue.put(None)
        self._loop.join()
        self.server.close()
        assert self.served == self.answered
        self.arena.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def node_of(
    stack: ExitStack, objects: list[bytes | None], *, runs: bool = False, encrypt: bool = False
) -> Node:
    if encrypt:
        pytest.importorskip("cryptography")
    node = Node(objects, runs=runs, encrypt=encrypt)
    stack.callback(node.close)
    return node


def source_of(stack: ExitStack, node: Node, **kwargs: float) -> PeerSource:
    source = node.source(**kwargs)
    stack.callback(source.close)
    return source


def data_of(*sizes: int) -> list[bytes | None]:
    rng = np.random.default_rng(len(sizes))
    return [rng.bytes(size) for size in sizes]


def soon() -> float:
    """When a test gives up."""
    return time.monotonic() + 20


def check_read(source: PeerSource, objects: list[bytes | None], ids: NDArray[np.int32]) -> None:
    """Read objects into an arena, and compare; those that are absent are reported so."""
    wanted = [objects[i] for i in ids.tolist()]
    length = np.array([len(data or b"") for data in wanted], np.int64)
    with Arena.create(max(int(length.sum()), 1)) as arena:
        parts = arena.parts(length.cumsum() - length, length)
        read = source.read_parts(ids, length, parts)
        for data, part, nbytes in zip(wanted, parts, read.nbytes.tolist(), strict=True):
            assert nbytes == (-1 if data is None else len(data))
            assert data is None or b"".join(part) == data
        here = read.nbytes >= 0
        assert (read.version[here] == ids[here] + 7).all()
        del parts, part


SIZES = [0, 1, 63, 64, 3000, 150_528, 4096, 0, 65_537, 1 << 20, 5_000_000, 17, 3000, 3000]


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("runs", [False, True])
def test_objects_of_all_sizes_arrive(stack: ExitStack, runs: bool, encrypt: bool) -> None:
    objects = [*data_of(*SIZES), None]
    node = node_of(stack, objects, runs=runs, encrypt=encrypt)
    source = source_of(stack, node)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(objects)).astype(np.int32)
        check_read(source, objects, order)
    assert source.counters.snapshot().nbytes == 5 * sum(SIZES)
    until(lambda: node.server.nbytes == 5 * sum(SIZES))  # counted once the last byte has left


@pytest.mark.timeout(30)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 100])
def test_the_last_bytes_are_not_waited_for(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """A thread that is woken for many bytes at once must not sleep where fewer are to come."""
    monkeypatch.setattr(link, "_STALL_S", 1000.0)
    wake = link._WAKE_NBYTES
    objects = data_of(wake + beyond, 2 * wake + beyond, 100, 3 * wake + beyond, 10, 9 * wake)
    source = source_of(stack, node_of(stack, objects))
    check_read(source, objects, np.arange(len(objects), dtype=np.int32))
    for i in range(len(objects)):
        check_read(source, objects, np.array([i], np.int32))


def test_many_records_come_in_few_system_calls_and_large_requests(stack: ExitStack) -> None:
    """More objects than one request, one answer and one system call may have."""
    objects = data_of(*[3072] * 9000)
    node = node_of(stack, objects)
    source = source_of(stack, node)
    check_read(source, objects, np.arange(9000, dtype=np.int32))
    check_read(source, objects, np.random.default_rng(0).permutation(9000).astype(np.int32))
    small = data_of(*[1] * 9000)
    node = node_of(stack, small)
    check_read(source_of(stack, node), small, np.arange(9000, dtype=np.int32))
    assert max(len(asked.ids) for asked in node.asked) == wire.MAX_OBJECTS


def test_one_buffer_holds_all_objects(stack: ExitStack) -> None:
    objects = data_of(100, 0, 300)
    source = source_of(stack, node_of(stack, objects))
    buffer, ids = bytearray(400), np.array([2, 1, 0], np.int32)
    length = np.array([300, 0, 100])
    read = source.read_parts(ids, length, parts_in(memoryview(buffer), length))
    assert read.nbytes.tolist() == [300, 0, 100]
    assert bytes(buffer) == (objects[2] or b"") + (objects[0] or b"")


def test_an_object_of_another_length_is_reported_and_not_stored(stack: ExitStack) -> None:
    objects = data_of(1000, 3_000_000, 1000, 0, 1000)
    source = source_of(stack, node_of(stack, objects))
    length = np.array([1000, 5, 999, 4, 1000])
    parts = [[memoryview(bytearray(n))] for n in length.tolist()]
    read = source.read_parts(np.arange(5, dtype=np.int32), length, parts)
    assert read.nbytes.tolist() == [1000, 3_000_000, 1000, 0, 1000]
    assert [bytes(parts[i][0]) == objects[i] for i in (0, 4)] == [True, True]
    assert not any(any(parts[i][0]) for i in (1, 2, 3))


def test_objects_of_unknown_length_come_whole(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more than fit into one answer."""
    monkeypatch.setattr(wire, "ANSWER_NBYTES", 1 << 20)
    objects = [*data_of(700_000, 0, 700_000, 3_000_000, 5), None]
    source = source_of(stack, node_of(stack, objects))
    found = source.read_whole(np.arange(6, dtype=np.int32))
    assert found == [data if data is None else (data, i + 7) for i, data in enumerate(objects)]


def test_threads_read_at_once(stack: ExitStack) -> None:
    objects = data_of(*[20_000] * 300)
    node = node_of(stack, objects)
    source = source_of(stack, node)
    wrong: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(4):
                check_read(source, objects, rng.permutation(300).astype(np.int32))
        except BaseException as e:  # noqa: BLE001
            wrong.append(e)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {asked.peer for asked in node.asked} == {"reader"}


# --- a peer that fails ------------------------------------------------------------------------


class Proxy:
    """Forwards one connection at a time to a server; `limit` bytes of its answers, then `then`.

    "flip": changes one bit of the next byte, and forwards the rest as it is.
    """

    def __init__(self, target: tuple[str, int], limit: int, then: str) -> None:
        self._target, self._limit, self._then = target, limit, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.said = b""  # by clients
        self.heard = b""  # by them
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
        with suppress(OSError):  # also where the client has reset its connection
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


@pytest.mark.parametrize("then", ["close", "stall", "garbage"])
@pytest.mark.parametrize("limit", [10, 150, 400, 300_000])
def test_a_peer_that_fails_costs_only_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: int, then: str
) -> None:
    """In the handshake, an answer or a payload: what did not come is -1, and the peer is lost."""
    for module, name in (link, "_STALL_S"), (peer_source, "_ANSWER_S"), (link, "_CONNECT_S"):
        monkeypatch.setattr(module, name, 0.3)
    objects = data_of(1_000_000, 1_500_000, 1_000_000)
    node = node_of(stack, objects)
    proxy = Proxy(node.server.address, limit, then)
    stack.callback(proxy.close)
    lost: list[int] = []
    source = PeerSource(proxy.address, "node", "data", WHO, wait_s=0.1, lost=lambda: lost.append(1))
    stack.callback(source.close)
    length = np.array([len(data or b"") for data in objects])
    parts = [[memoryview(bytearray(n))] for n in length.tolist()]
    read = source.read_parts(np.arange(3, dtype=np.int32), length, parts)
    if then != "garbage" or limit < 400:  # a payload has no MAC
        assert read.nbytes.tolist() == [-1, -1, -1]
    assert -1 in read.nbytes
    assert lost == [1]
    assert proxy.connections == 1
    read = source.read_parts(np.arange(3, dtype=np.int32), length, parts)  # not asked at all
    assert read.nbytes.tolist() == [-1, -1, -1]
    assert source.read_whole(np.arange(3, dtype=np.int32)) == [None] * 3
    assert (lost, proxy.connections) == ([1], 1)


@pytest.mark.parametrize("encrypt", [False, True])
def test_who_records_the_wire_sees_payload_only_where_it_is_not_encrypted(
    stack: ExitStack, encrypt: bool
) -> None:
    objects = data_of(1000, 300_000, 5)
    node = node_of(stack, objects, encrypt=encrypt)
    proxy = Proxy(node.server.address, 1 << 30, "close")
    stack.callback(proxy.close)
    source = PeerSource(proxy.address, "node", "data", node.credentials)
    check_read(source, objects, np.arange(3, dtype=np.int32))
    source.close()
    pieces = [data[a : a + 16] for data in objects if data for a in range(0, len(data) - 15, 999)]
    seen = sum(piece in proxy.heard for piece in pieces)
    assert seen == (0 if encrypt else len(pieces))


@pytest.mark.parametrize("at", [400, 500, 1500, 200_000, 262_700, 500_000])
def test_a_bit_that_flips_on_the_way_never_becomes_a_wrong_byte(stack: ExitStack, at: int) -> None:
    """In an answer, its payload or between two records: what is not vouched for is not there."""
    objects = data_of(100, 200_000, 300_000, 200_000)
    node = node_of(stack, objects, encrypt=True)
    proxy = Proxy(node.server.address, at, "flip")
    stack.callback(proxy.close)
    ids = np.arange(4, dtype=np.int32)
    length = np.array([len(data or b"") for data in objects])
    for whole in False, True:
        source = PeerSource(proxy.address, "node", "data", SECRET)
        stack.callback(source.close)
        if whole:
            found = [one and one[0] for one in source.read_whole(ids)]
        else:
            parts = [bytearray(n) for n in length.tolist()]
            read = source.read_parts(ids, length, [[memoryview(part)] for part in parts])
            there = zip(parts, read.nbytes.tolist(), strict=True)
            found = [bytes(part) if nbytes >= 0 else None for part, nbytes in there]
        assert None in found
        assert all(got in (None, data) for got, data in zip(found, objects, strict=True))


@pytest.mark.parametrize("encrypt", [False, True])
def test_of_two_nodes_that_disagree_on_encryption_none_gets_anything(
    stack: ExitStack, encrypt: bool
) -> None:
    pytest.importorskip("cryptography")
    node = node_of(stack, data_of(100), encrypt=encrypt)
    with pytest.raises(MalformedError, match=r"cluster\.encrypt"):
        node.link(WHO._replace(encrypt=not encrypt))
    assert not node.asked


def test_who_does_not_encrypt_is_sent_nothing_whatever_it_says(stack: ExitStack) -> None:
    """A daemon of ours does not ask; this client with the key does."""
    node = node_of(stack, data_of(100), encrypt=True)
    sock = stack.enter_context(socket.create_connection(node.server.address))

    def hear(kind: type[Message]) -> Any:
        header = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        rest = sock.recv(wire.following(header, kind), socket.MSG_WAITALL)
        return wire.unpack(header, rest, kind)[0]

    greeting = wire.Greeting(wire.PEER_PROTOCOL, "cluster", "reader", bytes(wire.NONCE_NBYTES))
    sock.sendall(wire.pack(greeting))
    session = wire.PeerSession(KEY, greeting, hear(wire.Challenge))
    sock.sendall(wire.pack(session.proof("client")))
    assert session.proves("server", hear(wire.Proof))
    ids = np.zeros(1, "<i4")
    sock.sendall(wire.pack(wire.PeerRequest(1, "data", 1.0), [ids], session.requests))
    assert sock.recv(1) == b""
    assert not node.asked


def test_a_peer_that_comes_back_is_asked_again(stack: ExitStack) -> None:
    objects = data_of(1000)
    ids, length = np.zeros(1, np.int32), np.array([1000])
    node = Node(objects)
    source = source_of(stack, node)
    check_read(source, objects, ids)
    port = node.server.address[1]
    node.close()
    buffer = memoryview(bytearray(1000))
    assert source.read_parts(ids, length, [[buffer]]).nbytes.tolist() == [-1]  # refused
    until_s = source.lost_until
    assert source.read_parts(ids, length, [[buffer]]).nbytes.tolist() == [-1]
    assert source.lost_until == until_s
    node = Node(objects, port=port)
    stack.callback(node.close)
    source.lost_until = 0.0  # the time has passed
    check_read(source, objects, ids)


def test_a_kept_connection_that_died_is_replaced_at_once(stack: ExitStack) -> None:
    objects = data_of(1000)
    node = Node(objects)
    source = source_of(stack, node)
    check_read(source, objects, np.zeros(1, np.int32))
    port = node.server.address[1]
    node.close()
    node = Node(objects, port=port)
    stack.callback(node.close)
    check_read(source, objects, np.zeros(1, np.int32))
    assert source.lost_until == 0.0


def test_a_source_closed_while_it_waits_returns(stack: ExitStack) -> None:
    node = node_of(stack, data_of(1000))
    node.held = []
    source = source_of(stack, node, wait_s=60.0)
    results: list[list[int]] = []

    def read() -> None:
        buffer = memoryview(bytearray(1000))
        got = source.read_parts(np.zeros(1, np.int32), np.array([1000]), [[buffer]])
        results.append(got.nbytes.tolist())

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: bool(node.held), what="a request")
    source.close()
    thread.join()
    assert results == [[-1]]
    assert source.read_whole(np.zeros(1, np.int32)) == [None]
    assert source.lost_until == 0.0


# --- a reader that fails ----------------------------------------------------------------------


def blocked(node: Node) -> Callable[[], bool]:
    """Whether the server has a connection that takes no more bytes."""
    return lambda: node.server.status.blocked > 0


def large(node: Node, link: PeerLink, *, times: int = 1) -> None:
    """Ask for more than the kernel buffers of a connection that nobody reads from."""
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    for number in range(times):
        link.ask(number, "data", np.zeros(1, np.int32), 10.0)
    until(blocked(node), what="a blocked connection")


def test_a_reader_that_leaves_while_it_is_sent_to_is_served(stack: ExitStack) -> None:
    """As far as the loop is concerned: it unpins."""
    node = node_of(stack, data_of(10 << 20))
    link = node.link()
    large(node, link, times=3)
    until(lambda: sum(node.answered.values()) == 3, what="answers")  # what is unread, a reset drops
    assert sum(node.served.values()) == 0
    link.socket.close()
    until(lambda: sum(node.served.values()) == 3, what="served")
    until(lambda: node.server.status.peers == 0, what="no peer")


def test_close_ends_what_is_being_sent(stack: ExitStack) -> None:
    node = node_of(stack, data_of(10 << 20))
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link, times=3)
    until(lambda: sum(node.answered.values()) == 3, what="answers")
    node.server.close()
    assert node.served == node.answered
    node.server.serve(1, node.place, node.nbytes, node.nbytes)  # nothing happens
    assert node.served == node.answered


def test_a_request_whose_reader_left_is_served_nevertheless(stack: ExitStack) -> None:
    node = node_of(stack, data_of(1000))
    node.held = []
    link = node.link()
    link.ask(1, "data", np.zeros(1, np.int32), 10.0)
    until(lambda: bool(node.held), what="a request")
    link.socket.close()
    until(lambda: not node.server.status.connections, what="no connection")
    node.answer(node.held[0])
    until(lambda: sum(node.served.values()) == 1, what="served")


def test_a_reader_that_stopped_holds_nothing_and_delays_nobody(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_BLOCKED_S", 0.2)
    monkeypatch.setattr(connections, "_SLOWEST_BPS", 1e9)
    objects = [*data_of(10 << 20, 1000)]
    node = node_of(stack, objects)
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link)
    check_read(source_of(stack, node), objects, np.array([1], np.int32))
    until(lambda: sum(node.served.values()) == 2, what="served")


# --- order and credit -------------------------------------------------------------------------


def test_who_needs_it_first_gets_it_first(stack: ExitStack) -> None:
    """Of the answers that wait while another is being sent."""
    node = node_of(stack, data_of(10 << 20, 1000))
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link)
    for number, wait_s in (1, 9.0), (2, 3.0), (3, 6.0):
        link.ask(number, "data", np.ones(1, np.int32), wait_s)
    until(lambda: sum(node.answered.values()) == 4, what="answers")
    until(lambda: node.server.status.answers == 3, what="answers that wait")
    order = []
    for _ in range(4):
        number, arrays = link.answer(soon())
        nbytes, _ = wire.answered(arrays, 1)
        link.drain(int(nbytes[0]))
        order.append(number)
    assert order == [0, 2, 3, 1]


@pytest.mark.parametrize("limit", ["_QUEUED_REQUESTS", "_QUEUED_NBYTES"])
def test_a_peer_without_credit_waits(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(connections, limit, 2)
    node = node_of(stack, data_of(10 << 20, 1000))
    link = node.link()
    stack.callback(link.socket.close)
    if limit == "_QUEUED_NBYTES":
        large(node, link)
    else:
        node.held = []
    for number in range(1, 20):
        link.ask(number, "data", np.ones(1, np.int32), 10.0)
    if node.held is not None:
        until(lambda: len(node.asked) == 2, what="two requests")
    until(lambda: node.server.status.unread == 1, what="requests that wait")
    assert len(node.asked) <= 2
    held, node.held = node.held, None
    for asked in held or []:
        node.answer(asked)
    for _ in range(19 + (held is None)):
        number, arrays = link.answer(soon())
        link.drain(int(wire.answered(arrays, 1)[0][0]))
    assert len(node.asked) >= 19


# --- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials("reader", "cluster", KEY[::-1]),
        Credentials("reader", "another", KEY),
        Credentials("reader", "removed", KEY),
        Credentials("reader", "renewed", KEY),
    ],
)
def test_without_the_key_there_is_nothing(stack: ExitStack, credentials: Credentials) -> None:
    """Wrong, of another cluster, of one that was removed, or old."""
    node = node_of(stack, data_of(1000))
    for name in "removed", "renewed":
        node.server.admit(name, KEY)
    node.server.expel("removed")
    node.server.admit("renewed", KEY[::-1])
    with pytest.raises(ConnectionError):
        node.link(credentials)
    source = PeerSource(node.server.address, "node", "data", credentials)
    assert source.read_whole(np.zeros(1, np.int32)) == [None]
    source.close()
    assert node.asked == []


def test_a_server_without_the_key_is_told_nothing(stack: ExitStack) -> None:
    node = node_of(stack, data_of(1000))
    source = PeerSource(node.server.address, "another node", "data", WHO)
    stack.callback(source.close)
    assert source.read_whole(np.zeros(1, np.int32)) == [None]
    assert node.asked == []


@pytest.mark.parametrize("change", ["expel", "admit"])
def test_a_removed_key_ends_its_connections(stack: ExitStack, change: str) -> None:
    node = node_of(stack, data_of(1000))
    node.server.admit("other", KEY)
    gone, stays = node.link(), node.link(Credentials("reader", "other", KEY))
    stack.callback(gone.socket.close)
    stack.callback(stays.socket.close)
    if change == "expel":
        node.server.expel("cluster")
    else:
        node.server.admit("cluster", KEY[::-1])
    assert gone.socket.recv(1) == b""
    stays.ask(1, "data", np.zeros(1, np.int32), 1.0)
    assert stays.answer(soon())[0] == 1


def test_a_recorded_session_gets_a_challenge_and_nothing_else(stack: ExitStack) -> None:
    objects = data_of(1000)
    node = node_of(stack, objects)
    proxy = Proxy(node.server.address, 1 << 30, "close")
    stack.callback(proxy.close)
    with ExitStack() as recorded:
        source = PeerSource(proxy.address, "node", "data", WHO)
        recorded.callback(source.close)
        check_read(source, objects, np.zeros(1, np.int32))
    asked = len(node.asked)
    with socket.create_connection(node.server.address) as replay:
        replay.sendall(proxy.said)
        said = b""
        with suppress(ConnectionError):
            while data := replay.recv(1 << 16):
                said += data
    header = said[: wire.HEADER.size]
    rest = said[wire.HEADER.size :]
    if said:  # the server may have ended the connection before all of it arrived
        assert len(rest) == wire.following(header, wire.Challenge)
    assert len(node.asked) == asked


@pytest.mark.parametrize("seed", range(20))
def test_garbage_costs_its_sender_the_connection(stack: ExitStack, seed: int) -> None:
    objects = data_of(1000)
    node = node_of(stack, objects)
    rng = np.random.default_rng(seed)
    friend = node.link()
    with socket.create_connection(node.server.address) as stranger, suppress(OSError):
        stranger.sendall(rng.bytes(int(rng.integers(24, 100_000))))
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    with suppress(OSError):
        friend.socket.sendall(rng.bytes(int(rng.integers(24, 100_000))))
        friend.socket.shutdown(socket.SHUT_WR)
        while friend.socket.recv(1 << 16):
            pass
    friend.socket.close()
    assert node.asked == []
    check_read(source_of(stack, node), objects, np.zeros(1, np.int32))


def test_thousands_of_half_open_connections_keep_nobody_out(stack: ExitStack) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    objects = data_of(1000)
    node = node_of(stack, objects)
    source = source_of(stack, node)
    for i in range(min(2000, soft - 300)):
        stack.enter_context(socket.create_connection(node.server.address))
        if i % 500 == 0:
            fresh = node.link()
            fresh.socket.close()
            check_read(source, objects, np.zeros(1, np.int32))
    assert node.server.status.unauthenticated <= server._UNAUTHENTICATED
    check_read(source_of(stack, node), objects, np.zeros(1, np.int32))


def test_a_stranger_that_says_nothing_is_sent_away(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.1)
    node = node_of(stack, data_of(1))
    with socket.create_connection(node.server.address) as stranger:
        assert stranger.recv(1) == b""
    assert node.server.refused == 1
