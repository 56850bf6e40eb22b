"""Back-off: how long a loop that polls sleeps between two looks."""

from __future__ import annotations

from collections.abc import Iterator


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield seconds to sleep, without end: `first_s`, then twice as long each, up to `longest_s`.

    >>> some = pauses(0.5, 3.0)
    >>> [next(some) for _ in range(5)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
