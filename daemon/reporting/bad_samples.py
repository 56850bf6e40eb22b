"""Samples that loaders could not read, for `creel stats --bad`."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from creel.errors import ConfigError

_MOST = 1000  # most samples kept, the latest of the node
_LONGEST = 1000  # most characters of an address or reason


class BadSamples:
    """The latest samples that ranks of this node could not read."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=_MOST)

    def add(self, job: str, rank: int, given: object) -> None:
        """Add the bad samples of a rank: (number, address, reason) each.

        Raises:
            ConfigError: `given` has another form.
        """
        try:
            rows = msgspec.convert(given, list[tuple[int, str, str]])
        except msgspec.ValidationError as e:
            raise ConfigError(f"invalid bad samples: {e}") from e
        for index, address, reason in rows[-_MOST:]:
            about = {"path": address[:_LONGEST], "reason": reason[:_LONGEST]}
            self._rows.append({"job": job, "rank": rank, "index": index, **about})

    def rows(self) -> list[dict[str, Any]]:
        """Return all bad samples, oldest first."""
        return list(self._rows)
