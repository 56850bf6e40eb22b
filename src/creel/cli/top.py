"""`creel top`: the daemon's activity, as a live table."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import click

from creel.cli.view import (
    DROP,
    TOP_HEADER,
    Values,
    columns,
    fitting,
    format_seconds,
    summary_pairs,
    top_row,
)

#: Seconds that rates cover: a wait is counted at its end, so that shorter rates would flicker
#: between nothing and all where storage is slow.
_RATES_S = 10.0

# Control sequences of terminals (ECMA-48, xterm).
_OWN_SCREEN, _FORMER_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?1049l\x1b[?25h"  # without a cursor
_TO_TOP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def show(stats: Callable[[], Values], status: Callable[[], Values], interval: float) -> None:
    """Draw until q or Ctrl-C."""
    past: deque[tuple[float, Values]] = deque()
    with terminal() as pressed:
        while not past or "q" not in pressed(interval):
            daemon, answer, now = status(), stats(), time.monotonic()
            while len(past) > 1 and now - past[1][0] >= _RATES_S:
                past.popleft()
            width, height = shutil.get_terminal_size()
            lines = screen(daemon, answer, starts(past, now), width)[: height - 1]
            drawn = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
            sys.stdout.write(f"{_TO_TOP}{drawn}{_CLEAR_BELOW}")
            sys.stdout.flush()
            past.append((now, answer))


def starts(past: Iterable[tuple[float, Values]], now: float) -> dict[int, tuple[Values, float]]:
    """Start values of rates: each stream as first reported, and how many seconds ago."""
    found: dict[int, tuple[Values, float]] = {}
    for then, answer in past:
        for session in answer["sessions"]:
            found.setdefault(session["session"], (session, now - then))
    return found


def screen(
    daemon: Values,
    answer: Values,
    before: Mapping[int, tuple[Values, float]],
    width: int,
) -> list[str]:
    """The lines of one screen, `width` places wide: the node, then a row per stream of batches.

    `before`: the result of `starts`.
    """
    name = f"{daemon['name']}  pid {daemon['pid']}  up {format_seconds(daemon['uptime_s'])}"
    lines = [f"{'creel ' + name:.{width}}{click.style('   q ends', dim=True)}"]
    for what, value in summary_pairs(answer):
        cut = value if len(value) <= width - 21 else value[: width - 22] + "…"
        lines.append(f"{click.style(f'{what:<20} ', dim=True)}{cut}")
    rows = [top_row(s, *before.get(s["session"], (s, 1.0))) for s in answer["sessions"]]
    if not rows:
        return [*lines, "", click.style("no open sessions", dim=True)]
    head, *below = columns(*fitting(TOP_HEADER, rows, DROP, width))
    return [*lines, "", click.style(head, dim=True), "─" * len(head), *below]


@contextmanager
def terminal() -> Iterator[Callable[[float], str]]:
    """Take the terminal: a screen of its own, keys without Enter and echo.

    Yields a function for the keys pressed within some seconds.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 1024).decode(errors="replace") if ready else ""

    tty.setcbreak(fd)
    sys.stdout.write(_OWN_SCREEN)
    try:
        yield pressed
    finally:
        sys.stdout.write(_FORMER_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
