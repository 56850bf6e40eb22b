"""Back-off: the pauses of a loop that polls."""

from __future__ import annotations

from collections.abc import Iterator


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds, without end: `first_s`, doubled each time up to `longest_s`.

    >>> some = pauses(0.5, 3.0)
    >>> [next(some) for _ in range(5)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
