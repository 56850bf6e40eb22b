"""A wait is divided by what the worker did in that time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from creel.cache.memory.memfd import sealed_memfd
from creel.cache.memory.shared_words import HEARTBEAT, OVERDUE, WORDS_NBYTES, SharedWords
from creel.counters import CAUSES
from creel.loader.line.observers.meter import Meter
from creel.loader.line.observers.overdue import Awaited, Overdue
from creel.loader.line.observers.watch import Watch
from creel.loader.making.batch_times import READING, WAITING, BatchTimes, divide
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
    source, decode, collate, daemon = divide(
        msgspec.structs.replace(times, direct_ns=direct), since, until
    )
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


class Run:
    """What `Overdue` asks of an iterator."""

    def __init__(self, session: Any) -> None:
        self.stream: Any = SimpleNamespace(alive=True, session=session)
        self.batch: int | None = 3
        self.absent = "/data/1"

    def awaited(self) -> Awaited:
        return Awaited(self.stream, self.batch, self.absent, ())


@pytest.fixture
def words() -> Iterator[SharedWords]:
    fd = sealed_memfd("words", WORDS_NBYTES)
    shared_words = SharedWords(fd)
    os.close(fd)
    yield shared_words
    shared_words.close()


@pytest.mark.parametrize("seed", seeds(10))
def test_a_wait_is_counted_once_whatever_was_said_of_it_before_its_end(
    seed: int, words: SharedWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters only grow, and sum up to what training has waited."""
    rng, clock = random.Random(seed), 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: clock)
    run = Run(SimpleNamespace(words=words))
    wait, whole, before = Overdue(run.awaited, 60.0), 0, 0
    for _ in range(50):
        wait.since = clock
        began = clock
        for _ in range(rng.randrange(4)):
            clock += rng.randrange(2 * 10**9)
            run.absent, run.batch = rng.choice(["", "/data/1"]), rng.choice([None, 3])
            words[HEARTBEAT] = clock
            wait.poll()
            counted = sum(words.counters()[f"stall_{cause}_ns"] for cause in CAUSES)
            assert before <= counted
            assert counted - whole == (clock - began if words[OVERDUE] else 0)
            before = counted
        whole += clock - began
        counts = {f"stall_{rng.choice(CAUSES)}_ns": clock - began, "direct_reads": 1}
        for name, n in wait.settle(counts).items():
            assert n >= 0
            words.add(name, n)
        wait.ends()
        assert words[OVERDUE] == 0
        assert sum(words.counters()[f"stall_{cause}_ns"] for cause in CAUSES) == whole
        before = whole
        clock += rng.randrange(10**9)
    assert words.counters()["direct_reads"] == 50


def test_a_wait_of_less_than_a_second_is_not_told(
    words: SharedWords, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: clock)
    run = Run(SimpleNamespace(words=words))
    wait = Overdue(run.awaited, 60.0)
    wait.poll()  # training computes
    wait.since = clock
    clock += 999_999_999
    wait.poll()
    assert words.overdue() == (0, "", "")
    clock += 1
    wait.poll()  # the daemon does not answer
    assert words.overdue() == (0, "", "")
    words[HEARTBEAT] = clock
    wait.poll()
    assert words.overdue() == (10**12, "source", "/data/1")
    assert words.counters()["stall_source_ns"] == 10**9


def test_a_wait_that_begins_wakes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the interpreter's lock at the start of each epoch; a look comes soon enough."""
    watch, wakes = Watch("creel-test"), list[int]()
    monkeypatch.setattr(watch, "_start", lambda: None)
    monkeypatch.setattr(watch, "wake", lambda: wakes.append(1))
    run = Run(SimpleNamespace())
    first, second, urgent = (Overdue(run.awaited, 60.0) for _ in range(3))
    first.next_at, second.next_at, urgent.next_at = 5.0, 5.0, 1.0
    watch.add(first)
    assert watch._due() is first
    watch.add(second)
    assert not wakes
    watch.add(urgent)
    assert wakes
    assert watch._due() is urgent
