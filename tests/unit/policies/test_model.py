"""The model of a rank's waits, against a simulation that hands out batches as torch does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.policies.model import (
    RankWindow,
    cause,
    enough_workers,
    finished,
    forecast,
    recent,
    storage_s,
    straggler,
    utilisation,
    with_decoded,
    with_memory,
    with_workers,
)

AHEAD = 2  # batches asked ahead of each worker, as torch's prefetch_factor


def simulated(cost: NDArray[np.float64], workers: int, train_s: float) -> NDArray[np.float64]:
    """Return (n,) seconds that training waits for each batch; worker i mod W makes batch i."""
    free = np.zeros(workers)
    asked = np.zeros(len(cost))  # when the task of a batch was sent
    waits = np.zeros(len(cost))
    now = 0.0
    for i, seconds in enumerate(cost):
        free[i % workers] = max(free[i % workers], asked[i]) + seconds
        waits[i] = max(free[i % workers] - now, 0.0)
        now += waits[i]
        if i + AHEAD * workers < len(cost):
            asked[i + AHEAD * workers] = now
        now += train_s
    return waits


def window(
    cost: NDArray[np.float64], waits: NDArray[np.float64], workers: int, train_s: float
) -> RankWindow:
    """Return the counters of these batches."""
    waited = float(waits.sum())
    return RankWindow(
        len(cost) * train_s + waited,
        len(cost),
        workers,
        {"decode": float(cost.sum())},
        {"decode": waited},
    )


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("load", [0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_window_foretells_the_next(workers: int, load: float, spread: float) -> None:
    rng, mean, train_s = np.random.default_rng(workers), 0.1, 0.05
    mean = load * workers * train_s
    cost = mean * rng.gamma(1 / spread**2, spread**2, 4096) if spread else np.full(4096, mean)
    waits = simulated(cost, workers, train_s)
    first, second = slice(1024, 2560), slice(2560, 4096)
    (outlook,) = forecast([window(cost[first], waits[first], workers, train_s)])
    came = train_s + waits[second].mean()
    assert outlook.step_s == pytest.approx(came, rel=0.1)
    assert outlook.step_s == pytest.approx(train_s + outlook.wait_s)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_more_workers_bring_what_the_simulation_says(workers: int) -> None:
    cost, train_s = np.full(2048, 0.4), 0.05
    window_of = window(cost, simulated(cost, workers, train_s), workers, train_s)
    for more in (workers + 1, 2 * workers, 8, 16):
        (outlook,) = forecast([with_workers(window_of, more)])
        came = train_s + simulated(cost, more, train_s)[64:].mean()
        assert outlook.step_s == pytest.approx(came, rel=0.03)


def behind_storage(
    own_s: float, storage_s: float, workers: int, train_s: float, batches: int = 600
) -> RankWindow:
    """Return the last batches of workers that need what a storage reads ahead, one batch at a time.

    It reads at most 8 batches further than training is, as the daemon's window has it. Without
    workers, training makes its batches itself.
    """
    free = np.zeros(max(workers, 1))
    read = now = source = 0.0
    taken, asked = [0.0] * batches, [0.0] * batches
    waited = 0.0
    for i in range(batches):
        read = max(read, taken[i - 8] if i >= 8 else 0.0) + storage_s
        worker = i % max(workers, 1)
        begin = max(free[worker], asked[i], now if not workers else 0.0)
        ready = max(begin, read)
        free[worker] = ready + own_s
        wait_s = max(free[worker] - now, 0.0)
        now += wait_s
        taken[i] = now
        if i + AHEAD * workers < batches:
            asked[i + AHEAD * workers] = now
        if i >= batches - 512:
            source, waited = source + ready - begin, waited + wait_s
        now += train_s
    seconds = taken[-1] - taken[-513]
    busy = {"source": source, "decode": 512 * own_s}
    return RankWindow(seconds, 512, workers, busy, {"all": waited})


def step_s(window_seen: RankWindow) -> float:
    return window_seen.seconds / window_seen.batches


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("own_s", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("storage", [0.01, 0.08, 0.2])
def test_changes_bring_what_a_simulated_storage_says(
    workers: int, own_s: float, storage: float
) -> None:
    """Storage reads ahead, so its time and that of the workers do not add up."""
    train_s = 0.05
    rank = behind_storage(own_s, storage, workers, train_s)
    for share in (0.0, 0.25, 0.5, 1.0):
        came = step_s(behind_storage(own_s, storage * (1 - share), workers, train_s))
        (outlook,) = forecast([with_memory(rank, share)])
        assert outlook.step_s == pytest.approx(came, rel=0.1), share
    for more in (workers + 1, 2 * workers + 2, 8):
        came = step_s(behind_storage(own_s, storage, more, train_s))
        (outlook,) = forecast([with_workers(rank, more)])
        # A storage that keeps up may be the next to be waited for: nobody knows its pace.
        if storage_s(rank) or came >= 0.99 * max(own_s / more, train_s) >= storage:
            assert outlook.step_s == pytest.approx(came, rel=0.1), more
        assert outlook.step_s <= 1.1 * came
    for share in (0.5, 1.0):
        came = step_s(
            behind_storage(own_s * (1 - 0.8 * share), storage * (1 - share), workers, train_s)
        )
        (outlook,) = forecast([with_decoded(rank, share, again=0.9, copies=0.1)])
        assert outlook.step_s == pytest.approx(came, rel=0.1), share


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_change_that_changes_nothing_is_worth_nothing(workers: int, seed: int) -> None:
    """However long training waits for other reasons: the start of workers in short epochs."""
    rng = np.random.default_rng([seed, workers])
    source, decode, waits, trains = rng.exponential([seed % 4, 8.0, 8.0, 8.0])
    waited = waits + (decode + source) / max(workers, 1)
    busy = {"source": source, "decode": decode}
    rank = RankWindow(trains + waited, 64, workers, busy, {"all": waited}, cpu_s=decode)
    cores = float(rng.integers(1, 5))
    (now,) = forecast([rank], cores)
    if workers:
        (same,) = forecast([with_workers(rank, workers)], cores)
        assert same.step_s == pytest.approx(now.step_s)
    for unchanged in (with_memory(rank, 0.0), with_decoded(rank, 0.0, 0.5, 0.1)):
        (same,) = forecast([unchanged], cores)
        assert same.step_s == pytest.approx(now.step_s)
    (held,) = forecast([with_memory(rank)], cores)
    gain = now.step_s - held.step_s
    edges = source / 64 / 64
    most = source / 64 / max(workers, 1) + edges
    assert -1e-9 <= gain <= most + 1e-9, "no more than it takes away"
    (again,) = forecast([with_memory(with_memory(rank))], cores)
    assert again.step_s == pytest.approx(held.step_s)


def test_batches_that_come_by_twos_leave_no_wait_once_memory_has_them() -> None:
    """Two workers deliver together, and one batch of the first two lies before the window."""
    each_s, turns = 0.2, 32
    busy = {"source": (2 * turns - 1) * each_s}
    rank = RankWindow(turns * each_s, 2 * turns - 1, 2, busy, {"all": 0.9 * turns * each_s})
    assert step_s(with_memory(rank)) == pytest.approx(rank.train_s)


def test_finished_batches_last_as_long_as_it_says() -> None:
    train_s, supply_s, finished = 0.1, 0.125, 8
    rank = RankWindow(10.0, 100, 1, {"decode": 100 * supply_s}, {}, finished=finished)
    (outlook,) = forecast([rank])
    steps = 0
    left, coming = float(finished), 0.0
    while left >= 1:
        coming += train_s / supply_s
        left += coming // 1 - 1
        coming %= 1
        steps += 1
    assert outlook.in_steps == pytest.approx(steps, abs=1 / (1 - train_s / supply_s))


def test_ranks_step_together_and_the_latest_is_named() -> None:
    """A quick rank waits for the slow one in its collective: that is no time of training."""
    slow = RankWindow(20.0, 100, 2, {"decode": 40.0}, {"decode": 10.0})
    quick = RankWindow(20.0, 100, 2, {"decode": 10.0}, {})
    outlooks = forecast([quick, slow])
    assert [round(outlook.wait_s, 9) for outlook in outlooks] == [0.0, 0.1]
    assert {outlook.step_s for outlook in outlooks} == {0.2}
    assert straggler(outlooks) == 1
    assert straggler(forecast([slow, slow])) is None
    assert straggler(forecast([quick, quick])) is None
    assert straggler(forecast([slow])) is None


def test_cores_that_do_not_suffice_bound_the_step() -> None:
    each = RankWindow(10.0, 100, 4, {"decode": 10.0}, {}, cpu_s=10.0)
    assert forecast([each] * 4, cores=8)[0].wait_s == 0
    assert forecast([each] * 4, cores=2)[0].step_s == pytest.approx(0.2)


def test_without_workers_each_batch_is_waited_for() -> None:
    """Training makes its batches itself: no number of finished ones ever waits."""
    alone = RankWindow(10.0, 100, 0, {"source": 1.0, "decode": 3.0}, {"source": 1.0, "decode": 3.0})
    (outlook,) = forecast([alone])
    assert (outlook.wait_s, outlook.step_s, outlook.in_steps) == pytest.approx((0.04, 0.1, 0.0))
    (helped,) = forecast([with_workers(alone, 1)])
    assert helped.wait_s == 0
    assert helped.step_s == pytest.approx(0.06)


def test_memory_and_decoded_samples_take_their_stages_away() -> None:
    rank = RankWindow(20.0, 100, 2, {"source": 30.0, "decode": 10.0}, {"source": 10.0}, cpu_s=10.0)
    assert forecast([rank])[0].cause == "source"
    (held,) = forecast([with_memory(rank, 1.0)])
    assert (held.wait_s, held.cause) == (0.0, "decode")
    (half,) = forecast([with_memory(rank, 0.5)])
    assert half.supply_s == pytest.approx(0.1)
    kept = with_decoded(rank, 1.0, again=0.6, copies=0.1)
    assert kept.busy_s == pytest.approx({"source": 0.0, "decode": 5.0}), "the rest is transforms"
    assert kept.cpu_s == pytest.approx(5.0)
    part = with_decoded(rank, 0.4, again=0.6, copies=0.1)
    assert part.busy_s == pytest.approx({"source": 16.0, "decode": 8.0})
    assert with_decoded(rank, 1.0, again=0.1, copies=0.6).busy_s["decode"] == 10.0


@pytest.mark.parametrize("cores, workers", [(64.0, 4), (3.0, 3), (2.0, None), (1.0, None)])
def test_enough_workers_are_the_fewest_that_help_and_no_more_than_cores(
    cores: float, workers: int | None
) -> None:
    slow = RankWindow(10.0, 50, 2, {"decode": 20.0}, {"decode": 5.0})
    assert enough_workers([slow], cores) == workers
    spent = RankWindow(10.0, 50, 2, {"decode": 20.0}, {"decode": 5.0}, cpu_s=20.0)
    assert enough_workers([spent], 2.0) is None
    assert enough_workers([slow, slow], cores) == workers


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("load", [0.5, 1.1, 2.0])
def test_utilisation_is_what_did_not_wait(workers: int, load: float) -> None:
    """Of the last ten seconds, whatever came before."""
    train_s = 0.05
    cost = np.full(1024, load * workers * train_s)
    waits = simulated(cost, workers, train_s)
    taken = np.cumsum(waits + train_s) - train_s
    ns = (1e9 * taken).astype(np.int64)
    began = ns - (1e9 * waits).astype(np.int64)
    share = utilisation(began, ns)
    assert share == pytest.approx(min(1 / load, 1.0), rel=0.02)
    assert len(ns[recent(ns)]) == pytest.approx(10 / (train_s * max(load, 1)), abs=3)
    assert utilisation(ns[:1], ns[:1]) is None
    assert utilisation(ns[:0], ns[:0]) is None


def test_slow_steps_are_counted_by_number() -> None:
    taken = np.arange(100, dtype=np.int64) * 10**11
    assert len(taken[recent(taken)]) == 33
    assert utilisation(taken - 10**10, taken) == pytest.approx(0.9)
    # Two loaders of a rank wait at once: no moment counts twice.
    twice = np.repeat(taken, 2)
    assert utilisation(twice - 10**10, twice) == pytest.approx(0.9)


def test_batches_that_lie_finished_are_counted() -> None:
    train_s, cost = 0.1, np.full(256, 0.05)
    waits = simulated(cost, 1, train_s)
    taken = np.cumsum(waits + train_s) - train_s
    packed = taken - 0.12  # each lies finished for more than a step
    assert finished(*((1e9 * t).astype(np.int64) for t in (packed, taken))) == 1
    assert (
        finished(*((1e9 * t).astype(np.int64) for t in (taken - waits / 2, taken - waits / 2))) == 0
    )


@pytest.mark.parametrize(
    "busy, cpu_s, expected",
    [
        ({"decode": 8.0, "source": 1.0}, 8.0, "decode"),
        ({"decode": 8.0, "source": 1.0}, 1.0, "waiting"),
        ({"decode": 8.0, "source": 1.0}, 30.0, "threads"),
        ({"decode": 8.0, "source": 1.0}, -1.0, "decode"),
        ({"decode": 1.0, "source": 8.0}, 30.0, "source"),
        ({"decode": 0.0}, 0.0, ""),
        ({}, 0.0, ""),
    ],
)
def test_the_cause_tells_computing_from_waiting(
    busy: dict[str, float], cpu_s: float, expected: str
) -> None:
    assert cause(RankWindow(10.0, 10, 2, busy, {}, cpu_s=cpu_s)) == expected


def test_nothing_is_foretold_of_nothing() -> None:
    assert forecast([]) == []
    assert straggler([]) is None
    (idle,) = forecast([RankWindow(10.0, 1, 2, {}, {})])
    assert (idle.wait_s, idle.in_steps, idle.cause) == (0.0, math.inf, "")
