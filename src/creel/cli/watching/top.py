"""`creel top`: the daemon's activity, as a live table."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from creel.cli.processes import Usage
from creel.cli.watching.forecasts import Forecasts
from creel.cli.watching.view import (
    DROP,
    TOP_HEADER,
    Values,
    columns,
    fitting,
    format_seconds,
    overdue_pairs,
    summary_pairs,
    top_row,
)
from creel.system.limits import cores

#: Seconds that rates cover. A wait of less than a second is counted when it ends, so over slow
#: storage a shorter period would flicker between 0 and 100 %.
_RATES_S = 10.0


def show(stats: Callable[[], Values], status: Callable[[], Values], interval: float) -> None:
    """Draw until q or Ctrl-C."""
    past = deque([(time.monotonic(), stats())])
    console = Console()
    usage = Usage()

    def taken(daemon: Values, answer: Values) -> list[tuple[str, str]]:
        return usage.rows(daemon["pid"], {s["pid"] for s in answer["sessions"]})

    forecasts = Forecasts(cores())

    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        daemon, answer = status(), past[0][1]
        shown = screen(daemon, answer, {}, console.width, taken(daemon, answer))
        live.update(shown, refresh=True)
        while "q" not in pressed(interval):
            daemon, answer, now = status(), stats(), time.monotonic()
            while len(past) > 1 and now - past[1][0] >= _RATES_S:
                past.popleft()
            before = starts(past, now)
            also = [*taken(daemon, answer), *forecasts.rows(answer, before, now)]
            waits_s = forecasts.waits_s
            shown = screen(daemon, answer, before, console.width, also, waits_s)
            live.update(shown, refresh=True)
            past.append((now, answer))


def starts(past: Iterable[tuple[float, Values]], now: float) -> dict[int, tuple[Values, float]]:
    """Return what rates start from: each stream as first reported, and how many seconds ago."""
    by_session: dict[int, tuple[Values, float]] = {}
    for then, answer in past:
        for session in answer["sessions"]:
            by_session.setdefault(session["session"], (session, now - then))
    return by_session


def screen(
    daemon: Values,
    answer: Values,
    before: Mapping[int, tuple[Values, float]],
    width: int,
    taken: Sequence[tuple[str, str]] = (),
    waits_s: Mapping[int, float] = MappingProxyType({}),
) -> RenderableType:
    """Render one screen of `width` characters: the node, then a row per stream of batches.

    Args:
        before: the result of `starts`.
        taken: further rows: what processes take of the machine (`Usage.rows`), and what jobs will
            wait for (`Forecasts.rows`).
        waits_s: the seconds that each stream will wait in a step (`Forecasts.waits_s`).
    """
    title = Text.assemble(
        ("creel ", "bold"),
        f"{daemon['name']}  pid {daemon['pid']}  up {format_seconds(daemon['uptime_s'])}",
        ("   q ends", "dim"),
    )
    lines = Table.grid(padding=(0, 1))
    for name, value in summary_pairs(answer):
        lines.add_row(Text(f"{name:<20}", "dim"), Text(value, overflow="ellipsis", no_wrap=True))
    for name, value in (*overdue_pairs(answer), *taken):
        lines.add_row(Text(name, "dim"), Text(value))
    rows = []
    for session in answer["sessions"]:
        old, seconds = before.get(session["session"], (session, 1.0))
        rows.append(top_row(session, old, seconds, waits_s.get(session["session"])))
    if not rows:
        return Group(title, lines, Text("\nno open sessions", "dim"))
    head, *below = columns(*fitting(TOP_HEADER, rows, DROP, width))
    return Group(
        title, lines, Text(f"\n{head}", "dim"), Text("─" * len(head)), Text("\n".join(below))
    )


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns the keys pressed within some seconds, unechoed."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 1024).decode(errors="replace") if ready else ""

    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
