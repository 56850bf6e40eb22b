"""Packets at the desk: one question, one answer, descriptors along with either."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from creel.addresses import first_address
from creel.cache.arena import ArenaView
from creel.errors import DaemonLostError, MalformedError, NoDaemonError, UnavailableError
from creel.limits import may_map
from creel.messages import (
    MAX_BODY,
    DeskReply,
    DeskRequest,
    Opened,
    Refused,
    Registered,
    Welcome,
    decode,
    encode,
)
from creel.peers import known_apart, peer_of

M = TypeVar("M", Welcome, Registered, Opened)

_MAX_FDS = 4
_SEALS = 0x0F  # F_SEAL_SEAL | SHRINK | GROW | WRITE


def default_name() -> str:
    """The daemon's name: CREEL_SOCKET, or "default"."""
    return os.environ.get("CREEL_SOCKET") or "default"


def resolve(address: str = "") -> str:
    """The desk's first abstract address for a daemon's name, an address ("@..."), or "".

    Raises:
        UnavailableError: there is no telling which files this process sees.

    >>> resolve("@x/desk")
    '\\x00x/desk'
    """
    if address.startswith(("@", "\0")):
        return "\0" + address[1:]
    return first_address(address or default_name())


def exchange(
    desk: socket.socket, request: DeskRequest, kind: type[M], fds: tuple[int, ...] = ()
) -> tuple[M, list[int]]:
    """Say and hear once at the desk: the answer and its descriptors (the caller closes them)."""
    socket.send_fds(desk, [encode(request)], fds)
    body, got, _, _ = socket.recv_fds(desk, MAX_BODY, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        return _expected(body, kind), got
    except BaseException:
        close_all(got)
        raise


def _expected(body: bytes, kind: type[M]) -> M:
    if not body:
        raise DaemonLostError("the daemon hung up")
    reply = decode(body, DeskReply)
    if isinstance(reply, Refused):
        raise UnavailableError(reply.reason, retry_after=reply.retry_after)
    if not isinstance(reply, kind):
        raise MalformedError(f"{kind.__name__} was expected, {type(reply).__name__} came")
    return reply


def map_arena(fds: list[int], nbytes: int) -> ArenaView:
    try:
        if len(fds) != 1:
            raise DaemonLostError(f"a welcome comes with the arena, not {len(fds)} descriptors")
        if not may_map(nbytes):
            raise UnavailableError(f"{nbytes >> 20} MiB are too much for this `ulimit -v`")
        return ArenaView.attach(fds[0], nbytes)
    except OSError as e:  # a limit on this process (ulimit -v), for one
        raise UnavailableError(f"the daemon's memory cannot be mapped here: {e}") from e
    finally:
        close_all(fds)


def check_owner(desk: socket.socket, where: str) -> None:
    """Anybody may bind an abstract address: talk to a daemon of our own user alone.

    Nor to one that is known to see other files. Where this process may not look at the daemon, the
    daemon must have looked at this process: it refuses whom it cannot look at.

    Raises:
        NoDaemonError: that is somebody else's process, or sees other files.
    """
    pid, uid = peer_of(desk)
    shown = where.replace(chr(0), "@")
    if uid != os.getuid():
        raise NoDaemonError(f"user {uid} sits at {shown}: not talking to it")
    if known_apart(pid):
        raise NoDaemonError(f"who sits at {shown} sees other files than this process")


@contextmanager
def pidfd_of(pid: int) -> Iterator[tuple[int, ...]]:
    """A descriptor of this process; none where it is 0 or gone, or before Linux 5.3."""
    fds: list[int] = []
    if pid:
        with suppress(OSError):
            fds.append(os.pidfd_open(pid))
    try:
        yield tuple(fds)
    finally:
        close_all(fds)


def sealed_copy(data: bytes) -> int:
    import fcntl

    fd = os.memfd_create("creel-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
