"""Random programs that keep decoded samples of changing files: no epoch reads what a file was."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, get_worker_info

import creel
from creel.cache.storage.stores.store import version_at
from kit import seeds, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("daemon"),
]

N = 10
#: Whether the next worker that decodes is to be killed.
_killing = multiprocessing.RawValue("i")


def content(number: int, version: int) -> bytes:
    """Two versions of three have the same size."""
    more = np.random.default_rng([number, version]).bytes(200 + 40 * (version % 3 == 0))
    return bytes([number, *version.to_bytes(4, "little")]) + more


def decode(data: bytes) -> tuple[int, int]:
    """Return number and version of a file."""
    if _killing.value and get_worker_info() is not None:
        _killing.value = 0
        os.kill(os.getpid(), signal.SIGKILL)
    number, version = data[0], int.from_bytes(data[1:5], "little")
    assert data == content(number, version)
    return number, version


class Plain(Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[int, int]:
        return decode(self.paths[i].read_bytes())


KINDS: list[Callable[[list[Path], Any], Any]] = [
    lambda paths, keep: creel.FileDataset(paths, decode=decode, keep_decoded=keep),
    lambda paths, keep: creel.kept(Plain(paths), keep),
    lambda paths, keep: creel.wrap(creel.kept(Plain(paths), keep)),
    lambda paths, keep: creel.kept(creel.FileDataset(paths, decode=decode), keep),
]


class Files:
    """Files, and how often each was rewritten."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.paths = [folder / f"{i}.bin" for i in range(N)]
        self.versions = [0] * N
        self._rng = rng
        for i in range(N):
            self.paths[i].write_bytes(content(i, 0))

    def change(self, *, in_place: bool) -> None:
        """Rewrite, replace or touch one; it may have its old times."""
        number = int(self._rng.integers(N))
        path = self.paths[number]
        before, kind = path.stat(), self._rng.integers(3)
        if kind == 0:
            path.touch()
        else:
            self.versions[number] += 1
            data = content(number, self.versions[number])
            if kind == 1 and in_place:
                path.write_bytes(data)
            else:
                path.with_suffix(".new").write_bytes(data)
                path.with_suffix(".new").rename(path)
        if self._rng.random() < 0.5:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("seed", seeds(4))
def test_no_epoch_reads_what_a_file_was_before_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both ways of reading, with and without a name, over killed workers and new loaders."""
    rng = np.random.default_rng(seed)
    monkeypatch.setenv("CREEL_LOADER__DIRECT", str(rng.choice(["never", "auto"])))
    monkeypatch.setenv("CREEL_DISK__PATH", str(tmp_path))
    monkeypatch.setenv("CREEL_DISK__KEEP_FREE", "0")
    limit = str(rng.choice(["5KiB", "1MiB"]))
    keep = creel.Decoded("1MiB", name="n") if rng.random() < 0.3 else limit
    files = Files(tmp_path, rng)
    data = KINDS[seed % len(KINDS)](files.paths, keep)
    loader: Any = None
    for _ in range(4):
        for _ in range(int(rng.integers(4))):
            files.change(in_place=True)
        if rng.random() < 0.7:
            until(lambda: all(version_at(str(path)) > 0 for path in files.paths))
        if loader is None or rng.random() < 0.3:
            workers = int(rng.choice([0, 0, 1, 2]))
            persistent = workers > 0 and seed % 3 == 0
            more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
            loader = creel.DataLoader(data, 2, shuffle=True, collate_fn=list, **more)
        begun, read, killed = list(files.versions), [], workers > 0 and rng.random() < 0.2
        _killing.value = killed
        try:
            for batch in loader:
                read += batch
                if rng.random() < 0.2:
                    files.change(in_place=False)
            assert sorted(number for number, _ in read) == list(range(N))
        except RuntimeError:
            assert killed
            loader = None
        finally:
            _killing.value = 0
        assert [
            sample
            for sample in read
            if not begun[sample[0]] <= sample[1] <= files.versions[sample[0]]
        ] == []
