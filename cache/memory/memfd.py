"""memfds and their seals, even for a Python that lacks them.

A Python built against a glibc older than 2.27 (conda's; uv's before July 2026) has no
`os.memfd_create` and no seals in `fcntl`, even if the system has them. The numbers are Linux's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import BinaryIO

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
#: Linux 5.1: later mappings of the descriptor are read-only.
F_SEAL_FUTURE_WRITE = 16
_ALL_SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
_CLOEXEC, _ALLOW_SEALING = 1, 2


def memfd(name: str, *, sealable: bool = False) -> int:
    """Create an empty memfd; the system frees it with its last descriptor and mapping.

    Raises:
        OSError: the system gives none.
    """
    flags = _CLOEXEC | (_ALLOW_SEALING if sealable else 0)
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _of_libc(name.encode(), flags)


def sealed_memfd(name: str, nbytes: int) -> int:
    """Create a memfd of `nbytes` that can neither shrink nor grow, so no access raises SIGBUS."""
    import fcntl

    fd = memfd(name, sealable=True)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sealed_file(name: str, write: Callable[[BinaryIO], object]) -> int:
    """Create a memfd that `write` fills, and that nobody can change afterwards.

    Raises:
        OSError: there is no memory for it.
    """
    import fcntl

    fd = memfd(name, sealable=True)
    try:
        with open(fd, "wb", closefd=False) as file:
            write(file)
        fcntl.fcntl(fd, F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _of_libc(name: bytes, flags: int) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.memfd_create(name, flags) if hasattr(libc, "memfd_create") else -1
    if fd < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return int(fd)
