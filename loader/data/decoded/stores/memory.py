"""The memory of a store of decoded samples: its part of a memfd, the lock on it, and its transfers.

The stores of one process lie in one memfd, so that hundreds of datasets take one descriptor. Stores
that other processes are to find have a memfd each.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from creel.cache.memory.memfd import (
    F_ADD_SEALS,
    F_SEAL_GROW,
    F_SEAL_SHRINK,
    Descriptor,
    memfd,
    punch_hole,
)
from creel.system import transfers
from creel.system.forks import reset_in_child

#: Bytes of the words, before the index.
WORDS_NBYTES = 4096
#: The first words: where the next sample goes, and the bytes of memory that are taken.
END, USED = range(2)
#: Bytes of the samples that were decoded to be kept, and their number.
DECODED, DECODES = 8, 9
PAGE_NBYTES = 4096
#: Bytes of an extent, which takes memory only where it was written, and extents of a memfd.
_PLACES_NBYTES, _EXTENTS = 1 << 45, 1 << 17
#: Longest wait for the lock, which is held for microseconds, and the pause between two attempts.
_LOCK_S, _PAUSE_S = 1.0, 0.0002


class Extent(NamedTuple):
    """The part of a memfd that belongs to one store.

    Attributes:
        descriptor: of the memfd.
        first: its first byte there; places are counted from it.
    """

    descriptor: Descriptor
    first: int = 0

    @property
    def fd(self) -> int:
        return self.descriptor.fd

    def give_back(self, first: int, end: int) -> int:
        """Give back the memory of the whole pages between two places; return how many bytes.

        Raises:
            OSError: a file system without holes.
        """
        first, end = -(-first // PAGE_NBYTES) * PAGE_NBYTES, end // PAGE_NBYTES * PAGE_NBYTES
        if end <= first:
            return 0
        punch_hole(self.fd, self.first + first, end - first)
        return end - first


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


def new_memory(samples: int, name: str = "creel-decoded") -> Extent:
    """Make a memfd for one store, without samples.

    Raises:
        OSError: there is no memory for its index.
    """
    return _begun(Extent(_new_memfd(name, 1)), samples)


def memory_of_process(samples: int) -> Extent:
    """Return the memory of another store of this process, without samples.

    Raises:
        OSError: as `new_memory`.
    """
    return _begun(_shared.next(), samples)


def _new_memfd(name: str, extents: int) -> Descriptor:
    import fcntl

    own = Descriptor(memfd(name, sealable=True))
    os.ftruncate(own.fd, extents * _PLACES_NBYTES)
    fcntl.fcntl(own.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return own


def _begun(own: Extent, samples: int) -> Extent:
    # Later accesses of the mapping cannot fail.
    os.posix_fallocate(own.fd, own.first, index_nbytes(samples))
    os.pwrite(own.fd, first_words(samples), own.first + 8 * END)
    return own


class _SharedMemfd:
    """The memfd of this process's stores. A child has its own for stores that it opens."""

    def __init__(self) -> None:
        self.reset_for_process()
        reset_in_child(self)

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()  # reentrant: a finaliser may open a store
        self._own: Descriptor | None = None
        self._extents = 0  # that were given out: none is used again

    def next(self) -> Extent:
        """Return an extent that no store has had; raises OSError if there is no memfd."""
        with self._lock:
            if self._own is None or self._extents == _EXTENTS:
                self._own, self._extents = _new_memfd("creel-decoded", _EXTENTS), 0
            self._extents += 1
            return Extent(self._own, (self._extents - 1) * _PLACES_NBYTES)


_shared = _SharedMemfd()


class Locked:
    """Inside the `with`, no other thread or process changes the store.

    Raises:
        TimeoutError: a process that was stopped holds the lock.
    """

    def __init__(self, own: Extent, lock: threading.Lock) -> None:
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
            fcntl.lockf(self._own.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._own.first)
        except OSError as e:
            if e.errno not in {errno.EACCES, errno.EAGAIN}:
                self._lock.release()
                raise
            return False
        return True

    def __exit__(self, *_: object) -> None:
        import fcntl

        fcntl.lockf(self._own.fd, fcntl.LOCK_UN, 1, self._own.first)
        self._lock.release()


def transfer(call: Callable[..., int], own: Extent, buffers: Sequence[Any], place: int) -> None:
    """Read or write all bytes of the buffers, by `os.preadv` or `os.pwritev`.

    Raises:
        OSError: the system refuses, or there is less.
    """
    nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
    if transfers.transfer(call, own.fd, buffers, own.first + place) < nbytes:
        raise OSError("fewer bytes than expected")
