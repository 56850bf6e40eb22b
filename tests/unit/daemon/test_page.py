"""A page that anybody may request, and that no client can keep from others."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import pytest

from creel.daemon.reporting import page
from creel.daemon.reporting.page import PageServer
from kit import descriptors, until

BODY = b"x" * 3_000_000  # more than a socket takes at once


def render(accept: str) -> tuple[str, bytes]:
    if accept == "busy":
        raise TimeoutError("the daemon's loop is busy")
    return accept or "text/plain", BODY


@pytest.fixture
def server() -> Iterator[PageServer]:
    before = descriptors(), set(threading.enumerate())
    serving = PageServer("127.0.0.1", 0, render)
    yield serving
    serving.close()
    until(lambda: not set(threading.enumerate()) - before[1], event="all threads end")
    assert not descriptors() - before[0]


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


def test_hundreds_of_half_requests_cost_few_threads_and_keep_nobody_out(server: PageServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for i in range(300):
            half = stack.enter_context(connect(server))
            half.sendall(b"GET /metrics HTTP/1.1\r\nAcc")
            if i % 100 == 0:
                assert ask(server) == BODY
        most = before + page.MAX_CONNECTIONS
        until(lambda: threading.active_count() <= most, event="the others have ended")
        assert ask(server) == BODY


def test_a_client_that_is_silent_or_deaf_is_left(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page.PageHandler, "timeout", 0.05)
    before = threading.active_count()
    with connect(server) as silent, connect(server) as slow, connect(server) as deaf:
        slow.sendall(b"GET / HTTP/1.1\r\nA")
        deaf.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
        until(lambda: threading.active_count() == before, event="who does not read is left")
    monkeypatch.undo()
    assert ask(server) == BODY


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"x" * 80_000]
)
def test_bytes_that_are_no_request_get_no_page(server: PageServer, sent: bytes) -> None:
    with connect(server) as odd, contextlib.suppress(OSError):  # the server may have hung up
        odd.sendall(sent)
        odd.shutdown(socket.SHUT_WR)
        assert len(odd.recv(1 << 16)) < 1000
    assert ask(server) == BODY


def test_a_page_that_cannot_be_made_is_said(
    server: PageServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as odd:
        odd.sendall(b"GET / HTTP/1.1\r\nAccept: busy\r\n\r\n")
        assert b" 503 " in odd.recv(100)
    until(lambda: "could not be rendered" in caplog.text, event="it is logged")
    assert ask(server) == BODY


def test_connections_that_come_and_go_meanwhile_stop_nobody(server: PageServer) -> None:
    """Other threads may do so between any two steps of the thread that ends the oldest one."""
    server._open[oldest := mock.Mock()] = None

    def meanwhile(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not PageServer._end_oldest.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            server._open[mock.Mock()] = None
        return meanwhile

    before = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        server._end_oldest()
    finally:
        sys.settrace(before)
    oldest.shutdown.assert_called_once()
