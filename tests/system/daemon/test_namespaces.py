"""Processes that share a network namespace but see other files, and addresses taken by others."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from creel.addresses import elsewhere, first_address, second_address
from creel.cli import doctor
from creel.cli.checks.finding import Finding
from creel.config import Config
from creel.daemon.service.node import Node
from creel.daemon.service.sockets.control_socket import ControlSocket
from creel.errors import NoDaemonError
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start, start_early
from creel.messages import PROTOCOL, Hello, encode
from daemons import Running, folder, opened, plan, read_steps
from kit import gone, knock, unique_name, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def _may_unshare() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None and not subprocess.run([unshare, "-m", "true"], check=False).returncode
    )


private = pytest.mark.skipif(not _may_unshare(), reason="mount namespaces need root and unshare(1)")
root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")

_JOB = """
import json, os, sys
from pathlib import Path
import creel
path = Path(sys.argv[1])
for i in range(12):
    (path / f"{i:02}.raw").write_bytes(f"{sys.argv[2]} {i}".encode())
if sys.argv[3] == "creel":
    from creel import DataLoader
    options = {"creel": {"memory.budget": "16MiB", "daemon.linger_s": 5}}
else:
    from torch.utils.data import DataLoader
    options = {}
files = creel.FileDataset(path, "*.raw", decode=bytes)
loader = DataLoader(files, batch_size=3, collate_fn=list, **options)
from creel.loader.client import connections
for epoch in range(2):
    got = [s.decode() for batch in loader for s in batch]
    assert sorted(got) == sorted(f"{sys.argv[2]} {i}" for i in range(12)), got
client = connections.connected(os.environ["CREEL_SOCKET"])
print(json.dumps([client.daemon_pid, client.ask("stats")["ranks"][0]["direct_reads"]]), flush=True)
sys.stdin.read()
"""


@private
def test_two_jobs_with_private_mounts_read_their_own_files(
    tmp_path: Path, daemon_name: str
) -> None:
    """As with Slurm's job_container/tmpfs: same path, other files, one network namespace."""
    shared = tmp_path / "scratch"
    shared.mkdir()
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    words = 'mount -t tmpfs none "$1" && exec "$2" "$3" "$1" "$4" creel'
    command = ["unshare", "-m", "sh", "-c", words, "sh", str(shared), sys.executable, str(script)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs: list[Any] = [subprocess.Popen([*command, name], **pipes) for name in ("first", "second")]
    try:
        answers = [json.loads(job.stdout.readline()) for job in jobs]
        # A command outside lists them.
        assert sorted(elsewhere(daemon_name)) == sorted(pid for pid, _ in answers)
        command = [sys.executable, "-m", "creel", "status"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert asked.returncode == 3
        assert str(answers[0][0]) in asked.stderr
        there = ["nsenter", "-t", str(answers[0][0]), "-m", *command, "--json"]
        answer = json.loads(subprocess.run(there, stdout=subprocess.PIPE, check=True).stdout)
        assert answer["pid"] == answers[0][0]
    finally:
        for job in jobs:
            job.communicate("")
    assert answers[0][0] != answers[1][0]
    assert [direct for _, direct in answers] == [0, 0]
    for pid, _ in answers:
        until(lambda pid=pid: gone(pid), event="each daemon ends")  # type: ignore[misc]


@private
@pytest.mark.parametrize("apart", [["-m"], ["-U", "-r"]], ids=["mounts", "users"])
def test_a_client_that_sees_other_files_is_refused_at_the_raw_address(
    daemon_name: str, apart: Sequence[str]
) -> None:
    with Running(daemon_name) as daemon:
        address = first_address(daemon.name)
        code = f"""
import socket, sys
from creel.daemon.service.node import Node
from creel.daemon.service.sockets.control_socket import ControlSocket
from creel.errors import NoDaemonError, UnavailableError
from creel.loader.client.client import Client
for role in ("trainer", "cli"):
    try:
        Client._connect({address!r}, role, "", 0, 10.0)
    except UnavailableError as e:
        print(e)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({address!r})
s.send({encode(Hello(PROTOCOL, "trainer"))!r})
said, fds, _, _ = socket.recv_fds(s, 1000, 4)
print(said, fds)
"""
        answers = subprocess.run(
            ["unshare", *apart, sys.executable, "-c", code],
            stdout=subprocess.PIPE, text=True, timeout=110, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert len(answers) == 3, answers
        for said in answers[:2]:
            assert (
                "sees other files" in said
                or "cannot verify that your process sees the same files" in said
            )
        assert "cannot verify that your process sees the same files" in answers[2]
        assert answers[2].endswith(" []"), "no descriptor of the arena"


@root
def test_a_process_that_may_not_be_looked_at_is_refused(daemon_name: str) -> None:
    """Even one of the same user: files that cannot be verified are not trusted."""
    code = f"""
import os, socket, sys
os.chroot("/tmp")
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({first_address(daemon_name)!r})
s.send({encode(Hello(PROTOCOL, "cli"))!r})
print(s.recv(1000))
"""
    with Running(daemon_name):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
        )
    assert "or root directory" in run.stdout


@private
def test_a_root_directory_that_is_the_same_bound_elsewhere_is_another(tmp_path: Path) -> None:
    """Other file systems may be mounted below it."""
    code = f"""
import os, signal, subprocess
from creel.system.unix_peers import view_of
subprocess.run(["mount", "--bind", "/", {str(tmp_path)!r}], check=True)
for root in ("/", {str(tmp_path)!r}):
    ready, says = os.pipe()
    child = os.fork()
    if not child:
        os.chroot(root)
        os.write(says, b"1")
        signal.pause()
    os.read(ready, 1)
    print(view_of(child) == view_of())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
    output = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", code],
        stdout=subprocess.PIPE, text=True, timeout=110, check=True,
    ).stdout  # fmt: skip
    assert output.split() == ["True", "False"]


_OWN_PIDS = """
from pathlib import Path
import creel

for _ in range(2):
    loader = creel.DataLoader(creel.FileDataset(Path(__file__).parent, "*.py", decode=bytes))
    assert len(list(loader)) == 1
"""


@private
@pytest.mark.usefixtures("daemon_name")
def test_a_proc_of_other_pids_is_said_at_once(tmp_path: Path) -> None:
    """A daemon was started and not trusted, again and again: training waited 20 s, and was told
    that it did not start, with the line in which it said that it was ready.
    """
    script = tmp_path / "train.py"
    script.write_text(_OWN_PIDS)
    command = ["unshare", "-pf", sys.executable, str(script)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    (said,) = done.stderr.splitlines()
    assert said.startswith("creel reads directly, without a cache: creel needs /proc")
    assert said.endswith("is that of another PID namespace")


def test_the_services_sandbox_leaves_it_in_its_users_namespaces() -> None:
    """Options of systemd.exec(5) that make a mount or user namespace would lock out all clients."""
    unit = (Path(__file__).parents[3] / "deploy/creeld.service").read_text()
    given = {line.partition("=")[0] for line in unit.splitlines() if "=" in line}
    making = re.compile(
        r"Private(Tmp|Devices|Users|Mounts|IPC|Network)|Protect(System|Home|Kernel.*|ControlGroups"
        r"|Hostname|Proc)|ProcSubset|(ReadWrite|ReadOnly|Inaccessible|Exec|NoExec|Bind.*)Paths"
        r"|Root.*|Mount.*|Extension.*|TemporaryFileSystem|DynamicUser|NetworkNamespacePath"
    )
    assert not [name for name in given if making.fullmatch(name)]


# --- another user sits at our address ---------------------------------------------------------

_SQUAT = """
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind({address!r})
if {listens}:
    s.listen(1)
kept = []
if {full}:
    while True:
        c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        kept.append(c)
        if c.connect_ex({address!r}):
            break
print("sits", flush=True)
sys.stdin.read()
"""


@contextmanager
def squatter(address: str, mode: str) -> Iterator[None]:
    code = _SQUAT.format(address=address, listens=mode != "bound", full=mode == "full")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sits\n"
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def config(name: str) -> Config:
    settings = {"daemon.name": name, "memory.budget": "16MiB", "daemon.linger_s": 0.3}
    return Config.load(settings)[0]


def doctors_view(name: str) -> Finding:
    """Return the finding of `creel doctor` about a daemon's address."""
    checks = doctor.checks(config(name), lambda _: {"name": "", "pid": 0, "version": ""})
    return next(check for check in checks if check.name == "address")


@root
@pytest.mark.usefixtures("no_second")
@pytest.mark.parametrize("mode", ["bound", "listens", "full"])
def test_an_address_of_another_user_is_final_and_named(
    daemon_name: str, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No daemon is started and no answer awaited: that took half a minute."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a daemon is started where none can be")

    with squatter(first_address(daemon_name), mode), caplog.at_level(logging.WARNING, "creel"):
        monkeypatch.setattr(subprocess, "Popen", never)
        assert start_early(config(daemon_name)) is None
        assert connect_or_start(config(daemon_name)) is None
        if mode != "bound":
            with pytest.raises(NoDaemonError, match="of user 65534"):
                Client.connect(daemon_name)
        doctors = doctors_view(daemon_name)
    (said,) = caplog.messages
    assert "user 65534 holds the address of your daemon" in said
    assert (doctors.level, doctors.state) == ("warn", "user 65534 holds it")
    assert doctors_view(daemon_name).level == "ok"


@root
@pytest.mark.parametrize("mode", ["bound", "listens", "full"])
def test_a_second_address_with_a_secret_serves_where_the_first_is_taken(
    daemon_name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (tmp_path / "data").mkdir()
    manifest = folder(tmp_path / "data", [100] * 10)
    with squatter(first_address(daemon_name), mode):
        start = start_early(config(daemon_name))
        assert start is not None
        client = connect_or_start(config(daemon_name), start=start)
        assert client is not None
        with client, Client.connect(daemon_name, "worker", client.token) as worker:
            session = opened(client, manifest)
            plan(session, np.arange(10), 5)
            assert read_steps(worker.attach(session.id), manifest, np.arange(10), 5) == 10
            assert worker.daemon_pid == client.daemon_pid
            (secret,) = runtime.iterdir()
            assert secret.stat().st_mode & 0o777 == 0o600
    pid = client.daemon_pid
    until(lambda: gone(pid), event="the daemon ends")


def test_a_folder_that_others_may_enter_keeps_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o755)
    assert second_address("x", make=True) is None
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o700)
    second = second_address("x", make=True)
    assert second is not None
    assert second == second_address("x") != first_address("x")
    (tmp_path / "creel-secret").chmod(0o644)
    assert second_address("x") is None


def test_root_is_another_user_too() -> None:
    """A daemon reads with its user's rights, and for that user alone."""
    address = f"\0{unique_name()}"
    with select.epoll() as epoll:
        with mock.patch.object(os, "getuid", return_value=os.getuid() + 1):  # another user
            control_socket = ControlSocket(address, cast("Node", None), epoll, limit=5)
        with knock(address) as caller:
            caller.send(encode(Hello(PROTOCOL, "trainer")))
            control_socket.ready(control_socket.fd, 0.0)
            for fd, _ in epoll.poll(10):
                control_socket.ready(fd, 0.0)
            assert b"start your own" in caller.recv(1000)
        control_socket.close()
