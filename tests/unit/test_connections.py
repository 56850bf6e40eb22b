"""When a process that has no daemon, or one that does not answer, tries again."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from creel.config import Config
from creel.loader.client import connections


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds at which a daemon was asked for, of a clock that `client_of` alone moves."""
    clock, made = [0.0], []

    def now() -> float:
        clock[0] += 1.0
        return clock[0]

    def in_vain(*_: Any, **__: Any) -> None:
        made.append(clock[0])

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(connections, "connect_or_start", in_vain)
    for kept in ("_not_before", "_pauses", "_clients", "_starts"):
        monkeypatch.setattr(connections, kept, {})
    return made


def test_a_daemon_that_stays_stopped_costs_ever_fewer_attempts(attempts: list[float]) -> None:
    """Each holds up training for 10 s: one every 40 s made short epochs a third longer."""
    config = Config()
    for _ in range(4000):
        assert connections.client_of(config) is None
    pauses = [b - a for a, b in pairwise(attempts)]
    assert all(b >= min(1.8 * a, connections.MAX_RETRY_S) for a, b in pairwise(pauses))
    assert connections.MAX_RETRY_S <= pauses[-1] <= 1.1 * connections.MAX_RETRY_S


def test_a_daemon_that_did_not_answer_is_not_asked_again_at_once(attempts: list[float]) -> None:
    hung = SimpleNamespace(alive=False, hung=True, close=lambda: None)
    config = Config()
    connections._clients[config.daemon.name] = hung  # type: ignore[assignment]
    for _ in range(10):
        assert connections.client_of(config) is None
    assert not attempts
