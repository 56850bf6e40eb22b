"""`creel doctor` and `creel env`: what is wrong on this machine, and what to do about it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_rig import SESSION, STATUS, FakeClient, answering

from creel.cli import doctor, main
from creel.cli.checks.finding import Finding
from creel.config import Config
from creel.errors import NoDaemonError, UnavailableError
from creel.loader.client.client import Client
from creel.version import VERSION


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    yield from answering(monkeypatch)


def no_daemon(_: str) -> dict[str, Any]:
    raise NoDaemonError("none listens")


def checked(name: str, ask: Callable[[str], dict[str, Any]] = no_daemon) -> Any:
    """Return the doctor's findings of one name."""
    (check,) = (finding for finding in doctor.checks(Config(), ask) if finding.name == name)
    return check


def test_a_checkout_without_an_installation_knows_its_version(
    daemon: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "version", "0.0.1")
    monkeypatch.setattr(doctor, "version", mock.Mock(side_effect=PackageNotFoundError))
    check = checked("daemon", daemon.ask)
    assert f"this is creel {VERSION}:" in check.remedy
    daemon.close()


def test_doctor_gives_every_trouble_a_remedy(
    daemon: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "version", "0.0.1")
    assert main.main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {c["name"] for c in checks} >= {"memfd", "descriptors", "locked memory", "/dev/shm"}
    assert all(c["remedy"] for c in checks if c["level"] != "ok")
    (skew,) = [c for c in checks if c["name"] == "daemon"]
    assert skew["level"] == "warn"
    assert "creel stop" in skew["remedy"]
    assert daemon.closed


def test_elsewhere_than_on_linux_doctor_and_env_say_what_they_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.delattr("os.memfd_create")
    assert main.main(["doctor"]) == 1
    assert "the daemon needs Linux" in capsys.readouterr().out
    assert main.main(["env"]) == 0


def test_doctor_ends_with_1_when_something_cannot_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_args: object, **_more: object) -> None:
        raise UnavailableError("it does not answer")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "900TB")
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "bad   daemon" in out
    assert "more than this node has" in out


def test_the_threads_of_a_rank_are_those_that_its_launcher_has_set(
    daemon: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["/bin/sleep", "60"], env={"OMP_NUM_THREADS": "77"})
    try:
        monkeypatch.setitem(SESSION, "pid", child.pid)
        assert "OMP_NUM_THREADS=77" in checked("OMP threads", daemon.ask).state
    finally:
        child.kill()
        child.wait()
        daemon.close()


def test_two_daemons_of_one_user_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "daemon_pids", lambda: iter([3, 4]))
    check = checked("daemons")
    assert check.level == "warn"
    assert "pids 3, 4" in check.state


@pytest.mark.parametrize(
    "name, remedy", [("descriptors", "ulimit -n 4096"), ("locked memory", "ulimit -l unlimited")]
)
def test_limits_that_are_too_low_are_told(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 4096))
    check = checked(name)
    assert (check.level, remedy in check.remedy) == ("warn", True)


def test_a_proc_that_tells_of_other_processes_or_nothing_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then no daemon can be found, and nothing is said of one."""
    monkeypatch.setattr(Path, "readlink", lambda _: Path("1"))
    findings = list(doctor.checks(Config(), no_daemon))
    assert (findings[-1].name, findings[-1].level) == ("/proc", "bad")
    assert "another PID namespace (pid 1)" in findings[-1].state
    monkeypatch.setattr(Path, "readlink", mock.Mock(side_effect=FileNotFoundError))
    assert checked("/proc").state == "not mounted"


def test_another_package_that_is_imported_as_creel_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have = {"creel-data": VERSION, "creel": "9.9"}
    monkeypatch.setattr(doctor, "_version", lambda name: have.get(name, "-"))
    check = checked("package")
    assert (check.level, "creel 9.9" in check.state) == ("warn", True)
    assert check.remedy.startswith("pip uninstall creel, then")
    del have["creel"]
    assert checked("package") == Finding("package", "ok", f"creel-data {VERSION}")


def test_env_names_versions_and_our_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOG_LEVEL", "debug")
    monkeypatch.setenv("CREEL_CLUSTER_KEY", "0123456789abcdef")
    assert main.main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    answer = json.loads(out)
    assert answer["CREEL_LOG_LEVEL"] == "debug"
    assert "CREEL_CLUSTER_KEY" in answer
    assert "0123456789abcdef" not in out
    assert answer["python"] == sys.version.split()[0]
