"""StreamSearch: find a daemon and open a session with it while training goes on.

One thread of this process makes all searches, so that many loaders together cost one thread.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from creel.system.forks import forget_in_child, join, pause_before_fork

if TYPE_CHECKING:
    from creel.loader.line.steps.batch_stream import BatchStream

_log = logging.getLogger("creel.loader")

#: Longest time that a trainer waits for the first search: a daemon starts in half a second.
_WAIT_S = 1.5
#: Seconds between two searches for the same stream, if no daemon came back and none can be started.
_AGAIN_S = 2.0


class StreamSearch:
    """Finds or starts a daemon in a thread. That takes 0.5 s.

    Training goes on meanwhile, or waits a moment where other nodes hold what it would read
    (`IteratorSession.reattach`).
    """

    def __init__(
        self, open_stream: Callable[[], BatchStream | None], *, once: bool = False
    ) -> None:
        """Begin the search. `take` or `leave` ends it, without locks: a finaliser may call them.

        Args:
            open_stream: opens a session, or starts a daemon for one; called in the thread.
            once: give up after the first try.
        """
        self._once = once
        self._open_stream: Callable[[], BatchStream | None] | None = open_stream
        self._found: deque[BatchStream] = deque()
        self.next_at = 0.0  # time.monotonic() of the next try
        self._until = time.monotonic() + _WAIT_S
        self._looked = threading.Event()  # once, at least
        if not _thread.search(self):
            self._looked.set()

    @property
    def over(self) -> bool:
        """Whether nothing is looked for any more."""
        return self._open_stream is None

    def look(self) -> None:
        """Look once; called in the thread."""
        open_stream = self._open_stream
        stream = None if open_stream is None else open_stream()
        self.next_at = time.monotonic() + _AGAIN_S
        if stream is not None:
            self._found.append(stream)
            if self.over:
                self.leave()  # as the trainer's own call may have come before
        if stream is not None or self._once:
            self._open_stream = None
        self._looked.set()

    def wait(self) -> int:
        """Wait until a daemon was found, or cannot be, for 1.5 s at most; return the ns."""
        began = time.monotonic_ns()
        _thread.go_on()
        self._looked.wait(max(self._until - time.monotonic(), 0.0))
        return time.monotonic_ns() - began

    def take(self) -> BatchStream | None:
        """Return the session once there is one, and hand it over to the caller; else None."""
        try:
            return self._found.popleft()
        except IndexError:
            if not self.over:
                _thread.go_on()
            return None

    def leave(self) -> None:
        """End the search. What it refers to is freed now, not when the thread next looks."""
        self._open_stream = None
        found = self.take()
        if found is not None:
            found.close()
        _thread.wake()


class _SearchThread:
    """The thread of this process that makes all searches. It exists while there are any."""

    def __init__(self) -> None:
        self.forget()
        forget_in_child(self)
        pause_before_fork(self)

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()  # reentrant: a finaliser may begin a search
        self._searches: list[StreamSearch] = []
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._paused = False

    def search(self, search: StreamSearch) -> bool:
        """Add a search; return whether the thread runs."""
        with self._lock:
            self._searches.append(search)
            self._start()
        self.wake()
        return self._thread is not None

    def wake(self) -> None:
        """Let the thread look at what has changed; takes no lock."""
        if self._thread is not None:
            self._wakeups.put(None)

    def go_on(self) -> None:
        """Start the thread again if a fork has ended it."""
        if self._thread is None:
            with self._lock:
                self._start()

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="creel-reattach", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread available: the next epoch finds a daemon
            self._thread = None
            _log.debug("no thread to look for another daemon", exc_info=True)

    def _run(self) -> None:
        while (due := self._due()) is not None:
            left_s = due.next_at - time.monotonic()
            if left_s <= 0:
                due.look()
                continue
            del due  # what it refers to may be dropped meanwhile
            try:
                self._wakeups.get(timeout=left_s)
            except queue.Empty:
                continue

    def _due(self) -> StreamSearch | None:
        """Return the search to be made next; None, which ends the thread, if there is none."""
        with self._lock:
            self._searches = [one for one in self._searches if not one.over]
            if self._paused or not self._searches:
                self._thread = None
                return None
            return min(self._searches, key=lambda one: one.next_at)

    def pause(self) -> None:
        """End the thread before a fork; `go_on` starts it again."""
        self._paused = True
        self.wake()
        join(self._thread)


_thread = _SearchThread()
# A thread inside Arrow's code while the interpreter ends would abort the process.
atexit.register(_thread.pause)
