"""Reading objects: right bytes from any store, retries of transient errors only."""

from __future__ import annotations

import errno
import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_rig import QUICK, folder, read_into, records, whole

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores import store as stores
from creel.cache.storage.stores.store import LocalStore, StoredFile
from creel.errors import SourceError
from kit import descriptors, drop, dropped

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", range(20))
def test_random_reads_give_the_bytes_of_the_files(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    files, contents = folder(tmp_path, rng.integers(0, 5000, 30).tolist(), seed)
    dense, data = records(tmp_path, size := int(rng.integers(1, 200)), 50)
    source = Source(Manifest.concat([files, dense]))
    contents += [data[i * size : (i + 1) * size] for i in range(50)]
    ids = rng.integers(0, 80, 200).tolist()
    got, read = read_into(source, ids)
    assert read == [contents[i] for i in ids]
    assert got.tolist() == [len(contents[i]) for i in ids]
    assert [source.read(i) for i in ids[:20]] == [contents[i] for i in ids[:20]]
    source.close()


def test_neighbours_in_a_file_are_one_read_and_one_open(tmp_path: Path) -> None:
    dense, data = records(tmp_path, 10, 2000)
    source = Source(dense)
    ids = np.random.default_rng(0).permutation(2000).tolist()
    _, read = read_into(source, ids)
    assert b"".join(read[i] for i in np.argsort(ids)) == data
    counted = source.counters.snapshot()
    assert (counted.reads, counted.opens, counted.nbytes) == (4, 1, 20_000)  # 512 buffers per read
    assert sum(counted.seconds) == 4
    source.close()


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each range that the kernel is told to read ahead."""
    lengths: list[int] = []
    real = os.posix_fadvise

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            lengths.append(length)
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return lengths


def test_files_not_in_the_page_cache_are_read_ahead_and_are_the_same(
    tmp_path: Path, advised: list[int]
) -> None:
    """A disk works on many files, or parts of one, at once: each is advised first."""
    files, contents = folder(tmp_path, [0, *range(1, 60), 2 << 20])
    dense, data = records(tmp_path, 100, 20_000)
    source = Source(Manifest.concat([files, dense]))
    contents += [data[i : i + 100] for i in range(0, len(data), 100)]
    ids = [*np.random.default_rng(0).permutation(61).tolist(), *range(61, 20_061, 7)]
    for _ in range(2):
        if not dropped(tmp_path / "050"):
            pytest.skip("this file system keeps its pages")
        for path in tmp_path.iterdir():
            drop(path)
        advised.clear()
        assert read_into(source, ids)[1] == [contents[i] for i in ids]
        assert advised
        assert read_into(source, ids[61:])[1] == [contents[i] for i in ids[61:]]
        assert whole(source, *ids[:61]) == [contents[i] for i in ids[:61]]
    source.close()


def test_storage_without_a_page_cache_is_asked_for_nothing_more(
    tmp_path: Path, advised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system would read everything that is read ahead a second time."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(fd, buffers, offset)

    files, contents = folder(tmp_path, [*range(1, 60)])
    dense, data = records(tmp_path, 100, 2000)
    contents += [data[i : i + 100] for i in range(0, len(data), 100)]
    source = Source(Manifest.concat([files, dense]))
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(stores, "keeps_pages", {})
    ids = [*range(59), *range(59, 2059, 7)]
    assert read_into(source, ids)[1] == [contents[i] for i in ids]
    assert read_into(source, ids[59:])[1] == [contents[i] for i in ids[59:]]
    assert whole(source, *ids[:59]) == [contents[i] for i in ids[:59]]
    assert not advised
    source.close()


@pytest.mark.parametrize("read", ["whole", "into"])
def test_files_opened_ahead_are_closed_whatever_fails(
    tmp_path: Path, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, contents = folder(tmp_path, [10] * 40)
    source = Source(files, QUICK)
    gone = {0, 7, 15, 16, 39}
    for i in gone:
        (tmp_path / f"{i:03}").unlink()
    before = descriptors()
    wanted = [None if i in gone else content for i, content in enumerate(contents)]
    if read == "whole":
        assert whole(source, *range(40)) == wanted
    else:
        got, data = read_into(source, [*range(40)])
        assert [None if n < 0 else part for n, part in zip(got, data, strict=True)] == wanted
    assert not descriptors() - before
    counted = source.counters.snapshot()
    assert (counted.reads, counted.opens) == (35, 35)
    assert counted.errors == {"ENOENT": 5}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("creel.cache.storage.stores.store.version.torn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        whole(source, *range(40)) if read == "whole" else read_into(source, [*range(40)])
    assert not descriptors() - before


@pytest.mark.parametrize("read", ["whole", "into"])
def test_few_descriptors_are_enough(tmp_path: Path, read: str) -> None:
    files, contents = folder(tmp_path, [10] * 40)
    source = Source(files, QUICK)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number, _ in descriptors())  # earlier tests may have left many
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 64, hard), hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for fd in taken[-4:]:
            os.close(fd)
        got = whole(source, *range(40)) if read == "whole" else read_into(source, [*range(40)])[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken[:-4]:
            os.close(fd)
    assert got == contents
    counted = source.counters.snapshot()
    assert (counted.opens, counted.retries) == (40, 0)


def test_scattered_records_are_read_one_by_one_with_one_open(tmp_path: Path) -> None:
    dense, data = records(tmp_path, 10, 2000)
    source = Source(dense)
    ids = np.random.default_rng(0).permutation(1000)[:100] * 2
    got, read = read_into(source, ids.tolist())
    assert b"".join(read) == b"".join(data[i * 10 : i * 10 + 10] for i in ids.tolist())
    assert (got == 10).all()
    counted = source.counters.snapshot()
    assert (counted.reads, counted.opens, counted.nbytes) == (100, 1, 1000)
    assert sum(counted.seconds) == 100
    source.close()


def test_of_scattered_records_only_those_beyond_the_end_of_their_file_fail(tmp_path: Path) -> None:
    dense, data = records(tmp_path, 10, 2000)
    with (tmp_path / "records").open("r+b") as f:
        f.truncate(5 + 10 * 1000 + 3)
    source = Source(dense, QUICK)
    ids = np.arange(1, 2000, 50)
    got, read = read_into(source, ids.tolist())
    assert got.tolist() == [10 if i < 1000 else -1 for i in ids.tolist()]
    assert all(read[k] == data[i * 10 : i * 10 + 10] for k, i in enumerate(ids) if i < 1000)
    source.close()


def test_rows_that_share_an_address_share_a_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "b.tar").write_bytes(bytes(range(256)) * 4)
    uris = [str(tmp_path / n) for n in ("a.tar", "a.tar", "a.tar", "b.tar", "b.tar")]
    offset = np.array([0, 512, 700, 0, 8])
    length = np.array([100, 10, 4, 8, 8])
    source = Source(Manifest.of_runs(uris, offset, length, np.ones(5, np.int64)))
    got, read = read_into(source, [4, 0, 2, 1, 3])
    assert got.tolist() == [8, 100, 4, 10, 8]
    assert read[2] == (tmp_path / "a.tar").read_bytes()[700:704]
    assert source.counters.snapshot().opens == 2
    source.close()


def test_a_file_that_is_not_as_listed_has_failed_and_the_others_have_not(tmp_path: Path) -> None:
    files, contents = folder(tmp_path, [10, 20, 30, 40])
    source = Source(files, QUICK)
    (tmp_path / "000").write_bytes(b"grown to something longer")
    (tmp_path / "001").write_bytes(b"shrunk")
    (tmp_path / "002").unlink()
    got, read = read_into(source, [0, 1, 2, 3])
    assert got.tolist() == [-1, -1, -1, 40]
    assert read[3] == contents[3]
    counted = source.counters.snapshot()
    assert counted.errors == {"ENODATA": 2, "ENOENT": 1}
    assert counted.retries == 0
    assert str(tmp_path) in counted.last_error
    for i in (0, 1):  # single reads, by a reader that the daemon could not serve
        with pytest.raises(SourceError, match="the manifest says"):
            source.read(i)


def test_a_name_that_no_file_has_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    source = Source(Manifest.of_files(["\0", "a", "b"], root=str(tmp_path)), QUICK)
    assert whole(source, 0, 1, 2) == [None, b"a", None]


def test_objects_of_unknown_length_are_read_whole(tmp_path: Path) -> None:
    _, contents = folder(tmp_path, [10, 0, 3000])
    source = Source(Manifest.of_files(["000", "001", "002", "003"], root=str(tmp_path)), QUICK)
    assert whole(source, 2, 3, 0, 1) == [
        contents[2],
        None,
        contents[0],
        b"",
    ]


def test_a_device_has_no_end_and_is_not_read(tmp_path: Path) -> None:
    """A link to a device in a dataset's folder would fill the memory of a shared daemon."""
    (tmp_path / "link").symlink_to("/dev/zero")
    assert whole(Source(Manifest.of_files(["link"], root=str(tmp_path)), QUICK), 0) == [None]


def test_a_missing_file_says_which_and_why(tmp_path: Path) -> None:
    source = Source(Manifest.of_files(["gone"], root=str(tmp_path)))
    with pytest.raises(SourceError) as caught:
        source.read(0)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.uri == f"{tmp_path}/gone"


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a b%").write_bytes(b"x")
    source = Source(Manifest.of_files([(tmp_path / "a b%").as_uri()]))
    assert source.read(0) == b"x"


@pytest.mark.parametrize("uri", ["etc/hostname", "file:etc/hostname"])
def test_a_daemon_reads_no_relative_paths(uri: str) -> None:
    source = Source(Manifest.of_files([uri]), QUICK, relative=False)
    with pytest.raises(SourceError, match="relative"):
        source.read(0)


@pytest.mark.parametrize("by", ["hand", "the end of its life"])
def test_kept_descriptors_are_bounded_and_given_back(tmp_path: Path, by: str) -> None:
    before = descriptors()
    parts = []
    for i in range(40):
        (tmp_path / str(i)).mkdir()
        parts.append(records(tmp_path / str(i), 10, 10)[0])
    source = Source(Manifest.concat(parts), files=8)
    read_into(source, list(range(0, 400, 10)))
    assert len(descriptors() - before) == 8
    if by == "hand":
        source.close()
    del source
    assert not descriptors() - before


def test_many_threads_share_few_descriptors(tmp_path: Path) -> None:
    parts, contents = [], []
    for i in range(6):
        (tmp_path / str(i)).mkdir()
        manifest, data = records(tmp_path / str(i), 100, 50)
        parts.append(manifest)
        contents += [data[k * 100 : k * 100 + 100] for k in range(50)]
    source = Source(Manifest.concat(parts), files=3)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            ids = rng.integers(0, 300, 16).tolist()
            got, read = read_into(source, ids)
            if read != [contents[i] for i in ids] or (got != 100).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    source.close()
    assert not wrong


def test_a_descriptor_is_shared_and_stays_open_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    buffers = [bytearray(5) for _ in range(4)]
    runs = [(5 * i, 5, [memoryview(b)]) for i, b in enumerate(buffers)]
    files = [StoredFile(str(tmp_path / name), keep=True) for name in "ab"]
    for file in files:
        Path(file.uri).write_bytes(bytes(range(20)))
    store, real = LocalStore(1), os.preadv

    def preadv(fd: int, *arguments: Any) -> int:
        monkeypatch.setattr(os, "preadv", real)
        store.read(files[1], 0, 5)  # replaces the descriptor
        Path(files[1].uri).replace(files[0].uri)
        return real(fd, *arguments)

    assert [filled.opens for filled in store.fill(files[0], runs[:2])] == [1]
    assert len(descriptors() - before) == 1
    monkeypatch.setattr(os, "preadv", preadv)
    assert [filled.opens for filled in store.fill(files[0], runs[2:])] == [0]
    assert b"".join(buffers) == bytes(range(20))
    store.close()
    assert not descriptors() - before


def test_an_empty_manifest_has_nothing_to_read() -> None:
    source = Source(Manifest.of_files([]))
    read = source.read_parts(np.zeros(0, np.int32), np.zeros(0, np.int64), [])
    assert (len(read.nbytes), len(read.version)) == (0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_the_descriptor_of_a_file_with_many_rows_is_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    names = [f"{'x' * int(rng.integers(0, 4))}{i % 7}" for i in range(9)] + [""]
    uris = [names[i] for i in np.repeat(rng.integers(0, 10, 20), rng.integers(1, 4, 20))]
    n = len(uris)
    ones = np.ones(n, np.int64)
    manifest = Manifest.of_runs(uris, rng.integers(1, 9, n), ones, ones)
    same = [uris[i] == uris[i + 1] for i in range(n - 1)]
    assert (np.diff(manifest.file_of(np.arange(n))) == 0).tolist() == same
    kept: list[bool] = []

    def note(_: LocalStore, stored: StoredFile, *__: int) -> tuple[bytes, int]:
        kept.append(stored.keep)
        return b"", 0

    monkeypatch.setattr(LocalStore, "read", note)
    source = Source(manifest)
    for i in range(n):
        source.read(i)
    assert kept == [
        before or after for before, after in zip([False, *same], [*same, False], strict=True)
    ]
