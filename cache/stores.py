"""Stores: how bytes are had from each kind of storage. One class a kind, one face (`Store`).

Local files are read with `pread` straight into the caller's buffers; s3, gs, hdfs and abfs go
through `pyarrow.fs`, http(s) and all else through fsspec, both imported when the first such address
is met (8 and 15 MB that a local dataset never pays). No retries here: `cache/source.py` has them.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from creel.cache.manifest import UNKNOWN
from creel.errors import SourceError

#: Schemes that pyarrow.fs reads and lists with its own clients.
ARROW = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})


@dataclass(frozen=True)
class Place:
    """One address. `keep`: it holds many objects; `whole`: it holds one, from its first byte on."""

    uri: str
    keep: bool = False
    whole: bool = False


class Run(NamedTuple):
    """Neighbouring bytes of one address, and the buffers they go to, which they fill."""

    offset: int
    length: int
    buffers: Sequence[memoryview]


class Store(Protocol):
    """One kind of storage."""

    def read(self, place: Place, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; of unknown length: the whole object."""

    def fill(self, place: Place, runs: Sequence[Run]) -> Iterator[int]:
        """Fill the buffers of one run after the other; after each, how often it opened anything."""


def open_store(uri: str) -> Store:
    """The store that a remote address leads to; its client is made now, no request is sent yet."""
    return _ArrowStore(uri) if uri.partition("://")[0] in ARROW else _FsspecStore(uri)


def _too_short(place: Place, length: int, got: int) -> SourceError:
    reason = f"ends {length - got} bytes before the manifest says"
    return SourceError(errno.ENODATA, reason, place.uri)


# --- local files ------------------------------------------------------------------------------


_PIECE_NBYTES = 1 << 20  # of a file that is not as long as it says


def read_file(path: str) -> bytes:
    """All bytes of a local file, however long it is, and without the price of a file object.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data = os.read(fd, size + 1)
        if len(data) == size > 0:
            return data
        parts = [data]  # more than 2 GiB, a file of /proc, or one that changes
        while parts[-1]:
            parts.append(os.read(fd, _PIECE_NBYTES))
        return b"".join(parts)
    finally:
        os.close(fd)


def path_of(uri: str) -> str:
    """The path of a local address."""
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


class LocalStore:
    """Files by path; `files` descriptors at most are kept open.

    A file of its own must be exactly as long as its object: else it is not the one that was listed.
    """

    def __init__(self, files: int) -> None:
        self._kept = _Kept(files)

    def close(self) -> None:
        """Close kept descriptors."""
        self._kept.close()

    def read(self, place: Place, offset: int, length: int) -> bytes:
        """See Store."""
        if length == UNKNOWN:
            return read_file(path_of(place.uri))
        with self._kept.open(path_of(place.uri), keep=place.keep) as (fd, _):
            _check_whole(fd, place, length)
            data = os.pread(fd, length, offset)
            while len(data) < length:
                more = os.pread(fd, length - len(data), offset + len(data))
                if not more:
                    raise _too_short(place, length, len(data))
                data += more
        return data

    def fill(self, place: Place, runs: Sequence[Run]) -> Iterator[int]:
        """See Store."""
        with self._kept.open(path_of(place.uri), keep=place.keep) as (fd, opens):
            _check_whole(fd, place, runs[0].length)
            for run in runs:
                got = _preadv(fd, run)
                if got < run.length:
                    raise _too_short(place, run.length, got)
                yield opens if run is runs[0] else 0

    def pieces(self, place: Place, pieces: Iterable[tuple[int, memoryview]]) -> int:
        """Fill buffers from an offset in the file each; how often it opened the file.

        Raises:
            OSError: one could not be read, or not all of it.
        """
        with self._kept.open(path_of(place.uri), keep=place.keep) as (fd, opens):
            for offset, part in pieces:
                if os.preadv(fd, [part], offset) != len(part):
                    raise _too_short(place, len(part), 0)
        return opens

    def whole(self, uri: str, length: int, part: memoryview) -> None:
        """`fill` for all of a file that holds one object, with little ado.

        Raises:
            OSError: it cannot be read, or has not so many bytes.
        """
        fd = os.open(path_of(uri), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != length:
                _check_whole(fd, Place(uri, whole=True), length)
            got = os.preadv(fd, [part], 0)
            if got < length:  # more than 2 GiB; or it is shorter now
                got += _preadv(fd, Run(got, length - got, [part[got:]]))
                if got < length:
                    raise _too_short(Place(uri), length, got)
        finally:
            os.close(fd)


def _check_whole(fd: int, place: Place, length: int) -> None:
    if place.whole and (size := os.fstat(fd).st_size) != length:
        reason = f"has {size} bytes, the manifest says {length}"
        raise SourceError(errno.ENODATA, reason, place.uri)


def _preadv(fd: int, run: Run) -> int:
    """Fill all buffers; bytes read, fewer than asked for only where the file ends."""
    done = os.preadv(fd, run.buffers, run.offset) if run.length else 0
    while 0 < done < run.length:
        more = os.preadv(fd, _after(run.buffers, done), run.offset + done)
        if not more:
            break
        done += more
    return done


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers once their first `done` bytes are full."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(done - len(buffer), 0)
    return rest


class _Kept:
    """Open descriptors, at most `limit` idle ones, least recently used out first.

    They are closed with it: a person who drops a dataset has nothing to close.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, list[int]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle).atexit = False

    @contextmanager
    def open(self, path: str, *, keep: bool) -> Iterator[tuple[int, int]]:
        """(descriptor, opens it took); nobody else uses it meanwhile, so none closes it."""
        fd = self._take(path) if keep else None
        opens = int(fd is None)
        if fd is None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        healthy = False
        try:
            yield fd, opens
            healthy = True
        finally:
            if keep and healthy:
                self._put(path, fd)
            else:
                os.close(fd)

    def close(self) -> None:
        with self._lock:
            _close_all(self._idle)
            self._count = 0

    def _take(self, path: str) -> int | None:
        with self._lock:
            stack = self._idle.get(path)
            if not stack:
                return None
            fd = stack.pop()
            self._count -= 1
            if not stack:
                del self._idle[path]
            return fd

    def _put(self, path: str, fd: int) -> None:
        with self._lock:
            self._idle.setdefault(path, []).append(fd)
            self._idle.move_to_end(path)
            self._count += 1
            old = self._evict() if self._count > self._limit else None
        if old is not None:
            os.close(old)

    def _evict(self) -> int:
        path, stack = next(iter(self._idle.items()))
        self._count -= 1
        fd = stack.pop()
        if not stack:
            del self._idle[path]
        return fd


def _close_all(idle: OrderedDict[str, list[int]]) -> None:
    while idle:
        for fd in idle.popitem()[1]:
            os.close(fd)


# --- object stores and the rest ---------------------------------------------------------------


def _copy(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Spread `data` over the buffers; numpy copies without the interpreter lock."""
    at = 0
    for buffer in buffers:
        target = np.frombuffer(buffer, np.uint8)
        np.copyto(target, np.frombuffer(data[at : at + len(buffer)], np.uint8))
        at += len(buffer)


class _ArrowStore:
    """pyarrow.fs: one client for a scheme and host. Opening asks for the size (HEAD), then GET."""

    def __init__(self, uri: str) -> None:
        from pyarrow import fs

        parts = urlsplit(uri)
        query = f"?{parts.query}" if parts.query else ""
        self._fs, _ = fs.FileSystem.from_uri(f"{parts.scheme}://{parts.netloc}/{query}")
        self._prefix = "" if parts.scheme in {"hdfs", "viewfs"} else _bucket(parts.netloc)

    def _path(self, uri: str) -> str:
        return self._prefix + unquote(urlsplit(uri).path)

    def read(self, place: Place, offset: int, length: int) -> bytes:
        """See Store."""
        with self._fs.open_input_file(self._path(place.uri)) as f:
            if length == UNKNOWN:
                whole: bytes = f.readall()
                return whole
            f.seek(offset)  # read_at would cost gs a third request
            data: bytes = f.read(length)
        if len(data) < length:
            raise _too_short(place, length, len(data))
        return data

    def fill(self, place: Place, runs: Sequence[Run]) -> Iterator[int]:
        """See Store."""
        opens = 1
        with self._fs.open_input_file(self._path(place.uri)) as f:
            for run in runs:
                f.seek(run.offset)
                for buffer in run.buffers:
                    got = f.readinto(buffer) if len(buffer) else 0
                    if got < len(buffer):
                        raise _too_short(place, len(buffer), got)
                yield opens
                opens = 0


def _bucket(netloc: str) -> str:
    return netloc.rpartition("@")[2]


class _FsspecStore:
    """fsspec: one request an object, a range request where the range is known."""

    def __init__(self, uri: str) -> None:
        try:
            import fsspec
        except ImportError as e:
            raise SourceError(errno.ENOSYS, "needs `pip install creel[http]`", uri) from e
        self._fs, _ = fsspec.core.url_to_fs(uri)

    def read(self, place: Place, offset: int, length: int) -> bytes:
        """See Store."""
        if length == 0:
            return b""
        if length == UNKNOWN:
            whole: bytes = self._fs.cat_file(place.uri)
            return whole
        data: bytes = self._fs.cat_file(place.uri, start=offset, end=offset + length)
        if len(data) > length:  # a server that ignores ranges sends everything
            data = data[offset : offset + length]
        if len(data) < length:
            raise _too_short(place, length, len(data))
        return data

    def fill(self, place: Place, runs: Sequence[Run]) -> Iterator[int]:
        """See Store."""
        for run in runs:
            _copy(memoryview(self.read(place, run.offset, run.length)), run.buffers)
            yield 1
