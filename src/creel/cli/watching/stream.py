"""`creel stream`: what is in a stream, and how far its readers are. No daemon."""

from __future__ import annotations

import time
from typing import Any

import click

from creel.cli.watching import view
from creel.cli.watching.view import Values
from creel.errors import ConfigError
from creel.streams import cursors
from creel.streams.log import ABSENT, Log
from creel.units import format_size

#: The rate is that of the chunks that arrived so many seconds before the last one.
_RATE_S = 10.0


def end(path: str) -> None:
    """End a stream in place of producers that are gone."""
    log = Log.open(path)
    while not log.ended():
        log.end()


def forget(path: str, name: str) -> None:
    """Let producers go on without a reader, until it begins again.

    Raises:
        ConfigError: there is none of this name.
    """
    log = Log.open(path)
    known = cursors.read(log.medium, log.about.readers)
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{log.path} has no reader {name!r}; there are: {listed}")
    cursors.leave(log.medium, name)


def state(path: str) -> dict[str, Any]:
    """Return the state of a stream, as docs/json.md has it.

    Raises:
        NotFoundError: there is none (yet).
        ConfigError: it has a chunk of the wrong size.
    """
    log = Log.open(path)
    sizes = {n: size for n in log.numbers() if (size := log.size(n)) != ABSENT}
    times = {n: status[1] for n in sizes if (status := log.medium.stat(n)) is not None}
    fields = [{"name": f, "dtype": kind, "shape": list(s)} for f, kind, s in log.about.fields]
    last = max(times.values(), default=0.0)
    return {
        "path": log.path,
        "fields": fields,
        "record_nbytes": log.nbytes,
        "chunks": len(sizes),
        "oldest": min(sizes, default=None),
        "newest": max(sizes, default=None),
        "records": sum(sizes.values()) // log.nbytes,
        "nbytes": sum(sizes.values()),
        "ahead_nbytes": log.about.ahead,
        "keep_nbytes": log.about.keep,
        "producers": log.about.producers,
        "ended": log.ends(),
        "records_per_s": _rate(log, sizes, times),
        "idle_s": max(time.time() - last, 0.0) if times else None,
        "readers": [
            _reader(log, name, cursor, sizes, times)
            for name, cursor in sorted(cursors.read(log.medium, log.about.readers).items())
        ],
    }


def _rate(log: Log, sizes: dict[int, int], times: dict[int, float]) -> float | None:
    """Return the records a second of the latest chunks; None if there are too few."""
    last = max(times.values(), default=0.0)
    late = [n for n, at in sorted(times.items()) if at >= last - _RATE_S]
    seconds = last - times[late[0]] if late else 0.0
    return sum(sizes[n] for n in late[1:]) / log.nbytes / seconds if seconds > 0 else None


def _reader(
    log: Log, name: str, cursor: cursors.Cursor, sizes: dict[int, int], times: dict[int, float]
) -> dict[str, Any]:
    read = min(cursor.record * log.nbytes, sizes.get(cursor.chunk, 0))
    lag = sum(size for n, size in sizes.items() if n >= cursor.chunk) - read
    return {
        "name": name,
        "ranks": cursor.ranks,
        "chunk": cursor.chunk,
        "record": cursor.record,
        "lag_records": lag // log.nbytes,
        "lag_nbytes": lag,
        "lag_s": max(time.time() - times[cursor.chunk], 0.0)
        if lag and cursor.chunk in times
        else 0.0,
        "needs_nbytes": cursor.reach,
    }


def show(values: Values, as_json: bool) -> None:
    """Print a stream's state on one screen, or as one line of JSON."""
    if as_json:
        view.print_json(values, line=True)
        return
    fields = (f"{f['name']} {f['dtype']}{f['shape'] or ''}" for f in values["fields"])
    rate = values["records_per_s"]
    ended = values["ended"]
    of = values["producers"]
    chunks = f"{view.format_count(values['chunks'])}"
    if values["chunks"]:
        chunks += f" ({values['oldest']} to {values['newest']})"
    limits = (values["ahead_nbytes"], values["keep_nbytes"])
    ago_s = values["idle_s"]
    idle = "" if ago_s is None else f", the last {view.format_seconds(ago_s)} ago"
    view.pairs(
        [
            ("stream", values["path"]),
            ("record", f"{format_size(values['record_nbytes'])}: {', '.join(fields)}"),
            ("chunks", f"{chunks}, {format_size(values['nbytes'])}{idle}"),
            ("limits", "{} ahead, {} kept".format(*map(format_size, limits))),
            ("rate", "-" if rate is None else f"{view.format_count(rate)} records/s"),
            ("producers", "all have ended" if ended == of else f"{ended} of {of} have ended"),
        ]
    )
    if not values["readers"]:
        click.echo("no reader has begun")
        return
    rows = [
        (
            r["name"],
            str(r["ranks"]),
            f"{r['chunk']}:{r['record']}",
            view.format_count(r["lag_records"]),
            format_size(r["lag_nbytes"]),
            view.short_seconds(r["lag_s"]),
        )
        for r in values["readers"]
    ]
    view.table(("reader", "ranks", "at", "lag", "bytes", "age"), rows)
