"""A listening socket of the daemon, in the epoll of the thread that serves it."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator

_ACCEPTS = 32  # new connections a turn
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Accepts connections, except while descriptors or memory are short."""

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
            except OSError as e:
                if e.errno in _SHORT:
                    self._paused = True  # who waits must not wake the loop continuously
                    self._epoll.modify(self.socket, 0)
                    return
                continue  # it left meanwhile
            connection.setblocking(False)
            yield connection

    def resume(self) -> None:
        """Accept again where descriptors were short."""
        if self._paused and self.socket.fileno() >= 0:
            self._epoll.modify(self.socket, select.EPOLLIN)
        self._paused = False
