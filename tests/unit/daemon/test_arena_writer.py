"""Objects are read to their places in the arena in few reads and with little memory."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from creel.cache.memory.arena import Arena
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.reads import Read
from creel.cache.storage.source import Source
from creel.daemon.service.storage.arena_writer import SCRATCH_NBYTES, ArenaWriter


class Asked:
    """A source without objects, which records the objects of each read."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def read_parts(self, ids: Any, _: Any, parts: list[list[memoryview]]) -> Read:
        assert not any(view.readonly for views in parts for view in views)
        self.reads.append(ids.tolist())
        return Read.failed(len(ids))


def fill(length: Any) -> list[list[int]]:
    """Fill a new arena with objects of these lengths; return the objects of each read."""
    source: Any = Asked()
    with closing(Arena.create(int(length.sum()))) as arena:
        place = length.cumsum() - length
        ArenaWriter(arena).fill(source, np.arange(len(length), dtype=np.int32), place, length)
    reads: list[list[int]] = source.reads
    return reads


def test_one_large_object_among_small_ones_takes_no_memory_but_its_own() -> None:
    """The arena is asked which pages were written; a table of these is for small objects."""
    source: Any = Asked()
    length = np.append(np.full(200, 4096), 1 << 28)
    place = length.cumsum() - length
    with closing(Arena.create(1 << 29)) as arena:
        for at in place.tolist():  # the first page of each: all of a small one
            arena.write(at, memoryview(b"x"))
        writer = ArenaWriter(arena)
        tracemalloc.start()
        writer.fill(source, np.arange(201, dtype=np.int32), place, length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert source.reads == [list(range(201))]


def test_neighbours_are_one_read_though_some_go_to_pages_that_exist(tmp_path: Path) -> None:
    """A page shared with an earlier object exists; far storage takes a round trip per read."""
    content = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "records").write_bytes(content)
    source = Source(
        Manifest.of_runs(
            [str(tmp_path / "records")], np.array([0]), np.array([100]), np.array([100])
        )
    )
    with closing(Arena.create(1 << 14)) as arena:
        writer = ArenaWriter(arena)
        for ids in np.split(np.arange(100, dtype=np.int32), 4):
            writer.fill(source, ids, 100 * ids.astype(np.int64), np.full(25, 100))
        assert bytes(arena.view[:10_000]) == content
    assert source.counters.reads == 4
    source.close()


def test_empty_files_are_read_by_a_thread_that_read_nothing_before(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    source = Source(Manifest.of_files([str(tmp_path / "empty")], lengths=[0]))
    nothing = np.zeros(1, np.int64)
    other: Any = Asked()  # it refuses read-only memory, even if it writes nothing
    with closing(Arena.create(4096)) as arena:
        ArenaWriter(arena).fill(other, np.zeros(1, np.int32), nothing, nothing)
        read = ArenaWriter(arena).fill(source, np.zeros(1, np.int32), nothing, nothing)
    assert read.nbytes.tolist() == [0]
    assert (source.counters.reads, source.counters.opens) == (1, 1)


def test_portions_fill_a_buffer_and_no_more_than_one_object_is_over() -> None:
    full = SCRATCH_NBYTES
    assert [len(ids) for ids in fill(np.full(128, full // 64))] == [64, 64]
    length = np.random.default_rng(0).integers(1, full // 3, 200)
    large = np.arange(200) % 3 == 0
    length[large] = full + 7
    straight, *portions = fill(length)
    assert straight == np.flatnonzero(large).tolist()
    assert np.concatenate(portions).tolist() == np.flatnonzero(~large).tolist()
    assert len(portions) > 9
    assert max(int(length[ids[1:]].sum()) for ids in portions) <= full
    assert fill(length[large]) == [list(range(67))]
