"""Commands of the CLI to a daemon, and their answers (docs/json.md has the schema)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from creel.cache.storage.stores.retry import public
from creel.daemon.core.events import Dropped, Warm
from creel.daemon.service import stats
from creel.daemon.service.node import Node
from creel.daemon.service.registry import DatasetRecord, SessionRecord
from creel.errors import ConfigError
from creel.messages import Command
from creel.version import VERSION

Args = dict[str, Any]

_MAX_PATH = 4096
_MAX_LINGER_S = 86_400


def answer(node: Node, ask: Command) -> dict[str, Any]:
    """Execute a command and return the answer.

    Raises:
        ConfigError: the command is unknown, or its arguments are wrong.
    """
    command = _COMMANDS.get(ask.name)
    if command is None:
        raise ConfigError(f"no such command: {ask.name!r}; there are {', '.join(_COMMANDS)}")
    return command(node, ask.args)


def status_and_stats(node: Node) -> dict[str, Any]:
    counted = stats.stats(node)
    return {**_status(node, counted["memory"]), **counted}


def _status(node: Node, memory: dict[str, int]) -> dict[str, Any]:
    return {
        "name": node.config.daemon.name,
        "pid": os.getpid(),
        "version": VERSION,
        "embedded": node.embedded,
        "state": node.shell.state,
        "uptime_s": time.monotonic() - node.started,
        "memory": memory,
        "disk": {"path": node.effective.disk.path, "failure": node.disk.failure},
        "clients": node.loop.clients,
        "sessions": len(node.registry.sessions),
        "datasets": len(node.registry.datasets),
    }


def _warm(node: Node, args: Args) -> dict[str, Any]:
    """Load a dataset, or with `stop` no more of it; return its counters.

    With `linger_s` an embedded daemon stays so long, a day at most, without a client.
    """
    dataset = _named(node, args)
    linger_s = args.get("linger_s", 0)
    if not isinstance(linger_s, int | float) or not 0 <= linger_s <= _MAX_LINGER_S:
        raise ConfigError("stay for how many seconds?")
    node.linger_s = max(node.linger_s, linger_s)
    node.shell.handle(Warm(dataset.key, stop=args.get("stop") is True))
    return stats.dataset(node.core.snapshot(), dataset)


def _drop(node: Node, args: Args) -> dict[str, Any]:
    """Evict all datasets that lie at a path, or one; return counters of one, and how many."""
    dropped = _all_named(node, args)
    for dataset in dropped:
        node.shell.handle(Dropped(dataset.key))
        node.disk.remove(dataset.key)
    return stats.dataset(node.core.snapshot(), dropped[0]) | {"dropped": len(dropped)}


def _stop(node: Node, args: Args) -> dict[str, Any]:
    node.loop.stop(bool(args.get("now", True)), "creel stop")
    return {"state": node.shell.state}


def _session_of(node: Node, args: Args) -> SessionRecord:
    """Return the open session that `args` name."""
    number = args.get("session")
    session = node.registry.sessions.get(number) if isinstance(number, int) else None
    if session is None:
        raise ConfigError("no such open session")
    return session


def _bad_samples(node: Node, args: Args) -> dict[str, Any]:
    """Add the bad samples in `args`, if any; return all of the node."""
    if "rows" in args:
        opened = _session_of(node, args).opened
        node.bad_samples.add(opened.job, opened.rank, args["rows"])
    return {"bad": node.bad_samples.rows()}


def _batches(node: Node, args: Args) -> dict[str, Any]:
    """Return the last batches of one session, see `stats.batches`."""
    since_ns = args.get("since_ns", 0)
    if not isinstance(since_ns, int) or not 0 <= since_ns < 1 << 63:
        raise ConfigError("batches since which moment, in ns?")
    return stats.batches(_session_of(node, args), since_ns)


def _stats(node: Node, args: Args) -> dict[str, Any]:
    """Return all counters; with `run` those of the latest run."""
    counted = stats.stats(node)
    if args.get("run") is not True:
        return counted
    return node.sessions.runs.since(counted, time.monotonic())


def _own_file(node: Node, args: Args) -> dict[str, Any]:
    """Note a file that a session's dataset reads itself, while its training waits for it."""
    session = _session_of(node, args)
    session.own_file = _text(args, "path")
    session.own_remedy = _text({"remedy": "", **args}, "remedy")
    return {}


def _text(args: Args, name: str) -> str:
    text = args.get(name)
    if not isinstance(text, str):
        raise ConfigError(f"{name}: a text is needed")
    return text[:_MAX_PATH]


def _named(node: Node, args: Args) -> DatasetRecord:
    """Return the one dataset that lies at `args["dataset"]`, or whose key begins with it."""
    matches = _all_named(node, args)
    if len(matches) > 1:
        raise ConfigError(f"{len(matches)} datasets lie there: give one's key")
    return matches[0]


def _all_named(node: Node, args: Args) -> list[DatasetRecord]:
    """Return the datasets that lie at `args["dataset"]`, or the one whose key begins with it."""
    name = args.get("dataset")
    if not isinstance(name, str) or not name:
        raise ConfigError("which dataset? `creel ls` lists them")
    held = node.registry.datasets.values()
    matches = [d for d in held if name in {d.manifest.title, public(d.manifest.title)}]
    if matches:
        return matches
    matches = [d for d in held if d.key.startswith(name)]
    if not matches:
        raise ConfigError(f"no dataset is held of {name!r}: `creel ls` lists them")
    if len(matches) > 1:
        keys = ", ".join(d.key[:8] for d in matches)
        raise ConfigError(f"{len(matches)} keys begin with {name!r}: give one of {keys}")
    return matches


def _config(node: Node, _: Args) -> dict[str, Any]:
    return {
        "settings": node.config.flat(),
        "effective": node.effective.flat(),
        "disk_failure": node.disk.failure,
    }


_COMMANDS: dict[str, Callable[[Node, Args], dict[str, Any]]] = {
    "ping": lambda node, _: {"state": node.shell.state},
    "status": lambda node, _: _status(node, stats.memory(node, node.core.snapshot())),
    "stats": _stats,
    "datasets": lambda node, _: {"datasets": stats.datasets(node, time.monotonic())},
    "config": _config,
    "warm": _warm,
    "drop": _drop,
    "bad_samples": _bad_samples,
    "batches": _batches,
    "reuse": lambda node, args: stats.reuse(node, _session_of(node, args)),
    "fetches": lambda node, _: {"parts": [*map(list, node.fetcher.recent.copy())]},
    "own_file": _own_file,
    "stop": _stop,
}
