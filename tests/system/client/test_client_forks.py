"""A client in forked children, and the workers that join its sessions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from creel.errors import DaemonLostError
from daemons import Running, content, folder, opened, plan, status
from kit import gone, resource_warnings_in_a_fork, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("always::ResourceWarning")
def test_python_dev_mode_finds_nothing_left_open_in_a_forked_child(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.client() as client:
        assert client.ask("status")["sessions"] == 0
        assert resource_warnings_in_a_fork(monkeypatch) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_client_is_dead_in_a_forked_child_and_alive_in_its_parent(
    daemon: Running, tmp_path: Path
) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        plan(session, np.arange(10, dtype=np.int32), 5)
        assert session.wait(1, 10)
        pid = os.fork()
        if pid == 0:
            ids, ends = np.arange(5, dtype=np.int32), np.array([5])
            wrong = client.alive or session.alive or session.extend(0, 2, ids, ends)
            wrong = wrong or session.wait(7, 0.1)
            try:
                client.ask("status", timeout_s=0.1)
                wrong = True
            except DaemonLostError:
                pass
            os._exit(int(wrong))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.alive
        assert client.ask("status")["sessions"] == 1
        assert content(session, 3) == (tmp_path / "0003").read_bytes()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hide_its_parents_death(daemon: Running) -> None:
    code = (
        "import os, time\n"
        "from creel.loader.client.client import Client\n"
        "client = Client.connect(os.environ['CREEL_SOCKET'])\n"
        "pid = os.fork()\n"
        "print(pid, flush=True) if pid else None\n"
        "time.sleep(150)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            with daemon.client("cli") as client:
                until(lambda: client.ask("status")["clients"] == 1, event="the parent is gone")
                assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


_WORKER = """
import json, os, sys
import numpy as np
from creel.loader.client.client import Client
token, session_id, first, last = json.loads(sys.argv[1])
client = Client.connect(os.environ["CREEL_SOCKET"], "worker", token)
session = client.attach(session_id)
assert "torch" not in sys.modules
for step in range(first, last):
    assert session.wait(step, 20)
    print(session.pieces(np.array([step]))[step][0][0], flush=True)
client.close()
"""


def test_a_worker_waits_for_its_trainers_steps(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    with daemon.client() as client:
        session = opened(client, manifest)
        job = json.dumps([client.token, session.id, 0, 10])
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, job], stdout=subprocess.PIPE, text=True
        )
        until(lambda: status(daemon)["clients"] == 3, event="the worker is there")
        plan(session, np.arange(10, dtype=np.int32), 1)
        output, _ = worker.communicate()
        assert worker.returncode == 0
    assert [int(x) for x in output.split()] == [
        (tmp_path / f"{i:04}").read_bytes()[0] for i in range(10)
    ]


def test_a_worker_outlives_its_trainer_without_harm(daemon: Running, tmp_path: Path) -> None:
    manifest = folder(tmp_path, [100] * 10)
    trainer = daemon.client()
    session = opened(trainer, manifest)
    with daemon.client("worker", trainer.token) as worker:
        same = worker.attach(session.id)
        assert same.alive
        trainer.close()
        until(lambda: not same.alive, event="the board says closed")
        assert not same.wait(3, 5)
