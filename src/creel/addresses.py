"""Addresses where a user's daemons listen, and how their clients find them.

The first address is derived from uid, daemon name and the process's view of the file system, so
that processes that see other files find, or start, another daemon. Any user may bind it. If another
user has bound it, a second address is used: it contains a secret from a file that only its owner
can read (in XDG_RUNTIME_DIR).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from creel.errors import NoDaemonError, UnavailableError
from creel.messages import control_address
from creel.system.unix_peers import bound, listener_at, owner_of, view_of

_SECRET = "creel-secret"  # noqa: S105  the name of a file


def first_address(name: str) -> str:
    """Return the address of this user's daemon for processes that see the same files.

    Raises:
        UnavailableError: it is unknown which files this process sees.
    """
    return control_address(os.getuid(), name, _digest())


def second_address(name: str, *, make: bool = False) -> str | None:
    """Return the address to use if another user holds the first one; None without a secret.

    Args:
        make: whether to make a missing secret.

    Raises:
        UnavailableError: as `first_address`.
    """
    folder = runtime_folder()
    secret = None if folder is None else _secret(folder / _SECRET, make=make)
    return None if secret is None else control_address(os.getuid(), name, _digest(secret))


def runtime_folder() -> Path | None:
    """Return XDG_RUNTIME_DIR if only this user can read and write there, else None."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    with suppress(OSError, ValueError):
        folder = Path(named or "")
        if folder.is_absolute() and _is_private(folder.stat(), stat.S_ISDIR):
            return folder
    return None


def taken(name: str, uid: int | None) -> NoDaemonError:
    """Return the error to raise if user `uid` holds the first address and there is no second."""
    holder = "somebody" if uid is None else f"user {uid}"
    return NoDaemonError(
        f"{holder} holds the address of your daemon {name!r}, and there is no second one, since"
        " XDG_RUNTIME_DIR is not a private folder of yours: choose another daemon.name"
    )


def held_by_another(name: str) -> int | None:
    """Return the uid of another user who holds the first address, else None.

    Raises:
        UnavailableError: as `first_address`.
    """
    uid = owner_of(first_address(name))
    return None if uid == os.getuid() else uid


def elsewhere(name: str) -> list[int]:
    """Return pids of this user's daemons of that name that see other files than this process."""
    pids = []
    before, after = control_address(os.getuid(), name, "*").split("*")
    ours = {first_address(name), second_address(name)}
    for address in set(bound(before, after)) - ours:
        peer = listener_at(address)
        if peer is not None and peer.uid == os.getuid():
            pids.append(peer.pid)
    return pids


def startable(name: str) -> bool:
    """Whether the address for a daemon of that name is free.

    Raises:
        UnavailableError: as `first_address`.
    """
    uid = owner_of(first_address(name))
    if uid in {None, os.getuid()}:
        return uid is None
    second = second_address(name)
    return runtime_folder() is not None and (second is None or owner_of(second) is None)


def _digest(secret: str = "") -> str:
    try:
        seen, pid = view_of(), Path("/proc/self").readlink().name
    except OSError as e:
        raise UnavailableError(
            f"creel needs /proc to know which daemon sees the same files: {e}"
        ) from e
    if pid != str(os.getpid()):  # a daemon's pid would name another process there
        raise UnavailableError(
            "creel needs /proc to know which daemon sees the same files, and the one that is"
            " mounted is that of another PID namespace"
        )
    return hashlib.blake2b(f"{seen}{secret}".encode(), digest_size=8).hexdigest()


def _secret(path: Path, *, make: bool) -> str | None:
    """Return this user's secret; None if there is no file, or other users could read it."""
    with suppress(OSError):
        if make and not path.exists():
            _make_secret(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _is_private(os.fstat(fd), stat.S_ISREG):
                return os.read(fd, 64).hex() or None
        finally:
            os.close(fd)
    return None


def _make_secret(path: Path) -> None:
    """Create the file atomically; the first of several writers wins."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_hex(16).encode())
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        draft.unlink()


def _is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return (
        bool(is_kind(status.st_mode))
        and status.st_uid == os.getuid()
        and not status.st_mode & 0o077
    )
