"""Watch: a thread of this process that looks at things now and then. It exists while there are any.

One thread looks for all iterators of the process, so that many loaders together cost one thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from creel.system.forks import join, pause_before_fork, reset_in_child

_log = logging.getLogger("creel.loader")


class Watched(Protocol):
    """What is looked at.

    Attributes:
        next_at: when to look next (`time.monotonic`).
    """

    next_at: float

    @property
    def over(self) -> bool:
        """Whether to look no more."""
        ...

    def poll(self) -> None:
        """Look once, and set `next_at`; called by the thread."""


class Watch:
    """The thread, and what it looks at, which it does not keep alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reset_for_process()
        reset_in_child(self)
        pause_before_fork(self)

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.RLock()  # reentrant: a finaliser may end an iterator
        self._watched: list[weakref.ref[Watched]] = []
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._paused = False
        self._due_at = 0.0  # when the thread looks next; a wake-up costs an epoch 0.5 ms of its GIL

    def add(self, subject: Watched) -> bool:
        """Look at this until it is `over`; return whether the thread runs."""
        with self._lock:
            new = all(reference() is not subject for reference in self._watched)
            if new:
                self._watched.append(weakref.ref(subject))
            self._start()
            sooner = new and subject.next_at < self._due_at
        if sooner:
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
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread available: nothing is looked at
            self._thread = None
            _log.debug("no thread %s", self._name, exc_info=True)

    def _run(self) -> None:
        while (due := self._due()) is not None:
            left_s = due.next_at - time.monotonic()
            if left_s <= 0:
                try:
                    due.poll()
                except Exception:  # noqa: BLE001  the iterators go on meanwhile
                    _log.debug("%s has not looked", self._name, exc_info=True)
                    due.next_at = time.monotonic() + 1
                continue
            del due  # what it refers to may be dropped meanwhile
            with suppress(queue.Empty):
                self._wakeups.get(timeout=left_s)

    def _due(self) -> Watched | None:
        """Return what is to be looked at next; None, which ends the thread, if there is nothing."""
        with self._lock:
            watched = [
                subject
                for reference in self._watched
                if (subject := reference()) is not None and not subject.over
            ]
            self._watched = [weakref.ref(subject) for subject in watched]
            if self._paused or not watched:
                self._thread = None
                return None
            due = min(watched, key=lambda subject: subject.next_at)
            self._due_at = due.next_at
            return due

    def pause(self) -> None:
        """End the thread before a fork; `add` and `go_on` start it again."""
        self._paused = True
        self.wake()
        join(self._thread)


#: Looks at waits. The thread that waits cannot: with `num_workers=0` it is inside `dataset[i]`.
watch = Watch("creel-waits")
