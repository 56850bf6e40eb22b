"""Files that change between epochs, datasets and loaders: the present bytes are served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.cache.storage.manifest import Manifest
from daemons import Running, opened, plan, read_steps

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

N, NBYTES, BATCH = 24, 512, 4


class Declared(Dataset[Any]):
    """A dataset that declares what its samples read."""

    def __init__(self, paths: list[str]) -> None:
        self.creel_uris = paths

    def __len__(self) -> int:
        return len(self.creel_uris)

    def objects(self, index: int) -> list[int]:
        return [index]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(creel.read(self.creel_uris[index])), dtype=torch.uint8)


def names(path: Path) -> list[str]:
    return sorted(str(p) for p in path.iterdir())


KINDS: dict[str, Callable[[Path], Dataset[Any]]] = {
    "files": lambda path: creel.FileDataset(names(path)),
    "sized": lambda path: creel.FileDataset(names(path), nbytes=True),
    "decoded": lambda path: creel.FileDataset(names(path), decode=as_tensor),
    "records": lambda path: creel.RecordDataset(names(path), "uint8", NBYTES),
    "declared": lambda path: Declared(names(path)),
    "wrapped": lambda path: creel.wrap(Declared(names(path))),
}


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def overwritten(path: Path, data: bytes) -> None:
    """As `in_place`, but readers such as workers never see an empty file."""
    with path.open("r+b", buffering=0) as f:
        f.write(data)


def replaced(path: Path, data: bytes) -> None:
    other = path.parent.parent / "other"
    other.write_bytes(data)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def as_if_untouched(path: Path, data: bytes) -> None:
    """Write in place, with the same size and the old times."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for i in range(N):
        (path / f"{i:02}").write_bytes(content(i, 0))
    return path


def content(i: int, version: int) -> bytes:
    return np.random.default_rng([i, version]).bytes(NBYTES)


def rows(batches: list[torch.Tensor]) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch]


def expected(path: Path) -> list[bytes]:
    return [p.read_bytes() for p in sorted(path.iterdir())]


def reads(daemon: Running) -> int:
    with daemon.client("cli") as client:
        return sum(int(source["reads"]) for source in client.ask("stats")["sources"])


#: Every kind in this process; a few with workers, as these add the same to all.
CASES = [(kind, 0) for kind in KINDS] + [("decoded", 2), ("sized", 2), ("wrapped", 2)]


@pytest.mark.parametrize(
    ("kind", "workers", "replace_file"),
    [(*case, in_place) for case in CASES]
    + [
        (kind, 0, replace_file)
        for kind in ("sized", "wrapped")
        for replace_file in (replaced, as_if_untouched)
    ],
)
def test_a_loader_that_goes_on_sees_what_changed_between_its_epochs(
    daemon: Running,
    folder: Path,
    kind: str,
    workers: int,
    replace_file: Callable[[Path, bytes], None],
) -> None:
    loader = creel.DataLoader(KINDS[kind](folder), BATCH, num_workers=workers)
    for version in range(4):
        assert rows(list(loader)) == expected(folder), f"epoch {version}"
        for i in range(version, N, 5):
            replace_file(folder / f"{i:02}", content(i, version + 1))
    assert reads(daemon) >= N, "nothing was cached: the test says nothing"


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("kind", "workers", "loader"),
    [(*case, creel.DataLoader) for case in CASES]
    + [(kind, 0, torch.utils.data.DataLoader) for kind in ("sized", "decoded", "wrapped")],
)
def test_a_new_dataset_and_loader_see_what_changed(
    folder: Path, kind: str, workers: int, loader: type[Any]
) -> None:
    for version in range(3):
        dataset = creel.wrap(KINDS[kind](folder))
        assert rows(list(loader(dataset, BATCH, num_workers=workers))) == expected(folder)
        for i in range(version, N, 5):
            in_place(folder / f"{i:02}", content(i, version + 1))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_over_a_wrapped_dataset_sees_what_changed_in_the_midst_of_an_epoch(
    folder: Path, workers: int
) -> None:
    """No call says where its epochs begin, so versions are checked for each batch."""
    dataset = creel.wrap(Declared(names(folder)))
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    list(loader)
    it = iter(loader)
    first = rows([next(it)])
    for i in range(N):
        overwritten(folder / f"{i:02}", content(i, 1))
    ahead = BATCH * (1 + 2 * workers)  # most samples that torch requests ahead
    assert rows(list(it))[ahead - BATCH :] == expected(folder)[ahead:]
    assert first == [content(i, 0) for i in range(BATCH)]
    assert rows(list(loader)) == expected(folder)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_deleted_file_is_not_served(folder: Path, workers: int) -> None:
    loader = creel.DataLoader(creel.FileDataset(names(folder)), BATCH, num_workers=workers)
    list(loader)
    (folder / "13").unlink()
    with pytest.raises(FileNotFoundError, match="13"):
        list(loader)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("recheck", "seen"), [("epoch", True), ("open", False), ("never", False)])
def test_the_setting_says_when_a_change_is_noticed(folder: Path, recheck: str, seen: bool) -> None:
    def loader() -> creel.DataLoader[Any]:
        dataset = creel.FileDataset(names(folder))
        return creel.DataLoader(dataset, BATCH, creel={"loader.recheck": recheck})

    first = loader()
    old = rows(list(first))
    in_place(folder / "07", content(7, 1))
    assert (rows(list(first)) == expected(folder)) is seen
    assert (rows(list(first)) == old) is not seen
    assert (rows(list(loader())) == expected(folder)) is (recheck != "never")


def test_unchanged_files_are_not_read_again(daemon: Running, folder: Path) -> None:
    for p in folder.iterdir():  # beyond the time in which a second write might not show
        os.utime(p, ns=(0, 0))
    loader = creel.DataLoader(creel.FileDataset(names(folder)), BATCH)
    list(loader)
    list(loader)  # even if files were written just before their first read
    before = reads(daemon)
    for i in (3, 8):
        in_place(folder / f"{i:02}", content(i, 1))
    list(loader)
    list(loader)
    assert before + 2 <= reads(daemon) <= before + 4


def test_ready_steps_are_withdrawn_where_another_job_finds_a_change(
    daemon: Running, folder: Path
) -> None:
    manifest = Manifest.of_files(names(folder), lengths=[NBYTES] * N)
    ids = np.arange(N)
    with daemon.client() as client:
        dataset = client.register(manifest)
        session = opened(client, dataset, "a", recheck="open")
        plan(session, ids, BATCH)
        assert session.wait(2, 20)
        in_place(folder / "07", content(7, 1))
        other = opened(client, dataset, "b", recheck="open")
        plan(other, ids, BATCH)
        assert read_steps(other, manifest, ids, BATCH) == N
        assert read_steps(session, manifest, ids, BATCH) == N


ROW = 100_000


class Rows(Dataset[Any]):
    """Sample i is a row of a file, which is opened for each or stays open."""

    def __init__(self, path: Path, *, kept: bool) -> None:
        self.path, self.kept = path, kept
        self.file: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        if not self.kept:
            with open(self.path, "rb") as file:  # noqa: PTH123
                return self.row(file, i)
        self.file = self.file or open(self.path, "rb")  # noqa: PTH123, SIM115
        return self.row(self.file, i)

    def row(self, file: Any, i: int) -> torch.Tensor:
        file.seek(i * 7 % N * ROW)  # no neighbours, which Python's buffer may have
        return as_tensor(file.read(ROW))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("replace_file", [overwritten, replaced, as_if_untouched])
@pytest.mark.parametrize("kept", [False, True])
def test_rows_of_a_file_that_changes_in_an_epoch_are_torchs_and_no_mixtures(
    tmp_path: Path,
    replace_file: Callable[[Path, bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    kept: bool,
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/rows"
    path.write_bytes(bytes(N * ROW))
    ours = creel.DataLoader(creel.wrap(Rows(path, kept=kept)), BATCH)
    theirs = torch.utils.data.DataLoader(Rows(path, kept=kept), BATCH)
    for epoch in range(1, 8):
        for i, (batch, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(batch, other)
            assert (batch == batch[:, :1]).all()
            if i == 2 and epoch in {3, 5}:
                replace_file(path, bytes([epoch]) * (N * ROW))
