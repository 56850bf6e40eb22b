"""memfds, the owner of a descriptor, and mappings that hold none.

A Python built against a glibc older than 2.27 (conda's; uv's before July 2026) has no
`os.memfd_create` and no seals in `fcntl`, even if the system has them. The numbers are Linux's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from creel.system.python_open import python_open

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
#: Linux 5.1: later mappings of the descriptor are read-only.
F_SEAL_FUTURE_WRITE = 16
_ALL_SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
_CLOEXEC, _ALLOW_SEALING = 1, 2
_MAP_FIXED = 0x10
#: Of fallocate(2): the file keeps its size.
_PUNCH_HOLE = 0x02 | 0x01
_READ_WRITE = getattr(mmap, "PROT_READ", 0) | getattr(mmap, "PROT_WRITE", 0)  # not on Windows
#: Address ranges of mappings that failed: the kernel may have given some of them to others since.
_lost: list[mmap.mmap] = []


class Descriptor:
    """Owns a descriptor, which is closed when nobody refers to this object any more.

    There is no other way to close it. Whoever uses the number keeps a reference meanwhile, so that
    no thread can read or write a file that was given the number since. At exit nothing is closed:
    other threads run on until the process ends. The process may have closed the number itself, as
    programs that become daemons do with all numbers; then it is not closed again.
    """

    __slots__ = ("__weakref__", "_file", "fd")

    def __init__(self, fd: int) -> None:
        self._file = _identity(fd)
        self.fd = fd

    @property
    def valid(self) -> bool:
        """Whether the number still stands for this file: ask before writing to it."""
        with suppress(OSError):
            return _identity(self.fd) == self._file
        return False

    def __reduce__(self) -> tuple[object, ...]:
        """Give a process that is being spawned a descriptor of the same file."""
        from multiprocessing.context import get_spawning_popen
        from multiprocessing.reduction import DupFd

        popen: Any = get_spawning_popen()
        given = DupFd(self.fd)
        popen.__dict__.setdefault("creel_descriptors", []).append(self)  # which uses the number
        return _received, (given,)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends() and hasattr(self, "fd") and self.valid:
            os.close(self.fd)


def _received(given: Any) -> Descriptor:
    return Descriptor(given.detach())


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def mapped(
    fd: int,
    nbytes: int,
    prot: int = _READ_WRITE,
    flags: int = getattr(mmap, "MAP_SHARED", 0),
    *,
    offset: int = 0,
    kind: type[mmap.mmap] | None = None,
) -> mmap.mmap:
    """Map `nbytes` > 0 of a file. The mapping holds no descriptor; the caller keeps `fd`.

    `mmap.mmap(fd)` would duplicate the descriptor, and close that number when the mapping ends.

    Args:
        offset: of the first byte, which begins a page.
        kind: of the mapping, if not `mmap.mmap` itself.

    Raises:
        OSError: it cannot be mapped.
        ValueError: the file is shorter.
    """
    if os.fstat(fd).st_size < offset + nbytes:
        raise ValueError(f"the file has no {nbytes} bytes from {offset} on")
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = (kind or mmap.mmap)(-1, nbytes, flags=anonymous, prot=prot)  # owns the addresses
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    if _libc_mmap()(address, nbytes, prot, flags | _MAP_FIXED, fd, offset) != address:
        number = ctypes.get_errno()
        _lost.append(memory)
        raise OSError(number, os.strerror(number))
    return memory


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give back the memory, or the blocks, of a part of a file; it then reads as zeros.

    Raises:
        OSError: the file system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.fallocate(ctypes.c_int(fd), _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))
        != 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _libc_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    integer = ctypes.c_int
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long),
    )
    return function


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
        with python_open(fd, "wb", closefd=False) as file:
            write(file)
        fcntl.fcntl(fd, F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _of_libc(name: bytes, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.memfd_create(name, flags) if hasattr(libc, "memfd_create") else -1
    if fd < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return int(fd)
