"""A thread for work that takes time in proportion to a dataset: the loop must not wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Registrar:
    """One thread, begun when there is work for it: a manifest of 10 million files is seconds."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Do this after what was put before."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="creel-register", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: late for everybody, but done
                work()
                return
            self._thread = thread
        self._queue.put(work)

    def close(self) -> None:
        """End after what was put; waits a second for it."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(1.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
