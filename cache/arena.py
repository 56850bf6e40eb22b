"""The sample arena: one memfd that the daemon fills and every client maps read-only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

from creel.cache.board import sealed_memfd
from creel.errors import MalformedError

_F_SEAL_SHRINK = 0x2
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module has no name for it
_PIECE = 16 << 20  # bytes prefaulted per system call: 4 ms at 4.4 GB/s (reference/performance.md)


class Arena:
    """The daemon's side: creates the memory, maps it read-write, owns the descriptor `fd`.

    `view` is a writable memoryview of all `nbytes`, `array` the same as (nbytes,) uint8.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `fd` (a sealed memfd of `nbytes`) read-write and own it from now on."""
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        _advise(self._map, "MADV_HUGEPAGE", "MADV_DONTDUMP")
        self.view = memoryview(self._map)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """A fresh arena of `nbytes` > 0. Nobody who gets its descriptor can write, or shrink it.

        Memory is taken as it is touched; `prefault` takes it all ahead of use.
        """
        fd = sealed_memfd("creel-arena", nbytes)
        try:
            arena = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        _seal_future_write(fd)
        return arena

    def prefault(self, stop: threading.Event) -> int:
        """Have the system reserve and zero all pages, in small pieces, until done or `stop` is set.

        Meant for a thread of its own; writers may be at work at the same time. Returns the bytes
        reserved: fewer than `nbytes` when stopped, or when the machine has no more memory to give.
        """
        done = 0
        while done < self.nbytes and not stop.is_set():
            piece = min(_PIECE, self.nbytes - done)
            try:
                os.posix_fallocate(self.fd, done, piece)
            except OSError as e:
                if e.errno in {errno.ENOSPC, errno.ENOMEM, errno.EBADF, errno.EOPNOTSUPP}:
                    break
                raise
            done += piece
        return done

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last mapping and view of it do."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        _release(self)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ArenaView:
    """A client's side: the whole arena, read-only. `view` and `array` as in `Arena`."""

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        """Use `attach`."""
        self.nbytes = nbytes
        self._map = mapping
        self.view = memoryview(mapping)
        self.array: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> ArenaView:
        """Map the arena behind `fd`; the caller keeps (and closes) `fd`.

        Raises:
            MalformedError: it is smaller than `nbytes`, or could shrink: reading it could kill us.
        """
        if os.fstat(fd).st_size < nbytes or not _seals(fd) & _F_SEAL_SHRINK:
            raise MalformedError(f"the descriptor is no sealed arena of {nbytes} bytes")
        return cls(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), nbytes)

    def rows(self, stride: int) -> NDArray[np.uint8]:
        """(n, stride) view: row i is the record at offset i * stride; the rest is cut off."""
        n = self.nbytes // stride
        return self.array[: n * stride].reshape(n, stride)

    def close(self) -> None:
        """Drop the mapping, or leave it to the last view that is still in use."""
        _release(self)


def _release(holder: Arena | ArenaView) -> None:
    holder.array = np.empty(0, np.uint8)
    with contextlib.suppress(BufferError):  # somebody still has a view: the mapping stays for it
        holder.view.release()
        holder._map.close()  # noqa: SLF001  (both classes are of this module)


def _advise(mapping: mmap.mmap, *names: str) -> None:
    """Give advice where this system knows it."""
    for name in names:
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(getattr(mmap, name))


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd at all
        return 0


def _seal_future_write(fd: int) -> None:
    """No new writable mapping from now on; before Linux 5.1 clients are merely trusted."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
