"""The core's laws under any order of events, and what each event does."""

from __future__ import annotations

import errno
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.arena import Arena
from creel.cache.manifest import Manifest
from creel.cache.source import Source
from creel.cache.space import Space
from creel.config import Config
from creel.daemon.core import Core
from creel.daemon.events import (
    Action,
    Closed,
    Discard,
    Dropped,
    Event,
    Extended,
    Fetch,
    Fetched,
    Lost,
    Move,
    Opened,
    Progressed,
    Registered,
    SetReady,
    Store,
    Tick,
    Truncated,
    Unregistered,
    Warm,
)
from creel.daemon.fetch import Fetcher
from creel.daemon.node import Node
from creel.daemon.registry import Dataset
from creel.errors import IllegalEventError, MalformedError
from creel.policies.prefetch import Window
from creel.policies.retain import FarKeeper
from creel.settings import Memory

pytestmark = pytest.mark.timeout(120)


@dataclass
class Reader:
    """A client as the shell sees it: its plan, its board."""

    dataset: str
    objects: list[list[int]] = field(default_factory=list)  # by step
    done: int = 0
    ready: int = 0
    wanted: int = 0


class Rig:
    """A core, a model of the arena (offset -> whose bytes), and a source that can fail.

    After each event the invariants hold, and every object of a ready step that is published has its
    own bytes at its offset.
    """

    def __init__(self, capacity: int, window: Window | None = None) -> None:
        self.core = Core(Space(capacity), config=window)
        self.now = 0.0
        self.offset: dict[str, NDArray[np.int64]] = {}
        self.length: dict[str, NDArray[np.int64]] = {}
        self.size: dict[str, NDArray[np.int64]] = {}  # what the source has
        self.bad: dict[str, set[int]] = {}  # objects that the source fails to give
        self.readers: dict[int, Reader] = {}
        self.fetches: dict[int, Fetch] = {}
        self.held: dict[int, tuple[str, dict[int, int]]] = {}  # fetch -> dataset, object -> bytes
        self.bytes: dict[int, tuple[str, int, int]] = {}  # offset -> dataset, object, length
        self.reads = 0
        self.moves = 0
        self.memory: Callable[[int], int] = lambda k: k  # how many of k it is enough for
        self.lost: list[Lost] = []
        self.checking = True
        self.seen: dict[tuple[int, int], int] = {}  # session, object -> offset of a ready object

    def register(self, name: str, sizes: list[int], *, known: bool = True) -> None:
        size = np.array(sizes, np.int64)
        self.size[name] = size
        self.offset[name] = np.zeros(len(size), np.int64)  # as a fresh mapping is
        self.length[name] = size.copy() if known else np.full(len(size), -1, np.int64)
        self.bad[name] = set()
        self.feed(Registered(name, self.offset[name], self.length[name]))

    def open(self, session: int, name: str, job: str = "j", rank: int = 0, world: int = 1) -> None:
        self.readers[session] = Reader(name)
        self.feed(Opened(session, name, job, rank, world))

    def extend(self, session: int, epoch: int, steps: list[list[int]]) -> list[Action]:
        reader = self.readers[session]
        first = len(reader.objects)
        reader.objects += steps
        ids = np.array([x for step in steps for x in step], np.int32)
        ends = np.cumsum([len(step) for step in steps], dtype=np.int64)
        return self.feed(Extended(session, epoch, first, ids, ends))

    def truncate(self, session: int, step: int) -> None:
        reader = self.readers[session]
        del reader.objects[max(step, reader.done) :]
        reader.wanted = min(reader.wanted, len(reader.objects))
        self.feed(Truncated(session, step))

    def progress(self, session: int, done: int = 0, wanted: int = 0) -> list[Action]:
        reader = self.readers[session]
        reader.done = min(max(reader.done, done), len(reader.objects))
        reader.wanted = min(max(reader.wanted, wanted), len(reader.objects))
        return self.feed(Progressed(session, done, wanted))

    def close(self, session: int) -> None:
        del self.readers[session]
        self.feed(Closed(session))

    def land(self, number: int) -> list[Action]:
        """The source answers a fetch."""
        fetch = self.fetches.pop(number)
        name = fetch.dataset
        out = self.size[name][fetch.ids].copy()
        self.reads += len(out)
        held = {}
        for i, x in enumerate(fetch.ids.tolist()):
            if x in self.bad[name]:
                out[i] = -1
            elif fetch.offset[i] < 0:
                held[x] = int(out[i])
            else:
                self.write(int(fetch.offset[i]), name, x, int(fetch.length[i]))
        if held:
            self.held[number] = name, held
        return self.feed(Fetched(number, out))

    def write(self, offset: int, name: str, x: int, nbytes: int) -> None:
        for at, (_, _, n) in list(self.bytes.items()):
            if at < offset + nbytes and offset < at + n:
                del self.bytes[at]
        self.bytes[offset] = (name, x, nbytes)

    def feed(self, event: Event) -> list[Action]:
        self.now += 0.01
        actions = self.core.handle(event, self.now)
        for action in actions:
            self.do(action)
        while self.lost:
            self.feed(self.lost.pop(0))
        if self.checking:
            self.core.check()
            self.look()
        return actions

    def do(self, action: Action) -> None:
        if isinstance(action, Fetch):
            assert action.fetch not in self.fetches
            assert len(set(action.ids.tolist())) == len(action.ids)
            self.fetches[action.fetch] = action
        elif isinstance(action, Store):
            name, held = self.held[action.fetch]
            assert name == action.dataset
            assert (self.offset[name][action.ids] < 0).all(), "seen before its bytes are there"
            k = self.memory(len(action.ids))
            for x, at in zip(action.ids[:k].tolist(), action.offset[:k].tolist(), strict=True):
                self.write(at, name, x, held.pop(x))
            self.offset[name][action.ids[:k]] = action.offset[:k]
            if k < len(action.ids):
                self.lost.append(Lost(name, action.ids[k:], action.offset[k:]))
                held.clear()
            if not held:
                del self.held[action.fetch]
        elif isinstance(action, Discard):
            self.held.pop(action.fetch, None)
        elif isinstance(action, Move):
            self.move(action)
        else:
            assert isinstance(action, SetReady)
            assert action.ready != self.readers[action.session].ready, "not moved"
            self.readers[action.session].ready = action.ready

    def move(self, action: Move) -> None:
        """As the shell does: copy in order, then publish."""
        name = action.dataset
        assert (self.offset[name][action.ids] < 0).all(), "moved while it can be seen"
        places = zip(action.ids, action.src, action.dst, action.nbytes, strict=True)
        for x, src, dst, nbytes in places:
            assert self.bytes.pop(int(src)) == (name, x, nbytes)
            self.write(int(dst), name, int(x), int(nbytes))
        self.offset[name][action.ids] = action.dst
        self.moves += len(action.ids)

    def look(self) -> None:
        """What readers may touch is theirs, and stays where it is until they are done with it."""
        seen = {}
        for number, reader in self.readers.items():
            assert reader.done <= reader.ready
            for x in {x for s in reader.objects[reader.done : reader.ready] for x in s}:
                at = int(self.offset[reader.dataset][x])
                if at >= 0:
                    assert self.bytes[at][:2] == (reader.dataset, x)
                    seen[number, x] = at
                assert self.seen.get((number, x), at) == at, "moved under a reader"
        self.seen = seen
        assert not self.held, "bytes are held that nobody will fetch"

    def settle(self, limit: int = 10_000) -> None:
        """The source answers everything."""
        while self.fetches and limit:
            self.land(next(iter(self.fetches)))
            limit -= 1
        assert limit


def absent(rig: Rig, name: str, ids: range | list[int]) -> bool:
    return bool((rig.offset[name][list(ids)] < 0).all())


# --- laws ---------------------------------------------------------------------------------------


class Chaos:
    """Random events for a rig."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.sizes: dict[str, int] = {}
        capacity = int(rng.integers(300, 20_000))
        tight = rng.random() < 0.3
        window = Window(
            inflight_objects=int(rng.integers(2, 200)),
            inflight_nbytes=int(rng.integers(200, 20_000)),
            fetch_objects=int(rng.integers(1, 20)),
            min_steps=int(rng.integers(1, 8)),
            opens_dominate=bool(rng.random() < 0.2),
        )
        self.rig = Rig(capacity // (10 if tight else 1), window)
        self.epoch: dict[int, int] = {}
        self.next = 1
        for name in "abc"[: rng.integers(1, 4)]:
            n = int(rng.integers(1, 120))
            kind = rng.integers(0, 4)
            lengths = np.full(n, 100) if kind == 0 else rng.integers(0, 400, n)
            self.sizes[name] = n
            self.rig.register(name, lengths.tolist(), known=bool(kind < 2))
            self.rig.bad[name] = set(rng.integers(0, n, n // 20).tolist())
        if seed % 3 == 0:
            self.rig.memory = self.some

    def some(self, k: int) -> int:
        """The machine has memory for no more than so many."""
        return int(self.rng.integers(0, k + 1)) if self.rng.random() < 0.3 else k

    def turn(self) -> None:
        rng, rig = self.rng, self.rig
        open_ = list(rig.readers)
        what = rng.random()
        if what < 0.45 and rig.fetches:
            rig.land(int(rng.choice(list(rig.fetches))))
        elif what < 0.5 and len(open_) < 5:
            self.open()
        elif what < 0.6 and open_:
            self.extend(int(rng.choice(open_)))
        elif what < 0.9 and open_:
            self.progress(int(rng.choice(open_)))
        elif what < 0.92 and open_:
            s = int(rng.choice(open_))
            rig.truncate(s, int(rng.integers(0, len(rig.readers[s].objects) + 2)))
        elif what < 0.93 and open_:
            rig.close(int(rng.choice(open_)))
        elif what < 0.95:
            rig.feed(Warm(str(rng.choice(list(self.sizes)))))
        elif what < 0.96:
            rig.feed(Dropped(str(rng.choice(list(self.sizes)))))
        elif what < 0.97:
            self.renew(str(rng.choice(list(self.sizes))))
        else:
            rig.feed(Tick())

    def renew(self, name: str) -> None:
        """A data set that nobody uses goes, and comes again."""
        rig = self.rig
        if not rig.core.busy(name):
            size, bad = rig.size[name], rig.bad[name]
            rig.feed(Unregistered(name))
            rig.register(name, size.tolist(), known=bool(self.rng.random() < 0.5))
            rig.bad[name] = bad

    def open(self) -> None:
        rng = self.rng
        name = str(rng.choice(list(self.sizes)))
        job = str(rng.choice(["j", "k"]))
        self.rig.open(self.next, name, job, int(rng.integers(0, 3)), 3)
        self.epoch[self.next] = 0
        self.next += 1

    def extend(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        n = self.sizes[reader.dataset]
        ids = rng.permutation(n) if rng.random() < 0.7 else rng.integers(0, n, n)
        batch = int(rng.integers(1, 20))
        cuts = [ids[i : i + batch].tolist() for i in range(0, len(ids), batch)]
        if rng.random() < 0.1:
            cuts.insert(0, [])
        self.rig.extend(session, self.epoch[session], cuts)
        self.epoch[session] += rng.random() < 0.8

    def progress(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        done = reader.done
        if rng.random() < 0.7:
            done = int(rng.integers(reader.done, max(reader.ready, reader.done) + 1))
        elif rng.random() < 0.1:
            done = int(rng.integers(-5, len(reader.objects) + 5))  # hostile, or read directly
        wanted = 0
        if rng.random() < 0.3:
            wanted = reader.ready + 1
        elif rng.random() < 0.05:
            wanted = 1 << 60
        self.rig.progress(session, done, wanted)

    def finish(self) -> None:
        """Everybody reads to the end: with a live source nobody hangs."""
        rig = self.rig
        for _ in range(20_000):
            left = [n for n, r in rig.readers.items() if r.done < len(r.objects)]
            if not left:
                return
            for n in left:
                reader = rig.readers[n]
                rig.progress(n, reader.ready, reader.ready + 1)
            if rig.fetches:
                rig.land(next(iter(rig.fetches)))
        raise AssertionError(f"stuck: {rig.readers}")


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_invariants_hold_and_nobody_hangs(seed: int) -> None:
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
    assert memory["free_nbytes"] == memory["nbytes"]
    assert memory["inflight_objects"] == memory["inflight_nbytes"] == 0


class Bytes(Rig):
    """A rig whose arena holds real bytes: what a reader sees is compared with the source's."""

    def __init__(self, capacity: int, window: Window | None = None) -> None:
        super().__init__(capacity, window)
        self.arena = np.zeros(capacity, np.uint8)
        self.stored = 0

    @staticmethod
    @cache
    def content(name: str, x: int, nbytes: int) -> bytes:
        return np.random.default_rng([ord(name), x]).bytes(nbytes)

    def write(self, offset: int, name: str, x: int, nbytes: int) -> None:
        self.arena[offset : offset + nbytes] = np.frombuffer(
            self.content(name, x, nbytes), np.uint8
        )

    def move(self, action: Move) -> None:
        offset = self.offset[action.dataset]
        assert (offset[action.ids] < 0).all(), "moved while it can be seen"
        for src, dst, n in zip(action.src, action.dst, action.nbytes, strict=True):
            self.arena[dst : dst + n] = self.arena[src : src + n].copy()
        offset[action.ids] = action.dst
        self.moves += len(action.ids)

    def do(self, action: Action) -> None:
        self.stored += len(action.ids) if isinstance(action, Store) else 0
        super().do(action)

    def look(self) -> None:
        """Whoever nobody has pinned may move, but is never seen with another's bytes either."""
        for name, offset in self.offset.items():
            for x in np.flatnonzero(offset >= 0).tolist():
                at, n = int(offset[x]), int(self.length[name][x])
                assert n == self.size[name][x]
                assert self.arena[at : at + n].tobytes() == self.content(name, x, n)
        seen = {
            (number, x): int(self.offset[reader.dataset][x])
            for number, reader in self.readers.items()
            for step in reader.objects[reader.done : reader.ready]
            for x in step
            if self.offset[reader.dataset][x] >= 0
        }
        assert all(self.seen.get(key, at) == at for key, at in seen.items()), "moved when pinned"
        self.seen = seen


class Images(Chaos):
    """Random events where sizes vary as those of images do, and memory is short."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        sizes = {
            name: np.maximum(rng.lognormal(6.5, 0.9, int(rng.integers(40, 120))), 1).astype(int)
            for name in "ab"[: rng.integers(1, 3)]
        }
        total = int(sum(s.sum() for s in sizes.values()))
        capacity = int(total * rng.uniform(0.25, 0.8))
        self.rig: Bytes = Bytes(capacity, Window(fetch_objects=8, min_steps=3))
        self.sizes = {name: len(s) for name, s in sizes.items()}
        self.epoch, self.next = {}, 1
        for name, s in sizes.items():
            self.rig.register(name, s.tolist(), known=bool(rng.random() < 0.6))
            self.rig.bad[name] = set(rng.integers(0, len(s), 2).tolist())
            if rng.random() < 0.5 and self.rig.length[name][0] >= 0:
                self.rig.size[name][::17] += 5  # changed since they were listed
        if seed % 3 == 0:
            self.rig.memory = self.some


def test_whatever_moves_every_reader_sees_its_own_bytes() -> None:
    moves = stored = 0
    for seed in range(16):
        chaos = Images(seed)
        for _ in range(150):
            chaos.turn()
        for session in list(chaos.rig.readers)[2:]:
            chaos.rig.close(session)
        chaos.finish()
        moves, stored = moves + chaos.rig.moves, stored + chaos.rig.stored
    assert moves > 100
    assert stored > 100


def test_large_objects_make_room_without_anybody_losing_a_byte() -> None:
    """Training and validation in a fifth of the memory; those who stay must not change places."""
    rng = np.random.default_rng(1)
    rig = Bytes(1 << 20)
    left: dict[int, deque[list[int]]] = {}
    done: dict[int, int] = {}
    sizes = {"t": np.exp(rng.normal(8.5, 1, 600)), "v": np.exp(rng.normal(8.5, 1, 200))}
    for number, name in enumerate("tv", 1):
        rig.register(name, sizes[name].astype(int).tolist(), known=False)
        rig.open(number, name)
        left[number], done[number] = deque(), 0
    for turn in range(400):
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
        rig.core.check()
        rig.look()
    assert rig.moves > 20


@pytest.mark.parametrize("capacity", [10, 100, 250, 1000])
def test_a_budget_smaller_than_a_step_degrades_and_never_hangs(capacity: int) -> None:
    """1 % of the data: what does not fit is given up to the reader, the rest goes on."""
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


# --- what each event does ------------------------------------------------------------------------


@pytest.fixture
def rig() -> Rig:
    rig = Rig(1000)
    rig.register("d", [100] * 30)
    return rig


def test_a_step_is_ready_once_its_last_object_is_there() -> None:
    rig = Rig(1000, Window(fetch_objects=1))
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


def test_a_fetch_is_sorted_by_object_and_has_room_of_its_own(rig: Rig) -> None:
    rig.open(1, "d")
    (fetch,) = (a for a in rig.extend(1, 0, [[9, 4, 7]]) if isinstance(a, Fetch))
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
    told = rig.core.snapshot()["sessions"]["2"]
    assert (told["hits"], told["joined"], told["misses"]) == (0, 2, 0)


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
    told = rig.core.snapshot()
    assert int(told["datasets"]["d"]["failed"]) >= 1
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
    rig.settle()  # the one that was under way stays, unpinned
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
        rig.feed(Extended(1, 0, 5, np.array([1], np.int32), np.array([1])))
    rig.extend(1, 0, [[1]])


def test_events_that_cannot_happen_are_our_bugs(rig: Rig) -> None:
    with pytest.raises(IllegalEventError):
        rig.feed(Opened(1, "nothing", "", 0, 1))
    with pytest.raises(IllegalEventError):
        rig.feed(Registered("d", rig.offset["d"], rig.length["d"]))


def test_events_of_a_closed_session_are_late_not_wrong(rig: Rig) -> None:
    for event in (Progressed(9, 1, 1), Truncated(9, 0), Closed(9), Warm("x"), Dropped("x")):
        assert rig.feed(event) == []
    assert rig.feed(Extended(9, 0, 0, np.empty(0, np.int32), np.empty(0, np.int64))) == []


def test_warming_fills_free_room_in_order_and_evicts_nothing(rig: Rig) -> None:
    rig.feed(Warm("d"))
    rig.settle()
    assert (rig.offset["d"] >= 0).tolist() == [True] * 10 + [False] * 20
    assert rig.reads == 10


def test_the_most_urgent_session_is_served_first() -> None:
    rig = Rig(10_000, Window(inflight_objects=4, min_steps=4))
    rig.register("d", [10] * 500)
    rig.open(1, "d", job="a")
    rig.open(2, "d", job="b")
    rig.extend(1, 0, [[i] for i in range(100)])
    rig.extend(2, 0, [[i] for i in range(200, 300)])
    rig.progress(2, 0, 1)
    rig.land(next(iter(rig.fetches)))
    assert 200 in {x for f in rig.fetches.values() for x in f.ids.tolist()}


@pytest.mark.parametrize("sizes", [(100, 100), (100, 37)])
def test_a_new_dataset_gets_its_share_from_the_one_that_holds_all(sizes: tuple[int, int]) -> None:
    rig = Rig(64_000, Window(min_steps=2))
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
    told = rig.core.snapshot()["datasets"]
    share = sizes[1] * 1000 / (sizes[1] * 1000 + sizes[0] * 3000)
    assert told["val"]["used_nbytes"] == pytest.approx(share * 64_000, rel=0.15)
    assert told["val"]["failed"] == 0


def test_large_objects_leave_first_where_opens_dominate() -> None:
    rig = Rig(64 * 60, Window(opens_dominate=True))
    rng = np.random.default_rng(0)
    sizes = np.where(np.arange(200) % 2, 64, 19)
    rig.register("d", sizes.tolist())
    rig.open(1, "d")
    for epoch in range(3):
        order = rng.permutation(200)
        rig.extend(1, epoch, [order[i : i + 4].tolist() for i in range(0, 200, 4)])
        for step in range(50 * epoch, 50 * epoch + 50):
            rig.progress(1, step, step + 1)
            rig.settle()
    resident = rig.offset["d"] >= 0
    assert resident[sizes == 19].mean() > 2 * resident[sizes == 64].mean()


def test_objects_move_for_those_who_find_no_room_in_one_piece_and_keep_their_bytes() -> None:
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
    assert rig.moves > 5  # few: newcomers mostly take places that fit them
    offset, name = rig.offset["d"], "d"
    for x in np.flatnonzero(offset >= 0).tolist():
        assert rig.bytes[int(offset[x])] == (name, x, sizes[x])


def test_jobs_on_two_datasets_told_in_pieces_share_reads_and_sort_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To sort all residents costs as much as there are: 16 of them for one planned read."""
    sorts: list[FarKeeper] = []
    relist = FarKeeper.relist

    def counted(keeper: FarKeeper) -> None:
        sorts.append(keeper)
        relist(keeper)

    monkeypatch.setattr(FarKeeper, "relist", counted)
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
    told = rig.core.snapshot()["datasets"]
    assert {told[name]["policy"] for name in "ab"} == {"far"}
    assert sum(told[name]["failed"] for name in "ab") == 0  # type: ignore[misc]
    assert rig.reads < 0.75 * 4 * n * epochs
    assert 0 < len(sorts) <= 16 * 4 * epochs + 4


def test_the_shell_stores_bytes_and_then_publishes() -> None:
    arena = Arena.create(4096)
    fetcher = Fetcher(arena, lambda _: None)
    fetcher._held[7] = {2: b"abc", 0: b"de"}

    class Watched(np.ndarray[Any, Any]):
        def __setitem__(self, ids: Any, at: Any) -> None:
            assert bytes(arena.view[4:7]) == b"abc"
            assert bytes(arena.view[9:11]) == b"de"
            super().__setitem__(ids, at)

    offset = np.full(3, -1, np.int64).view(Watched)
    fetcher.store(Store(7, "d", np.array([2, 0], np.int32), np.array([4, 9])), offset)
    assert offset.tolist() == [9, -1, 4]


def test_a_machine_without_memory_stores_no_more_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena.create(4096)
    fetcher = Fetcher(arena, lambda _: None)
    fetcher._held[7] = {2: b"abc", 0: b"de", 1: b"f"}
    write = arena.write

    def short(offset: int, data: memoryview) -> None:
        if offset == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(offset, data)

    monkeypatch.setattr(arena, "write", short)
    offset = np.full(3, -1, np.int64)
    places = np.array([4, 9, 20])
    assert fetcher.store(Store(7, "d", np.array([2, 0, 1], np.int32), places), offset) == 1
    assert offset.tolist() == [-1, -1, 4]
    assert fetcher.store(Store(7, "d", np.array([1], np.int32), np.array([9])), offset) == 0
    fetcher.discard(Discard(7))
    assert fetcher.held_nbytes() == 0
    assert caplog.text.count("no memory") == 1


def test_the_shell_moves_overlapping_bytes_in_order_and_then_publishes() -> None:
    arena = Arena.create(4096)
    arena.array[:100] = np.arange(100)
    fetcher = Fetcher(arena, lambda _: None)
    offset = np.full(3, -1, np.int64)
    src, dst, nbytes = np.array([[30, 50], [20, 60], [25, 20]])
    fetcher.move(Move("d", np.array([2, 0], np.int32), src, dst, nbytes), offset)
    assert arena.array[20:45].tolist() == [*range(30, 55)]
    assert arena.array[60:80].tolist() == [*range(50, 70)]
    assert offset.tolist() == [60, -1, 20]


@pytest.mark.parametrize("draining", [True, False])
def test_a_node_that_drains_leaves_all_bytes_where_they_lie(*, draining: bool) -> None:
    """READY stays up for those who hang up then, and readers of theirs may still be copying."""
    config = Config(memory=Memory(budget="1MiB", prefault=False))
    node = Node(config, call_soon=lambda job: job(), send=lambda *_: None, embedded=True)
    manifest = Manifest.of_files(["/a", "/b"])
    dataset = Dataset.create(manifest, Source(manifest))
    node.registry.add(dataset)
    offset = dataset.table.offset
    offset[:] = -1
    node.arena.array[:50] = 7
    if draining:
        node.state = "draining"
    ids, at = np.array([1], np.int32), np.array([100])
    node._do(Move(dataset.key, ids, at * 0, at, at // 2), [])
    node.fetcher._held[3] = {0: b"x" * 50}
    node._do(Store(3, dataset.key, ids * 0, at * 2), [])
    assert bool(node.arena.array.sum() > 50 * 7) is not draining
    assert (offset.tolist() == [-1, -1]) is draining
    node.close()


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
    with pytest.raises(IllegalEventError, match="cannot go"):
        rig.core.handle(Unregistered("e" if why == "unknown" else "d"), rig.now)
    rig.core.check()
    assert rig.fetches == fetches
    rig.settle()
    assert (rig.offset["d"] >= 0).any() == (why != "unknown")


# --- cost ----------------------------------------------------------------------------------------


def test_a_step_takes_no_more_memory_for_a_larger_dataset() -> None:
    """So nothing is copied, masked or sorted as a whole; times are in benchmarks/planning.py."""
    n, batch = 50_000, 25
    rng = np.random.default_rng(0)
    core = Core(Space(n // 2 * 1000))
    core.handle(Registered("d", np.empty(n, np.int64), np.full(n, 1000)), 0.0)
    core.handle(Opened(1, "d", "", 0, 1), 0.0)
    ends = np.arange(batch, n + 1, batch)
    plans = [rng.permutation(n).astype(np.int32) for _ in range(2)]
    fetches: list[Action] = []
    for epoch, plan in enumerate(plans):
        fetches += core.handle(Extended(1, epoch, epoch * len(ends), plan, ends), 0.0)
    took = []
    tracemalloc.start()
    for step in range(len(ends) + 200):
        while fetches:
            fetch = fetches.pop()
            if isinstance(fetch, Fetch):
                fetches += core.handle(Fetched(fetch.fetch, fetch.length), step * 0.1)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        fetches += core.handle(Progressed(1, step + 1, 0), step * 0.1)
        took.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert np.median(took[len(ends) :]) < n / 2  # an epoch's turn may take more
