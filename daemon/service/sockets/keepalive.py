"""Processes without a connection that keep an embedded daemon alive.

torch's loader starts new workers in each epoch. If only they are the daemon's clients, it has none
between epochs: unless their parent process kept it alive, the daemon would end and lose its cache.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

_MAX_PIDS = 256  # most processes; for others the daemon only lingers
_PID = "Pid:"


class KeepAlive:
    """The pidfds of these processes, in the loop's epoll. Each process counts once."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._pids: dict[int, int] = {}  # by pidfd

    def take(self, fd: int) -> None:
        """Add the process of a pidfd, for which a client works, and take over the descriptor."""
        pid = _pid_of(fd)
        if pid > 0 and pid not in self._pids.values() and len(self._pids) < _MAX_PIDS:
            self._epoll.register(fd, select.EPOLLIN)
            self._pids[fd] = pid
        else:
            os.close(fd)

    def ended(self, fd: int) -> None:
        del self._pids[fd]
        with suppress(OSError, ValueError):
            self._epoll.unregister(fd)
        os.close(fd)

    def close(self) -> None:
        for fd in list(self._pids):
            self.ended(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._pids

    def __len__(self) -> int:
        return len(self._pids)


def _pid_of(fd: int) -> int:
    """Return the process id of a pidfd; -1 if the process has ended, or `fd` is no pidfd."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            if line.startswith(_PID):
                return int(line.removeprefix(_PID))
    return -1
