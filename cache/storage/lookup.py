"""What is asked of a storage by address alone: single reads, sizes, versions, listings.

An address is a path, or a URI: file://, what obstore and pyarrow.fs open (s3, gs, az, hdfs, ...),
or what fsspec opens (http, https, memory, ...). Reads of a dataset's objects go through
`creel.cache.storage.source`, by the same stores (`stores`). `use` sets retries and deadlines for
the whole process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar

from creel.cache.storage import lister
from creel.cache.storage.manifest import ANY, UNKNOWN
from creel.cache.storage.stores.access import ARROW, Options, options_of
from creel.cache.storage.stores.remote import Stores, store_key
from creel.cache.storage.stores.retry import public, retried, source_error
from creel.cache.storage.stores.store import LocalStore, Store, StoredFile, read_file
from creel.cache.storage.uris import scheme_of
from creel.config import Config
from creel.errors import ConfigError, NotFoundError, SourceError
from creel.settings import FetchSettings
from creel.streams.redis_stream import is_redis
from creel.system.python_open import python_open

R = TypeVar("R")

#: Schemes whose stores tag each version of an object, whoever asks.
_PINNED = frozenset({"s3", "gs", "gcs", "az", "abfs", "abfss"})

# --- the stores of this process ---------------------------------------------------------------

_stores: Stores | None = None
#: Scheme and host of those that have answered.
_reached: set[tuple[str, str]] = set()


def use(settings: FetchSettings) -> None:
    """Use these settings for retries and deadlines of this process from now on."""
    global _stores  # noqa: PLW0603  one per process: datasets are read anywhere in it
    if _stores is None or settings != _stores.settings:
        _stores = Stores(settings)


def stores() -> Stores:
    """Return the stores of this process, with a loader's settings, else those of the files."""
    if _stores is None:
        try:
            use(Config.load()[0].fetch)
        except ConfigError:  # the loader reports it; `creel.read` uses the defaults
            use(FetchSettings())
    return _stores or Stores(FetchSettings())


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


# --- single reads -----------------------------------------------------------------------------


def read_all(address: str, options: Options = None) -> bytes:
    """Read all bytes at an address; raises as `open` for a local file, SourceError for others."""
    if "://" in address:
        return _read(address, 0, UNKNOWN, options, sample=True)
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
    return _read(address, offset, nbytes, options, sample=True, version=version)


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
    with _creel_errors():
        size, version = _ask(address, lambda store: store.status(address), options)
    if size is None:
        raise ConfigError(f"the storage does not report the size of {public(address)}")
    return size, version if scheme_of(address) in _PINNED else ANY


@contextmanager
def _creel_errors() -> Iterator[None]:
    """Turn a storage's answer that nothing is there, or is allowed, into one of creel's errors.

    That stands alone: 100 lines of a library's frames above it would bury it.
    """
    try:
        yield
    except SourceError as e:
        if e.errno == errno.ENOENT:
            why = e.strerror or ""
            more = f": {why}" if "bucket" in why else ""
            raise NotFoundError(f"there is no {e.uri}{more}") from None
        if e.errno == errno.EACCES:
            raise ConfigError(f"{e.uri}: {e.strerror}") from None
        raise


def _ask(address: str, job: Callable[[Store], R], options: Options, *, sample: bool = False) -> R:
    """Ask the store of an address; `sample`: for bytes of a sample.

    Such a read may have been served by a daemon so far, whereas the address of what is asked before
    there is a dataset may be wrong.
    """
    storage = store_key(address)[:2]

    def resolved() -> dict[str, Any]:
        return options_of(scheme_of(address), options)

    answer = retried(
        stores().settings,
        lambda: job(stores().open(address, resolved(), forks=not sample)),
        address,
        options=resolved,
        reached=sample or storage in _reached,
    )
    _reached.add(storage)
    return answer


def _read(
    address: str,
    offset: int,
    length: int,
    options: Options,
    *,
    sample: bool = False,
    version: int = ANY,
) -> bytes:
    def read(store: Store) -> bytes:
        return store.read(StoredFile(address, pinned=version), offset, length)[0]

    try:
        return _ask(address, read, options, sample=sample)
    except ConfigError as e:  # for who reads it is an error of the storage, as any other
        raise source_error(e, address) from None


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
    entries = [] if rows is None else rows

    def listed(store: Store) -> Listing:
        entries.clear()
        given, settings = options_of(scheme_of(root), options), stores().settings
        try:
            entries.extend(lister.listed(root, given, settings) or store.list(root))
        except OSError as e:
            if e.errno not in lister.UNABLE:
                raise
            entries[:] = store.list(root)
        return in_walk_order(entries)

    with _creel_errors():
        return _ask(root, listed, options)


def in_walk_order(entries: Iterable[tuple[str, int]]) -> Listing:
    """Sort (name, nbytes) by folder, then by name; keep the sizes only if all are known."""
    rows = sorted(entries, key=lambda row: row[0].rpartition("/")[::2])
    sizes = [n for _, n in rows]
    return Listing([name for name, _ in rows], None if UNKNOWN in sizes else sizes)
