"""Next uses, candidate lists and eviction policies against plain Python oracles."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.policies.cluster.homes import FOR_PEERS, Homes, HomesEviction
from creel.policies.eviction.candidates import Sorted
from creel.policies.eviction.farthest import FarthestNextUse
from creel.policies.eviction.planned import PlannedEviction
from creel.policies.eviction.policy import ABSENT, FETCHING, RESIDENT
from creel.policies.eviction.recent import MostRecentFirst
from creel.policies.next_use import MAX_EPOCHS, NEVER, NextUses
from kit import cluster_view


@dataclass
class Facts:
    """What a policy asks about its job."""

    uses: NextUses
    clock: int
    known: int
    order: list[NDArray[np.intp]]
    capacity: int
    nbytes: float = 120.0
    size: NDArray[np.int64] = field(default_factory=lambda: np.ones(1, np.int64))
    page: int = 1
    lead: tuple[int, int] = (2, 4)

    @property
    def agreed_size(self) -> NDArray[np.int64]:
        return self.size

    def capacities(
        self,
        memory: NDArray[np.int64],
        disk: NDArray[np.int64],  # noqa: ARG002
    ) -> NDArray[np.int64]:
        return memory

    def orders(self, epoch: int) -> list[list[NDArray[np.int32]]]:  # noqa: ARG002
        return [[ids.astype(np.int32) for ids in self.order]]


def plan(
    rng: np.random.Generator, objects: int, steps: int, batch: int, *, repeats: bool
) -> list[NDArray[np.intp]]:
    """Return the ids of each step."""
    if repeats:
        return [rng.integers(0, objects, batch) for _ in range(steps)]
    return list(rng.permutation(objects)[: steps * batch].reshape(steps, batch))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("repeats", [False, True])
def test_the_next_use_is_what_a_scan_of_all_plans_finds(seed: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    objects, steps, batch, ranks = 60, 5, 4, int(rng.integers(1, 4))
    uses = NextUses(objects)
    reads: dict[int, list[set[int]]] = {}  # step -> ids by rank
    for epoch in range(3):
        whole = plan(rng, objects, steps, batch * ranks, repeats=repeats and epoch > 0)
        for rank in range(ranks):
            mine = [ids[rank * batch : rank * batch + batch] for ids in whole]
            numbers = np.repeat(np.arange(steps, dtype=np.int32) + epoch * steps, batch)
            cut = int(rng.integers(1, len(numbers)))
            flat = np.concatenate(mine)
            uses.extend(epoch, numbers[:cut], flat[:cut])
            uses.extend(epoch, numbers[cut:], flat[cut:])
            for i, ids in enumerate(mine):
                reads.setdefault(epoch * steps + i, []).append(set(ids.tolist()))
    for step in range(3 * steps):
        expected = np.full(objects, NEVER)
        for later in range(3 * steps - 1, step - 1, -1):
            expected[list(set().union(*reads[later]))] = later
        assert (uses.due[:] == expected).all()
        for read in reads[step]:
            at = np.full(len(read), step, np.int32)
            uses.consume(step // steps, np.array(sorted(read)), at)


def test_epochs_told_far_ahead_cost_no_table_each() -> None:
    uses = NextUses(1000)
    for epoch in range(60):
        uses.extend(epoch, np.array([epoch], np.int32), np.array([epoch % 7]))
        assert uses.nbytes <= (4 + 4 * MAX_EPOCHS) * 1000
    assert uses.due[:][:8].tolist() == [*range(7), NEVER]  # the next use is known all the same
    assert uses.distinct(0)
    assert not uses.distinct(59)  # unknown for an epoch without a table
    uses.drop_before(50)
    uses.extend(59, np.array([60], np.int32), np.array([3]))
    assert not uses.distinct(59)  # and for one that is known in part


@pytest.mark.parametrize("seed", range(30))
def test_sorted_gives_the_largest_present_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, span = (300, 50) if seed % 2 else (40, 3)  # with few objects, keys come back
    key = rng.integers(0, span, n)
    pool = Sorted(n, lambda ids: key[ids])
    held: dict[int, int] = {}
    for _ in range(80):
        key[rng.integers(0, n, 5)] = rng.integers(0, span, 5)
        ids = np.unique(rng.integers(0, n, 20))
        pool.add(ids)
        held.update({int(x): int(key[x]) for x in ids})
        k, above = int(rng.integers(0, 12)), int(rng.integers(-1, span - 1))
        taken = pool.take(k, above).tolist()
        best = sorted((v for v in held.values() if v > above), reverse=True)[:k]
        assert [held.pop(x) for x in taken] == best


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("far", [False, True])
def test_victims_are_distinct_loose_residents_and_never_due_sooner(seed: int, far: bool) -> None:
    """The policies under a random run: pins, releases, epochs, new plans."""
    rng = np.random.default_rng(seed)
    n, steps, batch = 120, 20, 6
    state = np.full(n, RESIDENT, np.uint8)
    pins = np.zeros(n, np.int32)
    uses = NextUses(n)
    policy = (
        FarthestNextUse(state, pins, [uses], lambda: [(1.0, 0.0)])
        if far
        else PlannedEviction(state, pins, uses)
    )
    drawn = [rng.integers(0, n, n) if far else rng.permutation(n) for _ in range(4)]
    plans = [ids.reshape(steps, batch) for ids in drawn]

    def tell(epoch: int) -> None:
        numbers = np.repeat(np.arange(steps, dtype=np.int32) + epoch * steps, batch)
        uses.extend(epoch, numbers, plans[epoch].ravel())
        policy.replanned()

    tell(0)
    for epoch in range(4):
        for step in range(steps):
            now = epoch * steps + step
            if step == 5 and epoch < 3:
                tell(epoch + 1)
            boundary = policy.planning_task(
                Facts(
                    uses,
                    now,
                    epoch + (step >= 5),
                    [plans[epoch + 1].ravel()] if epoch < 3 else [],
                    n // 2,
                )
            )
            if boundary is not None:
                policy.retention_planned(boundary, boundary.plan())
            ids = plans[epoch][step]
            state[ids] = RESIDENT
            uses.consume(epoch, ids, np.full(batch, now, np.int32))
            policy.epoch_began(uses, epoch)
            policy.released(ids)
            pins[:] = rng.random(n) < 0.1
            out = policy.victims(int(rng.integers(0, 8)), now)
            assert len(set(out.tolist())) == len(out)
            assert (state[out] == RESIDENT).all()
            assert (pins[out] == 0).all()
            assert (uses.due[out] > now).all()
            if not far:  # law L1
                assert (uses.due[out] >= (epoch + 1) * steps).all()
            state[out] = rng.choice([0, FETCHING])


@pytest.mark.parametrize("seed", range(30))
def test_objects_read_last_leave_first_where_no_plan_is_known(seed: int) -> None:
    """MostRecentFirst against a list in order of the latest release."""
    rng = np.random.default_rng(seed)
    n = 60
    state, pins = np.full(n, ABSENT, np.uint8), np.zeros(n, np.int32)
    policy = MostRecentFirst(state, pins, [NextUses(n)])
    release = np.zeros(n, np.int64)  # time of each latest release
    for now in range(1, 200):
        ids = rng.integers(0, n, rng.integers(1, 8))
        state[ids] = RESIDENT
        pins[ids] = 0
        release[ids] = now
        policy.released(ids)
        pins[rng.integers(0, n, 3)] = 1
        if rng.random() < 0.05:
            policy.replanned()
        out = policy.victims(int(rng.integers(0, 7)), now)
        assert len(set(out.tolist())) == len(out)
        assert ((state[out] == RESIDENT) & (pins[out] == 0)).all()
        state[out] = ABSENT
        for x in np.flatnonzero(pins).tolist():  # read again at once: released again
            if state[x] == RESIDENT and rng.random() < 0.5:
                pins[x] = 0
                release[x] = now
                policy.released(np.array([x]))
        left = np.flatnonzero((state == RESIDENT) & (pins == 0) & (release < now))
        if len(out) and len(left):
            assert release[out].min() >= release[left].max() or (release[out] == now).any()


def test_a_reader_of_one_step_at_a_time_loses_the_latest_first() -> None:
    n = 10
    state, pins = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32)
    policy = MostRecentFirst(state, pins, [NextUses(n)])
    for x in range(n):
        policy.released(np.array([x]))
    policy.released(np.array([3, 3]))
    pins[9] = 1
    assert policy.victims(3, 0).tolist() == [3, 8, 7]
    state[[3, 8, 7]] = ABSENT
    pins[9] = 0
    policy.replanned()
    assert sorted(policy.victims(2, 0).tolist()) == [6, 9]


@pytest.mark.parametrize("kind", [PlannedEviction, FarthestNextUse, MostRecentFirst])
def test_a_policy_that_nobody_needs_is_gone_at_once(kind: Any) -> None:
    """It has dozens of bytes per object; the collector finds old cycles after hours, if ever."""
    state, pins, uses = np.full(9, RESIDENT, np.uint8), np.zeros(9, np.int32), NextUses(9)
    clock = [lambda: [(1.0, 0.0)]] if kind is FarthestNextUse else []
    policy = kind(state, pins, uses if kind is PlannedEviction else [uses], *clock)
    assert len(policy.victims(3, -1)) == 3
    known = weakref.ref(policy)
    gc.disable()
    try:
        del policy
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(20))
def test_two_jobs_lose_what_both_read_last_on_a_common_clock(seed: int) -> None:
    """FarthestNextUse over two plans against a scan of all residents."""
    rng = np.random.default_rng(seed)
    n = 80
    state, pins = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32)
    jobs, lines = [NextUses(n), NextUses(n)], [(1.0, 0.0), (float(rng.integers(1, 4)), 7.0)]
    for uses in jobs:
        uses.extend(0, np.arange(n, dtype=np.int32), rng.permutation(n))
    policy = FarthestNextUse(state, pins, jobs, lambda: lines)

    def due(x: int) -> float:
        moments = []
        for uses, (a, b) in zip(jobs, lines, strict=True):
            step = int(uses.due[:][x])
            moments.append(a * (uses.beyond if step == NEVER else step) + b)
        return min(moments)

    ends = [uses.beyond for uses in jobs]
    for step in range(40):
        for uses in jobs:
            ids = np.flatnonzero(uses.due[:] == step)
            uses.consume(0, ids)
            policy.released(ids[state[ids] == RESIDENT])
        assert [uses.beyond for uses in jobs] == ends
        need = int(rng.integers(step, 3 * n))
        out = policy.victims(int(rng.integers(0, 4)), need).tolist()
        others = [x for x in np.flatnonzero(state == RESIDENT).tolist() if x not in out]
        assert all(due(x) > need for x in out)
        if out:
            assert min(int(due(x)) for x in out) >= max((int(due(x)) for x in others), default=0)
        state[out] = ABSENT


@pytest.mark.parametrize("alike", [True, False])
def test_a_plan_and_its_policy_take_few_bytes_per_object(*, alike: bool) -> None:
    """Besides the state of each object, 5 bytes."""
    n, batch = 100_000, 100
    rng = np.random.default_rng(0)
    state, pins, uses = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32), NextUses(n)
    orders = [rng.permutation(n) for _ in range(2)]
    steps = np.repeat(np.arange(n // batch, dtype=np.int32), batch)
    for epoch, ids in enumerate(orders):
        uses.extend(epoch, steps + np.int32(epoch * n // batch), ids)
    size = np.ones(1 if alike else n, np.int64)
    facts = Facts(uses, 0, 1, orders[1:], n // 2, float(n), size)
    tracemalloc.start()
    try:
        policy = PlannedEviction(state, pins, uses)
        boundary = policy.planning_task(facts)
        assert boundary is not None
        policy.retention_planned(boundary, boundary.plan())
        del boundary  # the session keeps its orders anyway
        for ids in orders[0].reshape(-1, batch):
            uses.consume(0, ids)
            policy.released(ids)
            gone = policy.victims(batch // 2, 0)
            state[gone] = ABSENT
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= 3 * n


def test_homes_that_a_shortage_cost_are_kept_again_in_the_next_epoch() -> None:
    view = cluster_view([-1, 7], 4000)
    homes, uses = Homes([view]), NextUses(40)
    state, pins = np.full(40, ABSENT, np.uint8), np.zeros(40, np.int32)
    mine, others = (np.flatnonzero(homes.mine(np.arange(40)) == x) for x in (True, False))
    policy = HomesEviction(state, pins, [uses], homes)

    def read(ids: NDArray[np.intp]) -> None:
        state[ids] = RESIDENT
        policy.released(ids)

    read(mine[:8])
    lost = policy.victims(4, 0)
    assert set(lost.tolist()) < set(mine.tolist())
    state[lost] = ABSENT
    read(lost)
    assert sorted(policy.victims(4, 1)) == sorted(lost), "more than there was room for is kept"
    read(lost)
    policy.epoch_began(uses, 1)
    read(others[:2])
    read(lost)
    assert sorted(policy.victims(2, 2)) == others[:2].tolist()


def test_objects_at_home_elsewhere_leave_before_those_on_disk() -> None:
    view = cluster_view([-1, 7], 4000)
    homes, n = Homes([view]), 40
    state, pins = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32)
    policy = HomesEviction(state, pins, [NextUses(n)], homes)
    others = np.flatnonzero(~homes.mine(np.arange(n)))
    policy.released(np.arange(n))
    assert sorted(policy.unneeded(n, 0)) == others.tolist()
    assert not len(policy.unneeded(n, 0))
    state[others] = ABSENT
    assert not len(policy.victims(n, FOR_PEERS)), "what is kept left for a peer's sake"
    assert len(policy.victims(n, 0)) == n - len(others)
