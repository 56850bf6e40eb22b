"""Files that samples of an opaque dataset open: how often the source is asked for each of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.loader.client import connections
from creel.loader.data.tracing.lists.hypothesis import LEAST
from daemons import Running
from testbed.same import needs_fuse, opened_by_epoch
from testbed.slow_files import KINDS, N, OpaqueFiles, SlowFiles, write_npy

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    needs_fuse,
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for the daemon, however busy the machine is: reads are counted."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")


class Parts(OpaqueFiles):
    """Each file has several samples, and is opened for each of them."""

    def __init__(self, folder: str | Path, read: int) -> None:
        super().__init__(folder, "npy")
        self.read = read

    def __getitem__(self, i: int) -> Any:
        with open(self.paths[i // 6], "rb") as f:  # noqa: PTH123
            f.seek(self.read * (i % 6))
            return torch.frombuffer(bytearray(f.read(self.read)), dtype=torch.uint8)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("slow", "workers"),
    [
        *((kind, 0) for kind in ("npy", "png", "text", "pt", "raw", "bit", "torchvision")),
        *((kind, 2) for kind in ("npy", "h5", "fd", "cv2")),
    ],
    indirect=["slow"],
)
def test_the_daemon_reads_each_file_once(slow: SlowFiles, workers: int) -> None:
    """Samples open it themselves only to prove that large files of their list are read whole."""
    ours, theirs = slow.loader(num_workers=workers), slow.torchs(num_workers=workers)
    opens = opened_by_epoch(slow.opens, ours, theirs)
    more = N if slow.kind == "cv2" else 0  # some versions of cv2 open a file twice
    proved = 0 if slow.kind == "bit" else LEAST
    assert N <= sum(opens) <= N + proved + more
    assert opens[2] == 0


@pytest.mark.parametrize("slow", ["bit"], indirect=True)
@pytest.mark.parametrize(("kind", "workers"), [("creel", 0), ("torch", 0), ("torch", 2)])
def test_a_later_job_finds_on_disk_what_its_dataset_lists(
    slow: SlowFiles,
    daemon_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    workers: int,
) -> None:
    """From its first epoch on, unless the files have changed."""
    (tmp_path / "disk").mkdir()
    settings = {"LOADER__EMBED": "false", "LOADER__DIRECT": "never", "DISK__KEEP_FREE": "0"}
    settings |= {"DISK__PATH": str(tmp_path / "disk"), "DISK__BUDGET": "16MiB"}
    for name, value in settings.items():
        monkeypatch.setenv(f"CREEL_{name}", value)

    def job() -> list[int]:
        with Running(daemon_name, memory="16MiB") as daemon:
            ours, theirs = slow.loader(), slow.torchs()
            if kind == "torch":
                dataset = OpaqueFiles(slow.fs.mountpoint, slow.kind)
                ours = slow.torchs(creel.wrap(dataset), num_workers=workers)
            opens = opened_by_epoch(slow.opens, ours, theirs, 2)
            connections.disconnect(daemon_name)
            daemon.end()  # which writes what only memory has
        return opens

    assert job() == [N, 0]
    assert job() == [0, 0]
    slow.fill(1)
    assert job() == [N, 0]


def by_two_threads(path: str) -> Any:
    """Read the first half in another thread, the rest here."""
    chunks: list[bytes] = []
    with open(path, "rb") as f:  # noqa: PTH123
        thread = threading.Thread(target=lambda: chunks.append(f.read(50_000)))
        thread.start()
        thread.join()
        chunks.append(f.read())
    return np.frombuffer(b"".join(chunks), np.uint8)


def twice(path: str) -> Any:
    return np.stack([np.load(path), np.load(path)])


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("read", "opens"), [(by_two_threads, LEAST), (twice, 2 * LEAST)])
def test_odd_ways_of_reading_give_what_they_give(
    slow: SlowFiles, read: Any, opens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "npy", (write_npy, read))
    *first, last = opened_by_epoch(slow.opens, slow.loader(), slow.torchs())
    assert (N < sum(first) <= N + opens, last) == (True, 0)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("read", "workers"), [(10_000, 0), (2_000, 2)])
def test_a_file_of_several_samples_is_opened_only_by_the_daemon_and_once(
    slow: SlowFiles, read: int, workers: int
) -> None:
    ours: Any = creel.DataLoader(
        creel.wrap(Parts(slow.fs.mountpoint, read)), 4, num_workers=workers
    )
    theirs = DataLoader(Parts(slow.folder, read), 4)
    assert opened_by_epoch(slow.opens, ours, theirs) == [N, N // 6, 0]
