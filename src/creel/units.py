"""Sizes and durations in human-readable form."""

from __future__ import annotations

import re

from creel.errors import ConfigError

_NUMBER = r"\s*(\d+(?:\.\d+)?|\.\d+)\s*"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_TIMES = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Return the bytes in "64GiB" (powers of 1024), "100GB", "100G" (powers of 1000) or "4096".

    >>> parse_size("64GiB"), parse_size("1.5 kB"), parse_size("10M")
    (68719476736, 1500, 10000000)

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(i?)b?\s*", text, re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise ConfigError(f"{text!r} is not a size: write it like 64GiB, 100GB or 4096")
    base = 1024.0 if match[3] else 1000.0
    return _whole(text, float(match[1]) * base ** float(_POWERS[match[2].lower()]))


def parse_count(text: str) -> int:
    """Return the number in "14.2M" (powers of 1000) or "1281167".

    >>> parse_count("14.2M"), parse_count("1281167")
    (14200000, 1281167)

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(_NUMBER + r"([kmgt]?)\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{text!r} is not a count: write it like 14.2M or 1281167")
    return _whole(text, float(match[1]) * 1000.0 ** _POWERS[match[2].lower()])


def _whole(text: str, value: float) -> int:
    if value >= 1 << 63:
        raise ConfigError(f"{text!r} is too large: it should be less than 2**63")
    return int(value + 0.5)


def parse_seconds(text: str) -> float:
    """Return the seconds in "250ms", "30s", "10m", "2h" or "1.5".

    >>> parse_seconds("250ms"), parse_seconds("10m"), parse_seconds(".5")
    (0.25, 600.0, 0.5)

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(_NUMBER + r"([a-z]*)\s*", text)
    if not match or match[2] not in _TIMES:
        raise ConfigError(f"{text!r} is not a duration: write it like 250ms, 30s, 10m or 1.5")
    return float(match[1]) * _TIMES[match[2]]


def format_size(nbytes: float) -> str:
    """Format a size with three digits, for people.

    >>> format_size(68719476736), format_size(1500), format_size(12)
    ('64.0 GiB', '1.46 KiB', '12 B')
    """
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"
