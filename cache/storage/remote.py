"""Remote stores: s3, gs, hdfs and abfs through `pyarrow.fs`, http(s) and others by fsspec.

Both are imported with the first such address (8 and 15 MB that local datasets save). Every request
ends within a deadline. No retries here: `cache/storage/source.py` has them.
"""

from __future__ import annotations

import asyncio
import errno
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np

from creel.cache.storage import version
from creel.cache.storage.manifest import UNKNOWN
from creel.cache.storage.stores import Filled, Run, Store, StoredFile, too_short, wrong_size
from creel.errors import SourceError

T = TypeVar("T")

#: Schemes that pyarrow.fs reads and lists with its own clients.
ARROW = frozenset({"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
#: Versions requested at a time: each is a round trip of hardly any bytes.
_AT_ONCE = 32
_S3_TRIES = 3  # pyarrow's AwsStandardS3RetryStrategy, which a client made from options has
#: Bytes per second below which an answer counts as none.
_SLOWEST_BPS = 16 << 10
#: HEAD statuses of servers that may still answer GET: no HEAD, or addresses signed for GET alone.
_NO_HEAD = frozenset({400, 403, 405, 501})
#: Status for the first byte of an empty file.
_NO_SUCH_RANGE = 416
_RANGE = re.compile(r"bytes (\d+)-.*")


def open_store(uri: str, deadline_s: float = 30.0) -> Store:
    """Make the store for a remote address, with its client; no request is sent yet.

    deadline_s: longest time without an answer to a request.
    """
    scheme = uri.partition("://")[0].lower()
    if scheme in {"gs", "gcs"}:
        return _GcsStore(uri, deadline_s)
    if scheme in ARROW:
        return _ArrowStore(uri, deadline_s)
    if scheme in {"http", "https"}:
        return _HttpStore(uri, deadline_s)
    return _FsspecStore(uri, deadline_s)


def _copy(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy `data` over the buffers, in order; numpy copies without the GIL."""
    at = 0
    for buffer in buffers:
        target = np.frombuffer(buffer, np.uint8)
        np.copyto(target, np.frombuffer(data[at : at + len(buffer)], np.uint8))
        at += len(buffer)


def _check_size(stored: StoredFile, size: int, length: int) -> None:
    """Raise unless a file of `size` bytes can be the listed one."""
    if stored.whole and size != length:
        raise wrong_size(stored.uri, length, size)
    if size < stored.min_nbytes:
        raise too_short(stored.uri, stored.min_nbytes, size)


def _each(job: Callable[[str], int], uris: Sequence[str]) -> list[int | Exception]:
    """The result or exception of `job` for each address, many at a time."""

    def one(uri: str) -> int | Exception:
        try:
            return job(uri)
        except Exception as e:  # noqa: BLE001  stores raise what they like
            return e

    if len(uris) <= 1:
        return [one(uri) for uri in uris]
    with ThreadPoolExecutor(min(_AT_ONCE, len(uris)), "creel-version") as pool:
        try:
            return list(pool.map(one, uris))
        except RuntimeError:  # no thread available
            return [one(uri) for uri in uris]


# --- pyarrow ----------------------------------------------------------------------------------


def arrow_of(uri: str, deadline_s: float) -> tuple[Any, str]:
    """Return pyarrow's file system of an address, and the path in it.

    S3's client gives up a request after `deadline_s` without an answer, all its own retries
    together; Google's retries no longer than that. An address cannot set this, but the arguments in
    the client's pickle can be changed.
    """
    from pyarrow import fs

    system, path = fs.FileSystem.from_uri(uri)
    if not isinstance(system, getattr(fs, "S3FileSystem", ())) and not isinstance(
        system, getattr(fs, "GcsFileSystem", ())
    ):
        return system, path
    reduced: Any = system.__reduce__()
    make, (options,) = reduced
    limits = {
        "connect_timeout": deadline_s / _S3_TRIES,
        "request_timeout": deadline_s / _S3_TRIES,
        "retry_time_limit": timedelta(seconds=deadline_s),
    }
    return make(options | {k: v for k, v in limits.items() if k in options}), path


class _ArrowStore:
    """pyarrow.fs: one client per scheme and host. Opening sends HEAD for the size, then GET."""

    def __init__(self, uri: str, deadline_s: float) -> None:
        parts = urlsplit(uri)
        query = f"?{parts.query}" if parts.query else ""
        self._fs, root = arrow_of(f"{parts.scheme}://{parts.netloc}/{query}", deadline_s)
        self._prefix = root.rstrip("/")

    def _path(self, uri: str) -> str:
        return self._prefix + unquote(urlsplit(uri).path)

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """See Store."""
        with self._fs.open_input_file(self._path(stored.uri)) as f:
            found = self._version(stored.uri, f) if versioned else version.UNKNOWN
            nbytes = f.size() if length == UNKNOWN else length
            _check_size(stored, f.size(), nbytes)
            f.seek(offset)
            data: bytes = f.read(nbytes)
        if len(data) < nbytes:
            raise too_short(stored.uri, nbytes, len(data))
        return data, found

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        """See Store."""
        with self._fs.open_input_file(self._path(stored.uri)) as f:
            _check_size(stored, f.size(), runs[0].length)
            found = self._version(stored.uri, f)
            for run in runs:
                f.seek(run.offset)
                for buffer in run.buffers:
                    got = f.readinto(buffer) if len(buffer) else 0
                    if got < len(buffer):
                        raise too_short(stored.uri, len(buffer), got)
                yield Filled(int(run is runs[0]), found)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        """See Store."""
        return _each(self._ask, uris)

    def size(self, uri: str) -> int | None:
        """See Store."""
        info = self._status(uri)
        return None if info.size is None else int(info.size)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store."""
        from pyarrow import fs

        base = self._path(root).rstrip("/")
        for info in self._info(fs.FileSelector(base, recursive=True)):
            if info.type is fs.FileType.File:
                yield info.path[len(base) + 1 :], UNKNOWN if info.size is None else int(info.size)

    def _info(self, of: Any) -> Any:
        return self._fs.get_file_info(of)

    def _status(self, uri: str) -> Any:
        info = self._info(self._path(uri))
        if info.type.name == "NotFound":
            raise FileNotFoundError(errno.ENOENT, "not found", uri)
        return info

    def _ask(self, uri: str) -> int:
        with self._fs.open_input_file(self._path(uri)) as f:
            return self._version(uri, f)

    def _version(self, uri: str, file: Any) -> int:
        """Version of an open file; needs no request where opening it gave enough."""
        tag = _tag({k: v.decode() for k, v in (file.metadata() or {}).items()}, file.size())
        return version.of_tag(tag) if tag else _version_of(self._status(uri))


class _GcsStore(_ArrowStore):
    """gs: Google's client waits for an answer without end, so each request has a thread.

    A file with random access is opened while the client holds the interpreter: nothing else would
    run, nor see that it is late. So a stream must begin before; most objects need nothing else.
    """

    def __init__(self, uri: str, deadline_s: float) -> None:
        super().__init__(uri, deadline_s)
        self._deadline_s = deadline_s

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """See Store."""
        del versioned  # asking for the size tells it, too
        info = self._file(stored.uri)
        nbytes = info.size if length == UNKNOWN else length
        _check_size(stored, info.size, nbytes)
        return self._bytes(stored, [(offset, nbytes)])[0], _version_of(info)

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        """See Store."""
        info = self._file(stored.uri)
        _check_size(stored, info.size, runs[0].length)
        parts = self._bytes(stored, [(run.offset, run.length) for run in runs])
        for run, data in zip(runs, parts, strict=True):
            _copy(memoryview(data), run.buffers)
            yield Filled(int(run is runs[0]), _version_of(info))

    def _bytes(self, stored: StoredFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of (offset, nbytes) each, in memory of their own: a late thread may write."""
        path = self._path(stored.uri)
        nbytes = sum(span[1] for span in spans)
        at_head = len(spans) == 1 and spans[0][0] == 0
        head = nbytes if at_head else 0

        def begin() -> bytes:
            with self._fs.open_input_stream(path) as f:
                data: bytes = f.read(head)
                return data

        def rest() -> list[bytes]:
            out = []
            with self._fs.open_input_file(path) as f:
                for offset, n in spans:
                    f.seek(offset)  # read_at would cost another request
                    out.append(f.read(n))
            return out

        first = self._in_time(begin, head)
        parts = [first] if at_head else self._in_time(rest, nbytes)
        for data, (_, n) in zip(parts, spans, strict=True):
            if len(data) < n:
                raise too_short(stored.uri, n, len(data))
        return parts

    def _file(self, uri: str) -> Any:
        info = self._status(uri)
        if info.size is None:
            raise IsADirectoryError(errno.EISDIR, "is a folder", uri)
        return info

    def _info(self, of: Any) -> Any:
        return self._in_time(lambda: self._fs.get_file_info(of))

    def _ask(self, uri: str) -> int:
        return _version_of(self._status(uri))

    def _in_time(self, job: Callable[[], T], nbytes: int = 0) -> T:
        """`job()`, in a thread that is left behind where no answer comes in time."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(job())
            except BaseException as e:  # noqa: BLE001  raised by the one who waits
                answer.set_exception(e)

        try:
            threading.Thread(target=work, name="creel-gs", daemon=True).start()
        except RuntimeError:  # no thread available
            return job()
        late_s = self._deadline_s + nbytes / _SLOWEST_BPS
        if not wait([answer], late_s).done:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {late_s:g} s")
        return answer.result()


def _version_of(info: Any) -> int:
    """Version from time and size; Google takes one write of an object per second."""
    if info.mtime_ns is None:
        return version.UNKNOWN
    return version.of_tag(f"{info.mtime_ns} {info.size}")


def _tag(headers: Mapping[str, str], size: int | None) -> str:
    """Text that identifies a version of an object; "" where there is none.

    >>> _tag({"ETag": '"a"', "Last-Modified": "Sun"}, 9), _tag({"Last-Modified": "Sun"}, 9)
    ('"a"', 'Sun 9')
    """
    tag = headers.get("ETag") or headers.get("etag") or headers.get("generation")
    if tag:
        return tag
    when = headers.get("Last-Modified") or headers.get("updated")
    return f"{when} {size}" if when and size is not None else ""


# --- http -------------------------------------------------------------------------------------


class _HttpStore:
    """http(s): one request per object, in fsspec's session, so that its settings apply.

    An object that is a whole file is requested whole, so that a file that grew is noticed; others
    by range. Answers are not compressed in transit: a tag would be that of the packed bytes.
    """

    def __init__(self, uri: str, deadline_s: float) -> None:
        self._fs, _ = fsspec_of(uri, deadline_s)
        self._deadline_s = deadline_s

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """See Store."""
        del versioned  # an answer has it
        if length == 0 and not stored.whole:
            return b"", version.UNKNOWN
        found: tuple[bytes, int] = self._do(self._request, stored, offset, length)
        return found

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        """See Store."""
        for run in runs:
            data, found = self.read(stored, run.offset, run.length)
            _copy(memoryview(data), run.buffers)
            yield Filled(1, found)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        """See Store."""

        async def ask() -> list[int | Exception]:
            gate = asyncio.Semaphore(_AT_ONCE)

            async def one(uri: str) -> int | Exception:
                async with gate:
                    try:
                        return await self._version(uri)
                    except Exception as e:  # noqa: BLE001  aiohttp raises what it likes
                        return e

            return list(await asyncio.gather(*map(one, uris)))

        found: list[int | Exception] = self._do(ask)
        return found

    def _do(self, job: Callable[..., Any], *args: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, job, *args)

    async def _request(self, stored: StoredFile, offset: int, length: int) -> tuple[bytes, int]:
        part = length != UNKNOWN and not stored.whole
        span = {"Range": f"bytes={offset}-{offset + length - 1}"} if part else {}
        async with await self._send("GET", stored.uri, span) as r:
            self._fs._raise_not_found_for_status(r, stored.uri)  # noqa: SLF001
            size = _size_of(r)
            if r.status == 206:
                _check_span(stored.uri, r.headers.get("Content-Range", ""), offset)
            if size is not None and length != UNKNOWN:
                _check_size(stored, size, length)
            data = await self._body(r)
        if r.status != 206 and length != UNKNOWN:  # everything
            _check_size(stored, len(data), length)
            data = data if stored.whole else data[offset : offset + length]
        if length not in (UNKNOWN, len(data)):
            raise too_short(stored.uri, length, len(data))
        tag = _tag(r.headers, size)
        return data, version.of_tag(tag) if tag else version.UNKNOWN

    async def _body(self, r: Any) -> bytes:
        """Read the body; one of unknown length may take as long as data keeps coming."""
        length = r.headers.get("Content-Length", "")
        late_s = self._deadline_s + int(length) / _SLOWEST_BPS if length.isdecimal() else None
        data: bytes = await asyncio.wait_for(r.read(), late_s)
        return data

    def size(self, uri: str) -> int | None:
        """See Store. fsspec's own reports every failure as a missing file."""

        async def ask() -> int | None:
            size = await self._ask(uri, lambda r: r.status in _NO_HEAD or _size_of(r) is None)
            return size[1]

        found: int | None = self._do(ask)
        return found

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store."""
        for name, size in _found(self._fs, root, on_error=_unless_missing):
            # A web page links to more than the folder's files: to other sort orders.
            if not {"?", "#"} & set(name):
                yield unquote(name), size

    async def _version(self, uri: str) -> int:
        headers, size = await self._ask(uri, lambda r: r.status in _NO_HEAD)
        tag = _tag(headers, size)
        return version.of_tag(tag) if tag else version.UNKNOWN

    async def _ask(
        self, uri: str, lacks: Callable[[Any], bool]
    ) -> tuple[Mapping[str, str], int | None]:
        """Headers and size from HEAD; where that `lacks` something, from a GET of one byte."""
        async with await self._send("HEAD", uri, {}) as r:
            if not lacks(r):
                self._fs._raise_not_found_for_status(r, uri)  # noqa: SLF001
                return r.headers, _size_of(r)
        async with await self._send("GET", uri, {"Range": "bytes=0-0"}) as r:
            if r.status != _NO_SUCH_RANGE:
                self._fs._raise_not_found_for_status(r, uri)  # noqa: SLF001
            return r.headers, _size_of(r)

    async def _send(self, method: str, uri: str, headers: Mapping[str, str]) -> Any:
        options = dict(self._fs.kwargs)
        sent = {**options.pop("headers", {}), **headers, "Accept-Encoding": "identity"}
        options.setdefault("allow_redirects", True)
        session = await self._fs.set_session()
        answer = session.request(method, self._fs.encode_url(uri), headers=sent, **options)
        return await asyncio.wait_for(answer, self._deadline_s)


def _size_of(r: Any) -> int | None:
    """Bytes of the whole file, as far as an answer says."""
    if r.headers.get("Content-Encoding", "identity") != "identity":
        return None
    if r.status in {206, _NO_SUCH_RANGE}:
        total = r.headers.get("Content-Range", "").rpartition("/")[2]
        return int(total) if total.isdecimal() else None
    length = r.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _check_span(uri: str, content_range: str, offset: int) -> None:
    """Check that a part is the requested one; a server may not say."""
    span = _RANGE.fullmatch(content_range)
    if span and int(span[1]) != offset:
        raise SourceError(
            errno.EPROTO, f"the server sent {content_range}, not bytes from {offset} on", uri
        )


# --- whatever else fsspec opens ---------------------------------------------------------------


def fsspec_of(uri: str, deadline_s: float) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it.

    Its HTTP requests end after `deadline_s` without data.

    Raises:
        SourceError: fsspec is not installed.
        ImportError, ValueError: it has no such file system.
    """
    try:
        import fsspec
    except ImportError as e:
        raise SourceError(errno.ENOSYS, "needs `pip install creel[http]`", uri) from e
    scheme = uri.partition("://")[0].lower()
    options: dict[str, Any] = {}
    if scheme in {"http", "https"}:
        import aiohttp

        limit = aiohttp.ClientTimeout(None, sock_connect=deadline_s, sock_read=deadline_s)
        given = fsspec.config.conf.get(scheme, {}).get("client_kwargs", {})
        options["client_kwargs"] = {"timeout": limit, **given}
    found: tuple[Any, str] = fsspec.core.url_to_fs(uri, **options)
    return found


def _found(system: Any, root: str, **options: Any) -> Iterator[tuple[str, int]]:
    """Yield the name below `root`, and the size or UNKNOWN, of each file fsspec finds."""
    base = system._strip_protocol(root).rstrip("/") + "/"  # noqa: SLF001  as url_to_fs does
    for name, info in system.find(base, detail=True, **options).items():
        size = info.get("size")
        if name.startswith(base) and name != base:
            yield name[len(base) :], UNKNOWN if size is None else int(size)


def _unless_missing(error: Exception) -> None:
    """Raise unless the folder is missing; fsspec would skip it whatever the reason."""
    if not isinstance(error, FileNotFoundError):
        raise error


class _FsspecStore:
    """Any other fsspec file system: one request per object, and one for its version."""

    def __init__(self, uri: str, deadline_s: float) -> None:
        self._fs, _ = fsspec_of(uri, deadline_s)
        self._deadline_s = deadline_s

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """See Store."""
        found = self._ask(stored.uri) if versioned else version.UNKNOWN
        return self._read(stored, offset, length), found

    def _read(self, stored: StoredFile, offset: int, length: int) -> bytes:
        if length == 0 and not stored.whole:
            return b""
        if length == UNKNOWN:
            everything: bytes = self._do("cat_file", stored.uri)
            return everything
        # One byte more than the whole file, to notice that it has grown.
        end = offset + length + int(stored.whole)
        data: bytes = self._do("cat_file", stored.uri, start=offset, end=end)
        if stored.whole and len(data) != length:
            raise wrong_size(stored.uri, length, len(data))
        if len(data) != length:
            raise too_short(stored.uri, length, len(data))
        return data

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        """See Store."""
        found = self._ask(stored.uri)
        for run in runs:
            _copy(memoryview(self._read(stored, run.offset, run.length)), run.buffers)
            yield Filled(1, found)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        """See Store."""
        return _each(self._ask, uris)

    def size(self, uri: str) -> int | None:
        """See Store."""
        size = self._do("info", uri).get("size")
        return None if size is None else int(size)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store."""
        return _found(self._fs, root)

    def _ask(self, uri: str) -> int:
        self._fs.invalidate_cache(self._fs._parent(uri))  # noqa: SLF001  it may be outdated
        info = self._do("info", uri)
        return version.of_tag(str(sorted((k, str(v)) for k, v in info.items())))

    def _do(self, name: str, uri: str, **args: Any) -> Any:
        """Call a method, within the deadline where the file system can be interrupted."""
        if not getattr(self._fs, "async_impl", False):
            return getattr(self._fs, name)(uri, **args)
        from fsspec.asyn import sync

        job = getattr(self._fs, f"_{name}")
        return sync(self._fs.loop, job, uri, timeout=self._deadline_s, **args)
