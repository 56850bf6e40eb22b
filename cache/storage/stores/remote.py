"""Remote stores: s3, gs and az by obstore or `pyarrow.fs`, hdfs by the latter, others by fsspec.

All are imported with the first such address (local datasets save 8 and 15 MB), and so is asyncio
(16 ms of a daemon's start). Every request ends within a deadline. `cache/storage/source.py` has
the retries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from creel.cache.storage.buckets.find import bucket_of
from creel.cache.storage.stores.access import ARROW
from creel.cache.storage.stores.arrow_store import ArrowStore, GcsStore
from creel.cache.storage.stores.obstore_store import ObstoreStore, usable
from creel.cache.storage.stores.redis_store import RedisStore
from creel.cache.storage.stores.requests import Requests
from creel.cache.storage.stores.store import Store
from creel.errors import ConfigError, SourceError
from creel.settings import FetchSettings
from creel.streams.redis_stream import is_redis

#: Most stores that are kept open; options that were renewed are those of another one.
_MAX_OPEN = 256


class Stores:
    """The remote stores that a process has open, each with its client.

    Those of a training process are shared by all that reads there (`cache/storage/lookup.py`), and
    a daemon has some for each dataset.
    """

    def __init__(
        self, settings: FetchSettings, *, handed: bool = False, requests: Requests | None = None
    ) -> None:
        """`handed`, `requests`: as for `open_store`."""
        self.settings = settings
        self._handed = handed
        self._requests = requests or Requests()
        self._open: dict[tuple[int, bool, str, str, str, str], Store] = {}
        #: By process id, as a fork may copy one that another thread holds.
        self._locks: dict[int, threading.Lock] = {}

    def open(self, uri: str, options: Mapping[str, Any], *, forks: bool = False) -> Store:
        """Return the store of an address for a client's options; it is opened once.

        forks: as for `open_store`.

        Raises:
            ConfigError: it cannot be opened.
            OSError: the region of its bucket is not known, as no server answers.
        """
        # By process id, because clients of object stores own threads and do not survive a fork.
        pid = os.getpid()
        key = (pid, forks, *store_key(uri), repr(sorted(options.items())))
        with self._locks.setdefault(pid, threading.Lock()):
            store = self._open.get(key)
            if store is None:
                if len(self._open) >= _MAX_OPEN:
                    self._open.clear()
                store = self._open[key] = self._opened(uri, options, forks)
            return store

    def _opened(self, uri: str, options: Mapping[str, Any], forks: bool) -> Store:
        deadline_s, requests = self.settings.deadline_s, self._requests
        try:
            return open_store(
                uri, deadline_s, options, handed=self._handed, forks=forks, requests=requests
            )
        except ConfigError:
            raise
        except (ImportError, ValueError, SourceError) as e:  # fsspec or a part is missing
            why = e.strerror if isinstance(e, SourceError) else e
            scheme = uri.partition("://")[0]
            raise ConfigError(f"{scheme}:// addresses cannot be opened: {why}") from None


def store_key(uri: str) -> tuple[str, str, str]:
    """Return scheme, host and options of the store that serves an address.

    The options are the query of addresses that pyarrow.fs reads. Over HTTP the query is part of the
    file's name (a signature, for example).

    >>> store_key("s3://b/a?region=x"), store_key("http://h/a?sign=x")
    (('s3', 'b', 'region=x'), ('http', 'h', ''))
    """
    scheme, _, location = uri.partition("://")
    scheme = scheme.lower()
    options = urlsplit(uri).query if "?" in location and scheme in ARROW else ""
    return scheme, location.partition("/")[0].partition("?")[0], options


def open_store(
    uri: str,
    deadline_s: float,
    options: Mapping[str, Any],
    *,
    handed: bool = False,
    forks: bool = False,
    requests: Requests | None = None,
) -> Store:
    """Make the store of a remote address, with its client, without sending a request.

    Args:
        deadline_s: longest time without an answer to a request.
        options: of the client (`storage.stores.access`). What an address says comes first.
        handed: whether another process has resolved them: this one adds nothing.
        forks: whether what is asked comes before a dataset has objects (listings, sizes, headers).
            That is asked in the process that forks workers, and so by a client that lets them use
            any other.
        requests: counts of them.

    Raises:
        ConfigError: an option that the client does not have.
        SourceError, ImportError, ValueError: there is no such client here.
    """
    scheme = uri.partition("://")[0].lower()
    requests = requests or Requests()
    if not forks and usable() and (bucket := bucket_of(uri, options)) is not None:
        return ObstoreStore(bucket, deadline_s, requests)
    if scheme in {"gs", "gcs"}:
        return GcsStore(uri, deadline_s, options, requests)
    if scheme in ARROW:
        return ArrowStore(uri, deadline_s, options, requests)
    if is_redis(uri):
        return RedisStore()
    from creel.cache.storage.stores.fsspec_store import FsspecStore, HttpStore, fsspec_of

    system = fsspec_of(uri, deadline_s, options, handed=handed)
    if scheme in {"http", "https"}:
        return HttpStore(system, deadline_s, requests)
    return FsspecStore(system, deadline_s)
