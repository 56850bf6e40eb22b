"""StreamSearch: find a daemon and open a session with it while training goes on."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from creel.loader.line.observers.watch import Watch

if TYPE_CHECKING:
    from creel.loader.line.steps.batch_stream import BatchStream

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
        self._streams: deque[BatchStream] = deque()
        self.next_at = 0.0  # time.monotonic() of the next try
        self._until = time.monotonic() + _WAIT_S
        self._polled = threading.Event()  # once, at least
        if not _thread.add(self):
            self._polled.set()

    @property
    def over(self) -> bool:
        """Whether nothing is looked for any more."""
        return self._open_stream is None

    def poll(self) -> None:
        """Look once; called in the thread."""
        open_stream = self._open_stream
        stream = None if open_stream is None else open_stream()
        self.next_at = time.monotonic() + _AGAIN_S
        if stream is not None:
            self._streams.append(stream)
            if self.over:
                self.leave()  # as the trainer's own call may have come before
        if stream is not None or self._once:
            self._open_stream = None
        self._polled.set()

    def wait(self) -> int:
        """Wait until a daemon was found, or cannot be, for 1.5 s at most; return the ns."""
        began = time.monotonic_ns()
        _thread.go_on()
        self._polled.wait(max(self._until - time.monotonic(), 0.0))
        return time.monotonic_ns() - began

    def take(self) -> BatchStream | None:
        """Return the session once there is one, and hand it over to the caller; else None."""
        try:
            return self._streams.popleft()
        except IndexError:
            if not self.over:
                _thread.go_on()
            return None

    def leave(self) -> None:
        """End the search. What it refers to is freed now, not when the thread next looks."""
        self._open_stream = None
        stream = self.take()
        if stream is not None:
            stream.close()
        _thread.wake()


_thread = Watch("creel-reattach")
# A thread inside Arrow's code while the interpreter ends would abort the process.
atexit.register(_thread.pause)
