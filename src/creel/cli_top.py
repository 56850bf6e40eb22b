"""`creel top`: what the daemon does, as a live table."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from creel.cli_view import (
    TOP_DROP,
    TOP_HEADER,
    Told,
    fitting,
    format_seconds,
    rich_table,
    summary_pairs,
    top_row,
)


def show(stats: Callable[[], Told], status: Callable[[], Told], interval: float) -> None:
    """Draw until q or Ctrl-C."""
    about, before, then = status(), stats(), time.monotonic()
    console = Console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(screen(about, before, None, 1.0, console.width), refresh=True)
        while "q" not in pressed(interval):
            about, told, now = status(), stats(), time.monotonic()
            picture = screen(about, told, before, now - then, console.width)
            live.update(picture, refresh=True)
            before, then = told, now


def screen(
    about: Told, told: Told, before: Told | None, seconds: float, width: int
) -> RenderableType:
    """One picture, `width` places wide: the node, then a row per stream of batches."""
    title = Text.assemble(
        ("creel ", "bold"),
        f"{about['name']}  pid {about['pid']}  up {format_seconds(about['uptime_s'])}",
        ("   q ends", "dim"),
    )
    lines = [
        Text.assemble((f"{name:<20} ", "dim"), value, overflow="ellipsis", no_wrap=True)
        for name, value in summary_pairs(told)
    ]
    old = {s["session"]: s for s in before["sessions"]} if before else {}
    rows = [top_row(s, old.get(s["session"], s), seconds) for s in told["sessions"]]
    table = fitting(TOP_HEADER, rows, TOP_DROP, width)
    below = rich_table(*table) if rows else Text("\nno sessions: nobody trains", "dim")
    return Group(title, *lines, below)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys pressed within so many seconds, without Enter and without echo."""
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
