"""The registrar: a thread for work proportional to a dataset, for which the loop must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Registrar:
    """One thread, started on first use: a manifest of 10 million files takes seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Queue work, in order."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no thread: do it here, slowly
                work()
                return
            self._thread = thread
        self._queue.put(work)

    def close(self) -> bool:
        """End after the queued work; waits for at most a second. Returns whether it has ended."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
