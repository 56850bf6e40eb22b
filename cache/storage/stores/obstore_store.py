"""S3, GCS and Azure by obstore (Rust's `object_store`): one request per read, for all it needs.

The answer also tells size and ETag. It serves where it is installed (the extra `s3`) and can do
what the options ask (`cache/storage/buckets/`), else `arrow_store.py` does. Its own retries are
off: `retry.py` has them, so that all are counted.

Its threads do not survive a fork: a process that was forked from one that had imported obstore
would wait for them forever, and uses `arrow_store.py` (`usable`).
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import md5
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from creel.cache.memory.buffers import copy_over, cut
from creel.cache.storage import version
from creel.cache.storage.buckets.bucket import Bucket
from creel.cache.storage.manifest import UNKNOWN
from creel.cache.storage.stores.refusals import EXPIRED, refusal, unreachable
from creel.cache.storage.stores.requests import SLOWEST_BPS, Gate, Requests, of_each
from creel.cache.storage.stores.store import (
    Filled,
    OneRequestStore,
    Run,
    StoredFile,
    check_pin,
    check_size,
    too_short,
)
from creel.errors import SourceError, SourceNotFoundError
from creel.system.forks import at_fork

#: Bodies that broke and went on at the byte where they broke, in one read, without a pause. Then
#: the read begins anew, after a pause.
_MAX_RESUMES = 8
#: Runs of one file that are this near are one request: at 64 MB/s a gap takes 1 ms, another
#: request several.
_GAP_NBYTES = 64 << 10
_JOINED_NBYTES = 8 << 20
#: From this size on, a range is read in parts at a time: one connection has some 50 to 100 MB/s
#: (AWS: "Use byte-range fetches", parts of 8 to 16 MB).
_LARGE_NBYTES = 64 << 20
_PART_NBYTES = 16 << 20
_PARTS_AT_ONCE = 4
PAGE = 1000  # keys, the most that one answer lists
#: Names below a root, and sizes.
Page: TypeAlias = list[tuple[str, int]]
#: obstore's time-out of a request is not used, as objects may be large, but `_get` has one.
_WHOLE_REQUEST = timedelta(days=1)

#: The tag of an object that was written at once; that of one written in parts ends in "-n".
_MD5 = re.compile(r'"?[0-9a-f]{32}"?')
_MAX_ODD = 64
_REPLACED = "was replaced while it was read"
#: By the names of obstore's errors.
_OF_KIND = {
    "PreconditionError": (errno.ESTALE, _REPLACED),
    "InvalidPathError": (errno.EILSEQ, "a key has an empty part, or a control character"),
}
_STATUS = re.compile(r"(?:status code|status): (\d{3})\b")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_BEYOND = re.compile(r"Wanted range starting at \d+, but object was only (\d+) bytes")
_forked_from_user = False


def _note_fork() -> None:
    global _forked_from_user  # noqa: PLW0603  of this process
    _forked_from_user = _forked_from_user or "obstore" in sys.modules


at_fork(after_in_child=_note_fork)


class AnswerError(OSError):
    """An answer that is no success: its HTTP status, and S3's word for it or ""."""

    def __init__(self, status: int, code: str) -> None:
        meaning = refusal(code)
        if meaning or status in {401, 403}:
            super().__init__(errno.EACCES, f"access denied: {meaning or 'check the credentials'}")
        else:
            super().__init__(0, f"HTTP {status} {code}".strip())
        self.status = status


def usable() -> bool:
    """Return whether obstore is installed, and its threads can run in this process."""
    if _forked_from_user:
        return False
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


class _Body(NamedTuple):
    """What an answer says of an object, before its bytes: size and tag of the whole."""

    size: int
    tag: str | None
    version: int


class ObstoreStore(OneRequestStore):
    """Reads a bucket; see the module."""

    def __init__(self, bucket: Bucket, deadline_s: float, requests: Requests) -> None:
        plain = bucket.server.startswith("http:")
        self._bucket = bucket
        self._config = {
            **bucket.config,
            "client_options": {
                "allow_http": plain,
                "timeout": _WHOLE_REQUEST,
                # Without a byte: a connection that hangs is given up in time for another one.
                "read_timeout": timedelta(seconds=deadline_s / 3),
                "connect_timeout": timedelta(seconds=deadline_s / 3),
                # No proxy, as none is used by the other store: one for no address.
                "proxy_url": "http://127.0.0.1:9",
                "proxy_excludes": "*,0.0.0.0/0,::/0",
            },
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=deadline_s)},
        }
        self._deadline_s = deadline_s
        self._requests = requests
        self._gate = Gate()
        self._lock = threading.Lock()
        self._s3: Any = None
        #: Whether tags that look like MD5 sums are compared with the bytes (`_check_sum`).
        self._sums = plain
        self._odd: dict[str, str] = {}  # by tag: the sum of bytes that it is not that of

    def _read(self, stored: StoredFile, offset: int, length: int) -> tuple[bytes, int]:
        chunks: list[bytes] = []
        body = self._get(stored, offset, length, chunks.append)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks), body.version

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        for first, last in _near(runs):
            joined = runs[first:last]
            offset, nbytes = joined[0][0], joined[-1][0] + joined[-1][1] - joined[0][0]
            data_version = version.UNKNOWN
            if nbytes >= _LARGE_NBYTES:
                data_version = self._get_parts(stored, offset, nbytes, _buffers(joined)).version
            elif nbytes or stored.whole:
                take = _into(_buffers(joined))
                data_version = self._get(stored, offset, nbytes, take).version
            yield Filled(1, data_version, len(joined))

    def _get_parts(
        self, stored: StoredFile, offset: int, nbytes: int, buffers: list[memoryview]
    ) -> _Body:
        """Fill buffers with a large range in parts at a time, all of the version of the first.

        Parts that fail are asked for again as long as others do not: else hardly any range of many
        parts would ever be read from a store that throttles.
        """
        parts: list[tuple[int, int, list[memoryview]]] = []
        for at in range(offset, offset + nbytes, _PART_NBYTES):
            length = min(_PART_NBYTES, offset + nbytes - at)
            part, buffers = cut(buffers, length)
            parts.append((at, length, part))
        loose = stored._replace(whole=False)
        (at, length, part), *left = parts
        first = self._get(loose, at, length, _into(part))
        check_size(stored, first.size, nbytes)

        def get(other: tuple[int, int, list[memoryview]]) -> None:
            at, length, part = other
            self._get(loose, at, length, _into(part), first)

        while left:
            answers = of_each(get, left, _PARTS_AT_ONCE)
            failed = [(part, e) for part, e in zip(left, answers, strict=True) if e is not None]
            if len(failed) == len(left):
                raise failed[0][1]
            left = [part for part, _ in failed]
        return first

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        return of_each(lambda uri: self._version_of(self._head(uri)), uris)

    def status(self, uri: str) -> tuple[int | None, int]:
        meta = self._head(uri)
        return int(meta["size"]), self._version_of(meta)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        for page in self.pages(root):
            yield from page

    def pages(self, root: str, folder: str = "", after: str = "") -> Iterator[Page]:
        """Yield a listing, a request at a time: of a folder below `root`, behind a name."""
        import obstore

        base = _path(root).rstrip("/")
        where = [f"{base}/{name}".strip("/") or None for name in (folder, after)]
        offset = where[1] if after else None
        answers = iter(obstore.list(self._client(), where[0], offset=offset, chunk_size=PAGE))
        while True:
            with self._request("LIST", root):
                page = next(answers, ())
            if not page:
                return
            yield _rows(page, base)

    def folder(self, root: str) -> tuple[Page, Sequence[str]]:
        """Return the files of a folder, and its folders."""
        import obstore

        base = _path(root).rstrip("/")
        with self._request("LIST", root):
            answer = obstore.list_with_delimiter(self._client(), base or None)
        folders = [path[len(base) :].strip("/") for path in answer["common_prefixes"]]
        return _rows(answer["objects"], base), folders

    def files_of(self, root: str, page: Page) -> Page:
        """Return the objects of a page without those that stand for folders ("name/").

        obstore lists them without their slash, and as empty: no object has that name.
        """
        empty = [name for name, nbytes in page if not nbytes]
        base = _path(root).rstrip("/")
        answers = of_each(lambda name: self._head_of(root, f"{base}/{name}".lstrip("/")), empty)
        markers = {
            name
            for name, answer in zip(empty, answers, strict=True)
            if isinstance(answer, FileNotFoundError)
        }
        return [row for row in page if row[0] and row[0] not in markers]

    def _version_of(self, meta: Any) -> int:
        """Return the same version as `arrow_store.py` for an object with a tag."""
        tag = meta[self._bucket.tag] or f"{meta['last_modified'].isoformat()} {meta['size']}"
        return version.of_tag(tag)

    def _head(self, uri: str) -> Any:
        return self._head_of(uri, _path(uri))

    def _head_of(self, uri: str, path: str) -> Any:
        import obstore

        with self._request("HEAD", uri):
            return obstore.head(self._client(), path)

    def _get(
        self,
        stored: StoredFile,
        offset: int,
        length: int,
        take: Callable[[bytes], None],
        first: _Body | None = None,
    ) -> _Body:
        """Hand the bytes of a range (length UNKNOWN: of the object) to `take`, as they come.

        A body that breaks goes on at the byte where it broke, if the object is still the same one.
        `first`: what another answer said of the object, which is to be that one.
        """
        done, resumes = 0, 0
        began, digest = time.monotonic(), None
        while True:
            before = done
            try:
                with self._request("GET", stored.uri):
                    result = self._send(stored, offset, length, done, first)
                    meta = result.meta
                    size = int(meta["size"])
                    whole = length if length != UNKNOWN else size
                    late = began + self._deadline_s + whole / SLOWEST_BPS
                    body = _Body(size, meta["e_tag"], self._version_of(meta))
                    first = _same(stored, body, whole, first)
                    if not done and self._sums and whole == size and _MD5.fullmatch(body.tag or ""):
                        digest = md5(usedforsecurity=False)
                    for chunk in result.stream(1):
                        take(chunk)
                        done += len(chunk)
                        if digest is not None:
                            digest.update(chunk)
                        if time.monotonic() > late:
                            raise TimeoutError(errno.ETIMEDOUT, "the body comes too slowly")
                    _check_length(stored.uri, done, whole, size - offset)
                    if digest is not None:
                        self._check_sum(str(first.tag), digest.hexdigest())
                    return first
            except ConnectionError:
                resumes += 1
                if done == before or resumes > _MAX_RESUMES or first is None:
                    raise
                self._requests.count("resumes")

    def _check_sum(self, tag: str, digest: str) -> None:
        """Raise OSError, after which the read is tried again, unless a tag is the sum of the bytes.

        TLS has sums of its own, so only plain HTTP is checked: 100 KB cost .2 ms of a processor,
        1 % of a request over 20 ms (2 cores of an Intel Xeon, 2026-11-28). Not every tag that looks
        like a sum is one (of encrypted objects, for example): the same bytes twice are right.
        """
        if digest == tag.strip('"'):
            return
        if self._odd.get(tag) == digest:
            self._sums = False
            return
        if len(self._odd) >= _MAX_ODD:
            self._odd.clear()
        self._odd[tag] = digest
        raise OSError(errno.EIO, "the bytes that came differ from their checksum")

    def _send(
        self, stored: StoredFile, offset: int, length: int, done: int, first: _Body | None
    ) -> Any:
        import obstore

        options: Any = {}
        if first is not None and first.tag:
            options["if_match"] = first.tag
        if done or not (stored.whole or length == UNKNOWN):
            end = offset + length if length != UNKNOWN else first.size if first else 0
            options["range"] = (offset + done, end)
        return obstore.get(self._client(), _path(stored.uri), options=options)

    def _client(self) -> Any:
        with self._lock:
            if self._s3 is None:
                from obstore import store

                self._s3 = getattr(store, self._bucket.kind)(**self._config)
            return self._s3

    @contextmanager
    def _request(self, kind: str, uri: str) -> Iterator[None]:
        """Count a request, wait until it may be sent, and translate its errors."""
        with self._gate.request() as cuts:
            self._requests.count(kind)
            try:
                yield
            except Exception as e:
                if isinstance(e, OSError) and e.errno is not None:  # an error of ours
                    raise
                error = _translated(e, uri)
                status = getattr(error, "status", 0)
                if status in {429, 503}:
                    self._requests.count("throttles")
                    self._gate.slow_down(cuts)
                if EXPIRED in str(error):
                    self._s3 = None  # with it, what it knows of a role's keys
                raise error from e
            self._gate.success()


def _translated(error: Exception, uri: str) -> Exception:
    """Return what went wrong as an error of Python's; obstore has little more than texts."""
    text = str(error)
    status, code, beyond = _STATUS.search(text), _CODE.search(text), _BEYOND.search(text)
    if known := _OF_KIND.get(type(error).__name__):
        return OSError(*known)
    number = int(status[1]) if status else 0
    if beyond or number == 416:
        return SourceError(errno.ENODATA, "is shorter than the manifest says", uri)
    if code and code[1] in _NO_BUCKET:
        return SourceNotFoundError(errno.ENOENT, "there is no such bucket", uri)
    if isinstance(error, FileNotFoundError) or number == 404:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
    if "redirect without LOCATION" in text:
        return AnswerError(301, "PermanentRedirect")
    if number:
        word = code[1] if code else ""
        late = word == "RequestTimeout"  # which S3 sends with 400
        return AnswerError(408 if late else number, word)
    if "TimedOut" in text or "kind: Timeout" in text:
        return TimeoutError(errno.ETIMEDOUT, "no answer in time")
    if why := unreachable(text):
        return ConnectionRefusedError(errno.ECONNREFUSED, why)
    if re.search(r"kind: (Interrupted|Request|Decode|Body|Unknown)\b", text):
        return ConnectionResetError(errno.ECONNRESET, "the connection broke")
    return OSError(0, text.partition("\n")[0])


def _same(stored: StoredFile, body: _Body, length: int, first: _Body | None) -> _Body:
    """Return `body` if it is the object's that is to be read, as `first` is if known."""
    if first is None:
        check_size(stored, body.size, length)
        check_pin(stored, body.version)
    elif body.version != first.version:  # not every server heeds If-Match
        raise OSError(errno.ESTALE, _REPLACED)
    return body


def _check_length(uri: str, done: int, length: int, available: int) -> None:
    """Raise unless a body had the bytes that were asked for, of those that the object has."""
    if done > length:
        raise SourceError(errno.EPROTO, "the server sent more bytes than asked for", uri)
    if done < length:
        if length > available:
            raise too_short(uri, length, done)
        raise ConnectionResetError(errno.ECONNRESET, "the body ended early")


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path).lstrip("/")


def _rows(metas: Sequence[Any], base: str) -> Page:
    return [(meta["path"][len(base) :].lstrip("/"), int(meta["size"])) for meta in metas]


def _into(buffers: list[memoryview]) -> Callable[[bytes], None]:
    """Return a function that copies bytes into buffers, one chunk after the other."""
    left = buffers

    def take(chunk: bytes) -> None:
        nonlocal left
        part, left = cut(left, len(chunk))
        copy_over(memoryview(chunk), part)

    return take


def _near(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """Yield the (first, last + 1) of runs, sorted by offset, that one request reads.

    >>> far = 1 << 20
    >>> list(_near([(0, 10, ()), (500, 10, ()), (far, 10, ()), (0, 5, ())]))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = 0
    for i in range(1, len(runs) + 1):
        if i < len(runs):
            end = runs[i - 1][0] + runs[i - 1][1]
            gap, nbytes = runs[i][0] - end, runs[i][0] + runs[i][1] - runs[first][0]
            if 0 <= gap <= _GAP_NBYTES and nbytes <= _JOINED_NBYTES:
                continue
        yield first, i
        first = i


def _buffers(runs: Sequence[Run]) -> list[memoryview]:
    """Return the buffers of runs, with room for what lies between them."""
    buffers: list[memoryview] = []
    for i, (offset, _, parts) in enumerate(runs):
        if i and (gap := offset - runs[i - 1][0] - runs[i - 1][1]):
            buffers.append(memoryview(bytearray(gap)))
        buffers += parts
    return buffers
