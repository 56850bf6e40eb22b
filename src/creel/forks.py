"""Hooks for forks of this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
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
