"""The unit files under a systemd that has really booted: start, reload, crash, hang, upgrade."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import Cores, until
from testbed import booted
from testbed.booted import CREEL, USER, Booted

pytestmark = [
    pytest.mark.skipif((why := booted.unavailable()) != "", reason=why),
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

UNIT = f"creeld@{USER}"
TRAIN = str(Path(booted.__file__).with_name("train_over_restart.py"))
FILES = 600


@pytest.fixture(scope="module")
def machine() -> Iterator[Booted]:
    with Booted() as machine:
        if machine.failed:
            pytest.skip(f"systemd does not boot here: {machine.failed}")
        machine.run(str(CREEL), "service", "install", "--system")
        machine.run_as_user("mkdir", "data")
        machine.run_as_user(str(CREEL.with_name("python")), TRAIN, "make", "data", str(FILES))
        yield machine


@pytest.fixture
def service(machine: Booted) -> Iterator[Booted]:
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "reset-failed", UNIT, check=False)
    machine.run("systemctl", "start", UNIT)
    yield machine
    machine.run("systemctl", "stop", UNIT)


def answer_of(machine: Booted, command: str) -> Any:
    return json.loads(machine.run_as_user(str(CREEL), command, "--json"))


def test_the_service_is_started_and_reloads_its_settings(service: Booted) -> None:
    assert answer_of(service, "status")["embedded"] is False
    assert service.property(UNIT, "StatusText").startswith("serving as 'default'")
    assert int(service.property(UNIT, "LimitNOFILE")) > 0
    settings = (
        "mkdir -p .config/creel && echo '[daemon]\nlog_json = true' > .config/creel/config.toml"
    )
    service.run_as_user("sh", "-c", settings)
    service.run("systemctl", "reload", UNIT)
    said = "daemon.log_json = True (was False), in effect now"
    until(
        lambda: said in service.run("journalctl", "--no-pager", "-o", "cat", "-u", UNIT),
        event="reloaded",
    )
    assert service.property(UNIT, "ActiveState") == "active"
    service.run_as_user("rm", "-r", ".config/creel")


def test_after_a_crash_it_starts_again_with_an_empty_memory(service: Booted) -> None:
    service.run_as_user(str(CREEL), "warm", "data")
    pid = answer_of(service, "status")["pid"]
    service.run("systemctl", "kill", "-s", "KILL", UNIT)
    until(lambda: service.property(UNIT, "NRestarts") == "1", event="restarted")
    until(lambda: service.property(UNIT, "ActiveState") == "active", event="it serves")
    assert answer_of(service, "status")["pid"] != pid
    assert answer_of(service, "ls")["datasets"] == []


def test_one_that_hangs_is_started_anew(machine: Booted) -> None:
    folder = f"/run/systemd/system/{UNIT}.service.d"
    text = "[Service]\nWatchdogSec=2\nTimeoutAbortSec=1\n"
    machine.run("sh", "-c", f"mkdir -p {folder} && printf '{text}' > {folder}/quick.conf")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", UNIT)
    try:
        machine.run("systemctl", "kill", "-s", "STOP", UNIT)
        until(lambda: machine.property(UNIT, "NRestarts") == "1", event="noticed")
        until(lambda: machine.property(UNIT, "ActiveState") == "active", event="it serves")
        log = machine.run("journalctl", "--no-pager", "-o", "cat", "-u", UNIT)
        assert "Watchdog timeout" in log
    finally:
        machine.run("rm", "-r", folder)
        machine.run("systemctl", "stop", UNIT)


def test_an_upgrade_in_mid_training_keeps_the_memory(service: Booted) -> None:
    """No batch is wrong, none is waited for long, and no file is read again."""
    cores = Cores()
    service.run_as_user("rm", "-f", "stop")
    training = service.start(str(CREEL.with_name("python")), TRAIN, "data", "stop")
    assert training.stdout is not None
    try:
        lines = iter(training.stdout)
        assert [next(lines) for _ in range(2)] == ["1\n", "2\n"]
        (before,) = answer_of(service, "ls")["datasets"]
        pid = answer_of(service, "status")["pid"]
        service.run("systemctl", "restart", UNIT)
        (after,) = answer_of(service, "ls")["datasets"]
        assert answer_of(service, "status")["pid"] != pid
        event = "training has found the service again"
        until(
            lambda: answer_of(service, "stats")["tiers"]["memory"]["hits"] > FILES, 60, event=event
        )
        stats = answer_of(service, "stats")
        service.run_as_user("touch", "stop")
        result = json.loads(list(lines)[-1])
        assert training.wait(60) == 0
    finally:
        service.run_as_user("touch", "stop")
        training.kill()
        training.communicate()
    assert before["resident_objects"] == FILES
    assert after["resident_objects"] >= 0.99 * FILES
    assert sum(source["reads"] for source in stats["sources"]) == 0
    assert result["wrong"] == 0
    assert service.property(UNIT, "NFileDescriptorStore") == "0"
    cores.skip_unless_spare()
    assert result["wait_s"] < 2


def test_a_stopped_service_leaves_no_memory(service: Booted) -> None:
    service.run_as_user(str(CREEL), "warm", "data")
    service.run("systemctl", "stop", UNIT)
    service.run("systemctl", "start", UNIT)
    assert answer_of(service, "ls")["datasets"] == []


def test_a_users_own_service(machine: Booted) -> None:
    manager = f"user@{machine.run_as_user('id', '-u').strip()}"
    if "active" not in machine.run("systemctl", "start", manager, check=False) + machine.property(
        f"{manager}.service", "ActiveState"
    ):
        pytest.skip("no user's manager starts here")
    try:
        machine.run_as_user(str(CREEL), "service", "install")
        for words in (["daemon-reload"], ["enable", "--now", "creeld"]):
            machine.run_as_user("systemctl", "--user", *words)
        machine.run_as_user(str(CREEL), "warm", "data")
        machine.run_as_user("systemctl", "--user", "restart", "creeld")
        (dataset,) = answer_of(machine, "ls")["datasets"]
        assert dataset["resident_objects"] == FILES
    finally:
        machine.run("systemctl", "stop", manager)


@pytest.mark.parametrize("name, most", [("creeld.service", 6.4), ("creeld@.service", 3.2)])
def test_a_unit_is_sound_and_no_more_exposed_than_the_manual_says(
    name: str, most: float, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[3] / "deploy" / name).read_text()
    unit = tmp_path / name.replace("@", "@x")
    unit.write_text(text.replace("/usr/bin/env creeld", "/bin/true").replace("%i", "daemon"))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    level = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= most
