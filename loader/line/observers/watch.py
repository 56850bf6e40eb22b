"""The thread of this process that looks at iterators while they wait. It exists while they do.

The thread that waits cannot: with `num_workers=0` it is inside `dataset[i]`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

from creel.system.forks import forget_in_child, join, pause_before_fork

_log = logging.getLogger("creel.loader")


class Look(Protocol):
    """What is looked at."""

    every_s: float

    def look(self) -> None:
        """Look once; called by the thread."""


class Watch:
    """The thread, and what it looks at."""

    def __init__(self) -> None:
        self.forget()
        forget_in_child(self)
        pause_before_fork(self)

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self._looks: weakref.WeakSet[Look] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, look: Look) -> None:
        """Look at this from now on, until `discard`."""
        with self._lock:
            self._looks.add(look)
            if self._thread is not None:
                return
            self._stop = threading.Event()
            name, args = "creel-waits", (self._stop,)
            thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # no thread available: only what is over is counted
                _log.debug("no thread to look at waits", exc_info=True)

    def discard(self, look: Look) -> None:
        """Look no more at this."""
        with self._lock:
            self._looks.discard(look)

    def pause(self) -> None:
        """End the thread before a fork; the next epoch or count starts it again."""
        thread, self._thread = self._thread, None
        self._stop.set()
        join(thread)

    def _run(self, stop: threading.Event) -> None:
        pause_s = 0.0
        while not stop.wait(pause_s) and (looks := self._present()):
            for look in looks:
                try:
                    look.look()
                except Exception:  # noqa: BLE001, PERF203  the iterator goes on meanwhile
                    _log.debug("a wait was not looked at", exc_info=True)
            pause_s = min(look.every_s for look in looks)
            del looks, look  # else they would live on while the thread waits

    def _present(self) -> list[Look]:
        """Return what is to be looked at; if there is nothing, the thread is to end."""
        with self._lock:
            looks = list(self._looks)
            if not looks:
                self._thread = None
            return looks


watch = Watch()
