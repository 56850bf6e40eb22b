"""Packets of unix sockets that pass descriptors (SCM_RIGHTS).

`socket.send_fds` and `socket.recv_fds` ignore flags before Python 3.12: they would block, and the
descriptors would stay open in the programs that this one starts.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterable


def send(
    sock: socket.socket, data: bytes, fds: Iterable[int], flags: int = 0, address: str | None = None
) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)] if (some := array("i", fds)) else []
    sock.sendmsg([data], rights, flags, address)


def receive(
    sock: socket.socket, nbytes: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Return a packet's bytes, its descriptors (`most` at most), and MSG_TRUNC or MSG_CTRUNC."""
    flags |= socket.MSG_CMSG_CLOEXEC
    data, rights, flags, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(4 * most), flags)
    fds = array("i")
    for *_, some in rights:
        fds.frombytes(some[: len(some) - len(some) % 4])
    return data, list(fds), flags


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
