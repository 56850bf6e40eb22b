"""This process's connections to daemons, at most one per daemon name."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.errors import UnavailableError
from creel.loader.client.client import Client, DecodedIndexes
from creel.loader.client.embed import (
    OTHER_START_S,
    DaemonStart,
    connect_or_start,
    start_early,
    started_elsewhere,
)
from creel.loader.client.session import Session
from creel.loader.client.unmet_settings import warn_of_unmet
from creel.system.forks import at_fork
from creel.system.limits import few_descriptors

_log = logging.getLogger("creel.loader")

#: Seconds from a failure to reach or start a daemon to the next attempt: at first, and at most. A
#: wrapped dataset looks as often whether its files lie in the page cache.
RETRY_S, MAX_RETRY_S = 30.0, 600.0
#: Seconds for which a service that has ended is expected back, and between two looks for it. To
#: start a daemon meanwhile would take the training away from the memory that the service keeps.
RETURN_S, POLL_S = 10.0, 0.25


@dataclass
class _Way:
    """What this process knows of the daemon of one name; moments of `time.monotonic`."""

    client: Client | None = None
    start: DaemonStart | None = None  # of a daemon that is starting
    not_before: float = 0.0  # the next attempt
    returns_by: float = 0.0  # when a service that has ended is not expected any more
    pause_s: float = 0.0  # after the last failure
    seen_starting: float = math.inf  # when another process was first seen starting a daemon


_ways: defaultdict[str, _Way] = defaultdict(_Way)
_lock = threading.Lock()
#: (daemon name, why a dataset is read directly): each reason is said once.
_warned: set[tuple[str, str]] = set()


def client_of(config: Config, *, trainer_pid: int = 0) -> Client | None:
    """Return this process's connection to the configured daemon, reconnecting after a loss.

    Returns None if there is no daemon, and for `RETRY_S` after a failure. Each further failure
    doubles that time up to `MAX_RETRY_S`, since each attempt on a stopped daemon blocks for 10 s.

    Args:
        trainer_pid: see `Client.connect`.
    """
    name = config.daemon.name
    with _lock:
        way = _ways[name]
        if time.monotonic() < way.not_before:
            return None
        client = way.client
        if client is not None and client.alive:
            return client
        hung = client is not None and client.hung  # another attempt would block again
        if client is not None:
            if not hung:
                _log.warning("the creel daemon has ended: connecting to another, or starting one")
            if client.returns and not hung:
                way.returns_by = time.monotonic() + RETURN_S
            disconnect(name)
        start, way.start = way.start, None
        if start is None and time.monotonic() < way.returns_by:
            with suppress(UnavailableError, OSError):  # it does not serve yet
                way.client = Client.connect(name, trainer_pid=trainer_pid)
            if way.client is None:
                way.not_before = time.monotonic() + POLL_S
                return None
        elif not hung:
            way.client = connect_or_start(config, trainer_pid=trainer_pid, start=start)
        if way.client is None:
            way.pause_s = min(2 * way.pause_s or RETRY_S, MAX_RETRY_S)
            way.not_before = time.monotonic() + way.pause_s
        else:
            way.pause_s = way.returns_by = 0.0
        return way.client


def running_client(config: Config) -> Client | None:
    """Return this process's connection to a daemon that runs already, or make one; else None.

    For what needs no daemon: none is started, nobody is warned, and a failure does not keep others
    from trying. Waits up to 10 s for a daemon that is stopped.
    """
    name = config.daemon.name
    with _lock:
        way = _ways[name]
        if way.client is not None:
            return way.client if way.client.alive else None
        if way.start is not None or time.monotonic() < way.not_before or few_descriptors():
            return None
    try:
        new_client = Client.connect(
            name
        )  # without the lock: others need not wait for a stopped daemon
    except (UnavailableError, OSError):
        return None
    with _lock:
        way = _ways[name]
        client = way.client = way.client or new_client
    if client is not new_client:
        new_client.close()
    return client


def open_session(
    manifest: Manifest,
    config: Config,
    origins: Mapping[str, str],
    job: str,
    rank: int,
    world: int,
    *,
    recheck: str,
    trainer_pid: int = 0,
    decoded: DecodedIndexes = (),
) -> Session | None:
    """Open a session with this node's daemon; None, after one warning, on failure.

    Args:
        origins: the origin of each setting; a trainer warns of those that the daemon lacks.
        job, rank, world, recheck, decoded: see `messages.Open`.
        trainer_pid: see `Client.connect`; 0: this process is the trainer.
    """
    client = client_of(config, trainer_pid=trainer_pid)
    if client is None:
        return None
    try:
        session = client.open_manifest(manifest, job, rank, world, recheck=recheck, decoded=decoded)
    except (UnavailableError, OSError) as e:  # OSError: no descriptor, or no memory for a mapping
        why = str(e)  # the text alone, as in `connect_or_start`
        # Closed by the trainer's thread: nothing is read any more.
        if not client.closed and (config.daemon.name, why) not in _warned:
            _warned.add((config.daemon.name, why))
            _log.warning("creel reads directly, without a cache: %s", why)
        return None
    if not trainer_pid:
        warn_of_unmet(client, config, origins)
    return session


def connected(name: str) -> Client | None:
    """Return this process's connection to the daemon of that name, if there is one."""
    return _ways[name].client


def disconnect(name: str) -> None:
    """Close this process's connection to the daemon of that name, or stop waiting for its start."""
    way = _ways[name]
    client, start, way.client, way.start = way.client, way.start, None, None
    if client is not None:
        client.close()
    if start is not None:
        start.close()


def start_daemon_early(config: Config) -> None:
    """Start a daemon when a loader is made, so that it is up at the first read.

    Making a model and moving it to a device takes longer than a daemon's start
    (benchmarks/startup.py).
    """
    with _lock:
        way = _ways[config.daemon.name]
        later = max(way.not_before, way.returns_by)
        if way.client is not None or way.start is not None or time.monotonic() < later:
            return
        way.start = start_early(config)
        if way.start is not None:
            with suppress(ImportError, OSError):  # the first use of zmq reports that
                import zmq  # 15 ms, while the daemon starts

                del zmq


def daemon_starting(config: Config) -> bool:
    """Whether `client_of` would wait for a daemon that is starting; starts one if there is none.

    For callers that can do other work meanwhile.
    """
    start_daemon_early(config)
    name, now = config.daemon.name, time.monotonic()
    with _lock:
        way = _ways[name]
        if way.start is not None:
            return not way.start.reported()
        elsewhere = way.client is None and started_elsewhere(name)
        way.seen_starting = min(way.seen_starting, now) if elsewhere else math.inf
        return elsewhere and now < way.seen_starting + OTHER_START_S


def _reset_for_process() -> None:
    global _lock  # noqa: PLW0603  another thread of the parent may have held it
    _lock = threading.Lock()
    while _ways:
        start = _ways.popitem()[1].start
        if start is not None:
            start.close(wait=False)


def _close_all() -> None:
    for name in list(_ways):
        disconnect(name)


at_fork(after_in_child=_reset_for_process)
atexit.register(_close_all)
