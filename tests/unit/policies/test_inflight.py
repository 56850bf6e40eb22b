"""The number of requests in flight against a simulated link: that of bandwidth times latency."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from creel.policies.concurrency import InFlight
from kit import seeds


def served(
    limit: InFlight, rng: np.random.Generator, latency_s: float, rate: float, requests: int
) -> float:
    """Return the answers per second of a link that gives at most `rate` of them."""
    flying: list[float] = []
    began: dict[float, float] = {}
    now, free = 0.0, 0.0  # time, and from when on the link sends another answer
    for _ in range(requests):
        while len(flying) < limit.limit:
            free = max(free, now) + 1 / rate
            end = max(free, now + latency_s * rng.lognormal(0, 0.1))
            heapq.heappush(flying, end)
            began[end] = now
        end = heapq.heappop(flying)
        now = max(now, end)
        limit.landed(len(flying) + 1, end - began.pop(end))
    return requests / now


@pytest.mark.parametrize("latency_s, rate", [(0.05, 1200), (0.02, 2000), (0.1, 500), (0.05, 1e9)])
@pytest.mark.parametrize("seed", seeds(3))
def test_a_link_is_filled_and_not_much_more(latency_s: float, rate: float, seed: int) -> None:
    limit = InFlight(sure=8, most=256)
    rng = np.random.default_rng(seed)
    served(limit, rng, latency_s, rate, 20_000)
    fits = min(latency_s * rate, 256)
    assert served(limit, rng, latency_s, rate, 20_000) >= 0.9 * min(rate, 256 / latency_s)
    assert limit.limit <= max(2.5 * fits, 8)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_source_that_more_requests_only_slow_down_keeps_the_sure_ones(seed: int) -> None:
    limit = InFlight(sure=32, most=256)
    served(limit, np.random.default_rng(seed), 0.001, 500, 20_000)
    assert limit.limit <= 48


def test_requests_that_take_longer_are_worth_it_while_more_of_them_are_answered() -> None:
    limit = InFlight(sure=32, most=128)
    for _ in range(2000):
        limit.landed(limit.limit, 0.04 + 0.0004 * limit.limit)
    assert limit.limit >= 100


def test_a_limit_that_is_not_reached_says_nothing() -> None:
    limit = InFlight(sure=32, most=256)
    for _ in range(1000):
        limit.landed(flying=20, seconds=0.05)
    assert limit.limit == 32
