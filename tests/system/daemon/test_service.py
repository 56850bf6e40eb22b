"""A daemon as a service: commands, signals, reports; it leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from creel.errors import ConfigError
from creel.loader.client.client import Client
from daemons import COMMAND, Running, folder, opened, plan, read_steps
from kit import descriptors, listening, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_commands_are_answered(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [1000] * 10)
    with daemon.client("cli") as client:
        key = client.register(manifest)
        assert client.ask("config")["settings"]["memory.budget"] == "32MiB"
        assert client.ask("datasets")["datasets"][0]["nbytes"] == 10_000
        client.ask("warm", dataset=key[:8])
        until(lambda: client.ask("datasets")["datasets"][0]["resident_objects"] == 10, event="warm")
        client.ask("drop", dataset=key)
        until(
            lambda: client.ask("datasets")["datasets"][0]["resident_objects"] == 0, event="dropped"
        )
        status = client.ask("status")
        assert (status["name"], status["pid"]) == (daemon.name, daemon.pid)
        assert msgspec.json.encode(client.ask("stats"))
        with pytest.raises(ConfigError, match="which dataset"):
            client.ask("warm")
        with pytest.raises(ConfigError, match="no such command"):
            client.ask("fly")


def test_an_idle_daemon_is_quiet_and_small(daemon_name: str, tmp_path: Path) -> None:
    with Running(daemon_name, fresh=True) as daemon, daemon.client() as client:
        process = psutil.Process(daemon.pid)
        # Private memory: the mapped part of Arrow's libraries varies by 35 MB.
        assert process.memory_full_info().uss < 60e6
        opened(client, folder(tmp_path, [10]))
        time.sleep(1)
        before = process.cpu_times()
        time.sleep(2)
        after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used <= 0.2, "it polls: 0.3 % of a core was measured on a quiet machine"


@pytest.mark.usefixtures("clean")
def test_nothing_is_left(daemon_name: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    manifest = folder(tmp_path, [100] * 10)
    with Running(daemon_name, env={"TMPDIR": str(temporary)}) as daemon:
        idle = daemon.fds()
        for _ in range(5):
            with daemon.client() as client:
                session = opened(client, manifest)
                plan(session, np.arange(10, dtype=np.int32), 5)
                assert read_steps(session, manifest, np.arange(10), 5) == 10
        until(lambda: daemon.fds() <= idle + 3, event="one dataset stays")
        process = Path(f"/proc/{daemon.pid}")
        held = [target for _, target in descriptors(daemon.pid)]
        held += (process / "maps").read_text().splitlines()
        assert not [target for target in held if "/dev/shm/" in target]
        daemon.end()
    assert list(temporary.iterdir()) == []


def test_sighup_reads_the_settings_again(daemon_name: str, tmp_path: Path) -> None:
    settings = tmp_path / "creel.toml"
    settings.write_text('[daemon]\nlog_level = "info"\n')
    with Running(daemon_name, env={"CREEL_CONFIG": str(settings)}) as daemon:
        settings.write_text('[daemon]\nlog_level = "debug"\nmax_sessions = 7\n')
        daemon.signal(signal.SIGHUP)
        with daemon.client("cli") as client:
            until(
                lambda: client.ask("config")["settings"]["daemon.max_sessions"] == 7,
                event="reloaded",
            )
            effective = client.ask("config")["effective"]
            assert effective["daemon.max_sessions"] == 1024, "until the next start"
            assert effective["daemon.log_level"] == "debug"
        settings.write_text("[daemon]\nlog_levle = 1\n")
        daemon.signal(signal.SIGHUP)
        until(lambda: "the settings are not reloaded" in daemon.log(), event="it has looked")
        log = daemon.end()
    assert "daemon.log_level = 'debug' (was 'info'), in effect now" in log
    assert "daemon.max_sessions = 7 (was 1024), takes effect at the next start" in log
    assert "memory.budget" not in log, "a flag is stronger than the files, this time too"


def test_a_log_in_a_file_has_no_end(daemon_name: str, tmp_path: Path) -> None:
    """`creeld 2>log` said nothing more after 1 MiB, which is the limit of a log in memory."""
    settings = tmp_path / "creel.toml"
    settings.touch()
    with Running(daemon_name, env={"CREEL_CONFIG": str(settings)}) as daemon:
        settings.write_text(f"[{'x' * (1 << 19)}]\n")  # the error names it
        while daemon.log().count("not reloaded") < 3:
            before = len(daemon.log())
            daemon.signal(signal.SIGHUP)
            until(lambda: len(daemon.log()) > before, event="told")  # noqa: B023  called at once
        assert "draining" in daemon.end()


@pytest.mark.parametrize("named", [True, False], ids=["CREEL_CONFIG", "creel.toml"])
def test_sighup_finds_a_projects_settings_again(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    """A daemon works in /, but its settings are searched from where it was started."""
    settings = tmp_path / ("mine.toml" if named else "creel.toml")
    settings.write_text("[daemon]\nidle_s = 7\n")
    monkeypatch.chdir(tmp_path)
    env = {"CREEL_CONFIG": "mine.toml"} if named else {}
    with Running(daemon_name, env=env, fresh=True) as daemon:
        settings.write_text("[daemon]\nidle_s = 7\nlog_json = true\n")
        daemon.signal(signal.SIGHUP)
        until(
            lambda: "log_json" in daemon.log() or "not reloaded" in daemon.log(), event="reloaded"
        )
        with daemon.client("cli") as client:
            effective = client.ask("config")["effective"]
        assert (effective["daemon.idle_s"], effective["daemon.log_json"]) == (7, True)
        assert Path(f"/proc/{daemon.pid}/cwd").readlink() == Path("/")
        daemon.end()


def test_systemd_hears_all_it_wants(daemon_name: str, tmp_path: Path) -> None:
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.settimeout(30)
    with ear:
        ear.bind(str(tmp_path / "notify"))
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        with Running(daemon_name, env=env) as daemon:
            ready = ear.recv(1000).decode()
            assert ready.startswith("READY=1\nSTATUS=serving as")
            beats = [ear.recv(1000).decode() for _ in range(3)]
            assert all(b.startswith("WATCHDOG=1") for b in beats)
            daemon.signal(signal.SIGHUP)
            heard = [ear.recv(1000).decode()]
            while not heard[-1].startswith("READY=1"):
                heard.append(ear.recv(1000).decode())
            assert any(h.startswith("RELOADING=1\nMONOTONIC_USEC=") for h in heard)
            daemon.end()
            while not (last := ear.recv(1000).decode()).startswith("STOPPING=1"):
                assert last.startswith("WATCHDOG=1")


def test_prometheus_may_scrape(daemon_name: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from urllib.request import urlopen

    manifest = folder(tmp_path, [1000] * 10)
    with (
        Running(daemon_name, "--metrics", "127.0.0.1:0") as daemon,  # any port that is free
        daemon.client() as client,
    ):
        session = opened(client, manifest, "job", 3, 4)
        plan(session, np.arange(10, dtype=np.int32), 5)
        read_steps(session, manifest, np.arange(10), 5)
        session.words.add("samples", 10)
        (port,) = listening(daemon.pid)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert 'creel_samples_total{job="job",rank="3"} 10.0' in text
    assert 'creel_cache_budget_bytes{tier="memory"} 3.3554432e+07' in text
    assert "creel_read_seconds_bucket{le=" in text
    assert 'creel_build_info{version="' in text
    for line in text.splitlines():
        assert line.startswith(("#", "creel_")), line
        assert str(tmp_path) not in line
    typed = {x.split()[2] for x in text.splitlines() if x.startswith("# TYPE")}
    helped = {x.split()[2] for x in text.splitlines() if x.startswith("# HELP")}
    assert typed == helped


@pytest.mark.parametrize("port", ["in use", "99999"])
def test_a_metrics_address_that_cannot_be_had_is_said_in_a_sentence(
    daemon_name: str, port: str
) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1] if port == "in use" else int(port)
        flags = ["--name", daemon_name, "--memory", "16MiB", "--metrics", f"127.0.0.1:{number}"]
        done = subprocess.run(
            [sys.executable, *COMMAND, *flags], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.splitlines()
    assert f"daemon.metrics = 127.0.0.1:{number}: " in said


def test_a_client_is_served_while_others_come_and_go(daemon: Running) -> None:
    with daemon.client("cli") as client:
        for _ in range(50):
            Client.connect(daemon.name, "cli").close()
            assert client.ask("status")["clients"] in {1, 2}
