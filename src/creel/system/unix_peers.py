"""The process at the other end of a unix socket, and whether both see the same files.

A path identifies a file only within a mount namespace and a root directory, and a uid identifies a
user only within a user namespace. Abstract addresses belong to a network namespace, which processes
with different files may share (Slurm's job_container, PrivateTmp, containers on the host's
network). The kernel is asked which files the peer sees, not the peer.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from creel.system.python_open import text_of

#: (device, inode) of mount namespace, user namespace and root directory (None: this kernel has no
#: such file), and the number of the mount that has the root directory.
View: TypeAlias = tuple[tuple[int, int] | str | None, ...]

_SEEN = ("ns/mnt", "ns/user", "root")
_SO_PEERPIDFD = 77  # Linux 6.5 (asm-generic/socket.h); Python has no name for it

# linux/sock_diag.h, linux/unix_diag.h: ask the kernel about one socket.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_UDIAG_SHOW_UID = 0x40  # Linux 5.3
_UNIX_DIAG_UID = 7
_DIAG_HEADER_NBYTES = 32  # nlmsghdr (16) and unix_diag_msg (16)


class Peer(NamedTuple):
    """The process that connected or listened, as numbered by this process's PID namespace."""

    pid: int  # 0 if its PID namespace cannot be seen from here
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer of a connection, as the kernel recorded it (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return Peer(pid, uid)


def view_of(pid: int | str = "self") -> View:
    """Return what determines the files that a process sees under a path.

    Raises:
        OSError: the process cannot be inspected, or is gone; or there is no /proc.
    """
    seen = *(_identity(f"/proc/{pid}/{name}") for name in _SEEN), _mount(f"/proc/{pid}/root")
    Path(f"/proc/{pid}").stat()  # the files are also missing once the process is gone
    return seen


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _mount(path: str) -> str:
    """Return the mount that a path leads to; a directory bound elsewhere is on another mount.

    Mounts below it may differ.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = text_of(f"/proc/self/fdinfo/{fd}").splitlines()
    finally:
        os.close(fd)
    return next((line for line in lines if line.startswith("mnt_id:")), "")


def known_apart(pid: int) -> bool:
    """Whether a process is known to see other files than this one."""
    with suppress(OSError):
        return view_of(pid) != view_of()
    return False


def why_apart(connection: socket.socket) -> str:
    """Reason not to trust that the peer sees the same files as this process; "" if it does.

    A process may pass its connection on and end, and its pid may be reused. So the process must
    still exist after it was inspected, if the kernel can tell.
    """
    pid = peer_of(connection).pid
    if pid == 0:
        return "it is in another PID namespace"
    try:
        pidfd = _pidfd_of(connection)
        try:
            same = view_of(pid) == view_of()
            ended = pidfd >= 0 and bool(select.select([pidfd], [], [], 0)[0])
        finally:
            if pidfd >= 0:
                os.close(pidfd)
    except OSError as e:
        return f"process {pid} cannot be inspected: {e.strerror}"
    if ended:
        return f"process {pid} has ended"
    return "" if same else f"process {pid} has another mount or user namespace, or root directory"


def _pidfd_of(connection: socket.socket) -> int:
    """Return a pidfd of the peer process; -1 before Linux 6.5."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
    except OSError as e:
        if e.errno in {errno.ENOPROTOOPT, errno.EOPNOTSUPP}:
            return -1
        raise  # the process has ended
    return int(struct.unpack("i", raw)[0])


def listener_at(address: str) -> Peer | None:
    """Return the process that listens at this SOCK_SEQPACKET address; None if none accepts."""
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as connection:
        connection.connect(address)
        return peer_of(connection)
    return None


def owner_of(address: str) -> int | None:
    """Return the uid of the owner of this abstract SOCK_SEQPACKET address; None if unknown."""
    peer = listener_at(address)
    if peer is not None:
        return peer.uid
    # No process listens, or its backlog is full. The kernel still knows the owner.
    with suppress(OSError, ValueError, struct.error):
        inode = _bound().get(address)
        return None if inode is None else _owner_of_socket(inode)
    return None


def _bound() -> dict[str, int]:
    """Return the inodes of all abstract SOCK_SEQPACKET addresses of this network namespace."""
    inodes = {}
    for line in text_of("/proc/net/unix", errors="replace").splitlines()[1:]:
        words = line.split(maxsplit=7)
        # Accepted connections have the same name, but are not in state 1, "unconnected".
        if words[4:6] == ["0005", "01"] and len(words) == 8 and words[7].startswith("@"):
            inodes["\0" + words[7][1:]] = int(words[6])
    return inodes


def bound(prefix: str, suffix: str) -> list[str]:
    """Return abstract SOCK_SEQPACKET addresses with this prefix and suffix and text in between.

    [] if they cannot be listed.
    """
    min_length = len(prefix) + len(suffix)
    with suppress(OSError, ValueError):
        addresses = (a for a in _bound() if a.startswith(prefix) and a.endswith(suffix))
        return sorted(a for a in addresses if len(a) > min_length)
    return []


def _owner_of_socket(inode: int) -> int | None:
    """Return the uid of the owner of a unix socket, or None if this kernel does not say."""
    anything = 0xFFFFFFFF  # any state; any cookie
    request = struct.pack(
        "=BBHIIIII", socket.AF_UNIX, 0, 0, anything, inode, _UDIAG_SHOW_UID, anything, anything
    )
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, 1, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(1.0)
        diag.send(header + request)
        answer = diag.recv(8192)
    if struct.unpack_from("=IH", answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: the socket is gone
    at = _DIAG_HEADER_NBYTES
    while at + 4 <= len(answer):
        length, kind = struct.unpack_from("=HH", answer, at)
        if kind == _UNIX_DIAG_UID:
            return int(struct.unpack_from("=I", answer, at + 4)[0])
        at += max(-(-length // 4) * 4, 4)
    return None
