"""This process's connections to daemons, at most one per daemon name."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.errors import UnavailableError
from creel.loader.client.client import Client
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

#: Seconds from a failure to reach or start a daemon to the next attempt: at first, and at most.
RETRY_S, MAX_RETRY_S = 30.0, 600.0
#: Seconds for which a service that has ended is expected back, and between two looks for it. To
#: start a daemon meanwhile would take the training away from the memory that the service keeps.
RETURN_S, LOOK_S = 10.0, 0.25
_not_before: dict[str, float] = {}
_returns_by: dict[str, float] = {}  # when a service that has ended is not expected any more
_pauses: dict[str, float] = {}  # seconds after the last failure
_clients: dict[str, Client] = {}
_starts: dict[str, DaemonStart] = {}
_seen_starting: dict[str, float] = {}  # when another process was first seen starting a daemon
_lock = threading.Lock()
#: (daemon name, why a dataset is read directly): each reason is said once.
_told: set[tuple[str, str]] = set()


def client_of(config: Config, *, trainer_pid: int = 0) -> Client | None:
    """Return this process's connection to the configured daemon, reconnecting after a loss.

    Returns None if there is no daemon, and for `RETRY_S` after a failure. Each further failure
    doubles that time up to `MAX_RETRY_S`, since each attempt on a stopped daemon blocks for 10 s.

    Args:
        trainer_pid: see `Client.connect`.
    """
    name = config.daemon.name
    with _lock:
        client = _clients.get(name)
        if time.monotonic() < _not_before.get(name, 0.0):
            return None
        if client is None or not client.alive:
            hung = client is not None and client.hung  # another attempt would block again
            if client is not None:
                if not hung:
                    _log.warning(
                        "the creel daemon has ended: connecting to another, or starting one"
                    )
                if client.returns and not hung:
                    _returns_by[name] = time.monotonic() + RETURN_S
                disconnect(name)
            start = _starts.pop(name, None)
            client = None
            if start is None and time.monotonic() < _returns_by.get(name, 0.0):
                client = _returned(name, trainer_pid)
                if client is None:
                    _not_before[name] = time.monotonic() + LOOK_S
                    return None
            elif not hung:
                client = connect_or_start(config, trainer_pid=trainer_pid, start=start)
            if client is None:
                pause_s = _pauses[name] = min(2 * _pauses.get(name, RETRY_S / 2), MAX_RETRY_S)
                _not_before[name] = time.monotonic() + pause_s
            else:
                _pauses.pop(name, None)
                _returns_by.pop(name, None)
                _clients[name] = client
        return client


def _returned(name: str, trainer_pid: int) -> Client | None:
    """Connect to a service that was started again; None if it does not serve yet."""
    with suppress(UnavailableError, OSError):
        return Client.connect(name, trainer_pid=trainer_pid)
    return None


def running_client(config: Config) -> Client | None:
    """Return this process's connection to a daemon that runs already, or make one; else None.

    For what needs no daemon: none is started, nobody is warned, and a failure does not keep others
    from trying. Waits up to 10 s for a daemon that is stopped.
    """
    name = config.daemon.name
    with _lock:
        client = _clients.get(name)
        if client is not None:
            return client if client.alive else None
        if name in _starts or time.monotonic() < _not_before.get(name, 0.0) or few_descriptors():
            return None
    try:
        made = Client.connect(name)  # without the lock: others need not wait for a stopped daemon
    except (UnavailableError, OSError):
        return None
    with _lock:
        client = _clients.setdefault(name, made)
    if client is not made:
        made.close()
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
) -> Session | None:
    """Open a session with this node's daemon; None, after one warning, on failure.

    Args:
        origins: the origin of each setting; a trainer warns of those that the daemon lacks.
        job, rank, world, recheck: see `messages.Open`.
        trainer_pid: see `Client.connect`; 0: this process is the trainer.
    """
    client = client_of(config, trainer_pid=trainer_pid)
    if client is None:
        return None
    try:
        session = client.open_manifest(manifest, job, rank, world, recheck=recheck)
    except (UnavailableError, OSError) as e:  # OSError: no descriptor, or no memory for a mapping
        why = str(e)  # the text alone, as in `connect_or_start`
        # Closed by the trainer's thread: nothing is read any more.
        if not client.closed and (config.daemon.name, why) not in _told:
            _told.add((config.daemon.name, why))
            _log.warning("creel reads directly, without a cache: %s", why)
        return None
    if not trainer_pid:
        warn_of_unmet(client, config, origins)
    return session


def connected(name: str) -> Client | None:
    """Return this process's connection to the daemon of that name, if there is one."""
    return _clients.get(name)


def disconnect(name: str) -> None:
    """Close this process's connection to the daemon of that name, or stop waiting for its start."""
    client, start = _clients.pop(name, None), _starts.pop(name, None)
    if client is not None:
        client.close()
    if start is not None:
        start.close()


def start_daemon_early(config: Config) -> None:
    """Start a daemon when a loader is made, so that it is up at the first read.

    Making a model and moving it to a device takes longer than a daemon's start
    (benchmarks/startup.py).
    """
    name = config.daemon.name
    with _lock:
        later = max(_not_before.get(name, 0.0), _returns_by.get(name, 0.0))
        if name in _clients or name in _starts or time.monotonic() < later:
            return
        start = start_early(config)
        if start is not None:
            _starts[name] = start
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
        start = _starts.get(name)
        if start is not None:
            return not start.reported()
        if name in _clients or not started_elsewhere(name):
            _seen_starting.pop(name, None)
            return False
        return now < _seen_starting.setdefault(name, now) + OTHER_START_S


def _forget_inherited() -> None:
    global _lock  # noqa: PLW0603  another thread of the parent may have held it
    _lock = threading.Lock()
    _clients.clear()
    _not_before.clear()
    _returns_by.clear()
    _pauses.clear()
    _seen_starting.clear()
    while _starts:
        _starts.popitem()[1].close(wait=False)


def _close_all() -> None:
    for name in {*_clients, *_starts}:
        disconnect(name)


at_fork(after_in_child=_forget_inherited)
atexit.register(_close_all)
