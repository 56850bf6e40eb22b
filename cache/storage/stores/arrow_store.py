"""Remote stores that pyarrow.fs reads with its own clients: S3, Google Cloud Storage, HDFS, Azure.

pyarrow is imported with the first such address.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from difflib import get_close_matches
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from creel.cache.memory.buffers import copy_over
from creel.cache.storage import version
from creel.cache.storage.manifest import ANY, UNKNOWN
from creel.cache.storage.stores.access import AZURES, option_names
from creel.cache.storage.stores.requests import SLOWEST_BPS, Requests, of_each, tag_of
from creel.cache.storage.stores.store import (
    Filled,
    Run,
    StoredFile,
    check_pin,
    check_size,
    too_short,
)
from creel.errors import ConfigError

T = TypeVar("T")

#: Options that an address may have, too, and options that say who reads.
_S3_SERVER = frozenset({"endpoint_override", "region", "scheme"})
_S3_ACCOUNT = frozenset({"access_key", "secret_key", "session_token", "anonymous", "role_arn"})
_MAX_OPENED = 64
#: For so long an open file counts as the object at its address, which may be replaced meanwhile.
_REOPEN_S = 30.0
_MAX_FOLDERS, _LISTED_AT_ONCE = 1000, 16
#: A listing is one call, however many requests it takes.
_MAX_DEADLINES = 20
_S3_TRIES = 3  # pyarrow's AwsStandardS3RetryStrategy, which a client made from options has


def arrow_of(uri: str, deadline_s: float, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return pyarrow's file system of an address, and the path in it.

    S3's client gives up a request after `deadline_s` without an answer, including its own retries;
    Google's client retries no longer than that. An address can set neither these limits nor most
    options, so they are changed in the arguments of the client's pickle.

    Raises:
        ConfigError: an option that the client does not have.
    """
    from pyarrow import fs

    parts = urlsplit(uri)
    scheme = parts.scheme.lower()
    if scheme == "s3":
        if options.keys() - _S3_SERVER - _S3_ACCOUNT:  # before a request for the bucket's region
            local = fs.S3FileSystem(region="us-east-1", anonymous=True)
            _check_options(scheme, options, local.__reduce__()[1][0])
        uri, options = _of_s3(parts, options)
    elif scheme == "az" or (scheme in AZURES and options.get("anonymous")):
        uri, options = _of_azure(parts, options)
    system, path = fs.FileSystem.from_uri(uri)
    reduced: Any = system.__reduce__()
    make, (known,) = reduced
    if not isinstance(known, Mapping):  # a file system without options
        known = {}
    _check_options(scheme, options, known)
    limits = {
        "connect_timeout": deadline_s / _S3_TRIES,
        "request_timeout": deadline_s / _S3_TRIES,
        "retry_time_limit": timedelta(seconds=deadline_s),
    }
    changed = {**{k: v for k, v in limits.items() if k in known}, **options}
    return make(known | changed) if changed else system, path


def _check_options(scheme: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that is not among those of pyarrow's client."""
    unknown = options.keys() - known.keys()
    if not unknown:
        return
    name, ours = min(unknown), option_names(scheme)
    guess = get_close_matches(name, [*ours, *sorted(known)], 1)
    meant = f" (did you mean {guess[0]!r}?):" if guess else ":"
    names = [*ours, "and those of pyarrow's client (docs/s3.md)"] if ours else sorted(known)
    raise ConfigError(
        f"storage_options of {scheme}:// has no option {name!r}{meant} it has {', '.join(names)}"
    )


def _of_s3(parts: SplitResult, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an S3 address with all that an address can say, and the other options.

    pyarrow asks AWS for the region of the bucket if the address names no server.
    """
    named = dict(parse_qsl(parts.query))
    into = {k: str(v) for k, v in options.items() if k in _S3_SERVER and v and k not in named}
    account = () if parts.username is None else _S3_ACCOUNT
    other_options = {k: v for k, v in options.items() if k not in _S3_SERVER and k not in account}
    return urlunsplit(parts._replace(query=urlencode({**into, **named}))), other_options


def _of_azure(parts: SplitResult, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an address of Azure's as pyarrow has it, and the other options."""
    others = dict(options)
    account, container = others.pop("account_name", ""), parts.netloc
    if parts.scheme.lower() != "az":
        container, _, host = container.rpartition("@")
        account = host.partition(".")[0]
    if not account:
        raise ConfigError("az:// needs account_name, or AZURE_STORAGE_ACCOUNT_NAME")
    authority = others.get("blob_storage_authority") or "."
    server = (
        f"{account}.blob.core.windows.net" if authority[:1] == "." else f"{account}@{authority}"
    )
    query = {"enable_tls": str(others.get("blob_storage_scheme") != "http").lower()}
    if others.pop("anonymous", False):
        query["credential_kind"] = "anonymous"
        others = {k: v for k, v in others.items() if not k.endswith(("_authority", "_scheme"))}
    return f"abfs://{server}/{container}{parts.path}?{urlencode(query)}", others


class ArrowStore:
    """Reads through pyarrow.fs, one client per scheme and host: HEAD for the size, then GET."""

    #: Whether the client lists the folders in a folder.
    _lists_folders = True

    def __init__(
        self, uri: str, deadline_s: float, options: Mapping[str, Any], requests: Requests
    ) -> None:
        parts = urlsplit(uri)
        query = f"?{parts.query}" if parts.query else ""
        self._fs, root = arrow_of(f"{parts.scheme}://{parts.netloc}/{query}", deadline_s, options)
        self._prefix = root.rstrip("/")
        self._requests = requests
        #: The open files of which ranges were read last, by path, and when they were opened: each
        #: knows its size, for which opening it again would cost a request.
        self._opened: OrderedDict[str, tuple[Any, float]] = OrderedDict()

    def _path(self, uri: str) -> str:
        return self._prefix + unquote(urlsplit(uri).path)

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        if not (versioned or stored.whole or length == UNKNOWN):
            return self._range(stored, offset, length), version.UNKNOWN
        with self._open(self._path(stored.uri)) as f:
            known = versioned or stored.pinned != ANY
            data_version = self._version(stored.uri, f) if known else version.UNKNOWN
            check_pin(stored, data_version)
            nbytes = f.size() if length == UNKNOWN else length
            check_size(stored, f.size(), nbytes)
            f.seek(offset)
            self._requests.count("GET")
            data: bytes = f.read(nbytes)
        if len(data) < nbytes:
            raise too_short(stored.uri, nbytes, len(data))
        return data, data_version

    def _open(self, path: str) -> Any:
        self._requests.count("HEAD")
        return self._fs.open_input_file(path)

    def _range(self, stored: StoredFile, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object that others of its ranges have been read of, or will be."""
        path = self._path(stored.uri)
        known, opened = self._opened.get(path, (None, 0.0))
        now = time.monotonic()
        if now - opened > _REOPEN_S:
            known = None
        file = known or self._open(path)
        if known is None and stored.pinned != ANY:
            check_pin(stored, self._version(stored.uri, file))
        try:
            data = self._read_at(file, stored, offset, nbytes)
        except Exception:
            self._opened.pop(path, None)
            if known is None:
                raise
            return self._range(stored, offset, nbytes)  # the object may be another one by now
        if known is None:
            self._opened[path] = file, now
            while len(self._opened) > _MAX_OPENED:
                with suppress(KeyError):  # another thread has removed it
                    self._opened.popitem(last=False)
        return data

    def _read_at(self, file: Any, stored: StoredFile, offset: int, nbytes: int) -> bytes:
        check_size(stored, file.size(), nbytes)
        self._requests.count("GET")
        data: bytes = file.read_at(nbytes, offset)
        if len(data) < nbytes:
            raise too_short(stored.uri, nbytes, len(data))
        return data

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        with self._open(self._path(stored.uri)) as f:
            check_size(stored, f.size(), runs[0][1])
            data_version = self._version(stored.uri, f)
            check_pin(stored, data_version)
            for i, (offset, _, buffers) in enumerate(runs):
                f.seek(offset)
                for buffer in buffers:
                    self._requests.count("GET", int(len(buffer) > 0))
                    got = f.readinto(buffer) if len(buffer) else 0
                    if got < len(buffer):
                        raise too_short(stored.uri, len(buffer), got)
                yield Filled(int(i == 0), data_version)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        return of_each(self._ask, uris)

    def status(self, uri: str) -> tuple[int | None, int]:
        with self._open(self._path(uri)) as f:
            return int(f.size()), self._version(uri, f)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store. The first folders are listed at once, as an answer has 1,000 keys at most."""
        from pyarrow import fs

        base = self._path(root).rstrip("/")
        listing = self._info(fs.FileSelector(base)) if self._lists_folders else []
        folders = [info.path for info in listing if info.type is fs.FileType.Directory]
        # Too many may cost more requests than all their keys. `base` itself is the answer for keys
        # with an empty part ("base//x").
        if not self._lists_folders or base in folders or len(folders) > _MAX_FOLDERS:
            folders, listing = [base], []

        def below(folder: str) -> Any:
            return self._info(fs.FileSelector(folder, recursive=True))

        with ThreadPoolExecutor(_LISTED_AT_ONCE, "creel-list") as pool:
            try:
                answers = pool.map(below, folders)
            except RuntimeError:  # no thread available
                answers = map(below, folders)
            for infos in chain([listing], answers):
                for info in infos:
                    if info.type is fs.FileType.File:
                        size = UNKNOWN if info.size is None else int(info.size)
                        yield info.path[len(base) + 1 :], size

    def _info(self, of: Any) -> Any:
        self._requests.count("HEAD" if isinstance(of, str) else "LIST")
        return self._fs.get_file_info(of)

    def _status(self, uri: str) -> Any:
        info = self._info(self._path(uri))
        if info.type.name == "NotFound":
            raise FileNotFoundError(errno.ENOENT, "not found", uri)
        return info

    def _ask(self, uri: str) -> int:
        with self._open(self._path(uri)) as f:
            return self._version(uri, f)

    def _version(self, uri: str, file: Any) -> int:
        """Return the version of an open file; a request only if opening it gave no tag."""
        tag = tag_of({k: v.decode() for k, v in (file.metadata() or {}).items()}, file.size())
        return version.of_tag(tag) if tag else _version_of(self._status(uri))


class GcsStore(ArrowStore):
    """Reads gs, with a thread for each request, as Google's client has no time-out for answers.

    The client holds the GIL while it opens a file for random access, so that no thread could notice
    a time-out. Opening a stream releases it, so a stream comes first; most objects need no more.
    """

    #: Only those which are also objects ("name/"); keys alone make none.
    _lists_folders = False

    def __init__(
        self, uri: str, deadline_s: float, options: Mapping[str, Any], requests: Requests
    ) -> None:
        super().__init__(uri, deadline_s, options, requests)
        self._deadline_s = deadline_s

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        del versioned  # the request for the size returns the version as well
        parts, data_version = self._bytes(stored, [(offset, length)])
        return parts[0], data_version

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        parts, data_version = self._bytes(stored, [(offset, length) for offset, length, _ in runs])
        for i, ((_, _, buffers), data) in enumerate(zip(runs, parts, strict=True)):
            copy_over(memoryview(data), buffers)
            yield Filled(int(i == 0), data_version)

    def _bytes(
        self, stored: StoredFile, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[bytes], int]:
        """Return the bytes of each (offset, nbytes or UNKNOWN), and the version of the object.

        They are in new memory, as late threads may write.
        """
        path = self._path(stored.uri)
        with self._stream(path) as (f, size, data_version):
            nbytes = size if spans[0][1] == UNKNOWN else spans[0][1]
            check_size(stored, size, nbytes)
            check_pin(stored, data_version)
            if len(spans) == 1 and spans[0][0] == 0:
                data: bytes = self._in_time(lambda: f.read(nbytes), nbytes / SLOWEST_BPS)
                parts, asked = [data], [nbytes]
            else:
                asked = [n for _, n in spans]
                parts = self._in_time(lambda: self._parts(path, spans), sum(asked) / SLOWEST_BPS)
        for data, n in zip(parts, asked, strict=True):
            if len(data) < n:
                raise too_short(stored.uri, n, len(data))
        return parts, data_version

    def _parts(self, path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        self._requests.count("GET", len(spans))
        parts = []
        with self._fs.open_input_file(path) as f:
            for offset, n in spans:
                f.seek(offset)  # read_at would cost another request
                parts.append(f.read(n))
        return parts

    @contextmanager
    def _stream(self, path: str) -> Iterator[tuple[Any, int, int]]:
        """Open an object; yields the stream, its size and version, which is the generation."""
        self._requests.count("GET")
        with self._in_time(lambda: self._fs.open_input_stream(path)) as f:
            self._requests.count("HEAD")
            about = self._in_time(f.metadata)
            yield f, int(about["size"]), version.of_tag(about["generation"].decode())

    def status(self, uri: str) -> tuple[int | None, int]:
        with self._stream(self._path(uri)) as (_, size, data_version):
            return size, data_version

    def _info(self, of: Any) -> Any:
        return self._in_time(
            lambda: super(GcsStore, self)._info(of), _MAX_DEADLINES * self._deadline_s
        )

    def _ask(self, uri: str) -> int:
        return self.status(uri)[1]

    def _in_time(self, job: Callable[[], T], more_s: float = 0.0) -> T:
        """Return `job()`, run in a thread that is abandoned if no answer comes in time."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(job())
            except BaseException as e:  # noqa: BLE001  raised in the waiting thread
                answer.set_exception(e)

        try:
            threading.Thread(target=work, name="creel-gs", daemon=True).start()
        except RuntimeError:  # no thread available
            return job()
        late_s = self._deadline_s + more_s
        if not wait([answer], late_s).done:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {late_s:g} s")
        return answer.result()


def _version_of(info: Any) -> int:
    """Return a version made of time and size; Google allows one write of an object per second."""
    if info.mtime_ns is None:
        return version.UNKNOWN
    return version.of_tag(f"{info.mtime_ns} {info.size}")
