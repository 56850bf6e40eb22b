"""An HTTP server for one page and a few readers: one thread, few connections, each with a deadline.

Anybody who reaches the address may connect, send half a request, or never read the answer. That
costs only their own connection: it is closed at its deadline, or earlier, as the oldest one, when
there are too many. A reader that sends its request at once is always answered.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

log = logging.getLogger("creel.page")

_MAX_CONNECTIONS = 32  # connections at once; Prometheus needs one
_LIFE_S = 10.0  # of a connection, first byte to last; also Prometheus' default timeout
_MAX_REQUEST_NBYTES = 16 << 10  # of a request
_PIECE_NBYTES = 64 << 10
_BACKLOG = 128
_ACCEPTS = 64  # a turn
_SHORT_S = 0.2  # pause where descriptors are short

#: Content type and body, for the value of a request's Accept header.
Render = Callable[[str], tuple[str, bytes]]


@dataclass(eq=False)
class _PageConnection:
    socket: socket.socket
    until: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class PageServer:
    """Serves the page that `render` makes."""

    def __init__(self, host: str, port: int, render: Render) -> None:
        """Listen, and serve in a thread.

        Raises:
            OSError: the address is not available.
            OverflowError: no such port.
        """
        self._render = render
        family, _, _, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.create_server((where[0], port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._close_receiver, self._close_sender = socket.socketpair()
        self._connections: dict[int, _PageConnection] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._close_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="creel-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._close_sender.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for connection in list(self._connections.values()):
                self._end(connection)
            self._selector.close()
            self._close_receiver.close()
            self._listener.close()

    def _turn(self) -> bool:
        """Serve what is ready; False once closed."""
        now = time.monotonic()
        next_end = min((v.until for v in self._connections.values()), default=None)
        ready = self._selector.select(None if next_end is None else max(next_end - now, 0))
        now = time.monotonic()
        for connection in [v for v in self._connections.values() if v.until <= now]:
            self._end(connection)
        for key, _ in ready:
            if key.fileobj is self._close_receiver:
                return False
            if key.fileobj is self._listener:
                self._accept(now)
            elif key.fd in self._connections:
                self._serve(self._connections[key.fd])
        return True

    def _accept(self, now: float) -> None:
        try:
            for _ in range(_ACCEPTS):
                self._welcome(self._listener.accept()[0], now)
        except BlockingIOError:
            pass
        except OSError:  # the peer left again; or descriptors are short, which would repeat at once
            time.sleep(_SHORT_S)

    def _welcome(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        if len(self._connections) >= _MAX_CONNECTIONS:  # those without a request are closed first
            asking = (v for v in self._connections.values() if v.answer is None)
            self._end(next(asking, next(iter(self._connections.values()))))
        connection = self._connections[sock.fileno()] = _PageConnection(sock, now + _LIFE_S)
        self._selector.register(sock, selectors.EVENT_READ)
        self._serve(connection)  # its request may have arrived already

    def _serve(self, connection: _PageConnection) -> None:
        try:
            if connection.answer is None:
                self._read(connection)
            if connection.answer is not None:
                connection.answer = connection.answer[connection.socket.send(connection.answer) :]
                if not connection.answer:
                    connection.socket.shutdown(socket.SHUT_WR)
                    self._end(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)

    def _read(self, connection: _PageConnection) -> None:
        piece = connection.socket.recv(_PIECE_NBYTES)
        connection.request += piece
        if b"\r\n\r\n" in connection.request:
            connection.answer = memoryview(respond(bytes(connection.request), self._render))
            self._selector.modify(connection.socket, selectors.EVENT_WRITE)
        elif not piece or len(connection.request) > _MAX_REQUEST_NBYTES:
            self._end(connection)

    def _end(self, connection: _PageConnection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


def respond(request: bytes, render: Render) -> bytes:
    """Return the whole answer to a whole request: the page, whatever its path, or an error.

    >>> respond(b"GET / HTTP/1.1\\r\\n\\r\\n", lambda _: ("text/plain", b"hi")).splitlines()[::5]
    [b'HTTP/1.1 200 OK', b'hi']
    """
    first, *lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method = first.partition(" ")[0]
    fields = dict(line.lower().partition(":")[::2] for line in lines)
    if method not in {"GET", "HEAD"}:
        return _answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"")
    try:
        kind, body = render(fields.get("accept", "").strip())
    except Exception:  # the daemon's loop may be busy; the next scrape comes soon
        log.exception("the metrics page could not be rendered")
        return _answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"")
    whole = _answer(HTTPStatus.OK, kind, body)
    return whole if method == "GET" else whole[: len(whole) - len(body)]


def _answer(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
