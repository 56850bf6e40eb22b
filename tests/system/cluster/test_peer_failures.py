"""Peers and readers that fail in the middle of a transfer cost time, nothing else."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from peer_node import WHO, Node, Proxy, check_read, data_of, large, node_of, source_of

from creel.daemon.core.events import ServeObjects
from creel.daemon.peers import connections, link, peer_source
from creel.daemon.peers.peer_source import PeerSource
from kit import until

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize("then", ["close", "stall", "garbage"])
@pytest.mark.parametrize("limit", [10, 150, 400, 300_000])
def test_a_peer_that_fails_costs_only_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: int, then: str
) -> None:
    """In handshake, answer or payload: missing objects are -1, and the peer is lost."""
    for module, name in (link, "STALL_S"), (peer_source, "ANSWER_S"), (link, "CONNECT_S"):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(peer_source, "WAIT_S", 0.1)
    objects = data_of(1_000_000, 1_500_000, 1_000_000)
    node = node_of(stack, objects)
    proxy = Proxy(node.server.address, limit, then)
    stack.callback(proxy.close)
    source = PeerSource(proxy.address, "node", "data", WHO)
    stack.callback(source.close)
    length = np.array([len(data or b"") for data in objects])
    parts = [[memoryview(bytearray(n))] for n in length.tolist()]
    read = source.read_parts(np.arange(3, dtype=np.int32), length, parts)
    if then != "garbage" or limit < 400:  # a payload has no MAC
        assert read.nbytes.tolist() == [-1, -1, -1]
    assert -1 in read.nbytes
    until_s = source.lost_until
    assert until_s > 0.0
    assert proxy.connections == 1
    read = source.read_parts(np.arange(3, dtype=np.int32), length, parts)  # not asked at all
    assert read.nbytes.tolist() == [-1, -1, -1]
    assert source.read_whole(np.arange(3, dtype=np.int32)) == [None] * 3
    assert (source.lost_until, proxy.connections) == (until_s, 1)


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
    source.lost_until = 0.0  # as if the time had passed
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


def test_a_source_closed_while_it_waits_returns(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_source, "WAIT_S", 60.0)
    node = node_of(stack, data_of(1000))
    node.held = []
    source = source_of(stack, node)
    results: list[list[int]] = []

    def read() -> None:
        buffer = memoryview(bytearray(1000))
        got = source.read_parts(np.zeros(1, np.int32), np.array([1000]), [[buffer]])
        results.append(got.nbytes.tolist())

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: bool(node.held), event="a request")
    source.close()
    thread.join()
    assert results == [[-1]]
    assert source.read_whole(np.zeros(1, np.int32)) == [None]
    assert source.lost_until == 0.0


def test_a_reader_that_leaves_while_it_is_sent_to_is_served(stack: ExitStack) -> None:
    """As far as the loop is concerned: it unpins the objects."""
    node = node_of(stack, data_of(10 << 20))
    link = node.link()
    large(node, link, times=3)
    until(
        lambda: sum(node.answered.values()) == 3, event="answers"
    )  # a reset drops unread requests
    assert sum(node.served.values()) == 0
    link.socket.close()
    until(lambda: sum(node.served.values()) == 3, event="served")
    until(lambda: not node.server.accounts, event="no peer")


def test_close_ends_what_is_being_sent(stack: ExitStack) -> None:
    node = node_of(stack, data_of(10 << 20))
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link, times=3)
    until(lambda: sum(node.answered.values()) == 3, event="answers")
    node.server.close()
    assert node.served == node.answered
    node.server.serve(
        ServeObjects(1, node.place, node.nbytes, node.nbytes, node.nbytes / 1)
    )  # no effect
    assert node.served == node.answered


def test_a_request_whose_reader_left_is_served_nevertheless(stack: ExitStack) -> None:
    node = node_of(stack, data_of(1000))
    node.held = []
    link = node.link()
    link.ask(1, "data", np.zeros(1, np.int32), 10.0)
    until(lambda: bool(node.held), event="a request")
    link.socket.close()
    until(lambda: not node.connections, event="no connection")
    node.answer(node.held[0])
    until(lambda: sum(node.served.values()) == 1, event="served")


def test_a_reader_that_stopped_holds_nothing_and_delays_nobody(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BLOCKED_S", 0.2)
    monkeypatch.setattr(connections, "SLOWEST_BPS", 1e9)
    objects = [*data_of(10 << 20, 1000)]
    node = node_of(stack, objects)
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link)
    check_read(source_of(stack, node), objects, np.array([1], np.int32))
    until(lambda: sum(node.served.values()) == 2, event="served")
