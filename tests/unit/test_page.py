"""A page that anybody may ask for, and nobody may keep others from."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.request import Request, urlopen

import pytest

from creel.daemon.reporting import page
from creel.daemon.reporting.page import PageServer, respond
from kit import descriptors, until

BODY = b"x" * 3_000_000  # more than a socket takes at once


@pytest.fixture
def server() -> Iterator[PageServer]:
    before = descriptors(), set(threading.enumerate())
    serving = PageServer("127.0.0.1", 0, lambda accept: (accept or "text/plain", BODY))
    yield serving
    serving.close()
    assert not descriptors() - before[0]
    assert not set(threading.enumerate()) - before[1]


def ask(server: PageServer, **headers: str) -> bytes:
    request = Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
    with urlopen(request, timeout=30) as answer:
        body: bytes = answer.read()
        assert int(answer.headers["Content-Length"]) == len(body)
        assert answer.headers["Content-Type"] == headers.get("Accept", "text/plain")
    return body


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def test_the_page_is_whole_and_of_the_kind_that_was_asked_for(server: PageServer) -> None:
    assert ask(server) == BODY
    assert ask(server, Accept="application/openmetrics-text") == BODY


def test_a_thousand_half_requests_cost_no_thread_and_keep_nobody_out(server: PageServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for i in range(1000):
            half = stack.enter_context(connect(server))
            half.sendall(b"GET /metrics HTTP/1.1\r\nAcc")
            if i % 100 == 0:
                assert ask(server) == BODY
        assert threading.active_count() == before
        assert len(server._connections) <= page._MAX_CONNECTIONS
        assert ask(server) == BODY


def test_a_connection_has_a_deadline_whatever_it_sends_or_reads(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_LIFE_S", 0.05)
    with connect(server) as silent, connect(server) as slow, connect(server) as deaf:
        slow.sendall(b"GET / HTTP/1.1\r\nA")
        deaf.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for one in (silent, slow):
            assert one.recv(1) == b""
        until(lambda: not server._connections, what="who does not read loses the connection")
    monkeypatch.undo()
    assert ask(server) == BODY


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"x" * 20_000]
)
def test_what_is_no_request_gets_no_page(server: PageServer, sent: bytes) -> None:
    with connect(server) as odd:
        odd.sendall(sent)
        answer = odd.recv(1 << 16)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 405 ")
    assert ask(server) == BODY


def test_a_page_that_cannot_be_made_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def busy(_: str) -> tuple[str, bytes]:
        raise TimeoutError("the daemon's loop is busy")

    assert respond(b"GET / HTTP/1.1\r\n\r\n", busy).startswith(b"HTTP/1.1 503 ")
    assert "could not be rendered" in caplog.text
    assert respond(b"HEAD / HTTP/1.1\r\n\r\n", lambda _: ("k", b"abc")).endswith(b"\r\n\r\n")
