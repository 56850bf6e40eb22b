"""How many threads read from a source, depending on the cost of its reads."""

from __future__ import annotations

import numpy as np
import pytest

from creel.policies.concurrency import Concurrency, SampleTimes

CORES = 4


@pytest.mark.parametrize(
    ("seconds", "cpu", "user", "most"),
    [
        (0.002, 0.002, 0.002, 1),  # computes, and holds the interpreter
        (0.002, 0.002, 0.0002, CORES),  # the kernel copies: on every core at once
        (0.00003, 0.00003, 0.000003, 1),  # the kernel does it all, but in 3 us per object
        (0.004, 0.002, 0.0002, CORES),  # the kernel copies, and waits for other copies
        (0.2, 0.001, 0.001, 32),  # a long round trip
    ],
)
def test_no_more_threads_than_are_of_use(
    seconds: float, cpu: float, user: float, most: int
) -> None:
    speed = Concurrency(CORES)
    for _ in range(2000):
        speed.measured(10, seconds, cpu, user)
    assert min(speed.more_threads(waiting=1 << 20, began=[], now=0.0), 32) == most
    if most <= CORES:
        assert speed.more_threads(waiting=1 << 20, began=[9.9] * most, now=10.0) <= 0


def test_a_far_source_has_as_many_threads_as_its_link_takes() -> None:
    """Each answer takes .1 s, and more where the link gives 700 of them a second at most."""
    speed = Concurrency(CORES, most=128)
    reading = 32
    for _ in range(3000):
        speed.measured(1, max(0.1, reading / 700), 0.0005, 0.0002, reading)
        reading += max(speed.more_threads(waiting=1 << 20, began=[9.9] * reading, now=10.0), -1)
    assert 70 <= reading <= 115
    assert Concurrency(CORES, most=8).more_threads(waiting=1 << 20, began=[], now=0.0) <= 8


def test_a_far_source_is_asked_at_once_and_a_quick_one_is_soon_known() -> None:
    """Also if the first read imports the client, which takes a tenth of a second of a CPU."""
    speed = Concurrency(CORES, most=128, far=True)
    assert speed.part_objects(waiting=1000) == 1
    assert speed.more_threads(waiting=1000, began=[], now=0.0) == 32
    speed.measured(1, 0.4, 0.1, 0.08)
    for _ in range(32):
        speed.measured(1, 0.05, 0.0005, 0.0003)
    assert speed.more_threads(waiting=1000, began=[], now=0.0) == 32
    for _ in range(300):
        speed.measured(1, 0.0003, 0.0002, 0.0002)
    assert speed.more_threads(waiting=1000, began=[], now=0.0) <= CORES


def test_threads_that_hang_are_replaced() -> None:
    speed = Concurrency(CORES)
    assert speed.more_threads(waiting=100, began=[9.9], now=10.0) <= 0
    assert speed.more_threads(waiting=100, began=[5.0], now=10.0) == 1


def test_far_reads_have_their_threads_though_as_many_are_quick() -> None:
    """Half of the records come from the page cache, half take 5 ms: on average 2.7 ms each."""
    speed = Concurrency(CORES)
    for far in np.random.default_rng(1).permutation([True, False] * 1000).tolist():
        speed.measured(1, *((0.0053, 0.0003, 0.0002) if far else (0.0001, 0.0001, 0.0001)))
    assert speed.more_threads(waiting=1 << 20, began=[], now=0.0) >= 3


def test_parts_are_long_only_where_every_thread_gets_one() -> None:
    speed = Concurrency(CORES)
    for _ in range(2000):
        speed.measured(1, 0.001, 0.0001, 0.0001)  # 6 threads are useful
    assert speed.part_objects(waiting=1 << 20) == 10
    assert speed.more_threads(waiting=1 << 20, began=[], now=0.0) == 6
    assert speed.part_objects(waiting=12) == 2
    assert speed.more_threads(waiting=12, began=[], now=0.0) == 6


def test_a_batch_may_have_more_samples_than_are_remembered() -> None:
    times = SampleTimes()
    for seconds in (0.1, 0.2, 0.1, 0.4, 4.0, 0.1):
        times.measured(1280, seconds)
        assert 1 <= times.parts(1280, 8, awaited=False) <= 8
        assert 1 <= times.parts(1280, 8, awaited=True) <= 8
