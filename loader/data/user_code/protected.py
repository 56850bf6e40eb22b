"""Attributes and lengths of a person's objects that torch does not ask for: an answer, or None.

Whatever torch does not call may be unfinished, raise anything, or exist in workers only.
"""

from __future__ import annotations

from typing import Any


def attribute(of: object, name: str) -> Any:
    """Return an attribute; None if it is missing, or a property or `__getattr__` fails."""
    try:
        return getattr(of, name, None)
    except Exception:  # noqa: BLE001  the person's code, which torch does not run
        return None


def length(of: object) -> int | None:
    """Return `len(of)`; None if it has none, or its `__len__` raises anything."""
    try:
        return len(of)  # type: ignore[arg-type]  # that is the question
    except Exception:  # noqa: BLE001  as above
        return None
