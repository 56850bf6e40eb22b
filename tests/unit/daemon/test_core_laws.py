"""Laws of the core, under any order of events."""

from __future__ import annotations

import tracemalloc
from collections import deque

import numpy as np
import pytest
from core_rig import Rig, absent
from random_events import Chaos, Images

from core_shell import Bytes, CoreShell
from creel.cache.memory.pools.allocator import Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    HELD,
    SOURCE,
    DatasetAdded,
    Dropped,
    PlanExtended,
    PlanRetention,
    Progressed,
    RetentionPlanned,
    SessionOpened,
    Unregistered,
)
from creel.daemon.core.versions import Versions
from creel.messages import Begin, Open
from creel.policies.eviction.farthest import FarthestNextUse
from creel.policies.eviction.recent import MostRecentFirst
from kit import default_window, lengths_of, seeds

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", seeds(5))
def test_random_events_break_no_invariant_and_no_session_hangs(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(200):
        chaos.turn()
    chaos.finish()
    for session in list(chaos.rig.readers):
        chaos.rig.close(session)
    chaos.rig.settle()
    for name in chaos.sizes:
        chaos.rig.feed(Dropped(name))
        assert absent(chaos.rig, name, range(chaos.sizes[name]))
        chaos.rig.feed(Unregistered(name))
    memory = chaos.rig.core.snapshot()["memory"]["node"]
    assert memory["free_nbytes"] == int(memory["nbytes"]) - int(memory["withheld_nbytes"])
    assert memory["inflight_objects"] == memory["inflight_nbytes"] == 0


def test_in_however_many_runs_every_reader_sees_its_own_bytes() -> None:
    linked = stored = 0
    for seed in range(6):
        chaos = Images(seed)
        for _ in range(150):
            chaos.turn()
        for session in list(chaos.rig.readers)[2:]:
            chaos.rig.close(session)
        chaos.finish()
        linked, stored = linked + chaos.arena.linked, stored + chaos.rig.copied
    assert linked > 100
    assert stored > 100


def test_large_objects_make_room_without_anybody_losing_a_byte() -> None:
    """Training and validation in a fifth of the memory; objects that stay must not move."""
    rng = np.random.default_rng(1)
    arena = Bytes(1 << 20)
    rig = Rig(1 << 20, arena=arena)
    left: dict[int, deque[list[int]]] = {}
    done: dict[int, int] = {}
    sizes = {"t": np.exp(rng.normal(8.5, 1, 600)), "v": np.exp(rng.normal(8.5, 1, 200))}
    for number, name in enumerate("tv", 1):
        rig.register(name, sizes[name].astype(int).tolist(), known=False)
        rig.open(number, name)
        left[number], done[number] = deque(), 0
    for turn in range(240):
        number = 1 + (turn % 40 > 25)
        if len(left[number]) < 4:
            n = len(sizes["tv"[number - 1]])
            steps = rng.permutation(n).reshape(-1, 10).tolist()
            rig.extend(number, (done[number] + len(left[number])) // (n // 10), steps)
            left[number] += steps
        done[number] += 1
        left[number].popleft()
        rig.progress(number, done[number], done[number] + 2)
        while rig.fetches and rng.random() < 0.9:
            rig.land(int(rng.choice(list(rig.fetches))))
    assert arena.linked > 10


@pytest.mark.parametrize("capacity", [10, 100, 250, 1000])
def test_a_budget_smaller_than_a_step_degrades_and_never_hangs(capacity: int) -> None:
    """1 % of the data: readers read what does not fit, the rest is served."""
    rig = Rig(capacity)
    rig.register("d", [100] * 100)
    rig.open(1, "d")
    rig.extend(1, 0, [list(range(i, i + 20)) for i in range(0, 100, 20)])
    for step in range(5):
        rig.progress(1, step, step + 1)
        rig.settle()
        assert rig.readers[1].ready > step
    if capacity == 10:
        assert rig.reads == 0


def test_two_ranks_in_step_share_a_tiny_memory_without_deadlock() -> None:
    rig = Rig(600)
    rig.register("d", [100] * 64)
    for rank in (0, 1):
        rig.open(rank, "d", rank=rank, world=2)
    for rank in (0, 1):
        rig.extend(rank, 0, [list(range(i, i + 4)) for i in range(4 * rank, 64, 8)])
    for step in range(8):
        for rank in (0, 1):
            rig.progress(rank, step, step + 1)
        rig.settle()
        assert min(r.ready for r in rig.readers.values()) > step


def test_a_reader_that_is_followed_blindly_has_residents_sorted_but_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads that follow the present step are no plan: residents are not sorted again for them."""
    sorts: list[MostRecentFirst] = []
    relist = MostRecentFirst.relist

    def counted(policy: MostRecentFirst) -> None:
        sorts.append(policy)
        relist(policy)

    monkeypatch.setattr(MostRecentFirst, "relist", counted)
    n, epochs, batch = 400, 6, 10
    rig = Rig(n // 2 * 100)
    rig.register("d", [100] * n)
    rig.open(1, "d")
    rng = np.random.default_rng(0)
    for step, ids in enumerate(
        np.concatenate([rng.permutation(n) for _ in range(epochs)]).reshape(-1, batch).tolist()
    ):
        rig.extend(1, step * batch // n, [ids], unplanned=True)
        rig.settle()
        rig.progress(1, step, step + 1)
    assert len(sorts) == 1
    assert rig.reads <= n + (epochs - 1) * (n // 2 + 3 * batch)


def test_jobs_on_two_datasets_told_in_pieces_share_reads_and_sort_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sorting costs time for each resident, of which there are 16 per planned read."""
    sorts: list[FarthestNextUse] = []
    relist = FarthestNextUse.relist

    def counted(policy: FarthestNextUse) -> None:
        sorts.append(policy)
        relist(policy)

    monkeypatch.setattr(FarthestNextUse, "relist", counted)
    n, epochs, piece = 300, 2, 5
    rig = Rig(n * 100)  # half of both
    rig.checking = False
    rng = np.random.default_rng(0)
    plans = {}
    for name, session in ("a", 1), ("a", 2), ("b", 3), ("b", 4):
        if name not in rig.offset:
            rig.register(name, [100] * n)
        rig.open(session, name, job=str(session))
        plans[session] = np.concatenate([rng.permutation(n) for _ in range(epochs)])
    steps = n * epochs // 10
    for step in range(0, steps, piece):
        for session, plan in plans.items():
            part = plan[10 * step : 10 * (step + piece)].reshape(-1, 10).tolist()
            rig.extend(session, 10 * step // n, part)
        for now in range(step, step + piece):
            for session in plans:
                rig.progress(session, now, now + 1)
                rig.settle()
    rig.core.check()
    datasets = rig.core.snapshot()["datasets"]
    assert {datasets[name]["policy"] for name in "ab"} == {"far"}
    assert sum(datasets[name]["failed"] for name in "ab") == 0  # type: ignore[misc]
    assert rig.reads < 0.75 * 4 * n * epochs
    assert 0 < len(sorts) <= 16 * 4 * epochs + 4


def test_a_step_takes_no_more_memory_for_a_larger_dataset() -> None:
    """No array is copied, masked or sorted as a whole; times: benchmarks/planning.py."""
    n, batch = 25_000, 25
    rng = np.random.default_rng(0)
    shell = CoreShell(n // 2 * 1000)
    shell.add("d", np.full(n, 1000))
    shell.open(1, "d", job="")
    ends = np.arange(batch, n + 1, batch)
    for epoch in range(2):
        shell.tell(1, epoch, rng.permutation(n).astype(np.int32), ends)
    took = []
    tracemalloc.start()
    for step in range(len(ends) + 200):
        shell.now = step * 0.1
        shell.settle()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        shell.feed(Progressed(1, step + 1, 0))
        took.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert np.median(took[len(ends) :]) < n / 2  # an epoch's end may take more


@pytest.mark.parametrize("alike", [True, False])
def test_the_core_keeps_seven_bytes_per_object_and_its_plans(*, alike: bool) -> None:
    """State 1, pins 4, plan of the epoch's end 2; candidates take 1 more (test_eviction.py)."""
    n, batch = 200_000, 250
    rng = np.random.default_rng(0)
    length = np.full(n, 1000) if alike else rng.integers(500, 1500, n)
    offset, lengths = np.full(n, NOWHERE), lengths_of(length)
    one_file = Versions(n, np.array([0, n]))
    ends = np.arange(batch, n + 1, batch)
    plans = [rng.permutation(n).astype(np.int32) for _ in range(2)]
    tracemalloc.start()
    try:
        core = Core(Allocator(2_000_000), default_window())
        core.handle(DatasetAdded("d", offset, length, lengths, one_file), 0.0)
        core.handle(SessionOpened(1, Open("d", "", 0, 1, "never")), 0.0)
        for epoch, ids in enumerate(plans):
            event = PlanExtended(1, epoch, epoch * len(ends), ids.copy(), ends, unplanned=False)
            asked = [a for a in core.handle(event, 0.0) if isinstance(a, PlanRetention)]
        (question,) = asked
        core.handle(RetentionPlanned("d", question.boundary, question.boundary.plan()), 0.0)
        del question, asked, event
        taken = tracemalloc.get_traced_memory()[0] - core.plans_nbytes()
    finally:
        tracemalloc.stop()
    assert taken <= 7.5 * n


@pytest.mark.parametrize("known", [True, False])
def test_a_source_slower_than_its_reader_is_asked_for_many_objects_at_a_time(
    *, known: bool
) -> None:
    """Each fetch and each event costs the loop 0.5 ms, however many objects it has."""
    batch, steps, limit = 37, 60, 128
    rig = Rig(1 << 20, default_window(inflight_objects=limit))
    rig.checking = False
    rng = np.random.default_rng(1)
    rig.register("d", rng.integers(60, 64, batch * steps).tolist(), known=known)
    rig.open(1, "d")
    rig.extend(1, 0, rng.permutation(batch * steps).reshape(steps, batch).tolist())
    reader, asked = rig.readers[1], []
    while reader.done < steps:
        rig.progress(1, min(reader.done + 1, reader.ready), reader.done + 2)
        waiting = [f for f in rig.fetches.values() if f.origin == SOURCE]
        held = [f for f in rig.fetches.values() if f.origin == HELD]
        if waiting or held:
            fetch = held[0] if held else waiting[rng.integers(len(waiting))]
            asked += [len(fetch.ids)] * (not held)
            rig.now += 1e-3 * len(fetch.ids)
            rig.land(fetch.fetch)
    assert sum(asked) == batch * steps
    assert len(asked) < batch * steps / 8, len(asked)


def test_objects_read_later_are_never_fetched_sooner_however_the_pace_changes() -> None:
    """Else a step in flight waits for all later requests."""
    batch, steps = 8, 120
    rig = Rig(1 << 20, default_window(inflight_objects=64))
    rig.checking = False
    rig.register("d", [100] * batch * steps)
    rig.open(1, "d", recheck="epoch")
    rig.feed(Begin("", 1, 0))
    rig.extend(1, 0, np.arange(batch * steps).reshape(steps, batch).tolist())
    reader = rig.readers[1]
    while reader.done < steps:
        deadlines = [fetch.deadline for fetch in rig.fetches.values()]
        assert deadlines == sorted(deadlines)
        if rig.fetches:
            rig.land(next(iter(rig.fetches)))
        if reader.ready > reader.done:
            rig.now += 2.0 if reader.done % 16 < 4 else 0.01
            rig.progress(1, reader.done + 1, reader.done + 2)
