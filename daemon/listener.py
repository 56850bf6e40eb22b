"""A listening socket of the daemon, in the epoll of the thread that serves it."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

_ACCEPTS = 32  # new connections a turn


class Listener:
    """Accepts connections; after an error (no free descriptor, say) only from `resume` on."""

    def __init__(self, listening: socket.socket, epoll: select.epoll) -> None:
        self.socket = listening
        self._epoll = epoll
        self._paused = False
        epoll.register(listening, select.EPOLLIN)

    def accepted(self) -> Iterator[socket.socket]:
        """Yield new connections, non-blocking; a bounded number."""
        for _ in range(_ACCEPTS):
            try:
                connection, _ = self.socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # it left meanwhile
            except OSError:
                self._paused = True  # who waits must not wake the loop continuously
                self._epoll.modify(self.socket, 0)
                return
            connection.setblocking(False)
            yield connection

    def resume(self) -> None:
        """Accept again after an error."""
        if self._paused and self.socket.fileno() >= 0:
            self._epoll.modify(self.socket, select.EPOLLIN)
        self._paused = False
