"""A client that asks for too much or breaks something does not affect other clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import daemons
from creel.cache.memory.shared_words import HEARTBEAT
from creel.cache.storage.manifest import Manifest
from creel.errors import UnavailableError
from creel.loader.client.session import STALE_NS, Session
from creel.messages import Extend
from daemons import Running, folder, opened, plan, read_steps, status
from kit import Cores, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

#: A daemon whose tables and plans may take 32 MiB, so that tests need not fill half a gigabyte.
SMALL = """
import sys
from creel.daemon.service.memory import quota
from creel.daemon import main
quota.MIN_LIMIT_NBYTES = 32 << 20
{more}
sys.exit(main.main())
"""
#: Memory beyond that for the interpreter's allocator and a message in transit.
SLACK_NBYTES = 64 << 20


@contextmanager
def small(name: str, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Iterator[Running]:
    monkeypatch.setattr(daemons, "COMMAND", ("-c", SMALL.format(more=more)))
    with Running(name, memory="16MiB") as daemon:
        yield daemon


@contextmanager
def beating(session: Session) -> Iterator[None]:
    """Check that the daemon's heartbeat, as another client sees it, never stops for so long
    that the client would give the daemon up; a daemon that waits for a core may.
    """
    stop, gaps, cores = threading.Event(), [0.0], Cores()

    def watch() -> None:
        beat, since = 0, time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            gaps.append(now - since)
            if session.words[HEARTBEAT] != beat:
                beat, since = session.words[HEARTBEAT], now
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert max(gaps) * 1e9 < STALE_NS or not cores.spare()


def resident(daemon: Running) -> int:
    return int(psutil.Process(daemon.pid).memory_info().rss)


def rows(objects: int, nbytes: int = 1) -> Manifest:
    """Return a manifest of a few hundred bytes that claims so many objects."""
    return Manifest.of_runs(["/nowhere"], np.array([0]), np.array([nbytes]), np.array([objects]))


def test_epoch_numbers_cost_no_memory(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(daemon_name, monkeypatch) as daemon, daemon.client() as client:
        session = opened(client, rows(400_000))
        before = resident(daemon)
        for epoch in range(200):
            assert session.extend(epoch, epoch, np.array([epoch]), np.array([1]))
        assert client.ask("stats")["sessions"][0]["known"] == 200
        assert resident(daemon) - before < 20 << 20  # 200 tables would be 400 MB


def test_a_dataset_of_millions_stops_nobody(daemon_name: str, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    with Running(daemon_name, memory="16MiB") as daemon, daemon.client() as a, daemon.client() as b:
        other = opened(a, manifest)
        before = resident(daemon)
        with beating(other):
            huge = opened(b, rows(8_000_000))
            for epoch in range(20):
                assert huge.extend(epoch, epoch, np.array([epoch]), np.array([1]))
            with pytest.raises(UnavailableError, match="split the dataset"):
                b.register(rows(200_000_000))
            plan(other, np.arange(20), 5)
            assert read_steps(other, manifest, np.arange(20), 5) == 20
        memory = a.ask("status")["memory"]
        assert resident(daemon) - before < memory["tables_nbytes"] + SLACK_NBYTES
        assert memory["tables_nbytes"] <= memory["tables_limit_nbytes"] == 512 << 20


def test_records_that_nobody_reads_take_no_memory(daemon_name: str) -> None:
    """No page is written for them, neither of the table nor of the core's columns."""
    with Running(daemon_name, memory="16MiB") as daemon, daemon.client() as client:
        client.register(rows(10))
        before = resident(daemon)
        session = opened(client, rows(8_000_000))
        assert session.extend(0, 0, np.arange(1000), np.array([1000]))
        client.ask("status")
        assert resident(daemon) - before < 16 << 20
        assert int(session.table.length[7_999_999]) == 1


def test_idle_datasets_make_room_for_tables(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(daemon_name, monkeypatch) as daemon, daemon.client() as client:
        keys = [client.register(rows(360_000, nbytes)) for nbytes in range(1, 4)]
        with pytest.raises(UnavailableError, match="memory for tables"):
            client.register(rows(360_000, 9))  # all are in use
        sessions = [opened(client, key) for key in keys]
        small_key = client.register(rows(10))
        small_one = opened(client, small_key)
        for session in (sessions[0], small_one):
            session.close()
        client.register(rows(360_000, 9))
        keys_left = {d["dataset"] for d in client.ask("datasets")["datasets"]}
        assert keys[0] not in keys_left  # the largest idle one
        assert small_key in keys_left


def test_a_plan_without_end_ends_its_session(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 20)
    with (
        small(daemon_name, monkeypatch, "quota.MIN_LIMIT_NBYTES = 8 << 20") as daemon,
        daemon.client() as a,
        daemon.client() as b,
    ):
        other, greedy = opened(a, manifest), opened(b, manifest)
        before = resident(daemon)
        with beating(other):
            for i in range(200):
                if not greedy.alive:
                    break
                greedy.extend(
                    0, 100 * i, np.zeros(100_000, np.int32), np.arange(1000, 100_001, 1000)
                )
                b.ask("status")  # after all messages sent before
            assert not greedy.alive
            plan(other, np.arange(20), 5)
            assert read_steps(other, manifest, np.arange(20), 5) == 20
        assert resident(daemon) - before < (8 << 20) + SLACK_NBYTES
        assert "ends: " in daemon.log()
        again = opened(b, manifest)
        plan(again, np.arange(20), 5)
        assert read_steps(again, manifest, np.arange(20), 5) == 20


def test_too_much_at_once_costs_its_sender_the_connection(daemon_name: str, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 20)
    with Running(daemon_name) as daemon:
        with daemon.client() as client:
            session = opened(client, manifest)
            where = Extend(client.token, session.id, 0, 0)
            client.send(where, np.zeros((1 << 20) + 1, np.int32), np.array([(1 << 20) + 1]))
            until(lambda: not client.alive, event="the daemon hangs up")
        with daemon.client() as client:
            key = client.register(manifest)
            with pytest.raises(UnavailableError):
                opened(client, key, job="x" * 5000)
        assert status(daemon)["sessions"] == 0


BROKEN = """
from creel.daemon.service import registry, sessions
from creel.policies import next_use
add, opened, extended = next_use.EpochUses.add, registry.Registry.open, sessions.Sessions.extended
def broken(self, steps, ids):
    if len(ids) == 13:
        self.first[ids] = 5  # not all that it should do
        raise MemoryError("13 are too many")
    add(self, steps, ids)
def refused(self, token, request):
    if request.job == "boom":
        raise RuntimeError("no such luck")
    return opened(self, token, request)
def unlucky(self, session, message, arrays):
    if len(arrays[0]) == 7:
        raise ZeroDivisionError("seven")
    extended(self, session, message, arrays)
next_use.EpochUses.add, registry.Registry.open = broken, refused
sessions.Sessions.extended = unlucky
"""


def test_a_failure_ends_the_session_it_was_about_and_no_other(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 40)
    with small(daemon_name, monkeypatch, BROKEN) as daemon, daemon.client() as other:
        session = opened(other, manifest, job="j", rank=0, world=2)
        at = plan(session, np.arange(40), 5)
        with daemon.client() as client:
            bad = opened(client, manifest, job="j", rank=1, world=2)
            plan(bad, np.arange(20), 5)
            assert bad.wait(1, 10)
            bad.extend(1, 4, np.arange(13), np.array([13]))
            until(lambda: not bad.alive, event="its session ends")
            assert client.alive
        with daemon.client() as client:
            bad = opened(client, manifest)
            bad.extend(0, 0, np.arange(7), np.array([7]))
            until(lambda: not client.alive, event="the daemon hangs up")
        with daemon.client() as client:
            key = client.register(manifest)
            with pytest.raises(UnavailableError):
                opened(client, key, job="boom")
        assert read_steps(session, manifest, np.arange(40), 5) == 40
        plan(session, np.arange(40)[::-1], 5, 1, at=at)
        assert read_steps(session, manifest, np.arange(40)[::-1], 5, at=at) == 40
        log = daemon.log()
        assert log.count("Traceback") == 3
        assert all(f"{e}: " in log for e in ("MemoryError", "ZeroDivisionError", "RuntimeError"))
        assert "cannot be mended" not in log
        assert status(daemon)["state"] == "serving"


BEYOND_REPAIR = """
from creel.daemon.core import core
def broken(self, event):
    raise ZeroDivisionError("no such luck")
core.Core._opened = lambda self, event, now: broken(self, event)
core.Core.recover = broken
"""


def test_a_daemon_beyond_repair_ends_as_failed_so_that_its_service_starts_it_again(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The units say Restart=on-failure."""
    manifest = folder(tmp_path, [100] * 4)
    with small(daemon_name, monkeypatch, BEYOND_REPAIR) as daemon:
        with daemon.client() as client, pytest.raises(UnavailableError):
            opened(client, manifest)
        assert daemon.process.wait(30) == 1, daemon.log()
        assert "its state may be inconsistent" in daemon.log()
