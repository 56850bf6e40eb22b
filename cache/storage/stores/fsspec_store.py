"""Remote stores of fsspec: http(s) with requests of our own, other schemes by fsspec's calls.

fsspec is imported with the first such address.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from creel.cache.memory.buffers import copy_over
from creel.cache.storage import version
from creel.cache.storage.manifest import UNKNOWN
from creel.cache.storage.stores.requests import AT_ONCE, SLOWEST_BPS, Requests, of_each, tag_of
from creel.cache.storage.stores.store import (
    Filled,
    OneRequestStore,
    Run,
    StoredFile,
    check_size,
    too_short,
    wrong_size,
)
from creel.errors import SourceError

#: Statuses of HEAD with which GET may still succeed: no HEAD, or an address signed only for GET.
_NO_HEAD = frozenset({400, 403, 405, 501})
#: Status of a request for the first byte of an empty file.
_NO_SUCH_RANGE = 416
_RANGE = re.compile(r"bytes (\d+)-.*")


# --- http -------------------------------------------------------------------------------------


class HttpStore(OneRequestStore):
    """Reads http(s) with one request per object, in fsspec's session, so that its settings apply.

    An object that is a whole file is requested without a range, so that growth is noticed; other
    objects by range. Answers are not compressed, as a tag would be that of the compressed bytes.
    """

    def __init__(self, system: Any, deadline_s: float, requests: Requests) -> None:
        """`system`: result of `fsspec_of`."""
        self._fs = system
        self._deadline_s = deadline_s
        self._requests = requests

    def _read(self, stored: StoredFile, offset: int, length: int) -> tuple[bytes, int]:
        answer: tuple[bytes, int] = self._do(self._request, stored, offset, length)
        return answer

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        for offset, length, buffers in runs:
            data, data_version = self.read(stored, offset, length)
            copy_over(memoryview(data), buffers)
            yield Filled(1, data_version)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        async def ask() -> list[int | Exception]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def ask_version(uri: str) -> int | Exception:
                async with gate:
                    try:
                        return await self._version(uri)
                    except Exception as e:  # noqa: BLE001  aiohttp raises what it likes
                        return e

            return list(await asyncio.gather(*map(ask_version, uris)))

        versions: list[int | Exception] = self._do(ask)
        return versions

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
                check_size(stored, size, length)
            data = await self._body(r)
        if r.status != 206 and length != UNKNOWN:  # the answer is the whole file
            check_size(stored, len(data), length)
            data = data if stored.whole else data[offset : offset + length]
        if length not in (UNKNOWN, len(data)):
            raise too_short(stored.uri, length, len(data))
        tag = tag_of(r.headers, size)
        return data, version.of_tag(tag) if tag else version.UNKNOWN

    async def _body(self, r: Any) -> bytes:
        """Read the body; without a known length it may take as long as data keeps coming."""
        length = r.headers.get("Content-Length", "")
        late_s = self._deadline_s + int(length) / SLOWEST_BPS if length.isdecimal() else None
        data: bytes = await asyncio.wait_for(r.read(), late_s)
        return data

    def status(self, uri: str) -> tuple[int | None, int]:
        """See Store. The `size` of fsspec would report every failure as a missing file."""
        answer: tuple[Mapping[str, str], int | None] = self._do(
            self._ask, uri, lambda r: r.status in _NO_HEAD or _size_of(r) is None
        )
        tag = tag_of(*answer)
        return answer[1], version.of_tag(tag) if tag else version.UNKNOWN

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        for name, size in _files_below(self._fs, root, on_error=_unless_missing):
            # A web page of a folder also links to other sort orders of itself.
            if not {"?", "#"} & set(name):
                yield unquote(name), size

    async def _version(self, uri: str) -> int:
        headers, size = await self._ask(uri, lambda r: r.status in _NO_HEAD)
        tag = tag_of(headers, size)
        return version.of_tag(tag) if tag else version.UNKNOWN

    async def _ask(
        self, uri: str, lacks: Callable[[Any], bool]
    ) -> tuple[Mapping[str, str], int | None]:
        """Return headers and size from HEAD; if that `lacks` something, from a GET of one byte."""
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
        self._requests.count(method)
        session = await self._fs.set_session()
        answer = session.request(method, self._fs.encode_url(uri), headers=sent, **options)
        return await asyncio.wait_for(answer, self._deadline_s)


def _size_of(r: Any) -> int | None:
    """Return the bytes of the whole file, or None if the answer does not say."""
    if r.headers.get("Content-Encoding", "identity") != "identity":
        return None
    if r.status in {206, _NO_SUCH_RANGE}:
        total = r.headers.get("Content-Range", "").rpartition("/")[2]
        return int(total) if total.isdecimal() else None
    length = r.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _check_span(uri: str, content_range: str, offset: int) -> None:
    """Raise unless the answer's range is the requested one; a server may omit it."""
    span = _RANGE.fullmatch(content_range)
    if span and int(span[1]) != offset:
        raise SourceError(
            errno.EPROTO, f"the server sent {content_range}, not bytes from {offset} on", uri
        )


# --- other schemes ----------------------------------------------------------------------------


def needs(scheme: str) -> None:
    """Check, without importing them, that fsspec and what it needs for HTTP are installed.

    Other schemes may need more, which fsspec says when its file system is made.

    Raises:
        SourceError: they are not.
    """
    for name in ("fsspec", "aiohttp") if scheme in {"http", "https"} else ("fsspec",):
        if find_spec(name) is None:
            text = f"{scheme}:// needs {name}: pip install 'creel-data[http]'"
            raise SourceError(0, text, f"{scheme}://")


def fsspec_of(uri: str, deadline_s: float, options: Mapping[str, Any], *, handed: bool) -> Any:
    """Return fsspec's file system of an address.

    HTTP requests of the file system end after `deadline_s` without data.

    Args:
        options: arguments of the file system.
        handed: whether another process has resolved them; what this one has configured for fsspec
            is then left out.

    Raises:
        SourceError: fsspec is not installed, or not what it needs for HTTP.
        ImportError, ValueError: fsspec has no such file system.
    """
    scheme = uri.partition("://")[0].lower()
    needs(scheme)
    import fsspec

    if handed:
        fsspec.config.conf.clear()
    given = dict(options)
    if scheme in {"http", "https"}:
        import aiohttp

        limit = aiohttp.ClientTimeout(None, sock_connect=deadline_s, sock_read=deadline_s)
        configured = fsspec.config.conf.get(scheme, {}).get("client_kwargs", {})
        given["client_kwargs"] = {
            "timeout": limit,
            **configured,
            **given.get("client_kwargs", {}),
        }
    return fsspec.core.url_to_fs(uri, **given)[0]


def _files_below(system: Any, root: str, **options: Any) -> Iterator[tuple[str, int]]:
    """Yield the name below `root`, and the size or UNKNOWN, of each file that fsspec finds."""
    base = system._strip_protocol(root).rstrip("/") + "/"  # noqa: SLF001  as url_to_fs does
    for name, info in system.find(base, detail=True, **options).items():
        size = info.get("size")
        if name.startswith(base) and name != base:
            yield name[len(base) :], UNKNOWN if size is None else int(size)


def _unless_missing(error: Exception) -> None:
    """Raise unless the folder is missing; by itself, fsspec skips folders after any error."""
    if not isinstance(error, FileNotFoundError):
        raise error


class FsspecStore:
    """Reads any other fsspec file system: one request per object, and one for its version."""

    def __init__(self, system: Any, deadline_s: float) -> None:
        """`system`: result of `fsspec_of`."""
        self._fs = system
        self._deadline_s = deadline_s

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        data_version = self._ask(stored.uri) if versioned else version.UNKNOWN
        return self._read(stored, offset, length), data_version

    def _read(self, stored: StoredFile, offset: int, length: int) -> bytes:
        if length == 0 and not stored.whole:
            return b""
        if length == UNKNOWN:
            everything: bytes = self._do("cat_file", stored.uri)
            return everything
        # Request one byte more than the whole file, to notice growth.
        end = offset + length + int(stored.whole)
        data: bytes = self._do("cat_file", stored.uri, start=offset, end=end)
        if stored.whole and len(data) != length:
            raise wrong_size(stored.uri, length, len(data))
        if len(data) != length:
            raise too_short(stored.uri, length, len(data))
        return data

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        data_version = self._ask(stored.uri)
        for offset, length, buffers in runs:
            copy_over(memoryview(self._read(stored, offset, length)), buffers)
            yield Filled(1, data_version)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        return of_each(self._ask, uris)

    def status(self, uri: str) -> tuple[int | None, int]:
        info = self._info(uri)
        size = info.get("size")
        return None if size is None else int(size), _version_of(info)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        return _files_below(self._fs, root)

    def _ask(self, uri: str) -> int:
        return _version_of(self._info(uri))

    def _info(self, uri: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache(self._fs._parent(uri))  # noqa: SLF001  which may be out of date
        info: Mapping[str, Any] = self._do("info", uri)
        return info

    def _do(self, name: str, uri: str, **args: Any) -> Any:
        """Call a method of the file system, within the deadline if it is asynchronous."""
        if not getattr(self._fs, "async_impl", False):
            return getattr(self._fs, name)(uri, **args)
        from fsspec.asyn import sync

        job = getattr(self._fs, f"_{name}")
        return sync(self._fs.loop, job, uri, timeout=self._deadline_s, **args)


def _version_of(info: Mapping[str, Any]) -> int:
    return version.of_tag(str(sorted((k, str(v)) for k, v in info.items())))
