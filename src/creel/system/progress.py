"""ProgressLine: one line on a terminal that says how far long work is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

#: Work that takes less is not worth a line; and how often the line is written anew.
_QUIET_S, _EVERY_S = 2.0, 0.25
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Inside the `with`, a line on standard error, if that is a terminal; none for two seconds.

    It is gone at the end. A thread writes it, which ends with the block: fork before it.
    """

    def __init__(
        self,
        what: str,
        done: Callable[[], int] | None = None,
        total: int = 0,
        *,
        shown: bool = True,
    ) -> None:
        """Make one.

        Args:
            what: the beginning of the line.
            done: returns how many are done; None: the line has the time alone.
            total: how many there are; 0: unknown.
            shown: False for nothing at all.
        """
        self._what, self._done, self._total = what, done, total
        self._file = _terminal() if shown else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="creel-progress", daemon=True)
        self._began = 0.0

    def __enter__(self) -> None:
        """Begin."""
        self._began = time.monotonic()
        if self._file is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End, and erase the line."""
        self._over.set()
        if self._file is not None:
            self._thread.join()

    def text(self, seconds: float) -> str:
        """Return the line after so many seconds.

        >>> ProgressLine("warming", lambda: 1500, 3000).text(4.2)
        'warming: 1,500 of 3,000 (50 %), 4 s'
        """
        count = ""
        if self._done is not None:
            done = self._done()
            of = f" of {self._total:,} ({100 * done // self._total} %)" if self._total else ""
            count = f"{done:,}{of}, "
        return f"{self._what}: {count}{seconds:.0f} s"

    def _run(self) -> None:
        file, pause = self._file, _QUIET_S
        if file is None:
            return
        while not self._over.wait(pause):
            file.write(_ERASE + self.text(time.monotonic() - self._began))
            file.flush()
            pause = _EVERY_S
        if pause != _QUIET_S:
            file.write(_ERASE)
            file.flush()


def _terminal() -> TextIO | None:
    """Return standard error if that is a terminal. A program may have none, or have closed it."""
    with suppress(AttributeError, ValueError):
        if sys.stderr.isatty():
            return sys.stderr
    return None
