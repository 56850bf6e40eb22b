"""Versions: every write to a file changes its version, and nothing else does."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from creel.cache.storage import version
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.reads import Read
from creel.cache.storage.source import Source
from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN
from creel.settings import FetchSettings
from testbed.http_server import Server

pytestmark = pytest.mark.timeout(120)
_QUICK = FetchSettings(attempts=3, deadline_s=60.0, backoff_s=0.001, backoff_max_s=0.002)
_S = 10**9


def status(
    size: int = 9, mtime: int = 1, ino: int = 7, dev: int = 3, ctime: int = 1
) -> os.stat_result:
    """Return a result of stat; times in nanoseconds since an arbitrary moment."""
    whole = (0o100644, ino, dev, 1, 0, 0, size, 0, mtime // _S, ctime // _S)
    named = {"st_atime_ns": 0, "st_mtime_ns": mtime, "st_ctime_ns": ctime}
    return os.stat_result(whole, named)


# --- of_stat: pure --------------------------------------------------------------------------------

_NOW = 1_000 * _S + 5


@pytest.mark.parametrize("field", ["size", "mtime", "ino", "dev", "ctime"])
def test_each_of_five_numbers_counts(field: str) -> None:
    base = {"size": 9, "mtime": 5, "ino": 7, "dev": 3, "ctime": 11}
    before = version.of_stat(status(**base), _NOW)
    after = version.of_stat(status(**{**base, field: base[field] + 1}), _NOW)
    assert 0 < before < 2**62
    assert before != after
    assert before == version.of_stat(status(**base), _NOW + 1)


@pytest.mark.parametrize(
    "mtime, ctime, settled",
    [
        (1, _NOW - 21_000_000, True),
        (1, _NOW - 19_000_000, False),
        (_NOW - 19_000_000, 1, False),
        (_NOW + _S, 1, False),  # another machine's clock
        (1, _NOW + 10**6 * _S + 1, False),
        (_NOW + 10**6 * _S, 7, True),  # a date that was set: the next write sets another
        (1, 999 * _S, False),  # of whole seconds: the second may not be over
        (1, 997 * _S, True),
        (1, 999 * _S + 1, True),
    ],
)
def test_a_file_changed_within_a_tick_may_change_again_unseen(
    mtime: int, ctime: int, *, settled: bool
) -> None:
    stamp = version.of_stat(status(mtime=mtime, ctime=ctime), _NOW)
    assert (stamp > 0) is settled
    assert settled or stamp == CHANGING


def test_tags_are_told_apart() -> None:
    tags = ["", '"a"', '"b"', "é", "\udcff", '"a" 9', '"a" 10']
    numbers = [version.of_tag(tag) for tag in tags]
    assert len(set(numbers)) == len(tags)
    assert all(0 < n < 2**62 for n in numbers)


# --- files ----------------------------------------------------------------------------------------


def settle(*paths: Path) -> None:
    """Wait until a further change of these files would show."""
    while any(version.of_stat(p.stat(), time.time_ns()) == CHANGING for p in paths):
        threading.Event().wait(0.002)


def version_of(source: Source) -> int:
    """Return the present version of the first file."""
    return int(source.versions(np.zeros(1, np.int32))[0])


def read(source: Source, *ids: int) -> tuple[Read, list[bytes]]:
    """Return what `read_parts` returns and fills in."""
    which = np.array(ids)
    length = source.manifest.ranges(which)[1]
    parts = [bytearray(n) for n in length.tolist()]
    return source.read_parts(which, length, [[memoryview(p)] for p in parts]), list(
        map(bytes, parts)
    )


def files(root: Path, *contents: bytes) -> Source:
    """Return a source of whole files, whose versions have settled."""
    names = [str(i) for i in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        (root / name).write_bytes(content)
    settle(*(root / name for name in names))
    return Source(Manifest.of_files(names, root=str(root), lengths=[*map(len, contents)]), _QUICK)


def records(root: Path, content: bytes, count: int) -> Source:
    """Return a source of `count` records of one file, whose version has settled."""
    (root / "records").write_bytes(content)
    settle(root / "records")
    run = (np.array([n]) for n in (0, len(content) // count, count))
    return Source(Manifest.of_runs([str(root / "records")], *run), _QUICK)


def in_place(path: Path) -> None:
    with path.open("r+b") as f:
        f.write(b"Z")


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"Z" * path.stat().st_size)
    other.replace(path)


def time_put_back(path: Path) -> None:
    before = path.stat()
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replaced_by_an_older_one(path: Path) -> None:
    before = path.stat()
    replaced(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [in_place, replaced, time_put_back, replaced_by_an_older_one],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("kind", ["files", "records"])
def test_every_change_of_a_file_is_another_version(
    tmp_path: Path, change: Callable[[Path], None], kind: str
) -> None:
    content = bytes(range(200))
    source = files(tmp_path, content) if kind == "files" else records(tmp_path, content, 20)
    path = tmp_path / ("0" if kind == "files" else "records")
    ids = [0] if kind == "files" else [*range(0, 20, 2)]  # scattered: read one by one
    before = version_of(source)
    got, old = read(source, *ids)
    assert before > 0
    assert (got.version == before).all()
    assert version_of(source) == before
    change(path)
    assert version_of(source) != before  # at once: CHANGING, if nothing else
    settle(path)
    after = version_of(source)
    assert after > 0
    assert after != before
    got, new = read(source, *ids)  # records: by a descriptor that was kept open
    assert (got.version == after).all()
    assert new != old
    assert b"".join(new) == b"".join(path.read_bytes()[10 * i : 10 * i + 10] for i in ids) or (
        new == [path.read_bytes()]
    )
    source.close()


@pytest.mark.parametrize("ids", [(3,), (3, 4, 5), (*range(0, 40, 2),)], ids=len)
def test_a_kept_descriptor_of_a_file_that_is_gone_is_no_file(
    tmp_path: Path, ids: tuple[int, ...]
) -> None:
    source = records(tmp_path, bytes(400), 40)
    assert (read(source, *ids)[0].nbytes == 10).all()
    (tmp_path / "records").unlink()
    assert (read(source, *ids)[0].nbytes == -1).all()
    assert version_of(source) == MISSING
    with pytest.raises(OSError, match="No such file"):
        source.read(ids[0])


def test_a_direct_read_is_of_the_file_that_is_there_now(tmp_path: Path) -> None:
    source = records(tmp_path, bytes(100), 10)
    assert source.read(1) == bytes(10)
    replaced(tmp_path / "records")
    assert source.read(1) == b"Z" * 10


def test_a_file_written_a_moment_ago_equals_nothing(tmp_path: Path) -> None:
    source = files(tmp_path, b"0123456789")
    (tmp_path / "0").write_bytes(b"9876543210")
    status = (tmp_path / "0").stat()
    assert version.of_stat(status, status.st_ctime_ns + 1_000_000) == CHANGING
    settle(tmp_path / "0")
    assert version_of(source) == read(source, 0)[0].version[0] > 0


def test_absent_files_are_missing_and_the_others_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "loop").symlink_to("loop")
    settle(tmp_path / "a")
    names = ["gone", "a", "\0", "loop", "a/under", "n" * 300, "a"]
    source = Source(Manifest.of_files(names, root=str(tmp_path)), _QUICK)
    versions = source.versions(np.arange(7, dtype=np.int32)).tolist()
    assert versions[0] == versions[2] == versions[3] == versions[4] == versions[5] == MISSING
    assert versions[1] == versions[6] > 0
    assert source.versions(np.array([6, 1], np.int32)).tolist() == [versions[1]] * 2
    assert len(source.versions(np.zeros(0, np.int32))) == 0


def test_a_daemon_asks_for_no_relative_path() -> None:
    source = Source(Manifest.of_files(["etc/hostname"]), _QUICK, relative=False)
    assert version_of(source) == MISSING


def test_objects_of_unknown_length_have_versions(tmp_path: Path) -> None:
    source = files(tmp_path, b"abc", b"")
    (first, second, third) = Source(
        Manifest.of_files(["0", "1", "2"], root=str(tmp_path)), _QUICK
    ).read_whole(np.arange(3))
    versions = source.versions(np.arange(2, dtype=np.int32)).tolist()
    assert [object_read and object_read[:2] for object_read in (first, second, third)] == [
        *((b"abc", versions[0]), (b"", versions[1])),
        None,
    ]


def test_storage_that_coughs_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(tmp_path, b"a", b"b", b"c")
    versions = source.versions(np.arange(3, dtype=np.int32))
    left, real = [4], os.stat

    def coughs(path: str, **options: object) -> os.stat_result:
        if left[0] and str(path).endswith("/1"):
            left[0] -= 1
            raise OSError(errno.ESTALE, "stale", path)
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", coughs)
    asked = np.array([2, 1, 0], np.int32)
    assert source.versions(asked).tolist() == [
        versions[2],
        MISSING,
        versions[0],
    ]  # after 3 attempts
    assert source.versions(asked).tolist() == versions[asked].tolist()


# --- copies that may be torn ----------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, int], None]]:
    """`written(path, times)`: so many reads of the file are followed by a write before they end."""
    real = os.preadv, os.read
    left: dict[int, int] = {}  # by inode

    def write(fd: int) -> None:
        ino = os.fstat(fd).st_ino
        if left.get(ino, 0):
            left[ino] -= 1
            path = Path(f"/proc/self/fd/{fd}")
            before = path.stat().st_ctime_ns
            with path.open("r+b") as f:
                while path.stat().st_ctime_ns == before:  # until the kernel's clock has ticked
                    f.seek(0)
                    f.write(b"N")
                    f.flush()

    def preadv(fd: int, *arguments: object) -> int:
        got = real[0](fd, *arguments)  # type: ignore[arg-type]
        write(fd)
        return got

    def os_read(fd: int, n: int) -> bytes:
        data = real[1](fd, n)
        write(fd)
        return data

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "read", os_read)

    def begin(path: Path, times: int) -> None:
        left[path.stat().st_ino] = times

    yield begin
    assert not any(left.values())


@pytest.mark.parametrize("kind", ["file", "pieces", "neighbours", "whole"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_may_be_torn_is_read_again(
    tmp_path: Path, written: Callable[[Path, int], None], kind: str, times: int
) -> None:
    old = bytes(range(200))
    new = b"N" + old[1:]
    source = files(tmp_path, old) if kind in {"file", "whole"} else records(tmp_path, old, 20)
    path = next(tmp_path.iterdir())
    written(path, times)
    if kind == "whole":
        ((data, seen, _),) = (x for x in source.read_whole(np.zeros(1, np.int32)) if x is not None)
        got = [data]
    else:
        ids = {"file": (0,), "pieces": (*range(0, 20, 2),), "neighbours": (0, 1, 2)}[kind]
        done, got = read(source, *ids)
        assert (done.nbytes >= 0).all()
        (seen,) = set(done.version.tolist())
    assert got[0] == new[: len(got[0])]
    assert seen in {CHANGING, version_of(source)}


@pytest.mark.parametrize("kind", ["file", "neighbours", "whole"])
def test_a_file_that_is_written_to_all_the_time_has_failed(
    tmp_path: Path, written: Callable[[Path, int], None], kind: str
) -> None:
    content = bytes(range(200))
    source = records(tmp_path, content, 20) if kind == "neighbours" else files(tmp_path, content)
    written(next(tmp_path.iterdir()), 3)
    if kind == "whole":
        assert source.read_whole(np.zeros(1, np.int32)) == [None]
    else:
        done, _ = read(source, *([0] if kind == "file" else [0, 1, 2]))
        assert (done.nbytes == -1).all()
        assert (done.version == UNKNOWN).all()
    assert source.counters.snapshot().errors == {"EBUSY": 1}


# --- remote files ---------------------------------------------------------------------------------


def test_an_http_server_tells_versions_by_its_tags(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "0").write_bytes(b"0123456789")
    (tmp_path / "1").write_bytes(b"abcdefghij")
    with Server(tmp_path) as server:
        whole = Manifest.of_files(["0", "1", "2"], root=server.url, lengths=[10, 10, 10])
        parts = Manifest.of_runs([f"{server.url}/0"], *(np.array([n]) for n in (0, 5, 2)))
        source, pieces = Source(whole, _QUICK), Source(parts, _QUICK)
        versions = source.versions(np.arange(3, dtype=np.int32))
        assert versions[2] == MISSING
        assert (read(source, 0, 1)[0].version == versions[:2]).all()
        assert (read(pieces, 0, 1)[0].version == versions[0]).all()
        (got,) = source.read_whole(np.array([1]))
        assert got is not None
        assert got[:2] == (b"abcdefghij", versions[1])
        stats = server.stats()
        assert (stats["heads"], stats["gets"]) == (2, 4)
        settle(tmp_path / "1")
        in_place(tmp_path / "1")
        again = source.versions(np.arange(2, dtype=np.int32))
        assert again[0] == versions[0]
        assert again[1] not in (versions[1], MISSING, UNKNOWN)


def test_a_manifest_knows_its_files() -> None:
    uris = ["/a", "/a", "s3://b/c", "file:///d", "/e://f", "/e://f"]
    offset, length = np.array([5, 0, 0, 7, 9, 0]), np.array([1, 1, 1, 1, 2, 2])
    count = np.array([2, 3, 1, 0, 4, 1])
    manifest = Manifest.of_runs(uris, offset, length, count)
    assert manifest.file_bounds.tolist() == [0, 5, 6, 6, 11]
    assert manifest.file_of(np.arange(11)).tolist() == [0] * 5 + [1] + [3] * 5
    assert manifest.remote.tolist() == [False, True, False, False]
    assert [manifest.extent(row) for row in range(6)] == [7, 7, 1, 7, 17, 17]
    assert manifest.addresses(np.array([5, 2])) == ["/e://f", "s3://b/c"]


@pytest.mark.parametrize("root, remote", [("/d", False), ("s3://b", True), ("file:///d", False)])
def test_a_root_tells_for_all_files(root: str, *, remote: bool) -> None:
    manifest = Manifest.of_files(["a", "b://c"], root=root)
    assert manifest.remote.tolist() == [remote, remote]
    assert manifest.file_bounds.tolist() == [0, 1, 2]
    assert manifest.file_of(np.array([1, 0])).dtype == np.int32
    assert Manifest.of_files([], root=root).file_bounds.tolist() == [0]
