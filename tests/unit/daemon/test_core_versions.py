"""Files that change: no reader gets bytes older than the moment when they must be fresh."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from core_rig import Rig
from numpy.typing import NDArray

from core_shell import Labels
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.version import CHANGING
from creel.daemon.core.events import (
    HELD,
    Action,
    Checked,
    CheckVersions,
    FetchObjects,
    SetReady,
    Tick,
)
from creel.daemon.core.versions import Versions
from creel.messages import Begin
from creel.policies.prefetch import Window
from kit import default_window, seeds

pytestmark = pytest.mark.timeout(120)


@dataclass
class Source:
    """The present state of a source: the version of each file, and the file of each object."""

    file: NDArray[np.int64]
    version: NDArray[np.int64]
    recent: set[int] = field(default_factory=set)  # files with versions too young

    def reply(self, files: NDArray[np.integer], version: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the storage's answer to a question about these versions."""
        recent = np.isin(files, list(self.recent))
        out: NDArray[np.int64] = np.where(recent, CHANGING, version[files])
        return out


class Dated(Labels):
    """An arena that knows the version of the bytes at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[int, int] = {}  # by object: the version read last
        self.version_at: dict[int, int] = {}  # by place

    def put(self, place: int, name: str, x: int, nbytes: int) -> None:
        super().put(place, name, x, nbytes)
        self.version_at[place] = self.got[x]


class Changing(Rig):
    """A rig with changing files."""

    def __init__(self, capacity: int, window: Window | None = None, seed: int = 0) -> None:
        arena = Dated()
        super().__init__(capacity, window, arena)
        self.got, self.version_at = arena.got, arena.version_at
        self.rng = np.random.default_rng(seed)
        self.source: dict[str, Source] = {}
        self.checks: dict[int, tuple[CheckVersions, NDArray[np.int64]]] = {}
        self.read: dict[int, NDArray[np.int64]] = {}  # by fetch: versions at one moment of it
        self.said: dict[int, int] = {}  # by object: the version as reported by the storage
        self.copies: dict[int, list[tuple[int, int]]] = {}  # by fetch from HELD: `got` and `said`
        self.floor: dict[tuple[int, int], NDArray[np.int64]] = {}  # (session, step) -> versions

    def files(self, name: str, sizes: list[int], per_file: int = 1, *, known: bool = True) -> None:
        n = len(sizes)
        file = np.arange(n) // per_file
        self.source[name] = Source(file, np.ones(int(file[-1]) + 1, np.int64))
        bounds = None if per_file == 1 else np.append(np.arange(0, n, per_file), n)
        self.register(name, sizes, known=known, bounds=bounds)

    def change(self, name: str, file: int, *, recent: bool = False) -> None:
        source = self.source[name]
        source.version[file] += 1
        (source.recent.add if recent else source.recent.discard)(file)

    def begin(self, session: int, epoch: int, first: int) -> list[Action]:
        """Begin epoch `epoch`, whose first step is `first`."""
        self.demand(session, range(first, len(self.readers[session].objects)))
        return self.feed(Begin("", session, epoch))

    def demand(self, session: int, steps: range) -> None:
        now = self.source[self.readers[session].dataset].version.copy()
        self.floor |= {(session, step): now for step in steps}

    def do(self, action: Action) -> None:
        if isinstance(action, CheckVersions):
            version = self.source[action.dataset].version.copy()
            self.checks[action.check] = action, version
            return
        if isinstance(action, SetReady):  # readers of other steps know
            number, steps = action.session, {*range(action.ready), *action.early}
            self.seen = {k: at for k, at in self.seen.items() if k[0] != number or k[1] in steps}
        if isinstance(action, FetchObjects) and action.origin == HELD:
            self.copies[action.fetch] = [(self.got[x], self.said[x]) for x in action.ids.tolist()]
            self.untouched(action)
        elif isinstance(action, FetchObjects):
            self.read[action.fetch] = self.source[action.dataset].version.copy()
            self.untouched(action)
        super().do(action)

    def untouched(self, fetch: FetchObjects) -> None:
        """Check that no bytes are written that a client may be reading by its shared words."""
        read = [
            (b, b + k)
            for (n, step, x), at in self.seen.items()
            if n in self.readers and self.readers[n].done <= step < self.readers[n].ready
            for b, k in self.arena.ranges(at, int(self.length[self.readers[n].dataset][x]))
        ]
        self.arena.runs |= fetch.runs
        for place, nbytes in zip(fetch.offset.tolist(), fetch.length.tolist(), strict=True):
            for a, k in self.arena.ranges(place, nbytes) if place != NOWHERE else []:
                assert not any(a < end and b < a + k for b, end in read)

    def land(self, number: int) -> list[Action]:
        """Let the source answer a fetch with bytes of one moment between its begin and now.

        Copied bytes are those of the moment when they were read.
        """
        fetch = self.fetches[number]
        if fetch.origin == HELD:
            got = [got for got, _ in self.copies[number]]
            self.got.update(zip(fetch.ids.tolist(), got, strict=True))
            return super().land(number)
        version = self.read[number]
        source = self.source[fetch.dataset]
        if self.rng.random() < 0.5:
            version = self.read[number] = source.version.copy()
        files = source.file[fetch.ids]
        self.got.update(zip(fetch.ids.tolist(), version[files].tolist(), strict=True))
        return super().land(number)

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        if fetch.origin == HELD:
            return np.array([said for _, said in self.copies.pop(fetch.fetch)])
        source = self.source[fetch.dataset]
        said = source.reply(source.file[fetch.ids], self.read.pop(fetch.fetch))
        self.said |= dict(zip(fetch.ids.tolist(), said.tolist(), strict=True))
        return said

    def answer(self, number: int) -> list[Action]:
        """Let the storage answer a check, with its state at one moment of it."""
        check, version = self.checks.pop(number)
        source = self.source[check.dataset]
        if self.rng.random() < 0.5:
            version = source.version
        return self.feed(Checked(number, source.reply(check.files, version)))

    def look(self) -> None:
        super().look()
        for number, reader in self.readers.items():
            source = self.source[reader.dataset]
            for step in range(reader.done, reader.ready):
                floor = self.floor.get((number, step))
                assert floor is not None, "ready before its epoch began"
                for x in reader.objects[step]:
                    at = int(self.offset[reader.dataset][x])
                    if at >= 0:
                        file = source.file[x]
                        assert self.version_at[at] >= floor[file], "old bytes"

    def answer_all(self, rounds: int = 50) -> None:
        """Let the storage answer everything; with little memory, reads ahead may never end."""
        while (self.checks or self.fetches) and rounds:
            rounds -= 1
            for number in list(self.checks):
                self.answer(number)
            for number in list(self.fetches):
                self.land(number)


def whole(rig: Changing, session: int, epoch: int, *, begins: bool = True) -> None:
    """Read an epoch of all objects."""
    reader = rig.readers[session]
    n = len(rig.source[reader.dataset].file)
    first = len(reader.objects)
    order = rig.rng.permutation(n)
    rig.extend(session, epoch, [order[i : i + 3].tolist() for i in range(0, n, 3)])
    if begins:
        rig.begin(session, epoch, first)
    while reader.done < len(reader.objects):
        rig.progress(session, reader.ready, reader.ready + 1)
        rig.answer_all()


@pytest.mark.parametrize("per_file", [1, 4, 30])
def test_changed_files_are_read_anew_and_no_others(per_file: int) -> None:
    rig = Changing(10_000)
    rig.files("d", [100] * 30, per_file)
    rig.open(1, "d", recheck="epoch")
    whole(rig, 1, 0)
    assert rig.reads == 30
    whole(rig, 1, 1)
    assert rig.reads == 30
    rig.change("d", 0)
    whole(rig, 1, 2)
    assert rig.reads == 30 + per_file


def test_a_file_that_changes_between_reading_and_copying_is_read_anew() -> None:
    """Its length was unknown, so it was read to private memory first."""
    rig = Changing(10_000)
    rig.files("d", [100, 100], per_file=2, known=False)
    rig.open(1, "d", recheck="epoch")
    rig.extend(1, 0, [[0]])
    rig.begin(1, 0, 0)
    rig.answer_all()
    rig.extend(1, 0, [[1]])
    rig.demand(1, range(1, 2))
    rig.land(next(iter(rig.fetches)))
    (copy,) = rig.fetches.values()
    assert copy.origin == HELD
    rig.change("d", 0)
    rig.open(2, "d", recheck="epoch")
    rig.extend(2, 0, [[0], [1]])
    rig.begin(2, 0, 0)
    rig.answer(next(iter(rig.checks)))
    rig.land(copy.fetch)
    rig.answer_all()
    assert rig.readers[2].ready == 2


def test_a_version_that_cannot_be_relied_on_is_read_anew_in_the_next_epoch() -> None:
    rig = Changing(10_000)
    rig.files("d", [100] * 30)
    rig.change("d", 7, recent=True)
    rig.open(1, "d", recheck="epoch")
    whole(rig, 1, 0)
    whole(rig, 1, 1)
    assert rig.reads == 31
    rig.source["d"].recent.clear()
    whole(rig, 1, 2)
    whole(rig, 1, 3)
    assert rig.reads == 32


def test_a_file_that_is_written_all_the_time_is_read_once_an_epoch() -> None:
    rig = Changing(10_000, default_window(fetch_objects=2))
    rig.files("d", [100] * 30, 30)
    rig.open(1, "d", recheck="epoch")
    for epoch in range(3):
        before = rig.reads
        reader = rig.readers[1]
        rig.feed(Begin("", 1, epoch))
        rig.extend(1, epoch, [[i, i + 1] for i in range(0, 30, 2)])
        rig.demand(1, range(15 * epoch, 15 * epoch + 15))
        while reader.done < len(reader.objects):
            rig.progress(1, reader.ready, reader.ready + 1)
            for number in list(rig.fetches):
                rig.change("d", 0)
                rig.land(number)
            for number in list(rig.checks):
                rig.answer(number)
        assert rig.reads - before <= 32


def test_open_asks_once_and_never_asks_not_at_all() -> None:
    rig = Changing(10_000)
    rig.files("d", [100] * 6)
    rig.open(1, "d", recheck="open")
    rig.demand(1, range(100))
    whole(rig, 1, 0, begins=False)
    rig.change("d", 0)
    whole(rig, 1, 1, begins=False)
    assert rig.reads == 6
    rig.open(2, "d", job="k", recheck="open")
    rig.demand(2, range(100))
    whole(rig, 2, 0, begins=False)
    assert rig.reads == 7
    rig.change("d", 0)
    rig.open(3, "d", job="l", recheck="never")
    rig.floor |= {(3, step): np.zeros(6, np.int64) for step in range(100)}
    whole(rig, 3, 0, begins=False)
    assert rig.reads == 7


def test_remote_files_are_asked_when_a_session_opens_and_local_ones_in_each_epoch() -> None:
    rig = Changing(10_000)
    rig.source["d"] = Source(np.arange(6), np.ones(6, np.int64))
    rig.register("d", [100] * 6, remote=np.array([True] * 3 + [False] * 3))
    rig.open(1, "d", recheck="epoch")
    whole(rig, 1, 0)
    rig.floor.clear()
    rig.extend(1, 1, [[0, 1, 2, 3, 4, 5]])
    rig.begin(1, 1, 2)
    (check, _) = next(iter(rig.checks.values()))
    assert check.files.tolist() == [3, 4, 5]


def test_a_length_that_was_read_is_forgotten_with_the_file_and_a_listed_one_is_not() -> None:
    for name, known in (("d", False), ("e", True)):
        rig = Changing(10_000)
        rig.files(name, [300, 100, 200], known=known)
        rig.open(ord(name), name, recheck="epoch")
        whole(rig, ord(name), 0)
        rig.change(name, 1)
        rig.size[name][1] = 150
        rig.bad[name] = {1} if known else set()  # as sources refuse a wrong length
        whole(rig, ord(name), 1)
        assert rig.length[name].tolist() == [300, 100 if known else 150, 200]
        # Not as long as listed: its reader reads the source, which reports that.
        assert bool(rig.offset[name][1] >= 0) is not known


def test_a_reader_of_another_epoch_loses_ready_before_its_bytes_go() -> None:
    rig = Changing(10_000)
    rig.files("d", [100] * 6)
    rig.open(1, "d", job="a", recheck="epoch")
    rig.open(2, "d", job="b", recheck="epoch")
    rig.extend(1, 0, [[0, 1], [2, 3], [4, 5]])
    rig.begin(1, 0, 0)
    rig.answer_all()
    assert rig.readers[1].ready == 3
    rig.change("d", 3)
    rig.extend(2, 0, [[3]])
    rig.begin(2, 0, 0)
    (number,) = rig.checks
    actions = rig.answer(number)
    assert actions[0] == SetReady(1, 1, 0)
    assert rig.readers[1].ready == 1
    rig.answer_all()
    assert rig.readers[1].ready == 3
    assert rig.readers[2].ready == 1


def test_a_reader_may_be_done_with_an_epoch_before_its_begin_is_heard() -> None:
    """After a pause the daemon reads the shared words before the messages."""
    rig = Changing(100_000)
    rig.files("d", [1] * 6000)
    rig.open(1, "d", recheck="epoch")
    for epoch in range(2):
        rig.extend(1, epoch, [[i] for i in range(6000)])
    rig.begin(1, 0, 0)
    rig.progress(1, 11_000)
    rig.progress(1, 11_900)
    rig.begin(1, 1, 6000)
    rig.answer_all()
    rig.progress(1, 11_900, 11_901)
    rig.answer_all()
    assert rig.readers[1].ready > 11_900


def test_one_hung_read_or_check_holds_up_nobody_for_good() -> None:
    rig = Changing(10_000, default_window(fetch_objects=1))
    rig.files("d", [100] * 30)
    rig.open(1, "d", recheck="epoch")
    rig.feed(Begin("", 1, 0))
    rig.extend(1, 0, [[i] for i in range(6)])
    rig.demand(1, range(6))
    hung = next(n for n, f in rig.fetches.items() if f.ids[0] == 0)
    for number in [n for n in rig.fetches if n != hung]:
        rig.land(number)
    rig.progress(1, 0, 1)
    assert rig.readers[1].ready == 0
    rig.now += 60
    rig.feed(Tick())
    assert rig.readers[1].ready >= 4
    rig.land(hung)
    assert rig.offset["d"][0] >= 0, "what comes late is kept"
    rig.answer_all()
    rig.progress(1, 6)
    rig.extend(1, 1, [[i] for i in range(6)])
    rig.begin(1, 1, 6)
    rig.progress(1, 6, 7)
    for _ in range(2):  # the check is given up, then the read
        assert rig.readers[1].ready == 6
        rig.now += 60
        rig.feed(Tick())
    assert rig.readers[1].ready > 6


@pytest.mark.parametrize("seed", seeds(10))
def test_random_changes_give_no_reader_bytes_older_than_its_epoch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = default_window(
        fetch_objects=int(rng.integers(1, 9)), min_steps=int(rng.integers(1, 6))
    )
    rig = Changing(int(rng.integers(800, 5000)), window, seed)
    n, per_file = int(rng.integers(6, 40)), int(rng.choice([1, 1, 3, 40]))
    known = bool(rng.random() < 0.5)
    sizes = [100] * n if known and rng.random() < 0.5 else rng.integers(1, 200, n).tolist()
    rig.files("d", sizes, per_file, known=known)
    epoch: dict[int, int] = {}
    started: dict[int, list[tuple[int, int]]] = {}  # (epoch, first step) not begun
    for turn in range(250):
        chance = rng.random()
        if chance < 0.05 and len(epoch) < 3:
            rig.open(turn, "d", job=f"j{turn % 2}", recheck="epoch")
            epoch[turn], started[turn] = 0, []
        elif chance < 0.25:
            rig.change(
                "d", int(rng.integers(len(rig.source["d"].version))), recent=rng.random() < 0.2
            )
        elif chance < 0.5 and rig.fetches:
            rig.land(int(rng.choice(list(rig.fetches))))
        elif chance < 0.7 and rig.checks:
            rig.answer(int(rng.choice(list(rig.checks))))
        elif chance < 0.72:
            rig.now += 30
            rig.feed(Tick())
        elif epoch:
            step(rig, rng, int(rng.choice(list(epoch))), epoch, started)
    for s in list(epoch):
        while started[s]:
            begin(rig, s, started)
        finish(rig, s)


def finish(rig: Changing, s: int) -> None:
    """Let a session read to its end: it must not hang."""
    reader = rig.readers[s]
    for _ in range(2000):
        if reader.done == len(reader.objects):
            return
        rig.progress(s, reader.ready, reader.ready + 1)
        rig.answer_all()
    raise AssertionError(reader)


def step(
    rig: Changing,
    rng: np.random.Generator,
    s: int,
    epoch: dict[int, int],
    started: dict[int, list[tuple[int, int]]],
) -> None:
    """Announce an epoch to a session, begin the next announced one, or read on."""
    reader, n = rig.readers[s], len(rig.source["d"].file)
    if len(started[s]) < 2 and rng.random() < 0.3:
        started[s].append((epoch[s], len(reader.objects)))
        order = rng.permutation(n)
        rig.extend(s, epoch[s], [order[i : i + 4].tolist() for i in range(0, n, 4)])
        epoch[s] += 1
    elif started[s] and reader.done == started[s][0][1]:
        begin(rig, s, started)
    else:
        rig.progress(s, reader.ready, reader.ready + int(rng.integers(0, 2)))


def begin(rig: Changing, s: int, started: dict[int, list[tuple[int, int]]]) -> None:
    number, first = started[s].pop(0)
    last = started[s][0][1] if started[s] else len(rig.readers[s].objects)
    rig.demand(s, range(first, last))  # steps that become ready by the event count, too
    rig.feed(Begin("", s, number))


def test_versions_of_files_that_hold_many_objects() -> None:
    versions = Versions(6, np.array([0, 2, 6]))
    ids = np.array([1, 2, 5])
    assert versions.files(ids).tolist() == [0, 1, 1]
    late, changed = versions.read(ids, np.array([7, 8, 8]), 1, np.zeros(3))
    assert not late.any()
    assert changed.tolist() == [0, 1], "whatever else is held of them is of an unknown version"
    assert versions.unasked(ids, 1, 1).tolist() == []
    assert versions.unasked(ids, 2, 2).tolist() == [0, 1]
    two = np.array([0, 1], np.int32)
    assert versions.answered(two, np.array([7, 9]), 2, 0.0).tolist() == [1]
    late, changed = versions.read(ids, np.array([7, 8, 9]), 1, np.zeros(3))
    assert late.tolist() == [False, True, False]
    assert changed.tolist() == []
