"""A listening socket of the daemon, registered in the epoll of the thread that serves it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

_ACCEPTS = 32  # most new connections in one turn


class Listener:
    """Accepts connections; pauses after an error, such as no free descriptor, until `resume`."""

    def __init__(self, listening: socket.socket, epoll: select.epoll) -> None:
        self.socket = listening
        self._epoll = epoll
        self._paused = False
        epoll.register(listening, select.EPOLLIN)

    def accepted(self) -> Iterator[socket.socket]:
        """Yield a bounded number of new connections, in non-blocking mode."""
        for _ in range(_ACCEPTS):
            try:
                connection, _ = self.socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client left meanwhile
            except OSError:
                self._paused = True  # waiting clients must not wake the loop continuously
                self._epoll.modify(self.socket, 0)
                return
            connection.setblocking(False)
            yield connection

    def resume(self) -> None:
        """Accept connections again after an error."""
        if self._paused and self.socket.fileno() >= 0:
            self._epoll.modify(self.socket, select.EPOLLIN)
        self._paused = False
