"""The slow server is as slow as asked, and counts exactly, which other tests rely on."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.http_server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]
DATA = bytes(range(256)) * 4000  # 1,024,000 bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/x.bin").write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with Server(root) as server:
        yield server


def get(url: str, span: str = "") -> bytes:
    request = urllib.request.Request(url, headers={"Range": f"bytes={span}"} if span else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        data: bytes = answer.read()
        return data


@pytest.mark.parametrize(
    "span, wanted",
    [
        ("", DATA),
        ("0-0", DATA[:1]),
        ("10-19", DATA[10:20]),
        ("1023990-", DATA[-10:]),
        ("-10", DATA[-10:]),
        ("1023990-9999999", DATA[-10:]),
    ],
)
def test_ranges_are_those_of_http(server: Server, span: str, wanted: bytes) -> None:
    assert get(f"{server.url}/a%20b/x.bin", span) == wanted
    counts = server.stats()
    assert (counts["gets"], counts["bytes"], counts["files"]) == (1, len(wanted), 1)


def test_folders_are_listed_and_what_is_outside_is_not_found(server: Server, root: Path) -> None:
    (root.parent / "secret").write_text("no")
    assert b'<a href="a%20b/">a b/</a>' in get(f"{server.url}/")
    assert b"x.bin" in get(f"{server.url}/a%20b/")
    for path, code in (("gone", 404), ("../secret", 404), ("%2e%2e/secret", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(f"{server.url}/{path}")
        assert caught.value.code == code
        caught.value.close()
    with pytest.raises(urllib.error.HTTPError, match="416") as caught:
        get(f"{server.url}/a%20b/x.bin", "5000000-")
    caught.value.close()


def test_the_bandwidth_and_the_latency_hold(root: Path) -> None:
    with Server(root, bandwidth_Bps=2e6, latency_s=0.1) as server:
        start = time.monotonic()
        get(f"{server.url}/a%20b/x.bin")
        seconds = time.monotonic() - start
    assert seconds >= 0.1 + (len(DATA) - 2 * 65536) / 2e6


def test_every_nth_get_fails_when_asked_for(root: Path) -> None:
    codes = []
    with Server(root, errors=3) as server:
        for _ in range(6):
            try:
                get(f"{server.url}/a%20b/x.bin", "0-9")
                codes.append(200)
            except urllib.error.HTTPError as e:  # noqa: PERF203 - one answer at a time
                codes.append(e.code)
                e.close()
        counts = server.stats(reset=True)
        assert server.stats()["gets"] == 0
    assert codes == [200, 200, 503, 200, 200, 503]
    assert (counts["gets"], counts["errors"], counts["bytes"]) == (6, 2, 40)


def test_the_server_ends_with_whoever_started_it(root: Path) -> None:
    server = Server(root)
    pid = server.pid
    server.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(urllib.error.URLError):
        get(f"{server.url}/")
