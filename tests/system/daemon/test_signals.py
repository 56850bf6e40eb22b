"""No signal that schedulers or terminals send to all processes of a job takes its memory away."""

from __future__ import annotations

import os
import signal
import time

import pytest

from creel.config import Config
from creel.loader.client.client import Client
from creel.loader.client.embed import DaemonStart
from daemons import Running
from kit import gone, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("clean")]

#: Faults, and what stops or cannot be caught; SIGTERM, which drains.
_OTHERS = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV),
    *(signal.SIGSYS, signal.SIGTRAP, signal.SIGTERM),
}
SURVIVED = sorted(signal.valid_signals() - _OTHERS)


def started(name: str) -> DaemonStart:
    settings = {"daemon.name": name, "daemon.linger_s": 0.2, "memory.budget": "32MiB"}
    return DaemonStart(Config.load(settings)[0])


def served(start: DaemonStart, name: str) -> Client:
    assert start.report(60) == "1", start.last_log()
    return Client.connect(name)


def test_a_running_daemon_survives_them_and_says_what_ends_it(daemon_name: str) -> None:
    start = started(daemon_name)
    with served(start, daemon_name) as client:
        for number in SURVIVED:
            os.kill(client.daemon_pid, number)
            assert client.ask("status")["state"] == "serving", signal.strsignal(number)
        until(lambda: "SIGPWR from process" in start.last_log(), event="it has seen the last")
        os.kill(client.daemon_pid, signal.SIGTERM)
        until(lambda: gone(client.daemon_pid), event="it ends")
        name = f"ended: SIGTERM from process {os.getpid()} ("
        assert name in start.last_log()
    start.close()


def test_a_daemon_survives_them_while_it_starts(daemon_name: str) -> None:
    start = started(daemon_name)
    group = start._process.pid  # the daemon is a grandchild in the child's group
    deadline = time.monotonic() + 60
    while not start.reported() and time.monotonic() < deadline:
        for number in SURVIVED:
            os.killpg(group, number)
    with served(start, daemon_name) as client:
        assert client.ask("status")["state"] == "serving"
    start.close()


def test_a_daemon_that_is_to_end_while_it_starts_drains(daemon_name: str) -> None:
    start = started(daemon_name)
    group = start._process.pid
    deadline = time.monotonic() + 60
    while not start.reported() and time.monotonic() < deadline:
        os.killpg(group, signal.SIGTERM)
    assert start.report(0) == "1", start.last_log()
    until(lambda: "ended: SIGTERM from process" in start.last_log(), event="it ends in order")
    start.close()


def test_a_start_changes_no_signal_of_the_process_that_starts_it(daemon_name: str) -> None:
    def own() -> object:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return mask, [signal.getsignal(number) for number in SURVIVED]

    before = own()
    start = started(daemon_name)
    assert own() == before
    start.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_service_drains_and_says_who_asked(daemon_name: str, number: signal.Signals) -> None:
    with Running(daemon_name) as daemon:
        daemon.signal(signal.SIGUSR1)
        until(lambda: "SIGUSR1 from process" in daemon.log(), event="it has looked")
        daemon.signal(number)
        assert daemon.process.wait(30) == 0
        log = daemon.log()
    assert f"draining: {number.name} from process {os.getpid()}" in log
    assert f"ended: {number.name} from process {os.getpid()}" in log
