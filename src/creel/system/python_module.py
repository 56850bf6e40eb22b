"""How a module of creel is run in a process of its own."""

from __future__ import annotations

import sys


def command_of(module: str) -> list[str]:
    """Return the command; [] in a frozen program, as sys.executable would start it endlessly."""
    if not sys.executable or getattr(sys, "frozen", False):
        return []
    no_folder = ["-P"] if sys.version_info >= (3, 11) else []  # of the script on its path
    return [sys.executable, *no_folder, "-m", module]
