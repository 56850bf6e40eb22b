"""Warn, once, about the user's settings that the running daemon does not act on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from creel.config import Config
from creel.errors import ConfigError, UnavailableError
from creel.units import parse_size

if TYPE_CHECKING:
    from creel.loader.client.client import Client

_log = logging.getLogger("creel.loader")
_TIMEOUT_S = 1.0  # an answer takes 0.1 ms, and this one is optional
_DAEMONS = ("memory.", "disk.", "fetch.", "window.", "daemon.", "cluster.")
_checked: set[tuple[int, str, str]] = set()


def warn_of_unmet(client: Client, config: Config, origins: Mapping[str, str]) -> None:
    """Warn of the user's settings that differ from the daemon's, and of a disk tier that failed.

    Args:
        origins: the origin of each key's value, as `Config.load` returns it.
    """
    ours = config.flat()
    given = [key for key, origin in origins.items() if origin != "default"]
    asked = {(client.daemon_pid, key, str(ours[key])) for key in given if of_daemon(key)}
    if asked <= _checked:
        return
    _checked.update(asked)
    try:
        answer = client.ask("config", timeout_s=_TIMEOUT_S)
        theirs = answer["effective"]
    except (UnavailableError, ConfigError, KeyError, ImportError):  # no memory to load zmq
        return
    failure = answer.get("disk_failure", "")
    if failure and "disk.path" in given:
        _log.warning("there is no disk tier in %s (disk.path): %s", theirs["disk.path"], failure)
    differing = unmet(ours, theirs, given)
    if differing:
        differences = "; ".join(
            f"{k} = {theirs[k]!r}, not {ours[k]!r} ({origins[k]})" for k in differing
        )
        _log.warning(
            "the running creel daemon (process %d) was started with other settings and keeps them:"
            " %s. To change them, end it by `creel stop`, or choose another daemon.name",
            client.daemon_pid,
            differences,
        )


def of_daemon(key: str) -> bool:
    """Whether a daemon acts on this setting; `daemon.name`, which selects it, does not count."""
    return key.startswith(_DAEMONS) and key != "daemon.name"


def unmet(
    ours: Mapping[str, object], theirs: Mapping[str, object], given: Iterable[str]
) -> list[str]:
    """Return the keys of `given` whose values differ in the daemon.

    >>> unmet({"memory.budget": "1GiB"}, {"memory.budget": "1073741824"}, ["memory.budget"])
    []
    """
    return [
        key
        for key in given
        if of_daemon(key) and key in theirs and _nbytes(ours[key]) != _nbytes(theirs[key])
    ]


def _nbytes(value: object) -> object:
    """Convert a size such as "1GiB" to bytes; return anything else unchanged."""
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError:
        return value
