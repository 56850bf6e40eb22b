"""Faults during training: it goes on with the same batches, or says clearly why not."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

import creel
from creel.errors import CreelError
from creel.loader.client.client import Client
from kit import daemon_of, gone, nothing_left, until
from programs import Program

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("daemon_name"),
]

N, NBYTES, BATCH = 240, 5000, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """N files of different content and size."""
    rng = np.random.default_rng(1)
    home = tmp_path / "data"
    home.mkdir()
    for i in range(N):
        (home / f"{i:04}.bin").write_bytes(i.to_bytes(4, "little") + rng.bytes(NBYTES - 4))
    return home


def with_daemon(name: str, act: Any) -> None:
    with contextlib.suppress(CreelError, psutil.Error):
        act(daemon_of(name))


def files_of(folder: Path) -> creel.FileDataset:
    return creel.FileDataset(sorted(map(str, folder.iterdir())))


def loaders(dataset: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return creel's loader and torch's over the same dataset, arguments and seeds.

    torch's has no workers: batches are the same, and workers would end 10 s after an error.
    """
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": 2, **kwargs}
    ours = creel.DataLoader(dataset, generator=torch.Generator().manual_seed(5), **common)
    alone = common | {"num_workers": 0, "timeout": 0}
    theirs = torch.utils.data.DataLoader(
        dataset, generator=torch.Generator().manual_seed(5), **alone
    )
    return ours, theirs


def assert_same_epoch(ours: Any, theirs: Any, at: dict[int, Any] | None = None) -> None:
    """Check that both yield the same epoch; `at[i]` is called before batch i is taken."""
    taken = 0
    them = iter(theirs)
    for i, batch in enumerate(ours):
        assert torch.equal(batch, next(them)), f"batch {i}"
        taken += 1
        if at and i + 1 in at:
            at[i + 1]()
    # Run torch's to its end, too: only then has a user's generator advanced as far.
    assert next(them, None) is None
    assert taken == len(theirs)


@pytest.mark.parametrize("when, workers", [(1, 2), (7, 0), (20, 2)])
def test_a_killed_daemon_changes_no_batch(
    folder: Path, served: str, when: int, workers: int
) -> None:
    ours, theirs = loaders(files_of(folder), num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_epoch(ours, theirs, {when: lambda: daemon_of(served).kill()})
        assert_same_epoch(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_daemon_is_passed_by(folder: Path, served: str, workers: int) -> None:
    ours, theirs = loaders(files_of(folder), num_workers=workers)
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.append(daemon_of(served))
        stopped[0].suspend()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert_same_epoch(ours, theirs, {3: stop})
        finally:
            stopped[0].resume()
        assert_same_epoch(ours, theirs)


@pytest.mark.parametrize("step", ["connect", "register", "open", "attach"])
@pytest.mark.usefixtures("served")
def test_a_machine_out_of_descriptors_at_any_step_of_joining_means_direct_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with monkeypatch.context() as patch:
        patch.setattr(Client, step, mock.Mock(side_effect=full))
        assert_same_epoch(*loaders(files_of(folder)))


def test_a_task_that_finds_no_descriptor_travels_in_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long lists of indices travel in a memfd if there is a descriptor for it."""
    batches = [list(range(8000))] * 20
    ours: Any = creel.DataLoader(
        range(8000),  # type: ignore[arg-type]  # enough of a dataset
        batch_sampler=batches,
        num_workers=1,
        collate_fn=len,
        timeout=30,
    )
    it = iter(ours)
    assert next(it) == 8000
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=full))
    assert list(it) == [8000] * 19


@pytest.mark.usefixtures("served")
def test_a_killed_worker_is_named_and_the_next_epoch_is_right(folder: Path) -> None:
    ours, theirs = loaders(files_of(folder))
    it = iter(ours)
    next(it)
    victim = int(multiprocessing.active_children()[0].pid or 0)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid\(s\) {victim}\) exited"):
        for _ in it:
            pass
    del it
    ours, theirs = loaders(files_of(folder))
    assert_same_epoch(ours, theirs)


@pytest.mark.usefixtures("served")
def test_a_stopped_worker_runs_into_the_timeout_by_name(folder: Path) -> None:
    ours, _ = loaders(files_of(folder), timeout=100)
    it = iter(ours)
    next(it)
    it._timeout = 2  # torch's name; the first batch may take longer to come
    victim = psutil.Process(multiprocessing.active_children()[0].pid)
    victim.suspend()
    try:
        with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
            for _ in it:
                pass
    finally:
        victim.resume()


TRAINER = """
    import sys, torch, creel, os
    data = creel.FileDataset(sorted(sys.argv[1] + "/" + f for f in os.listdir(sys.argv[1])))
    loader = creel.DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    while True:
        for batch in loader:
            print(len(batch), flush=True)
            input()
"""


@pytest.mark.parametrize("batches", [1, 45])
def test_a_killed_trainer_leaves_nothing_behind(
    folder: Path, embedded: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setenv("CREEL_DAEMON__LINGER_S", "0.5")
    trainer = Program(TRAINER, str(folder))
    trainer.stdin.write("go on\n" * (batches - 1))
    trainer.stdin.flush()
    for _ in range(batches):
        assert trainer.stdout.readline().strip() == "8"
    family = [daemon_of(embedded), *psutil.Process(trainer.pid).children(recursive=True)]
    assert len(family) >= 3
    trainer.kill()
    trainer.communicate()
    until(
        lambda: all(gone(p.pid) for p in family),
        event=f"workers and daemon end with the trainer: {family}",
    )


@pytest.mark.usefixtures("served")
def test_a_vanished_file_raises_torchs_error_with_its_path(folder: Path) -> None:
    data = files_of(folder)
    gone = folder / "0100.bin"
    gone.unlink()
    ours, theirs = loaders(data)
    with pytest.raises(Exception, match=r"0100\.bin") as ours_raised:
        list(ours)
    with pytest.raises(Exception, match=r"0100\.bin") as theirs_raised:
        list(theirs)
    assert type(ours_raised.value) is type(theirs_raised.value)
    assert isinstance(ours_raised.value, FileNotFoundError)
    assert "object 100 of this FileDataset" in str(ours_raised.value)


@pytest.mark.usefixtures("served")
def test_a_file_that_shrank_since_it_was_listed_is_never_padded(folder: Path) -> None:
    paths = sorted(map(str, folder.iterdir()))
    data = creel.FileDataset(paths, nbytes=[NBYTES] * N)
    (folder / "0100.bin").write_bytes(b"short")
    ours, theirs = loaders(data, batch_size=1, shuffle=False)
    with pytest.raises(Exception, match=r"0100\.bin|size") as ours_raised:
        list(ours)
    with pytest.raises(Exception, match=r"0100\.bin|size") as theirs_raised:
        list(theirs)
    assert type(ours_raised.value) is type(theirs_raised.value)


def test_one_percent_of_memory_is_enough(
    tmp_path: Path, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "1MiB")
    nbytes = 256 << 10
    for i in range(400):
        with (tmp_path / f"{i:03}").open("wb") as file:
            file.write(i.to_bytes(2, "little"))
            file.truncate(nbytes)  # sparse
    ours, theirs = loaders(files_of(tmp_path), batch_size=2)
    assert_same_epoch(ours, theirs)
    with Client.connect(embedded, "cli") as client:
        assert client.ask("status")["memory"]["budget_nbytes"] == 4 * nbytes


PARITY = """
    import os, sys, torch, creel
    data = creel.FileDataset(sorted(sys.argv[1] + "/" + f for f in os.listdir(sys.argv[1])))
    kwargs = dict(batch_size=64, shuffle=True, num_workers=2)
    ours = creel.DataLoader(data, generator=torch.Generator().manual_seed(1), **kwargs)
    theirs = torch.utils.data.DataLoader(
        data, generator=torch.Generator().manual_seed(1), **{**kwargs, "num_workers": 0}
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    print("same")
"""


@pytest.mark.usefixtures("embedded")
def test_256_descriptors_are_enough(folder: Path) -> None:
    few = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    """
    assert Program(few + PARITY, str(folder)).communicate() == ("same\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
@pytest.mark.usefixtures("embedded")
def test_a_tiny_dev_shm_is_enough(folder: Path) -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    words = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c")
    said = subprocess.run(
        [*words, textwrap.dedent(PARITY), str(folder)], capture_output=True, text=True, check=False
    )
    assert said.stdout == "same\n", said.stderr


def test_no_daemon_possible_means_direct_reads(
    folder: Path, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    ours, theirs = loaders(files_of(folder))
    assert_same_epoch(ours, theirs)
    with pytest.raises(CreelError):
        daemon_of(embedded)


@pytest.mark.usefixtures("served")
def test_loaders_come_and_go_and_nothing_is_left(folder: Path) -> None:
    data = files_of(folder)
    assert_same_epoch(*loaders(data))  # starts imports, thread pools and the daemon
    with nothing_left():
        for workers in (0, 2, 0):
            ours, theirs = loaders(data, num_workers=workers)
            assert_same_epoch(ours, theirs)
            next(iter(ours))
            del ours, theirs


class _OneOfTwo(multiprocessing.context.ForkProcess):
    """A process on a machine that can start only two."""

    left = 2

    def start(self) -> None:
        _OneOfTwo.left -= 1
        if self.left < 0:
            raise BlockingIOError(errno.EAGAIN, "fork: no more processes")
        super().start()


class _Scarce(multiprocessing.context.ForkContext):
    Process = _OneOfTwo


@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_end_where_not_all_can_be_started() -> None:
    more: Any = {"creel": False, "multiprocessing_context": _Scarce()}
    loader: Any = creel.DataLoader([1, 2], num_workers=3, **more)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of more workers than cores
        with pytest.raises(BlockingIOError, match="no more processes"):
            iter(loader)
