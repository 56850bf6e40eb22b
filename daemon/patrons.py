"""Processes for whose life an embedded daemon stays, though they have no connection themselves.

torch's loader makes new workers in each epoch. They are the daemon's clients, and between epochs
there are none: without the process that makes them the daemon would go, and all it holds.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

_MOST = 256  # processes; beyond them a daemon lingers as ever
_PID = "Pid:"


class Patrons:
    """Their pidfds, in the loop's epoll. Each process counts once, however often it is named."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._pids: dict[int, int] = {}  # by pidfd

    def take(self, fd: int) -> None:
        """A client works for the process of this pidfd; takes the descriptor over."""
        pid = _pid_of(fd)
        if pid > 0 and pid not in self._pids.values() and len(self._pids) < _MOST:
            self._epoll.register(fd, select.EPOLLIN)
            self._pids[fd] = pid
        else:
            os.close(fd)

    def ended(self, fd: int) -> None:
        """The process of this pidfd has ended."""
        del self._pids[fd]
        with suppress(OSError, ValueError):
            self._epoll.unregister(fd)
        os.close(fd)

    def close(self) -> None:
        """Forget them all."""
        for fd in list(self._pids):
            self.ended(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._pids

    def __len__(self) -> int:
        return len(self._pids)


def _pid_of(fd: int) -> int:
    """The process of a pidfd; -1 where it has ended, or this is something else."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            if line.startswith(_PID):
                return int(line.removeprefix(_PID))
    return -1
