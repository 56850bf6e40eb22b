"""Without the key, with another one, or with a recording a client gets nothing from a node."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from peer_node import KEY, SECRET, WHO, Proxy, check_read, data_of, node_of, soon, source_of

from creel.daemon.peers import server, wire
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.wire import Credentials
from creel.errors import MalformedError
from creel.messages import Message

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_recorded_wire_shows_payload_only_where_it_is_not_encrypted(
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
    """In an answer, its payload or between two records: unauthenticated bytes do not count."""
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
            answers = [whole and whole.data for whole in source.read_whole(ids)]
        else:
            parts = [bytearray(n) for n in length.tolist()]
            read = source.read_parts(ids, length, [[memoryview(part)] for part in parts])
            there = zip(parts, read.nbytes.tolist(), strict=True)
            answers = [bytes(part) if nbytes >= 0 else None for part, nbytes in there]
        assert None in answers
        assert all(got in (None, data) for got, data in zip(answers, objects, strict=True))


@pytest.mark.parametrize("encrypt", [False, True])
def test_of_two_nodes_that_disagree_on_encryption_none_gets_anything(
    stack: ExitStack, encrypt: bool
) -> None:
    pytest.importorskip("cryptography")
    node = node_of(stack, data_of(100), encrypt=encrypt)
    with pytest.raises(MalformedError, match=r"cluster\.encrypt"):
        node.link(WHO._replace(encrypt=not encrypt))
    assert not node.asked


def test_a_peer_that_does_not_encrypt_is_sent_nothing_whatever_it_says(stack: ExitStack) -> None:
    """A daemon of creel does not ask; this client with the key does."""
    node = node_of(stack, data_of(100), encrypt=True)
    sock = stack.enter_context(socket.create_connection(node.server.address))

    def hear(kind: type[Message]) -> Any:
        header = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        body = sock.recv(wire.following(header, kind), socket.MSG_WAITALL)
        return wire.unpack(header, body, kind)[0]

    greeting = wire.Greeting(wire.PEER_PROTOCOL, "cluster", "reader", bytes(wire.NONCE_NBYTES))
    sock.sendall(wire.pack(greeting))
    session = wire.PeerSession(KEY, greeting, hear(wire.Challenge))
    sock.sendall(wire.pack(session.proof("client")))
    assert session.proves("server", hear(wire.Proof))
    ids = np.zeros(1, "<i4")
    sock.sendall(wire.pack(wire.PeerRequest(1, "data", 1.0), [ids], session.requests))
    assert sock.recv(1) == b""
    assert not node.asked


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials("reader", "cluster", KEY[::-1], encrypt=False),
        Credentials("reader", "another", KEY, encrypt=False),
        Credentials("reader", "removed", KEY, encrypt=False),
        Credentials("reader", "renewed", KEY, encrypt=False),
    ],
)
def test_without_the_key_there_is_nothing(stack: ExitStack, credentials: Credentials) -> None:
    """The key is wrong, of another cluster, of a removed one, or old."""
    node = node_of(stack, data_of(1000))
    for name in "removed", "renewed":
        node.server.admit(name, KEY, "node")
    node.server.expel("removed")
    node.server.admit("renewed", KEY[::-1], "node")
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
    node.server.admit("other", KEY, "node")
    gone, stays = node.link(), node.link(Credentials("reader", "other", KEY, encrypt=False))
    stack.callback(gone.socket.close)
    stack.callback(stays.socket.close)
    if change == "expel":
        node.server.expel("cluster")
    else:
        node.server.admit("cluster", KEY[::-1], "node")
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
    body = said[wire.HEADER.size :]
    if said:  # the server may have closed the connection before all bytes arrived
        assert len(body) == wire.following(header, wire.Challenge)
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
    assert (
        sum(connection.account is None for connection in node.connections)
        <= server.MAX_UNAUTHENTICATED
    )
    check_read(source_of(stack, node), objects, np.zeros(1, np.int32))


def test_a_stranger_that_says_nothing_is_sent_away(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.1)
    node = node_of(stack, data_of(1))
    with socket.create_connection(node.server.address) as stranger:
        assert stranger.recv(1) == b""
    assert not node.connections
