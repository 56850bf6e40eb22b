"""The functions that replace `open` below `creel.wrap`: when, for which code, and how they act."""

from __future__ import annotations

import builtins
import errno
import fcntl
import importlib
import io
import mmap
import os
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from opaque import SMALL, N, Opaque, Plain, library, loader, read_all
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError
from creel.loader.data.interception.intercept import Intercepted
from daemons import Running
from testbed.same import same

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


ORIGINALS = builtins.open, io.open, os.open, tarfile.bltn_open  # type: ignore[attr-defined]


def originals() -> tuple[Any, ...]:
    return builtins.open, io.open, os.open, tarfile.bltn_open  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_that_are_spawned_are_served_too(daemon: Running, tmp_path: Path) -> None:
    """Each has recorded half of the samples, which is too little for itself.

    (A fork server would keep this test's environment.)
    """
    bare = Plain(tmp_path)
    spawned: dict[str, Any] = {"multiprocessing_context": "spawn", "persistent_workers": True}
    ours = loader(creel.wrap(bare), creel.DataLoader, 2, **spawned)
    theirs = loader(bare, DataLoader, 2, persistent_workers=True)
    for _ in range(5):
        assert list(ours) == list(theirs)
    with daemon.client("cli") as client:
        datasets = client.ask("stats")["core"]["datasets"]
    assert [d["reads"] for d in datasets.values()] == [N]


@pytest.mark.usefixtures("daemon")
def test_names_are_replaced_only_while_a_sample_is_read(tmp_path: Path) -> None:
    seen = []

    def read(path: str) -> bytes:
        seen.append(originals())
        if path.endswith("3.bin"):
            raise ZeroDivisionError
        return read_all(path)

    wrapped: Any = creel.wrap(Plain(tmp_path, read))
    assert originals() == ORIGINALS
    assert len(wrapped[0]) == 4 * SMALL
    assert originals() == ORIGINALS
    with pytest.raises(ZeroDivisionError):
        wrapped[3]
    assert originals() == ORIGINALS
    assert all(ours is not theirs for ours, theirs in zip(seen[0], ORIGINALS, strict=True))


def test_a_library_is_served_as_soon_as_a_sample_has_imported_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soundfile.py").write_text(
        "class SoundFile:\n    def __init__(self, file, mode='r'):\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "soundfile", raising=False)
    with Intercepted():
        library: Any = importlib.import_module("soundfile")
        assert hasattr(library.SoundFile.__init__, "__wrapped__")
    assert not hasattr(library.SoundFile.__init__, "__wrapped__")
    monkeypatch.delitem(sys.modules, "soundfile")


def test_a_library_whose_modules_import_each_other_is_served_from_the_first_sample_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was there, but empty, when another one's names were replaced (nibabel)."""
    folder = tmp_path / "nibabel"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    opener = "class Opener:\n    compress_ext_map = {None: (open,)}\nImageOpener = Opener\n"
    (folder / "openers.py").write_text(opener)
    (folder / "arrayproxy.py").write_text(
        "from nibabel.openers import Opener\ndef array_from_file(**more): return more\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "nibabel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with Intercepted():
            proxy = importlib.import_module("nibabel.arrayproxy")
            assert proxy.array_from_file(mmap=True) == {"mmap": False}
        assert proxy.array_from_file(mmap=True) == {"mmap": True}
    finally:
        for name in ("nibabel", "nibabel.openers", "nibabel.arrayproxy"):
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("daemon")
def test_other_threads_open_as_ever_and_samples_may_be_read_in_several(tmp_path: Path) -> None:
    """Files that another thread opens meanwhile are neither recorded nor served."""
    inside, outside = threading.Event(), threading.Event()
    kinds: list[type] = []

    def other() -> None:
        inside.wait(60)
        with open(tmp_path / "0.bin", "rb") as f:  # noqa: PTH123
            kinds.append(type(f))
        outside.set()

    def read(path: str) -> bytes:
        inside.set()
        outside.wait(60)
        return read_all(path)

    bare = Plain(tmp_path)
    wrapped: Any = creel.wrap(bare)
    ours, theirs = loader(wrapped), loader(bare, DataLoader)
    for _ in range(2):
        assert list(ours) == list(theirs)
    bare.read = read
    threads = [
        threading.Thread(target=other),
        *(threading.Thread(target=wrapped.__getitems__, args=([i, i + 3],)) for i in range(3)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == [io.BufferedReader]
    assert originals() == ORIGINALS


@pytest.mark.usefixtures("daemon")
def test_calls_that_somebody_else_has_replaced_are_called_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def theirs(*args: Any, **more: Any) -> Any:
        opened.append(args[0])
        return ORIGINALS[0](*args, **more)

    bare = Plain(tmp_path)
    monkeypatch.setattr(builtins, "open", theirs)
    wrapped: Any = creel.wrap(bare)
    assert wrapped[1] == Path(bare.paths[1]).read_bytes()
    assert opened == [bare.paths[1]]
    assert builtins.open is theirs


class Theirs(io.BytesIO):
    """A file object from another library's `open`: it has no descriptor."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.usefixtures("daemon")
def test_file_objects_of_somebody_elses_open_stay_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Plain(tmp_path)
    monkeypatch.setattr(builtins, "open", lambda path, *_: Theirs(os.fsencode(path)))
    monkeypatch.setattr(io, "open", lambda path, *_: Theirs(os.fsencode(path)))
    wrapped: Any = creel.wrap(bare)
    for _ in range(3):
        assert [wrapped[i] for i in range(N)] == list(map(os.fsencode, bare.paths))


@pytest.mark.usefixtures("daemon")
def test_files_that_somebody_elses_open_reads_elsewhere_are_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes any arguments, and its path need not be the file's."""
    for name in "ab":
        (tmp_path / name).mkdir()
    bare, other = Plain(tmp_path / "a", read_by_keyword), Plain(tmp_path / "b")
    for path in other.paths:
        Path(path).write_bytes(path.encode())

    def elsewhere(path: str, mode: str = "r") -> Any:
        return ORIGINALS[0](path.replace("/a/", "/b/"), mode)

    ours = loader(creel.wrap(bare), creel={"loader.direct": "never"})
    theirs = loader(bare, DataLoader)
    monkeypatch.setattr(builtins, "open", elsewhere)
    for _ in range(3):
        assert list(ours) == list(theirs)
    monkeypatch.setattr(builtins, "open", mock.mock_open(read_data=b"mocked"))
    assert list(ours) == list(theirs)
    monkeypatch.undo()
    for _ in range(2):
        assert list(ours) == list(theirs)


def read_by_keyword(path: str) -> bytes:
    with open(path, mode="rb") as f:  # noqa: PTH123
        return f.read()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("call", ["np.memmap, small", "os.open, small", "pa.memory_map, small"])
def test_without_room_for_a_copy_the_real_file_is_opened(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bare = Opaque(tmp_path, call)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(2):
        assert same(list(ours), list(theirs))
    monkeypatch.setattr(os, "pwrite", full)
    assert same(list(ours), list(theirs))


def test_a_proxy_that_is_wrapped_again_says_so(tmp_path: Path) -> None:
    proxy = creel.wrap(Plain(tmp_path, read_all))
    assert creel.wrap(proxy) is proxy
    with pytest.raises(ConfigError, match="wrapped already"):
        creel.wrap(proxy, whole=True)


def rewritten(path: str) -> bytes:
    """Read what was just written."""
    with open(path, "r+b") as f:  # noqa: PTH123
        now = bytes([(f.read(1)[0] + 1) % 256])
        f.seek(0)
        f.write(now)
    return read_all(path)


def replaced(path: str) -> bytes:
    """Read what was just written, through a file that replaces it."""
    new = Path(path + ".new")
    new.write_bytes(bytes([(Path(path).read_bytes()[0] + 1) % 256]) * 1000)
    new.rename(path)
    return read_all(path)


def moved(path: str) -> tuple[bytes, bool]:
    """Read a file that is elsewhere for a while."""
    Path(path).rename(path + ".away")
    try:
        read_all(path)
    except FileNotFoundError:
        gone = True
    Path(path + ".away").rename(path)
    return read_all(path), gone


def replaced_by_keyword(path: str) -> Any:
    before = read_all(path)
    Path(path + ".new").write_bytes(before[::-1])
    os.replace(src=path + ".new", dst=path)  # noqa: PTH105
    return before, read_all(path)


def saved(path: str) -> Any:
    """Save with torch, which writes in C++."""
    before = read_all(path)
    torch.save(torch.tensor(before[0]), path)
    after = int(torch.load(path))
    Path(path).write_bytes(bytes([after + 1 & 127]))
    return before[:1], after


def changed_hdf5(path: str) -> Any:
    h5py, name = library("h5py"), path + ".h5"
    with h5py.File(name, "a") as f:
        f.attrs["n"] = f.attrs.get("n", 0) + 1
    with h5py.File(name) as f:
        return int(f.attrs["n"])


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *(
            (change, creel.DataLoader)
            for change in (rewritten, replaced_by_keyword, saved, changed_hdf5)
        ),
        *((change, DataLoader) for change in (rewritten, replaced, moved)),
    ],
)
def test_a_sample_that_changes_its_file_reads_what_is_there(
    tmp_path: Path, change: Callable[[str], Any], kind: Any
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = loader(creel.wrap(Plain(tmp_path / "ours", change)), kind)
    theirs = loader(Plain(tmp_path / "theirs", change), DataLoader)
    for _ in range(4):
        assert list(ours) == list(theirs)


def odd(path: str) -> list[Any]:
    """Return attributes and errors of file objects, and results of calls that are not cached."""
    values: list[Any] = []
    for args, more in [
        ((path,), {}),
        ((path, "rb"), {}),
        ((path, "rb", 0), {}),
        ((path, "r", 1), {"encoding": "latin-1"}),
        ((path, "rt"), {"encoding": "latin-1", "newline": "\r"}),
        ((path.encode(), "rb"), {}),
        ((Path(path), "rb"), {}),
        ((os.path.relpath(path), "rb"), {}),
        ((path + "/", "rb"), {}),
        ((path + "x",), {}),
        ((path, "rb"), {"encoding": "ascii"}),
        ((path, "r", 0), {}),
        ((path, "q"), {}),
        ((path, 3), {}),
        ((path, "r"), {"encoding": "none such"}),
        (("/proc/self/cmdline", "rb"), {}),
        ((str(Path(path).parent),), {}),
        (("",), {}),
        (("a\0b",), {}),
        ((None,), {}),
    ]:
        try:
            with open(*args, **more) as f:  # type: ignore[call-overload]  # noqa: PTH123
                values += [
                    f.name,
                    f.mode.replace("b", ""),
                    f.readable(),
                    f.seekable(),
                    f.writable(),
                ]
                f.seek(0, 2)
                values += [f.tell(), f.seek(40), f.read(50), f.readline(), f.closed]
            values.append(f.closed)
            with pytest.raises(ValueError, match="closed file"):
                f.read()
        except Exception as e:  # noqa: BLE001, PERF203
            values += [type(e), str(e)]
    return values


@pytest.mark.usefixtures("daemon")
def test_arguments_and_refusals_are_pythons(tmp_path: Path) -> None:
    bare = Plain(tmp_path, odd)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(3):
        for batch, expected in zip(ours, theirs, strict=True):
            for answers, wanted in zip(batch, expected, strict=True):
                assert [x for x, y in zip(answers, wanted, strict=True) if x != y] == []


def sought(path: str) -> list[Any]:
    """Return where seeks lead, also before the beginning and to holes; and the file's bytes."""
    values: list[Any] = []
    for buffering in (-1, 0):
        for offset, whence in [
            (-1 << 20, os.SEEK_END),  # as for a tag at the end of a file that is too short
            (-1, os.SEEK_SET),
            (-41, os.SEEK_CUR),
            (-40, os.SEEK_CUR),
            (1 << 20, os.SEEK_CUR),
            (0, os.SEEK_DATA),
            (3, os.SEEK_HOLE),
            (1 << 20, os.SEEK_DATA),
        ]:
            with open(path, "rb", buffering) as f:  # noqa: PTH123
                f.seek(40)
                try:
                    values.append(f.seek(offset, whence))
                except OSError as e:
                    values.append(e.errno)
                values += [f.tell(), f.read(7)]
    with open(path, "rb") as f:  # noqa: PTH123
        raw: Any = f.raw
        values += [raw.read(3), raw.seek(9), f.read(3)]
    return values


def descriptors(path: str) -> list[Any]:
    """Use read-only descriptors of `os.open` and of a file object."""
    values: list[Any] = []
    with open(path, "rb") as f:  # noqa: PTH123
        for fd in (os.open(path, os.O_RDONLY), os.dup(f.fileno())):
            values += [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE, os.get_inheritable(fd)]
            values += [os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_CUR)]
            for act in (
                lambda fd=fd: os.write(fd, b"x"),
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd: mmap.mmap(fd, 0),
            ):
                with pytest.raises(OSError) as refused:  # noqa: PT011
                    act()
                values.append(refused.value.errno)
            with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                values.append(mapped[:])
            os.close(fd)
    return values


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("use", [sought, descriptors])
def test_a_served_file_does_what_a_file_does(
    tmp_path: Path, use: Callable[[str], list[Any]]
) -> None:
    bare = Plain(tmp_path, use)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(3):
        assert list(ours) == list(theirs)


def locked(path: str) -> bool:
    """Return whether a lock on a file excludes another one."""
    with open(path + ".lock") as held, open(path + ".lock", "rb") as other:  # noqa: PTH123
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return len(read_all(path)) > 0
    return False


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
def test_locks_on_empty_files_are_locks(tmp_path: Path, kind: Any) -> None:
    bare = Plain(tmp_path, locked)
    for path in bare.paths:
        Path(path + ".lock").touch()
    ours = loader(creel.wrap(bare), kind)
    for _ in range(3):
        assert [got for batch in ours for got in batch] == [True] * N
