"""Hooks for forks of this process."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol


class Inherited(Protocol):
    """An object that a forked child must not use as its parent does."""

    def reset_for_process(self) -> None:
        """Stop using what belongs to the parent; called in a forked child."""


class Threaded(Protocol):
    """An object with a thread that must not run while this process forks."""

    def pause(self) -> None:
        """End the thread, and wait for that, but not for long; called before a fork."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
#: By order of registration.
_threaded: weakref.WeakValueDictionary[int, Threaded] = weakref.WeakValueDictionary()
_numbers = itertools.count()
#: Threads that end by themselves, after what they are doing.
_ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
#: Longest time that a fork waits for one thread, which may be drawing a permutation.
PAUSE_S = 2.0
#: Seconds between two looks whether a thread that has ended is gone, which takes microseconds; and
#: after which another thread must have got its number.
_LEFT_S, _MOST_LEFT_S = 5e-5, 0.1


def reset_in_child(thing: Inherited) -> None:
    """Call `thing.forget()` in all children of this process, and theirs, while `thing` lives."""
    _inherited.add(thing)


def pause_before_fork(thing: Threaded) -> None:
    """Call `thing.pause()` before each fork of this process, while `thing` lives.

    Things registered later, which may use earlier ones, are paused first.
    A child of a process with threads may find locks held by threads that it does not have, and
    Python 3.12 and later warn of that (under `-W error`, that ends the program).
    """
    _threaded[next(_numbers)] = thing


def join_before_fork(thread: threading.Thread) -> None:
    """Wait for a thread that is about to end before a fork of this process; see above."""
    _ending.add(thread)


def join(thread: threading.Thread | None) -> None:
    """Wait for a thread, unless it is this one or was not started, for `PAUSE_S` at most.

    Python's own `join` returns a moment before the system has no such thread any more, and Python
    3.12 asks the system how many there are.
    """
    if thread is None or thread.native_id is None or thread is threading.current_thread():
        return
    thread.join(PAUSE_S)
    until = time.monotonic() + _MOST_LEFT_S
    while not thread.is_alive() and time.monotonic() < until and _runs(thread.native_id):
        time.sleep(_LEFT_S)


def _runs(native_id: int) -> bool:
    return os.path.exists(f"/proc/self/task/{native_id}")  # noqa: PTH110  far quicker


def at_fork(**hooks: Callable[[], None]) -> None:
    """Call `os.register_at_fork`; do nothing on Windows, which has neither it nor forks."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(**hooks)


def _reset_all() -> None:
    for thing in list(_inherited):
        thing.reset_for_process()


def _pause_all() -> None:
    for _, thing in sorted(_threaded.items(), reverse=True):
        thing.pause()
    for thread in list(_ending):
        join(thread)
    _ending.clear()


at_fork(after_in_child=_reset_all)

_held = threading.RLock()


@contextmanager
def no_fork() -> Iterator[None]:
    """Make forks by other threads wait inside the `with`, so no child inherits a pipe made here.

    A child would keep the pipe open. `subprocess`, for example, waits until the other end is
    closed: forever if the child is a worker that waits for this process.
    """
    with _held:
        yield


def _hold() -> None:
    _held.acquire()


def _release() -> None:
    with suppress(RuntimeError):  # Ctrl-C while the fork waited
        _held.release()


def _renew() -> None:
    global _held  # noqa: PLW0603  one for each process
    _held = threading.RLock()


# Hooks before a fork run in the opposite order: the threads end before the fork waits for them.
at_fork(before=_hold, after_in_parent=_release, after_in_child=_renew)
at_fork(before=_pause_all)
