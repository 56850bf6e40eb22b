"""A thread for work that takes the loop too long, such as all that is proportional to a dataset."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundThread:
    """One thread, started on first use, that does its work in order.

    Not an executor of Python's: that would wait for its thread at exit, however long a disk hangs.
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
            except RuntimeError:  # the system gives no thread: do it here, slowly
                work()
                return
            self._thread = thread
        self._queue.put(work)

    def close(self, wait_s: float = 1.0) -> bool:
        """End after the queued work; waits for at most `wait_s`. Returns whether it has ended."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
