"""Output formats: JSON for machines, tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from creel.units import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

#: An answer of the daemon: plain values (docs/cli.md has the schema).
Told: TypeAlias = Mapping[str, Any]

_SCHEMA = 1
_NAME = 32  # characters of a source's name; its end is kept, which says more


def print_json(told: Told, *, line: bool = False) -> None:
    """An object with its schema number as JSON; `line`: on one line, for a stream of objects."""
    click.echo(json.dumps({"schema": _SCHEMA, **told}, indent=None if line else 2))
    sys.stdout.flush()


def format_seconds(seconds: float) -> str:
    """A duration for people.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(7500)
    ('12 ms', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def short_seconds(seconds: float) -> str:
    """A duration in at most six places, for columns.

    >>> short_seconds(12.34), short_seconds(4500), short_seconds(90000)
    ('12.3 s', '75 min', '25.0 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def format_count(count: float) -> str:
    """A count in at most six places.

    >>> format_count(999), format_count(12345), format_count(4_200_000)
    ('999', '12,345', '4.20 M')
    """
    return f"{count:,.0f}" if count < 100_000 else f"{count / 1e6:.2f} M"


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print name and value, one pair per line."""
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
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(rich_table(*fitting(header, rows, drop, console.width), left=left))
        return
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = (
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(cells).rstrip())


def fitting(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    drop: Sequence[Sequence[str]],
    width: int,
) -> tuple[list[str], list[list[str]]]:
    """Drop as many groups of columns as necessary to fit the table into `width` places.

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


def rich_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> RenderableType:
    """Return the table for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for i, name in enumerate(header):
        drawn.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


# --- the daemon's answers ---------------------------------------------------------------------


def memory_line(memory: Told) -> str:
    """ "3.2 of 64 GiB used (5 %)"."""
    used, budget = memory.get("used_nbytes", 0), memory.get("budget_nbytes", 0)
    share = 100 * used / budget if budget else 0
    return f"{format_size(used)} of {format_size(budget)} used ({share:.0f} %)"


def status_pairs(told: Told) -> list[tuple[str, str]]:
    """Format the answer to `status`."""
    kind = "embedded, goes with its last client" if told.get("embedded") else "stays until stopped"
    in_use = {k: told[k] for k in ("clients", "sessions", "datasets")}
    in_use["clients"] = max(in_use["clients"] - 1, 0)  # the asking client is one itself
    return [
        ("daemon", f"{told['name']} (pid {told['pid']}, creel {told['version']}, {kind})"),
        ("state", f"{told['state']}, up {format_seconds(told['uptime_s'])}"),
        ("memory", memory_line(told["memory"])),
        ("in use", ", ".join(_plural(count, words) for words, count in in_use.items())),
    ]


def _plural(count: int, words: str) -> str:
    return f"{count} {words if count != 1 else words[:-1]}"


def summary_pairs(told: Told) -> list[tuple[str, str]]:
    """Format what `stats` says of the whole node."""
    rows = [("memory", memory_line(told["memory"]))]
    for name, tier in told.get("tiers", {}).items():
        hits, misses = tier.get("hits", 0), tier.get("misses", 0)
        share = f" ({100 * hits / (hits + misses):.1f} %)" if hits + misses else ""
        rows.append(
            (f"hits in {name}", f"{format_count(hits)} of {format_count(hits + misses)}{share}")
        )
        gone = ", ".join(
            f"{format_count(n)} {why.replace('_', ' ')}"
            for why, n in tier.get("evictions", {}).items()
            if n
        )
        rows.append((f"evicted from {name}", gone or "none"))
    return rows + [row for s in told.get("sources", ()) for row in _source_rows(s)]


def _source_rows(source: Told) -> Iterator[tuple[str, str]]:
    name = source["source"]
    line = (
        f"{name if len(name) <= _NAME else '...' + name[3 - _NAME :]}:"
        f" {format_count(source['reads'])} reads, {format_count(source['opens'])} opens,"
        f" {format_size(source['nbytes'])}"
    )
    yield "read from", line
    trouble = [f"{format_count(source[k])} {k}" for k in ("errors", "retries") if source.get(k)]
    if trouble:
        last = source.get("last_error", "")
        yield "  trouble there", ", ".join(trouble) + (f"; last: {last}" if last else "")


SESSION_HEADER = ("job", "rank", "step", "ahead", "lead", "samples", "bytes", "direct", "stall")
RANK_HEADER = ("job", "rank", "samples", "bytes", "direct", "stall")
SESSION_DROP = (("lead",), ("bytes",), ("ahead",), ("direct",), ("step",))
#: Causes of stall in the order of a byte's way; newer daemons may have more.
CAUSES = ("source", "decode", "collate", "daemon", "sampler")
TOP_HEADER = (
    *("job", "rank", "step", "ahead", "lead", "samples/s", "bytes/s", "direct"),
    *("stall", "mostly", *CAUSES),
)
TOP_DROP = (CAUSES, ("lead",), ("direct",), ("ahead",), ("step",), ("bytes/s",))


def session_row(session: Told) -> tuple[str, ...]:
    """A row for one stream of batches since its start."""
    return (
        *_whose(session),
        short_seconds(session["lead_now_s"]),
        format_count(session["samples"]),
        format_size(session["nbytes"]),
        format_count(session["direct_reads"]),
        short_seconds(sum(session["stall_s"].values())),
    )


def rank_row(rank: Told) -> tuple[str, ...]:
    """A row for all streams of batches of one rank since the daemon's start."""
    return (
        _job(rank),
        str(rank["rank"]),
        format_count(rank["samples"]),
        format_size(rank["nbytes"]),
        format_count(rank["direct_reads"]),
        short_seconds(sum(rank["stall_s"].values())),
    )


def stall_table(sessions: Sequence[Told]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: seconds waited for each stream of batches, by cause.

    >>> one = {"job": "a", "name": "", "pid": 7, "rank": 3, "stall_s": {"source": 0.5, "decode": 2}}
    >>> stall_table([one])
    (('job', 'rank', 'source', 'decode'), [('a', '3', '0.5 s', '2.0 s')])
    """
    known = {cause for s in sessions for cause in s["stall_s"]}
    causes = [c for c in CAUSES if c in known] + sorted(known.difference(CAUSES))
    rows = [
        (_job(s), str(s["rank"]), *(short_seconds(s["stall_s"].get(c, 0.0)) for c in causes))
        for s in sessions
    ]
    return ("job", "rank", *causes), rows


def top_row(session: Told, before: Told | None, seconds: float) -> tuple[str, ...]:
    """A row for one stream of batches over the last `seconds`; stalls are shares of that time."""
    old = before or {"samples": 0, "nbytes": 0, "stall_s": {}}
    stall = {c: s - old["stall_s"].get(c, 0) for c, s in session["stall_s"].items()}
    share = {c: f"{min(100 * s / seconds, 100):.0f} %" for c, s in stall.items()}
    return (
        *_whose(session),
        short_seconds(session["lead_now_s"]),
        format_count((session["samples"] - old["samples"]) / seconds),
        format_size((session["nbytes"] - old["nbytes"]) / seconds),
        format_count(session["direct_reads"]),
        f"{min(100 * sum(stall.values()) / seconds, 100):.0f} %",
        worst_cause(stall),
        *(share.get(c, "-") for c in CAUSES),
    )


def worst_cause(stall_s: Mapping[str, float]) -> str:
    """The cause of most of the waiting; "-" without any.

    >>> worst_cause({"source": 0.5, "decode": 2.0}), worst_cause({})
    ('decode', '-')
    """
    worst = max(stall_s, key=lambda cause: stall_s[cause], default="-")
    return worst if stall_s.get(worst, 0) > 0 else "-"


def _whose(session: Told) -> tuple[str, ...]:
    return (
        _job(session),
        str(session["rank"]),
        format_count(session["done"]),
        str(max(session["ready"] - session["done"], 0)),
    )


def _job(session: Told) -> str:
    """Name of a job: that of the scheduler, else of its process."""
    name: str = session["job"] or session.get("name", "")
    return name[:12] or (f"pid {session['pid']}" if "pid" in session else "-")
