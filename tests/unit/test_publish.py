"""What the daemon is told of an epoch: all of it, in order, once, whoever tells it and when."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.memory.shared_words import KNOWN
from creel.loader.client import publish
from creel.loader.client.publish import PlanPublisher
from creel.loader.client.session import Session
from creel.loader.order.drain import DrainedSampler
from creel.loader.order.prediction import EpochPlan, PredictedEpoch, Shape
from creel.loader.order.streams import Sequential
from kit import until

N = 3000


class Daemon:
    """A session whose daemon keeps what it is told, and breaks off where that does not go on."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.epochs: list[int] = []
        self.words = {KNOWN: 0}
        self.alive = True
        self.table = type("Table", (), {"offset": np.zeros(2 * N)})
        self.during: Any = lambda: None

    def extend(
        self, epoch: int, step: int, objects: Any, ends: Any, *, unplanned: bool = False
    ) -> bool:
        del unplanned
        self.during()
        if not self.alive:
            return False
        assert step == len(self.steps)
        assert len(ends) > 0
        assert ends[-1] == len(objects)
        self.steps += [part.tolist() for part in np.split(objects, ends[:-1])]
        self.epochs += [epoch] * len(ends)
        self.words[KNOWN] = len(self.steps)
        return True

    def truncate(self, step: int) -> bool:
        assert 0 <= step < len(self.steps)
        del self.steps[step:], self.epochs[step:]
        self.words[KNOWN] = step
        return self.alive

    def forget(self) -> None:
        self.alive = False


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    until(lambda: not planners(), what="no planner is left")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which a small epoch is told as a large one is."""
    sizes = publish.PieceSizes(whole=50, trainer=20, user_code=10, thread=70, lead=200)
    monkeypatch.setattr(publish, "SIZES", sizes)


def planners() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "creel-planner"]


def pairs(indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Sample i is of objects 2i and 2i + 1, every fifth one of none."""
    some = indices[indices % 5 > 0]
    both = np.stack([2 * some, 2 * some + 1], axis=1).ravel().astype(np.int32)
    return both, np.where(indices % 5 > 0, 2, 0)


def publisher_of(
    daemon: Daemon, *, thread_safe: bool = True, objects: Any = pairs
) -> PlanPublisher:
    return PlanPublisher(cast(Session, daemon), objects, thread_safe=thread_safe)


def drained(order: list[int], ends: list[int]) -> EpochPlan:
    found = DrainedSampler(None, np.array(order, np.int32), np.array(ends, np.int64))
    return EpochPlan(lambda: PredictedEpoch.of_drained(0, found))


def counted(size: int, total: int = N) -> EpochPlan:
    return EpochPlan(lambda: PredictedEpoch(0, Shape(size, False), Sequential(total)))


def any_plan(rng: random.Random) -> tuple[EpochPlan, list[list[int]]]:
    """A plan and what each of its steps reads."""
    if rng.random() < 0.5:
        size = rng.choice([1, 7, 64, 100])
        total = rng.choice([1, 40, rng.randrange(1, 2000)])
        want = [list(range(a, min(a + size, total))) for a in range(0, total, size)]
        return counted(size, total), want
    want = [rng.sample(range(N), rng.randrange(1, 60)) for _ in range(rng.randrange(1, 40))]
    ends = np.cumsum([len(w) for w in want]).tolist()
    return drained([i for w in want for i in w], ends), want


def objects_of(steps: list[list[int]]) -> list[list[int]]:
    return [pairs(np.array(step, np.int64))[0].tolist() for step in steps]


@pytest.mark.parametrize("seed", range(60))
def test_the_daemon_is_told_exactly_the_epochs_order(
    daemon: Daemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:  # the system gives no thread
        monkeypatch.setattr(threading.Thread, "start", scarce)
    publisher = publisher_of(daemon, thread_safe=rng.random() < 0.7)
    step, want, epochs = 0, list[list[int]](), list[int]()
    for epoch in range(5):
        plan, steps = any_plan(rng)
        skip = rng.randrange(len(steps)) if rng.random() < 0.3 else 0
        told = publisher.begin(plan, 2 * epoch, skip)
        ahead, later = any_plan(rng)
        publisher.add(ahead, 2 * epoch + 1)
        assert told is not None
        stop = len(steps) if rng.random() < 0.5 else rng.randrange(skip, len(steps) + 1)
        for i in range(skip, stop):
            assert publisher.reach(told, i)
            assert told.step(i) == step + i - skip
            assert told.reads(i, np.array(steps[i]))
            assert told.ids(i).tolist() == objects_of([steps[i]])[0]
            if i + 1 < len(steps) and steps[i + 1] != steps[i]:
                assert not told.reads(i, np.array(steps[i + 1]))
            if rng.random() < 0.5:
                publisher.pump()
        if stop < len(steps) or rng.random() < 0.5:  # it is left, or the next one is not as told
            step += stop - skip
            publisher.cancel(step)
            want += steps[skip:stop]
            epochs += [2 * epoch] * (stop - skip)
        else:
            assert not publisher.reach(told, stop)
            told_all(publisher, daemon, step + len(steps) - skip + len(later))
            step += len(steps) - skip + len(later)
            want += steps[skip:] + later
            epochs += [2 * epoch] * (len(steps) - skip) + [2 * epoch + 1] * len(later)
        assert daemon.steps[:step] == objects_of(want)
        assert daemon.epochs[:step] == epochs
    assert len(daemon.steps) == step


def told_all(publisher: PlanPublisher, daemon: Daemon, steps: int) -> None:
    def all_told() -> bool:
        publisher.pump()
        return len(daemon.steps) == steps

    until(all_told, what="all is told")


def scarce(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_trainer_that_is_faster_than_the_thread_publishes_what_it_needs(daemon: Daemon) -> None:
    gate = threading.Event()

    def slow(indices: NDArray[np.int64]) -> Any:
        if threading.current_thread().name == "creel-planner":
            assert gate.wait(30)
        return pairs(indices)

    publisher = publisher_of(daemon, objects=slow)
    told = publisher.begin(counted(8), 0, 0)
    assert told is not None
    for i in range(N // 8 // 2):
        assert publisher.reach(told, i)
        assert told.reads(i, np.arange(8 * i, 8 * i + 8))
    assert planners()
    gate.set()
    until(lambda: told.complete, what="the thread tells the rest")
    want = [list(range(a, a + 8)) for a in range(0, N, 8)]
    assert daemon.steps == objects_of(want)


def test_the_persons_code_runs_in_the_trainers_thread_alone(daemon: Daemon) -> None:
    def own(indices: NDArray[np.int64]) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return pairs(indices)

    publisher = publisher_of(daemon, thread_safe=False, objects=own)
    assert publisher.begin(counted(8), 0, 0) is not None
    assert len(daemon.steps) < N // 8
    told_all(publisher, daemon, N // 8)


def test_what_cannot_be_computed_after_all_ends_there(daemon: Daemon) -> None:
    def own(indices: NDArray[np.int64]) -> Any:
        if indices.max() >= N // 2:
            raise IndexError
        return pairs(indices)

    publisher = publisher_of(daemon, objects=own)
    told = publisher.begin(counted(10), 0, 0)
    assert told is not None
    until(lambda: told.complete, what="it ends")
    assert 0 < told.total <= N // 20
    assert not publisher.reach(told, told.total)
    assert (
        daemon.steps == objects_of([list(range(a, a + 10)) for a in range(0, N, 10)])[: told.total]
    )


@pytest.mark.parametrize("repeats", [False, True])
def test_a_second_epoch_ahead_is_told_where_the_first_repeats(
    daemon: Daemon, repeats: bool
) -> None:
    order = list(range(N // 2)) + ([N // 2 - 1] if repeats else [])
    ends = [*range(10, len(order), 10), len(order)]
    publisher = publisher_of(daemon)
    told = publisher.begin(drained(order, ends), 0, 0)
    assert told is not None
    publisher.add(drained(order, ends), 1)
    second = publisher.add(drained(order, ends), 2, told)
    until(lambda: not planners(), what="all is told")
    assert set(daemon.epochs) == ({0, 1, 2} if repeats else {0, 1})
    assert publisher.drop_unneeded(second) is not repeats


def test_a_finaliser_amid_a_message_of_its_thread_ends_the_session(daemon: Daemon) -> None:
    publisher = publisher_of(daemon)

    def dropped() -> None:
        if threading.current_thread().name == "creel-planner":
            publisher.cancel(1)

    daemon.during = dropped
    told = publisher.begin(counted(8), 0, 0)
    assert told is not None
    until(lambda: not daemon.alive, what="the session is given up")
    assert not publisher.reach(told, N // 8 - 1)


def test_an_interrupted_message_ends_the_session(daemon: Daemon) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    publisher = publisher_of(daemon)
    daemon.during = interrupt
    with pytest.raises(KeyboardInterrupt):
        publisher.begin(counted(8), 0, 0)
    assert not daemon.alive


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_amid_a_message_can_leave_the_epoch(daemon: Daemon) -> None:
    gate, inside = threading.Event(), threading.Event()

    def hold() -> None:
        if threading.current_thread().name == "creel-planner":
            inside.set()
            assert gate.wait(30)

    publisher = publisher_of(daemon)
    daemon.during = hold
    assert publisher.begin(counted(8), 0, 0) is not None
    assert inside.wait(30)
    pid = os.fork()
    if not pid:
        thread = threading.Thread(target=publisher.cancel, args=(10**6,), daemon=True)
        thread.start()
        thread.join(20)
        os._exit(int(thread.is_alive()))
    gate.set()
    assert os.waitpid(pid, 0)[1] == 0
