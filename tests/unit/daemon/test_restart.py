"""Residents that outlive their daemon lie where they lay, and nobody else gets their bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from core_shell import VERSION, CoreShell
from creel.cache.memory.memfd import Descriptor, memfd, sealed_memfd
from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import chained
from creel.cache.storage.version import CHANGING
from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.daemon.core.events import CheckVersions, FetchObjects
from creel.daemon.core.restart.objects import RestartObjects, Restored
from creel.daemon.core.versions import Versions
from creel.daemon.reporting.notify import handed_over
from creel.daemon.service.memory import restart_memory
from creel.daemon.service.memory.restart_memory import StoredDataset
from creel.errors import IllegalEventError
from creel.messages import Begin, Close
from creel.settings import MemorySettings
from kit import default_window, lengths_of, seeds

I64 = NDArray[np.int64]

CAPACITY = 1 << 20


def lengths(rng: np.random.Generator, kind: str) -> I64:
    n = int(rng.integers(50, 400))
    if kind == "records":
        return np.full(n, rng.integers(1, 9000))
    sizes = rng.integers(0, 20_000, n)
    return np.where(rng.random(n) < 0.3, -1, sizes) if kind == "unknown" else sizes


class Reader(CoreShell):
    """A shell whose source tells lengths that are not listed: 100 bytes each."""

    def nbytes_read(self, fetch: FetchObjects) -> I64:
        return np.where(fetch.length < 0, 100, fetch.length)


def read_some(shell: CoreShell, name: str, rng: np.random.Generator, session: int) -> None:
    n = len(shell.offset[name])
    shell.open(session, name)
    ids = rng.permutation(n).astype(np.int32)[: int(rng.integers(1, n + 1))]
    shell.tell(session, 0, ids, np.append(np.arange(4, len(ids), 4), len(ids)))
    shell.settle()
    for done in range(1, int(rng.integers(1, shell.steps[session] + 1)) + 1):
        shell.feed(events.Progressed(session, done, done))
        shell.settle()
    if rng.random() < 0.5:
        shell.feed(Close(session))
        shell.settle()


def again(kept: dict[str, RestartObjects], columns: dict[str, I64]) -> Reader:
    """Return a new core with what another left, whose tables have gone through bytes."""
    kept = {
        name: restart_memory.unpacked(
            msgspec.msgpack.decode(
                msgspec.msgpack.encode(restart_memory.packed(name, b"", objects)),
                type=restart_memory.StoredDataset,
            )
        )
        for name, objects in kept.items()
    }
    after = Reader(CAPACITY)
    ranges = {name: objects.ranges for name, objects in kept.items()}
    after.core = Core(Allocator(CAPACITY, ranges), default_window())
    for name, length in columns.items():
        after.offset[name] = np.full(len(length), NOWHERE, np.int64)
        shared = after.offset[name].view()
        page = kept[name].page if name in kept else 0
        after.feed(
            events.DatasetAdded(
                name, shared, length.copy(), lengths_of(length), Versions(len(length)), page=page
            )
        )
        after.feed(Restored(name, kept.get(name)))
        after.core.check()
    return after


@pytest.mark.parametrize("seed", seeds(30))
def test_the_next_core_has_all_residents_where_they_lay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["records", "files", "unknown"], 2)
    columns = {name: lengths(rng, kind) for name, kind in zip("ab", kinds, strict=True)}
    shell = Reader(CAPACITY)
    for i, (name, length) in enumerate(columns.items()):
        shell.add(name, length.copy())
        read_some(shell, name, rng, i)
    before = {name: at.copy() for name, at in shell.offset.items()}
    after = again(shell.core.kept(), columns)
    for name, places in before.items():
        assert np.array_equal(after.offset[name], places)
    assert any((places != NOWHERE).any() for places in before.values())
    for i, name in enumerate(columns):  # it goes on as any core does, at the limit of its memory
        read_some(after, name, rng, 10 + i)
    after.core.check()


def test_an_object_in_several_runs_is_kept() -> None:
    """Object 3 lies in two ranges, around object 1."""
    pieces = np.array([[0, 1024], [2048, 1088]])
    place = np.array([1024, chained(0)])
    ranges = np.array([0, 1024, 2048]), np.array([1024, 1024, 1088])
    ids, size, version = np.array([1, 3], np.int32), np.array([1000, 2000]), np.full(2, VERSION)
    kept = RestartObjects(ids, place, size, version, ranges, {chained(0): pieces})
    after = Reader(4096)
    after.core = Core(Allocator(4096, {"a": kept.ranges}), default_window())
    after.add("a", np.array([1000, 1000, 1000, 2000]))
    after.feed(Restored("a", kept))
    after.core.check()
    assert after.offset["a"][kept.ids].tolist() == kept.place.tolist()
    after.feed(events.Dropped("a"))
    assert after.core.snapshot()["memory"]["node"]["free_nbytes"] == 4096


def test_a_session_that_checks_finds_files_that_changed_meanwhile() -> None:
    shell = Reader(CAPACITY)
    length = np.full(8, 100)
    shell.add("a", length.copy())
    shell.open(0, "a")
    shell.tell(0, 0, np.arange(8, dtype=np.int32), np.array([4, 8]))
    shell.settle()
    after = again(shell.core.kept(), {"a": length})
    after.open(1, "a", recheck="epoch")
    after.feed(Begin("", 1, 0))
    after.tell(1, 0, np.arange(8, dtype=np.int32), np.array([4, 8]))
    assert after.ready[1].ready == 0, "nothing is ready before the files were looked at"
    asked = [event for event in after.waiting if isinstance(event, CheckVersions)]
    assert sorted(file for event in asked for file in event.files.tolist()) == list(range(8))
    assert not [event for event in after.waiting if isinstance(event, FetchObjects)]
    after.settle()
    assert after.ready[1].ready == 2


def test_an_object_that_was_changing_is_not_kept() -> None:
    kept = RestartObjects(
        np.array([2], np.int32),
        np.array([0]),
        np.array([10]),
        np.array([CHANGING]),
        (np.array([0]), np.array([64])),
        {},
    )
    after = Reader(CAPACITY)
    after.core = Core(Allocator(CAPACITY, {"a": kept.ranges}), default_window())
    after.add("a", np.array([10, 20, 10, 30]))
    after.feed(Restored("a", kept))
    after.core.check()
    assert (after.offset["a"] == NOWHERE).all()


def test_kept_memory_that_no_dataset_takes_up_is_free_again() -> None:
    ranges = np.array([64, 4096]), np.array([64, 128])
    space = Allocator(CAPACITY, {"gone": ranges})
    assert space.free_bytes == CAPACITY - 192
    space.check()
    pool = space.pool(Lengths.of(np.array([100]), np.array([9])))
    assert not set(pool.alloc(np.full(9, 100)).tolist()) & {64, 4096}
    space.abandon("gone")
    space.abandon("gone")
    space.check()
    assert space.free_bytes == CAPACITY - pool.used


@pytest.mark.parametrize("start, size", [([0, 32], [64, 64]), ([0], [CAPACITY + 1]), ([5], [0])])
def test_ranges_that_cannot_be_are_refused(start: list[int], size: list[int]) -> None:
    with pytest.raises(IllegalEventError):
        Allocator(CAPACITY, {"a": (np.array(start), np.array(size))})


def test_objects_outside_of_their_ranges_cost_the_memory_alone() -> None:
    for length in (np.full(4, 10), np.array([10, 20, 10, 30])):
        kept = RestartObjects(
            np.array([1], np.int32),
            np.array([640]),
            np.array([length[1]]),
            np.array([5]),
            (np.array([0]), np.array([40])),
            {},
        )
        after = Reader(CAPACITY)
        after.core = Core(Allocator(CAPACITY, {"a": kept.ranges}), default_window())
        after.add("a", length)
        after.feed(Restored("a", kept))
        after.core.check()
        assert (after.offset["a"] == NOWHERE).all()
        assert after.core.snapshot()["memory"]["node"]["free_nbytes"] == CAPACITY
    assert lengths_of(np.full(4, 10)).only == 10


def damaged(rng: np.random.Generator, kept: RestartObjects) -> RestartObjects:
    """Return kept objects with another number in one of their columns."""
    kept = deepcopy(kept)
    columns: list[NDArray[np.signedinteger]] = [kept.ids, kept.place, kept.nbytes, kept.version]
    columns += [*kept.ranges, *(run.reshape(-1) for run in kept.runs.values())]
    some = columns[int(rng.integers(len(columns)))]
    at = int(rng.integers(len(some)))
    limits = np.iinfo(some.dtype)
    other = (limits.min, -1, 0, 1, some[at] - 1, some[at] + 64, some[at - 1], limits.max)
    some[at] = other[int(rng.integers(len(other)))]
    return kept


@pytest.mark.parametrize("seed", seeds(60))
def test_a_damaged_index_costs_the_memory_alone(seed: int) -> None:
    """Its ranges are refused as a whole, or the core goes on: with its objects, or without."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(["records", "files", "unknown", "runs"]))
    shell = Reader(CAPACITY)
    length = np.full(300, 40_000) if kind == "runs" else lengths(rng, kind)
    if kind == "runs":  # others lie in between, and leave
        length[::2] = 3000
    shell.add("a", length.copy())
    read_some(shell, "a", rng, 1)
    before = shell.core.kept()["a"]
    kept = damaged(rng, before)
    after = Reader(CAPACITY)
    with suppress(IllegalEventError):
        after.core = Core(Allocator(CAPACITY, {"a": kept.ranges}), default_window())
    after.add("a", length.copy())
    after.feed(Restored("a", kept))
    after.core.check()
    read_some(after, "a", rng, 2)
    after.core.check()


@pytest.mark.parametrize("kind", ["records", "files"])
def test_a_dataset_that_grew_is_restored_with_the_pages_of_the_first(kind: str) -> None:
    """The mean of all its objects would ask for others, between which no object begins."""
    small = np.full(8, 100)
    if kind == "files":
        small[0] = 101
    length = np.concatenate([small, small if kind == "records" else np.full(4, 200_000)])
    shell = Reader(CAPACITY)
    shell.add("a", small.copy())
    shell.offset["b"] = np.full(len(length), NOWHERE)
    shell.feed(
        events.DatasetAdded(
            "b",
            shell.offset["b"].view(),
            length.copy(),
            lengths_of(length),
            Versions(len(length)),
            "a",
        )
    )
    shell.open(1, "b")
    shell.tell(1, 0, np.arange(len(length), dtype=np.int32), np.array([len(length)]))
    shell.settle()
    after = again(shell.core.kept(), {"b": length})
    assert np.array_equal(after.offset["b"], shell.offset["b"])
    assert (after.offset["b"] != NOWHERE).all()


# --- descriptors from the service manager -----------------------------------------------------


MB, GB = 1 << 20, 1 << 30


def stored(memory: MemorySettings, *datasets: StoredDataset) -> dict[str, Descriptor]:
    """Return what a daemon of a node with 8 GB leaves, with an arena of 1 MB."""
    arena = Descriptor(sealed_memfd(restart_memory.ARENA, MB))
    index = restart_memory.write_index(memory, 8 * GB, MB, list(datasets))
    return {restart_memory.ARENA: arena, restart_memory.INDEX: index}


@pytest.fixture
def left() -> dict[str, Descriptor]:
    return stored(MemorySettings(budget="1MiB"))


def taken(left: dict[str, Descriptor], total: int = 8 * GB, **settings: Any) -> bool:
    memory = MemorySettings(**({"budget": "1MiB"} | settings))
    return restart_memory.take(left, memory, total) is not None


def test_kept_memory_is_taken_once(left: dict[str, Descriptor]) -> None:
    memory = restart_memory.take(left, MemorySettings(budget="1024KiB"), 8 * GB)
    assert memory is not None
    assert memory.space.free_bytes == MB
    assert not taken(left), "the arena may have been written to since"


def test_nothing_is_taken_under_other_settings(left: dict[str, Descriptor]) -> None:
    assert not taken(left, budget="2MiB")
    assert not taken(left)


@pytest.mark.parametrize(
    "total, settings, same",
    [
        (8 * GB, {}, True),
        (8 * GB - 100 * MB, {}, True),
        (2 * GB, {}, False),  # the cgroup allows less, or more
        (64 * GB, {}, False),
        (8 * GB, {"share": 0.7}, False),
        (8 * GB, {"budget": "2MiB"}, False),
        (2 * GB, {"budget": "1MiB"}, True),
        (MB // 2, {"budget": "1MiB"}, False),
        (4 * MB, {"budget": "25%"}, True),
        (8 * MB, {"budget": "25%"}, False),
    ],
)
def test_memory_sized_by_itself_is_taken_where_as_much_is_allowed_as_then(
    total: int, settings: dict[str, Any], same: bool
) -> None:
    assert taken(stored(MemorySettings()), total, **({"budget": "auto"} | settings)) is same


def one_dataset(**changes: Any) -> StoredDataset:
    """Return a dataset of two objects."""
    ids = np.arange(2, dtype=np.int32).tobytes()
    columns = np.array([[0, 4096], [1000, 1001], [5, 5]]).tobytes()
    ranges = np.array([[0, 4096], [1024, 1024]]).tobytes()
    return msgspec.structs.replace(StoredDataset("a", b"", ids, columns, ranges, {}, 64), **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": b"12345"},
        {"ids": b"123"},
        {"ranges": np.array([[0, 512], [1024, 1024]]).tobytes()},
        {"ranges": np.array([[0, MB], [1024, 1024]]).tobytes()},
        {"ranges": np.array([[0, 1 << 62], [1024, 1 << 62]]).tobytes()},
        {"ranges": b"1" * 8},
        {"runs": {-7: b"12345678"}},
        {"page": 96},
    ],
    ids=str,
)
def test_an_index_of_impossible_numbers_is_not_taken(change: dict[str, Any]) -> None:
    memory = MemorySettings(budget="1MiB")
    assert taken(stored(memory, one_dataset()))
    assert not taken(stored(memory, one_dataset(**change)))
    assert not taken(stored(memory, one_dataset(), one_dataset(key="b")))


def test_an_arena_that_could_shrink_or_an_index_of_noise_is_not_taken(
    left: dict[str, Descriptor],
) -> None:
    plain = Descriptor(memfd("plain"))
    os.ftruncate(plain.fd, MB)
    assert not taken(left | {restart_memory.ARENA: plain})
    noise = Descriptor(memfd("noise"))
    os.write(noise.fd, b"\x93noise")
    assert not taken(left | {restart_memory.INDEX: noise})
    assert not taken({})


def test_descriptors_are_for_the_process_that_is_named() -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "HOME": "/"}
    assert handed_over(env) == {}
    assert env == {"HOME": "/"}
