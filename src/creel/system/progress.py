"""One line on a terminal that says how far long work is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live

#: Work that takes less is not worth a line.
_QUIET_S = 2.0


@contextmanager
def progress_line(
    work: str, done: Callable[[], int] | None = None, total: int = 0, *, shown: bool = True
) -> Iterator[None]:
    """Inside, show a line on standard error, if that is a terminal; none for two seconds.

    It is gone at the end. Threads write it, which end with the block: fork before it.

    Args:
        work: the beginning of the line.
        done: returns how many are done; None: the line has the time alone.
        total: how many there are; 0: unknown.
        shown: False for nothing at all.
    """
    if not (shown and _on_terminal()):
        yield
        return
    with ExitStack() as stack:
        text = partial(line, work, done, total, time.monotonic())
        timer = threading.Timer(_QUIET_S, lambda: stack.enter_context(_live(text)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _live(text: Callable[[], str]) -> Live:
    from rich.console import Console  # 60 ms, and more on a busy machine
    from rich.live import Live
    from rich.text import Text

    return Live(
        console=Console(stderr=True),
        get_renderable=lambda: Text(text()),
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )


def line(work: str, done: Callable[[], int] | None, total: int, began: float) -> str:
    """Return the line of work that began at a moment (`time.monotonic`).

    >>> line("warming", lambda: 1500, 3000, time.monotonic() - 4.2)
    'warming: 1,500 of 3,000 (50 %), 4 s'
    """
    seconds = f"{time.monotonic() - began:.0f} s"
    if done is None:
        return f"{work}: {seconds}"
    count = done()
    of = f" of {total:,} ({100 * count // total} %)" if total else ""
    return f"{work}: {count:,}{of}, {seconds}"


def _on_terminal() -> bool:
    """Whether standard error is a terminal. A program may have none, or have closed it."""
    with suppress(AttributeError, ValueError):
        return sys.stderr.isatty()
    return False
