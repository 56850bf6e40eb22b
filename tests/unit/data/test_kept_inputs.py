# ruff: noqa: PTH123, SIM115  (as users do)
"""What a kept sample depends on: however a file was opened or looked for, its change is noticed."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import mmap
import os
import sqlite3
import subprocess
import tempfile
import threading
from builtins import open as own_open
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.cache.storage.stores.store import version_at
from creel.loader.data.reading.inputs import SampleInputs
from kit import until

os_open = os.open


def closed(file: Any) -> Any:
    with file:
        return file.read()


def by_fd(fd: int) -> bytes:
    data = os.read(fd, 1000)
    os.close(fd)
    return data


def in_thread(path: str) -> bytes:
    data: list[bytes] = []
    thread = threading.Thread(target=lambda: data.append(Path(path).read_bytes()))
    thread.start()
    thread.join()
    return data[0]


def below_folder(path: str) -> bytes:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    try:
        return by_fd(os.open(os.path.basename(path), os.O_RDONLY, dir_fd=folder))  # noqa: PTH119
    finally:
        os.close(folder)


def relative(path: str) -> bytes:
    return Path(os.path.relpath(path)).read_bytes()


def mapped(path: str) -> bytes:
    with own_open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        return memory[:]


def with_fd(path: str) -> bytes:
    with own_open(os.open(path, os.O_RDONLY), "rb") as file:
        return file.read()


def row_of(path: str) -> Any:
    return in_database(path + ".db", "select max(x) from t")


def in_database(path: str, *statements: str, uri: bool = False) -> Any:
    with contextlib.closing(sqlite3.connect(path, uri=uri)) as database, database:
        return [database.execute(statement).fetchone() for statement in statements]


def with_own_file(path: str) -> bytes:
    """What the sample writes itself is no input."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x").write_bytes(Path(path).read_bytes())
        return Path(folder, "x").read_bytes()


def walked(path: str) -> list[str]:
    return sorted(name for _, _, names in os.walk(path + ".d") for name in names)


def attribute(path: str) -> bytes:
    try:
        return os.getxattr(path + ".x", "user.value")
    except OSError:  # not every file system has them
        return b""


def by_own_link(path: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(path, f"{folder}/link")  # noqa: PTH211
        return Path(folder, "link").read_bytes()


def threaded_look(path: str) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(Path(path + ".more").exists).result()


def mapped_by_torch(path: str) -> Any:
    return torch.from_file(path, size=2, dtype=torch.uint8).clone()


def threaded_program(path: str) -> bytes:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(subprocess.check_output, ["cat", path]).result()


def missing(path: str) -> bytes:
    try:
        with own_open(path + ".more", "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


Read = Callable[[str], Any]
WAYS: dict[str, Read] = {
    "open": lambda path: closed(own_open(path, "rb")),
    "text": lambda path: closed(own_open(path, encoding="latin-1")),
    "r+": lambda path: closed(own_open(path, "r+b")),
    "FileIO": lambda path: closed(io.FileIO(path)),
    "os.open": lambda path: by_fd(os_open(path, os.O_RDONLY | os.O_NONBLOCK)),
    "descriptor": with_fd,
    "folder's descriptor": below_folder,
    "memmap": lambda path: np.array(np.memmap(path, np.uint8)),
    "mmap": mapped,
    "fromfile": lambda path: np.fromfile(path, np.uint8),
    "loadtxt": lambda path: np.loadtxt(path, encoding="latin-1"),
    "thread": in_thread,
    "creel.read": creel.read,
    "creel.open": lambda path: closed(creel.open(path)),
    "relative": relative,
    "creel.read, relative": lambda path: creel.read(os.path.relpath(path)),
    "own file": with_own_file,
    "missing": missing,
    "exists": lambda path: (os.path.exists(path + ".more"), Path(path + ".more").is_file()),  # noqa: PTH110
    "exists, in a thread": threaded_look,
    "lexists": lambda path: os.path.lexists(path + ".dangling"),
    "attribute": attribute,
    "own link": by_own_link,
    "torch.from_file": mapped_by_torch,
    "access": lambda path: os.access(path + ".more", os.R_OK),
    "size": os.path.getsize,
    "codecs": lambda path: closed(codecs.open(path, "rb")),  # type: ignore[deprecated]
    "link": lambda path: Path(path + ".link").readlink().name,
    "resolved": lambda path: (Path(path + ".links").is_dir(), Path(path + ".links").resolve().name),
    "walk": walked,
    "listdir": lambda path: sorted(os.listdir(path + ".d")),  # noqa: PTH208
    "glob": lambda path: sorted(file.name for file in Path(path + ".d").glob("*")),
    "sqlite": row_of,
}


class Ways(Dataset[Any]):
    """Sample i reads by way i."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{i}") for i in range(len(WAYS))]
        self.ways = list(WAYS.values())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.ways[index](self.paths[index])


def write(data: Ways, value: int) -> None:
    """Write all files again, in place, with the same size."""
    for path, way in zip(data.paths, data.ways, strict=True):
        Path(path).write_bytes(b"%d\n" % value)
        Path(path + ".d").mkdir(exist_ok=True)
        Path(path + ".d", str(value)).touch()
        Path(path + ".x").write_bytes(b"")
        with contextlib.suppress(OSError):
            os.setxattr(path + ".x", "user.value", b"%d" % value)
        if value == 2:
            Path(path + ".dangling").symlink_to("nowhere")
        for link, target in ((".link", f"{path}.{value}"), (".links", f"{path}.d{value % 2}")):
            Path(f"{path}.d{value % 2}").mkdir(exist_ok=True)
            Path(path + link).unlink(missing_ok=True)
            Path(path + link).symlink_to(target)
        if value > 1:
            Path(path + ".more").write_bytes(b"%d" % value)
        create, insert = "create table if not exists t (x int)", f"insert into t values ({value})"
        if way is row_of:
            in_database(path + ".db", create, insert)


def settle(*paths: str | Path) -> None:
    """Wait until the versions of these files would show another change."""
    until(lambda: all(version_at(str(path)) > 0 for path in paths))


@pytest.fixture(params=["/tmp", "/dev/shm"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    if not os.access(request.param, os.W_OK):
        pytest.skip(f"no {request.param}")
    with tempfile.TemporaryDirectory(dir=request.param) as name:
        yield Path(name)


def decoded(data: Ways) -> Any:
    """Return a dataset of which `decode` reads what the samples of `data` read."""
    paths = [Path(path + ".number") for path in data.paths]
    for i, path in enumerate(paths):
        path.write_text(str(i))
    settle(*paths)
    return creel.FileDataset(paths, decode=lambda number: data[int(number)], keep_decoded="1MiB")


@pytest.mark.parametrize("keeping", [creel.kept, decoded], ids=["kept", "decoded"])
def test_a_changed_file_is_noticed_however_it_was_opened(
    folder: Path, keeping: Callable[[Ways], Any]
) -> None:
    data = Ways(folder)
    write(data, 1)
    kept = keeping(data)

    def same() -> list[str]:
        pairs = zip(WAYS, data.ways, data.paths, strict=True)
        return [
            name
            for i, (name, way, path) in enumerate(pairs)
            if not np.array_equal(kept[i], way(path))
        ]

    for value in (1, 2, 3):
        write(data, value)
        settle(*(path + end for path in data.paths for end in ("", ".d")))
        settle(*folder.glob("*.db"))
        for _ in range(2):
            assert same() == []
        store = kept.keeping.store
        assert store is not None
        assert [name for i, name in enumerate(WAYS) if not store.has(i)] == []


def test_a_relative_path_is_one_of_the_folder_that_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Relative(Ways):
        def __getitem__(self, index: int) -> Any:
            return Path("x").read_bytes(), creel.read("x")

    kept = creel.kept(Relative(tmp_path), "1MiB")
    for name in "abba":
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        if not Path("x").exists():
            Path("x").write_bytes(name.encode())
            settle("x")
        for _ in range(2):
            assert kept[0] == (name.encode(), name.encode())


def test_what_decode_opens_itself_is_checked(tmp_path: Path) -> None:
    for name in ("x", "table"):
        (tmp_path / name).write_bytes(b"1")
    settle(tmp_path / "x", tmp_path / "table")

    def decode(data: bytes) -> Any:
        calls.append(data)
        return data, (tmp_path / "table").read_bytes()

    calls: list[bytes] = []
    dataset = creel.FileDataset([str(tmp_path / "x")], decode=decode, keep_decoded="1MiB")
    for table in (b"1", b"2"):
        (tmp_path / "table").write_bytes(table)
        settle(tmp_path / "table")
        for _ in range(3):
            assert dataset[0] == (b"1", table)
    assert len(calls) == 3  # the first sample is made twice


class Holding(Dataset[Any]):
    """Each sample is a line of a table, and a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.table, self.folder = folder / "table", folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.line(index), (self.folder / f"{index}").read_bytes()

    def line(self, index: int) -> Any:
        raise NotImplementedError


class WithHandle(Holding):
    file: Any = None

    def line(self, index: int) -> Any:
        if self.file is None:
            self.file = own_open(self.table, "rb", buffering=0)
        self.file.seek(index)
        return self.file.read(1)[0]


class WithTable(Holding):
    file: Any = None

    def line(self, index: int) -> Any:
        if self.file is None:
            self.file = io.BytesIO(self.table.read_bytes())
        return self.file.getvalue()[index]


class WithHandleFromTheStart(WithHandle):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = own_open(self.table, "rb", buffering=0)


class WithMappingFromTheStart(WithHandle):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.memory = np.memmap(self.table, np.uint8, "r")

    def line(self, index: int) -> Any:
        return int(self.memory[index])


@pytest.mark.parametrize(
    "kind", [WithHandle, WithTable, WithHandleFromTheStart, WithMappingFromTheStart]
)
def test_a_sample_depends_on_what_the_dataset_holds_of_an_earlier_one(
    tmp_path: Path, kind: type[Any]
) -> None:
    """A handle, or what was parsed; the file is written in place."""
    paths = [tmp_path / name for name in ("table", "0", "1", "2", "3")]
    for path in paths:
        path.write_bytes(b"abcd")
    settle(*paths)
    data = kind(tmp_path)
    kept = creel.kept(data, "1MiB")
    for table in (b"abcd", b"wxyz"):
        with own_open(paths[0], "r+b") as file:
            file.write(table)
        settle(paths[0])
        if kind is WithTable:
            data.file = None  # as in the next worker
        for _ in range(2):
            assert [kept[i] for i in range(4)] == [(byte, b"abcd") for byte in table]
        if table == b"abcd":
            assert kept.keeping.store is not None
            assert kept.keeping.store.kept == 4
    if data.file is not None:
        data.file.close()


UNKNOWN: dict[str, Read] = {
    "program of a thread": threaded_program,
    "program": lambda path: subprocess.check_output(["cat", path]),
    "pipe": lambda path: closed(own_open(path + ".pipe", "rb")),
    "database by address": lambda path: in_database(f"file:{path}", uri=True),
}


@pytest.mark.parametrize("way", UNKNOWN)
def test_a_sample_with_an_open_that_is_not_understood_is_not_kept_and_it_is_said_once(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Unknown(Ways):
        def __getitem__(self, index: int) -> Any:
            return UNKNOWN[way](self.paths[0])

    data = Unknown(tmp_path)
    Path(data.paths[0]).write_bytes(b"")
    os.mkfifo(data.paths[0] + ".pipe")
    kept = creel.kept(data, "1MiB")
    for _ in range(2):
        for i in range(3):
            if way == "pipe":
                threading.Thread(
                    target=Path(data.paths[0] + ".pipe").write_bytes, args=[b"x"]
                ).start()
            kept[i]
    assert kept.keeping.store is not None
    assert not kept.keeping.store.kept
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "cannot be kept" in said
    assert "loader.recheck" in said


def test_a_file_that_another_thread_writes_meanwhile_is_none_of_the_samples_own(
    tmp_path: Path,
) -> None:
    class Written(Ways):
        def __getitem__(self, index: int) -> bytes:
            while texts:
                other.submit(path.write_bytes, texts.pop()).result()
                settle(path)
            return path.read_bytes()

    path, texts = tmp_path / "x", [b"1"]
    path.write_bytes(b"0")
    with ThreadPoolExecutor(1) as other:
        kept = creel.kept(Written(tmp_path), "1MiB")
        assert [kept[0], kept[0]] == [b"1", b"1"]
        path.write_bytes(b"2")
        settle(path)
        assert kept[0] == b"2"


def test_an_os_open_that_was_imported_by_name_may_name_a_file_of_any_folder(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    folder = os_open(tmp_path, os.O_RDONLY)
    with SampleInputs() as inputs:
        os.close(os_open("x", os.O_RDONLY, dir_fd=folder))
    os.close(folder)
    assert inputs.doubt


def test_an_import_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_a_sample.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with SampleInputs() as inputs:
        import imported_by_a_sample  # type: ignore[import-not-found]  # noqa: F401
    assert inputs.known(0, 0, {}) == []
