"""Finding: one line of `creel doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One finding. `level` is ok, warn (slow or risky) or bad (does not work)."""

    name: str
    level: str
    found: str
    remedy: str = ""


def judged(name: str, found: str, remedy: str) -> Finding:
    """Return a warning if there is a remedy, else a finding without trouble."""
    return Finding(name, "warn" if remedy else "ok", found, remedy)
