"""Daemons of a cluster that watch each other, over real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from cluster_node import ClusterNode
from creel.daemon.core.cluster.plans import ClusterPlans
from creel.daemon.core.events import (
    SOURCE,
    AskPlan,
    ClusterChanged,
    PlanAsked,
    PlanDoubted,
    PlanShared,
    SharePlan,
)
from creel.daemon.peers.link import PeerLink
from creel.daemon.peers.wire import Credentials
from creel.daemon.service import cluster
from creel.messages import Join, Member
from creel.policies.cluster.shared_plan import PlanDigest, SharedPlan
from kit import Cores

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(120)]

KEY = bytes(range(32))


class Plans(ClusterPlans):
    """A core's reports of its plans, set by a test."""

    inputs: tuple[PlanDigest, ...] = ()
    elsewhere: frozenset[str] = frozenset()

    def digests(self, cluster: str) -> tuple[PlanDigest, ...]:
        assert cluster == "c"
        return self.inputs

    def by_hash(self, cluster: str) -> frozenset[str]:
        assert cluster == "c"
        return self.elsewhere


class Peer(ClusterNode):
    """One of several daemons on this host; `settle` is its loop."""

    def __init__(self) -> None:
        super().__init__(nbytes=1 << 16)
        self.core.plans = self.plans = Plans({}, {}, lambda action: None)  # noqa: ARG005
        self.disk = self.core.disk
        self.member = self.clusters.host("127.0.0.1", 0)

    def there(self) -> list[bool]:
        """Return for each node whether this one would ask it."""
        view = self.clusters.view("c")
        assert view is not None
        return [node == view.me or origin != SOURCE for node, origin in enumerate(view.origin)]


def started(stack: ExitStack) -> Peer:
    peer = Peer()
    stack.callback(peer.close)
    return peer


def joined(stack: ExitStack, nodes: int) -> list[Peer]:
    peers = [started(stack) for _ in range(nodes)]
    for peer in peers:
        enter(peer, [member.member for member in peers])
    return peers


def enter(peer: Peer, members: list[Member], *, again: bool = False) -> None:
    peer.clusters.join("client", Join("c", KEY, members, list(range(len(members))), again=again))


def within(limit_s: float, peers: list[Peer], condition: Callable[[], bool]) -> float:
    """Run the loops until the condition holds; return how long that took.

    A machine without a spare core may take longer.
    """
    began, cores = time.monotonic(), Cores()
    while not condition():
        for peer in peers:
            peer.settle()
        took = time.monotonic() - began
        assert took < limit_s or (took < 60 and not cores.spare()), "not in time"
        time.sleep(0.005)
    return time.monotonic() - began


def test_a_daemon_that_ends_is_not_asked_any_more(stack: ExitStack) -> None:
    *left, last = joined(stack, 3)
    within(5, [*left, last], lambda: all(peer.there() == [True] * 3 for peer in left))
    last.close()
    within(2, left, lambda: all(peer.there() == [True, True, False] for peer in left))
    assert all(len(peer.ended) == 1 for peer in left), "fetches from it are ended"
    changed = [event for event in left[1].events if isinstance(event, ClusterChanged)]
    assert changed[-1].view is left[1].clusters.view("c")


def test_a_daemon_that_was_stopped_is_asked_again_by_itself(stack: ExitStack) -> None:
    """Its beats are not answered: its server does not run, though its connections are open."""
    *left, last = joined(stack, 3)
    within(5, [*left, last], lambda: all(peer.there() == [True] * 3 for peer in left))
    with stopped(last):
        within(4, left, lambda: all(peer.there() == [True, True, False] for peer in left))
    within(4, left, lambda: all(all(peer.there()) for peer in left))
    assert all(len(peer.ended) == 1 for peer in left)


def test_a_daemon_that_slept_itself_goes_on_asking_the_others(stack: ExitStack) -> None:
    peers = joined(stack, 2)
    within(5, peers, lambda: all(all(peer.there()) for peer in peers))
    slept = time.monotonic() + 2.0
    within(5, peers[1:], lambda: time.monotonic() > slept)
    peers[0].settle()
    assert all(peers[0].there())
    assert not peers[0].ended


@contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """Hold up the thread that serves a daemon's peers, as SIGSTOP does."""
    stop, go = threading.Event(), threading.Event()

    def hold() -> None:
        stop.set()
        go.wait(30)

    assert peer.clusters._server is not None
    peer.clusters._server._order(hold)
    assert stop.wait(5)
    try:
        yield
    finally:
        go.set()


def test_all_nodes_plan_with_the_disk_that_each_has_now(stack: ExitStack) -> None:
    peers = joined(stack, 3)
    for nbytes in (1 << 30, 0):  # it is found, and lost again
        peers[1].disk.nbytes, peers[1].disk.unit = nbytes, 512
        within(5, peers, lambda: all(disks(peer)[1:2] == [peers[1].disk.nbytes] for peer in peers))
        for peer in peers:
            assert disks(peer) == [0, nbytes, 0]
            changed = [event for event in peer.events if isinstance(event, ClusterChanged)]
            assert changed[-1].view is peer.clusters.view("c")


def disks(peer: Peer) -> list[int]:
    view = peer.clusters.view("c")
    assert view is not None
    nbytes: list[int] = view.disk[:, 0].tolist()
    return nbytes


def test_a_daemon_that_takes_the_place_of_another_is_found_by_itself(stack: ExitStack) -> None:
    """It knows the others' addresses; they learn its own from it."""
    peers = joined(stack, 3)
    members = [peer.member for peer in peers]
    within(5, peers, lambda: all(all(peer.there()) for peer in peers))
    peers[0].close()
    within(2, peers[1:], lambda: not any(peer.there()[0] for peer in peers[1:]))
    peers[0] = started(stack)
    enter(peers[0], [peers[0].member, *members[1:]], again=True)
    within(10, peers, lambda: all(all(peer.there()) for peer in peers))
    again = [peer.clusters.view("c").again for peer in peers]  # type: ignore[union-attr]
    assert again == [True, False, False], "it holds nothing and does not know who holds what"
    assert len({peer.clusters.view("c").names for peer in peers}) == 1  # type: ignore[union-attr]


def test_a_daemon_that_has_missed_a_plan_is_told(stack: ExitStack) -> None:
    peers = joined(stack, 2)
    within(5, peers, lambda: all(all(peer.there()) for peer in peers))
    for plan in SharedPlan(7, 2, np.array([0, 1, 255], np.uint8)), None:
        for peer in peers:
            peer.events.clear()
        peers[1].clusters.ask_plan(AskPlan("d", origin_of(peers[1], 0), 7))
        within(5, peers, lambda: any(isinstance(event, PlanAsked) for event in peers[0].events))
        (asked,) = (event for event in peers[0].events if isinstance(event, PlanAsked))
        assert (asked.dataset, asked.seed) == ("d", 7)
        peers[0].clusters.share_plan(SharePlan(asked.request, plan))
        within(5, peers, lambda: any(isinstance(event, PlanShared) for event in peers[1].events))
        (shared_plan,) = (event for event in peers[1].events if isinstance(event, PlanShared))
        assert (shared_plan.dataset, shared_plan.seed) == ("d", 7)
        assert (shared_plan.plan is None) == (plan is None)
        if shared_plan.plan is not None and shared_plan.plan.holder is not None:
            assert shared_plan.plan.holder.tolist() == [0, 1, 255]


def test_a_daemon_that_asks_a_peer_that_is_gone_is_told_so(stack: ExitStack) -> None:
    peers = joined(stack, 2)
    peers[0].close()
    peers[1].clusters.ask_plan(AskPlan("d", origin_of(peers[1], 0), 7))
    within(5, peers[1:], lambda: any(isinstance(e, PlanShared) for e in peers[1].events))
    (shared_plan,) = (event for event in peers[1].events if isinstance(event, PlanShared))
    assert shared_plan.plan is None


def origin_of(peer: Peer, node: int) -> int:
    view = peer.clusters.view("c")
    assert view is not None
    return int(view.origin[node])


def test_a_daemon_with_other_inputs_of_a_plan_is_told(stack: ExitStack) -> None:
    peers = joined(stack, 2)
    for node, peer in enumerate(peers):
        same = PlanDigest("d", 7, 5)
        peer.plans.inputs = same, PlanDigest("e", 7, 5 + node)

    def doubts() -> list[list[tuple[str, int]]]:
        events = [[e for e in p.events if isinstance(e, PlanDoubted)] for p in peers]
        return [sorted({(e.dataset, e.seed) for e in mine}) for mine in events]

    within(5, peers, lambda: doubts() == [[], [("e", 7)]])


def test_all_nodes_hear_of_a_dataset_that_one_of_them_reads_for_a_job_on_others(
    stack: ExitStack,
) -> None:
    """They do not forget it when that job ends, or when a daemon is restarted."""
    peers = joined(stack, 3)
    members = [peer.member for peer in peers]
    peers[1].plans.elsewhere = frozenset({"d"})
    within(2, peers, lambda: all(by_hash(peer) == {"d"} for peer in peers))
    for peer in peers:
        changed = [event for event in peer.events if isinstance(event, ClusterChanged)]
        assert changed[-1].view is peer.clusters.view("c")
    peers[1].close()
    peers[1] = started(stack)
    enter(peers[1], [members[0], peers[1].member, members[2]])
    within(5, peers, lambda: by_hash(peers[1]) == {"d"})
    assert len({peer.clusters.view("c").names for peer in peers}) == 1  # type: ignore[union-attr]


def by_hash(peer: Peer) -> frozenset[str]:
    view = peer.clusters.view("c")
    assert view is not None
    return view.by_hash


def test_a_stranger_is_no_member(stack: ExitStack) -> None:
    """Without the key, or with an old one, it changes no address and learns nothing."""
    peers = joined(stack, 2)
    within(5, peers, lambda: all(all(peer.there()) for peer in peers))
    stranger = started(stack)
    members = [stranger.member, peers[1].member]
    stranger.clusters.join("client", Join("c", KEY[::-1], members, [0, 1]))
    within(10, [*peers, stranger], lambda: stranger.there() == [True, False])
    assert all(all(peer.there()) for peer in peers)


def test_listed_nodes_find_each_other_by_name_and_are_ready_once_all_are_there(
    stack: ExitStack,
) -> None:
    peers = [started(stack) for _ in range(2)]
    listed = [Member(f"n{i}", "127.0.0.1", peer.member.port, 0) for i, peer in enumerate(peers)]

    def ask(node: int) -> bool:
        return peers[node].clusters.join("client", Join("c", KEY, listed, [0, 1], node))

    assert not ask(0)
    assert peers[0].clusters.view("c") is None, "its peer's memory is not known"
    ask(1)
    within(5, peers, lambda: ask(0) and ask(1))
    for peer in peers:
        view = peer.clusters.view("c")
        assert view is not None
        assert view.capacity.tolist() == [1 << 16, 1 << 16]
        assert not view.again, "who comes for the first time has no daemon before it"


def test_a_listed_node_that_never_comes_is_given_up(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "GIVE_UP_S", 1.0)
    peer = started(stack)
    listed = [Member("n0", "127.0.0.1", peer.member.port, 0), Member("n1", "127.0.0.1", 9, 0)]
    joined = Join("c", KEY, listed, [0, 1], 0)
    within(8, [peer], lambda: peer.clusters.join("client", joined))
    view = peer.clusters.view("c")
    assert view is not None
    assert view.capacity.tolist() == [1 << 16, 1], "nothing is planned to lie there"


def test_a_daemon_without_a_key_serves_nobody(stack: ExitStack) -> None:
    """Whatever key the stranger has, and whatever cluster it asks for."""
    address = started(stack).member
    for key in KEY, bytes(32):
        with pytest.raises(ConnectionError):
            PeerLink(
                (address.host, address.port),
                address.node,
                Credentials("x", "c", key, encrypt=False),
            )
