"""Packets on the control socket: one request, one reply, either with descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from creel import messages
from creel.cache.memory.arena import ArenaView
from creel.errors import DaemonLostError, MalformedError, NoDaemonError, UnavailableError
from creel.system.fd_packets import close_all, receive, send
from creel.system.limits import may_map
from creel.system.unix_peers import known_apart, peer_of

M = TypeVar(
    "M",
    messages.Welcome,
    messages.Registered,
    messages.Opened,
    messages.Hosting,
    messages.Joined,
    messages.JointJournal,
)


def exchange(
    control_socket: socket.socket,
    request: messages.ControlRequest,
    kind: type[M],
    fds: tuple[int, ...] = (),
) -> tuple[M, list[int]]:
    """Send a request and return its reply with descriptors, which the caller closes.

    Raises:
        DaemonLostError: the daemon closed the connection.
        UnavailableError: the daemon refused.
        MalformedError: the reply is not a `kind`.
    """
    send(control_socket, messages.encode(request), fds)
    body, got, _ = receive(control_socket, messages.MAX_BODY, messages.MAX_FDS)
    try:
        return _expected(body, kind), got
    except BaseException:
        close_all(got)
        raise


def _expected(body: bytes, kind: type[M]) -> M:
    if not body:
        raise DaemonLostError("the daemon closed the connection")
    reply = messages.decode(body, messages.ControlReply)
    if isinstance(reply, messages.Refused):
        raise UnavailableError(reply.reason)
    if not isinstance(reply, kind):
        raise MalformedError(f"the daemon sent {type(reply).__name__}, not {kind.__name__}")
    return reply


def map_arena(fds: list[int], nbytes: int) -> ArenaView:
    try:
        if len(fds) != 1:
            raise DaemonLostError(f"the daemon sent {len(fds)} descriptors with its welcome, not 1")
        if not may_map(nbytes):
            raise UnavailableError(
                f"the limit on address space (ulimit -v) is too low to map {nbytes >> 20} MiB"
            )
        return ArenaView.attach(fds[0], nbytes)
    except OSError as e:  # e.g. a limit on this process (ulimit -v)
        raise UnavailableError(f"the daemon's memory cannot be mapped here: {e}") from e
    finally:
        close_all(fds)


def check_owner(control_socket: socket.socket, where: str) -> None:
    """Check that the peer is our user's and sees our files: any process may bind the address.

    If this process may not inspect the daemon, the daemon's check of this process suffices: it
    refuses clients that it cannot inspect.

    Raises:
        NoDaemonError: the peer is another user's process, or sees other files.
    """
    pid, uid = peer_of(control_socket)
    shown = where.replace(chr(0), "@")
    if uid != os.getuid():
        raise NoDaemonError(f"a process of user {uid} listens at {shown}, not a daemon of yours")
    if known_apart(pid):
        raise NoDaemonError(f"the daemon at {shown} sees other files than this process")


@contextmanager
def pidfd_of(pid: int) -> Iterator[tuple[int, ...]]:
    """Yield (pidfd,) of process `pid`; () if `pid` is 0 or gone, or the system has no pidfds."""
    fds: list[int] = []
    if pid:
        with suppress(OSError, AttributeError):
            fds.append(os.pidfd_open(pid))
    try:
        yield tuple(fds)
    finally:
        close_all(fds)
