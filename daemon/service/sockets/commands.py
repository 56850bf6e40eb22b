"""Commands of the CLI to a daemon, and their answers (docs/cli.md has the schema)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from creel.daemon.core.events import Dropped, Warm
from creel.daemon.reporting import stats
from creel.daemon.service.node import Node
from creel.daemon.service.registry import DatasetRecord
from creel.errors import ConfigError
from creel.messages import Command

Args = dict[str, Any]


def answer(node: Node, ask: Command) -> dict[str, Any]:
    """Execute a command and return the answer.

    Raises:
        ConfigError: the command is unknown, or its arguments are wrong.
    """
    command = _COMMANDS.get(ask.what)
    if command is None:
        raise ConfigError(f"no such command: {ask.what!r}; there are {', '.join(_COMMANDS)}")
    return command(node, ask.args)


def status_and_stats(node: Node) -> dict[str, Any]:
    counted = stats.stats(node)
    return {**_status(node, counted["memory"]), **counted}


def _status(node: Node, memory: dict[str, int]) -> dict[str, Any]:
    return {
        "name": node.config.daemon.name,
        "pid": os.getpid(),
        "version": node.version,
        "embedded": node.embedded,
        "state": node.state,
        "uptime_s": time.monotonic() - node.started,
        "memory": memory,
        "clients": node.clients(),
        "sessions": len(node.registry.sessions),
        "datasets": len(node.registry.datasets),
    }


def _submit(node: Node, event: type[Warm | Dropped], args: Args) -> dict[str, Any]:
    """Give the core an event about one dataset; return the dataset's counters."""
    dataset = _named(node, args)
    node.handle_event(event(dataset.key))
    if event is Dropped:
        node.disk.forget(dataset.key)
    return stats.dataset(node.core.snapshot(), dataset)


def _stop(node: Node, args: Args) -> dict[str, Any]:
    node.stop(bool(args.get("now", True)), "creel stop")
    return {"state": node.state}


def _bad_samples(node: Node, args: Args) -> dict[str, Any]:
    """Add the bad samples in `args`, if any; return all of the node."""
    if "rows" in args:
        session = node.registry.sessions.get(args.get("session", -1))
        if session is None:
            raise ConfigError("bad samples need an open session")
        node.bad_samples.add(session.opened.job, session.opened.rank, args["rows"])
    return {"bad": node.bad_samples.rows()}


def _named(node: Node, args: Args) -> DatasetRecord:
    """Return the one dataset whose key begins with `args["dataset"]`."""
    key = args.get("dataset")
    if not isinstance(key, str) or not key:
        raise ConfigError("which dataset? `creel stats` lists them")
    found = [d for k, d in node.registry.datasets.items() if k.startswith(key)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} datasets have a key that begins with {key!r}")
    return found[0]


_COMMANDS: dict[str, Callable[[Node, Args], dict[str, Any]]] = {
    "ping": lambda node, _: {"state": node.state},
    "status": lambda node, _: _status(node, stats.memory(node, node.core.snapshot())),
    "stats": lambda node, _: stats.stats(node),
    "datasets": lambda node, _: {"datasets": stats.datasets(node)},
    "config": lambda node, _: {"settings": node.config.flat(), "effective": node.effective.flat()},
    "warm": lambda node, args: _submit(node, Warm, args),
    "drop": lambda node, args: _submit(node, Dropped, args),
    "bad_samples": _bad_samples,
    "stop": _stop,
}
