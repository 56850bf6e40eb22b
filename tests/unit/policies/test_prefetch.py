"""Plans of sessions, windows and portions."""

from __future__ import annotations

import numpy as np
import pytest

from creel.cache.memory.pools.allocator import Allocator
from creel.daemon.core.admission import Admission
from creel.daemon.core.inflight import Inflight
from creel.policies.prefetch import Latency, Pace, SessionPlan, affordable, portions
from kit import default_window


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_is_the_list_of_its_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream = SessionPlan()
    steps: list[list[int]] = []
    epochs: list[int] = []
    epoch = done = 0
    for _ in range(40):
        chance = rng.random()
        if chance < 0.6:
            parts = [rng.integers(0, 99, rng.integers(0, 4)).tolist() for _ in range(5)]
            flat = np.array([x for p in parts for x in p], np.int32)
            stream.extend(epoch, flat, np.cumsum([len(p) for p in parts]))
            steps += parts
            epochs += [epoch] * 5
            epoch += int(rng.integers(0, 2))
        elif chance < 0.8:
            done = int(rng.integers(done, len(steps) + 1))
            stream.drop_before(done)
        else:
            cut = int(rng.integers(done, len(steps) + 2))
            stream.truncate(cut)
            del steps[cut:], epochs[cut:]
        compare(stream, steps, epochs, done)


def compare(stream: SessionPlan, steps: list[list[int]], epochs: list[int], done: int) -> None:
    assert stream.end == len(steps)
    starts = np.cumsum([0, *map(len, steps)]).tolist()
    flat = [x for step in steps for x in step]
    for step in range(done, len(steps)):
        assert stream.start(step) == starts[step]
        assert stream.objects(starts[step], starts[step + 1]).tolist() == steps[step]
        until = next((i for i in range(step, len(steps)) if epochs[i] != epochs[step]), len(steps))
        assert stream.epoch(step) == (epochs[step], until)
    assert stream.stop == len(flat)
    assert stream.nbytes >= 4 * (len(flat) - starts[done]) + 8 * (len(steps) - done)
    for position in range(starts[done], len(flat) + 1):
        assert stream.step_at(position) == max(i for i, s in enumerate(starts) if s <= position)
    numbers = [i for i, step in enumerate(steps) for _ in step][starts[done] :]
    if numbers:
        assert stream.steps(starts[done], len(flat)).tolist() == numbers


def test_many_small_pieces_and_much_progress_keep_memory_small() -> None:
    stream = SessionPlan()
    for step in range(30_000):
        stream.extend(step // 100, np.arange(8, dtype=np.int32), np.array([8]))
        stream.drop_before(max(step - 10, 0))
    assert stream.nbytes < 200_000  # of 1.2 MB


def test_portions_cover_all_within_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        nbytes = rng.integers(0, 1000, rng.integers(1, 300))
        window = default_window(fetch_objects=int(rng.integers(1, 70)), fetch_nbytes=5000)
        cuts = portions(nbytes, window)
        assert [c.start for c in cuts[1:]] == [c.stop for c in cuts[:-1]]
        assert (cuts[0].start, cuts[-1].stop) == (0, len(nbytes))
        assert max(c.stop - c.start for c in cuts) <= window.fetch_objects


def test_affordable_objects_are_a_prefix() -> None:
    assert affordable(np.array([5, 1]), 4) == 0
    assert affordable(np.array([5, 1]), 6) == 2
    assert affordable(np.array([], np.int64), 6) == 0
    assert affordable(np.array([1]), -3) == 0


def test_the_horizon_hides_the_latency_and_suits_the_readers() -> None:
    window = default_window(min_steps=4, max_steps=100)
    pace = Pace(0.0)
    assert pace.horizon(1.0, window) == 4
    for step in range(20):
        pace.progressed(1, 0.1 * (step + 1))
    assert pace.step_s == pytest.approx(0.1)
    assert pace.horizon(1.0, window) == 24
    pace.asked(40, stalls=False)
    assert pace.horizon(1.0, window) == 42
    pace.asked(3, stalls=True)
    assert pace.horizon(1.0, window) == 48
    pace.progressed(10_000, 100.0)
    assert pace.horizon(1e9, window) == 100


def test_latency_is_above_nearly_all_that_was_seen() -> None:
    rng = np.random.default_rng(0)
    latency = Latency()
    below = 0
    for i in range(2000):
        seconds = float(rng.lognormal(-4, 0.5))
        below += i > 100 and seconds < latency.seconds
        latency.saw(seconds)
    assert below > 0.97 * 1900


def test_a_quarter_of_what_is_under_way_is_left_to_those_who_wait() -> None:
    window = default_window(inflight_objects=8, inflight_nbytes=800)
    flights = Inflight(Admission(Allocator(1 << 20)), window, emit=lambda _: None)
    for nbytes in (1, 100):
        objects = np.full(20, nbytes)
        assert flights.may_start(objects, urgent=False) == 6
        assert flights.may_start(objects, urgent=True) == 8
