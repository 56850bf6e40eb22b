"""Daemons that a client starts: races, failed starts, waiting clients, ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import psutil
import pytest

from creel.config import Config
from creel.loader.client import embed
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start
from daemons import Running, folder, opened, plan, read_steps
from kit import gone, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def config(name: str, **daemon: object) -> Config:
    """Return settings for a small daemon that ends quickly."""
    settings = {"name": name, "linger_s": 0.3, "log_level": "warning", **daemon}
    return msgspec.convert({"daemon": settings, "memory": {"budget": "16MiB"}}, Config)


@pytest.mark.usefixtures("clean")
def test_the_first_client_starts_a_daemon_and_the_last_one_ends_it(
    daemon_name: str, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    first = connect_or_start(config(daemon_name))
    assert first is not None
    # No process's child: it outlives this one.
    assert first.daemon_pid not in {child.pid for child in psutil.Process().children()}
    second = connect_or_start(config(daemon_name))
    assert second is not None
    assert first.daemon_pid == second.daemon_pid
    assert first.ask("status")["embedded"]
    first.close()
    time.sleep(0.5)  # in which a daemon that counts wrongly would end
    session = opened(second, manifest)
    plan(session, np.arange(10, dtype=np.int32), 5)
    assert read_steps(session, manifest, np.arange(10), 5) == 10
    pid = second.daemon_pid
    second.close()
    until(lambda: gone(pid), event="the daemon ends")


_RACER = """
import os, sys, time
import msgspec
from creel.config import Config
from creel.loader.client import embed
from creel.loader.client.embed import connect_or_start
config = msgspec.json.decode(sys.argv[1], type=Config)
start, starts = embed.DaemonStart, []
embed.DaemonStart = lambda given: starts.append(1) or start(given)
embed.OTHER_START_S = 60.0  # on a busy machine another's start takes longer than 3 s
print("ready", flush=True)
sys.stdin.read(1)
client = connect_or_start(config)
print(client.daemon_pid if client else 0, len(starts), flush=True)
sys.stdin.read(1)
"""


def test_four_processes_that_start_at_once_share_one_daemon(daemon_name: str) -> None:
    settings = msgspec.json.encode(config(daemon_name)).decode()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    pids, starts = set(), 0
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("x")
        racer.stdin.flush()
    for racer in racers:
        assert racer.stdout is not None
        pid, started = map(int, racer.stdout.readline().split())
        pids.add(pid)
        starts += started
    for racer in racers:
        racer.communicate("x")
    assert len(pids) == 1
    assert pids != {0}
    assert starts == 1
    pid = pids.pop()
    until(lambda: gone(pid), event="the daemon ends")


def test_a_daemon_that_cannot_start_says_why_once(
    daemon_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = msgspec.convert(
        {"daemon": {"name": daemon_name}, "memory": {"budget": "900TiB"}}, Config
    )
    with caplog.at_level(logging.WARNING, logger="creel"):
        assert connect_or_start(impossible) is None
    assert len(caplog.records) == 1
    assert "more than this node has" in caplog.text


@pytest.mark.timeout(120)
def test_a_daemon_that_is_stopped_while_it_starts_is_not_waited_for(
    daemon_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = mock.Mock(embed.DaemonStart)
    ended.report.return_value = "1"
    ended.last_log.return_value = "killed"
    assert connect_or_start(config(daemon_name), start=ended) is None
    assert "did not start: killed" in caplog.text


def test_a_daemon_that_does_not_answer_is_not_waited_for_twice(
    daemon: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def starts(config: Config) -> None:
        raise AssertionError(f"another daemon would be started: {config.daemon.name}")

    monkeypatch.setattr(embed, "DaemonStart", starts)
    monkeypatch.setitem(Client.connect.__func__.__kwdefaults__, "timeout_s", 0.3)  # type: ignore[attr-defined]
    daemon.signal(signal.SIGSTOP)
    try:
        assert connect_or_start(config(daemon.name)) is None
    finally:
        daemon.signal(signal.SIGCONT)
    assert "has not answered for 0.3 s" in caplog.text
    client = connect_or_start(config(daemon.name))
    assert client is not None
    client.close()


def test_disabled_or_not_to_be_started_means_none(daemon_name: str) -> None:
    for loader in ({"disable": True}, {"embed": False}):
        settings = msgspec.convert({"daemon": {"name": daemon_name}, "loader": loader}, Config)
        assert connect_or_start(settings) is None


def test_ctrl_c_in_the_trainers_terminal_does_not_reach_the_daemon(daemon_name: str) -> None:
    client = connect_or_start(config(daemon_name))
    assert client is not None
    with client:
        os.kill(client.daemon_pid, signal.SIGINT)
        os.kill(client.daemon_pid, signal.SIGHUP)
        time.sleep(0.3)  # in which a daemon that heeds them would end
        assert client.ask("status")["state"] == "serving"
        assert os.getsid(client.daemon_pid) != os.getsid(0)
        pid = client.daemon_pid
    until(lambda: gone(pid), event="the daemon ends")
