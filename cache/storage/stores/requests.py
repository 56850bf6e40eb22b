"""Requests to object stores: their counts, how many may be in flight, and what answers tell."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: Versions requested at a time; each request is a round trip of few bytes.
AT_ONCE = 32
#: Bytes per second; a slower answer counts as a time-out.
SLOWEST_BPS = 16 << 10


class Requests:
    """Counts of a client. All methods may be called from any thread.

    They are kinds of requests (`creel.counters.REQUESTS`); "throttles", answers that ask for fewer
    of them (503, 429); "resumes", requests for the rest of a body that broke.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def snapshot(self) -> Counter[str]:
        """Return a copy of all counts."""
        with self._lock:
            return self._counts.copy()


class Gate:
    """Limits the requests in flight of a store that asks for fewer (503 SlowDown, 429).

    There is no limit before the first such answer. Each one halves the number that was in flight
    (at most once for all that were sent before the last one); each success adds 1/limit: additive
    increase, multiplicative decrease, as in TCP. A limit that has grown to the most that ever were
    in flight is no limit.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._flying = 0
        self._most = 0
        self._cuts = 0
        self._limit: float | None = None

    @property
    def limit(self) -> float | None:
        return self._limit

    @contextmanager
    def request(self) -> Iterator[int]:
        """Wait for a place, and hold it; yields a number to hand to `slow_down`."""
        with self._free:
            while self._limit is not None and self._flying >= max(1, int(self._limit)):
                self._free.wait()
            self._flying += 1
            self._most = max(self._most, self._flying)
            cuts = self._cuts
        try:
            yield cuts
        finally:
            with self._free:
                self._flying -= 1
                self._free.notify()

    def slow_down(self, cuts: int) -> None:
        """Take up the answer "slow down" to a request which `request` gave this number."""
        with self._free:
            if cuts == self._cuts:
                now = self._flying if self._limit is None else self._limit
                self._limit, self._cuts = max(1.0, now / 2), self._cuts + 1

    def success(self) -> None:
        """Take up an answer without complaint."""
        if self._limit is None:  # nearly always: no lock
            return
        with self._free:
            if self._limit is not None:
                self._limit += 1 / self._limit
                if self._limit >= self._most:
                    self._limit = None
                self._free.notify_all()


def in_threads(job: Callable[[T], R], items: Sequence[T], at_once: int = 16) -> list[R]:
    """Return [job(item) for item in items], run in several threads at a time."""
    if len(items) <= 1:
        return [job(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items)), "creel-requests") as pool:
        try:
            done = pool.map(job, items)  # starts the threads
        except RuntimeError:  # no threads allowed (`ulimit -u`)
            return [job(item) for item in items]
        return list(done)


def of_each(
    job: Callable[[T], R], items: Sequence[T], at_once: int = AT_ONCE
) -> list[R | Exception]:
    """Return the result or exception of `job` for each item; runs many jobs at a time."""

    def outcome(item: T) -> R | Exception:
        try:
            return job(item)
        except Exception as e:  # noqa: BLE001  stores raise what they like
            return e

    return in_threads(outcome, items, at_once)


def tag_of(headers: Mapping[str, str], size: int | None) -> str:
    """Return a text that identifies a version of an object, or "" if there is none.

    >>> tag_of({"ETag": '"a"', "Last-Modified": "Sun"}, 9), tag_of({"Last-Modified": "Sun"}, 9)
    ('"a"', 'Sun 9')
    """
    tag = headers.get("ETag") or headers.get("etag") or headers.get("generation")
    if tag:
        return tag
    when = headers.get("Last-Modified") or headers.get("updated")
    return f"{when} {size}" if when and size is not None else ""
