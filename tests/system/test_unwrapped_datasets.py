"""A dataset that opens its files itself is named when training waits for them; no other one is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.cli import main
from creel.loader.workers import own_files
from testbed.same import needs_fuse
from testbed.slowfs import SlowFS

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), needs_fuse]

FILES, BATCH = 240, 8


class Files(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{i}") for i in range(FILES)]

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[i]).read_bytes()), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "_said", set())


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Path]:
    """A folder of files each of which takes 20 ms to read: an epoch takes torch 5 s."""
    data, mountpoint = tmp_path / "data", tmp_path / "mount"
    data.mkdir()
    for i in range(FILES):
        (data / f"{i}").write_bytes(bytes(1000))
    mountpoint.mkdir()
    with SlowFS(str(data), str(mountpoint), read_latency=20.0):  # type: ignore[no-untyped-call]
        yield mountpoint


def epochs(dataset: Any, name: str, workers: int, many: int) -> None:
    loader = creel.DataLoader(dataset, BATCH, num_workers=workers, creel=name)
    for _ in range(many):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_training_waits_for_is_named_once_and_by_stats_why(
    workers: int,
    slow: Path,
    served: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    epochs(Files(slow), served, workers, 2)
    epochs(Files(slow), served, workers, 1)
    (said,) = [m for m in caplog.messages if "opens files itself" in m]
    assert said.startswith(
        "this dataset opens files itself; creel.wrap(dataset) caches them (training waits for "
        f"{slow}/"
    )
    assert main.main(["--name", served, "stats", "--why"]) == 0
    assert f"files that the dataset opens itself ({slow}/" in capsys.readouterr().out
    assert main.main(["--name", served, "stats", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any(one["own_file"].startswith(f"{slow}/") for one in told["ranks"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapped_dataset_is_not_told_to_be_wrapped(
    workers: int, slow: Path, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    epochs(creel.wrap(Files(slow)), served, workers, 1)
    assert not [m for m in caplog.messages if "opens files itself" in m]


class Busy(Files):
    """Decodes for longer than reading takes; the files lie in the page cache."""

    def __getitem__(self, i: int) -> torch.Tensor:
        for _ in range(300):
            sum(range(1000))
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_that_waits_for_decoding_is_told_nothing(
    workers: int, tmp_path: Path, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(FILES):
        (tmp_path / f"{i}").write_bytes(bytes(1000))
    epochs(Busy(tmp_path), served, workers, 1)
    assert not [m for m in caplog.messages if "opens files itself" in m]
