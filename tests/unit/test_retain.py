"""Next uses, lists of candidates and keepers against plain Python oracles."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.policies.pools import Sorted, Spread
from creel.policies.retain import FETCHING, RESIDENT, EpochKeeper, FarKeeper, Need
from creel.policies.uses import NEVER, Uses


def plan(
    rng: np.random.Generator, objects: int, steps: int, batch: int, *, repeats: bool
) -> list[NDArray[np.intp]]:
    """Ids of each step."""
    if repeats:
        return [rng.integers(0, objects, batch) for _ in range(steps)]
    return list(rng.permutation(objects)[: steps * batch].reshape(steps, batch))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("repeats", [False, True])
def test_the_next_use_is_what_a_scan_of_all_plans_finds(seed: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    objects, steps, batch, ranks = 60, 5, 4, int(rng.integers(1, 4))
    uses = Uses(objects)
    told: dict[int, list[set[int]]] = {}  # step -> by rank
    for epoch in range(3):
        whole = plan(rng, objects, steps, batch * ranks, repeats=repeats and epoch > 0)
        for rank in range(ranks):
            mine = [ids[rank * batch : rank * batch + batch] for ids in whole]
            numbers = np.repeat(np.arange(steps, dtype=np.int32) + epoch * steps, batch)
            cut = int(rng.integers(1, len(numbers)))
            flat = np.concatenate(mine)
            uses.extend(epoch, numbers[:cut], flat[:cut], rank)
            uses.extend(epoch, numbers[cut:], flat[cut:], rank)
            for i, ids in enumerate(mine):
                told.setdefault(epoch * steps + i, []).append(set(ids.tolist()))
    for step in range(3 * steps):
        expected = np.full(objects, NEVER)
        for later in range(3 * steps - 1, step - 1, -1):
            expected[list(set().union(*told[later]))] = later
        assert (uses.due == expected).all()
        for read in told[step]:
            at = np.full(len(read), step, np.int32)
            uses.consume(step // steps, np.array(sorted(read)), at)


@pytest.mark.parametrize("seed", range(30))
def test_spread_always_draws_from_a_fullest_bucket(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, buckets = 200, int(rng.integers(1, 20))
    bucket = rng.integers(-1, buckets, n)
    pool = Spread(bucket, buckets)
    held: set[int] = set()
    for _ in range(60):
        new = np.array(sorted(set(rng.integers(0, n, 9).tolist()) - held), np.intp)
        lost = set(pool.add(new).tolist())
        assert lost == {int(x) for x in new if bucket[x] < 0}
        held |= set(new.tolist()) - lost
        for x in pool.take(int(rng.integers(0, 9))).tolist():
            counts = np.bincount(bucket[sorted(held)], minlength=buckets)
            assert counts[bucket[x]] == counts.max()
            held.remove(x)
    assert sorted(pool.take(n).tolist()) == sorted(held)


def test_spread_takes_ties_evenly_over_the_epoch() -> None:
    first = np.repeat(np.arange(1000, dtype=np.int32), 10)
    pool = Spread.by_step(first, np.zeros(10_000, np.uint8))
    pool.add(np.arange(10_000))
    gone = first[pool.take(10_000 - 5_437)]
    left = 10 - np.bincount(gone, minlength=1000)
    assert set(left.tolist()) == {5, 6}
    assert np.abs(left.reshape(20, 50).sum(1) - 5.437 * 50).max() < 3


@pytest.mark.parametrize("seed", range(30))
def test_sorted_gives_the_largest_present_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 300
    key = rng.integers(0, 50, n)
    pool = Sorted(n, lambda ids: key[ids])
    held: dict[int, int] = {}
    for _ in range(80):
        key[rng.integers(0, n, 5)] = rng.integers(0, 50, 5)
        ids = np.unique(rng.integers(0, n, 20))
        pool.add(ids)
        held.update({int(x): int(key[x]) for x in ids})
        k, above = int(rng.integers(0, 12)), int(rng.integers(-1, 40))
        taken = pool.take(k, above).tolist()
        best = sorted((v for v in held.values() if v > above), reverse=True)[:k]
        assert [held.pop(x) for x in taken] == best


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("far", [False, True])
def test_victims_are_distinct_loose_residents_and_never_due_sooner(seed: int, far: bool) -> None:
    """The keepers under a random life: pins, releases, turns, new plans."""
    rng = np.random.default_rng(seed)
    n, steps, batch = 120, 20, 6
    life = np.full(n, RESIDENT, np.uint8)
    pins = np.zeros(n, np.int32)
    uses = Uses(n)
    keeper = (
        FarKeeper(life, pins, [uses], lambda: [(1.0, 0.0)])
        if far
        else EpochKeeper(life, pins, uses)
    )
    drawn = [rng.integers(0, n, n) if far else rng.permutation(n) for _ in range(4)]
    plans = [ids.reshape(steps, batch) for ids in drawn]

    def tell(epoch: int) -> None:
        numbers = np.repeat(np.arange(steps, dtype=np.int32) + epoch * steps, batch)
        uses.extend(epoch, numbers, plans[epoch].ravel())
        keeper.stale = True

    tell(0)
    for epoch in range(4):
        for step in range(steps):
            now = epoch * steps + step
            if step == 5 and epoch < 3:
                tell(epoch + 1)
                if isinstance(keeper, EpochKeeper):
                    keeper.known = epoch + 1
            ids = plans[epoch][step]
            life[ids] = RESIDENT
            uses.consume(epoch, ids, np.full(batch, now, np.int32))
            if isinstance(keeper, EpochKeeper) and epoch > keeper.epoch:
                keeper.turn(epoch)
            keeper.released(ids)
            pins[:] = rng.random(n) < 0.1
            out = keeper.victims(int(rng.integers(0, 8)), Need(epoch, now))
            assert len(set(out.tolist())) == len(out)
            assert (life[out] == RESIDENT).all()
            assert (pins[out] == 0).all()
            assert (uses.due[out] > now).all()
            if not far:  # law L1
                assert (uses.due[out] >= (epoch + 1) * steps).all()
            life[out] = rng.choice([0, FETCHING])


def test_loans_across_the_turn_are_limited() -> None:
    n, steps = 100, 10
    life, pins, uses = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32), Uses(n)
    keeper = EpochKeeper(life, pins, uses)
    numbers = np.repeat(np.arange(steps, dtype=np.int32), 10)
    for epoch in (0, 1):
        uses.extend(epoch, numbers + epoch * steps, np.arange(n))
    keeper.known, keeper.lend = 1, 7
    uses.consume(0, np.arange(10, 100))
    keeper.released(np.arange(10, 100))
    assert len(keeper.victims(50, Need(1, 10))) == 7
    assert len(keeper.victims(50, Need(1, 10))) == 0
    assert len(keeper.victims(50, Need(0, 9))) == 50


def test_what_no_plan_reads_leaves_first() -> None:
    n = 40
    life, pins, uses = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32), Uses(n)
    keeper = EpochKeeper(life, pins, uses)
    uses.extend(0, np.zeros(n, np.int32), np.arange(n))
    uses.extend(1, np.ones(30, np.int32), np.arange(30))
    keeper.known = 1
    uses.consume(0, np.arange(n))
    assert sorted(keeper.victims(10, Need(0, 0)).tolist()) == list(range(30, 40))
