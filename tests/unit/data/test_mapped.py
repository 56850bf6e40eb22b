"""Records copied from mapped files: the bytes that are there now, or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import creel
from creel.loader.data.datasets import mapped
from creel.loader.data.datasets.mapped import BATCHES, MappedFiles
from kit import dropped, until

COUNT, NBYTES = 3000, 1537  # records that begin anywhere in a page


@pytest.fixture
def rows(tmp_path: Path) -> NDArray[np.uint8]:
    rows = np.random.default_rng(0).integers(0, 256, (COUNT, NBYTES), np.uint8)
    rows.tofile(tmp_path / "r")
    return rows


def mapping_of(path: Path) -> MappedFiles:
    """Return files of which this one is known to be in the page cache."""
    files = MappedFiles()
    with path.open("rb") as f:
        for _ in range(BATCHES):
            assert not files.read(str(path), *asked(range(20)))
            files.saw(str(path), f.fileno(), cached=True)
    return files


def asked(ids: object) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Return arguments of `MappedFiles.read` for these records, to consecutive rows."""
    wanted = np.asarray(ids, np.int64)
    return wanted * NBYTES, np.empty((len(wanted), NBYTES), np.uint8), np.arange(len(wanted))


@pytest.mark.parametrize("count", [8, 70, COUNT])
def test_records_are_the_files_bytes(tmp_path: Path, rows: NDArray[np.uint8], count: int) -> None:
    files = mapping_of(tmp_path / "r")
    ids = np.random.default_rng(1).permutation(COUNT)[:count]
    out = np.zeros((COUNT + 1, NBYTES), np.uint8)
    into = np.random.default_rng(2).permutation(COUNT)[:count]
    assert files.read(str(tmp_path / "r"), ids * NBYTES, out, into)
    assert np.array_equal(out[into], rows[ids])
    assert not np.delete(out, into, 0).any()


def test_a_file_is_mapped_once_the_page_cache_had_many_batches(
    tmp_path: Path, rows: NDArray[np.uint8]
) -> None:
    del rows
    files, path = MappedFiles(), str(tmp_path / "r")
    with Path(path).open("rb") as f:
        for _ in range(3):
            for _ in range(BATCHES - 1):
                files.saw(path, f.fileno(), cached=True)
            files.saw(path, f.fileno(), cached=False)
        assert not files.read(path, *asked(range(20)))
    assert mapping_of(tmp_path / "r").read(path, *asked(range(20)))


def test_nothing_is_mapped_where_address_space_is_limited(
    tmp_path: Path, rows: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `ulimit -v` batches and the user's code would lack the space of the mapping."""
    del rows
    monkeypatch.setattr(mapped, "may_keep", lambda: False)
    assert not mapping_of(tmp_path / "r").read(str(tmp_path / "r"), *asked(range(20)))


def replaced(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").rename(path)


def rewritten(path: Path, data: bytes) -> None:
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def patched(path: Path, data: bytes) -> None:
    with path.open("r+b") as f:
        f.write(data)


@pytest.mark.parametrize("change", [replaced, rewritten, patched])
def test_a_dataset_reads_what_is_there_now(
    tmp_path: Path, rows: NDArray[np.uint8], change: Callable[[Path, bytes], None]
) -> None:
    dataset = creel.RecordDataset(tmp_path / "r", "u1", NBYTES)
    shuffled = np.random.default_rng(3).permutation(COUNT // 2) * 2  # no neighbours
    for data in (rows, rows[::-1], ~rows):
        change(tmp_path / "r", data.tobytes())
        for seed in range(2 * BATCHES):
            ids = np.random.default_rng(seed).choice(shuffled, 64, replace=False)
            got = torch.stack(dataset.__getitems__(ids.tolist()))
            assert np.array_equal(got.numpy(), data[ids])


@pytest.mark.parametrize("left", [0, NBYTES * 40 + 5])
def test_a_file_that_was_cut_is_not_read(
    tmp_path: Path, rows: NDArray[np.uint8], left: int
) -> None:
    """Neither its last page, which ends in zeros, nor pages that are gone (SIGBUS)."""
    del rows
    path = tmp_path / "r"
    for wanted in (range(30, 41), range(COUNT - 20, COUNT)):
        files = mapping_of(path)
        os.truncate(path, left)
        assert not files.read(str(path), *asked(wanted))
        os.truncate(path, COUNT * NBYTES)


def test_bytes_behind_a_file_are_not_read(tmp_path: Path, rows: NDArray[np.uint8]) -> None:
    """Its last page is filled up with zeros; other memory may follow."""
    out, offsets = np.empty((20, 100), np.uint8), rows.nbytes - 100 * np.arange(1, 21)
    assert mapping_of(tmp_path / "r").read(str(tmp_path / "r"), offsets, out, np.arange(20))
    assert not mapping_of(tmp_path / "r").read(str(tmp_path / "r"), offsets + 1, out, np.arange(20))


def test_a_file_that_left_the_page_cache_is_read_and_given_up(
    tmp_path: Path, rows: NDArray[np.uint8]
) -> None:
    path = tmp_path / "r"
    if not dropped(path):
        pytest.skip("this file system keeps its pages")
    files = mapping_of(path)
    until(lambda: dropped(path), event="the kernel has dropped its pages")
    offsets, out, into = asked(range(1, COUNT, 100))
    assert files.read(str(path), offsets, out, into)
    assert np.array_equal(out, rows[1::100])
    assert not files.read(str(path), offsets, out, into)


@pytest.mark.parametrize("answer", [None, -1])
def test_a_kernel_that_does_not_copy_costs_nothing_else(
    tmp_path: Path,
    rows: NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
    answer: int | None,
) -> None:
    """`process_vm_readv` may be missing (gVisor), or forbidden (seccomp)."""
    monkeypatch.setattr(mapped, "_readv", None if answer is None else lambda *_: answer)
    dataset = creel.RecordDataset(tmp_path / "r", "u1", NBYTES)
    for start in range(3 * BATCHES):
        ids = list(range(start, COUNT, 90))
        assert np.array_equal(torch.stack(dataset.__getitems__(ids)).numpy(), rows[ids])


def test_a_forked_child_reads_by_its_parents_mapping(
    tmp_path: Path, rows: NDArray[np.uint8]
) -> None:
    files = mapping_of(tmp_path / "r")
    pid = os.fork()
    if not pid:
        offsets, out, into = asked(range(9, 0, -1))
        same = files.read(str(tmp_path / "r"), offsets, out, into)
        os._exit(0 if same and np.array_equal(out, rows[9:0:-1]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
