"""The memory of a store of decoded samples: its memfd, the lock on it, and its transfers."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from creel.cache.memory.memfd import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, Descriptor, memfd

#: Bytes of the words, before the index.
WORDS_NBYTES = 4096
#: The first words: where the next sample goes, and the bytes of memory that are taken.
END, USED = range(2)
PAGE_NBYTES = 4096
#: Bytes of the memfd, which takes memory only where it was written.
_PLACES_NBYTES = 1 << 45
#: Most buffers of one system call (Linux).
_MOST_BUFFERS = 1000
#: Longest wait for the lock, which is held for microseconds, and the pause between two attempts.
_LOCK_S, _PAUSE_S = 1.0, 0.0002


class Words(Protocol):
    """int64 words that several processes read and write."""

    def __getitem__(self, number: int, /) -> int: ...

    def __setitem__(self, number: int, word: int, /) -> None: ...


def index_nbytes(samples: int) -> int:
    """Return the bytes of a store without samples."""
    return -(-(WORDS_NBYTES + 8 * samples) // PAGE_NBYTES) * PAGE_NBYTES


def first_words(samples: int) -> bytes:
    """Return END and USED of a store without samples."""
    return struct.pack("<qq", *[index_nbytes(samples)] * 2)


def new_memory(samples: int, name: str = "creel-decoded") -> Descriptor:
    """Make the memfd of a store without samples.

    Raises:
        OSError: there is no memory for its index.
    """
    import fcntl

    own = Descriptor(memfd(name, sealable=True))
    first = index_nbytes(samples)
    os.ftruncate(own.fd, _PLACES_NBYTES)
    os.posix_fallocate(own.fd, 0, first)  # later accesses of the mapping cannot fail
    os.pwrite(own.fd, first_words(samples), 8 * END)
    fcntl.fcntl(own.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return own


class Locked:
    """Inside the `with`, no other thread or process changes the store.

    Raises:
        TimeoutError: a process that was stopped holds the lock.
    """

    def __init__(self, own: Descriptor, lock: threading.Lock) -> None:
        """`lock`: this process's own."""
        self._own, self._lock = own, lock

    def __enter__(self) -> None:
        deadline = time.monotonic() + _LOCK_S
        if not self._lock.acquire(timeout=_LOCK_S):
            raise TimeoutError("another thread has the lock")
        while not self._got():
            if time.monotonic() > deadline:
                self._lock.release()
                raise TimeoutError("another process has the lock")
            time.sleep(_PAUSE_S)

    def _got(self) -> bool:
        """Take the lock, which the system frees when the process ends, whatever it was doing."""
        import fcntl  # missing on Windows, where this module is imported as well

        try:
            fcntl.lockf(self._own.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError as e:
            if e.errno not in {errno.EACCES, errno.EAGAIN}:
                self._lock.release()
                raise
            return False
        return True

    def __exit__(self, *_: object) -> None:
        import fcntl

        fcntl.lockf(self._own.fd, fcntl.LOCK_UN, 1)
        self._lock.release()


def transfer(call: Callable[..., int], fd: int, buffers: Sequence[Any], place: int) -> None:
    """Read or write all bytes of the buffers, by `os.preadv` or `os.pwritev`.

    Raises:
        OSError: the system refuses, or there is less.
    """
    views = [memoryview(one).cast("B") for one in buffers if memoryview(one).nbytes]
    while views:
        done = call(fd, views[:_MOST_BUFFERS], place)
        if done <= 0:
            raise OSError("fewer bytes than expected")
        place += done
        while views and done >= views[0].nbytes:
            done -= views.pop(0).nbytes
        if done:
            views[0] = views[0][done:]
