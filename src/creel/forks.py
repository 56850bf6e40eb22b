"""Hooks for forks of this process."""

from __future__ import annotations

import os
from collections.abc import Callable


def at_fork(**hooks: Callable[[], None]) -> None:
    """`os.register_at_fork`; does nothing on Windows, which has neither it nor forks."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(**hooks)
