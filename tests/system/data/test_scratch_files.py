"""Files that samples write and read again: each read returns what torch's would."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from opaque import N, loader, read_all
from torch.utils.data import DataLoader, Dataset, get_worker_info

import creel
from daemons import Running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180), pytest.mark.usefixtures("daemon")]

Write = Callable[[str, bytes], Any]

_libc = ctypes.CDLL(None)
_libc.fopen.restype = ctypes.c_void_p
_libc.fputs.argtypes = ctypes.c_char_p, ctypes.c_void_p
_libc.fclose.argtypes = (ctypes.c_void_p,)


def in_c(path: str, data: bytes) -> None:
    """Write as cv2.imwrite, soundfile and pyarrow do."""
    file = _libc.fopen(os.fsencode(path), b"w")
    _libc.fputs(data, file)
    _libc.fclose(file)


def by_a_program(path: str, data: bytes) -> None:
    """Write as ffmpeg does."""
    subprocess.run(["tee", path], input=data, stdout=subprocess.DEVNULL, check=True)


def by_another_link(path: str, data: bytes) -> None:
    Path(path + ".link").unlink(missing_ok=True)
    Path(path + ".link").symlink_to(path)
    Path(path + ".link").write_bytes(data)


def by_another_name(path: str, data: bytes) -> None:
    Path(path).touch()
    Path(path + ".hard").unlink(missing_ok=True)
    Path(path + ".hard").hardlink_to(path)
    Path(path + ".hard").write_bytes(data)


def through_its_folder(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    (Path(folder) / "below").mkdir(exist_ok=True)
    with open(f"{folder}/below/../{name}", "wb") as f:  # noqa: PTH123
        f.write(data)


def by_a_link_to_another_file(path: str, data: bytes) -> None:
    """Make the path lead to another, older file."""
    new = Path(path + data.decode())
    if not new.exists():
        new.write_bytes(data)
    subprocess.run(["ln", "-sfn", str(new), path], check=True)


def in_python(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


class Scratch(Dataset[Any]):
    """Sample i writes to a file, shared or its own, and reads it."""

    def __init__(self, folder: Path, write: Write, *, own: bool) -> None:
        folder.mkdir()
        self.folder, self.write, self.own = folder, write, own
        self.times = [0] * N

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> bytes:
        self.times[i] += 1
        worker = get_worker_info()
        path = str(self.folder / (f"{i}" if self.own else f"w{worker.id if worker else 0}"))
        self.write(path, b"%d of %d" % (self.times[i], i))
        return read_all(path)


WRITERS = [
    *(in_c, by_a_program, by_another_link, by_another_name),
    *(through_its_folder, by_a_link_to_another_file, in_python),
]


def pair(tmp_path: Path, kind: Any, workers: int, write: Write, *, own: bool) -> tuple[Any, Any]:
    """Return loaders over the wrapped dataset and the bare one, with persistent workers."""
    more: dict[str, Any] = {"persistent_workers": True} if workers else {}
    ours = creel.wrap(Scratch(tmp_path / "ours", write, own=own))
    theirs = Scratch(tmp_path / "theirs", write, own=own)
    if kind is creel.DataLoader:
        more["creel"] = {"loader.direct": "never"}
    given = loader(ours, kind, workers, **more)
    more.pop("creel", None)
    return given, loader(theirs, DataLoader, workers, **more)


@pytest.mark.parametrize(
    ("write", "own", "kind"),
    [(write, own, creel.DataLoader) for write in WRITERS for own in (False, True)]
    + [(in_c, own, DataLoader) for own in (False, True)],
)
def test_a_sample_reads_what_it_has_written_whoever_wrote(
    tmp_path: Path, write: Write, kind: Any, *, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    ours, theirs = pair(tmp_path, kind, 0, write, own=own)
    for _ in range(4):
        assert list(ours) == list(theirs)


@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
@pytest.mark.parametrize("own", [False, True], ids=["one file", "its own"])
def test_workers_read_what_they_have_written(
    tmp_path: Path, kind: Any, *, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    ours, theirs = pair(tmp_path, kind, 2, in_c, own=own)
    for _ in range(5):
        assert list(ours) == list(theirs)


class Late(Dataset[Any]):
    """From its third reading on, a sample writes to the file that the next one reads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.paths = [str(folder / str(i)) for i in range(N)]
        for i, path in enumerate(self.paths):
            Path(path).write_bytes(b"%d" % i)
        self.times = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[bytes, bytes]:
        self.times += 1
        other = self.paths[(i + 1) % N]
        if self.times > 2 * N:
            in_c(other, b"%d" % (self.times % 10))
        return read_all(self.paths[i]), read_all(other)


@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
def test_files_that_are_cached_and_written_later_give_their_new_bytes(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    ours = loader(creel.wrap(Late(tmp_path / "ours")), kind)
    theirs = loader(Late(tmp_path / "theirs"), DataLoader)
    for _ in range(5):
        assert list(ours) == list(theirs)


class Made(Dataset[Any]):
    """Makes the files that it reads, once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.paths = [str(folder / str(i)) for i in range(N)]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> bytes:
        if not os.path.exists(self.paths[i]):  # noqa: PTH110
            in_c(self.paths[i], b"made of %d" % i)
        return read_all(self.paths[i])


def served(daemon: Running) -> int:
    """Return the objects that the daemon has fetched."""
    with daemon.client("cli") as client:
        datasets = client.ask("stats")["core"]["datasets"]
    return sum(int(d["reads"]) for d in datasets.values())


def test_files_that_samples_make_once_are_cached(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    ours = loader(creel.wrap(Made(tmp_path / "made")))
    for _ in range(3):
        assert sorted(chain(*ours)) == [b"made of %d" % i for i in range(N)]
    assert served(daemon) == N


REWRITES = """
import sys, torch, creel
from pathlib import Path

class Rewriting(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = [f"{folder}/{i}" for i in range(6)]
    def __len__(self):
        return 6
    def __getitem__(self, i):
        before = open(self.paths[i]).read()
        Path(self.paths[i] + ".new").write_text(f"{int(before) + 1}")
        import subprocess
        subprocess.run(["mv", self.paths[i] + ".new", self.paths[i]], check=True)
        return int(open(self.paths[i]).read())

if __name__ == "__main__":
    loader = creel.DataLoader(creel.wrap(Rewriting(sys.argv[1])), 2)
    print([batch.tolist() for _ in range(3) for batch in loader])
"""


def test_a_trace_kept_by_an_earlier_job_serves_nothing_that_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier job's trace and the objects on disk are older than the samples' writes."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    monkeypatch.setenv("CREEL_DISK__PATH", str(tmp_path / "disk"))
    (tmp_path / "script.py").write_text(REWRITES)
    (tmp_path / "data").mkdir()
    for i in range(6):
        (tmp_path / "data" / str(i)).write_text("0")
    for job in range(2):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "data")],
            *(),
            capture_output=True,
            check=True,
            text=True,
        )
        epochs = [3 * job + 1 + epoch for epoch in range(3)]
        assert eval(done.stdout) == [[e, e] for e in epochs for _ in range(3)]
