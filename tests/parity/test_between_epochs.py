"""Changes that a user makes between two epochs are seen in the next one, as under torch."""

from __future__ import annotations

import importlib
import importlib.abc
import itertools
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

import creel

pytestmark = pytest.mark.timeout(180)

SIZES = (128, 192, 224)
SIZE = 128


class Asking(Dataset[Any]):
    """A sample is its number and the present result of `ask`."""

    size = 128

    def __init__(self, ask: Callable[[], object]) -> None:
        self.ask = ask

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return i, self.ask(), torch.rand(1)


#: A user's installed package: its code reads a global and a class attribute of its own.
PACKAGE = """
from torch.utils.data import Dataset

IMAGE_SIZE = 128

class Settings:
    size = 128

def ask():
    return IMAGE_SIZE + Settings.size
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in a folder where pip installs modules."""
    site = tmp_path / "site-packages"
    (site / "creel_test_sizes").mkdir(parents=True)
    (site / "creel_test_sizes" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield importlib.import_module("creel_test_sizes")
    sys.modules.pop("creel_test_sizes")


def in_file(path: Path) -> int:
    return int(path.read_text())


def in_row(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT size FROM sizes").fetchone()[0])


def in_environment() -> int:
    return int(os.environ["CREEL_TEST_SIZE"])


def in_global() -> int:
    return SIZE


def in_class() -> int:
    return Asking.size


def in_folder() -> int:
    return int(Path.cwd().name)


def in_library() -> int:
    return importlib.abc.creel_test_size  # type: ignore[attr-defined, no-any-return]  # set below


def write_row(path: Path, size: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS sizes (size INTEGER)")
        db.execute("DELETE FROM sizes")
        db.execute("INSERT INTO sizes VALUES (?)", (size,))


def enter_folder(path: Path, size: int) -> None:
    (path / str(size)).mkdir(exist_ok=True)
    os.chdir(path / str(size))


#: Functions that read a setting below a folder, and change it; the former can be pickled.
KINDS: dict[str, Callable[[Path], tuple[Callable[[], int], Callable[[int], object]]]] = {
    "file": lambda p: (partial(in_file, p / "f"), lambda n: (p / "f").write_text(str(n))),
    "row": lambda p: (partial(in_row, p / "db"), partial(write_row, p / "db")),
    "environment": lambda _: (
        in_environment,
        lambda n: os.environ.__setitem__("CREEL_TEST_SIZE", str(n)),
    ),
    "global": lambda _: (in_global, lambda n: globals().__setitem__("SIZE", n)),
    "class": lambda _: (in_class, lambda n: setattr(Asking, "size", n)),
    "folder": lambda p: (in_folder, partial(enter_folder, p)),
    "library": lambda _: (in_library, lambda n: setattr(importlib.abc, "creel_test_size", n)),
}
#: Number of workers, and whether they are persistent.
WAYS = [(0, False), (2, False), (2, True)]


def epochs(cls: Any, ask: Any, turn: Any, workers: int, persistent: bool, **more: Any) -> list[Any]:
    """Run three epochs, changing the setting before each; one is left early."""
    torch.manual_seed(1)
    turn(SIZES[0])
    loader = cls(Asking(ask), 4, True, num_workers=workers, persistent_workers=persistent, **more)
    out: list[Any] = []
    for size in (*SIZES, SIZES[0]):
        turn(size)
        for i, batch in enumerate(loader):
            out.append([part.tolist() for part in batch])
            if size == SIZES[1] and i == 1 and workers == 0:  # workers would race
                break
    return out


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # restored at the end
    monkeypatch.setenv("CREEL_TEST_SIZE", "")


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    "kind, workers, persistent",
    [
        *((kind, 2, False) for kind in KINDS),
        *((kind, *way) for kind, way in zip(KINDS, itertools.cycle([(0, False), (2, True)]))),
    ],
)
def test_a_setting_turned_between_epochs_is_seen_as_under_torch(
    tmp_path: Path, kind: str, workers: int, persistent: bool
) -> None:
    ask, turn = KINDS[kind](tmp_path)
    expected = epochs(torch.utils.data.DataLoader, ask, turn, workers, persistent)
    assert epochs(creel.DataLoader, ask, turn, workers, persistent) == expected
    if not persistent or kind in {"file", "row"}:
        assert {size for batch in expected for size in batch[1]} == set(SIZES)


@pytest.mark.parametrize("workers, persistent", WAYS)
def test_an_installed_package_is_no_exception(package: Any, workers: int, persistent: bool) -> None:
    def turn(size: int) -> None:
        package.IMAGE_SIZE = package.Settings.size = size

    expected = epochs(torch.utils.data.DataLoader, package.ask, turn, workers, persistent)
    assert epochs(creel.DataLoader, package.ask, turn, workers, persistent) == expected


COLLATED = 0


def nothing() -> int:
    return 0


def collate(samples: list[Any]) -> Any:
    return [*default_collate(samples), torch.tensor(COLLATED)]


@pytest.mark.parametrize("workers, persistent", WAYS)
def test_nor_is_a_collate_fn(workers: int, persistent: bool) -> None:
    def turn(size: int) -> None:
        globals()["COLLATED"] = size

    def seen(cls: Any) -> list[Any]:
        return epochs(cls, nothing, turn, workers, persistent, collate_fn=collate)

    assert seen(creel.DataLoader) == seen(torch.utils.data.DataLoader)


class Logging(Asking):
    """Writes a line for each sample that is made."""

    def __init__(self, path: Path) -> None:
        super().__init__(nothing)
        self.path = path

    def __getitem__(self, i: int) -> Any:
        with self.path.open("a") as log:
            log.write("x")
        return i


@pytest.mark.parametrize("workers, persistent", WAYS)
def test_each_sample_is_made_once_an_epoch_and_in_its_epoch(
    tmp_path: Path, workers: int, persistent: bool
) -> None:
    data = Logging(tmp_path / "log")
    loader = creel.DataLoader(data, 2, True, num_workers=workers, persistent_workers=persistent)
    for epoch in range(1, 4):
        for _ in loader:
            pass
        assert data.path.stat().st_size == epoch * len(data)


def noisy(ask: Callable[[], int], row: torch.Tensor) -> Any:
    return row.long() + ask(), torch.rand(1)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("workers, persistent", WAYS)
def test_nor_is_a_transform_of_creels_own_dataset(
    tmp_path: Path, workers: int, persistent: bool
) -> None:
    """The daemon knows the order and has the bytes, but no transform runs ahead of time."""
    (tmp_path / "rows").write_bytes(bytes(range(24)) * 8)
    ask, turn = KINDS["file"](tmp_path)
    rows = creel.RecordDataset(tmp_path / "rows", torch.uint8, 8, transform=partial(noisy, ask))

    def seen(cls: Any) -> list[Any]:
        torch.manual_seed(2)
        turn(SIZES[0])
        loader = cls(rows, 2, shuffle=True, num_workers=workers, persistent_workers=persistent)
        out = []
        for size in SIZES:
            turn(size)
            out += [[part.tolist() for part in batch] for batch in loader]
        return out

    assert seen(creel.DataLoader) == seen(torch.utils.data.DataLoader)
