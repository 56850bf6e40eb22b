"""What a node sends to its peers, and what it takes from them."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import Rig
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.version import CHANGING, UNKNOWN, of_tag, shared
from creel.daemon.core.events import (
    SOURCE,
    Action,
    Checked,
    ClusterChanged,
    EpochDealt,
    EpochFollowed,
    Fetched,
    FetchObjects,
    PeerAsked,
    PeerServed,
    ServeObjects,
    Tick,
)
from creel.daemon.core.versions import Versions
from creel.messages import Begin
from creel.policies.cluster.homes import Homes
from creel.policies.cluster.job_order import JobOrder
from kit import cluster_view

OLD, NEW = of_tag("old"), of_tag("new")


class Node(Rig):
    """A node that peers ask."""

    def __init__(self, objects: int, held: int, sizes: list[int] | None = None) -> None:
        super().__init__(held * 100 if sizes is None else held * 128)
        self.answers: list[ServeObjects] = []
        self.changed: set[int] = set()  # files
        self.requests = 100
        self.register("d", sizes or [100] * objects)
        self.open(1, "d", world=2, recheck="never" if sizes is None else "epoch")

    def do(self, action: Action) -> None:
        if isinstance(action, ServeObjects):
            self.answers.append(action)
        else:
            super().do(action)

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        return np.full(len(fetch.ids), OLD)

    def check_all(self) -> None:
        while self.to_check:
            check = self.to_check.pop()
            versions = [NEW if file in self.changed else OLD for file in check.files.tolist()]
            self.feed(Checked(check.check, np.array(versions)))

    def ask(self, *ids: int) -> ServeObjects:
        self.feed(PeerAsked(len(self.answers), "d", np.array(ids, np.int32), 1.0))
        return self.answers[-1]

    def ask_peer(self, *ids: int) -> None:
        """As `ask`, but the answer comes later."""
        self.requests += 1
        self.feed(PeerAsked(self.requests, "d", np.array(ids, np.int32), 1.0))

    def land_all(self) -> None:
        while self.fetches:
            self.land(next(iter(self.fetches)))


def test_a_resident_is_sent_and_stays_until_it_has_left() -> None:
    node = Node(4, held=2)
    node.extend(1, 0, [[0], [1], [2], [3]])
    node.land_all()
    answer = node.ask(0, 3, 99)
    assert answer.nbytes.tolist() == [100, -1, -1]
    assert answer.version.tolist() == [OLD, UNKNOWN, UNKNOWN]
    assert answer.place[0] == node.offset["d"][0]
    node.progress(1, done=2, wanted=4)
    node.land_all()
    assert node.offset["d"][0] != NOWHERE, "it left while it was being sent"
    node.feed(PeerServed(0))
    node.progress(1, done=4)
    node.extend(1, 1, [[1, 2]])
    node.land_all()
    assert node.offset["d"][0] == NOWHERE


@pytest.mark.parametrize("sizes", [[100] * 3, [100, 90, 120]])
def test_a_changed_object_keeps_its_room_until_it_has_left(sizes: list[int]) -> None:
    """A peer must not get bytes of the next object in that room."""
    node = Node(0, held=3, sizes=sizes)
    node.extend(1, 0, [[0], [1], [2]])
    node.land_all()
    room = int(node.ask(0, 1).place[0])
    assert int(node.ask(0).place[0]) == room
    node.feed(Begin("", 1, 0))
    node.changed = {0}
    for served in (0, 1):
        node.check_all()
        node.land_all()
        node.progress(1, done=0, wanted=3)
        assert room not in node.offset["d"], "what comes next is sent in its place"
        node.feed(PeerServed(served))
    node.land_all()
    assert (node.offset["d"] != NOWHERE).all()


def test_a_dataset_that_is_unknown_and_a_request_that_ended_twice_are_no_harm() -> None:
    node = Node(2, held=2)
    node.feed(PeerAsked(0, "other", np.array([0], np.int32), 1.0))
    assert node.answers[-1].nbytes.tolist() == [-1]
    node.feed(PeerServed(0))
    node.feed(PeerServed(5))


def with_disk(objects: int, held: int, *stored: int) -> Node:
    """Return a node that has these objects on its disk."""
    node = Node(objects, held)
    node.disk["d"] = dict.fromkeys(stored, 100)
    node.open_disk(1 << 20)
    return node


def test_objects_on_disk_are_read_and_sent() -> None:
    node = with_disk(6, 4, 1, 3)
    node.ask_peer(3, 1, 5)
    assert not node.answers
    node.land_all()
    (answer,) = node.answers
    assert answer.nbytes.tolist() == [100, 100, -1]
    known = int(shared(np.array([OLD]))[0])  # this node has not asked the storage yet
    assert answer.version.tolist() == [known, known, UNKNOWN]
    assert (node.disk_reads, node.reads) == (2, 0)
    assert answer.place[:2].tolist() == node.offset["d"][[3, 1]].tolist()
    places = zip(answer.place[:2].tolist(), (3, 1), strict=True)
    assert all(node.arena.holds(place, "d", x, 100) for place, x in places)


def test_two_peers_that_ask_for_the_same_wait_for_one_read_of_the_disk() -> None:
    node = with_disk(6, 4, 1)
    node.ask_peer(1)
    node.ask_peer(1)
    node.land_all()
    assert [answer.nbytes.tolist() for answer in node.answers] == [[100], [100]]
    assert node.disk_reads == 1


def test_a_disk_that_is_too_slow_costs_the_peer_what_it_has_waited() -> None:
    node = with_disk(6, 4, 1)
    node.extend(1, 0, [[0]])
    node.land_all()
    node.ask_peer(0, 1)
    node.now += 0.9
    node.feed(Tick())
    assert not node.answers
    node.now += 0.1
    node.feed(Tick())
    assert node.answers[0].nbytes.tolist() == [100, -1]
    node.land_all()
    assert node.offset["d"][1] != NOWHERE


def test_objects_that_the_disk_has_lost_are_read_from_the_source_and_sent() -> None:
    node = with_disk(6, 4, 1, 2)
    node.ask_peer(1, 2)
    node.disk["d"].clear()
    node.land_all()
    assert node.answers[0].nbytes.tolist() == [100, 100]
    assert node.reads == 2


@pytest.mark.parametrize("waits_for", ["a write", "what is being sent"])
def test_objects_read_from_disk_for_a_peer_wait_for_room_in_memory(waits_for: str) -> None:
    node = with_disk(6, 2, 4, 5)
    node.extend(1, 0, [[0, 1]])
    node.land_all()
    if waits_for == "what is being sent":
        node.ask_peer(0, 1)
    node.progress(1, done=1)
    node.ask_peer(4, 5)
    if waits_for == "what is being sent":
        assert len(node.answers) == 1
        node.feed(PeerServed(node.answers[0].request))
    while node.to_disk or node.fetches:
        node.write_disk()
        node.land_all()
    assert node.answers[-1].nbytes.tolist() == [100, 100]


def test_a_peer_is_told_no_where_only_a_reader_could_make_room() -> None:
    """That reader may wait for the peer, as ranks run in step."""
    node = with_disk(6, 2, 4, 5)
    node.extend(1, 0, [[0, 1]])
    node.land_all()
    node.ask_peer(0, 4, 5)
    assert node.answers[0].nbytes.tolist() == [100, -1, -1]
    assert node.fetches == {}


class Member(Rig):
    """Node 0 of a cluster of two, in epoch 1; the peer has the origin 7."""

    def __init__(self) -> None:
        samples, each = 40, 20
        super().__init__(samples * 100)
        self.register("d", [100] * samples)
        self.open(1, "d", world=2)
        view = cluster_view([SOURCE, 7], samples * 100)
        for epoch in range(3):
            order = JobOrder(samples, 2, each, 1, seed=epoch)
            self.extend(1, epoch, [[int(x)] for x in order.by_rank([0, 1])[0]])
            self.feed(EpochDealt(1, epoch, order, view))
        while not self.asked() and self.readers[1].done < each + 10:
            while self.fetches and not self.asked():
                self.land(next(iter(self.fetches)))
            self.progress(1, done=self.readers[1].done + 1, wanted=self.readers[1].done + 2)

    def asked(self) -> list[FetchObjects]:
        """Return the fetches from the peer."""
        return [fetch for fetch in self.fetches.values() if fetch.origin == 7]

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        return np.full(len(fetch.ids), OLD)

    def land_all(self) -> None:
        while self.fetches:
            self.land(next(iter(self.fetches)))

    def answer(self, nbytes: int, version: int) -> FetchObjects:
        """Let the peer answer the first request, in the same way for each object."""
        fetch = self.fetches.pop(self.asked()[0].fetch)
        if nbytes == 100:
            for x, place in zip(fetch.ids.tolist(), fetch.offset.tolist(), strict=True):
                self.arena.put(place, "d", x, 100)
        k = len(fetch.ids)
        self.feed(Fetched(fetch.fetch, np.full(k, nbytes), np.full(k, version)))
        return fetch


def test_objects_that_a_peer_holds_are_asked_of_it_and_ready_when_they_came() -> None:
    node = Member()
    asked = node.answer(100, OLD)
    assert (node.offset["d"][asked.ids] == asked.offset).all()
    assert node.reads < 40


def test_what_a_reader_that_has_left_read_ahead_is_not_read_from_the_source() -> None:
    """Peers refuse it, as their readers have left as well."""
    node = Member()
    node.close(1)
    asked = node.answer(-1, UNKNOWN)
    assert (node.offset["d"][asked.ids] == NOWHERE).all()
    assert node.fetches == {}


@pytest.mark.parametrize("nbytes, version", [(-1, UNKNOWN), (99, OLD), (100, CHANGING)])
def test_objects_that_a_peer_lacks_are_read_from_the_source_into_the_same_room(
    nbytes: int, version: int
) -> None:
    node = Member()
    asked = node.answer(nbytes, version)
    assert (node.offset["d"][asked.ids] == NOWHERE).all()
    again = [f for f in node.fetches.values() if f.origin == SOURCE]
    places = {int(x): int(at) for f in again for x, at in zip(f.ids, f.offset, strict=True)}
    assert places == {int(x): int(at) for x, at in zip(asked.ids, asked.offset, strict=True)}
    for fetch in again:
        node.land(fetch.fetch)
    assert (node.offset["d"][asked.ids] == asked.offset).all()


def test_a_peers_copy_that_comes_after_its_reader_has_given_up_is_dropped() -> None:
    """The step was ready without it; a copy of an earlier time must not appear there."""
    node = Member()
    asked = node.asked()[0]
    step = node.readers[1].ready
    node.progress(1, done=step, wanted=step + 1)
    node.now += 60.0
    node.feed(Tick())
    assert node.readers[1].ready > step
    node.answer(100, OLD)
    assert (node.offset["d"][asked.ids] == NOWHERE).all()


@pytest.mark.parametrize("by_hash", [frozenset(), frozenset({"d"})])
def test_orders_of_epochs_that_are_over_or_far_away_take_no_memory(by_hash: frozenset[str]) -> None:
    """With any eviction policy; by hash, orders are not used."""
    node = Rig(4000)
    node.register("d", [100] * 40)
    node.open(1, "d", world=2)
    view = cluster_view([SOURCE, 7], 4000, by_hash)
    for epoch in range(5):
        order = JobOrder(40, 2, 20, 1, seed=epoch)
        node.extend(1, epoch, [[int(x)] for x in order.by_rank([0, 1])[0]])
        node.feed(EpochDealt(1, epoch, order, view))
    node.checking = False
    for epoch in range(2_000):
        node.feed(EpochDealt(1, 100 + epoch, order, view))
    node.checking = True
    deals = node.core._readers["d"].groups[0].deals
    assert len(deals.orders) < 100
    node.progress(1, done=61, wanted=62)
    assert min(deals.orders) == 3


def test_after_the_cluster_has_ended_everything_comes_from_the_source() -> None:
    node = Member()
    node.feed(ClusterChanged("", None))
    node.answer(-1, UNKNOWN)
    while node.readers[1].done < 60:
        node.land_all()
        node.progress(1, done=node.readers[1].done + 1, wanted=node.readers[1].done + 2)
        assert not node.asked()


def test_another_version_than_the_one_known_here_is_of_no_use() -> None:
    versions, first, never = Versions(2), np.array([0]), np.zeros(1)
    versions.read(first, np.array([OLD]), 1, never)
    assert versions.received(first, np.array([NEW]), never, []).tolist() == [True]
    assert versions.received(first, np.array([OLD]), never, []).tolist() == [False]
    assert versions.received(first, shared(np.array([OLD])), never, []).tolist() == [False]


def test_a_peers_version_counts_once_a_check_here_has_found_the_same() -> None:
    versions, ids = Versions(2), np.array([0, 1])
    assert not versions.received(ids, np.array([OLD, OLD]), np.zeros(2), []).any()
    assert not versions.current(ids, 1, 1).any()
    changed = versions.answered(ids.astype(np.int32), np.array([OLD, NEW]), 1, 0.0)
    assert changed.tolist() == [1]
    assert versions.current(ids, 1, 1).all()


class Home(Node):
    """Node 0 of two without each other's orders; `mine`, `others`: objects by their home."""

    def __init__(self, held: int) -> None:
        super().__init__(40, held)
        view = cluster_view([SOURCE, 7], held * 100)
        self.feed(EpochFollowed(1, view))
        at_home = Homes([view]).mine(np.arange(40))
        self.mine, self.others = (np.flatnonzero(at_home == x).tolist() for x in (True, False))
        self.extend(1, 0, [[self.mine[-1]]])
        self.land(next(iter(self.fetches)))

    def wanted(self, ids: list[int], wait_s: float = 1.0) -> None:
        self.requests += 1
        self.feed(PeerAsked(self.requests, "d", np.array(ids, np.int32), wait_s))


def test_what_a_reader_that_left_has_asked_a_peer_for_is_not_awaited() -> None:
    """Unless another reader needs it meanwhile: then the peer is asked again."""
    node = Home(held=40)
    node.extend(1, 1, [node.others[:2]])
    (asked,) = node.fetches
    assert node.fetches[asked].origin == 7
    node.truncate(1, 1)
    assert node.cancelled == {asked}
    node.extend(1, 1, [node.others[1:2]])
    node.land(asked)
    again = [(fetch.origin, fetch.ids.tolist()) for fetch in node.fetches.values()]
    assert again == [(7, node.others[1:2])]
    node.land_all()
    node.core.check()


def test_objects_that_peers_ask_for_are_read_once_at_their_home() -> None:
    node = Home(held=40)
    node.wanted(node.mine[:2])
    node.wanted(node.mine[1:3])
    assert not node.answers
    assert all(fetch.origin == SOURCE for fetch in node.fetches.values())
    reading = [x for fetch in node.fetches.values() for x in fetch.ids.tolist()]
    assert sorted(reading) == node.mine[:3]
    while node.fetches:
        node.land(next(iter(node.fetches)))
    assert [answer.nbytes.tolist() for answer in node.answers] == [[100, 100]] * 2


def test_requests_for_another_home_or_too_late_are_refused() -> None:
    node = Home(held=40)
    node.wanted(node.others[:2])
    assert node.answers.pop().nbytes.tolist() == [-1, -1]
    assert not node.fetches
    node.wanted(node.mine[:1], wait_s=0.5)
    assert not node.answers
    node.now += 1
    node.feed(Tick())
    assert node.answers.pop().nbytes.tolist() == [-1]


def test_objects_that_a_peer_was_asked_for_are_refused_at_once() -> None:
    """Two nodes that disagree about homes would wait for each other."""
    node = Home(held=40)
    node.extend(1, 0, [node.others[:2]])
    assert [fetch.origin for fetch in node.fetches.values()] == [7]
    node.wanted(node.others[:2])
    assert node.answers.pop().nbytes.tolist() == [-1, -1]
    node.wanted([node.mine[0], node.others[0]])
    assert not node.answers, "what is at home here is read"
    node.land(next(f for f, fetch in node.fetches.items() if fetch.origin == SOURCE))
    assert node.answers.pop().nbytes.tolist() == [100, -1]


def test_objects_kept_for_peers_leave_for_no_peer() -> None:
    node = Home(held=4)
    for x in node.mine[:6]:
        node.wanted([x])
        while node.fetches:
            node.land(next(iter(node.fetches)))
        node.feed(PeerServed(node.requests))
    sizes = [int(answer.nbytes[0]) for answer in node.answers]
    assert sizes == [100] * 3 + [-1] * 3, "one object is the reader's own"


def test_a_reader_asks_the_home_of_each_object() -> None:
    node = Home(held=40)
    node.extend(1, 0, [node.mine[:2] + node.others[:2]])
    asked = {fetch.origin: fetch.ids.tolist() for fetch in node.fetches.values()}
    assert asked == {SOURCE: node.mine[:2], 7: node.others[:2]}
