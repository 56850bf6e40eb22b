"""A loader starts its daemon while the user's code works towards the first batch."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.addresses import startable
from creel.config import Config
from creel.errors import NoDaemonError
from creel.loader.client import connections, embed
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start, start_early, started_elsewhere
from creel.system.forks import no_fork
from kit import gone, resource_warnings_in_a_fork, until

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("clean")]


def config(name: str, **more: object) -> Config:
    settings = {"daemon.name": name, "daemon.linger_s": 0.2, "memory.budget": "32MiB"}
    return Config.load(settings | more)[0]


def pid_of(name: str) -> int:
    """Return the pid of the daemon that answers to a name."""
    pids: list[int] = []

    def answers() -> bool:
        try:
            with Client.connect(name) as client:
                pids.append(client.daemon_pid)
        except NoDaemonError:
            return False
        return True

    until(answers, 60, "a daemon serves")
    return pids[0]


def test_an_early_daemon_stays_without_a_client_until_it_is_let_go(daemon_name: str) -> None:
    start = start_early(config(daemon_name))
    assert start is not None
    pid = pid_of(daemon_name)  # a client that leaves, which alone would end the daemon in 0.2 s
    with pytest.raises(AssertionError):
        until(lambda: gone(pid), 1.0)
    start.close()
    until(lambda: gone(pid), event="the daemon ends")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("always::ResourceWarning")
def test_python_dev_mode_finds_nothing_of_a_start_in_a_forked_child(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections.start_daemon_early(config(daemon_name))
    assert resource_warnings_in_a_fork(monkeypatch) == 0
    connections.disconnect(daemon_name)


def test_a_daemon_hears_signals_that_the_training_has_blocked(daemon_name: str) -> None:
    """A requeued job gets SIGTERM; the daemon must then write what its disk lacks."""
    blocked = {signal.SIGTERM, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        client = connect_or_start(config(daemon_name))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert client is not None
    with client:
        os.kill(client.daemon_pid, signal.SIGTERM)
        until(lambda: gone(client.daemon_pid), event="it ends")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_program_that_is_no_python_starts_nothing_and_reads_directly(
    daemon_name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    frozen: bool,
) -> None:
    """Python inside another program may have no executable; a frozen one would start itself."""
    if frozen:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", None)
    assert start_early(config(daemon_name)) is None
    assert connect_or_start(config(daemon_name)) is None
    assert "start creeld" in caplog.text
    assert not started_elsewhere(daemon_name)
    with pytest.raises(NoDaemonError):
        Client.connect(daemon_name)


def test_a_daemon_that_dies_at_once_is_not_waited_for(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If none can start, new workers of each epoch may find out for themselves."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s")

    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setattr(embed, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert connect_or_start(config(daemon_name)) is None
    assert "the daemon did not start" in caplog.text


@pytest.mark.usefixtures("daemon_name")
def test_a_log_record_that_is_kept_keeps_no_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers of pytest and Sentry keep records; an error's frames would keep the loader."""
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    (tmp_path / "a").write_bytes(b"some")
    loader = creel.DataLoader(creel.FileDataset([tmp_path / "a"], nbytes=[4]))
    assert len([*loader]) == 1
    assert "reads directly" in caplog.text
    ended = weakref.ref(loader)
    del loader
    gc.collect()
    assert ended() is None


def test_no_worker_is_forked_that_would_keep_open_what_a_start_waits_for(
    daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    events: list[str] = []

    def started(*_: object, **__: object) -> Any:
        begun.set()
        with pytest.raises(AssertionError):
            until(lambda: bool(events), 0.3)
        events.append("started")
        raise OSError

    def fork() -> None:
        begun.wait()
        child = os.fork()
        if child == 0:
            with no_fork():
                os._exit(0)
        events.append("forked")
        assert os.waitpid(child, 0)[1] == 0

    monkeypatch.setattr(subprocess, "Popen", started)
    other = threading.Thread(target=fork)
    other.start()
    assert start_early(config(daemon_name)) is None
    other.join()
    assert events == ["started", "forked"]


def test_a_working_directory_that_is_gone_is_no_obstacle(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch does not use it; the search for settings and the daemon's start need not, either."""
    (tmp_path / "0.raw").write_bytes(b"x")
    (tmp_path / "gone").mkdir()
    options = {"daemon.name": daemon_name, "daemon.linger_s": 0.2, "memory.budget": "16MiB"}
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        files: Any = creel.FileDataset(tmp_path, "*.raw", decode=bytes)
        loader = creel.DataLoader(files, collate_fn=list, creel=options)
        assert list(loader) == [[b"x"]]
        client = connections.connected(daemon_name)
    assert client is not None
    assert client.ask("stats")["ranks"][0]["direct_reads"] == 0
    pid = client.daemon_pid
    connections.disconnect(daemon_name)
    until(lambda: gone(pid), event="the daemon ends")


def test_an_early_daemon_is_the_one_that_is_used(daemon_name: str) -> None:
    start = start_early(config(daemon_name))
    client = connect_or_start(config(daemon_name), start=start)
    assert client is not None
    pid = client.daemon_pid
    assert client.ask("status")["clients"] == 1
    client.close()
    until(lambda: gone(pid), event="the daemon ends")


def test_an_early_daemon_is_let_go_where_settings_want_none_any_more(daemon_name: str) -> None:
    """A user may switch creel off between making a loader and its first batch."""
    start = start_early(config(daemon_name))
    pid = pid_of(daemon_name)
    off = config(daemon_name, **{"loader.disable": True})
    assert connect_or_start(off, start=start) is None
    until(lambda: gone(pid), event="the daemon ends")


def test_none_is_started_where_one_serves_or_none_is_wanted(daemon_name: str) -> None:
    assert start_early(config(daemon_name, **{"loader.embed": False})) is None
    assert start_early(config(daemon_name, **{"loader.disable": True})) is None
    client = connect_or_start(config(daemon_name))
    assert client is not None
    assert start_early(config(daemon_name)) is None
    pid = client.daemon_pid
    client.close()
    until(lambda: gone(pid), event="the daemon ends")


def test_a_loader_of_what_cannot_be_cached_starts_none(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(connections, "start_early", lambda c: asked.append(c.daemon.name))
    creel.DataLoader(list(range(10)))  # type: ignore[arg-type]  # as users do
    (tmp_path / "x").write_bytes(bytes(100))
    records = creel.RecordDataset(tmp_path / "x", torch.uint8, (10,))
    creel.DataLoader(records, creel=False)
    assert asked == []
    creel.DataLoader(records)
    assert asked == [daemon_name]


def test_an_early_daemon_ends_with_a_process_that_never_read(
    daemon_name: str, tmp_path: Path
) -> None:
    np.arange(100, dtype=np.uint8).tofile(tmp_path / "x")
    code = (
        "import sys, torch, creel\n"
        f"loader = creel.DataLoader(creel.RecordDataset({str(tmp_path / 'x')!r}, torch.uint8,"
        " (10,)), creel={'daemon.linger_s': 0.2})\n"
        "print('made', flush=True); sys.stdin.read()"
    )
    person = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"CREEL_SOCKET": daemon_name},
    )
    assert person.stdin is not None
    assert person.stdout is not None
    with person, person.stdin, person.stdout:
        assert person.stdout.readline() == b"made\n"
        pid = pid_of(daemon_name)
        person.kill()
    until(lambda: gone(pid), event="the daemon ends")


class Endless(Sequence[str]):
    """Addresses of so many files that listing them takes too long."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: object) -> Any:
        raise AssertionError(f"address {i} was asked for")


class Declares(torch.utils.data.Dataset[int]):
    creel_uris = Endless()

    def __len__(self) -> int:
        return 1 << 40

    def objects(self, index: int) -> int:
        return index


def test_a_loader_is_made_without_a_look_at_any_sample(daemon_name: str) -> None:
    options = {"daemon.name": daemon_name, "daemon.linger_s": 0.2, "memory.budget": "32MiB"}
    data: Any = torch.utils.data.ConcatDataset([Declares()])
    creel.DataLoader(data, creel=options)
    assert connections.daemon_starting(Config.load(options)[0])
    connections.disconnect(daemon_name)


def test_of_several_processes_one_starts_it(daemon_name: str) -> None:
    """Ranks that make their loaders at the same time all connect to one daemon."""
    starts = [start_early(config(daemon_name)) for _ in range(3)]  # each has a turn of its own
    assert [start is not None for start in starts] == [True, False, False]
    client = connect_or_start(config(daemon_name))
    assert client is not None
    pid = client.daemon_pid
    assert starts[0] is not None
    starts[0].close()
    client.close()
    until(lambda: gone(pid), event="the daemon ends")
    again = start_early(config(daemon_name))
    assert again is not None
    again.close()


def test_other_processes_know_that_an_early_daemon_starts(daemon_name: str) -> None:
    settings = config(daemon_name)
    start = start_early(settings)
    assert start is not None
    assert connections.daemon_starting(settings) or not startable(daemon_name)
    until(lambda: not connections.daemon_starting(settings), event="the daemon answers")
    pid = pid_of(daemon_name)
    start.close()
    until(lambda: gone(pid), event="the daemon ends")


class Opens(torch.utils.data.Dataset[bytes]):
    """Files that are unknown before they are opened; `listed`: unless it holds their paths."""

    def __init__(self, folder: Path, n: int, *, listed: bool = False) -> None:
        self.folder, self.n = folder, n
        for i in range(n):
            self.path(i).write_bytes(b"x" * 1000)
        if listed:
            self.paths = [self.path(i) for i in range(n)]

    def path(self, index: int) -> Path:
        return self.folder / f"{index}.raw"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> bytes:
        return self.path(index).read_bytes()


@pytest.mark.parametrize("listed", [False, True])
def test_below_wrap_it_starts_once_it_has_files_to_read(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, listed: bool
) -> None:
    """A list of files counts at once, else reads that were recorded.

    Before that it has nothing to do, and would take processors from the first batch.
    """
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")  # all reads are recorded
    options = {"daemon.name": daemon_name, "daemon.linger_s": 0.2, "memory.budget": "32MiB"}
    dataset = Opens(tmp_path, 20, listed=listed)
    loader = creel.DataLoader(creel.wrap(dataset), collate_fn=list, creel=options)
    batches = iter(loader)
    early = held(daemon_name)
    assert len(list(batches)) == 20
    assert held(daemon_name)
    pid = pid_of(daemon_name)
    connections.disconnect(daemon_name)
    until(lambda: gone(pid), event="the daemon ends")
    assert early == listed


def held(name: str) -> bool:
    """Return whether a daemon answers to a name, or one is being started."""
    return not startable(name) or started_elsewhere(name)
