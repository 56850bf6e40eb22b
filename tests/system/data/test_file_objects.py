"""File objects below creel.wrap: what programs do with them gives what Python's own give.

Each use runs without creel, while reads are recorded, and from the cache.
"""

from __future__ import annotations

import array
import codecs
import copy
import csv
import gzip
import io
import json
import mmap
import os
import pickle
import shutil
import struct
import subprocess
import tarfile
import threading
import warnings
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

NBYTES = 300_000
USES: dict[str, Callable[[Path], Any]] = {}


def use(act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Add a use of the files that `write` makes in a folder."""
    USES[act.__name__.strip("_")] = act
    return act


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "raw").write_bytes(rng.bytes(NBYTES))
    (folder / "small").write_bytes(rng.bytes(5000))
    (folder / "txt").write_bytes(("äöü line\r\n" * 9000 + "x\ry\n").encode())
    (folder / "csv").write_bytes(b'a,"b\r\nc",d\r\n1,2,3\n' * 5000)
    (folder / "json").write_text(json.dumps(list(range(30_000))))
    (folder / "xml").write_text("<r>" + "<a k='1'>t</a>" * 6000 + "</r>")
    (folder / "pickle").write_bytes(pickle.dumps({"a": list(range(30_000))}))
    (folder / "gz").write_bytes(gzip.compress(rng.bytes(NBYTES)))
    np.save(folder / "a.npy", np.arange(40_000.0))
    np.savez(folder / "a.npz", x=np.arange(40_000.0), y=np.ones(3))
    torch.save(torch.arange(30_000), folder / "pt")
    torch.save(torch.arange(30_000), folder / "old.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "zip", "w") as z:
        z.writestr("one", rng.bytes(NBYTES))
    with tarfile.open(folder / "tar", "w") as t:
        t.add(folder / "raw", "one")


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as e:  # noqa: BLE001  whatever Python's own raises
        return type(e), str(e)


def several(*acts: Callable[[], Any]) -> list[Any]:
    return [outcome(act) for act in acts]


def raw(folder: Path, buffering: int = -1) -> Any:
    return open(folder / "raw", "rb", buffering)  # noqa: PTH123  (as users do)


def named(folder: Path, name: str, *args: Any, **more: Any) -> Any:
    return open(folder / name, *args, **more)  # noqa: PTH123


# --- uses ---------------------------------------------------------------------------------------


@use
def classes(d: Path) -> Any:
    with raw(d) as f, raw(d, 0) as unbuffered, named(d, "txt", encoding="utf8") as text:
        return (
            *(isinstance(f, io.BufferedReader), isinstance(f.raw, io.FileIO), f.name, f.mode),
            *(isinstance(unbuffered, io.FileIO), unbuffered.name, unbuffered.mode, f.closed),
            *(type(text), isinstance(text.buffer, io.BufferedReader), text.name, text.mode),
            *(repr(f), repr(f.raw), repr(unbuffered), repr(text), f.raw.name, f.raw.closefd),
        )


@use
def constructed(d: Path) -> Any:
    with raw(d) as f, raw(d, 0) as unbuffered:
        f.read(9)
        with type(f)(io.FileIO(d / "small")) as file, type(unbuffered)(d / "small", "rb") as other:
            values = file.read(), other.read(), other.mode, other.name, file.closed, f.read(3)
        return values, file.closed, other.closed, outcome(lambda: type(f)(str(d / "small"), "rb"))


@use
def descriptor(d: Path) -> Any:
    with raw(d) as f:
        first, size = f.read(5), os.fstat(f.fileno()).st_size
        again = os.pread(f.fileno(), 9, 0)
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return first, size, again, mapped[:], f.tell(), f.read(5)


@use
def numpys(d: Path) -> Any:
    with raw(d) as f, named(d, "a.npy", "rb") as npy, raw(d, 0) as unbuffered:
        f.read(10)
        arrays = [np.fromfile(f, np.uint8, 100), f.read(7), np.fromfile(f, np.uint8, 50, offset=3)]
        arrays += [f.tell(), np.fromfile(f, np.uint8), f.tell(), np.load(npy), npy.tell()]
        arrays += [np.fromfile(unbuffered, np.int32), np.fromfile(d / "small", np.int16)]
        arrays += [np.load(d / "a.npy"), np.array(np.load(d / "a.npy", mmap_mode="r"))]
        arrays += [np.memmap(d / "raw", np.uint8, "r", 5, (100,)), np.array(np.memmap(f, mode="r"))]
    with np.load(d / "a.npz") as z:
        return [x.tobytes() if isinstance(x, np.ndarray) else x for x in (*arrays, z["x"], z["y"])]


@use
def reads(d: Path) -> Any:
    with raw(d) as f:
        buffers: list[Any] = [bytearray(1000), np.zeros(300, np.uint16), array.array("h", [0] * 40)]
        values = [f.readinto(buffer) for buffer in buffers] + [bytes(buffer) for buffer in buffers]
        values += [f.peek(4)[:4], f.read(0), f.read(3), f.read1(5), f.readinto1(bytearray(3))]
        values += [f.read(None)[:4], f.read(), outcome(lambda: f.read(-2)), f.seek(9)]
        return [*values, f.readline(5), f.readline(), f.readlines(90)[:2], f.tell(), f.read(-1)]


@use
def lines(d: Path) -> Any:
    with named(d, "txt", "rb") as f:
        read = list(f)
        f.seek(0)
        return read, next(f), f.readline(), outcome(lambda: (f.seek(0, 2), next(f)))


@use
def positions(d: Path) -> Any:
    def moved(f: Any) -> Any:
        return several(
            lambda: f.seek(10**6),
            f.read,
            f.tell,
            lambda: f.seek(-5, 2),
            f.read,
            f.tell,
            lambda: f.seek(3),
            lambda: f.seek(4, 1),
            lambda: f.read(2),
            lambda: f.seek(-1),
            lambda: f.seek(-(10**7), 1),
            lambda: f.seek(-(10**7), 2),
            lambda: f.seek(0, 9),
            f.tell,
            lambda: f.seek(1.5),
            lambda: f.seek(np.int64(7)),
            f.tell,
            lambda: f.seek(0, os.SEEK_DATA),
            f.tell,
        )

    with raw(d) as f, raw(d, 0) as unbuffered:
        return moved(f), moved(unbuffered)


@use
def properties(d: Path) -> Any:
    def of(f: Any) -> Any:
        f.mine = 3
        answers = several(f.readable, f.writable, f.seekable, f.isatty, f.flush)
        answers += several(
            lambda: f.write(b""), lambda: f.truncate(1), lambda: f.writelines([b"a"])
        )
        return answers, hasattr(f, "getvalue"), hasattr(f, "peek"), bool(f), f.mine

    with raw(d) as f, raw(d, 0) as unbuffered, named(d, "txt", encoding="utf8") as text:
        return of(f), of(unbuffered), of(text)


@use
def after_the_end(d: Path) -> Any:
    def ended(f: Any) -> Any:
        with f as same:
            answers: list[Any] = [same is f]
        answers += several(f.__enter__, f.read, f.fileno, f.tell, lambda: f.seek(0), f.readline)
        answers += several(lambda: next(f), f.readable, f.seekable, f.isatty, f.close)
        return answers, f.closed, f.name, f.mode, repr(f)

    return [ended(f) for f in (raw(d), raw(d, 0), named(d, "txt", encoding="utf8"))]


@use
def copied(d: Path) -> Any:
    with raw(d) as f, named(d, "txt", encoding="utf8") as text:
        return several(
            lambda: copy.copy(f),
            lambda: copy.deepcopy(f),
            lambda: pickle.dumps(f),
            lambda: pickle.dumps(text),
        )


@use
def taken_apart(d: Path) -> Any:
    f = raw(d)
    f.read(10)
    with f.detach() as below:
        parts = isinstance(below, io.FileIO), *several(f.read, lambda: f.name)
        below.seek(2)
        parts += below.read(5), below.readall(), below.read(), below.tell()
    with raw(d) as f, io.BufferedReader(raw(d), 50) as over:
        return parts, f.raw.read(10), f.raw.tell(), over.read()


@use
def text(d: Path) -> Any:
    path = d / "txt"
    with named(d, "txt", encoding="utf8") as f:
        lines = [f.readline(), f.read(10), f.encoding, f.errors, f.newlines, f.line_buffering]
        at = f.tell()
        lines += [f.read(3), f.seek(at), f.read(), f.buffer.name]
    with io.TextIOWrapper(named(d, "txt", "rb"), "utf8", newline="") as f:
        lines += list(f)
    with named(d, "txt", encoding="ascii") as f:
        f.reconfigure(encoding="utf8", newline="\r")
        lines += f.readlines()[:2]
    with codecs.open(str(path), "rb") as binary:  # type: ignore[deprecated]  # people call it
        lines += [path.read_text("utf8"), path.read_bytes(), binary.read()]
    with named(d, "csv", newline="") as f:
        lines += list(csv.reader(f))[:4]
    return lines


@use
def refusals(d: Path) -> Any:
    return several(
        lambda: named(d, "raw", encoding="ascii").read(),
        lambda: named(d, "txt", encoding="no"),
        lambda: named(d, "txt", "rb", encoding="utf8"),
        lambda: named(d, "txt", "rt", 0),
        lambda: named(d, "txt", "q"),
        lambda: named(d, "txt", newline="z"),
        lambda: open(d),  # noqa: PTH123
        lambda: named(d, "none", "rb"),
        lambda: named(d, "raw/x"),
        lambda: open("a\0b"),  # noqa: PTH123
    )


@use
def formats(d: Path) -> Any:
    contents = []
    with zipfile.ZipFile(d / "zip") as z, named(d, "zip", "rb") as f, zipfile.ZipFile(f) as other:
        contents += [z.read("one"), other.read("one"), zipfile.is_zipfile(d / "zip")]
    with tarfile.open(d / "tar") as t, tarfile.open(fileobj=named(d, "tar", "rb")) as other_tar:
        members: list[Any] = [(tar, tar.next()) for tar in (t, other_tar)]
        contents += [tar.extractfile(member).read() for tar, member in members]
    with gzip.open(d / "gz") as g, named(d, "gz", "rb") as f, gzip.open(f) as other_gz:
        contents += [g.read(), other_gz.read()]
    with named(d, "json", "rb") as f, named(d, "json") as as_text:
        contents += [json.load(f), json.load(as_text)]
    with named(d, "pickle", "rb") as f, named(d, "xml", "rb") as xml:
        contents += [
            pickle.load(f),
            len(ET.parse(xml).getroot()),
            len(ET.parse(d / "xml").getroot()),
        ]
    with named(d, "pt", "rb") as f, named(d, "old.pt", "rb") as old:
        loaded = [torch.load(file) for file in (f, old, d / "pt", d / "old.pt")]
        return contents, [int(x.sum()) for x in loaded], int(torch.load(d / "pt", mmap=True).sum())


@use
def other_ways(d: Path) -> Any:
    fd = os.open(d / "raw", os.O_RDONLY)
    bytes_read = [os.read(fd, 10), os.pread(fd, 10, 50), os.lseek(fd, 0, 2), os.fstat(fd).st_size]
    os.lseek(fd, 3, 0)
    with os.fdopen(fd, "rb") as f:
        bytes_read += [f.read(), f.name == fd]
    with raw(d) as f, io.BytesIO() as out:
        shutil.copyfileobj(f, out)
        bytes_read.append(out.getvalue())
        f.seek(0)
        bytes_read += [struct.unpack("<4i", f.read(16)), os.pread(f.fileno(), 3, 7)]
        numbers = array.array("i")
        numbers.fromfile(f, 100)
        bytes_read.append(numbers.tobytes())
        thread = threading.Thread(target=lambda: bytes_read.append(f.read()))
        thread.start()
        thread.join()
    with raw(d) as f:
        bytes_read.append(subprocess.check_output(["/usr/bin/head", "-c", "20"], stdin=f))
    with io.FileIO(d / "raw") as f, io.open_code(str(d / "raw")) as code:
        bytes_read += [f.read(), code.read()]
    shutil.copyfile(d / "raw", d / "copy")
    sizes = [named(d, "raw", "rb", n).read(10) for n in (2, 16, 100_000)]
    opener = named(d, "raw", "rb", opener=os.open)
    with opener, closing(named(d, b"raw".decode(), "rb", 0)) as unbuffered:
        return bytes_read, sizes, opener.read(), unbuffered.readall(), (d / "copy").read_bytes()


class Uses(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, list(USES)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Any:
        return self.names[i], repr(outcome(lambda: USES[self.names[i]](self.folder)))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.usefixtures("daemon")
def test_each_use_of_a_file_gives_what_it_gives_without_creel(tmp_path: Path, whole: bool) -> None:
    write(tmp_path)
    bare = Uses(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = list(DataLoader(bare, None))
        assert not [name for name, shown in theirs if shown.startswith("(<class")]  # an error
        options = {"loader.direct": "never"}
        ours = creel.DataLoader(creel.wrap(bare, whole=whole), None, creel=options)
        for _ in range(4):
            for value, other in zip(ours, theirs, strict=True):
                assert value == other
