"""A node performs the core's actions in order, and survives a system without free threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from creel.cache.memory.shared_words import (
    DONE,
    HEARTBEAT,
    KNOWN,
    READY,
    REVOKED,
    WANTED,
    SharedWords,
)
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.config import Config
from creel.daemon.core.events import (
    SOURCE,
    DatasetGrew,
    EpochDealt,
    EpochFollowed,
    Publish,
    SamplesTold,
    Tick,
)
from creel.daemon.service import node as node_module
from creel.daemon.service.memory import restart_memory
from creel.daemon.service.node import Node
from creel.daemon.service.registry import DatasetRecord
from creel.daemon.service.sockets import commands
from creel.messages import Command, Deal, DealtReplays, DealtSamples, Extend, Open, Truncate
from creel.policies.cluster.job_order import JobOrder, SampleObjects
from creel.settings import MemorySettings
from creel.system import limits
from kit import cluster_view, until

pytestmark = pytest.mark.timeout(120)


class WithoutSockets:
    """A loop that nobody runs: `call_soon` gets its calls."""

    request_address, clients = "", 0

    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon

    def call_soon(self, call: Callable[[], None]) -> None:
        self._call_soon(call)

    def send(self, client: bytes, message: object) -> None: ...

    def stop(self, now: bool, why: str) -> None: ...

    def pids(self) -> dict[str, int]:
        return {}


def node_of(call_soon: Callable[[Callable[[], None]], None], *, returns: bool = False) -> Node:
    """Return a node without sockets; `call_soon` gets the calls for its loop."""
    config = Config(memory=MemorySettings(budget="1MiB"))
    return Node(config, WithoutSockets(call_soon), embedded=True, returns=returns)


@pytest.mark.parametrize("draining", [True, False])
def test_a_node_that_drains_leaves_all_bytes_where_they_lie(*, draining: bool) -> None:
    """READY stays for clients that hang up, as their readers may still be copying."""
    node = node_of(lambda job: job())
    manifest = Manifest.of_files(["/a", "/b"])
    dataset = DatasetRecord.create(manifest, Source(manifest), 0, 0)
    node.registry.add(dataset)
    offset = dataset.table.offset
    if draining:
        node.shell.state = "draining"
    with mock.patch.object(node.core, "handle") as handle:
        handle.return_value = [Publish(dataset.key, np.array([0], np.int32), np.array([200]))]
        node.shell.handle(Tick())
    # The core is not asked: an action that is not executed would make its tables wrong.
    assert handle.called is not draining
    assert (offset[:].tolist() == [-1, -1]) is draining
    node.close()


@pytest.mark.parametrize("returns", [True, False])
def test_a_session_that_closes_while_draining_is_ready_only_if_no_daemon_follows(
    *, returns: bool
) -> None:
    """The memory of a service goes to the next daemon, which moves bytes below such readers."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = node_of(calls.put, returns=returns)
    manifest = Manifest.of_files(["/a"])
    node.datasets.register("token", lambda: manifest, [], lambda _: None)
    while manifest.key not in node.registry.datasets:
        calls.get(timeout=60)()
    session = node.sessions.open("token", Open(manifest.key, "", 0, 1, "never"))
    session.set_ready(3, 0, ())
    theirs = SharedWords(session.words_fd)
    before = theirs[REVOKED]
    node.shell.state = "draining"
    node.sessions.close(session)
    assert theirs[READY] == (0 if returns else 3)
    assert (theirs[REVOKED] > before) is returns
    theirs.close()
    node.close()


def test_kept_memory_was_sized_by_the_settings_in_effect_not_by_those_read_since() -> None:
    auto = MemorySettings(budget="auto")
    for left_by, same in ((MemorySettings(budget="1MiB"), False), (auto, True)):
        with mock.patch.object(node_module, "memory_budget", return_value=1 << 20):
            node = Node(Config(memory=left_by), WithoutSockets(print), embedded=False)
        node.config = Config(memory=auto)
        index = node.keep()
        assert index is not None
        left = {restart_memory.ARENA: node.arena.descriptor, restart_memory.INDEX: index}
        assert (restart_memory.take(left, auto, limits.memory().total) is not None) is same
        node.close()


def test_a_system_that_gives_no_threads_does_not_end_the_daemon(tmp_path: Path) -> None:
    """Limits on processes count threads, too. Readers wait for objects that are not fetched."""
    (tmp_path / "x").write_bytes(b"x" * 3000)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = node_of(calls.put)
    answers: list[Any] = []
    refused = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=refused):
        files = [str(tmp_path / name) for name in ("x", "another, which fills the memory")]
        manifest = Manifest.of_files(files, lengths=[3000, 1 << 20])
        node.datasets.register("token", lambda: manifest, [], answers.append)
        while not answers:
            calls.get_nowait()()
        session = node.sessions.open("token", Open(manifest.key, "", 0, 1, "never"))
        node.sessions.extended(
            session, Extend("token", 1, 0, 0), [np.zeros(1, np.int32), np.ones(1, int)]
        )
        node.tick()
        calls.get_nowait()()
        node.shell.settle()
    assert (node.fetcher.pending, session.ready) == (0, 1)
    node.close()


def test_a_plan_that_cannot_be_truncated_costs_its_session_alone() -> None:
    """The request socket drops a client whose message raises, with all its sessions."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = node_of(calls.put)
    manifest = Manifest.of_files(["/a"])
    node.datasets.register("token", lambda: manifest, [], lambda _: None)
    while manifest.key not in node.registry.datasets:
        calls.get(timeout=60)()
    bad, other = (
        node.sessions.open("token", Open(manifest.key, job, 0, 1, "never"))
        for job in ("bad", "other")
    )
    with mock.patch.object(node.core, "handle", side_effect=MemoryError):
        node.sessions.truncated(bad, Truncate("token", bad.id, 0))
    assert list(node.registry.sessions) == [other.id]
    node.close()


def test_a_clients_words_may_say_anything() -> None:
    """They count as far as they fit the plan; the core hears of them while they would move it."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = node_of(calls.put)
    manifest = Manifest.of_files(["/a"], lengths=[100])
    node.datasets.register("token", lambda: manifest, [], lambda _: None)
    while manifest.key not in node.registry.datasets:
        calls.get(timeout=60)()
    session = node.sessions.open("token", Open(manifest.key, "", 0, 1, "never"))
    session.words[DONE], session.words[WANTED] = 1 << 62, -7
    assert not node.sessions.poll_words(), "nothing is planned"
    for step in range(2):
        plan = [np.zeros(1, np.int32), np.ones(1, int)]
        node.sessions.extended(session, Extend("token", session.id, 0, step), plan)
        assert node.core.planned(session.id) == (step + 1, step + 1)
        assert session.words[KNOWN] == step + 1
    session.words[DONE] = -1
    assert not node.sessions.poll_words(), "no step is undone"
    node.sessions.extended(session, Extend("token", session.id, 0, 2), plan)
    session.words[DONE] = 3
    node.shell.state = "draining"
    assert not node.sessions.poll_words()
    node.shell.state = "serving"
    assert node.sessions.poll_words()
    assert not node.sessions.poll_words()
    node.close()


@pytest.mark.parametrize("command", ["datasets", "stats", "status"])
def test_an_answer_looks_at_the_core_once_however_many_datasets_there_are(command: str) -> None:
    """In the loop's thread: one look per dataset would take seconds for 1024 of them."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    node = node_of(calls.put)
    for name in "abc":
        node.datasets.register(name, partial(Manifest.of_files, [f"/{name}"]), [], lambda _: None)
    while len(node.registry.datasets) < 3:
        calls.get(timeout=60)()
    with mock.patch.object(node.core, "snapshot", wraps=node.core.snapshot) as look:
        answer = commands.answer(node, Command("token", 1, command))
    assert look.call_count == 1
    assert command != "datasets" or [row["objects"] for row in answer["datasets"]] == [1, 1, 1]
    node.close()


def test_the_heart_beats_between_events_of_one_turn() -> None:
    """Many plans, or many leaving clients, in one turn must not make a daemon look lost."""
    node = node_of(lambda job: job())
    manifest = Manifest.of_files(["/a"])
    answers: list[object] = []
    node.datasets.register("token", lambda: manifest, [], answers.append)
    until(lambda: bool(answers), event="it is registered")
    session = node.sessions.open("token", Open(manifest.key, "", 0, 1, "never"))
    slow = [2.0 * i for i in range(1 << 20, (1 << 20) + 100)]  # each event takes two seconds
    with mock.patch("creel.daemon.service.core_shell.time.monotonic", side_effect=slow):
        for _ in range(3):
            session.words[HEARTBEAT] = 0
            node.shell.handle(Tick())
            assert session.words[HEARTBEAT] > 0
    node.close()


def test_a_part_of_a_dataset_is_dealt_once_all_its_samples_are_known() -> None:
    """Until then the nodes ask each other without a plan."""
    node = node_of(lambda job: job())
    manifest = Manifest.of_files([f"/{k}" for k in range(10)])
    node.registry.add(DatasetRecord.create(manifest, Source(manifest), 0, 0))
    session = node.registry.open("t", Open(manifest.key, "job", 0, 2, "never"))
    view = cluster_view([SOURCE, 7], 1 << 20)
    deal = Deal("t", session.id, 0, "c", 5, 2, 3, 1, seed=3, object_of=True)
    events: list[Any] = []
    with (
        mock.patch.object(node.shell, "handle", events.append),
        mock.patch.object(node.clusters, "view", return_value=view),
    ):
        node.sessions.dealt(session, deal)
        for first, ids in ((0, [9, 8, 7]), (3, [6, 5])):
            assert isinstance(events[-1], EpochFollowed)
            message = DealtSamples("t", session.id, 5, first)
            node.sessions.sampled(session, message, np.array(ids, np.int32))
            node.sessions.dealt(session, deal)
    (dealt,) = [e for e in events if isinstance(e, EpochDealt)]
    assert dealt is events[-1]
    expected = JobOrder(5, 2, 3, 1, 3).permutation()
    assert dealt.order.permutation().tolist() == [9 - i for i in expected.tolist()]
    assert session.object_of is not None
    assert session.object_of.digest == SampleObjects(session.samples).digest
    used = node.quota.used()
    again = node.registry.open("t", Open(manifest.key, "job", 1, 2, "never"))
    node.sessions.sampled(
        again, DealtSamples("t", again.id, 5, 0), np.array([9, 8, 7, 6, 5], np.int32)
    )
    assert again.object_of is session.object_of
    assert node.quota.used() == used >= session.samples.nbytes == 20
    for record in (session, again):
        node.sessions.sampled(
            record, DealtSamples("t", record.id, 5, 0), np.arange(5, dtype=np.int32)
        )
    assert node.quota.used() == used + 20  # the order that was dealt refers to the first
    events.clear()
    del dealt
    assert node.quota.used() == used
    node.close()


def test_a_job_that_rehearses_is_dealt_with_the_rows_of_its_memory() -> None:
    """Three samples and two rows; impossible numbers are no order at all."""
    node = node_of(lambda job: job())
    manifest = Manifest.of_files([f"/{k}" for k in range(10)])
    node.registry.add(DatasetRecord.create(manifest, Source(manifest), 0, 0))
    session = node.registry.open("t", Open(manifest.key, "job", 0, 1, "never"))
    samples = np.array([4, 5, 6, 0, 9], np.int32)
    deal = Deal("t", session.id, 0, "c", 3, 1, 3, 2, -1, object_of=True)
    events: list[Any] = []
    with (
        mock.patch.object(node.shell, "handle", events.append),
        mock.patch.object(node.clusters, "view", return_value=cluster_view([SOURCE], 1 << 20)),
    ):
        for first, rehearsed in ((0, False), (0, True)):
            message = DealtSamples("t", session.id, 5, first, rehearsed)
            node.sessions.sampled(session, message, samples)
        for kept in (2, 3):
            replays = DealtReplays(kept, each=2, seed=1, first_step=7)
            node.sessions.dealt(session, msgspec.structs.replace(deal, replays=replays))
    samples_event, dealt = events
    assert isinstance(samples_event, SamplesTold)
    assert samples_event.samples.objects.tolist() == samples.tolist()
    assert isinstance(dealt, EpochDealt)
    assert dealt.order.ends.tolist() == [4, 7]
    assert [ids.tolist() for ids in dealt.order.by_rank([0])] == [[4, 5, 0, 9, 6, 0, 9]]
    node.close()


def test_objects_of_earlier_tasks_are_taken_over_once_no_rank_reads_them() -> None:
    """Rank 0 is in the second task while rank 1 ends the first; only jobs that rehearse take it."""
    node = node_of(lambda job: job())
    first = Manifest.of_files(["/a", "/b"])
    second = Manifest.concat([first, Manifest.of_files(["/c"])])
    for manifest, begins_with in ((first, ()), (second, (first.key,))):
        record = DatasetRecord.create(manifest, Source(manifest), 0, 0)
        record.begins_with = begins_with
        node.registry.add(record)
    events: list[Any] = []

    def grown() -> list[tuple[str, str]]:
        return [(e.dataset, e.old) for e in events if isinstance(e, DatasetGrew)]

    with (
        mock.patch.object(node.shell, "handle", events.append),
        mock.patch.object(node.core, "busy", return_value=False),
    ):
        ending = node.registry.open("t", Open(first.key, "job", 1, 2, "never"))
        session = node.registry.open("t", Open(second.key, "job", 0, 2, "never"))
        message = DealtSamples("t", session.id, 3, 0, rehearsed=True)
        node.sessions.sampled(session, message, np.array([2, 0, 1], np.int32))
        assert not grown()
        node.sessions.close(ending)
        node.tick()
        assert grown() == [(second.key, first.key)]
        node.sessions.close(node.registry.open("t", Open(first.key, "eval", 0, 1, "never")))
        assert grown() == [(second.key, first.key)], "an evaluation keeps what it has read again"
        once_more = node.registry.open("t", Open(first.key, "job", 0, 1, "never"))
        message = DealtSamples("t", once_more.id, 2, 0, rehearsed=True)
        node.sessions.sampled(once_more, message, np.array([1, 0], np.int32))
        node.sessions.close(once_more)
        assert grown() == 2 * [(second.key, first.key)]
    node.close()
