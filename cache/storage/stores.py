"""Stores: one interface (`Store`) to each kind of storage, and the store of local files.

Local files are read with `pread` straight into the caller's buffers; `cache/storage/remote.py` has
the others. No retries here: `cache/storage/source.py` has them.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from creel.cache.storage import version
from creel.cache.storage.manifest import UNKNOWN
from creel.errors import SourceError


@dataclass(frozen=True)
class StoredFile:
    """One file. `keep`: it has many objects; `whole`: it is one object, from byte 0 on.

    `min_nbytes`: smallest size in bytes, as far as the manifest knows; the exact size if `whole`.
    """

    uri: str
    keep: bool = False
    whole: bool = False
    min_nbytes: int = UNKNOWN


class Run(NamedTuple):
    """Adjacent bytes of one file, and the buffers to fill with them."""

    offset: int
    length: int
    buffers: Sequence[memoryview]


class Filled(NamedTuple):
    """A run that was read: number of opens for it, and the version read."""

    opens: int
    version: int


class Store(Protocol):
    """One kind of storage."""

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """Return `length` bytes from `offset` on (UNKNOWN: the whole object), and their version.

        versioned: whether the version is needed, which may cost a request; else it may be UNKNOWN,
        and a file that is written to meanwhile is read as the user's own code would.
        """

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        """Fill the buffers of one run after the other."""

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        """Return the current version of each address, or the exception instead."""

    def size(self, uri: str) -> int | None:
        """Return the bytes of a file; None where the storage does not say."""

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """Yield the name below `root`, and the size or UNKNOWN, of each file there."""


def too_short(uri: str, length: int, got: int) -> SourceError:
    """Error for `got` bytes where `length` were requested."""
    return SourceError(
        errno.ENODATA, f"is {length - got} bytes shorter than the manifest says", uri
    )


def wrong_size(uri: str, length: int, size: int) -> SourceError:
    """Error for a whole file whose size is not the object's: it is another file."""
    return SourceError(errno.ENODATA, f"has {size} bytes, the manifest says {length}", uri)


def check_size(stored: StoredFile, size: int, length: int) -> None:
    """Raise unless a file of `size` bytes can be the listed one."""
    if stored.whole and size != length:
        raise wrong_size(stored.uri, length, size)
    if size < stored.min_nbytes:
        raise too_short(stored.uri, stored.min_nbytes, size)


# --- local files ------------------------------------------------------------------------------


_PIECE_NBYTES = 1 << 20  # of a file that is not as long as its status says
_VECTOR = 1024  # most buffers of one read (IOV_MAX)
_TRIES = 3  # of a copy during which the file changed


def path_of(uri: str) -> str:
    """Return the path of a local address."""
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


def read_file(path: str) -> bytes:
    """Return all bytes of a local file of any length, without the cost of a file object.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _rest(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _rest(fd: int, size: int) -> bytes:
    """Return what follows in a file that should be `size` bytes."""
    data = os.read(fd, size + 1)
    if len(data) == size > 0:
        return data
    parts = [data]  # more than 2 GiB, a file of /proc, or one that changes
    while parts[-1]:
        parts.append(os.read(fd, _PIECE_NBYTES))
    return b"".join(parts)


def read_unchanged(uri: str) -> tuple[bytes, int]:
    """All bytes of a file and their version.

    Raises:
        OSError: it cannot be read, or is repeatedly written to.
    """
    for _ in range(_TRIES):
        now, file = time.time_ns(), _open(path_of(uri))
        try:
            data = _rest(file.fd, file.status.st_size)
            if not version.torn(file.status, os.fstat(file.fd)):
                return data, version.of_stat(file.status, now)
        finally:
            os.close(file.fd)
    raise SourceError(errno.EBUSY, "changed while it was read", uri)


class LocalStore:
    """Files by path; keeps at most `files` descriptors open.

    A file with one object must be exactly as long: else it is not the one that was listed.
    """

    def __init__(self, files: int) -> None:
        self._kept = _OpenFiles(files)

    def close(self) -> None:
        self._kept.close()

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        if length == UNKNOWN and versioned:
            return read_unchanged(stored.uri)
        if length == UNKNOWN:
            return read_file(path_of(stored.uri)), version.UNKNOWN
        now = time.time_ns()
        with self._kept.open(path_of(stored.uri), keep=stored.keep) as file:
            check_size(stored, file.status.st_size, length)
            data = os.pread(file.fd, length, offset)
            while len(data) < length:
                more = os.pread(file.fd, length - len(data), offset + len(data))
                if not more:
                    raise too_short(stored.uri, length, len(data))
                data += more
            return data, version.of_stat(file.status, now) if versioned else version.UNKNOWN

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        now = time.time_ns()
        with self._kept.open(path_of(stored.uri), keep=stored.keep) as file:
            check_size(stored, file.status.st_size, runs[0].length)
            before = file.status
            for run in runs:
                for _ in range(_TRIES):
                    got, after = _preadv(file.fd, run), os.fstat(file.fd)
                    if got < run.length:
                        raise too_short(stored.uri, run.length, got)
                    if not version.torn(before, after):
                        break
                    now, before = time.time_ns(), os.fstat(file.fd)
                else:
                    raise SourceError(errno.EBUSY, "changed while it was read", stored.uri)
                yield Filled(file.opens if run is runs[0] else 0, version.of_stat(before, now))

    def pieces(
        self, stored: StoredFile, pieces: Sequence[tuple[int, int, Sequence[memoryview]]]
    ) -> Filled:
        """Fill buffers from the file; a piece is an offset, its bytes, and the buffers for them.

        Raises:
            OSError: one could not be read, or not completely.
            TornError: the file changed meanwhile.
        """
        now = time.time_ns()
        with self._kept.open(path_of(stored.uri), keep=stored.keep) as file:
            for offset, length, buffers in pieces:
                if os.preadv(file.fd, buffers, offset) != length:
                    raise too_short(stored.uri, length, 0)
            if version.torn(file.status, os.fstat(file.fd)):
                raise TornError(errno.EBUSY, os.strerror(errno.EBUSY), stored.uri)
        return Filled(file.opens, version.of_stat(file.status, now))

    def single(self, uri: str, length: int, buffers: Sequence[memoryview]) -> int:
        """`fill` for a file that is one object, as a fast path; return the version.

        Raises:
            OSError: it cannot be read, or has another size.
            TornError: it changed meanwhile.
        """
        now = time.time_ns()
        fd = os.open(path_of(uri), os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = os.fstat(fd)
            if before.st_size != length:
                check_size(StoredFile(uri, whole=True), before.st_size, length)
            got = _preadv(fd, Run(0, length, buffers))
            if got < length:
                raise too_short(uri, length, got)
            if version.torn(before, os.fstat(fd)):
                raise TornError(errno.EBUSY, os.strerror(errno.EBUSY), uri)
        finally:
            os.close(fd)
        return version.of_stat(before, now)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        versions: list[int | Exception] = []
        for uri in uris:  # microseconds for each of a million: no calls but those there must be
            now = time.time_ns()
            try:
                path = path_of(uri) if uri.startswith("file:") else uri
                status = os.stat(path)  # noqa: PTH116  a Path for each costs
                versions.append(version.of_stat(status, now))
            except Exception as e:  # noqa: BLE001  a name with a zero byte is a ValueError
                versions.append(e)
        return versions

    def size(self, uri: str) -> int | None:
        return os.stat(path_of(uri)).st_size  # noqa: PTH116  as in `versions`

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store. One pass without a stat of any file, in the order of `sorted(os.walk(root))`.

        Links are followed; unreadable folders are skipped, as by os.walk.
        """
        cut = len(root.rstrip("/")) + 1
        for folder, _, files in sorted(os.walk(root, followlinks=True)):
            inner = folder[cut:]
            prefix = f"{inner}/" if inner else ""
            for name in sorted(files):
                yield prefix + name, UNKNOWN


class TornError(OSError):
    """A file changed while it was read: read it again."""


def _preadv(fd: int, run: Run) -> int:
    """Fill all buffers; return bytes read, fewer than requested only at the end of the file."""
    done = os.preadv(fd, run.buffers[:_VECTOR], run.offset) if run.length else 0
    while 0 < done < run.length:  # more buffers, or more than 2 GiB
        more = os.preadv(fd, _after(run.buffers, done)[:_VECTOR], run.offset + done)
        if not more:
            break
        done += more
    return done


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The rest of the buffers after their first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(done - len(buffer), 0)
    return rest


class _File(NamedTuple):
    """An open file: descriptor, status of the file its path names now, and the opens it took."""

    fd: int
    status: os.stat_result
    opens: int


class _Idle(NamedTuple):
    """A kept descriptor, and inode and device of its file."""

    fd: int
    file: tuple[int, int]


class _OpenFiles:
    """Open descriptors, at most `limit` idle ones, least recently used out first.

    They are closed with this object, so a dropped dataset needs no close. A descriptor whose path
    now names another file is not used again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, list[_Idle]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle).atexit = False

    @contextmanager
    def open(self, path: str, *, keep: bool) -> Iterator[_File]:
        """An open file; its descriptor is not shared meanwhile, so nothing else closes it."""
        file = (self._reuse(path) if keep else None) or _open(path)
        healthy = False
        try:
            yield file
            healthy = True
        finally:
            if keep and healthy:
                self._put(path, _Idle(file.fd, (file.status.st_ino, file.status.st_dev)))
            else:
                os.close(file.fd)

    def close(self) -> None:
        with self._lock:
            _close_all(self._idle)
            self._count = 0

    def _reuse(self, path: str) -> _File | None:
        """A kept descriptor of the file that the path now names; others of this path are closed."""
        while (idle := self._take(path)) is not None:
            try:
                status = os.stat(path)  # noqa: PTH116  a Path costs
            except BaseException:
                os.close(idle.fd)
                raise
            if (status.st_ino, status.st_dev) == idle.file:
                return _File(idle.fd, status, 0)
            os.close(idle.fd)
        return None

    def _take(self, path: str) -> _Idle | None:
        with self._lock:
            stack = self._idle.get(path)
            if not stack:
                return None
            idle = stack.pop()
            self._count -= 1
            if not stack:
                del self._idle[path]
            return idle

    def _put(self, path: str, idle: _Idle) -> None:
        with self._lock:
            self._idle.setdefault(path, []).append(idle)
            self._idle.move_to_end(path)
            self._count += 1
            old = self._evict() if self._count > self._limit else None
        if old is not None:
            os.close(old)

    def _evict(self) -> int:
        path, stack = next(iter(self._idle.items()))
        self._count -= 1
        fd = stack.pop().fd
        if not stack:
            del self._idle[path]
        return fd


def _open(path: str) -> _File:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _File(fd, os.fstat(fd), 1)
    except BaseException:
        os.close(fd)
        raise


def _close_all(idle: OrderedDict[str, list[_Idle]]) -> None:
    while idle:
        for fd, _ in idle.popitem()[1]:
            os.close(fd)
