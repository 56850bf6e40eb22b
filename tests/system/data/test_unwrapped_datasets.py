"""A dataset that opens its files itself is named when training waits for them; no other one is."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from creel.cache.memory.memfd import Descriptor
from creel.cli import main
from creel.loader.line.observers import unwrapped_files
from kit import until
from testbed.same import needs_fuse
from testbed.slowfs import SlowFS

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), needs_fuse]

FILES, BATCH = 96, 8


class Files(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{i}") for i in range(FILES)]

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[i]).read_bytes()), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _in_short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said before; a fifth of a second is long, and is looked at for as long."""
    monkeypatch.setattr(unwrapped_files, "_said", set())
    monkeypatch.setattr(unwrapped_files, "_LEAST_S", 0.2)
    monkeypatch.setattr(unwrapped_files, "_SAMPLES", 20)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    """Files each of which takes 20 ms to read: an epoch takes torch 2 s. Also all in one file."""
    data, mountpoint = tmp_path / "data", tmp_path / "mount"
    data.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (FILES, 1000), np.uint8)
    for i in range(FILES):
        (data / f"{i}").write_bytes(rows[i].tobytes())
    wide = np.repeat(rows, 8, axis=1)  # two pages each
    wide.tofile(data / "0.bin")
    mountpoint.mkdir()
    with SlowFS(str(data), str(mountpoint), read_latency=20.0) as slow:  # type: ignore[no-untyped-call]
        yield slow


@pytest.fixture
def slow(files: Any) -> Path:
    """Their folder."""
    return Path(files.mountpoint)


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
    (said,) = hints(caplog)
    assert said.startswith(f"this dataset opens files itself ({slow}/")
    assert ": creel.wrap(dataset) caches what Python code, h5py or pyarrow opens" in said
    assert main.main(["--name", served, "stats", "--why"]) == 0
    assert f"files that the dataset reads itself ({slow}/" in capsys.readouterr().out
    assert main.main(["--name", served, "stats", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert any(rank["own_file"].startswith(f"{slow}/") for rank in answer["ranks"])


def hints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of files that datasets read themselves."""
    said = "training waits for storage: "
    return [m.removeprefix(said) for m in caplog.messages if m.startswith(said)]


@pytest.mark.parametrize(("served_by", "workers"), [(creel.wrap, 2), (creel.kept, 0)])
def test_a_dataset_that_creel_serves_is_told_nothing(
    workers: int,
    served_by: Callable[[Any], Any],
    slow: Path,
    served: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    epochs(served_by(Files(slow)), served, workers, 3)
    assert not hints(caplog)


class KeptOpen(Files):
    """Samples are rows of one file, which each process opens once, as C does."""

    file: Any = None

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.file is None:
            self.file = Descriptor(os.open(self.paths[0] + ".bin", os.O_RDONLY))
        row = os.pread(self.file.fd, 8000, 8000 * i)
        return torch.frombuffer(bytearray(row), dtype=torch.uint8)


class Mapped(Files):
    """As nanoGPT reads its tokens."""

    def __getitem__(self, i: int) -> torch.Tensor:
        rows = np.memmap(self.paths[0] + ".bin", np.uint8, "r").reshape(FILES, -1)
        return torch.from_numpy(np.array(rows[i]))


class ByThreads(Files):
    """As zarr reads its chunks."""

    def __getitem__(self, i: int) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().__getitem__, i).result()


class ByC(Files):
    """As soundfile and other libraries open paths."""

    def __getitem__(self, i: int) -> torch.Tensor:
        libc, data = ctypes.CDLL(None), bytearray(1000)
        fd = libc.open(self.paths[i].encode(), os.O_RDONLY)
        nbytes = libc.read(fd, (ctypes.c_char * 1000).from_buffer(data), 1000)
        libc.close(fd)
        assert nbytes == 1000
        return torch.frombuffer(data, dtype=torch.uint8)


UNSERVED = pytest.mark.parametrize(
    ("kind", "why"),
    [
        (KeptOpen, ".bin: a library in C, C++ or Rust reads it, or it was open before"),
        (ByC, ": a library in C, C++ or Rust opens it, or a thread"),
    ],
)


@UNSERVED
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapped_dataset_that_creel_cannot_serve_is_told_why_and_what_does(
    kind: type[Files],
    why: str,
    workers: int,
    slow: Path,
    served: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Samples wait longer for busy cores than for files: a small part counts, and looks go on.
    monkeypatch.setattr(unwrapped_files, "_PART", 0.0)
    monkeypatch.setattr(unwrapped_files, "_AGAIN", 0.0)
    loader = creel.DataLoader(creel.wrap(kind(slow)), BATCH, num_workers=workers, creel=served)
    until(lambda: bool(list(loader) and hints(caplog)), 100, event="it is told")
    (said,) = hints(caplog)
    assert said.startswith(f"creel.wrap cannot serve {slow}/")
    assert f"{why}" in said
    assert said.endswith("creel.kept(dataset, size) below the random transforms keeps its samples")
    assert main.main(["--name", served, "stats", "--why"]) == 0
    assert "creel.kept(dataset, size)" in capsys.readouterr().out


def test_an_unwrapped_dataset_is_not_told_of_what_would_not_serve_it(
    slow: Path, served: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwrapped_files, "_SAMPLES", 60)  # not all may fall in an open of the file
    epochs(Mapped(slow), served, 2, 1)
    (said,) = hints(caplog)
    assert "creel.wrap" not in said
    assert "creel.kept(dataset, size)" in said


@pytest.mark.parametrize(
    ("kind", "workers"), [(KeptOpen, 0), (KeptOpen, 2), (Mapped, 2), (ByThreads, 0), (ByC, 2)]
)
def test_kept_samples_are_read_in_the_first_epoch_only_whoever_reads_them(
    kind: type[Files], workers: int, files: Any, served: str
) -> None:
    files.set(read_latency=0)
    dataset, kept = kind(Path(files.mountpoint)), creel.kept(kind(Path(files.mountpoint)), "64MiB")
    torchs = list(DataLoader(dataset, BATCH))
    loader = creel.DataLoader(kept, BATCH, num_workers=workers, creel=served)
    for epoch in range(3):
        files.reset()
        assert all(map(torch.equal, loader, torchs))
        totals = files.totals()
        assert bool(totals["opens"] + totals["reads"]) == (epoch == 0), totals


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
    assert not hints(caplog)
