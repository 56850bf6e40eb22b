"""Reading objects: right bytes from anywhere, patience with errors that pass and no others."""

from __future__ import annotations

import errno
import logging
import random
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.cache.storage import retry
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.retry import source_error, transient
from creel.cache.storage.source import Source, parts_in
from creel.cache.storage.stores import Filled, LocalStore, Run, StoredFile
from creel.errors import SourceError
from creel.policies.retry import pause_s
from creel.settings import FetchSettings
from kit import descriptors

pytestmark = pytest.mark.timeout(120)
_QUICK = FetchSettings(attempts=3, deadline_s=60.0, backoff_s=0.001, backoff_max_s=0.002)


def read_into(source: Source, ids: list[int]) -> tuple[NDArray[np.int64], list[bytes]]:
    """What `read_parts` fills into fresh buffers."""
    where = np.array(ids)
    lengths = source.manifest.ranges(where)[1]
    buffer = bytearray(int(lengths.sum()))
    got = source.read_parts(where, lengths, parts_in(memoryview(buffer), lengths)).nbytes
    ends = lengths.cumsum().tolist()
    return got, [bytes(buffer[b - n : b]) for b, n in zip(ends, lengths.tolist(), strict=True)]


def whole(source: Source, *ids: int) -> list[bytes | None]:
    """The bytes that `read_whole` gives."""
    return [None if one is None else one[0] for one in source.read_whole(np.array(ids))]


def folder(path: Path, sizes: list[int], seed: int = 0) -> tuple[Manifest, list[bytes]]:
    """Files of random bytes and their manifest."""
    rng = np.random.default_rng(seed)
    contents = [rng.bytes(n) for n in sizes]
    for i, content in enumerate(contents):
        (path / f"{i:03}").write_bytes(content)
    names = [f"{i:03}" for i in range(len(sizes))]
    return Manifest.of_files(names, root=str(path), lengths=sizes), contents


def records(path: Path, size: int, count: int) -> tuple[Manifest, bytes]:
    """One file of dense records behind a header of 5 bytes."""
    content = np.random.default_rng(size).bytes(5 + size * count)
    (path / "records").write_bytes(content)
    one = np.array([1], np.int64)
    runs = Manifest.of_runs([str(path / "records")], one * 5, one * size, one * count)
    return runs, content[5:]


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
    assert (counted.reads, counted.opens, counted.nbytes) == (4, 1, 20_000)  # 512 buffers a read
    assert sum(counted.seconds) == 4
    source.close()


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
    source = Source(dense, _QUICK)
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
    source = Source(files, _QUICK)
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
    for i in (0, 1):  # read alone, by a reader that the daemon could not serve
        with pytest.raises(SourceError, match="the manifest says"):
            source.read(i)


def test_a_name_that_no_file_has_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    source = Source(Manifest.of_files(["\0", "a", "b"], root=str(tmp_path)), _QUICK)
    assert whole(source, 0, 1, 2) == [None, b"a", None]


def test_objects_of_unknown_length_are_read_whole(tmp_path: Path) -> None:
    _, contents = folder(tmp_path, [10, 0, 3000])
    source = Source(Manifest.of_files(["000", "001", "002", "003"], root=str(tmp_path)), _QUICK)
    assert whole(source, 2, 3, 0, 1) == [
        contents[2],
        None,
        contents[0],
        b"",
    ]


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
    source = Source(Manifest.of_files([uri]), _QUICK, relative=False)
    with pytest.raises(SourceError, match="relative"):
        source.read(0)


class _Flaky(LocalStore):
    """Fails the first `left` reads with `error`."""

    error: Exception
    left: int

    def read(
        self, place: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        if self.left:
            self.left -= 1
            raise self.error
        return super().read(place, offset, length, versioned=versioned)

    def fill(self, place: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        if self.left:
            self.left -= 1
            raise self.error
        yield from super().fill(place, runs)

    def single(self, uri: str, length: int, buffers: Sequence[memoryview]) -> int:
        if self.left:
            self.left -= 1
            raise self.error
        return super().single(uri, length, buffers)


def flaky(
    monkeypatch: pytest.MonkeyPatch, manifest: Manifest, error: Exception, failures: int
) -> Source:
    """A source whose store of local files is such a one."""
    monkeypatch.setattr(_Flaky, "error", error, raising=False)
    monkeypatch.setattr(_Flaky, "left", failures, raising=False)
    monkeypatch.setattr("creel.cache.storage.source.LocalStore", _Flaky)
    return Source(manifest, _QUICK)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_server_sent_is_not_in_the_error(seed: int) -> None:
    """aiohttp quotes bytes it did not expect, fsspec the quotation."""
    junk = np.random.default_rng(seed).bytes(400)
    for text in (
        f"400, message={f'Bad status line:{chr(10)}  {junk[:99]!r}{chr(10)}  ^'!r}, url='http://h/x'",
        junk.decode("ascii", "surrogateescape"),
        junk.decode("latin-1"),
    ):
        said = source_error(OSError(text), "http://h/x").strerror or ""
        assert len(said) <= 300
        assert said.isprintable()
        assert "\\x" not in said
    assert "Bad status line" in (source_error(OSError("Bad status line"), "").strerror or "")


class _HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class _Asyncio310:
    """Until Python 3.10 asyncio had a class of its own for this."""

    class TimeoutError(Exception):  # noqa: A001
        pass


class _FsspecTimeout(_Asyncio310.TimeoutError):
    pass


@pytest.mark.parametrize(
    "error, again",
    [
        (OSError(errno.EIO, "I/O error"), True),
        (OSError(errno.ESTALE, "stale handle"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError(), True),
        (_FsspecTimeout(), True),
        (_HttpError(503), True),
        (_HttpError(429), True),
        (_HttpError(403), False),
        (OSError("AWS Error SLOW_DOWN during GetObject operation: Please reduce"), True),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (IsADirectoryError(errno.EISDIR, "a folder"), False),
        (ValueError("our bug"), False),
    ],
    ids=str,
)
def test_only_what_may_pass_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    assert transient(error) is again
    files, contents = folder(tmp_path, [10])
    source = flaky(monkeypatch, files, error, 2)
    if again:
        assert source.read(0) == contents[0]
    else:
        with pytest.raises(SourceError):
            source.read(0)
    assert source.counters.snapshot().retries == 2 * again
    source = flaky(monkeypatch, files, error, 2)
    got, read = read_into(source, [0])
    assert read == contents if again else got.tolist() == [-1]
    assert source.counters.snapshot().retries == 2 * again


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = folder(tmp_path, [10])
    source = flaky(monkeypatch, files, OSError(errno.EIO, "I/O error"), 100)
    with pytest.raises(SourceError) as caught:
        source.read(0)
    assert caught.value.errno == errno.EIO
    assert source.counters.snapshot().retries == _QUICK.attempts - 1


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


# --- http -------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    contents: dict[str, bytes]
    requests: list[tuple[str, str]]
    fail: int

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.requests.append((self.path, asked))
        content = self.contents.get(self.path)
        if type(self).fail:
            type(self).fail -= 1
            self._answer(503, b"busy")
        elif content is None:
            self._answer(404, b"gone")
        elif asked and "noranges" not in self.path:
            first, last = asked.removeprefix("bytes=").split("-")
            self._answer(206, content[int(first) : int(last) + 1])
        else:
            self._answer(200, content)

    def do_HEAD(self) -> None:
        self.requests.append((self.path, "HEAD"))
        self._answer(200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def web(contents: dict[str, bytes], fail: int = 0) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server on loopback: its address, and the (path, range) of every request so far."""
    requests: list[tuple[str, str]] = []
    handler = type(
        "Handler", (_Handler,), {"contents": contents, "requests": requests, "fail": fail}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            server.shutdown()
            thread.join()
    assert isinstance(server, socketserver.TCPServer)


def test_an_object_over_http_is_exactly_one_get() -> None:
    pytest.importorskip("aiohttp")
    with web({"/a": b"0123456789", "/b": b"abc"}) as (url, requests):
        source = Source(Manifest.of_files(["a", "b"], root=url), _QUICK)
        assert whole(source, 0, 1) == [b"0123456789", b"abc"]
        assert requests == [("/a", ""), ("/b", "")]


def test_ranges_over_http_ask_for_nothing_more() -> None:
    pytest.importorskip("aiohttp")
    with web({"/a": b"0123456789", "/noranges": b"0123456789"}) as (url, requests):
        two, three = np.array([2, 2]), np.array([3, 3])
        manifest = Manifest.of_runs([f"{url}/a", f"{url}/noranges"], two, three, np.array([2, 1]))
        source = Source(manifest, _QUICK)
        got, read = read_into(source, [1, 0, 2])
        assert got.tolist() == [3, 3, 3]
        assert read == [b"567", b"234", b"234"]
        assert sorted(requests) == [("/a", "bytes=2-7"), ("/noranges", "bytes=2-4")]


def test_a_busy_server_is_asked_again_and_a_missing_page_is_not() -> None:
    pytest.importorskip("aiohttp")
    with web({"/a": b"x"}, fail=2) as (url, requests):
        source = Source(Manifest.of_files(["a", "b"], root=url), _QUICK)
        assert source.read(0) == b"x"
        assert len(requests) == 3
        with pytest.raises(SourceError) as caught:
            source.read(1)
        assert caught.value.errno == errno.ENOENT
        assert len(requests) == 4


def test_a_dead_server_fails_within_patience() -> None:
    pytest.importorskip("aiohttp")
    source = Source(Manifest.of_files(["http://127.0.0.1:9/a"]), _QUICK)
    with pytest.raises(SourceError):
        source.read(0)
    assert source.counters.snapshot().retries == 2


def test_pyarrow_reads_what_we_read(tmp_path: Path) -> None:
    """The object-store path, over pyarrow's own local file system."""
    from creel.cache.storage.arrow_store import ArrowStore

    (tmp_path / "x").write_bytes(b"0123456789")
    store = ArrowStore("file:///", 1.0)
    place = StoredFile(f"s3://{tmp_path}/x")
    assert store.read(place, 0, -1)[0] == b"0123456789"
    assert store.read(place, 2, 5)[0] == b"23456"
    first, second, third = bytearray(2), bytearray(3), bytearray(1)
    runs = [
        Run(2, 5, [memoryview(first), memoryview(second)]),
        Run(9, 1, [memoryview(third)]),
    ]
    assert [filled.opens for filled in store.fill(place, runs)] == [1, 0]
    assert first + second + third == b"234569"
    with pytest.raises(SourceError):
        store.read(place, 8, 5)
    with pytest.raises(SourceError):
        list(store.fill(place, [Run(9, 2, [memoryview(first)])]))


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A source whose every read fails in a way that may pass."""

    def fail(_: LocalStore, place: StoredFile, *__: int) -> bytes:
        raise OSError(errno.EIO, "the disk coughs", place.uri)

    monkeypatch.setattr(LocalStore, "read", fail)
    monkeypatch.setattr(retry, "_warned", {})
    return Source(folder(tmp_path, [1, 1])[0], _QUICK)


def test_retries_make_one_line_in_the_log(
    failing: Source, caplog: pytest.LogCaptureFixture
) -> None:
    for i in (0, 1):
        with pytest.raises(SourceError):
            failing.read(i)
    (line,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert line.name == "creel.source"
    assert "000: the disk coughs: trying again for up to 60 s" in line.getMessage()


def test_retries_leave_the_persons_random_numbers_alone(failing: Source) -> None:
    before = random.getstate()
    with pytest.raises(SourceError):
        failing.read(0)
    assert random.getstate() == before


@pytest.mark.parametrize("seed", range(50))
def test_pauses_double_within_attempts_and_time(seed: int) -> None:
    rng = random.Random(seed)
    settings = FetchSettings(
        attempts=rng.randrange(1, 12),
        deadline_s=rng.choice([0.5, 3.0, 60.0]),
        backoff_s=rng.choice([0.0, 0.1, 1.0]),
        backoff_max_s=rng.choice([0.3, 5.0]),
    )
    now, pauses = 0.0, []
    for tries in range(1, 200):
        now += rng.random() / 10
        pause = pause_s(settings, tries, now, rng.random())
        if pause is None:
            break
        least = min(settings.backoff_s * 2 ** (tries - 1), settings.backoff_max_s)
        assert least <= pause <= min(least + settings.backoff_s, settings.backoff_max_s)
        now += pause
        assert now <= settings.deadline_s
        pauses.append(pause)
    assert len(pauses) < settings.attempts
    out_of_time = now + settings.backoff_max_s + settings.backoff_s > settings.deadline_s
    assert len(pauses) == settings.attempts - 1 or out_of_time


def test_no_key_in_an_address_is_told() -> None:
    told = source_error(ConnectionError("no"), "s3://AKIA:hush@bucket/x?sig=hush&version=2")
    assert "hush" not in str(told)
    assert told.uri == "s3://bucket/x?sig=...&version=2"


def test_nor_by_a_storage_that_says_the_address_itself() -> None:
    uri = "https://me:hush@host/x?token=hush"
    for error in (SourceError(5, "ends early", uri), OSError(f"503, url='{uri}'")):
        told = source_error(error, uri)
        assert "hush" not in str(told)
        assert told.uri == "https://host/x?token=..."
    assert str(told.strerror) == "503, url='https://host/x?token=...'"


def test_a_file_that_fails_among_others_is_tried_again_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, contents = folder(tmp_path, [10, 20, 0, 30, 40])
    (tmp_path / "001").unlink()
    # of the first
    source = flaky(monkeypatch, files, OSError(errno.EIO, "I/O error"), 2)
    got, read = read_into(source, [0, 1, 2, 3, 4])
    assert got.tolist() == [10, -1, 0, 30, 40]
    assert [read[i] for i in (0, 2, 3, 4)] == [contents[i] for i in (0, 2, 3, 4)]
    counters = source.counters.snapshot()
    assert (counters.opens, counters.nbytes, counters.retries) == (4, 80, 2)
    assert counters.errors == {"ENOENT": 1}
