"""Source over HTTP and by pyarrow: few requests; a busy or dead server."""

from __future__ import annotations

import errno
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from source_rig import QUICK, read_into, whole

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores.access import StorageOptions
from creel.cache.storage.stores.store import StoredFile
from creel.errors import SourceError

pytestmark = pytest.mark.timeout(120)


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
    """Run a server on loopback; yield its address, and (path, range) of every request so far."""
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
        source = Source(Manifest.of_files(["a", "b"], root=url), QUICK)
        assert whole(source, 0, 1) == [b"0123456789", b"abc"]
        assert requests == [("/a", ""), ("/b", "")]


def test_ranges_over_http_ask_for_nothing_more() -> None:
    pytest.importorskip("aiohttp")
    with web({"/a": b"0123456789", "/noranges": b"0123456789"}) as (url, requests):
        two, three = np.array([2, 2]), np.array([3, 3])
        manifest = Manifest.of_runs([f"{url}/a", f"{url}/noranges"], two, three, np.array([2, 1]))
        source = Source(manifest, QUICK)
        got, read = read_into(source, [1, 0, 2])
        assert got.tolist() == [3, 3, 3]
        assert read == [b"567", b"234", b"234"]
        assert sorted(requests) == [("/a", "bytes=2-7"), ("/noranges", "bytes=2-4")]


def test_a_busy_server_is_asked_again_and_a_missing_page_is_not() -> None:
    pytest.importorskip("aiohttp")
    with web({"/a": b"x"}, fail=2) as (url, requests):
        source = Source(Manifest.of_files(["a", "b"], root=url), QUICK)
        assert source.read(0) == b"x"
        assert len(requests) == 3
        with pytest.raises(SourceError) as caught:
            source.read(1)
        assert caught.value.errno == errno.ENOENT
        assert len(requests) == 4


def test_a_dead_server_fails_within_patience() -> None:
    pytest.importorskip("aiohttp")
    source = Source(Manifest.of_files(["http://127.0.0.1:9/a"]), QUICK)
    with pytest.raises(SourceError):
        source.read(0)
    assert source.counters.snapshot().retries == 2
    daemons = Source(Manifest.of_files(["http://127.0.0.1:9/a"]).reached(StorageOptions()), QUICK)
    daemons.grants = daemons.manifest.grants()
    with pytest.raises(SourceError):
        daemons.read(0)
    assert daemons.counters.snapshot().retries == 1, "its clients read directly"


def test_pyarrow_reads_what_we_read(tmp_path: Path) -> None:
    """The code for object stores, over pyarrow's own local file system."""
    from creel.cache.storage.stores.arrow_store import ArrowStore
    from creel.cache.storage.stores.requests import Requests

    (tmp_path / "x").write_bytes(b"0123456789")
    store = ArrowStore("file:///", 1.0, {}, Requests())
    place = StoredFile(f"s3://{tmp_path}/x")
    assert store.read(place, 0, -1)[0] == b"0123456789"
    assert store.read(place, 2, 5)[0] == b"23456"
    first, second, third = bytearray(2), bytearray(3), bytearray(1)
    runs = [
        (2, 5, [memoryview(first), memoryview(second)]),
        (9, 1, [memoryview(third)]),
    ]
    assert [filled.opens for filled in store.fill(place, runs)] == [1, 0]
    assert first + second + third == b"234569"
    with pytest.raises(SourceError):
        store.read(place, 8, 5)
    with pytest.raises(SourceError):
        list(store.fill(place, [(9, 2, [memoryview(first)])]))
