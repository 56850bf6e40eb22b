"""Random jobs that read, write and die over one name: each sample is what its file is now."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import creel
from creel import FileDataset, kept  # here: each job is a fork
from creel.cache.storage.stores.store import version_at
from kit import seeds, until

FILES = 12
HIDDEN = 0  # what creel does not see
_fork = multiprocessing.get_context("fork")


def decode(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).astype(np.int64) + HIDDEN, len(data)


class Plain(Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, i: int) -> Any:
        with self.paths[i].open("rb") as file:
            return decode(file.read())


def change(path: Path, rng: np.random.Generator) -> None:
    """Write, replace or touch a file; it may keep its size and its time."""
    before = path.stat() if path.exists() else None
    size = (
        100
        if before is None
        else int(before.st_size if rng.random() < 0.5 else rng.integers(1, 3000))
    )
    kind = rng.integers(4) if before is not None else 0
    if kind == 0:
        path.write_bytes(rng.bytes(size))
    elif kind == 1:
        path.with_suffix(".new").write_bytes(rng.bytes(size))
        path.with_suffix(".new").rename(path)
    elif kind == 2:
        with path.open("r+b") as file:
            file.write(rng.bytes(1))
    else:
        path.touch()
    if before is not None and rng.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def job(paths: list[Path], seed: list[int], *, writes: bool, said: Connection) -> None:
    """Read samples at random; end with 1 if one is not what its file has."""
    rng = np.random.default_rng(seed)
    keep = creel.Decoded(str(rng.choice(["4KiB", "20KiB", "1MiB"])), name="n")
    data: Any = FileDataset(paths, decode=decode, keep_decoded=keep)
    if seed[0] % 2:
        data = kept(Plain(paths), keep)
    for _ in range(60):
        i = int(rng.integers(FILES))
        if writes and rng.random() < 0.1:
            change(paths[i], rng)
        array, nbytes = data[i]
        if (array.tobytes(), nbytes) != (decode(paths[i].read_bytes())[0].tobytes(), len(array)):
            os._exit(1)
        said.send_bytes(b".")
    os._exit(0)


@pytest.mark.parametrize("seed", seeds(6))
def test_no_job_reads_what_a_file_was(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, some at the same time, some killed in the middle."""
    monkeypatch.setenv("CREEL_DISK__PATH", str(tmp_path))
    monkeypatch.setenv("CREEL_DISK__KEEP_FREE", "0")
    rng = np.random.default_rng(seed)
    paths = [tmp_path / f"{i:02}.bin" for i in range(FILES)]
    for phase in range(5):
        for path in paths:
            if not phase or rng.random() < 0.2:
                change(path, rng)
        if rng.random() < 0.8:
            until(lambda: all(version_at(str(path)) > 0 for path in paths))
        together = int(rng.integers(1, 4))
        jobs = []
        for number in range(together):
            ours, theirs = _fork.Pipe(duplex=False)
            options = {"writes": together == 1, "said": theirs}
            process = _fork.Process(target=job, args=(paths, [seed, phase, number]), kwargs=options)
            process.start()
            theirs.close()
            jobs.append((process, ours, rng.random() < 0.3))
        for process, ours, killed in jobs:
            if killed:
                for _ in range(int(rng.integers(1, 50))):
                    ours.recv_bytes()
                process.kill()
            process.join()
            ours.close()
            assert process.exitcode in ({0, -signal.SIGKILL} if killed else {0})


def test_a_second_dataset_of_a_process_compares_what_the_first_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A promise may be broken within a process, too."""
    monkeypatch.setenv("CREEL_DISK__PATH", str(tmp_path))
    monkeypatch.setenv("CREEL_DISK__KEEP_FREE", "0")
    paths = [tmp_path / f"{i:02}.bin" for i in range(FILES)]
    for path in paths:
        path.write_bytes(b"x" * 100)
    until(lambda: all(version_at(str(path)) > 0 for path in paths))
    for hidden in (0, 3):
        monkeypatch.setattr("test_named_datasets.HIDDEN", hidden)
        data = FileDataset(paths, decode=decode, keep_decoded=creel.Decoded(name="n"))
        with caplog.at_level(logging.WARNING):
            assert [data[i][0][0] for i in range(FILES)] == [ord("x") + hidden] * FILES
    assert caplog.text.count("'n' is dropped") == 1
