"""A thread for work that would block the loop too long, such as work per object of a dataset."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundThread:
    """One thread, started on first use, that runs functions in order.

    An executor of `concurrent.futures` would wait at exit for its thread, even if a disk hangs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no thread: do the work here, slowly
                work()
                return
            self._thread = thread
        self._queue.put(work)

    def close(self, wait_s: float = 1.0) -> bool:
        """End after the queued work; wait at most `wait_s`, and return whether it has ended."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
