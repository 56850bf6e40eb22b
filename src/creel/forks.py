"""What to do where this process forks."""

from __future__ import annotations

import os
from collections.abc import Callable


def at_fork(**hooks: Callable[[], None]) -> None:
    """`os.register_at_fork`; nothing on Windows, where no process forks and that is missing."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(**hooks)
