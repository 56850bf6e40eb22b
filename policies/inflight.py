"""How many requests to a far source are in flight: as many as its link needs. Pure.

n requests that take L seconds each give n / L answers a second (Little's law). While neither link
nor server is full, L does not depend on n, so more of them are faster. From the bound of bandwidth
times latency on only L grows: the answers come no sooner, and what is urgent waits behind the rest.
"""

from __future__ import annotations

from statistics import median

#: L may be so many times that of the sure requests: a queue that is never empty keeps a link full.
_FLAT = 1.2
#: From so many times on, requests wait for each other.
_QUEUED = 1.6
_GROWTH = 1.5
#: Share of the limit from which on it is what limits.
_REACHED = 0.9


class InFlight:
    """The limit of one source, by the times of its requests.

    Args:
        sure: requests that are permitted whatever they take.
        most: the limit of the limit.

    >>> link = InFlight(sure=32, most=128)
    >>> for _ in range(1000):
    ...     link.landed(flying=link.limit, seconds=0.05)
    >>> link.limit
    128
    >>> for _ in range(1000):
    ...     link.landed(flying=link.limit, seconds=max(0.05, link.limit / 1000))
    >>> 50 <= link.limit <= 80
    True
    """

    def __init__(self, sure: int, most: int) -> None:
        self._sure = min(sure, most)
        self._most = most
        self._seconds: list[float] = []  # of the requests of this round
        self._alone_s = 0.0  # what a request took when only the sure ones were in flight
        self.limit = self._sure

    def landed(self, flying: int, seconds: float) -> None:
        """Enter a request: how long it took, and how many were in flight at its end."""
        if self._most == self._sure or flying < _REACHED * self.limit:
            return  # the limit was not reached
        self._seconds.append(seconds)
        if len(self._seconds) < 2 * self.limit:  # the first ones began under another limit
            return
        took = median(self._seconds[self.limit :])
        self._seconds.clear()
        if self.limit == self._sure:
            self._alone_s = took
        if took <= _FLAT * self._alone_s:
            self.limit = min(int(_GROWTH * self.limit), self._most)
        elif took >= _QUEUED * self._alone_s:
            self.limit = max(int(_FLAT * self.limit * self._alone_s / took), self._sure)
