"""The disk tier in the core: events of single objects, and laws under random events."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from core_rig import Rig
from numpy.typing import NDArray
from random_events import Chaos

from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.core import Core
from creel.daemon.core.disk.search import Walk
from creel.daemon.core.events import (
    DISK,
    SOURCE,
    DatasetAdded,
    DiskOpened,
    DropFromDisk,
    Dropped,
    FetchObjects,
    FoundOnDisk,
    Tick,
    Unregistered,
)
from creel.daemon.core.versions import Versions
from kit import default_window, seeds

pytestmark = pytest.mark.timeout(120)

ROOM = 64 + 128  # on disk for an object of 100 bytes, in units of 64


class DiskRig(Rig):
    """A rig whose source has versions."""

    version = 1 << 30

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        return np.full(len(fetch.ids), self.version, np.int64)


def rig_of(objects: int, *, memory: int, disk: int) -> DiskRig:
    rig = DiskRig(memory * 100)
    rig.register("d", [100] * objects)
    rig.open_disk(disk * ROOM)
    rig.open(1, "d")
    return rig


def read(rig: Rig, epochs: int, batch: int = 5) -> list[tuple[int, int]]:
    """Return (reads of the source, reads of the disk) for each epoch."""
    n, rng, out = len(rig.size["d"]), np.random.default_rng(0), []
    for epoch in range(epochs + 1):
        rig.extend(1, epoch, rng.permutation(n).reshape(-1, batch).tolist())
    for _ in range(epochs):
        before = rig.reads, rig.disk_reads
        for _ in range(n // batch):
            done = rig.readers[1].done
            rig.progress(1, done, done + 1)
            rig.settle()
            assert rig.readers[1].ready > done
            rig.progress(1, done + 1)
            rig.settle()
        out.append((rig.reads - before[0], rig.disk_reads - before[1]))
    return out


def test_objects_that_memory_has_no_room_for_come_back_from_disk() -> None:
    rig = rig_of(200, memory=60, disk=220)
    counted = read(rig, 3)
    assert sum(source for source, _ in counted) == 200
    assert counted[1][1] > 80
    dataset = rig.core.snapshot()["datasets"]["d"]
    assert dataset["spilled"] == dataset["disk_objects"] == 200
    assert dataset["disk_reads"] == rig.disk_reads


def test_a_restarted_node_reads_from_disk_what_the_last_one_wrote() -> None:
    first = rig_of(200, memory=60, disk=220)
    read(first, 1)
    second = DiskRig(6000)
    second.register("d", [100] * 200)
    second.disk = first.disk
    second.open_disk(220 * ROOM)
    second.open(1, "d")
    # Objects that the first node held for its next steps had not left memory for the disk yet.
    assert sum(source for source, _ in read(second, 2)) <= 10


def test_lengths_that_only_the_disk_knows_are_known_then() -> None:
    rig = DiskRig(6000)
    rig.register("d", list(range(100, 120)), known=False)
    rig.disk = {"d": {x: 100 + x for x in range(0, 20, 2)}}
    rig.open_disk(1 << 20)
    rig.open(1, "d")
    (source, disk), *_ = read(rig, 1)
    assert (source, disk) == (10, 10)


def test_objects_of_another_length_than_the_manifest_says_are_dropped() -> None:
    rig = DiskRig(6000)
    rig.register("d", [100] * 10)
    rig.disk = {"d": dict.fromkeys(range(10), 99)}
    rig.open_disk(1 << 20)
    rig.write_disk()
    assert rig.disk["d"] == {}
    rig.open(1, "d")
    assert read(rig, 1) == [(10, 0)]


@pytest.mark.parametrize("memory, disk, batch", [(11, 9, 10), (10, 6, 12), (15, 9, 20)])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_step_that_memory_hardly_holds_is_not_awaited_in_writes_without_end(
    memory: int, disk: int, batch: int, seed: int
) -> None:
    """Only objects due later leave; the step's own objects would go to disk in turns."""
    rig = rig_of(4 * batch, memory=memory, disk=disk)
    rng, written = np.random.default_rng(seed), 0
    for epoch in range(4):
        rig.extend(1, epoch, rng.permutation(4 * batch).reshape(-1, batch).tolist())
    for done in range(12):
        rig.progress(1, done, done + 1)
        while rig.fetches or rig.to_disk:
            if rig.to_disk:
                rig.write_disk()
                written += 1
                assert written <= 2 * batch * (done + 1), "it writes the same again and again"
            else:
                rig.land(next(iter(rig.fetches)))
        assert rig.readers[1].ready > done, "a step that nothing is awaited for is not ready"
        rig.progress(1, done + 1)


def test_objects_that_the_disk_gives_no_more_are_read_from_the_source() -> None:
    rig = rig_of(20, memory=5, disk=30)
    read(rig, 1)
    del rig.disk["d"][3], rig.disk["d"][11]  # as if bits had flipped
    for step in range(4):
        rig.progress(1, 4 + step, 5 + step)
        rig.settle()
        rig.progress(1, 5 + step)
        rig.settle()
    dataset = rig.core.snapshot()["datasets"]["d"]
    assert dataset["disk_misses"] in {1, 2}
    assert rig.reads - 20 == dataset["disk_misses"]
    assert dataset["failed"] == 0


@pytest.mark.parametrize("disk", [20, 10])
def test_before_the_end_what_memory_has_alone_is_written_as_far_as_there_is_room(disk: int) -> None:
    """Objects due next come first; they are pinned, so they were not written before."""
    rig = rig_of(60, memory=60, disk=disk)
    rig.extend(1, 0, [list(range(19, 9, -1)), list(range(10))])
    rig.progress(1, 0, 2)
    while rig.fetches:
        rig.land(next(iter(rig.fetches)))
    assert not rig.to_disk
    for action in rig.core.end():
        rig.do(action)
    while rig.to_disk:
        rig.write_disk()
    assert set(rig.disk["d"]) == set(range(19, 9, -1)) | set(range(disk - 10))


def test_a_changed_file_is_gone_from_disk_before_anybody_reads_it() -> None:
    rig = rig_of(20, memory=5, disk=30)
    read(rig, 1)
    rig.version = 2 << 30  # a version unlike those of all other objects
    fetch = None
    for step in range(4, 8):
        actions = rig.progress(1, step, step + 1) + rig.progress(1, step + 1)
        fetch = next((a for a in actions if isinstance(a, FetchObjects)), None)
        if fetch is not None:
            break
    assert fetch is not None
    assert fetch.origin == DISK
    answer = rig.land(fetch.fetch)
    again = next(a for a in answer if isinstance(a, FetchObjects))
    dropped = next(a for a in answer if isinstance(a, DropFromDisk))
    assert again.origin == SOURCE
    assert again.ids.tolist() == dropped.ids.tolist() == fetch.ids.tolist()


def test_a_storage_without_versions_has_nothing_written() -> None:
    rig = rig_of(20, memory=5, disk=30)
    rig.version = 0
    read(rig, 2)
    assert rig.disk.get("d", {}) == {}


def test_a_lost_disk_is_no_disk() -> None:
    rig = rig_of(200, memory=60, disk=220)
    read(rig, 1)
    rig.disk.clear()
    rig.open_disk(0)
    before = rig.reads
    for step in range(40, 80):
        rig.progress(1, step, step + 1)
        rig.settle()
        assert rig.readers[1].ready > step
    assert rig.reads - before >= 100
    assert rig.core.snapshot()["datasets"]["d"]["disk_objects"] == 0


def test_two_datasets_share_a_disk_that_one_had_filled() -> None:
    """The disk is shared by size; the later dataset gets its share."""
    rig = DiskRig(2000)
    for name in "ab":
        rig.register(name, [100] * 100)
    rig.open_disk(100 * ROOM)
    rng = np.random.default_rng(0)
    plans = {number: rng.permutation(100).reshape(-1, 5).tolist() for number in range(8)}
    rig.open(1, "a")
    for epoch in range(5):
        rig.extend(1, epoch, plans[epoch])
    held = []
    for step in range(80):
        if step == 40:
            held.append(rig.core.snapshot()["datasets"]["a"]["disk_objects"])
            rig.open(2, "b")
            for epoch in range(3):
                rig.extend(2, epoch, plans[5 + epoch])
        for number in rig.readers:
            done = rig.readers[number].done
            rig.progress(number, done, done + 1)
            rig.settle()
            assert rig.readers[number].ready > done
            rig.progress(number, done + 1)
            rig.settle()
    datasets = rig.core.snapshot()["datasets"]
    assert held == [100]
    assert datasets["b"]["disk_objects"] in range(35, 60)
    assert int(datasets["b"]["reads"]) <= 160  # 200 without a disk


def test_those_due_last_are_found_first_however_often_it_looks() -> None:
    due = np.random.default_rng(0).permutation(1000)
    ids = Walk(1000).take(300, lambda at: np.ones(1000, np.bool_)[at], lambda ids: due[ids])
    first = due[ids]
    assert len(np.unique(ids)) == len(ids) > 0
    assert (np.diff(first) < 0).all()


@pytest.mark.parametrize("slow", [False, True])
def test_a_disk_that_takes_no_byte_holds_up_nobody(slow: bool) -> None:
    """It claims to have room, or never answers."""
    rig = rig_of(200, memory=40, disk=220)
    rig.disk_room = lambda nbytes: False  # noqa: ARG005
    rng = np.random.default_rng(0)
    for epoch in range(3):
        rig.extend(1, epoch, rng.permutation(200).reshape(-1, 5).tolist())
    for step in range(80):
        rig.now += slow  # longer than any reader waits for a disk
        rig.progress(1, step, step + 1)
        while rig.fetches:
            rig.land(next(iter(rig.fetches)))
            if not slow:
                rig.write_disk()
        assert rig.readers[1].ready > step, "it waits for the disk"
    assert rig.core.snapshot()["datasets"]["d"]["failed"] == 0


def test_a_write_that_fails_but_for_lack_of_room_costs_the_other_datasets_nothing() -> None:
    """A dataset that is not attached, or a bug; and no reader waits for it."""
    rig = DiskRig(80 * 100)
    for name in "de":
        rig.register(name, [100] * 100)
    rig.open_disk(400 * ROOM)
    rig.disk_fails = "e"
    for session, name in enumerate("de", 1):
        rig.open(session, name)
        rig.extend(session, 0, np.arange(100).reshape(-1, 5).tolist())
        rig.extend(session, 1, np.arange(100).reshape(-1, 5).tolist())
    for step in range(40):
        for session in (1, 2):
            rig.progress(session, step, step + 1)
            rig.settle()
            assert rig.readers[session].ready > step, "it waits for the disk"
    snapshot = rig.core.snapshot()
    assert snapshot["disk"]["node"]["nbytes"] == 400 * ROOM
    assert [snapshot["datasets"][name]["disk_objects"] for name in "de"] == [100, 0]
    assert snapshot["datasets"]["e"]["failed"] == 0


def test_a_disk_takes_one_byte_per_object_in_the_core() -> None:
    """The store's index takes six more (test_disk_store.py)."""
    n, taken = 1_000_000, []
    for nbytes in (0, 1 << 30):
        length = np.broadcast_to(np.int64(1000), n)
        columns = np.full(n, NOWHERE), length, Lengths.of(length[:1], np.array([n]))
        versions = Versions(n, np.array([0, n]))
        tracemalloc.start()
        core = Core(Allocator(1 << 20), default_window())
        core.handle(DiskOpened(nbytes, 512), 0.0)
        core.handle(DatasetAdded("d", *columns, versions), 0.0)
        if nbytes:
            ids = np.arange(0, n, 3, dtype=np.int32)
            core.handle(FoundOnDisk("d", ids, length[ids]), 0.0)
            del ids
        taken.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert taken[1] - taken[0] <= 1.01 * n


class DiskChaos(Chaos):
    """Random events, with a small, slow disk that is damaged and lost at times."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rig.versions = lambda fetch: np.full(len(fetch.ids), 1 << 30)  # type: ignore[method-assign]
        self.requests = 0
        self.nbytes = int(self.rng.integers(1000, 40_000))
        self.rig.open_disk(self.nbytes)
        if seed % 2:
            self.rig.disk_room = lambda nbytes: bool(self.rng.random() < 0.9)  # noqa: ARG005

    def turn(self) -> None:
        chance = self.rng.random()
        if chance < 0.25:
            self.rig.write_disk()
        elif chance < 0.26:
            for held in self.rig.disk.values():
                for x in [x for x in held if self.rng.random() < 0.1]:
                    del held[x]
        elif chance < 0.3:
            self.peer()
        elif chance < 0.305:
            self.rig.disk.clear()
            self.rig.open_disk(0)
            self.rig.to_disk = [a for a in self.rig.to_disk if not isinstance(a, DropFromDisk)]
        else:
            super().turn()

    def peer(self) -> None:
        """Let a peer ask, or get its answer."""
        if self.rig.sending and self.rng.random() < 0.5:
            self.rig.sent(next(iter(self.rig.sending)))
        else:
            name = str(self.rng.choice(list(self.sizes)))
            ids = self.rng.integers(0, len(self.rig.size[name]) + 2, int(self.rng.integers(1, 9)))
            self.requests += 1
            self.rig.peer_asks(self.requests, name, ids.tolist())

    def answered(self) -> None:
        """Send everything that peers have asked for."""
        self.rig.now += 1.0
        self.rig.feed(Tick())
        for request in list(self.rig.sending):
            self.rig.sent(request)
        assert not self.rig.asked_for

    def renew(self, name: str) -> None:
        self.answered()
        while self.rig.to_disk:
            self.rig.write_disk()
        super().renew(name)
        self.rig.disk.pop(name, None)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_events_break_no_invariant_and_no_session_hangs(seed: int) -> None:
    """`Rig` compares every byte that a reader may read; `Core.check` runs after each event."""
    chaos = DiskChaos(seed)
    for _ in range(300):
        chaos.turn()
    chaos.finish()
    for session in list(chaos.rig.readers):
        chaos.rig.close(session)
    chaos.answered()
    chaos.rig.settle()
    for name in chaos.sizes:
        chaos.rig.feed(Dropped(name))
        chaos.rig.settle()
        chaos.rig.feed(Unregistered(name))
    snapshot = chaos.rig.core.snapshot()
    memory = snapshot["memory"]["node"]
    assert memory["free_nbytes"] == int(memory["nbytes"]) - int(memory["withheld_nbytes"])
    assert snapshot["disk"]["node"]["used_nbytes"] == 0
