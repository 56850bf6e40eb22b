"""StreamSearch: find a daemon and open a session with it while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from creel.loader.plan.batch_stream import BatchStream

_log = logging.getLogger("creel.loader")

#: Longest time that a trainer waits for the first search: a daemon starts in half a second.
_WAIT_S = 1.5
#: Seconds between two searches, if no daemon came back and none can be started; and between two
#: checks whether the iterator has ended.
_AGAIN_S, _POLL_S = 5.0, 0.1


class StreamSearch:
    """Finds or starts a daemon in a thread. That takes 0.5 s.

    Training goes on meanwhile, or waits a moment where other nodes hold what it would read
    (`EpochRun.await_daemon`).
    """

    def __init__(self, open_stream: Callable[[], BatchStream | None]) -> None:
        """Begin the search. `take` or `leave` ends it, without locks: a finaliser may call them.

        `open_stream` opens a session, or starts a daemon for one; called in the thread.
        """
        self._open_stream = open_stream
        self._found: deque[BatchStream] = deque()
        self._over = False
        self._until = time.monotonic() + _WAIT_S
        self._looked = threading.Event()  # once, at least
        thread = threading.Thread(target=self._look, name="creel-reattach", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread available: the next epoch finds a daemon
            self._looked.set()
            _log.debug("no thread to look for another daemon", exc_info=True)

    def _look(self) -> None:
        look_at = time.monotonic()
        while not self._over:
            if time.monotonic() < look_at:
                time.sleep(_POLL_S)
                continue
            stream = self._open_stream()
            if stream is not None:
                self._found.append(stream)
            self._looked.set()
            if stream is not None:
                break
            look_at = time.monotonic() + _AGAIN_S
        if self._over:
            self.leave()

    def wait(self) -> int:
        """Wait until a daemon was found, or cannot be, for 1.5 s at most; return the ns."""
        began = time.monotonic_ns()
        self._looked.wait(max(self._until - time.monotonic(), 0.0))
        return time.monotonic_ns() - began

    def take(self) -> BatchStream | None:
        """Return the session once there is one, and hand it over to the caller; else None."""
        try:
            return self._found.popleft()
        except IndexError:
            return None

    def leave(self) -> None:
        self._over = True
        found = self.take()
        if found is not None:
            found.close()
