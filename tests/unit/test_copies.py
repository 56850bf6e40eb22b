"""Copies of files: the parts that samples have read, and what a daemon may take."""

from __future__ import annotations

import io
import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from creel.cache.storage.copies import PAGE_NBYTES, Copies
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.version import of_stat
from creel.errors import MalformedError
from creel.loader.reading.file_copies import FileCopies, FileCopy
from kit import seeds

LATER_NS = 10**10  # by then, a new file's version differs from its next one


def later() -> int:
    return time.time_ns() + LATER_NS


def begun(copies: FileCopies, path: Path) -> FileCopy:
    status = path.stat()
    return FileCopy(copies, str(path), status.st_size, of_stat(status, later()))


def copied(copies: FileCopies, path: Path, spans: list[tuple[int, int]]) -> None:
    """Let a sample read these stretches of a file."""
    with path.open("rb") as file:
        copy = begun(copies, path)
        for first, end in spans:
            file.seek(first)
            copy.add(first, file.read(end - first))
        copy.finish(file)


def given(copies: FileCopies, paths: list[Path]) -> Copies:
    """Return what a daemon gets, by position in `paths`."""
    copies.flush()
    rows = [(paths.index(Path(address)), *place) for address, *place in copies.done]
    return Copies(copies.own, np.array(sorted(rows), np.int64).reshape(-1, 4))


def resident_nbytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("seed", seeds(30))
def test_a_file_is_kept_if_nearly_all_of_it_was_read_in_whatever_order(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    copies, paths = FileCopies(1 << 24), [tmp_path / str(i) for i in range(8)]
    nearly = []
    for i, path in enumerate(paths):
        data = rng.bytes(int(rng.integers(1, 50_000)))
        path.write_bytes(data)
        cuts = np.unique(np.append(rng.integers(0, len(data), 6), [0, len(data)])).tolist()
        spans = list(itertools.pairwise(cuts))
        rng.shuffle(spans)
        if rng.integers(2):
            spans.pop()
        spans += spans[: int(rng.integers(3))]  # read again
        read = sum(end - first for first, end in dict.fromkeys(map(tuple, spans)))
        if (len(data) - read) * 16 <= len(data):
            nearly.append(i)
        copied(copies, path, spans)
    taken = given(copies, paths)
    for i, path in enumerate(paths):
        found = taken.take(i, str(path), later())
        assert (None if found is None else found[0]) == (path.read_bytes() if i in nearly else None)
        assert taken.take(i, str(path), later()) is None  # once
    assert resident_nbytes(copies.fd) == PAGE_NBYTES


def test_what_has_changed_while_it_was_read_or_since_is_not_taken(tmp_path: Path) -> None:
    copies, paths = FileCopies(1 << 24), [tmp_path / str(i) for i in range(3)]
    for path in paths:
        path.write_bytes(bytes(5000))
    with paths[0].open("rb") as file:
        copy = begun(copies, paths[0])
        copy.add(0, file.read())
        paths[0].write_bytes(bytes(5001))
        copy.finish(file)
    for path in paths[1:]:
        copied(copies, path, [(0, 5000)])
    paths[1].write_bytes(bytes(4999) + b"x")
    taken = given(copies, paths)
    assert [taken.take(i, str(path), later()) is None for i, path in enumerate(paths)] == [
        *(True, True, False)
    ]


def test_to_complete_a_copy_asks_the_storage_nothing(tmp_path: Path) -> None:
    """The daemon compares versions when it takes the copy, which saves a stat."""
    copies, path = FileCopies(1 << 24), tmp_path / "file"
    path.write_bytes(bytes(5000))
    copy = begun(copies, path)
    copy.add(0, path.read_bytes())
    copy.finish(io.BytesIO())  # it has no descriptor
    taken = given(copies, [path]).take(0, str(path), later())
    assert taken is not None
    assert taken[0] == bytes(5000)


def test_a_file_is_copied_once_however_often_a_process_opens_it(tmp_path: Path) -> None:
    copies, path = FileCopies(1 << 24), tmp_path / "file"
    path.write_bytes(bytes(5000))
    of = of_stat(path.stat(), later())
    copied = [copies.begin(str(path), 5000, of) for _ in range(3)]
    assert [copy is None for copy in copied] == [False, True, True]
    with path.open("rb") as file:  # not read through the file object
        assert copied[0] is not None
        copied[0].finish(file)
    copies.flush()
    assert os.fstat(copies.fd).st_size == PAGE_NBYTES
    assert copies.begin(str(path), 5000, of) is not None


def test_a_file_that_may_still_change_unseen_is_not_kept(tmp_path: Path) -> None:
    copies, path = FileCopies(1 << 24), tmp_path / "new"
    path.write_bytes(bytes(5000))
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        of = of_stat(status, status.st_ctime_ns)
        copy = FileCopy(copies, str(path), 5000, of)
        copy.add(0, file.read())
        copy.finish(file)
    copies.flush()
    assert not copies.done


def test_no_more_is_kept_than_the_limit_also_by_many_threads(tmp_path: Path) -> None:
    copies, paths = FileCopies(20 * PAGE_NBYTES), [tmp_path / str(i) for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * PAGE_NBYTES)

    def read(some: list[Path]) -> None:
        for path in some:
            copied(copies, path, [(0, PAGE_NBYTES)])

    threads = [threading.Thread(target=read, args=(paths[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copies.flush()
    assert resident_nbytes(copies.fd) <= 24 * PAGE_NBYTES  # each thread began one page
    assert len(copies.done) >= 15
    taken = given(copies, paths)
    for address, *_ in list(copies.done):
        found = taken.take(paths.index(Path(address)), address, later())
        assert found is not None
        assert found[0] == Path(address).read_bytes()


def test_copies_are_given_once_and_hold_no_more_than_there_is(tmp_path: Path) -> None:
    copies, path = FileCopies(1 << 24), tmp_path / "file"
    path.write_bytes(bytes(9000))
    copied(copies, path, [(0, 9000)])
    one, other = given(copies, [path]), given(copies, [path])
    assert one.salt == other.salt != given(FileCopies(1 << 24), []).salt
    assert one.give()
    assert not other.give()
    os.ftruncate(copies.fd, PAGE_NBYTES + 10)  # its owner truncates it
    assert one.take(0, str(path), later()) is None


def test_a_manifest_brings_what_it_knows_of_copies(tmp_path: Path) -> None:
    copies, paths = FileCopies(1 << 24), [tmp_path / str(i) for i in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    copied(copies, paths[2], [(0, 100)])
    kept = given(copies, paths)
    bare = Manifest.of_files(list(map(str, paths)))
    with_salt = Manifest(bare.table, "", kept.salt, kept)
    file = io.BytesIO()
    with_salt.write_arrow(file, copies=True)
    again = Manifest.from_arrow(file.getvalue(), copies.fd)
    assert again.key == with_salt.key != bare.key
    assert Manifest.concat([with_salt]).copies is kept
    assert again.copies is not None
    found = again.copies.take(2, str(paths[2]), later())
    assert found is not None
    assert found[0] == b"2" * 100
    assert Manifest.from_arrow(with_salt.to_arrow()).key == with_salt.key


@pytest.mark.parametrize(
    "entries",
    [
        b"abc",
        np.array([[3, 0, 1, 1]]).tobytes(),
        np.array([[-1, 0, 1, 1]]).tobytes(),
        np.array([[1, 0, 1, 1], [1, 0, 1, 1]]).tobytes(),
        np.array([[1, 0, 1, 1], [0, 0, 1, 1]]).tobytes(),
        np.array([[0, -1, 1, 1]]).tobytes(),
        np.array([[0, 0, -1, 1]]).tobytes(),
        np.array([[0, 2**62, 2**62, 1]]).tobytes(),
    ],
)
def test_entries_of_no_copies_are_malformed(entries: bytes) -> None:
    with pytest.raises(MalformedError):
        Copies.parsed(entries, 3)
