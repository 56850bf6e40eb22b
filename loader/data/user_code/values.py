"""Values of a wrong type or range: one sentence that names the argument and what it takes."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TypeGuard

from creel.errors import ConfigError

_LONGEST = 60


def wrong(name: str, value: object, wanted: str) -> ConfigError:
    """Return the error for an argument that has a wrong value; `wanted`: what to give.

    >>> str(wrong("workers", 3, '"own" or "shared"'))
    'workers=3: give "own" or "shared"'
    """
    return ConfigError(f"{name}={shown(value)}: give {wanted}")


def shown(value: object) -> str:
    """Return a value as text in one line: its `repr`, or its type where that is long or fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  the person's code
        text = ""
    if not text or "\n" in text or len(text) > _LONGEST:
        return f"<{type(value).__name__}>"
    return text


def whole(value: object) -> int | None:
    """Return a whole number of any type as an int, as one of NumPy's; None if it is none."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except Exception:  # noqa: BLE001  the person's code
        return None


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether this is an `int`, and `least` or more; no bool is one."""
    return type(value) is int and value >= least


def check_choice(name: str, value: object, choices: Collection[str | None]) -> None:
    """Raise ConfigError unless the value is one of some words, or None where that is one."""
    if not (value is None or type(value) is str) or value not in choices:
        words = [f'"{choice}"' for choice in choices if choice is not None]
        words += ["None"] * (None in choices)
        raise wrong(name, value, " or ".join([", ".join(words[:-1]), words[-1]]))


def check_whole(name: str, value: object, least: int, of: str = "a whole number") -> None:
    """Raise ConfigError unless the value is a whole number of this range."""
    if not is_whole(value, least):
        raise wrong(name, value, f"{of}, {least} or more")
