"""Remote stores: s3 by obstore or `pyarrow.fs`, gs, hdfs and abfs by the latter, others by fsspec.

All are imported with the first such address (local datasets save 8 and 15 MB), and so is asyncio
(16 ms of a daemon's start). Every request ends within a deadline. `cache/storage/source.py` has
the retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from creel.cache.storage.stores.access import ARROW
from creel.cache.storage.stores.arrow_store import ArrowStore, GcsStore
from creel.cache.storage.stores.obstore_store import ObstoreStore, config_of, usable
from creel.cache.storage.stores.redis_store import RedisStore
from creel.cache.storage.stores.requests import Requests
from creel.cache.storage.stores.store import Store
from creel.streams.redis_stream import is_redis


def store_key(uri: str) -> tuple[str, str, str]:
    """Return scheme, host and options of the store that serves an address.

    The options are the query of addresses that pyarrow.fs reads. Over HTTP the query is part of the
    file's name (a signature, for example).

    >>> store_key("s3://b/a?region=x"), store_key("http://h/a?sign=x")
    (('s3', 'b', 'region=x'), ('http', 'h', ''))
    """
    scheme, _, rest = uri.partition("://")
    scheme = scheme.lower()
    options = urlsplit(uri).query if "?" in rest and scheme in ARROW else ""
    return scheme, rest.partition("/")[0].partition("?")[0], options


def open_store(
    uri: str,
    deadline_s: float,
    options: Mapping[str, Any],
    *,
    handed: bool = False,
    objects: bool = True,
    requests: Requests | None = None,
) -> Store:
    """Make the store of a remote address, with its client, without sending a request.

    Args:
        deadline_s: longest time without an answer to a request.
        options: of the client (`storage.stores.access`). What an address says comes first.
        handed: whether another process has resolved them: this one adds nothing.
        objects: whether for the objects of a dataset; else for what is asked before it has any
            (listings, sizes, headers). That is asked in the process that forks workers, and so by
            a client that lets them use any other.
        requests: counts of them.

    Raises:
        ConfigError: an option that the client does not have.
        SourceError, ImportError, ValueError: there is no such client here.
    """
    scheme = uri.partition("://")[0].lower()
    requests = requests or Requests()
    if scheme in {"gs", "gcs"}:
        return GcsStore(uri, deadline_s, options, requests)
    if scheme == "s3" and objects and usable():
        config = config_of(uri, options)
        if config is not None:
            return ObstoreStore(config, deadline_s, requests)
    if scheme in ARROW:
        return ArrowStore(uri, deadline_s, options, requests)
    if is_redis(uri):
        return RedisStore()
    from creel.cache.storage.stores.fsspec_store import FsspecStore, HttpStore, fsspec_of

    system = fsspec_of(uri, deadline_s, options, handed=handed)
    if scheme in {"http", "https"}:
        return HttpStore(system, deadline_s, requests)
    return FsspecStore(system, deadline_s)
