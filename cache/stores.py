"""Stores: how bytes are had from each kind of storage. One class a kind, one face (`Store`).

Local files are read with `pread` straight into the caller's buffers; s3, gs, hdfs and abfs go
through `pyarrow.fs`, http(s) and all else through fsspec, both imported when the first such address
is met (8 and 15 MB that a local data set never pays). No retries here: `cache/source.py` has them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from creel.cache.manifest import UNKNOWN
from creel.errors import SourceError

_ARROW = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})


@dataclass(frozen=True)
class Range:
    """Neighbouring bytes of one address. `whole`: the address holds these bytes and no others."""

    uri: str
    offset: int
    length: int
    keep: bool
    whole: bool


class Store(Protocol):
    """One kind of storage."""

    def read(self, part: Range) -> bytes:
        """All bytes of a range; of unknown length: of the whole object."""

    def read_into(self, part: Range, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers in order with a range of their total length; opens it took."""


def open_store(uri: str) -> Store:
    """The store that a remote address leads to; its client is made now, no request is sent yet."""
    return _ArrowStore(uri) if uri.partition("://")[0] in _ARROW else _FsspecStore(uri)


def _too_short(part: Range, got: int) -> SourceError:
    reason = f"ends {part.length - got} bytes before the manifest says"
    return SourceError(errno.ENODATA, reason, part.uri)


# --- local files ------------------------------------------------------------------------------


class LocalStore:
    def __init__(self, files: int) -> None:
        self._kept = _Kept(files)

    def close(self) -> None:
        self._kept.close()

    def read(self, part: Range) -> bytes:
        path = _path(part.uri)
        if part.length == UNKNOWN:
            return Path(path).read_bytes()
        with self._kept.open(path, part.keep) as (fd, _):
            data = os.pread(fd, part.length, part.offset)
            while len(data) < part.length:
                more = os.pread(fd, part.length - len(data), part.offset + len(data))
                if not more:
                    raise _too_short(part, len(data))
                data += more
        return data

    def read_into(self, part: Range, buffers: Sequence[memoryview]) -> int:
        with self._kept.open(_path(part.uri), part.keep) as (fd, opens):
            if part.whole and (size := os.fstat(fd).st_size) != part.length:
                raise SourceError(
                    errno.ENODATA, f"has {size} bytes, the manifest says {part.length}", part.uri
                )
            got = _preadv(fd, buffers, part.offset, part.length)
        if got < part.length:
            raise _too_short(part, got)
        return opens


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


def _preadv(fd: int, buffers: Sequence[memoryview], offset: int, nbytes: int) -> int:
    """Fill all buffers; bytes read, fewer than `nbytes` only where the file ends."""
    done = os.preadv(fd, buffers, offset) if nbytes else 0
    while 0 < done < nbytes:
        more = os.preadv(fd, _after(buffers, done), offset + done)
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
    """Open descriptors, at most `limit` idle ones, least recently used out first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, list[int]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    @contextmanager
    def open(self, path: str, keep: bool) -> Iterator[tuple[int, int]]:
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
            fds = [fd for stack in self._idle.values() for fd in stack]
            self._idle.clear()
            self._count = 0
        for fd in fds:
            os.close(fd)

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

    def read(self, part: Range) -> bytes:
        with self._fs.open_input_file(self._path(part.uri)) as f:
            if part.length == UNKNOWN:
                data: bytes = f.readall()
                return data
            data = f.read_at(part.length, part.offset)
        if len(data) < part.length:
            raise _too_short(part, len(data))
        return data

    def read_into(self, part: Range, buffers: Sequence[memoryview]) -> int:
        if len(buffers) != 1:
            _copy(memoryview(self.read(part)), buffers)
            return 1
        with self._fs.open_input_file(self._path(part.uri)) as f:
            f.seek(part.offset)
            got = f.readinto(buffers[0]) if part.length else 0
        if got < part.length:
            raise _too_short(part, got)
        return 1


def _bucket(netloc: str) -> str:
    return netloc.rpartition("@")[2]


class _FsspecStore:
    """fsspec: one request an object, a range request where the range is known."""

    def __init__(self, uri: str) -> None:
        import fsspec

        self._fs, _ = fsspec.core.url_to_fs(uri)

    def read(self, part: Range) -> bytes:
        if part.length == 0:
            return b""
        if part.length == UNKNOWN:
            data: bytes = self._fs.cat_file(part.uri)
            return data
        data = self._fs.cat_file(part.uri, start=part.offset, end=part.offset + part.length)
        if len(data) > part.length:  # a server that ignores ranges sends everything
            data = data[part.offset : part.offset + part.length]
        if len(data) < part.length:
            raise _too_short(part, len(data))
        return data

    def read_into(self, part: Range, buffers: Sequence[memoryview]) -> int:
        _copy(memoryview(self.read(part)), buffers)
        return 1
