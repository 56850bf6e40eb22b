"""A wait is divided by what the worker did in that time."""

from __future__ import annotations

import random

import pytest

from creel.loader.iterators.meter import Meter
from creel.loader.workers.stages import READING, WAITING, BatchTimes, divide
from kit import seeds


@pytest.mark.parametrize("seed", seeds(60))
def test_a_wait_is_divided_as_if_each_nanosecond_had_been_watched(seed: int) -> None:
    rng = random.Random(seed)
    began, ready, collating, packed = sorted(rng.randrange(100) for _ in range(4))
    lost, since = rng.randrange(2), rng.randrange(110)
    until = max(packed, since) + rng.randrange(9)
    watched = [0, 0, 0, 0]
    for t in range(since, until):
        if began <= t < ready:
            watched[3 if lost else 0] += 1
        elif ready <= t < collating:
            watched[1] += 1
        elif collating <= t < packed:
            watched[2] += 1
        else:
            watched[3] += 1
    times = BatchTimes(began, ready, collating, packed, lost=lost)
    assert list(divide(times, since, until)) == watched
    direct = rng.randrange(60)
    source, decode, collate, daemon = divide(times._replace(direct_ns=direct), since, until)
    assert min(source, decode) >= 0
    assert [source + decode, collate, daemon] == [
        watched[0] + watched[1],
        *watched[2:],
    ]


def test_told_times_add_up_to_those_counted() -> None:
    meter = Meter()
    said: dict[str, int] = {}
    for i in range(5):
        meter.awaited(BatchTimes(10, 20, 60, 70, 30), i * 20, 75 + i * 20)
        meter.gave_up(WAITING if i % 2 else READING, 7)
        meter.add({"busy_handover_ns": 4, "direct_reads": 5, "direct_nbytes": 600})
        meter.add({"decoded_hits": 7, "decoded_misses": 8})
        for name, value in meter.unreported().items():
            said[name] = said.get(name, 0) + value
    assert meter.unreported() == {}
    stalls = [n for k, n in said.items() if k.startswith("stall_")]
    assert sum(stalls) == 5 * 75 + 5 * 7
    assert (said["busy_handover_ns"], said["direct_reads"], said["direct_nbytes"]) == (20, 25, 3000)
