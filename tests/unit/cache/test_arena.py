"""The arena: shared, sealed, read-only for clients."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from creel.cache.memory.arena import Arena, ArenaView
from creel.cache.memory.memfd import sealed_memfd
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.offsets import Offsets
from creel.cache.memory.shared_words import LocationTable
from creel.errors import MalformedError
from kit import descriptors, lengths_of


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena.create(1 << 20)) as arena:
        yield arena


@pytest.mark.parametrize("record", [0, 1, 64, 3000])
def test_a_table_is_what_an_array_of_offsets_would_be(record: int) -> None:
    """A new table is all NOWHERE; for records it takes 4 bytes each, with all lengths known."""
    rng = np.random.default_rng(record)
    n, array = 500, np.full(500, NOWHERE)
    fd = sealed_memfd("table", LocationTable.nbytes(n, record))
    ours, theirs = LocationTable(fd, n, record, write=True), LocationTable(fd, n, record)
    for _ in range(50):
        ids = rng.integers(0, n, 40)
        at = rng.integers(0, (1 << 41) // max(record, 1024), len(ids)) * max(record, 1)
        at[rng.random(len(ids)) < 0.3] = NOWHERE
        ours.offset[ids] = array[ids] = at
        some = rng.integers(0, n, 60)
        assert (theirs.offset[some] == array[some]).all()
        assert int(theirs.offset[int(some[0])]) == array[some[0]]
    assert (theirs.offset[:] == array).all()
    assert len(theirs.offset) == len(theirs.length) == n
    assert os.fstat(fd).st_size == n * (4 if record else 24)
    assert (theirs.length == record).all()
    os.close(fd)


@pytest.mark.parametrize(
    ("lengths", "arena", "record"),
    [
        ([64, 64], 1 << 30, 64),
        ([64, 64], (2**31 - 1) * 64, 0),  # a record's number would not fit
        ([64, 65], 1 << 30, 0),
        ([64, -1], 1 << 30, 0),
        ([0, 0], 1 << 30, 0),
        ([], 1 << 30, 0),
    ],
)
def test_only_records_of_one_length_have_a_small_table(
    lengths: list[int], arena: int, record: int
) -> None:
    assert LocationTable.record_of(lengths_of(np.array(lengths, np.int64)), arena) == record


def test_a_client_sees_what_the_daemon_writes(arena: Arena) -> None:
    client = ArenaView.attach(arena.fd, arena.nbytes)
    arena.view[5:8] = b"abc"
    arena.array[100] = 7
    assert bytes(client.view[5:8]) == b"abc"
    assert client.array[100] == 7
    client.close()


def test_a_client_cannot_write(arena: Arena) -> None:
    client = ArenaView.attach(arena.fd, arena.nbytes)
    assert client.view.readonly
    assert not client.array.flags.writeable
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(arena.fd, b"x")
    assert stat.S_IMODE(os.fstat(arena.fd).st_mode) == stat.S_IRUSR  # nor be reopened for writing
    client.close()


def test_bytes_written_by_descriptor_are_those_of_the_mapping(arena: Arena) -> None:
    data = bytes(range(256)) * 40
    for offset in (0, 4095, arena.nbytes - len(data)):
        arena.write(offset, memoryview(data))
        assert bytes(arena.view[offset : offset + len(data)]) == data
    with pytest.raises(OSError, match="not permitted"):  # it cannot grow
        arena.write(arena.nbytes - 1, memoryview(b"xy"))


def test_the_arenas_size_cannot_be_changed(arena: Arena) -> None:
    for nbytes in (0, arena.nbytes * 2):
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            os.ftruncate(arena.fd, nbytes)


def test_rows_are_the_records_at_multiples_of_the_stride(arena: Arena) -> None:
    client = ArenaView.attach(arena.fd, arena.nbytes)
    arena.array[:] = np.arange(arena.nbytes, dtype=np.uint8)
    rows = client.rows(3073)
    assert rows.shape == (arena.nbytes // 3073, 3073)
    assert (rows[7] == arena.array[7 * 3073 : 8 * 3073]).all()
    out = np.take(rows, np.array([3, 1]), axis=0, mode="clip")
    assert (out[0] == rows[3]).all()


def test_only_a_sealed_descriptor_of_the_right_size_is_mapped() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(MalformedError):
        ArenaView.attach(fd, 8192)
    os.close(fd)
    fd = sealed_memfd("small", 4096)
    with pytest.raises(MalformedError):
        ArenaView.attach(fd, 8192)
    os.close(fd)


def test_views_outlive_a_close(arena: Arena) -> None:
    arena.view[:2] = b"ok"
    client = ArenaView.attach(arena.fd, arena.nbytes)
    view, rows = client.view[:2], client.rows(2)
    client.close()
    arena.close()
    arena.close()
    assert bytes(view) == b"ok"
    assert bytes(rows[0]) == b"ok"


def test_nothing_stays_open() -> None:
    before = descriptors()
    arena = Arena.create(1 << 16)
    client = ArenaView.attach(arena.fd, arena.nbytes)
    client.close()
    arena.close()
    del arena  # a thread that hangs in a read has it
    assert not descriptors() - before


def test_written_pages_are_known() -> None:
    rng = np.random.default_rng(0)
    pages = 50
    with closing(Arena.create(pages << 12)) as arena:
        model = np.zeros(pages, np.bool_)
        for _ in range(12):
            offset = rng.integers(0, pages << 12, 40)
            length = np.minimum(rng.integers(0, 3 << 12, 40), (pages << 12) - offset)
            length[: rng.integers(0, 2)] = 0
            for k in (1, 2, 40):
                some = offset[:k][length[:k] > 0], length[:k][length[:k] > 0]
                covers = [model[a >> 12 : -(-(a + n) >> 12)].all() for a, n in zip(*some)]  # noqa: B905
                assert arena.written(*some) == all(covers)
            at, n = int(offset[0]), int(length[0])
            arena.write(at, memoryview(bytes(n)))
            if n:
                model[at >> 12 : -(-(at + n) >> 12)] = True
        assert arena.written(offset[:0], length[:0])


@pytest.mark.parametrize("record", [1, 24, 48])
def test_row_numbers_are_offsets_divided_by_the_rows_size(record: int) -> None:
    rng = np.random.default_rng(record)
    offset = Offsets(np.zeros(100, np.int64), record)
    plain = np.full(100, NOWHERE)
    placed = rng.permutation(100)[:60]
    plain[placed] = 24 * record * rng.permutation(60)
    offset[placed] = plain[placed]
    ids = rng.choice(placed, 20).astype(np.int32)
    for nbytes in (record, 24, 48):
        rows = offset.rows(ids, nbytes)
        assert (rows is None) == bool((plain[ids] % nbytes).any())
        if rows is not None:
            assert rows.tolist() == (plain[ids] // nbytes).tolist()
    absent = np.flatnonzero(plain == NOWHERE)[:1].astype(np.int32)
    assert offset.rows(np.append(ids, absent), record) is None
