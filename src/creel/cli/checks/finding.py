"""Finding: one line of `creel doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One finding. `level` is ok, warn (slow or risky) or bad (does not work)."""

    name: str
    level: str
    state: str
    remedy: str = ""

    def values(self) -> dict[str, str]:
        """Return what `--json` has of it."""
        return {"name": self.name, "level": self.level, "found": self.state, "remedy": self.remedy}


def judged(name: str, state: str, remedy: str) -> Finding:
    """Return a warning if there is a remedy, else a finding without trouble."""
    return Finding(name, "warn" if remedy else "ok", state, remedy)
