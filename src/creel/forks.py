"""Hooks for forks of this process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol


class Inherited(Protocol):
    """An object that a forked child must not use as its parent does."""

    def forget(self) -> None:
        """In a forked child: stop using what belongs to the parent."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def forget_in_child(thing: Inherited) -> None:
    """Call `thing.forget()` in every child that this process forks, while `thing` lives."""
    _inherited.add(thing)


def at_fork(**hooks: Callable[[], None]) -> None:
    """`os.register_at_fork`; does nothing on Windows, which has neither it nor forks."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(**hooks)


def _forget_all() -> None:
    for thing in list(_inherited):
        thing.forget()
    _inherited.clear()


at_fork(after_in_child=_forget_all)

_held = threading.RLock()


@contextmanager
def no_fork() -> Iterator[None]:
    """Inside the `with`, forks by other threads wait, so that no child inherits a pipe made here.

    It would keep the pipe open, and `subprocess`, say, waits until the other end is closed: without
    end where the child, a worker, waits for this process.
    """
    with _held:
        yield


def _hold() -> None:
    _held.acquire()


def _release() -> None:
    with suppress(RuntimeError):  # Ctrl-C, when the fork was to wait
        _held.release()


def _renew() -> None:
    global _held  # noqa: PLW0603  one for each process
    _held = threading.RLock()


at_fork(before=_hold, after_in_parent=_release, after_in_child=_renew)
