"""Datasets that take over the residents of one that they begin with: tasks in own folders."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import numpy as np
import pytest

from core_shell import CoreShell
from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage import manifest
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.stores.access import Access
from creel.daemon.core.events import (
    SOURCE,
    Action,
    CheckVersions,
    DatasetGrew,
    EpochDealt,
    Fetched,
    FetchObjects,
    PeerAsked,
    Progressed,
    SamplesTold,
    ServeObjects,
    Tick,
    Unregistered,
)
from creel.daemon.core.versions import Versions
from creel.errors import IllegalEventError
from creel.messages import Begin, Close
from creel.policies.cluster.job_order import JobOrder, JobReplays, SampleObjects
from creel.policies.rehearsal.replay_passes import Passes
from kit import cluster_view, seeds

A = TypeVar("A", bound=Action)


def add(shell: CoreShell, name: str, length: np.ndarray, begins_with: str = "") -> Versions:
    """Add a dataset that may begin with another one; return its versions."""
    versions = Versions(len(length))
    shell.add(name, length, versions, begins_with)
    return versions


def read(shell: CoreShell, session: int, name: str, ids: Any) -> list[int]:
    """Read objects one by one, without fetches ahead of the last; return those that are fetched."""
    shell.open(session, name)
    fetched: list[int] = []
    shell.tell(session, 0, np.asarray(ids, np.int32), np.arange(1, len(ids) + 1))
    while shell.waiting:
        action = shell.waiting.popleft()
        if isinstance(action, FetchObjects):
            fetched += action.ids.tolist()
        shell.fulfil(action)
    return sorted(fetched)


def lengths(kind: str, n: int, known: int) -> np.ndarray:
    """Return (n,) lengths: equal ones, or any, of which so many are known."""
    if kind == "records":
        return np.full(n, 10)
    out = np.arange(100, 100 + n)
    out[known:] = -1
    return out


@pytest.mark.parametrize("kind", ["records", "files"])
def test_a_dataset_takes_over_what_it_begins_with(kind: str) -> None:
    """Also the lengths and versions that were found; what it has itself stays as it is."""
    shell = CoreShell(1 << 16)
    old = add(shell, "a", lengths(kind, 8, 4))
    assert read(shell, 1, "a", [0, 2, 3, 5]) == [0, 2, 3, 5]
    shell.feed(Close(1))
    new = add(shell, "b", lengths(kind, 12, 4), "a")
    assert read(shell, 2, "b", [3, 9]) == [3, 9]
    mine, its = shell.offset["b"][3], shell.offset["a"][[0, 2, 5]].copy()
    shell.feed(DatasetGrew("b", "a"))
    assert shell.offset["b"][[0, 2, 3, 5]].tolist() == [its[0], its[1], mine, its[2]]
    assert (shell.offset["a"] == NOWHERE).all()
    assert new.version[[0, 2, 5]].tolist() == old.version[[0, 2, 5]].tolist()
    shell.core.check()
    shell.feed(Unregistered("a"))
    shell.core.check()
    assert read(shell, 3, "b", [0, 1, 2, 3, 5]) == [1]
    shell.core.check()


def test_objects_of_another_version_are_not_taken_over() -> None:
    shell = CoreShell(1 << 16)
    old = add(shell, "a", np.array([100, 101, 102]))
    read(shell, 1, "a", [0, 1, 2])
    shell.feed(Close(1))
    new = add(shell, "b", np.array([100, 101, 102, 103]), "a")
    new.version[1], new.seen[1] = old.version[1] + 1, 5
    new.version[2], new.seen[2] = old.version[2], 5
    shell.feed(DatasetGrew("b", "a"))
    shell.core.check()
    assert (shell.offset["b"] != NOWHERE).tolist() == [True, False, True, False]
    assert new.seen.tolist() == [old.seen[0], 5, 5, 0]


def test_a_check_that_the_old_dataset_asked_for_is_asked_for_anew() -> None:
    """Its answer never comes to the new one, whose reader would wait for it."""
    shell = CoreShell(1 << 16)
    lengths = np.array([100, 101, 102, 103, 104])
    add(shell, "a", lengths[:4])
    read(shell, 1, "a", [0, 1, 2, 3])
    shell.open(2, "a", recheck="epoch")
    shell.feed(Begin("", 2, 0))
    shell.feed(Close(1))
    add(shell, "b", lengths, "a")
    shell.open(3, "b", recheck="epoch")
    shell.feed(Begin("", 3, 0))
    shell.feed(Begin("", 2, 1))
    shell.tell(2, 1, np.arange(4, dtype=np.int32), np.array([2, 4]))
    assert any(isinstance(action, CheckVersions) for action in shell.waiting)
    shell.feed(Close(2))
    shell.feed(DatasetGrew("b", "a"))
    shell.tell(3, 0, np.arange(5, dtype=np.int32), np.array([2, 4, 5]))
    shell.settle()
    assert shell.ready[3].ready == 3


def test_the_length_of_what_is_on_its_way_is_the_one_that_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file has been rewritten since the old dataset read it."""
    shell = CoreShell(1 << 20)
    monkeypatch.setattr(shell, "nbytes_read", lambda fetch: np.full(len(fetch.ids), 100))
    add(shell, "a", np.full(4, -1))
    assert {*read(shell, 1, "a", [0, 1, 2, 3])} == {0, 1, 2, 3}
    shell.feed(Close(1))
    add(shell, "b", np.full(6, -1), "a")
    shell.open(2, "b")
    shell.tell(2, 0, np.array([0, 5], np.int32), np.array([1, 2]))
    assert any(isinstance(action, FetchObjects) for action in shell.waiting)
    shell.feed(DatasetGrew("b", "a"))
    shell.core.check()
    monkeypatch.setattr(shell, "nbytes_read", lambda fetch: np.full(len(fetch.ids), 177))
    shell.settle()
    shell.core.check()


def test_datasets_in_other_pieces_keep_what_they_have() -> None:
    shell = CoreShell(1 << 16)
    add(shell, "a", np.full(4, 10))
    read(shell, 1, "a", [0, 1])
    shell.feed(Close(1))
    add(shell, "b", np.array([10, 10, 10, 10, 11]), "a")
    shell.feed(DatasetGrew("b", "a"))
    shell.core.check()
    assert np.flatnonzero(shell.offset["a"] != NOWHERE).tolist() == [0, 1]


def test_a_dataset_with_readers_is_not_taken_over() -> None:
    shell = CoreShell(1 << 16)
    add(shell, "a", np.full(4, 10))
    add(shell, "b", np.full(5, 10), "a")
    shell.open(1, "a")
    with pytest.raises(IllegalEventError, match="in use"):
        shell.core.handle(DatasetGrew("b", "a"), 0.0)


def taken(shell: CoreShell, kind: type[A]) -> list[A]:
    """Take the actions of a kind that wait for an answer."""
    actions = [action for action in shell.waiting if isinstance(action, kind)]
    shell.waiting = deque(x for x in shell.waiting if not isinstance(x, kind))
    return actions


@pytest.mark.parametrize("hangs", [False, True])
def test_what_another_dataset_leaves_is_awaited_while_it_moves(hangs: bool) -> None:
    """By a reader until a tick, by a peer as long as it can, and by nobody after two seconds."""
    shell = CoreShell(1 << 16)
    add(shell, "a", np.full(6, 10))
    read(shell, 1, "a", [0, 1, 2])
    shell.open(2, "a")
    shell.tell(2, 0, np.array([3, 4], np.int32), np.array([2]))
    (coming,) = taken(shell, FetchObjects)
    shell.feed(Close(1))
    shell.feed(Close(2))
    add(shell, "b", np.full(9, 10), "a")
    shell.open(3, "b")
    shell.feed(DatasetGrew("b", "a"))
    shell.tell(3, 0, np.array([0, 3, 5, 8], np.int32), np.array([4]))
    shell.feed(Progressed(3, 0, 1))
    shell.feed(PeerAsked(1, "b", np.array([1, 3], np.int32), 1.0))
    read_now = [fetch.ids.tolist() for fetch in taken(shell, FetchObjects)]
    assert read_now == [[5, 8]]
    assert not taken(shell, ServeObjects)
    if hangs:
        shell.feed(Tick())
        assert [fetch.ids.tolist() for fetch in taken(shell, FetchObjects)] == [[0, 3]]
        shell.now += 1.1
        shell.feed(Tick())
        assert [answer.nbytes.tolist() for answer in taken(shell, ServeObjects)] == [[-1, -1]]
        shell.now += 1.0
        shell.tell(3, 0, np.array([2], np.int32), np.array([1]))
        assert [fetch.ids.tolist() for fetch in taken(shell, FetchObjects)] == [[2]]
    shell.feed(Fetched(coming.fetch, np.full(2, 10)))
    shell.core.check()
    assert not taken(shell, FetchObjects)
    assert (shell.offset["a"] == NOWHERE).all()
    if not hangs:
        assert [answer.nbytes.tolist() for answer in taken(shell, ServeObjects)] == [[10, 10]]
        assert (shell.offset["b"][:5] != NOWHERE).all()


def test_a_peer_that_begins_a_task_earlier_waits_once_for_its_dataset() -> None:
    """Where some dataset is rehearsed; others are asked for in vain at once."""
    view = cluster_view([SOURCE, 1, 2], 1 << 16)
    answers = []
    for rehearses in (False, True):
        shell = CoreShell(1 << 16)
        add(shell, "a", np.full(12, 10))
        if rehearses:
            shell.open(1, "a", world=3)
            shell.feed(SamplesTold(1, SampleObjects(np.arange(12, dtype=np.int32))))
            shell.feed(EpochDealt(1, 0, JobOrder(12, 3, 4, 2, 7), view))
        for request in range(3):
            shell.feed(PeerAsked(request, "b", np.array([0], np.int32), 1.0))
            answers.append([len(taken(shell, ServeObjects))])
            shell.now += 0.8
            shell.feed(Tick())
            answers[-1].append(len(taken(shell, ServeObjects)))
    assert answers[:3] == [[1, 0]] * 3
    assert answers[3:] == [[0, 0], [0, 2], [1, 0]]


def test_who_reads_what_first_is_known_whenever_a_dataset_takes_over_another() -> None:
    """All nodes must know the same, though not all take over before they are told of an epoch."""
    view = cluster_view([SOURCE, 1, 2], 1 << 16)
    ids = np.arange(24, dtype=np.int32)
    tasks = SampleObjects(ids[:12]), SampleObjects(np.append(ids[12:], ids[:4]))
    replays = JobReplays(Passes(4, 1, 3, 5), 0)
    orders = [JobOrder(12, 3, 4, 2, 7, object_of=tasks[0])]
    orders.append(orders[0]._replace(object_of=tasks[1], replays=replays))
    digests = []
    for grows in (1, 2, 3):
        shell = CoreShell(1 << 16)
        for task, name in enumerate("ab"):
            session = 1 + task
            add(shell, name, np.full(12 * session, 10), "a" if task else "")
            shell.open(session, name, world=3)
            shell.feed(SamplesTold(session, tasks[task]))
            if task and grows == 1:
                shell.feed(DatasetGrew("b", "a"))
            for epoch in range(2):
                dealt = orders[task]._replace(seed=epoch)
                shell.feed(EpochDealt(session, epoch, dealt, view))
                mine = dealt.by_rank(range(3))[0]
                shell.tell(session, epoch, mine, np.array([len(mine)]))
                shell.settle()
                if task and grows == 2 + epoch:
                    shell.feed(DatasetGrew("b", "a"))
            if not task:
                shell.feed(Close(session))
        shell.settle()
        digests.append(shell.core.plans.digests(view.cluster))
    assert digests[0][0].digest
    assert digests == digests[:1] * 3


@pytest.mark.parametrize("seed", seeds(60))
def test_a_pool_takes_over_all_rooms_of_another(seed: int) -> None:
    """Rooms of both pools are freed afterwards in any order, and all of the space is free again."""
    rng = np.random.default_rng(seed)
    space = Allocator(int(rng.integers(20_000, 200_000)))
    fixed = bool(rng.integers(2))
    of = Lengths.of(np.array([300 if fixed else 200, 300]), np.array([10, 10]))
    pools = [space.pool(of), space.pool(of)]
    held: list[tuple[int, int]] = []
    for _ in range(6):
        for pool in pools:
            sizes = np.full(9, 300) if fixed else rng.integers(1, 9000, 9)
            places = pool.alloc(sizes)
            got = places != NOWHERE
            some = got & (rng.random(9) < 0.6)
            pool.free(places[got & ~some], sizes[got & ~some])
            held += zip(places[some].tolist(), sizes[some].tolist(), strict=True)
    pools[0].take_over(pools[1])
    space.check()
    assert pools[1].used == 0
    space.discard(pools[1])
    rng.shuffle(held)
    for place, nbytes in held:
        pools[0].free(np.array([place]), np.array([nbytes]))
    space.check()
    assert space.free_bytes == space.nbytes


def test_a_manifest_begins_with_another_one_of_the_same_rows_and_rights() -> None:
    a = Manifest.of_files(["1", "2"], root="/a")
    b = Manifest.of_files(["1", "2"], root="/b")
    c = Manifest.of_files(["1"], root="/a", lengths=[7])
    ab, aab = Manifest.concat([a, b]), Manifest.concat([ab_ := Manifest.concat([a, b]), a])
    assert ab.begins_with(a)
    assert aab.begins_with(ab_)
    assert aab.begins_with(a)
    assert not ab.begins_with(b)
    assert not a.begins_with(ab)
    assert not ab.begins_with(ab)
    assert not ab.begins_with(Manifest.of_files([]))
    assert not ab.begins_with(c)


@pytest.mark.parametrize("seed", seeds(30))
def test_a_head_is_found_whatever_part_of_its_addresses_is_the_root(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the addresses as text, compared some rows at a time."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(manifest, "_COMPARE", int(rng.integers(1, 9)))
    roots = ["", "/a", "/a/\u00e9", "/a/\u00e9x", "/b"]
    for _ in range(20):
        root, other = rng.choice(roots, 2)
        names = rng.choice(["1", "22", "\u00e9/1", "\u00e9x/22"], 12).tolist()
        whole = Manifest.of_files(names if root else [f"/a/{name}" for name in names], root=root)
        n = int(rng.integers(1, 12))
        uris = whole.addresses(np.arange(n))
        if rng.random() < 0.3:
            uris[rng.integers(n)] += "x"
        cut = f"{other}/" if other else ""
        if not all(uri.startswith(cut) for uri in uris):
            continue
        head = Manifest.of_files([uri.removeprefix(cut) for uri in uris], root=other)
        same = head.addresses(np.arange(n)) == whole.addresses(np.arange(n))
        assert whole.begins_with(head) == same


def test_addresses_that_are_reached_otherwise_are_others() -> None:
    def bucket(name: str, identity: str) -> Manifest:
        table = Manifest.of_files(["x", "y"], root=f"s3://{name}")
        return Manifest(table.table, table.root, access=((0, Access(identity)),))

    both = Manifest.concat([bucket("a", "me"), bucket("b", "you")])
    assert both.begins_with(bucket("a", "me"))
    assert not both.begins_with(bucket("a", "you"))
