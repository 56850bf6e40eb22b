"""What each event does to a core."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from core_rig import Rig, absent

from creel.cache.memory.pools.fixed_pool import FixedPool
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import (
    DatasetAdded,
    Dropped,
    Fetched,
    FetchObjects,
    PlanExtended,
    Progressed,
    SessionOpened,
    SetReady,
    Tick,
    Unregistered,
    Warm,
)
from creel.daemon.core.versions import Versions
from creel.errors import IllegalEventError, MalformedError
from creel.messages import Close, Open, Truncate
from creel.policies.prefetch import SourceRate
from kit import default_window, lengths_of, seeds

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def rig() -> Rig:
    rig = Rig(1000)
    rig.register("d", [100] * 30)
    return rig


def test_a_step_is_ready_once_its_last_object_is_there() -> None:
    rig = Rig(1000, default_window(fetch_objects=1))
    rig.register("d", [100] * 30)
    rig.open(1, "d")
    rig.extend(1, 0, [[3, 1], [2]])
    assert len(rig.fetches) == 3
    first, second, third = rig.fetches
    assert [rig.fetches[f].ids.tolist() for f in (first, second, third)] == [[1], [3], [2]]
    rig.land(third)
    rig.land(first)
    assert rig.readers[1].ready == 0
    actions = rig.land(second)
    assert [a for a in actions if isinstance(a, SetReady)] == [SetReady(1, 2, 0)]


def test_a_read_that_hangs_holds_up_no_step_but_its_own() -> None:
    """Its reader gives up in time and reads the source; later steps are ready."""
    rig = Rig(1000, default_window(fetch_objects=1))
    rig.register("d", [100] * 30)
    rig.open(1, "d")
    rig.extend(1, 0, [[0], [1], [2], [3]])
    for number in [n for n, f in rig.fetches.items() if f.ids[0] != 0]:
        rig.land(number)
    assert rig.readers[1].ready == 0
    rig.progress(1, done=1)
    assert rig.readers[1].ready == 4


def test_a_reader_of_a_later_step_need_not_wait_for_one_hung_read() -> None:
    def open_to(rig: Rig) -> list[int]:
        return rig.readers[1].may_read()

    rig = Rig(1000, default_window(fetch_objects=1))
    rig.register("d", [100] * 30)
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 4], [1], [], [2, 3], [0]])
    for number in [n for n, f in rig.fetches.items() if f.ids[0] not in {0, 3}]:
        rig.land(number)
    rig.progress(1, wanted=1)
    rig.feed(Tick())
    assert open_to(rig) == [], "nobody waits for what comes later"
    rig.progress(1, wanted=2)
    rig.feed(Tick())
    assert open_to(rig) == [1, 2]
    rig.truncate(1, 2)
    assert open_to(rig) == [1]
    rig.extend(1, 0, [[1], [2]])
    rig.feed(Tick())
    assert open_to(rig) == [1, 2, 3]
    rig.progress(1, done=2)
    assert open_to(rig) == [2, 3]


def test_a_fetch_is_sorted_by_object_and_has_room_of_its_own(rig: Rig) -> None:
    rig.open(1, "d")
    (fetch,) = (a for a in rig.extend(1, 0, [[9, 4, 7]]) if isinstance(a, FetchObjects))
    assert fetch.ids.tolist() == [4, 7, 9]
    assert sorted(fetch.offset.tolist()) == [0, 100, 200]
    assert fetch.length.tolist() == [100] * 3
    assert absent(rig, "d", range(30)), "published before it arrived"


def test_an_object_is_fetched_once_for_all_sessions(rig: Rig) -> None:
    rig.open(1, "d", job="a")
    rig.open(2, "d", job="b")
    rig.extend(1, 0, [[1, 2]])
    rig.extend(2, 0, [[2, 1]])
    rig.settle()
    assert rig.reads == 2
    assert rig.readers[1].ready == rig.readers[2].ready == 1
    session = rig.core.snapshot()["sessions"]["2"]
    assert (session["hits"], session["joined"], session["misses"]) == (0, 2, 0)


def test_a_failed_object_lets_its_step_go_on_and_is_tried_again_later(rig: Rig) -> None:
    rig.bad["d"] = {1}
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 1]])
    rig.settle()
    assert rig.readers[1].ready == 1
    assert rig.offset["d"][1] == -1
    rig.progress(1, 1)
    rig.bad["d"] = set()
    rig.extend(1, 1, [[1]])
    rig.settle()
    assert rig.offset["d"][1] >= 0
    assert rig.core.snapshot()["sessions"]["1"]["failed"] == 1


def test_an_object_that_changed_its_length_has_failed() -> None:
    rig = Rig(1000)
    rig.register("d", [100, 50, 70])
    rig.size["d"][1] = 60
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 1, 2]])
    rig.settle()
    assert rig.offset["d"][1] == rig.length["d"][1] == -1
    rig.progress(1, 1)
    rig.extend(1, 1, [[1]])
    rig.settle()
    assert rig.length["d"][1] == 60
    assert rig.offset["d"][1] >= 0


def test_unknown_lengths_are_stored_where_there_is_room_and_discarded_where_not() -> None:
    rig = Rig(1024)
    rig.register("d", [300, 5000, 200], known=False)
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 1, 2]])
    assert all((f.offset == -1).all() for f in rig.fetches.values())
    while rig.readers[1].ready < 1:
        rig.progress(1, 0, 1)
        rig.settle()
    assert rig.length["d"].tolist() == [300, 5000, 200]
    assert (rig.offset["d"] >= 0).tolist() == [True, False, True]


@pytest.mark.parametrize("seed", seeds(6))
def test_the_room_of_what_is_in_flight_is_given_to_nothing_else(seed: int) -> None:
    """Its length is a guess until it lands; lengths known before are requested exactly."""
    rng, rig, objects = np.random.default_rng(seed), Rig(3100), 64
    rig.register("d", [100] * objects, known=False)
    rig.open(1, "d")
    rig.extend(1, 0, [[0]])
    while rig.readers[1].ready < 1:  # the first length
        rig.progress(1, 0, 1)
        rig.settle()
    for epoch in range(1, 4):
        rig.extend(1, epoch, rng.permutation(objects).reshape(-1, 4).tolist())
    for step in range(1, 3 * objects // 4 + 1):
        rig.progress(1, step, step + 1 if rng.random() < 0.5 else 0)
        for number in rng.permutation(list(rig.fetches)).tolist()[: rng.integers(9)]:
            rig.land(number)
        while rig.readers[1].ready <= step:
            rig.progress(1, step, step + 1)
            rig.settle()
    assert rig.core.snapshot()["datasets"]["d"]["failed"] == 0


def test_objects_that_the_machine_has_no_memory_for_fail_and_are_tried_again_later() -> None:
    rig = Rig(1024)
    rig.register("d", [300, 200, 100], known=False)
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 1], [2]])
    rig.memory = lambda k: min(k, 1)
    while rig.readers[1].ready < 1:
        rig.progress(1, 0, 1)
        rig.settle()
    published = rig.offset["d"][:2] >= 0
    assert published.sum() == 1
    snapshot = rig.core.snapshot()
    assert int(snapshot["datasets"]["d"]["failed"]) >= 1
    rig.memory = lambda k: k
    rig.extend(1, 1, [[0, 1, 2]])
    rig.progress(1, 2, 3)
    rig.settle()
    assert (rig.offset["d"] >= 0).all()
    rig.close(1)
    rig.feed(Dropped("d"))
    assert rig.core.snapshot()["memory"]["node"]["free_nbytes"] == 1024


def test_late_and_unknown_answers_are_dropped(rig: Rig) -> None:
    rig.open(1, "d")
    rig.extend(1, 0, [[0]])
    rig.close(1)
    rig.settle()  # the object in flight stays, unpinned
    assert rig.feed(Fetched(77, np.array([1]))) == []
    rig.feed(Dropped("d"))
    assert absent(rig, "d", range(30))


def test_a_reader_that_did_not_wait_skips_its_steps(rig: Rig) -> None:
    rig.open(1, "d")
    rig.extend(1, 0, [[i, i + 1] for i in range(0, 30, 2)])
    rig.progress(1, done=10)
    assert rig.readers[1].ready == 10
    rig.settle()
    rig.progress(1, done=-5, wanted=1 << 62)
    assert rig.readers[1].done == 10


def test_a_truncated_plan_is_void_and_its_pins_are_given_back(rig: Rig) -> None:
    rig.open(1, "d")
    rig.extend(1, 0, [[0], [1], [2]])
    rig.settle()
    assert rig.readers[1].ready == 3
    rig.truncate(1, 1)
    assert rig.readers[1].ready == 1
    rig.feed(Dropped("d"))
    assert rig.offset["d"][0] >= 0
    assert absent(rig, "d", [1, 2])
    rig.extend(1, 1, [[5], [1]])
    rig.settle()
    assert rig.readers[1].ready == 3


def test_a_plan_with_a_gap_is_refused_and_changes_nothing(rig: Rig) -> None:
    rig.open(1, "d")
    with pytest.raises(MalformedError):
        rig.feed(PlanExtended(1, 0, 5, np.array([1], np.int32), np.array([1]), unplanned=False))
    rig.extend(1, 0, [[1]])


def test_events_that_cannot_happen_are_our_bugs(rig: Rig) -> None:
    with pytest.raises(IllegalEventError):
        rig.feed(SessionOpened(1, Open("nothing", "", 0, 1, "never")))
    with pytest.raises(IllegalEventError):
        rig.feed(
            DatasetAdded(
                "d",
                rig.offset["d"],
                rig.length["d"],
                lengths_of(rig.length["d"]),
                Versions(len(rig.length["d"])),
            )
        )


def test_events_of_a_closed_session_are_late_not_wrong(rig: Rig) -> None:
    for event in (
        Progressed(9, 1, 1),
        Truncate("", 9, 0),
        Close(9),
        Warm("x"),
        Dropped("x"),
    ):
        assert rig.feed(event) == []
    assert (
        rig.feed(
            PlanExtended(9, 0, 0, np.empty(0, np.int32), np.empty(0, np.int64), unplanned=False)
        )
        == []
    )


def test_warming_fills_free_room_in_order_and_evicts_nothing(rig: Rig) -> None:
    rig.feed(Warm("d"))
    rig.settle()
    assert (rig.offset["d"] >= 0).tolist() == [True] * 10 + [False] * 20
    assert rig.reads == 10


def test_the_most_urgent_session_is_served_first() -> None:
    rig = Rig(10_000, default_window(inflight_objects=4, min_steps=4))
    rig.register("d", [10] * 500)
    rig.open(1, "d", job="a")
    rig.open(2, "d", job="b")
    rig.extend(1, 0, [[i] for i in range(100)])
    rig.extend(2, 0, [[i] for i in range(200, 300)])
    rig.progress(2, 0, 1)
    rig.land(next(iter(rig.fetches)))
    assert 200 in {x for f in rig.fetches.values() for x in f.ids.tolist()}


def test_an_event_starts_fetches_in_portions_and_those_that_land_start_the_rest() -> None:
    """Other clients wait while an event is handled."""
    n, most = 8192, 1024
    rig = Rig(n * 10, default_window(min_steps=n // 256))
    rig.register("d", [10] * n)
    rig.open(1, "d")
    rig.checking = False  # checks look at all objects at each event
    actions, under_way = rig.extend(1, 0, np.arange(n // 2).reshape(-1, 256).tolist()), 0
    while rig.fetches:
        assert sum(len(a.ids) for a in actions if isinstance(a, FetchObjects)) < 2 * most
        under_way = max(under_way, sum(len(f.ids) for f in rig.fetches.values()))
        actions = rig.land(min(rig.fetches))
    assert under_way > most  # the source stays busy
    assert rig.readers[1].ready == n // 512  # without a tick or a read


def train(rig: Rig, steps: range, step_s: float, object_s: float) -> list[FetchObjects]:
    """Run a trainer and a source of one thread with these times; return all fetches begun."""
    fetches = []
    for step in steps:
        end = rig.now + step_s
        fetches += rig.progress(1, step, 0)
        while rig.fetches and rig.now < end:
            number = min(rig.fetches, key=lambda n: (rig.fetches[n].deadline, n))
            rig.now += object_s * len(rig.fetches[number].ids)
            fetches += rig.land(number)
        rig.now = max(rig.now, end)
    return [f for f in fetches if isinstance(f, FetchObjects)]


def test_the_daemon_may_rest_as_long_as_every_reader_has_something_to_read() -> None:
    """It looks after its readers an eighth of that time later: a warm epoch costs it little."""
    rig = Rig(50_000, default_window(min_steps=40))
    rig.register("d", [100] * 400)
    for session, job in ((1, "a"), (2, "b")):
        rig.open(session, "d", job=job)
        rig.extend(session, 0, [[i] for i in range(200)])
    rig.settle()
    assert rig.core.lead_s() == 0.0, "no pace is known"
    for step in range(1, 4):
        rig.now += 0.5
        rig.progress(1, step)
        rig.progress(2, 10 * step)
    assert rig.core.lead_s() == pytest.approx((rig.readers[2].ready - 30) * 0.05, rel=0.1)


def test_a_session_that_stalls_is_served_before_one_with_less_in_hand() -> None:
    rig = Rig(10_000, default_window(inflight_objects=4, min_steps=3))
    rig.register("d", [10] * 500)
    rig.open(2, "d", job="b")
    rig.extend(2, 0, [[200], [201], [202], [203, 204, 205, 206], [207]])
    rig.settle()
    assert rig.readers[2].ready == 3
    rig.open(1, "d", job="a")
    rig.extend(1, 0, [[i, i + 1, i + 2] for i in range(0, 90, 3)])
    rig.progress(2, 0, 4)  # it has three steps and waits for the next
    asked = {x for f in rig.fetches.values() for x in f.ids.tolist()}
    assert asked == {0, 1, 2, 203}  # all that there is room for
    rig.land(min(rig.fetches))
    assert {204, 205, 206} <= {x for f in rig.fetches.values() for x in f.ids.tolist()}


def test_steps_further_on_do_not_overtake_nearer_ones_when_the_pace_picks_up() -> None:
    rig = Rig(50_000)
    rig.register("d", [100] * 400)
    rig.open(1, "d")
    rig.extend(1, 0, [[i, i + 1] for i in range(0, 400, 2)])
    fetches = train(rig, range(20), 3.0, 0.5) + train(rig, range(20, 100), 0.1, 0.05)
    assert len(fetches) > 50
    order = sorted(fetches, key=lambda f: f.deadline)
    assert [f.ids[0] for f in order] == sorted(f.ids[0] for f in fetches)


def test_a_slow_source_is_asked_for_one_step_at_a_time() -> None:
    """All objects of a fetch land together: earlier steps must not wait for later ones."""
    rig = Rig(50_000, default_window(min_steps=40))
    rig.register("d", [100] * 400)
    rig.open(1, "d")
    plan = [[i, i + 1] for i in range(0, 400, 2)]

    def longest(steps: range, object_s: float) -> int:
        """Return the most objects of a fetch while the whole window is requested at once."""
        begun = [
            a
            for a in rig.extend(1, 0, plan[steps.start : steps.stop])
            if isinstance(a, FetchObjects)
        ]
        return max(len(f.ids) for f in begun + train(rig, steps, 1.0, object_s))

    longest(range(50), 0.001)
    assert longest(range(50, 100), 0.001) > 2
    longest(range(100, 150), 0.5)
    assert longest(range(150, 200), 0.5) == 2


@pytest.mark.parametrize("sizes", [(100, 100), (100, 37)])
def test_a_new_dataset_gets_its_share_from_the_one_that_holds_all(sizes: tuple[int, int]) -> None:
    rig = Rig(64_000, default_window(min_steps=2))
    rig.register("train", [sizes[0]] * 3000)
    rig.open(1, "train")
    rig.extend(1, 0, [list(range(i, i + 10)) for i in range(0, 3000, 10)])
    rig.checking = False
    for step in range(200):
        rig.progress(1, step, step + 1)
        rig.settle()
    held = rig.core.snapshot()["datasets"]["train"]["used_nbytes"]
    assert isinstance(held, int)
    assert held > 0.97 * 64_000
    rig.register("val", [sizes[1]] * 1000)
    rig.open(2, "val")
    rig.extend(2, 0, [list(range(i, i + 10)) for i in range(0, 1000, 10)])
    for step in range(100):
        rig.progress(2, step, step + 1)
        rig.progress(1, 200, 0)
        rig.settle()
    rig.core.check()
    datasets = rig.core.snapshot()["datasets"]
    share = sizes[1] * 1000 / (sizes[1] * 1000 + sizes[0] * 3000)
    assert datasets["val"]["used_nbytes"] == pytest.approx(share * 64_000, rel=0.15)
    assert datasets["val"]["failed"] == 0


def test_objects_without_room_in_one_piece_are_in_several_and_all_memory_is_used() -> None:
    rng = np.random.default_rng(0)
    sizes = np.maximum(rng.lognormal(9, 0.9, 400), 1).astype(int)
    rig = Rig(int(sizes.sum()) // 2)
    rig.register("d", sizes.tolist())
    rig.open(1, "d")
    for epoch in range(3):
        order = rng.permutation(400)
        rig.extend(1, epoch, [order[i : i + 4].tolist() for i in range(0, 400, 4)])
        for step in range(100 * epoch, 100 * epoch + 100):
            rig.progress(1, step, step + 1)
            rig.settle()
    offset = rig.offset["d"]
    assert (offset < NOWHERE).any()
    assert sizes[offset != NOWHERE].sum() > 0.98 * (sizes.sum() // 2)


def test_an_unregistered_dataset_leaves_nothing_behind_but_what_it_counted() -> None:
    rig = Rig(1000)
    rig.register("d", [100] * 20)
    rig.register("e", [10, 20, 30], known=False)
    for number, name in enumerate(("d", "e"), 1):
        rig.open(number, name)
        rig.extend(number, 0, [[0, 1, 2]])
        rig.settle()
        rig.close(number)
    before = rig.core.snapshot()
    rig.feed(Unregistered("d"))
    rig.feed(Unregistered("e"))
    assert absent(rig, "d", range(20))
    assert absent(rig, "e", range(3))
    after = rig.core.snapshot()
    assert after["datasets"] == {}
    assert after["memory"]["node"]["free_nbytes"] == 1000
    counted = [after["past"]["datasets"][name] for name in ("misses", "reads", "evicted_dropped")]
    assert counted == [6, 6, 6]
    assert counted[0] == sum(int(d["misses"]) for d in before["datasets"].values())
    rig.register("d", [100] * 20)
    rig.open(3, "d")
    rig.extend(3, 0, [[5]])
    rig.settle()
    assert rig.offset["d"][5] >= 0


@pytest.mark.parametrize("why", ["unknown", "read", "under way", "warming"])
def test_a_dataset_in_use_cannot_go(why: str) -> None:
    rig = Rig(1000)
    rig.register("d", [100] * 20)
    if why in {"read", "under way"}:
        rig.open(1, "d")
        rig.extend(1, 0, [[0, 1]])
    if why == "under way":
        rig.close(1)
    if why == "warming":
        rig.feed(Warm("d"))
    fetches = dict(rig.fetches)
    with pytest.raises(IllegalEventError, match="still in use"):
        rig.core.handle(Unregistered("e" if why == "unknown" else "d"), rig.now)
    rig.core.check()
    assert rig.fetches == fetches
    rig.settle()
    assert (rig.offset["d"] >= 0).any() == (why in {"read", "warming"})


def test_objects_that_no_reader_waits_for_any_more_are_not_read() -> None:
    """A loader that leaves an epoch does not delay its next one."""
    rig = Rig(4000)
    rig.register("d", [100] * 20)
    for session, steps in ((1, [[0, 1], [2, 3]]), (2, [[2, 3], [4, 5]])):
        rig.open(session, "d", job=f"job {session}")
        rig.extend(session, 0, steps)
    rig.close(1)
    (left,) = rig.cancelled
    with mock.patch.object(SourceRate, "saw") as saw:  # objects that were not read do not count
        rig.land(left)
    assert not saw.called
    rig.truncate(2, 1)
    rig.settle()
    assert rig.reads == 2
    assert (rig.offset["d"] >= 0).nonzero()[0].tolist() == [2, 3]
    rig.extend(2, 0, [[0, 5]])
    rig.settle()
    assert rig.reads == 4
    rig.extend(2, 0, [[6, 7]])
    rig.truncate(2, 2)
    rig.extend(2, 0, [[7, 8]])  # before it is known that 7 will not come
    rig.settle()
    assert rig.readers[2].ready == 3
    assert rig.reads == 6
    assert rig.core.snapshot()["datasets"]["d"]["failed"] == 0


def test_records_of_a_dataset_that_is_forgotten_leave_all_at_once(rig: Rig) -> None:
    """One by one, 14 million records would block the daemon's loop for seconds."""
    rig.open(1, "d")
    rig.extend(1, 0, [[0, 1], [2]])
    for number in list(rig.fetches):
        rig.land(number)
    rig.close(1)
    with mock.patch.object(FixedPool, "free", side_effect=AssertionError):
        rig.feed(Unregistered("d"))
    assert absent(rig, "d", range(30))
    snapshot = rig.core.snapshot()
    assert snapshot["past"]["datasets"]["evicted_dropped"] == 3
    assert snapshot["memory"]["node"]["free_nbytes"] == 1000


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(
    "where",
    [
        "creel.policies.prefetch.SessionPlan.extend",
        "creel.policies.next_use.NextUses.extend",
        "creel.policies.next_use.EpochUses.add",
        "creel.daemon.core.readers.dataset_readers.DatasetReaders.choose_policy",
        "creel.daemon.core.prefetcher.Prefetcher.set_reach",
        "creel.daemon.core.prefetcher.Prefetcher.advance_ready",
        "creel.daemon.core.admission.Admission.place",
        "creel.daemon.core.readers.sessions.RankStream.stretches",
    ],
)
def test_after_an_exception_the_session_is_gone_and_the_others_go_on(where: str, seed: int) -> None:
    """No memory, or a bug: it costs the session that the event was about."""
    rng = np.random.default_rng(seed)
    rig = Rig(3000)
    rig.register("d", [100] * 60)
    for session in (1, 2, 3):
        rig.open(session, "d", job="ab"[session % 2], rank=session, world=4)
        rig.extend(session, 0, rng.permutation(60).reshape(-1, 5).tolist())
    for done in range(1, int(rng.integers(2, 9))):
        for session in (1, 2, 3):
            rig.progress(session, done, done + 2)
        for number in list(rig.fetches):
            rig.land(number)
    later = np.array(rng.permutation(60).reshape(-1, 5))

    def both() -> None:
        ids = later.ravel().astype(np.int32)
        rig.core.handle(PlanExtended(3, 1, 12, ids, np.arange(5, 65, 5), unplanned=False), rig.now)
        rig.core.handle(Progressed(3, rig.readers[3].ready, 12), rig.now)

    with mock.patch(where, side_effect=MemoryError), pytest.raises(MemoryError):
        both()
    del rig.readers[3]
    rig.recover(3)
    rig.recover(0)  # the event was about no session
    for session in (1, 2):
        rig.extend(session, 1, rng.permutation(60).reshape(-1, 5).tolist())
        for done in range(25):
            rig.progress(session, done, done + 1)
            for number in list(rig.fetches):
                rig.land(number)
        assert rig.readers[session].ready == 24
