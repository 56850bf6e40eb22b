"""What a node sends its peers, and what it takes from them."""

from __future__ import annotations

import numpy as np
from core_rig import Rig
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import ABSENT
from creel.cache.storage.version import CHANGING, UNKNOWN, of_tag, shared
from creel.daemon.core.events import (
    SOURCE,
    Action,
    EpochDealt,
    Fetched,
    FetchObjects,
    PeerAsked,
    PeerServed,
    ServeObjects,
)
from creel.policies.cluster.eviction import ClusterView, Placed
from creel.policies.cluster.job_order import IN_ORDER, JobOrder

OLD, NEW = of_tag("old"), of_tag("new")


class Node(Rig):
    """Node 0 of two; node 1 is a peer with the origin 7."""

    def __init__(self, objects: int, held: int) -> None:
        super().__init__(held * 100)
        self.answers: list[ServeObjects] = []
        self.register("d", [100] * objects)
        self.open(1, "d", world=2)
        self.objects = objects

    def do(self, action: Action) -> None:
        if isinstance(action, ServeObjects):
            self.answers.append(action)
        else:
            super().do(action)

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        return np.full(len(fetch.ids), OLD)

    def deal(self, epoch: int) -> None:
        """Each rank reads every other object, in order."""
        order = JobOrder(self.objects, 2, self.objects // 2, 1, IN_ORDER)
        first = np.full(2, 100 * self.objects)
        view = ClusterView(0, np.arange(2), first, np.array([SOURCE, 7]))
        self.feed(EpochDealt(1, epoch, order, view))

    def ask(self, *ids: int) -> ServeObjects:
        self.feed(PeerAsked(len(self.answers), "d", np.array(ids, np.int32)))
        return self.answers[-1]

    def land_all(self) -> None:
        while self.fetches:
            self.land(next(iter(self.fetches)))


def test_what_is_here_is_sent_and_stays_until_it_has_left() -> None:
    node = Node(4, held=2)
    node.extend(1, 0, [[0], [1], [2], [3]])
    node.land_all()
    answer = node.ask(0, 3, 99)
    assert answer.nbytes.tolist() == [100, -1, -1]
    assert answer.version.tolist() == [OLD, UNKNOWN, UNKNOWN]
    assert answer.place[0] == node.offset["d"][0]
    node.progress(1, done=2, wanted=4)
    node.land_all()
    assert node.offset["d"][0] != ABSENT, "it left while it was being sent"
    node.feed(PeerServed(0))
    node.progress(1, done=4)
    node.extend(1, 1, [[1, 2]])
    node.land_all()
    assert node.offset["d"][0] == ABSENT


def test_a_dataset_that_is_unknown_and_a_request_that_ended_twice_are_no_harm() -> None:
    node = Node(2, held=2)
    node.feed(PeerAsked(0, "other", np.array([0], np.int32)))
    assert node.answers[-1].nbytes.tolist() == [-1]
    node.feed(PeerServed(0))
    node.feed(PeerServed(5))


def cluster_of_two() -> Node:
    """In epoch 1, where the peer holds objects 0 and 2, which node 0 reads."""
    node = Node(4, held=4)
    node.late = lambda: True
    for epoch in (0, 1, 2):
        node.extend(1, epoch, [[0], [2]])
        node.deal(epoch)
    asked = node.plans.pop()
    reader, holder = np.array([0, 1] * 2, np.uint8), np.array([1, 1] * 2, np.uint8)
    policy = node.core._residencies["d"].policy
    assert policy is not None
    node.land_all()
    policy.answer(asked.turn, Placed(holder, reader, []))
    node.progress(1, done=2, wanted=3)
    return node


def test_what_a_peer_holds_is_asked_of_the_peer() -> None:
    policy = cluster_of_two().core._residencies["d"].policy
    assert policy is not None
    asked = policy.holders(np.array([0, 1, 2, 3]), 1)
    assert asked is not None
    assert asked.tolist() == [7, 7, 7, 7]
    assert policy.holders(np.array([0]), 5) is None


def peer_answers(nbytes: int, version: int) -> Node:
    """A fetch of object 0 from the peer, and what it answered."""
    node = Node(2, held=2)
    residency = node.core._residencies["d"]
    residency.origins = lambda ids, epoch: [(7, slice(None))]  # type: ignore[method-assign]  # noqa: ARG005
    node.extend(1, 0, [[0]])
    (number,) = node.fetches
    fetch = node.fetches.pop(number)
    assert fetch.origin == 7
    if nbytes == 100:
        node.put(int(fetch.offset[0]), "d", 0, 100)
    node.feed(Fetched(number, np.array([nbytes]), np.array([version])))
    return node


def test_what_a_peer_sends_is_ready() -> None:
    node = peer_answers(100, OLD)
    assert node.readers[1].ready == 1
    assert not node.fetches


def test_what_a_peer_does_not_have_is_read_from_the_source_into_the_same_room() -> None:
    for nbytes, version in ((-1, UNKNOWN), (99, OLD), (100, CHANGING)):
        node = peer_answers(nbytes, version)
        assert node.readers[1].ready == 0
        (fetch,) = node.fetches.values()
        assert fetch.origin == SOURCE
        node.land_all()
        assert node.readers[1].ready == 1


def test_another_version_than_the_one_known_here_is_of_no_use() -> None:
    node = Node(2, held=2)
    versions = node.core._residencies["d"].versions
    first = np.array([0])
    versions.read(first, np.array([OLD]), 1)
    assert versions.received(first, np.array([NEW])).tolist() == [True]
    assert versions.received(first, np.array([OLD])).tolist() == [False]
    assert versions.received(first, shared(np.array([OLD]))).tolist() == [False]


def test_a_peers_version_counts_once_a_check_here_has_found_the_same() -> None:
    node = Node(2, held=2)
    versions = node.core._residencies["d"].versions
    ids = np.array([0, 1])
    assert not versions.received(ids, np.array([OLD, OLD])).any()
    assert not versions.current(ids, 1, 1).any()
    changed = versions.answered(ids.astype(np.int32), np.array([OLD, NEW]), 1)
    assert changed.tolist() == [1]
    assert versions.current(ids, 1, 1).all()
