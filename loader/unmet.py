"""Settings that a running daemon does not have: said once, as it will not take them over."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from creel.config import Config
from creel.errors import ConfigError, UnavailableError
from creel.units import parse_size

if TYPE_CHECKING:
    from creel.loader.client import Client

_log = logging.getLogger("creel.loader")
_PATIENCE_S = 1.0  # an answer takes 0.1 ms, and nobody needs this one
_DAEMONS = ("memory.", "fetch.", "window.", "daemon.")
_said: set[tuple[int, str, str]] = set()


def warn_of_unmet(client: Client, config: Config, origins: Mapping[str, str]) -> None:
    """Compare what the person set with what the daemon was started with.

    Args:
        origins: of each key, where its value came from, as `Config.load` gives it.
    """
    ours = config.flat()
    given = [key for key, origin in origins.items() if origin != "default"]
    asked = {(client.daemon_pid, key, str(ours[key])) for key in given if of_daemon(key)}
    if asked <= _said:
        return
    _said.update(asked)
    try:
        theirs = client.ask("config", timeout_s=_PATIENCE_S)["effective"]
    except (UnavailableError, ConfigError, KeyError):
        return
    differing = unmet(ours, theirs, given)
    if differing:
        told = "; ".join(f"{k} = {theirs[k]!r}, not {ours[k]!r} ({origins[k]})" for k in differing)
        _log.warning(
            "the creel daemon that runs (process %d) has %s: it keeps what it was started with; end"
            " it by `creel stop`, or choose another daemon.name",
            client.daemon_pid,
            told,
        )


def of_daemon(key: str) -> bool:
    """Whether a daemon acts on this setting; its name is what it was found by."""
    return key.startswith(_DAEMONS) and key != "daemon.name"


def unmet(
    ours: Mapping[str, object], theirs: Mapping[str, object], given: Iterable[str]
) -> list[str]:
    """Which of the settings that were given the daemon has otherwise.

    >>> unmet({"memory.budget": "1GiB"}, {"memory.budget": "1073741824"}, ["memory.budget"])
    []
    """
    return [
        key
        for key in given
        if of_daemon(key) and key in theirs and _nbytes(ours[key]) != _nbytes(theirs[key])
    ]


def _nbytes(value: object) -> object:
    """A size that was written in words as its bytes; anything else as it is."""
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError:
        return value
