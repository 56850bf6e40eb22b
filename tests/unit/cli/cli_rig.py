"""A client whose daemon is a table of answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from creel.loader.client.client import Client

STATUS: dict[str, Any] = {
    "disk": {"path": "", "failure": ""},
    "name": "default",
    "pid": 7,
    "version": "0.1.0",
    "embedded": False,
    "state": "serving",
    "uptime_s": 75.0,
    "memory": {"budget_nbytes": 64 << 30, "used_nbytes": 16 << 30, "held_nbytes": 0},
    "clients": 2,
    "sessions": 1,
    "datasets": 1,
}
SESSION: dict[str, Any] = {
    "session": 1,
    "job": "resnet",
    "rank": 3,
    "world": 8,
    "pid": 70,
    "dataset": "d",
    "done": 100,
    "ready": 164,
    "ahead": 64,
    "known": 5000,
    "batches": 100,
    "samples": 25600,
    "nbytes": 3_840_000_000,
    "direct_reads": 2,
    "direct_nbytes": 300_000,
    "stall_s": {"source": 0.5, "decode": 12.0, "collate": 0.0, "daemon": 0.0, "sampler": 0.0},
    "busy_s": {"source": 1.0, "decode": 30.0, "collate": 2.0, "handover": 0.5},
    "cpu_s": 28.0,
    "workers": 4,
    "failed": 1,
    "lead_s": 300.0,
    "lead_now_s": 4.0,
    "utilisation": 0.87,
    "made": 3,
    "own_file": "",
    "own_remedy": "",
    "overdue_s": 0.0,
    "overdue_cause": "",
    "overdue_file": "",
}
STATS: dict[str, Any] = {
    "memory": STATUS["memory"],
    "tiers": {"memory": {"hits": 900, "misses": 100, "evictions": {"room": 5}}},
    "sources": [{"source": "/data", "opens": 100, "reads": 100, "nbytes": 10 << 20, "retries": 3}],
    "sessions": [SESSION],
    "ranks": [SESSION],
}


#: The last batches of that session: none is recorded.
BATCHES: dict[str, Any] = {"session": 1, "rows": []}


class FakeClient:
    """Answers from a table, as a daemon would."""

    daemon_pid = 7

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.closed = False

    def ask(self, command: str, **args: object) -> dict[str, Any]:
        self.asked.append((command, args))
        answers = {"status": STATUS, "stats": STATS, "datasets": {"datasets": []}, "stop": {}}
        return (answers | {"batches": BATCHES})[command]

    def close(self) -> None:
        self.closed = True


def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """Make connections to a daemon return this client; it must be closed."""
    fake = FakeClient()
    monkeypatch.setattr(Client, "connect", lambda *_args, **_more: fake)
    yield fake
    assert fake.closed or not fake.asked
