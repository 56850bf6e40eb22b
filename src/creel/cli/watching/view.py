"""Output formats: JSON for programs, tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import click

from creel.counters import CAUSES, OF_RANKS, Counter
from creel.units import format_size

#: An answer of the daemon: plain values (docs/json.md has the schema).
Values: TypeAlias = Mapping[str, Any]

_SCHEMA = 1
_NAME = 32  # characters of a source's name; a longer one keeps its end


def print_json(answer: Values, *, line: bool = False) -> None:
    """Print an object with its schema number as JSON; `line`: on one line, for a stream."""
    click.echo(json.dumps({"schema": _SCHEMA, **answer}, indent=None if line else 2))
    sys.stdout.flush()


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(7500)
    ('12 ms', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def short_seconds(seconds: float) -> str:
    """Format a duration in at most six characters, for columns.

    >>> short_seconds(12.34), short_seconds(4500), short_seconds(90000)
    ('12.3 s', '75 min', '25.0 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def format_count(count: float) -> str:
    """Format a count in at most six characters.

    >>> format_count(999), format_count(12345), format_count(4_200_000)
    ('999', '12,345', '4.20 M')
    """
    return f"{count:,.0f}" if count < 100_000 else f"{count / 1e6:.2f} M"


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair per line."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        click.echo(f"{click.style(f'{name:<{width}}', dim=True)}  {value}")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    drop: Sequence[Sequence[str]] = (),
) -> None:
    """Print rows under a header; the first `left` columns are text, the others numbers.

    `drop`: groups of columns in the order in which a narrow terminal omits them.
    """
    terminal = sys.stdout.isatty()
    if terminal:
        header, rows = fitting(header, rows, drop, shutil.get_terminal_size().columns)
    head, *lines = columns(header, rows, left=left)
    click.secho(head, dim=True)
    for line in (["─" * len(head)] if terminal else []) + lines:
        click.echo(line)


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> Iterator[str]:
    """Yield the lines of a table, its header first."""
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = (
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def fitting(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    drop: Sequence[Sequence[str]],
    width: int,
) -> tuple[list[str], list[list[str]]]:
    """Drop as many groups of columns as necessary to fit the table into `width` characters.

    >>> fitting(("job", "lead", "stall"), [("a", "3.0 s", "50 %")], [("lead",)], 16)
    (['job', 'stall'], [['a', '50 %']])
    """
    places = {name: max(len(r[i]) for r in (header, *rows)) for i, name in enumerate(header)}
    for group in drop:
        if sum(places.values()) + 2 * len(places) <= width:
            break
        for name in group:
            places.pop(name, None)
    kept = [i for i, name in enumerate(header) if name in places]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


# --- the daemon's answers ---------------------------------------------------------------------


def memory_line(memory: Values) -> str:
    """Return, for example, "3.2 of 64 GiB used (5 %)"."""
    used, budget = memory.get("used_nbytes", 0), memory.get("budget_nbytes", 0)
    share = 100 * used / budget if budget else 0
    withheld = memory.get("withheld_nbytes", 0)
    suffix = f", {format_size(withheld)} left to other processes" if withheld else ""
    return f"{format_size(used)} of {format_size(budget)} used ({share:.0f} %){suffix}"


def status_pairs(answer: Values) -> list[tuple[str, str]]:
    kind = (
        "embedded, ends with its last client" if answer.get("embedded") else "stays until stopped"
    )
    in_use = {k: answer[k] for k in ("clients", "sessions", "datasets")}
    in_use["clients"] = max(in_use["clients"] - 1, 0)  # without the client that asks
    disk = answer["disk"]
    lost = [("disk", f"there is no disk tier in {disk['path']}: {disk['failure']}")]
    return [
        ("daemon", f"{answer['name']} (pid {answer['pid']}, creel {answer['version']}, {kind})"),
        ("state", f"{answer['state']}, up {format_seconds(answer['uptime_s'])}"),
        ("memory", memory_line(answer["memory"])),
        *(lost if disk["failure"] else []),
        ("in use", ", ".join(f"{n} {word if n != 1 else word[:-1]}" for word, n in in_use.items())),
    ]


def summary_pairs(answer: Values) -> list[tuple[str, str]]:
    """Return names and values of the answer of `stats` for the whole node."""
    rows = [("memory", memory_line(answer["memory"]))]
    if "run_s" in answer:
        began = f"began {format_seconds(answer['run_s'])} ago" if answer["run_s"] else "none yet"
        rows.insert(0, ("run", began))
    for name, tier in answer.get("tiers", {}).items():
        hits, misses = tier.get("hits", 0), tier.get("misses", 0)
        share = f" ({100 * hits / (hits + misses):.1f} %)" if hits + misses else ""
        rows.append(
            (f"hits in {name}", f"{format_count(hits)} of {format_count(hits + misses)}{share}")
        )
        evicted = ", ".join(
            f"{format_count(n)} {why.replace('_', ' ')}"
            for why, n in tier.get("evictions", {}).items()
            if n
        )
        if "samples" in tier:
            size = format_size(tier.get("used_nbytes", 0))
            rows.append((f"kept {name}", f"{format_count(tier['samples'])} samples, {size}"))
        if name == "memory":  # peers evict by themselves, and the disk reuses its room
            rows.append((f"evicted from {name}", evicted or "none"))
    return rows + [row for s in answer.get("sources", ()) for row in _source_rows(s)]


#: What a wait that has not ended says of its cause.
_OVERDUE = {
    "source": "storage has not delivered",
    "decode": "dataset[i] has not returned",
    "collate": "its samples are being collated",
    "daemon": "no worker has begun it",
    "sampler": "the sampler has not drawn it",
}


def overdue(row: Values) -> str:
    """Say how long a rank has waited for a batch that has not come, and why; "" if it has not."""
    seconds = row.get("overdue_s", 0.0)
    if not seconds:
        return ""
    said = f"has waited {format_seconds(seconds)} for its next batch so far"
    why, file = _OVERDUE.get(row["overdue_cause"], ""), row["overdue_file"]
    if row["overdue_cause"] == "source":
        why += f" {file or 'it'}"
    return f"{said}: {why}" if why else said


def overdue_pairs(answer: Values) -> list[tuple[str, str]]:
    """Return names and values of the waits that have not ended, for the whole node."""
    waits = ((session, overdue(session)) for session in answer["sessions"])
    return [
        (f"job {job_of(session)}", f"rank {session['rank']} {text}")
        for session, text in waits
        if text
    ]


def _source_rows(source: Values) -> Iterator[tuple[str, str]]:
    name = source.get("path") or source["source"]
    row = (
        f"{name if len(name) <= _NAME else '...' + name[3 - _NAME :]}:"
        f" {format_count(source['reads'])} reads, {format_count(source['opens'])} opens,"
        f" {format_size(source['nbytes'])}"
    )
    asked = [f"{format_count(n)} {kind}" for kind, n in source.get("requests", {}).items() if n]
    yield "read from", ", ".join([row, *asked])
    kinds = ("errors", "retries", "throttles")
    trouble = [f"{format_count(source[k])} {k}" for k in kinds if source.get(k)]
    if trouble:
        last = source.get("last_error", "")
        yield "  trouble there", ", ".join(trouble) + (f"; last: {last}" if last else "")


DATASET_HEADER = ("path", "objects", "bytes", "in memory", "on disk", "last use", "key")


def dataset_row(row: Values) -> tuple[str, ...]:
    """Return the row of one dataset that a daemon knows."""
    return (
        row["path"],
        format_count(row["objects"]),
        format_size(row["nbytes"]),
        _part(row["resident_nbytes"], row["resident_objects"], row["objects"]),
        _part(row["disk_used_nbytes"], row["disk_objects"], row["objects"]),
        "now" if row["sessions"] else f"{short_seconds(row['unused_s'])} ago",
        row["dataset"][:8],
    )


def datasets(rows: Sequence[Values]) -> None:
    """Print the datasets, those in use and used last first."""
    if not rows:
        click.echo("no dataset is known: training and `creel warm` make them so")
        return
    latest = sorted(rows, key=lambda row: (not row["sessions"], row["unused_s"]))
    table(DATASET_HEADER, [dataset_row(row) for row in latest], drop=(("key",), ("objects",)))


def decoded(rows: Sequence[Values]) -> None:
    """Print the decoded samples that have a name, those used last first."""
    if rows:
        cells = [
            (
                row["name"],
                row["dataset"],
                f"{format_count(row['kept'])} of {format_count(row['samples'])}",
                format_size(row["nbytes"]),
                format_seconds(max(time.time() - row["used"], 0)),
            )
            for row in rows
        ]
        table(("decoded samples", "dataset", "kept", "bytes", "used ago"), cells)


def _part(nbytes: int, objects: int, of: int) -> str:
    """Return, for example, "3.2 GiB (50 %)"; the share is that of objects."""
    return f"{format_size(nbytes)} ({100 * objects / of:.0f} %)" if objects and of else "-"


_COLUMNS = tuple(c for c in OF_RANKS if c.column)
#: Columns that `creel top` shows as rates; it shows durations as shares of the time.
_RATES = tuple(
    c for c in _COLUMNS if c.writer == "delivery" and c.unit != "s" and c.kind == "counter"
)
_STREAM = ("job", "rank", "step", "ahead", "lead", "fed")
SESSION_HEADER = (*_STREAM, *(c.column for c in _COLUMNS))
RANK_HEADER = ("job", "rank", *SESSION_HEADER[len(_STREAM) :])
TOP_HEADER = (
    *_STREAM,
    "wait",
    *(c.column + "/s" * (c in _RATES) for c in _COLUMNS),
    "mostly",
    *CAUSES,
)
_DROP = (
    "direct bytes",
    "mean lead",
    "cpu",
    "workers",
    "batches",
    "busy",
    "lead",
    "failed",
    "bytes",
    "ahead",
    "fed",
)
DROP = (CAUSES, *((name, f"{name}/s") for name in (*_DROP, "direct", "step")))


def session_row(session: Values) -> tuple[str, ...]:
    """Return the row of one stream of batches since its start."""
    return *_whose(session), *_counts(session)


def rank_row(rank: Values) -> tuple[str, ...]:
    """Return the row of all streams of batches of one rank since the daemon's start."""
    return job_of(rank), str(rank["rank"]), *_counts(rank)


def _counts(counted: Values) -> Iterator[str]:
    """Yield the columns of all counters."""
    for counter in _COLUMNS:
        count = _total(counted, counter) / (
            max(counted.get(counter.per, 0), 1) if counter.per else 1
        )
        yield _FORMAT[counter.unit](count)


_FORMAT: dict[str, Callable[[float], str]] = {
    "": format_count,
    "bytes": lambda n: format_size(int(n)),
    "s": short_seconds,
    "share": lambda share: f"{100 * share:.0f} %",
}


def _total(counted: Values, counter: Counter) -> float:
    """Return a counter, summed over its members; 0 if the daemon does not have it."""
    count = counted.get(counter.key, 0)
    return sum(count.values()) if isinstance(count, Mapping) else float(count)


def by_member(
    counter: Counter, rows: Sequence[Values]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows: seconds of a counter by member, for each stream of batches.

    >>> stall = next(c for c in OF_RANKS if c.name == "stall")
    >>> told = {"job": "a", "pid": 7, "rank": 3, "stall_s": {"source": 0.5}}
    >>> by_member(stall, [told])[1]
    [('a', '3', '0.5 s', '0.0 s', '0.0 s', '0.0 s', '0.0 s')]
    """
    return ("job", "rank", *counter.members), [
        (
            job_of(s),
            str(s["rank"]),
            *(short_seconds(s.get(counter.key, {}).get(m, 0.0)) for m in counter.members),
        )
        for s in rows
    ]


def top_row(
    session: Values, before: Values | None, seconds: float, wait_s: float | None = None
) -> tuple[str, ...]:
    """Return the row of one stream of batches over the last `seconds`; durations are shares.

    wait_s: what it will wait for in each of the next steps, if that is known.
    """
    old = before or {}
    row = [*_whose(session), "-" if wait_s is None else format_seconds(wait_s)]
    for counter in _COLUMNS:
        news = _total(session, counter) - _total(old, counter)
        if counter.per:
            row.append(short_seconds(news / max(session[counter.per] - old.get(counter.per, 0), 1)))
        elif counter.unit == "s":
            most = math.inf if counter.writer == "worker" else 100.0  # there are several workers
            row.append(f"{min(100 * news / seconds, most):.0f} %")
        else:
            row.append(
                _FORMAT[counter.unit](
                    news / seconds if counter in _RATES else _total(session, counter)
                )
            )
    was = old.get("stall_s", {})
    stall = {cause: session["stall_s"].get(cause, 0) - was.get(cause, 0) for cause in CAUSES}
    shares = (f"{min(100 * s / seconds, 100):.0f} %" for s in stall.values())
    return *row, worst_cause(stall), *shares


def worst_cause(stall_s: Mapping[str, float]) -> str:
    """Return the cause of most of the waiting; "-" without any.

    >>> worst_cause({"source": 0.5, "decode": 2.0}), worst_cause({})
    ('decode', '-')
    """
    worst = max(stall_s, key=lambda cause: stall_s[cause], default="-")
    return worst if stall_s.get(worst, 0) > 0 else "-"


def _whose(session: Values) -> tuple[str, ...]:
    return (
        job_of(session),
        str(session["rank"]),
        format_count(session["done"]),
        str(session["ahead"]),
        short_seconds(session["lead_now_s"]),
        _FORMAT["share"](session["utilisation"]) if "utilisation" in session else "-",
    )


def job_of(session: Values) -> str:
    """Return the name of a job: the scheduler's, or else its process."""
    name: str = session["job"]
    return name[:12] or (f"pid {session['pid']}" if "pid" in session else "-")
