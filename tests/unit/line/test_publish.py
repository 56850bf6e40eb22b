"""What the daemon is told of an epoch: all of it, in order, once, by any thread at any time."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.memory.shared_words import HEARTBEAT, KNOWN, STATE, TRUNCATED, WANTED
from creel.errors import DaemonLostError
from creel.loader.client import session
from creel.loader.client.session import Session
from creel.loader.line.order.epoch_plan import EpochPlan, PredictedEpoch
from creel.loader.line.order.streams import FromArray, Sequential
from creel.loader.line.steps import publish
from creel.loader.line.steps.batch_stream import BatchStream
from creel.loader.line.steps.publish import PlanPublisher, PublishedEpoch
from creel.messages import Opened, Truncate
from creel.policies.order.division import Division
from kit import seeds, until

N = 3000


class Daemon:
    """A client whose daemon keeps the plans, and fails if they do not continue."""

    token = ""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.epochs: list[int] = []
        self.alive = True
        words = dict.fromkeys((KNOWN, STATE, TRUNCATED, WANTED), 0) | {HEARTBEAT: sys.maxsize}
        self.words = words
        table = cast(Any, type("Table", (), {"offset": np.zeros(2 * N)}))
        self.session = Session(cast(Any, self), Opened(1, 2 * N, 0), cast(Any, words), table, True)
        self.cluster = ""  # of which it is a node
        self.sending = False
        self.during: Any = lambda: None
        self.after: Any = lambda: None

    def renew(self, manifest: object) -> None:
        """As `Client.renew`."""

    def send(self, message: Any, *arrays: Any) -> None:
        if not self.alive or self.sending:
            raise DaemonLostError("gone, or in the middle of another message")
        self.sending = True
        try:
            self.during()
            self.take(message, *arrays)
        finally:
            self.sending = False
        self.after()

    def take(self, message: Any, *arrays: Any) -> None:
        if isinstance(message, Truncate):
            assert 0 <= message.step < len(self.steps)
            del self.steps[message.step :], self.epochs[message.step :]
            self.words[TRUNCATED] += 1
        else:
            objects, ends = arrays
            assert message.step == len(self.steps)
            assert len(ends) > 0
            assert ends[-1] == len(objects)
            self.steps += [part.tolist() for part in np.split(objects, ends[:-1])]
            self.epochs += [message.epoch] * len(ends)
        self.words[KNOWN] = len(self.steps)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    until(lambda: not planners(), event="no planner is left")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make a small epoch be published like a large one."""
    sizes = publish.PieceSizes(first=10, trainer=20, whole=50, thread=70)
    monkeypatch.setattr(publish, "SIZES", sizes)


def planners() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "creel-planner"]


def pairs(indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Sample i has objects 2i and 2i + 1; every fifth sample has none."""
    some = indices[indices % 5 > 0]
    both = np.stack([2 * some, 2 * some + 1], axis=1).ravel().astype(np.int32)
    return both, np.where(indices % 5 > 0, 2, 0)


def publisher_of(
    daemon: Daemon, *, thread_safe: bool = True, objects: Any = pairs
) -> PlanPublisher:
    return PlanPublisher(daemon.session, objects, lambda _: None, thread_safe=thread_safe)


def begun(
    publisher: PlanPublisher, plan: EpochPlan, epoch: int = 0, skip: int = 0
) -> PublishedEpoch:
    published = PublishedEpoch(epoch, plan, skip)
    publisher.begin(published)
    assert published.planned
    return published


def drained(order: list[int], ends: list[int]) -> EpochPlan:
    starts = np.array([0, *ends])
    return EpochPlan(lambda: PredictedEpoch(Division(starts=starts), FromArray(np.array(order))))


def counted(size: int, total: int = N) -> EpochPlan:
    return EpochPlan(lambda: PredictedEpoch(Division(size), Sequential(total)))


def any_plan(rng: random.Random) -> tuple[EpochPlan, list[list[int]]]:
    """Return a plan and the reads of each of its steps."""
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


@pytest.mark.parametrize("seed", seeds(20))
def test_the_daemon_is_told_exactly_the_epochs_order(
    daemon: Daemon, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:  # no thread can be started
        monkeypatch.setattr(threading.Thread, "start", scarce)
    publisher = publisher_of(daemon, thread_safe=rng.random() < 0.7)
    step, want, epochs = 0, list[list[int]](), list[int]()
    for epoch in range(5):
        plan, steps = any_plan(rng)
        skip = rng.randrange(len(steps)) if rng.random() < 0.3 else 0
        published = begun(publisher, plan, 2 * epoch, skip)
        ahead, later = any_plan(rng)
        publisher.add(PublishedEpoch(2 * epoch + 1, ahead))
        stop = len(steps) if rng.random() < 0.5 else rng.randrange(skip, len(steps) + 1)
        for i in range(skip, stop):
            assert publisher.reach(published, i)
            claim = published.claim_of(i, np.array(steps[i]))
            assert claim is not None
            assert claim.step == published.step(i) == step + i - skip
            assert claim.ids.tolist() == objects_of([steps[i]])[0]
            if i + 1 < len(steps) and steps[i + 1] != steps[i]:
                assert published.claim_of(i, np.array(steps[i + 1])) is None
            if rng.random() < 0.5:
                publisher.pump()
        if stop < len(steps) or rng.random() < 0.5:  # left, or predicted wrongly
            step += stop - skip
            publisher.cancel(step)
            want += steps[skip:stop]
            epochs += [2 * epoch] * (stop - skip)
        else:
            assert not publisher.reach(published, stop)
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

    until(all_told, event="all is told")


def scarce(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_trainer_that_is_faster_than_the_thread_publishes_what_it_needs(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, gate = EpochPlan.draw, threading.Event()

    def slow(self: EpochPlan) -> None:
        assert gate.wait(30)
        draw(self)

    monkeypatch.setattr(EpochPlan, "draw", slow)
    publisher = publisher_of(daemon)
    published = begun(publisher, counted(8))
    for i in range(N // 8 // 2):
        assert publisher.reach(published, i)
        assert published.claim_of(i, np.arange(8 * i, 8 * i + 8))
    assert planners()
    gate.set()
    until(lambda: published.complete, event="the thread tells the rest")
    want = [list(range(a, a + 8)) for a in range(0, N, 8)]
    assert daemon.steps == objects_of(want)


def test_the_persons_code_runs_in_the_trainers_thread_alone(daemon: Daemon) -> None:
    def own(indices: NDArray[np.int64]) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return pairs(indices)

    publisher = publisher_of(daemon, thread_safe=False, objects=own)
    begun(publisher, counted(8))
    assert len(daemon.steps) < N // 8
    told_all(publisher, daemon, N // 8)


def test_an_order_that_cannot_be_computed_after_all_ends_there(daemon: Daemon) -> None:
    def own(indices: NDArray[np.int64]) -> Any:
        if indices.max() >= N // 2:
            raise IndexError
        return pairs(indices)

    publisher = publisher_of(daemon, objects=own)
    published = begun(publisher, counted(10))
    until(lambda: published.complete, event="it ends")
    assert 0 < published.total <= N // 20
    assert not publisher.reach(published, published.total)
    assert (
        daemon.steps
        == objects_of([list(range(a, a + 10)) for a in range(0, N, 10)])[: published.total]
    )


def test_a_finaliser_amid_a_message_of_its_thread_ends_the_session(daemon: Daemon) -> None:
    publisher = publisher_of(daemon)

    def dropped() -> None:
        if threading.current_thread().name == "creel-planner":
            publisher.cancel(1)

    daemon.during = dropped
    published = begun(publisher, counted(8))
    until(lambda: not daemon.session.alive, event="the session is given up")
    assert not publisher.reach(published, N // 8 - 1)


def test_a_finaliser_between_two_messages_cancels_the_rest(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SIZES", session.MessageSizes(limit=4, fresh=4))
    publisher = publisher_of(daemon)
    published = begun(publisher, counted(8, 40))
    assert daemon.steps

    def dropped() -> None:
        daemon.after = lambda: None
        publisher.cancel(2)

    daemon.after = dropped
    assert publisher.publish_pulled(published, 0, np.arange(4), np.arange(8, dtype=np.int32)) < 0
    assert daemon.session.alive
    assert len(daemon.steps) == 2
    assert publisher.publish_pulled(published, 0, np.arange(4), np.arange(8, dtype=np.int32)) == 2


def test_a_finaliser_that_would_wait_for_its_own_thread_gives_the_session_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LOCKED_S", 0.05)
    cancelled = threading.Event()
    publisher = publisher_of(daemon)

    def hold() -> None:
        if threading.current_thread().name == "creel-planner":
            assert cancelled.wait(30)

    daemon.during = hold
    begun(publisher, counted(8))
    until(lambda: daemon.sending, event="the planner sends")
    publisher.cancel(1)
    assert not daemon.session.alive
    cancelled.set()


def test_an_interrupted_message_ends_the_session(daemon: Daemon) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    publisher = publisher_of(daemon)
    daemon.during = interrupt
    with pytest.raises(KeyboardInterrupt):
        begun(publisher, counted(8))
    assert not daemon.session.alive


def claimed(
    epoch: PublishedEpoch, first: int, samples: list[NDArray[np.int64]]
) -> list[list[int] | None]:
    """Return the objects of the batches from `first` on, of these samples; None: not published."""
    claims = (epoch.claim_of(i, indices) for i, indices in enumerate(samples, first))
    return [None if claim is None else claim.ids.tolist() for claim in claims]


def test_batches_that_are_not_planned_are_followed_by_number(daemon: Daemon) -> None:
    publisher, epoch = publisher_of(daemon), PublishedEpoch(0, None)
    publisher.begin(epoch)
    for i in (0, 1, 3, 4):  # batch 2 cannot be published
        indices, objects = np.arange(i + 1), np.array([i], np.int32)
        assert publisher.publish_pulled(epoch, i, indices, objects) == len(daemon.steps) - 1
    assert daemon.steps == [[0], [1], [3], [4]]
    assert [epoch.step(i) for i in range(6)] == [0, 1, 2, 2, 3, 4]
    samples = [np.arange(i + 1) for i in range(5)]
    assert claimed(epoch, 0, samples) == [[0], [1], None, [3], [4]]
    assert [len(piece.indices) for piece in epoch.take(1, 4)] == [2, 4]
    assert claimed(epoch, 0, samples) == [None, None, None, None, [4]]


def test_a_plan_that_is_left_goes_on_with_what_is_pulled(daemon: Daemon) -> None:
    publisher = publisher_of(daemon)
    epoch = begun(publisher, counted(4, 40))
    assert publisher.reach(epoch, 5)
    publisher.cancel(5)
    epoch.leave_plan(5)
    assert not epoch.planned
    assert publisher.publish_pulled(epoch, 6, np.arange(3), np.array([7, 8], np.int32)) == 5
    assert daemon.steps == [*objects_of([list(range(4 * i, 4 * i + 4)) for i in range(5)]), [7, 8]]
    assert [epoch.step(i) for i in range(4, 9)] == [4, 5, 5, 6, 6]
    samples = [np.arange(4 * i, 4 * i + 4) for i in range(3, 8)]
    samples[3] = np.arange(3)
    (four, five), remaining = (
        objects_of([[*indices] for indices in samples[:2]]),
        [None, [7, 8], None],
    )
    assert claimed(epoch, 3, samples) == [four, five, *remaining]
    assert sum(len(piece.ends) for piece in epoch.take(2, 7)) == 4


def test_nodes_that_join_amid_an_epoch_hear_of_it_before_they_hear_of_the_next(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is first: the trainer after a batch, or the thread that publishes the next epoch."""
    dealt: list[int] = []
    plans = [counted(4, 200), counted(4, 200)]
    binding: Any = SimpleNamespace(
        allowed=lambda: None,
        objects=pairs,
        in_objects=lambda _: "order",
        thread_safe=True,
        manifest=None,
    )
    order: Any = SimpleNamespace(predict=lambda k: plans[k], lookahead=1, extended=False)
    monkeypatch.setattr(daemon.session, "deal", lambda epoch, _: dealt.append(epoch))
    for name in ("begin", "done"):
        monkeypatch.setattr(daemon.session, name, lambda _: None)
    monkeypatch.setattr(EpochPlan, "deal", "the same on all ranks")
    stream = BatchStream(daemon.session, binding, "")
    stream.begin(order)
    until(lambda: len(daemon.steps) == 50)
    assert dealt == []  # this node is alone
    daemon.cluster = "of two nodes"
    stream.publish_upcoming(order)
    until(lambda: len(daemon.steps) == 100)
    assert dealt == [0, 1]
    stream.done(1)
    assert dealt == [0, 1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_amid_a_message_can_leave_the_epoch(daemon: Daemon) -> None:
    gate, inside = threading.Event(), threading.Event()

    def hold() -> None:
        if threading.current_thread().name == "creel-planner":
            inside.set()
            assert gate.wait(30)

    publisher = publisher_of(daemon)
    daemon.during = hold
    begun(publisher, counted(8))
    assert inside.wait(30)
    pid = os.fork()
    if not pid:
        thread = threading.Thread(target=publisher.cancel, args=(10**6,), daemon=True)
        thread.start()
        thread.join(20)
        os._exit(int(thread.is_alive()))
    gate.set()
    assert os.waitpid(pid, 0)[1] == 0
