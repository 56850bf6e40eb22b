"""Remote files: an answer that contradicts the listing fails, whatever its status says."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.version import MISSING, UNKNOWN
from creel.errors import SourceError
from creel.settings import FetchSettings
from testbed.s3_server import S3

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.timeout(120)
_QUICK = FetchSettings(attempts=2, deadline_s=60.0, backoff_s=0.001, backoff_max_s=0.002)

#: Method and range of a request -> status, headers, body; headers give the body's true length.
Answer = tuple[int, dict[str, str], bytes]
Web = Callable[[str, str], Answer]


@contextmanager
def web(answer: Web) -> Iterator[str]:
    """Run a server on loopback that answers every request by `answer`; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = answer(self.command, self.headers.get("Range", ""))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
            self.close_connection = "Content-Length" in headers

        do_HEAD = do_GET  # noqa: N815  the base class's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/x"
        finally:
            server.shutdown()
            thread.join()


def whole(uri: str, length: int) -> Source:
    """Return a source of a file of one object, listed with this length."""
    return Source(Manifest.of_files([uri], lengths=[length]), _QUICK)


def ten_of_ten(uri: str) -> Source:
    """Return a source of a file of ten records of ten bytes."""
    return Source(Manifest.of_runs([uri], *(np.array([n]) for n in (0, 10, 10))), _QUICK)


def attempts(source: Source, object_id: int) -> list[bytes | None]:
    """Return the result of a direct read and of a fetch; None if they fail."""
    try:
        direct: bytes | None = source.read(object_id)
    except SourceError:
        direct = None
    ids = np.array([object_id])
    length = source.manifest.ranges(ids)[1]
    part = bytearray(int(length[0]))
    done = source.read_parts(ids, length, [[memoryview(part)]])
    return [direct, bytes(part) if done.nbytes[0] == len(part) else None]


CONTENT = bytes(range(100))
PAGE = b"<html>sign in, please</html>"


def plain(content: bytes) -> Web:
    return lambda *_: (200, {}, content)


def ranged(content: bytes, shift: int = 0, total: str = "") -> Web:
    """A server that returns ranges, perhaps others than requested."""

    def answer(_: str, asked: str) -> Answer:
        if not asked:
            return 200, {}, content
        first, last = (int(n) + shift for n in asked.removeprefix("bytes=").split("-"))
        if first >= len(content):
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        body = content[first : last + 1]
        content_range = f"bytes {first}-{first + len(body) - 1}/{total or len(content)}"
        return 206, {"Content-Range": content_range}, body

    return answer


def cut(content: bytes) -> Web:
    """A connection that ends before the body does."""
    return lambda *_: (200, {"Content-Length": str(len(content) + 9)}, content)


def endless(content: bytes) -> Web:
    """A body of unstated length, which ends with the connection."""
    return lambda *_: (200, {"Content-Length": "", "Connection": "close"}, content)


@pytest.mark.parametrize(
    "answer, good",
    [
        (plain(CONTENT), True),
        (ranged(CONTENT), True),
        (endless(CONTENT), True),
        (plain(CONTENT + b"more"), False),
        (endless(CONTENT + b"more"), False),
        (plain(CONTENT[:-1]), False),
        (endless(CONTENT[:-1]), False),
        (plain(PAGE), False),
        (plain(b""), False),
        (cut(CONTENT[:-9]), False),
        (cut(CONTENT), False),
        (lambda *_: (204, {}, b""), False),
    ],
)
def test_a_whole_file_over_http_is_as_long_as_listed_or_has_failed(
    answer: Web, *, good: bool
) -> None:
    with web(answer) as uri:
        assert attempts(whole(uri, 100), 0) == [CONTENT if good else None] * 2


@pytest.mark.parametrize("content, good", [(b"", True), (b"x", False)])
def test_an_empty_file_that_has_grown_is_no_empty_file(content: bytes, *, good: bool) -> None:
    with web(plain(content)) as uri:
        assert attempts(whole(uri, 0), 0) == [b"" if good else None] * 2


@pytest.mark.parametrize(
    "answer, good",
    [
        (ranged(CONTENT), True),
        (ranged(CONTENT, total="*"), True),
        (ranged(CONTENT + b"more"), True),  # records are read up to the listed length
        (plain(CONTENT), True),  # a server without ranges
        (plain(CONTENT + b"more"), True),
        (plain(CONTENT[:-1]), False),  # any record fails: it is another file
        (ranged(CONTENT[:-1]), False),
        (plain(PAGE), False),
        (endless(PAGE), False),
        (ranged(CONTENT, shift=1), False),
        (ranged(CONTENT, shift=1, total="*"), False),
        (ranged(CONTENT[:11]), False),
        (cut(CONTENT), False),
        (lambda *_: (206, {}, CONTENT[10:19]), False),
        (lambda *_: (206, {}, CONTENT[10:21]), False),
        (lambda *_: (206, {}, CONTENT[10:20]), True),  # no range, but the right length
    ],
)
def test_a_part_over_http_is_the_one_asked_for_or_has_failed(answer: Web, *, good: bool) -> None:
    with web(answer) as uri:
        assert attempts(ten_of_ten(uri), 1) == [CONTENT[10:20] if good else None] * 2


def test_of_unknown_length_is_whatever_the_server_sends_in_full() -> None:
    for answer, wanted in ((plain(PAGE), PAGE), (endless(PAGE), PAGE), (cut(PAGE), None)):
        with web(answer) as uri:
            (got,) = Source(Manifest.of_files([uri]), _QUICK).read_whole(np.array([0]))
            assert (got[0] if got else None) == wanted


@pytest.mark.parametrize("size, good", [(10, True), (9, False), (11, False), (0, False)])
def test_a_whole_object_of_s3_is_as_long_as_listed_or_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, *, good: bool
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/x").write_bytes(CONTENT[:size])
    with S3(tmp_path) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        assert attempts(whole("s3://bucket/x", 10), 0) == [CONTENT[:10] if good else None] * 2
        records = Source(
            Manifest.of_runs(["s3://bucket/x"], *(np.array([n]) for n in (0, 2, 5))), _QUICK
        )
        assert attempts(records, 1) == [CONTENT[2:4] if size >= 10 else None] * 2


@pytest.mark.parametrize("size, good", [(10, True), (9, False), (11, False)])
def test_a_whole_file_of_any_fsspec_is_as_long_as_listed_or_has_failed(
    size: int, *, good: bool
) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/creel-test/x", CONTENT[:size])
    try:
        source = whole("memory://creel-test/x", 10)
        assert attempts(source, 0) == [CONTENT[:10] if good else None] * 2
        before = source.versions(np.array([0]))
        assert before[0] > 0
        (got,) = source.read_whole(np.array([0]))
        assert got is not None
        assert got[:2] == (CONTENT[:size], before[0])
        system.pipe("/creel-test/x", CONTENT[1 : size + 1])
        assert source.versions(np.array([0])) != before
    finally:
        system.rm("/creel-test", recursive=True)
    assert source.versions(np.array([0])) == MISSING


# --- versions -------------------------------------------------------------------------------------


def version(answer: Web) -> int:
    with web(answer) as uri:
        return int(whole(uri, 100).versions(np.array([0]))[0])


def says(status: int, get: int = 200, **headers: str) -> Web:
    """HEAD is answered with one status, GET with another."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda method, _: (status if method == "HEAD" else get, named, b"")


def test_a_version_is_the_tag_else_time_and_length() -> None:
    tagged = [version(says(200, ETag=tag, Last_Modified=when)) for tag, when in ("ax", "ay", "bx")]
    assert tagged[0] == tagged[1] != tagged[2]
    timed = [version(says(200, Last_Modified=when)) for when in "xyx"]
    assert timed[0] == timed[2] != timed[1]
    assert min(tagged + timed) > 0
    assert version(says(200)) == UNKNOWN


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_servers_that_refuse_head_are_asked_by_a_get(status: int) -> None:
    tag = version(says(200, ETag="a"))
    assert version(says(status, ETag="a")) == tag
    assert version(says(status, get=206, ETag="a")) == tag
    assert version(says(status, get=403, ETag="a")) == MISSING
    assert version(says(status, get=416)) == UNKNOWN


@pytest.mark.parametrize("status", [401, 404, 410, 500, 503])
def test_objects_that_the_server_does_not_give_are_missing(status: int) -> None:
    assert version(says(status, get=status, ETag="a")) == MISSING


def test_the_tag_of_a_read_is_that_of_a_question() -> None:
    def answer(method: str, asked: str) -> Answer:
        status, headers, body = ranged(CONTENT)(method, asked)
        return status, {**headers, "Last-Modified": "then"}, body

    with web(answer) as uri:
        source, parts = whole(uri, 100), ten_of_ten(uri)
        (tag,) = source.versions(np.array([0])).tolist()
        length = np.array([100]), np.array([10])
        read = source.read_parts(np.array([0]), length[0], [[memoryview(bytearray(100))]])
        other = parts.read_parts(np.array([3]), length[1], [[memoryview(bytearray(10))]])
        assert tag == read.version[0] == other.version[0] > 0


# --- servers that never answer --------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x"


def test_a_server_that_never_answers_is_given_up_in_time(silent: str) -> None:
    impatient = FetchSettings(attempts=8, deadline_s=0.2, backoff_s=0.001)
    source = Source(Manifest.of_files([silent], lengths=[5]), impatient)
    with pytest.raises(SourceError) as caught:
        source.read(0)
    assert caught.value.errno in {0, errno.ETIMEDOUT}
    assert source.counters.snapshot().retries <= 1
    assert source.versions(np.array([0])).tolist() == [MISSING]
