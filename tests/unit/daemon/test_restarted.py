"""A daemon in the place of another one: what it asks, and what it reads for its peers."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import Rig
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import SOURCE, EpochDealt, FetchObjects, PlanShared, Tick
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.shared_plan import SharedPlan
from creel.policies.policy_for import joint
from kit import cluster_view

SAMPLES, SEED = 40, 50
PEERS = [7, 9]


class Restarted(Rig):
    """Node 0 of three, whose rank has half of its first epoch left; `PEERS` are the other nodes.

    Attributes:
        holder: which node held each object when the epoch began: 0, 1, 2, 0, ...
    """

    def __init__(self, memory: int = SAMPLES) -> None:
        super().__init__(memory * 100)
        self.holder = (np.arange(SAMPLES) % 3).astype(np.uint8)
        self.register("d", [100] * SAMPLES)
        self.open(1, "d", world=3)
        view = cluster_view([SOURCE, *PEERS], memory * 100, again=True)
        order = JobOrder(SAMPLES, 3, 13, 1, SEED)
        orders = [order._replace(seed=SEED + epoch) for epoch in range(2)]
        mine = [each.by_rank([0, 1, 2])[0] for each in orders]
        for epoch, each in enumerate(orders):
            self.feed(EpochDealt(1, epoch, each, view))
            self.extend(1, epoch, [[int(x)] for x in mine[epoch][(1 - epoch) * 6 :]])
        self.remaining = mine[0][6:]

    def from_peers(self) -> list[FetchObjects]:
        return [fetch for fetch in self.fetches.values() if fetch.origin != SOURCE]

    def hear(self, holder: NDArray[np.uint8] | None) -> None:
        """Let the peer that was asked last say who holds what; None: it does not know."""
        asked = self.plans_asked.pop()
        plan = None if holder is None else SharedPlan(asked.seed, 3, holder)
        self.feed(PlanShared("d", asked.seed, plan))

    def land_source(self) -> None:
        for number in [n for n, fetch in self.fetches.items() if fetch.origin == SOURCE]:
            self.land(number)


def test_a_restarted_daemon_asks_who_holds_what_before_it_reads_ahead() -> None:
    """The lowest peer; meanwhile a reader that waits is served from the source."""
    node = Restarted()
    before = [x for fetch in node.fetches.values() for x in fetch.ids.tolist()]
    (asked,) = node.plans_asked
    assert (asked.origin, asked.seed) == (PEERS[0], SEED)
    node.land_source()
    step = node.readers[1].ready
    node.progress(1, done=step, wanted=step + 1)
    reading = [x for fetch in node.fetches.values() for x in fetch.ids.tolist()]
    assert reading == node.remaining[step : step + 1].tolist(), "no more than the reader waits for"
    node.land_source()
    assert node.readers[1].ready == step + 1
    node.hear(node.holder)
    node.progress(1, done=step + 1, wanted=step + 2)
    for fetch in node.fetches.values():
        origins = np.array([SOURCE, *PEERS])[node.holder[fetch.ids]]
        assert (origins == fetch.origin).all()
    assert node.from_peers()
    assert len(before) < len(node.remaining)


def test_a_restarted_daemon_waits_two_seconds_for_an_answer_at_most() -> None:
    node = Restarted()
    node.land_source()
    assert not node.fetches
    node.now += 2.0
    node.feed(Tick())
    node.progress(1, wanted=1)
    node.land_source()
    assert node.readers[1].ready > 2, "it reads ahead again"


def test_a_daemon_whose_peers_know_no_plan_goes_on_with_what_it_knows() -> None:
    """It asks all twice, as they may be about to begin its epoch."""
    node, origins = Restarted(), []
    for _ in range(2):
        for _ in PEERS:
            node.now += 1.0
            node.feed(Tick())
            origins.append(node.plans_asked[-1].origin)
            node.hear(None)
    node.now += 1.0
    node.feed(Tick())
    assert origins == PEERS * 2
    assert not node.plans_asked
    node.land_source()
    policy = joint(node.core._residencies["d"].policy)
    assert policy is not None
    assert policy.lacks is None
    assert policy.digest is not None, "it plans again"


def test_a_plan_that_does_not_fit_is_no_answer() -> None:
    node = Restarted()
    node.hear(node.holder[:-1])
    assert [asked.origin for asked in node.plans_asked] == PEERS[1:]


def kept(node: Restarted) -> NDArray[np.int64]:
    """Return the objects that node 0 is to hold, according to its plan, and lacks."""
    policy = node.core._residencies["d"].policy
    mine = policy.brings(np.arange(SAMPLES))
    busy = [x for fetch in node.fetches.values() for x in fetch.ids.tolist()]
    lacks = mine & (node.offset["d"] == NOWHERE)
    lacks[busy] = False
    return np.flatnonzero(lacks)


def test_objects_it_is_to_hold_are_read_once_for_peers_kept_and_served() -> None:
    node = Restarted()
    node.hear(node.holder)
    some = kept(node)[:3].tolist()
    assert some
    node.peer_asks(1, "d", some)
    node.peer_asks(2, "d", some[1:])
    assert not node.sending
    before = node.reads
    mine = [f for f in node.fetches.values() if np.isin(f.ids, some).any()]
    assert all(fetch.origin == SOURCE for fetch in mine)
    for fetch in mine:
        node.land(fetch.fetch)
    assert node.reads == before + sum(len(fetch.ids) for fetch in mine)
    assert all((answer.nbytes == 100).all() for answer in node.sending.values())
    for request in (1, 2):
        node.sent(request)
    assert (node.offset["d"][some] != NOWHERE).all()
    node.peer_asks(3, "d", some)
    assert (node.sending[3].nbytes == 100).all()


def test_objects_it_is_not_to_hold_or_gets_from_a_peer_are_refused_at_once() -> None:
    """Two nodes that wait for each other would form a circle."""
    node = Restarted()
    node.hear(node.holder)
    policy = node.core._residencies["d"].policy
    others = np.flatnonzero(~policy.brings(np.arange(SAMPLES)))
    absent = others[node.offset["d"][others] == NOWHERE][:4].tolist()
    coming = [x for fetch in node.from_peers() for x in fetch.ids.tolist()]
    assert coming
    before = len(node.fetches)
    node.peer_asks(1, "d", [*absent, *coming])
    assert (node.sending[1].nbytes == -1).all()
    assert len(node.fetches) == before


def test_before_it_knows_who_holds_what_it_reads_nothing_for_peers() -> None:
    node = Restarted()
    node.land_source()
    absent = np.flatnonzero(node.offset["d"] == NOWHERE).tolist()
    node.peer_asks(1, "d", absent)
    assert (node.sending[1].nbytes == -1).all()
    assert not node.fetches


@pytest.mark.parametrize("memory", [14, 16])
def test_no_object_that_this_epoch_still_reads_leaves_for_a_peer(memory: int) -> None:
    node = Restarted(memory)
    node.hear(node.holder)
    while node.fetches:
        node.land(next(iter(node.fetches)))
    for request, x in enumerate(kept(node).tolist()):
        policy = node.core._residencies["d"].policy
        here = np.flatnonzero(node.offset["d"] != NOWHERE)
        wanted = here[policy.wanted(here)]
        node.peer_asks(request, "d", [x])
        while request not in node.sending:
            node.land(next(iter(node.fetches)))
        node.sent(request)
        assert (node.offset["d"][wanted] != NOWHERE).all()
