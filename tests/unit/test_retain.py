"""Next uses, lists of candidates and keepers against plain Python oracles."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.policies.pools import Sorted, Spread, Tray
from creel.policies.retain import (
    ABSENT,
    FETCHING,
    RESIDENT,
    EpochKeeper,
    FarKeeper,
    Need,
    RecentKeeper,
)
from creel.policies.uses import MAX_EPOCHS, NEVER, Uses


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
        assert (uses.due[:] == expected).all()
        for read in told[step]:
            at = np.full(len(read), step, np.int32)
            uses.consume(step // steps, np.array(sorted(read)), at)


@pytest.mark.parametrize("seed", range(30))
def test_spread_always_draws_from_a_fullest_bucket(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, buckets = 200, int(rng.integers(1, 20))
    bucket = rng.integers(-1, buckets, n)
    pool = Spread(bucket.__getitem__, buckets, n)
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


def test_epochs_told_far_ahead_cost_no_table_each() -> None:
    uses = Uses(1000)
    for epoch in range(60):
        uses.extend(epoch, np.array([epoch], np.int32), np.array([epoch % 7]))
        assert uses.nbytes <= (4 + 5 * MAX_EPOCHS) * 1000
    assert uses.due[:][:8].tolist() == [*range(7), NEVER]  # the next use is learnt all the same
    assert uses.distinct(0)
    assert not uses.distinct(59)  # of an epoch without a table nobody knows
    uses.forget(50)
    uses.extend(59, np.array([60], np.int32), np.array([3]))
    assert not uses.distinct(59)  # nor of one that was told in part


def test_spread_takes_ties_evenly_over_the_epoch() -> None:
    first = np.repeat(np.arange(1000, dtype=np.int32), 10)
    pool = Spread.by_step(first, np.zeros(10_000, np.uint8), (0, 1000))
    pool.add(np.arange(10_000))
    gone = first[pool.take(10_000 - 5_437)]
    left = 10 - np.bincount(gone, minlength=1000)
    assert set(left.tolist()) == {5, 6}
    assert np.abs(left.reshape(20, 50).sum(1) - 5.437 * 50).max() < 3


@pytest.mark.parametrize("seed", range(30))
def test_sorted_gives_the_largest_present_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, span = (300, 50) if seed % 2 else (40, 3)  # of so few, keys come back
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
    keeper.known, keeper.lend_more = 1, 7
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


@pytest.mark.parametrize("seed", range(30))
def test_what_was_read_last_leaves_first_where_nobody_knows_what_comes(seed: int) -> None:
    """RecentKeeper against a list in order of the latest release."""
    rng = np.random.default_rng(seed)
    n = 60
    life, pins = np.full(n, ABSENT, np.uint8), np.zeros(n, np.int32)
    keeper = RecentKeeper(life, pins, [Uses(n)])
    release = np.zeros(n, np.int64)  # when each was released last
    for now in range(1, 200):
        ids = rng.integers(0, n, rng.integers(1, 8))
        life[ids] = RESIDENT
        pins[ids] = 0
        release[ids] = now
        keeper.released(ids)
        pins[rng.integers(0, n, 3)] = 1
        keeper.stale = bool(rng.random() < 0.05) or keeper.stale
        out = keeper.victims(int(rng.integers(0, 7)), Need(0, now))
        assert len(set(out.tolist())) == len(out)
        assert ((life[out] == RESIDENT) & (pins[out] == 0)).all()
        life[out] = ABSENT
        for x in np.flatnonzero(pins).tolist():  # read again at once: they are released anew
            if life[x] == RESIDENT and rng.random() < 0.5:
                pins[x] = 0
                release[x] = now
                keeper.released(np.array([x]))
        left = np.flatnonzero((life == RESIDENT) & (pins == 0) & (release < now))
        if len(out) and len(left):
            assert release[out].min() >= release[left].max() or (release[out] == now).any()


def test_a_reader_of_one_step_at_a_time_loses_the_latest_first() -> None:
    n = 10
    life, pins = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32)
    keeper = RecentKeeper(life, pins, [Uses(n)])
    for x in range(n):
        keeper.released(np.array([x]))
    keeper.released(np.array([3, 3]))
    pins[9] = 1
    assert keeper.victims(3, Need(0, 0)).tolist() == [3, 8, 7]
    life[[3, 8, 7]] = ABSENT
    pins[9] = 0
    keeper.stale = True
    assert sorted(keeper.victims(2, Need(0, 0)).tolist()) == [6, 9]


@pytest.mark.parametrize("kind", [EpochKeeper, FarKeeper, RecentKeeper])
def test_a_keeper_that_nobody_needs_is_gone_at_once(kind: Any) -> None:
    """It has dozens of bytes an object; the collector comes to old rings once in hours, if ever."""
    life, pins, uses = np.full(9, RESIDENT, np.uint8), np.zeros(9, np.int32), Uses(9)
    clock = [lambda: [(1.0, 0.0)]] if kind is FarKeeper else []
    keeper = kind(life, pins, uses if kind is EpochKeeper else [uses], *clock)
    assert len(keeper.victims(3, Need(0, -1))) == 3
    known = weakref.ref(keeper)
    gc.disable()
    try:
        del keeper
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(20))
def test_two_jobs_lose_what_both_read_last_on_a_common_clock(seed: int) -> None:
    """FarKeeper over two plans against a scan of all residents."""
    rng = np.random.default_rng(seed)
    n = 80
    life, pins = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32)
    jobs, lines = [Uses(n), Uses(n)], [(1.0, 0.0), (float(rng.integers(1, 4)), 7.0)]
    for uses in jobs:
        uses.extend(0, np.arange(n, dtype=np.int32), rng.permutation(n))
    keeper = FarKeeper(life, pins, jobs, lambda: lines)

    def due(x: int) -> float:
        found = []
        for uses, (a, b) in zip(jobs, lines, strict=True):
            step = int(uses.due[:][x])
            found.append(a * (uses.beyond if step == NEVER else step) + b)
        return min(found)

    ends = [uses.beyond for uses in jobs]
    for step in range(40):
        for uses in jobs:
            ids = np.flatnonzero(uses.due[:] == step)
            uses.consume(0, ids)
            keeper.released(ids[life[ids] == RESIDENT])
        assert [uses.beyond for uses in jobs] == ends
        need = Need(0, int(rng.integers(step, 3 * n)))
        out = keeper.victims(int(rng.integers(0, 4)), need).tolist()
        rest = [x for x in np.flatnonzero(life == RESIDENT).tolist() if x not in out]
        assert all(due(x) > need.step for x in out)
        if out:
            assert min(int(due(x)) for x in out) >= max((int(due(x)) for x in rest), default=0)
        life[out] = ABSENT


@pytest.mark.parametrize("seed", range(30))
def test_a_tray_gives_the_tightest_fits_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    room = rng.integers(1, 100, 200)
    tray, held = Tray(room), list[int]()
    for _ in range(30):
        new = [x for x in set(rng.integers(0, 200, 12).tolist()) if x not in held]
        tray.add(np.array(new, np.intp))
        held += new
        wants = np.sort(rng.integers(1, 110, rng.integers(0, 9)))
        got = tray.fit(wants).tolist()
        for want, x in zip(wants.tolist(), got, strict=True):  # ascending: greedy is best
            fits = sorted(int(room[y]) for y in held if room[y] >= want)
            assert (x >= 0) == bool(fits)
            if fits:
                assert room[x] == fits[0]
                held.remove(x)
        assert len(tray) == len(held)
        assert tray.nbytes == sum(int(room[x]) for x in held)


@pytest.mark.parametrize("seed", range(20))
def test_who_makes_room_for_another_has_it_and_is_read_no_more_in_this_epoch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, steps, batch = 120, 20, 6
    life, pins, uses = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32), Uses(n)
    room = rng.integers(10, 100, n)
    keeper = EpochKeeper(life, pins, uses, room=room)
    plans = [rng.permutation(n).reshape(steps, batch) for _ in range(4)]
    for epoch in range(4):
        numbers = np.repeat(np.arange(steps, dtype=np.int32) + epoch * steps, batch)
        uses.extend(epoch, numbers, plans[epoch].ravel())
    keeper.known, keeper.begin = 3, 2
    for epoch in range(4):
        for step, ids in enumerate(plans[epoch]):
            life[ids] = RESIDENT
            uses.consume(epoch, ids)
            if epoch > keeper.epoch:
                keeper.turn(epoch)
            keeper.released(ids)
            pins[:] = rng.random(n) < 0.1
            wants = rng.integers(10, 110, rng.integers(0, 5))
            out = keeper.fitting(wants, Need(epoch, epoch * steps + step))
            got = out[out >= 0]
            assert len(set(got.tolist())) == len(got)
            assert (room[got] >= wants[out >= 0]).all()
            assert ((life[got] == RESIDENT) & (pins[got] == 0)).all()
            assert (uses.due[got] >= (epoch + 1) * steps).all()  # law L1
            life[got] = ABSENT
            room[got] = rng.integers(10, 100, len(got))


def test_what_the_next_epoch_begins_with_leaves_last() -> None:
    n = 100
    life, pins, uses = np.full(n, RESIDENT, np.uint8), np.zeros(n, np.int32), Uses(n)
    keeper = EpochKeeper(life, pins, uses)
    numbers = np.repeat(np.arange(10, dtype=np.int32), 10)
    for epoch in (0, 1):
        uses.extend(epoch, numbers + 10 * epoch, np.arange(n))
    keeper.known, keeper.begin = 1, 3
    uses.consume(0, np.arange(n))
    keeper.released(np.arange(n))
    assert keeper.victims(70, Need(0, 9)).min() == 30
    assert sorted(keeper.victims(99, Need(0, 9)).tolist()) == list(range(30))
