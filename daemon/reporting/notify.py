"""systemd notifications (sd_notify), without a library: one datagram per message."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

from creel.cache.memory.memfd import Descriptor
from creel.system.fd_packets import send

_FIRST_FD = 3  # sd_listen_fds(3)


class Notify:
    """The service manager's notification socket; without one, every call does nothing.

    Reads NOTIFY_SOCKET (a path, or "@name" for an abstract one) and WATCHDOG_USEC from the
    environment.
    """

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        #: Seconds between two WATCHDOG=1, half the time that systemd allows; 0 without a watchdog.
        self.watchdog_s = _watchdog_s(os.environ) if address else 0.0
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def __call__(self, *lines: str) -> None:
        """Send lines such as "READY=1"; errors are ignored."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return

    def ready(self, status: str) -> None:
        self("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def reloading(self) -> None:
        """Report that the settings are being reloaded; `ready` reports the end."""
        self("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self("STOPPING=1", "STATUS=draining")

    @property
    def heard(self) -> bool:
        """Whether there is a service manager."""
        return self._socket is not None

    def store(self, name: str, fd: int) -> None:
        """Leave a descriptor to the next daemon of this service, if its unit allows any."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            send(self._socket, f"FDSTORE=1\nFDNAME={name}".encode(), [fd], 0, self._address)

    def unstore(self, *names: str) -> None:
        """Let the service manager close the descriptors of these names."""
        for name in names:
            self("FDSTOREREMOVE=1", f"FDNAME={name}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def handed_over(env: MutableMapping[str, str]) -> dict[str, Descriptor]:
    """Take the descriptors that the service manager gave this process, by name.

    The variables are removed, as no child has these descriptors. A name given twice means nothing.
    """
    words = {name: env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if words["LISTEN_PID"] != str(os.getpid()) or not words["LISTEN_FDS"].isdigit():
        return {}
    names = words["LISTEN_FDNAMES"].split(":")
    given: dict[str, Descriptor] = {}
    for fd in range(_FIRST_FD, _FIRST_FD + int(words["LISTEN_FDS"])):
        os.set_inheritable(fd, False)
        name = names[fd - _FIRST_FD] if fd - _FIRST_FD < len(names) else ""
        given[name if names.count(name) == 1 else f"{name} {fd}"] = Descriptor(fd)
    return given


def _watchdog_s(env: Mapping[str, str]) -> float:
    """Return half of WATCHDOG_USEC in seconds; 0 if it is not meant for this process.

    >>> _watchdog_s({"WATCHDOG_USEC": "2000000"})
    1.0
    """
    pid = env.get("WATCHDOG_PID", "")
    usec = env.get("WATCHDOG_USEC", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(usec) / 2e6
