"""Datasets that open their files themselves: `creel.wrap` serves their calls from the cache."""

from __future__ import annotations

import copy
import pickle
import sys
import time
import tracemalloc
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from opaque import (
    BATCH,
    CALLS,
    N,
    Opaque,
    Plain,
    Read,
    Write,
    by_torchvision,
    library,
    loader,
    read_directly,
    read_in_c,
    read_linked_hdf5,
    read_mapped,
    write_large_hdf5,
    write_linked_hdf5,
    write_raw,
)
from torch.utils.data import DataLoader, Dataset, Subset

import creel
from creel.cache.storage.version import CHANGING, of_stat
from daemons import Running
from kit import until
from testbed.same import needs_fuse, same

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("call", CALLS)
def test_each_call_gives_what_it_gives_and_is_served_from_the_cache(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files have replaced them by then: the bytes show where they come from."""
    monkeypatch.setenv("CREEL_LOADER__RECHECK", "never")
    bare = Opaque(tmp_path, call)
    before = [bare[i] for i in range(N)]
    ours = loader(creel.wrap(bare))
    theirs = loader(bare, DataLoader)
    for _ in range(2):
        assert same(list(ours), list(theirs))
    bare.fill(1)
    got = [sample for batch in ours for sample in batch]
    after = [bare[i] for i in range(N)]
    matches = [[any(same(x, y) for y in known) for x in got] for known in (before, after)]
    served = CALLS[call][3]
    assert matches == [[served] * N, [not served] * N]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_file_among_others_is_empty_from_the_cache_too(
    workers: int, tmp_path: Path
) -> None:
    bare = Opaque(tmp_path, "open.read")
    for path in bare.paths[::3]:
        Path(path).write_bytes(b"")
    ours, theirs = loader(creel.wrap(bare), workers=workers), loader(bare, DataLoader, workers)
    for _ in range(4):
        assert same(list(ours), list(theirs))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("read", "tree"), [(CALLS["np.memmap"][2], False), (read_mapped, True), (read_directly, True)]
)
def test_whole_files_are_cached_where_the_person_says_so(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tree: bool
) -> None:
    """Reads of a mapped file cannot be observed."""
    monkeypatch.setenv("CREEL_LOADER__RECHECK", "never")
    bare = Opaque(tmp_path, "np.memmap")
    bare.read = read
    before = [bare[i] for i in range(N)]
    wrapped = creel.wrap(Subset(bare, range(N)) if tree else bare, whole=True)
    ours = loader(pickle.loads(pickle.dumps(wrapped)) if read is read_mapped else wrapped)
    for _ in range(2):
        assert len(list(ours)) == N // BATCH
    bare.fill(1)
    assert all(any(same(x, y) for y in before) for batch in ours for x in batch)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("call", "workers", "kind"),
    [
        ("np.load npy", 0, DataLoader),
        ("np.load npy", 2, creel.DataLoader),
        ("open, text", 0, creel.DataLoader),
        ("open, text", 2, DataLoader),
    ],
)
def test_files_rewritten_between_epochs_give_their_new_bytes(
    call: str, workers: int, kind: Any, tmp_path: Path
) -> None:
    bare = Opaque(tmp_path, call)
    ours, theirs = loader(creel.wrap(bare), kind, workers), loader(bare, DataLoader, workers)
    for epoch in range(5):
        assert same(list(ours), list(theirs))
        bare.fill(epoch)


@pytest.mark.usefixtures("daemon")
def test_a_stand_in_for_torchvisions_operators_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torchvision was built for another torch: same module names and calls."""
    names = "torchvision.io.image", "torchvision.io"
    image, package = (sys.modules.get(name) or types.ModuleType(name) for name in names)

    def read_file(path: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(read_in_c(str(path))), dtype=torch.uint8)

    def read_image(path: Any) -> torch.Tensor:
        pixels: torch.Tensor = image.read_file(path) // 2
        return pixels

    for module, name in zip((image, package), names, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(module, "read_file", read_file, raising=False)
    monkeypatch.setattr(package, "read_image", read_image, raising=False)
    monkeypatch.setenv("CREEL_LOADER__RECHECK", "never")
    bare = Plain(tmp_path, by_torchvision)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(2):
        assert same(list(ours), list(theirs))
    before = [bare[i] for i in range(N)]
    for path in bare.paths:
        Path(path).write_bytes(b"never read again")
    assert all(any(same(x, y) for y in before) for batch in ours for x in batch)
    assert package.read_file is image.read_file is read_file


class Mixed(Dataset[Any]):
    """Samples of many kinds, two of each."""

    CALLS = (
        *("open.read", "open, text", "pathlib", "os.open, small", "mmap, small", "np.load npz"),
        *("np.load npy", "np.fromfile", "np.memmap, small", "PIL png", "torch.load", "gzip"),
        *("zipfile", "tarfile", "pq.read_table"),
    )

    def __init__(self, folder: Path) -> None:
        self.calls = [CALLS[name] for name in self.CALLS] * 2
        self.paths = [str(folder / f"{i}{call[0]}") for i, call in enumerate(self.calls)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return self.calls[i][2](self.paths[i])


@pytest.mark.usefixtures("daemon")
@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_opened_at_the_source_once_all_is_in_memory(
    tmp_path: Path, workers: int
) -> None:
    from testbed.slowfs import SlowFS

    (tmp_path / "data").mkdir()
    for call, path in zip(Mixed(Path()).calls, Mixed(tmp_path / "data").paths, strict=True):
        call[1](path, len(path))
    theirs = loader(Mixed(tmp_path / "data"), DataLoader, workers)
    with SlowFS(str(tmp_path / "data"), str(tmp_path / "mount")) as fs:  # type: ignore[no-untyped-call]
        ours = loader(creel.wrap(Mixed(Path(fs.mountpoint))), workers=workers)
        opens = []
        for epoch in range(5):
            before = fs.totals()["opens"]
            for batch, wanted in zip(ours, theirs, strict=True):
                names = [sample for sample in batch if not isinstance(sample, str)]
                assert same(names, [x for x in wanted if not isinstance(x, str)]), epoch
            opens.append(fs.totals()["opens"] - before)
        del ours
    assert opens[0] >= len(theirs.dataset)
    assert opens[3:] == [0, 0]


@pytest.mark.usefixtures("daemon")
def test_links_and_virtual_datasets_of_an_hdf5_file_in_memory_lead_to_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__RECHECK", "never")
    bare = Plain(tmp_path, read_linked_hdf5)
    for i, path in enumerate(bare.paths):
        write_linked_hdf5(path, i)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(4):
        assert same(list(ours), list(theirs))
    owns = {int(bare[i][0][0][0]) for i in range(N)}
    for i, path in enumerate(bare.paths):
        write_linked_hdf5(path, 100 + i)
    samples = [sample for batch in ours for sample in batch]
    assert {int(sample[0][0][0]) for sample in samples} == owns  # from memory
    assert same(
        sorted(int(x[0][1][0]) for x in samples), sorted(int(bare[i][0][1][0]) for i in range(N))
    )


def hdf5_driver(path: str) -> Any:
    with library("h5py").File(path, "r") as f:
        return f.driver


@pytest.mark.usefixtures("daemon")
def test_one_copy_of_an_hdf5_file_is_made_on_its_way_to_hdf5(tmp_path: Path) -> None:
    bare = Plain(tmp_path, hdf5_driver)
    for i, path in enumerate(bare.paths):
        write_large_hdf5(path, i)
    ours = loader(creel.wrap(bare, whole=True))
    for _ in range(2):
        assert len(list(ours)) == N // BATCH
    tracemalloc.start()
    try:
        drivers = [driver for batch in ours for driver in batch]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert drivers == ["fileobj"] * N
    assert most < 1.5 * Path(bare.paths[0]).stat().st_size


def read_cut_hdf5(path: str) -> Any:
    """Return the last values of a file, or the library's own complaint of it."""
    h5py = library("h5py")
    try:
        with h5py.File(path, "r") as f:
            return f["x"][-1000:].sum()
    except OSError as e:
        return str(e).replace(path, "")


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("kept", [0.1, 0.6, 1.0])
def test_a_cut_hdf5_file_is_read_as_by_the_library_itself(tmp_path: Path, kept: float) -> None:
    bare = Plain(tmp_path, read_cut_hdf5)
    for i, path in enumerate(bare.paths):
        write_large_hdf5(path, i)
        with open(path, "r+b") as f:  # noqa: PTH123
            f.truncate(int(kept * Path(path).stat().st_size))
    ours, theirs = loader(creel.wrap(bare, whole=True)), loader(bare)
    assert all(same(list(ours), list(theirs)) for _ in range(3))


@pytest.mark.usefixtures("daemon")
def test_an_h5py_of_another_version_reads_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(library("h5py").h5fd, "fileobj_driver")
    bare = Plain(tmp_path, read_cut_hdf5)
    for i, path in enumerate(bare.paths):
        write_large_hdf5(path, i)
    ours, theirs = loader(creel.wrap(bare)), loader(bare)
    assert all(same(list(ours), list(theirs)) for _ in range(3))


def read_hdf5_part(path: str) -> Any:
    with library("h5py").File(path, "r") as f:
        return f["x"][1000:2000]


@pytest.mark.usefixtures("daemon")
@needs_fuse
@pytest.mark.parametrize(
    ("read", "write", "served"),
    [
        (read_directly, write_raw, True),
        (lambda path: library("h5py").File(path)["x"][:], write_large_hdf5, True),
        (read_hdf5_part, write_large_hdf5, True),
    ],
    ids=["os.open", "h5py", "h5py, a part"],
)
def test_reads_of_large_files_in_c_are_seen_where_the_storage_is_slow(
    read: Read, write: Write, tmp_path: Path, *, served: bool
) -> None:
    from testbed.slowfs import SlowFS

    bare = Plain(tmp_path, read)
    for i, path in enumerate(bare.paths):
        write(path, i)
    theirs = loader(bare, DataLoader)
    with SlowFS(str(tmp_path), str(tmp_path / "m"), open_latency=1.0) as fs:  # type: ignore[no-untyped-call]
        mounted = copy.copy(bare)
        mounted.paths = [f"{fs.mountpoint}/{Path(path).name}" for path in bare.paths]
        ours = loader(creel.wrap(mounted))
        for _ in range(2):
            assert same(list(ours), list(theirs))
        before = fs.totals()["opens"]
        assert same(list(ours), list(theirs))
        assert fs.totals()["opens"] - before == (0 if served else N)
        del ours


def test_a_module_that_takes_the_place_of_another_is_served_too(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        package = types.ModuleType("torchvision.io")
        package.read_file = lambda path: torch.tensor(list(read_in_c(str(path))))  # type: ignore[attr-defined]
        package.read_image = lambda path, of=package: of.read_file(path)[:8]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchvision.io", package)
        bare = Plain(folder, by_torchvision)
        until(partial(settled, bare.paths))
        ours = loader(creel.wrap(bare))
        read = [{tuple(x.tolist()) for batch in ours for x in batch} for _ in range(3)]
        assert read[0] == read[1] == read[2]
    assert [source["reads"] for source in daemon_stats(daemon)["sources"]] == [N, N]


def settled(paths: list[str]) -> bool:
    """Whether files are read once: one that has just changed may change again unnoticed."""
    now_ns = time.time_ns()
    return all(of_stat(Path(path).stat(), now_ns) != CHANGING for path in paths)


def test_a_library_that_the_first_sample_imports_is_seen_from_the_second_on(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = types.ModuleType("torchvision.io")
    package.read_file = lambda path: torch.tensor(list(read_in_c(str(path))), dtype=torch.uint8)
    monkeypatch.delitem(sys.modules, "torchvision.io", raising=False)
    monkeypatch.delitem(sys.modules, "torchvision.io.image", raising=False)

    def read(path: str) -> Any:
        if "torchvision.io" not in sys.modules:
            monkeypatch.setitem(sys.modules, "torchvision.io", package)
        return package.read_file(path)

    bare = Plain(tmp_path, read)
    monkeypatch.setattr("creel.loader.data.tracing.wrapped_reads.paths_in", lambda *_: None)
    ours = creel.DataLoader(creel.wrap(bare), N, collate_fn=list)
    theirs = DataLoader(bare, N, collate_fn=list)
    for _ in range(2):
        assert same(list(ours), list(theirs))
    assert [source["reads"] for source in daemon_stats(daemon)["sources"]] == [N - 1]


def daemon_stats(daemon: Running) -> Any:
    with daemon.client("cli") as client:
        return client.ask("stats")
