"""When a process without a daemon, or with one that does not answer, tries again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from creel.config import Config
from creel.errors import NoDaemonError
from creel.loader.client import connections
from creel.loader.client.client import Client
from creel.settings import DaemonSettings
from kit import unique_name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A clock that advances by a second each time it is read."""
    clock = itertools.count(1.0)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=clock.__next__))
    return clock


@pytest.fixture
def config() -> Iterator[Config]:
    """Settings for a daemon that this process has not asked for before."""
    config = Config(daemon=DaemonSettings(name=unique_name()))
    yield config
    connections.disconnect(config.daemon.name)


def test_a_daemon_that_stays_stopped_costs_ever_fewer_attempts(
    clock: Iterator[float], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt delays training by 10 s: one every 40 s made short epochs a third longer."""
    attempts: list[float] = []

    def in_vain(*_: Any, **__: Any) -> None:
        attempts.append(next(clock))

    monkeypatch.setattr(connections, "connect_or_start", in_vain)
    for _ in range(4000):
        assert connections.client_of(config) is None
    pauses = [b - a for a, b in itertools.pairwise(attempts)]
    assert all(b >= min(1.8 * a, connections.MAX_RETRY_S) for a, b in itertools.pairwise(pauses))
    assert connections.MAX_RETRY_S <= pauses[-1] <= 1.1 * connections.MAX_RETRY_S


@pytest.mark.usefixtures("clock")
def test_a_daemon_that_did_not_answer_is_not_asked_again_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = SimpleNamespace(alive=True, hung=False, returns=True, close=lambda: None)
    connect = mock.Mock(return_value=client)
    monkeypatch.setattr(connections, "connect_or_start", connect)
    assert connections.client_of(config) is connect.return_value
    client.alive, client.hung = False, True
    for _ in range(10):
        assert connections.client_of(config) is None
    assert connect.call_count == 1


def test_a_loader_that_needs_no_daemon_keeps_no_other_from_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped daemon lets the first wait; another one may have taken its place meanwhile."""
    asked, answered = threading.Event(), threading.Event()
    slow: Any = SimpleNamespace(alive=True, close=mock.Mock())
    quick: Any = SimpleNamespace(alive=True, close=mock.Mock())

    def connect(_: str) -> Any:
        asked.set()
        assert answered.wait(30)
        return slow

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.setattr(connections, "connect_or_start", lambda *_, **__: quick)
    with ThreadPoolExecutor(2) as threads:
        patient = threads.submit(connections.running_client, config)
        assert asked.wait(30)
        try:
            assert threads.submit(connections.client_of, config).result(timeout=20) is quick
        finally:
            answered.set()
        assert patient.result(timeout=30) is quick
    assert slow.close.called


def test_a_service_that_has_ended_is_awaited_before_another_daemon_is_started(
    clock: Iterator[float], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory comes back with it; a training with a daemon of its own would read all anew."""
    client: Any = SimpleNamespace(alive=True, hung=False, returns=True, close=lambda: None)
    connecting = mock.Mock(return_value=client)
    monkeypatch.setattr(connections, "connect_or_start", connecting)
    looked: list[float] = []

    def connect(*_: Any, **__: Any) -> Any:
        looked.append(next(clock))
        raise NoDaemonError("not yet")

    monkeypatch.setattr(Client, "connect", connect)
    assert connections.client_of(config) is connecting.return_value
    client.alive = False
    ended = next(clock)
    while connecting.call_count == 1:
        connections.start_daemon_early(config)
        if connections.client_of(config) is not None:
            break
    assert connecting.call_count == 2, "it did not come back"
    assert next(clock) - ended >= connections.RETURN_S
    assert min(b - a for a, b in itertools.pairwise(looked)) >= connections.POLL_S


@pytest.mark.usefixtures("clock")
def test_a_service_that_comes_back_is_used(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = SimpleNamespace(alive=True, hung=False, returns=True, close=lambda: None)
    after: Any = SimpleNamespace(alive=True, hung=False, returns=True, close=lambda: None)
    started = mock.Mock(return_value=before)
    monkeypatch.setattr(connections, "connect_or_start", started)
    monkeypatch.setattr(Client, "connect", lambda *_, **__: after)
    assert connections.client_of(config) is started.return_value
    before.alive = False
    assert connections.client_of(config) is after
    assert started.call_count == 1
