"""What a dataset needs of a storage before it has a manifest: addresses, single reads, listings.

An address is a path, or a URI: file://, what pyarrow.fs opens (s3, gs, hdfs, ...), or what fsspec
opens (http, https, memory, ...). Reads of a dataset's objects go through
`creel.cache.storage.source`. `use` sets retries and deadlines for the whole process.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote, urlsplit

from creel.cache.storage.manifest import ANY, UNKNOWN
from creel.cache.storage.stores.access import ARROW, options_of
from creel.cache.storage.stores.remote import open_store, store_key
from creel.cache.storage.stores.retry import public, retried, source_error
from creel.cache.storage.stores.store import LocalStore, Store, StoredFile, read_file
from creel.cache.storage.uris import scheme_of
from creel.cache.storage.version import MISSING, of_stat
from creel.config import Config
from creel.errors import ConfigError, CreelError, NotFoundError, SourceError
from creel.settings import FetchSettings
from creel.streams.redis_stream import is_redis
from creel.system.python_open import python_open

T = TypeVar("T")
R = TypeVar("R")

#: Schemes whose stores tag each version of an object, whoever asks.
_PINNED = frozenset({"s3", "gs", "gcs"})
#: Threads that list folders and ask for sizes. They wait for the storage, not for the CPU.
_THREADS = 16

#: `storage_options` of a dataset or a call, in fsspec's convention; None: the environment's.
Options: TypeAlias = Mapping[str, Any] | None

_stores: dict[tuple[int, bool, str, str, str, str], Store] = {}
#: Scheme and host of those that have answered.
_reached: set[tuple[str, str]] = set()
_lock = threading.Lock()


def absolute(address: str | os.PathLike[str]) -> str:
    """Return the address as a URI or absolute path, which any process of this machine can read.

    >>> absolute("file:///data/a%20b"), absolute("s3://bucket/a/")
    ('/data/a b', 's3://bucket/a')

    Raises:
        ConfigError: neither a string nor a path.
        NotFoundError: an empty path (it would mean the working directory), or only a scheme.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise ConfigError(f"a path is a string or a Path, not {address!r}")
    text = os.fspath(address)
    if text.startswith("/") and "//" not in text and "/." not in text and text[-1] != "/":
        return text  # the usual case; the rest takes several times as long
    if not text:
        raise NotFoundError("the path is empty: name a file or a folder ('.' is this one)")
    scheme = scheme_of(text)
    if scheme == "file":
        return unquote(urlsplit(text).path)
    if scheme:
        if not text.partition("://")[2].strip("/"):
            raise NotFoundError(
                f"{text} lacks a bucket or host: write {scheme}://bucket-or-host/path"
            )
        return text.rstrip("/")
    return absolute_path(os.path.expanduser(text))  # noqa: PTH111


def absolute_path(path: str) -> str:
    """Return an absolute path without empty and `.` components.

    `..` stays, because after a symbolic link only the file system can resolve it.

    >>> absolute_path("/data/./a//b/../c/")
    '/data/a/b/../c'
    """
    whole = path if path.startswith("/") else f"{os.getcwd()}/{path}"  # noqa: PTH109
    return "/" + "/".join(step for step in whole.split("/") if step not in {"", "."})


def is_local(address: str) -> bool:
    """Whether an address in the form of `absolute` is a local path."""
    return "://" not in address


def version_at(path: str) -> int:
    """Return the present version of a local file (`cache/storage/version.py`)."""
    now_ns = time.time_ns()
    try:
        return of_stat(os.stat(path), now_ns)  # noqa: PTH116  a third of the time of Path.stat
    except (OSError, ValueError):
        return MISSING


def several(given: object) -> list[str | os.PathLike[str]]:
    """Return one address or many, as a list.

    Raises:
        ConfigError: not an address or an iterable of addresses.
    """
    if isinstance(given, (str, os.PathLike)):
        return [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"give a path or a list of paths, not {given!r}")
    listed = list(given)
    for one in listed:
        if not isinstance(one, (str, os.PathLike)):
            raise ConfigError(f"a path is a string or a Path, not {one!r}")
    return listed


def check_installed(address: str) -> None:
    """Check, without a request, that what reads an address is installed.

    Raises:
        ConfigError: a package is missing; the message says which.
    """
    scheme = scheme_of(address)
    if not scheme or scheme in ARROW or is_redis(address):
        return
    from creel.cache.storage.stores.fsspec_store import needs  # with the first such address

    try:
        needs(scheme)
    except SourceError as e:
        raise ConfigError(f"{public(address)} cannot be opened: {e.strerror}") from None


def is_folder(address: str) -> bool:
    """Whether a path is a folder; True for every remote address."""
    return bool(scheme_of(address)) or Path(address).is_dir()


def in_threads(job: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return [job(item) for item in items], run in up to 16 threads at a time."""
    if len(items) <= 1:
        return [job(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items)), "creel-list") as pool:
        try:
            done = pool.map(job, items)  # starts the threads
        except RuntimeError:  # no threads allowed (`ulimit -u`)
            return [job(item) for item in items]
        return list(done)


# --- single reads -----------------------------------------------------------------------------


def read_all(address: str, options: Options = None) -> bytes:
    """Read all bytes at an address; raises as `open` for a local file, SourceError for others."""
    if "://" in address:
        return _read(address, 0, UNKNOWN, options, objects=True)
    try:
        return read_file(address)  # costs half as much as a file object
    except OSError:
        with python_open(address, "rb") as f:  # raises open()'s own error, as for a folder
            return f.read()


def read_range(address: str, offset: int, nbytes: int, options: Options = None) -> bytes:
    """Read `nbytes` bytes from `offset` on; fewer only at the end of a local file."""
    if not scheme_of(address):
        with python_open(address, "rb") as f:
            f.seek(offset)
            return f.read(nbytes)
    return _read(address, offset, nbytes, options)


def read_part(address: str, offset: int, nbytes: int, options: Options, version: int) -> bytes:
    """Read bytes of a remote file for a sample.

    Raises:
        SourceError: also if it is not the `version` that `status_of` has told, unless that is ANY.
    """
    return _read(address, offset, nbytes, options, objects=True, version=version)


def nbytes_of(address: str, options: Options = None) -> int:
    """Return the size in bytes; raises as `status_of`."""
    return status_of(address, options)[0]


def status_of(address: str, options: Options = None) -> tuple[int, int]:
    """Return the size in bytes, and the version that a manifest can be pinned to, or ANY.

    ANY for local files, which change as their owner likes, and for servers of HTTP, of which
    several at one address may tag a file each in its own way.

    Raises:
        NotFoundError: nothing is there, or it is a folder.
        ConfigError: the storage does not know the size, or denies access.
        SourceError: the storage fails.
    """
    if not scheme_of(address):
        try:
            status = os.stat(address)  # noqa: PTH116  fast: called for each of a million files
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: zero byte in path
            raise NotFoundError(f"there is no file {address}") from None
        if S_ISDIR(status.st_mode):
            raise NotFoundError(f"{address} is a folder: give the files in it, as a list")
        if not S_ISREG(status.st_mode):
            raise NotFoundError(f"there is no file {address}")
        return status.st_size, ANY
    with _creel_errors(address, options):
        size, version = _with_retries(address, lambda store: store.status(address), options)
    if size is None:
        raise ConfigError(f"the storage does not report the size of {public(address)}")
    return size, version if scheme_of(address) in _PINNED else ANY


@contextmanager
def _creel_errors(address: str, options: Options) -> Iterator[None]:
    """Turn a storage's exception about `address` into one of creel's errors, in one sentence.

    That stands alone: 100 lines of a library's frames above it would bury it.
    """
    try:
        yield
    except CreelError:
        raise
    except Exception as e:  # noqa: BLE001  stores raise what they like
        failure = source_error(e, address, options_of(scheme_of(address), options))
        if failure.errno == errno.ENOENT:
            why = failure.strerror or ""
            more = f": {why}" if "bucket" in why else ""
            raise NotFoundError(f"there is no {failure.uri}{more}") from None
        if failure.errno == errno.EACCES:
            raise ConfigError(f"{failure.uri}: {failure.strerror}") from None
        raise failure from None


def _store(address: str, given: Options, objects: bool) -> Store:
    deadline_s = settings().deadline_s  # outside the lock, which settings() may take
    try:
        options = options_of(scheme_of(address), given)
        # By process id, because clients of object stores own threads and do not survive a fork.
        key = (os.getpid(), objects, *store_key(address), repr(sorted(options.items())))
        with _lock:
            if key not in _stores:
                _stores[key] = open_store(address, deadline_s, options, objects=objects)
            return _stores[key]
    except (ImportError, ValueError, SourceError) as e:  # fsspec or a part is missing
        why = e.strerror if isinstance(e, SourceError) else e
        raise ConfigError(f"{public(address)} cannot be opened: {why}") from None


def _with_retries(
    address: str, job: Callable[[Store], R], options: Options, *, objects: bool = False
) -> R:
    # What a sample reads may have come from a daemon so far; what is asked before there is a
    # dataset may have a wrong address.
    storage = store_key(address)[:2]
    answer = retried(
        *(settings(), lambda: job(_store(address, options, objects)), address),
        reached=objects or storage in _reached,
    )
    _reached.add(storage)
    return answer


def _read(
    address: str,
    offset: int,
    length: int,
    options: Options,
    *,
    objects: bool = False,
    version: int = ANY,
) -> bytes:
    stored = StoredFile(address, pinned=version)

    def read(store: Store) -> bytes:
        return store.read(stored, offset, length)[0]

    try:
        return _with_retries(address, read, options, objects=objects)
    except Exception as e:  # noqa: BLE001  same as above
        raise source_error(e, address, options_of(scheme_of(address), options)) from None


# --- retries and deadlines --------------------------------------------------------------------

_settings: FetchSettings | None = None


def use(settings: FetchSettings) -> None:
    """Use these settings for retries and deadlines of this process from now on."""
    global _settings  # noqa: PLW0603  one per process: datasets are read anywhere in it
    if settings != _settings:
        _settings = settings
        with _lock:
            _stores.clear()


def settings() -> FetchSettings:
    """Return the settings in use: a loader's, else those of environment and files."""
    if _settings is None:
        try:
            use(Config.load()[0].fetch)
        except ConfigError:  # the loader reports it; `creel.read` uses the defaults
            use(FetchSettings())
    return _settings or FetchSettings()


# --- listings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """Files below a root in a fixed order: names relative to it, sizes in bytes where known."""

    names: list[str]
    nbytes: list[int] | None = None

    def __len__(self) -> int:
        return len(self.names)


def walk(root: str) -> Listing:
    """List all files below a local folder as `sorted(os.walk(root))` does, following links."""
    return Listing([name for name, _ in LocalStore(0).list(root)])


def list_remote(
    root: str, options: Options = None, rows: list[tuple[str, int]] | None = None
) -> Listing:
    """List every object below a URI in the order of `walk`, with sizes if the storage gives all.

    `rows`: a list for what has been listed so far.

    Raises:
        NotFoundError: nothing is there.
        ConfigError: the storage denies access.
        SourceError: the storage fails.
    """
    found = [] if rows is None else rows

    def listed(store: Store) -> Listing:
        found.clear()
        found.extend(store.list(root))
        return in_walk_order(found)

    with _creel_errors(root, options):
        return _with_retries(root, listed, options)


def in_walk_order(found: Iterable[tuple[str, int]]) -> Listing:
    """Sort (name, nbytes) by folder, then by name; keep the sizes only if all are known."""
    rows = sorted(found, key=lambda row: row[0].rpartition("/")[::2])
    sizes = [n for _, n in rows]
    return Listing([name for name, _ in rows], None if UNKNOWN in sizes else sizes)


def escape(root: str, name: str) -> str:
    """Escape a listed name so that `root/name` addresses that file.

    >>> escape("http://h/d", "hot dog/1#.png"), escape("s3://b", "hot dog/1#.png")
    ('hot%20dog/1%23.png', 'hot dog/1%23.png')
    """
    scheme = scheme_of(root)
    if scheme in {"http", "https"}:
        return quote(name)
    if scheme in ARROW:
        return name.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    return name


def unescape(root: str, name: str) -> str:
    """Invert `escape`.

    >>> unescape("http://h/d", "hot%20dog/1%23.png"), unescape("/d", "50%25.png")
    ('hot dog/1#.png', '50%25.png')
    """
    return unquote(name) if scheme_of(root) in ARROW | {"http", "https"} else name
