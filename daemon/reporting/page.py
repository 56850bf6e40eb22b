"""An HTTP server of one page, for few connections, each with a thread and a deadline.

A client may send half a request, or never read the answer. This costs only its own connection, and
the server closes the oldest connection when there are too many.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

log = logging.getLogger("creel.page")

MAX_CONNECTIONS = 32  # Prometheus needs one
_SILENT_S = 10.0  # time-out of a client that sends or reads nothing; Prometheus' default as well
_SHORT_S = 0.2  # pause when no descriptor is free
_LOOK_S = 0.1  # pause between two checks whether to stop

#: Takes the value of a request's Accept header; returns content type and body.
Render = Callable[[str], tuple[str, bytes]]


class PageHandler(BaseHTTPRequestHandler):
    timeout = _SILENT_S
    server: PageServer

    def do_GET(self) -> None:
        """Answer with the page, for any path."""
        try:
            kind, body = self.server.render(self.headers.get("accept", ""))
        except Exception:  # the daemon's loop may be busy; the next scrape comes soon
            log.exception("the metrics page could not be rendered")
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


class PageServer(ThreadingHTTPServer):
    """Serves the page that `render` returns, until `close`."""

    request_queue_size = 128

    def __init__(self, host: str, port: int, render: Render) -> None:
        """Listen, and serve in threads.

        Raises:
            OSError: the address is not available.
            OverflowError: there is no such port.
        """
        self.render = render
        self.address_family, _, _, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        #: Open connections, oldest first; `popitem` is atomic, as threads remove their own.
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__((str(where[0]), port), PageHandler)
        self.port = int(self.socket.getsockname()[1])
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK_S,), name="creel-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        while self._open:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """End the oldest connection, and so its thread."""
        with suppress(KeyError, OSError):  # the connection has ended meanwhile
            self._open.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)

    # --- called by `socketserver` -----------------------------------------------------------------

    def server_bind(self) -> None:
        """Bind without the look-up of this machine's name that HTTPServer does."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_SHORT_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        while len(self._open) >= MAX_CONNECTIONS:
            self._end_oldest()
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Ignore the error: the client has left, or its connection was ended."""
