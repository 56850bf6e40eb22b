"""Objects from one arena to another over TCP: whole, in order, and within credit."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from peer_node import SIZES, check_read, data_of, large, node_of, soon, source_of

from creel.cache.storage.reads import parts_in
from creel.daemon.peers import connections, link, wire
from kit import until

pytestmark = pytest.mark.usefixtures("clean")


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
    """A thread that is woken for many bytes at once must not sleep if fewer are to come."""
    monkeypatch.setattr(link, "STALL_S", 1000.0)
    wake = link.WAKE_NBYTES
    objects = data_of(wake + beyond, 2 * wake + beyond, 100, 3 * wake + beyond, 10, 9 * wake)
    source = source_of(stack, node_of(stack, objects))
    check_read(source, objects, np.arange(len(objects), dtype=np.int32))
    for i in range(len(objects)):
        check_read(source, objects, np.array([i], np.int32))


def test_many_records_come_in_few_system_calls_and_large_requests(stack: ExitStack) -> None:
    """There are more objects than fit into one request, one answer and one system call."""
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
    objects_read = source.read_whole(np.arange(6, dtype=np.int32))
    assert [whole and whole.data for whole in objects_read] == objects
    assert [whole.version for whole in objects_read if whole] == [7, 8, 9, 10, 11]
    assert [whole.asked > 0 for whole in objects_read if whole] == [False, True, False, True, False]


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
    assert set(node.server.accounts) == {("cluster", "reader")}


def test_the_peer_that_needs_it_first_gets_it_first(stack: ExitStack) -> None:
    """Of the answers that wait while another one is being sent."""
    node = node_of(stack, data_of(10 << 20, 1000))
    link = node.link()
    stack.callback(link.socket.close)
    large(node, link)
    for number, wait_s in (1, 9.0), (2, 3.0), (3, 6.0):
        link.ask(number, "data", np.ones(1, np.int32), wait_s)
    until(lambda: sum(node.answered.values()) == 4, event="answers")
    until(
        lambda: sum(len(connection.answers) for connection in node.connections) == 3,
        event="waiting answers",
    )
    order = []
    for _ in range(4):
        number, arrays = link.answer(soon())
        nbytes, *_ = wire.answered(arrays, 1)
        link.drain(int(nbytes[0]))
        order.append(number)
    assert order == [0, 2, 3, 1]


@pytest.mark.parametrize("limit", ["QUEUED_REQUESTS", "QUEUED_NBYTES"])
def test_a_peer_without_credit_waits(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(connections, limit, 2)
    node = node_of(stack, data_of(10 << 20, 1000))
    link = node.link()
    stack.callback(link.socket.close)
    if limit == "QUEUED_NBYTES":
        large(node, link)
    else:
        node.held = []
    for number in range(1, 20):
        link.ask(number, "data", np.ones(1, np.int32), 10.0)
    if node.held is not None:
        until(lambda: len(node.asked) == 2, event="two requests")
    until(
        lambda: any(connection.inbox for connection in node.connections), event="requests that wait"
    )
    assert len(node.asked) <= 2
    held, node.held = node.held, None
    for asked in held or []:
        node.answer(asked)
    for _ in range(19 + (held is None)):
        number, arrays = link.answer(soon())
        link.drain(int(wire.answered(arrays, 1)[0][0]))
    assert len(node.asked) >= 19
