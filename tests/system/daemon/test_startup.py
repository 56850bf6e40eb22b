"""Costs of starting, as counts: modules that a daemon without data has not loaded or awaited.

Seconds and megabytes are in benchmarks/startup.py.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import creel
from creel.config import Config
from creel.loader.client import connections
from creel.loader.client.embed import connect_or_start
from daemons import COMMAND, Running, folder, opened, plan, read_steps
from kit import gone, unique_name, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

#: For sitecustomize.py: the daemon's `import pyarrow` reports its start, and waits for an answer.
_SLOW_PYARROW = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow" and "creel.daemon.main" in sys.modules:
            open(os.path.join({folder!r}, "began"), "w").close()
            while not os.path.exists(os.path.join({folder!r}, "go")):
                time.sleep(0.005)
sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def running() -> Iterator[Running]:
    with Running(unique_name()) as daemon:
        yield daemon


def has_arrow(daemon: Running) -> bool:
    return "libarrow" in Path(f"/proc/{daemon.pid}/maps").read_text()


def test_a_daemon_loads_arrow_with_the_first_dataset(running: Running, tmp_path: Path) -> None:
    with running.client("cli") as client:
        for command in ("status", "stats", "datasets", "config"):
            client.ask(command)
        assert not has_arrow(running)
        client.register(folder(tmp_path, [10]))
        assert has_arrow(running)


def test_a_slow_import_holds_up_nobody_but_the_first_dataset(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_PYARROW.format(folder=str(tmp_path)))
    manifest = folder(tmp_path, [10])
    env = {"PYTHONPATH": str(tmp_path)}
    with Running(unique_name(), env=env, fresh=True) as daemon, daemon.client() as client:
        registering = threading.Thread(target=client.register, args=(manifest,))
        registering.start()
        until((tmp_path / "began").exists, event="the daemon imports pyarrow")
        with daemon.client("cli") as other:
            assert other.ask("status")["datasets"] == 0
        assert registering.is_alive()
        (tmp_path / "go").touch()
        registering.join(60)
        assert client.ask("status")["datasets"] == 1


def test_a_service_takes_over_from_an_embedded_daemon(tmp_path: Path) -> None:
    """As after kill -9: the training's own daemon must not keep the service from coming back."""
    name, manifest = unique_name(), folder(tmp_path, [10] * 8)
    config = Config.load({"daemon.name": name, "memory.budget": "8MiB", "daemon.linger_s": 0})[0]
    embedded = connect_or_start(config)
    assert embedded is not None
    with embedded, Running(name) as service:
        until(lambda: "ready:" in service.log(), event="the service is up")
        assert embedded.alive
        with service.client() as client:
            assert client.daemon_pid == service.pid != embedded.daemon_pid
            for ours in (client, embedded):
                session = opened(ours, manifest)
                plan(session, np.arange(8), 2)
                assert read_steps(session, manifest, np.arange(8), 2) == 8
        assert "released the address" in service.log()
        embedded.close()
        until(lambda: gone(embedded.daemon_pid), event="it ends with its last client")


def test_a_service_takes_over_the_metrics_page_too(daemon_name: str) -> None:
    """The embedded daemon kept its port, and the service ended: Address already in use."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"daemon.name": daemon_name, "memory.budget": "8MiB", "daemon.metrics": address}
    embedded = connect_or_start(Config.load({**settings, "daemon.linger_s": 0})[0])
    assert embedded is not None
    with embedded, Running(daemon_name, "--metrics", address) as service:
        until(lambda: "ready:" in service.log(), event="the service is up")
        with urlopen(f"http://{address}/metrics", timeout=30) as page:
            assert "3.3554432e+07" in page.read().decode(), "the budget of `Running`"
        assert embedded.alive


def test_a_second_service_is_refused(running: Running) -> None:
    command = [sys.executable, *COMMAND, "--name", running.name, "--memory", "8MiB"]
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert second.returncode == 1
    assert f"your daemon named {running.name!r} is already running" in second.stderr
    with running.client("cli") as client:
        assert client.ask("status")["pid"] == running.pid


def test_a_setting_that_the_running_daemon_does_not_have_is_told_once_with_both_values(
    daemon_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(tmp_path, [10] * 8)
    files: Any = creel.FileDataset(tmp_path, decode=bytes)

    def read(**options: object) -> list[str]:
        with caplog.at_level(logging.WARNING, "creel"):
            loader = creel.DataLoader(files, collate_fn=list, creel=options)
            for _ in range(2):
                assert len(list(loader)) == 8
        said = caplog.messages[:]
        caplog.clear()
        return said

    try:
        with Running(daemon_name, memory="32MiB") as daemon:
            assert read() == []
            assert read(**{"memory.budget": "33554432"}) == [], "the same in other words"
            assert read(**{"loader.hung_s": 5}) == [], "none of the daemon's"
            (said,) = read(**{"memory.budget": "16MiB", "window.max_steps": 7})
            assert f"process {daemon.pid}" in said
            assert "memory.budget = '32MiB', not '16MiB' (DataLoader(creel=...))" in said
            assert "window.max_steps = 256, not 7" in said
            assert read(**{"memory.budget": "16MiB", "window.max_steps": 7}) == []
    finally:
        connections.disconnect(daemon_name)
