"""Datasets that open their files themselves: `creel.wrap`, and no edit of theirs."""

from __future__ import annotations

import builtins
import bz2
import copy
import ctypes
import errno
import gzip
import io
import lzma
import mmap
import os
import pickle
import sys
import tarfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

import creel
from creel.errors import ConfigError
from creel.loader.client import connections
from daemons import Running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, BATCH = 6, 3
#: Larger than what is cached however little of it is read.
NUMBERS, SMALL = 20_000, 10_000


def numbers(seed: int, n: int = NUMBERS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 30, n).astype(np.int32)


# --- the calls ------------------------------------------------------------------------------------


def library(name: str) -> Any:
    return pytest.importorskip(name)


def images() -> Any:
    """torchvision.io, if its operators are those of this torch."""
    try:
        found = library("torchvision.io")
        _ = torch.ops.image.read_file
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"torchvision's operators: {e}")
    return found


def write_npz(path: str, seed: int) -> None:
    np.savez(path, x=numbers(seed))


def write_npy(path: str, seed: int) -> None:
    np.save(path, numbers(seed))


def write_raw(path: str, seed: int) -> None:
    numbers(seed).tofile(path)


def write_little(path: str, seed: int) -> None:
    """Small enough to be cached, however much of it is seen to be read."""
    np.save(path, numbers(seed, 5000))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(numbers(seed, 300 * 100).view(np.uint8).reshape(200, 200, 3))


def write_jpeg(path: str, seed: int) -> None:
    picture(seed).save(path, quality=98)


def write_png(path: str, seed: int) -> None:
    picture(seed).save(path)


def write_csv(path: str, seed: int) -> None:
    Path(path).write_text("x\n" + "\n".join(map(str, numbers(seed))))


def write_csv_gz(path: str, seed: int) -> None:
    Path(path).write_bytes(gzip.compress(b"x\n" + b"\n".join(b"%d" % x for x in numbers(seed))))


def write_gz(path: str, seed: int) -> None:
    Path(path).write_bytes(gzip.compress(numbers(seed).tobytes()))


def write_bz2(path: str, seed: int) -> None:
    Path(path).write_bytes(bz2.compress(numbers(seed).tobytes()))


def write_xz(path: str, seed: int) -> None:
    Path(path).write_bytes(lzma.compress(numbers(seed).tobytes(), preset=0))


def write_tiff(path: str, seed: int) -> None:
    library("tifffile").imwrite(path, np.asarray(picture(seed)))


def write_zip(path: str, seed: int) -> None:
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("x", numbers(seed).tobytes())


def write_tar(path: str, seed: int) -> None:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("x")
        info.size = 4 * NUMBERS
        tar.addfile(info, io.BytesIO(numbers(seed).tobytes()))


def write_pt(path: str, seed: int) -> None:
    torch.save({"x": torch.from_numpy(numbers(seed))}, path)


def write_old_pt(path: str, seed: int) -> None:
    x = torch.from_numpy(numbers(seed, 5000))
    torch.save([x, x * 2], path, _use_new_zipfile_serialization=False)


def write_parquet(path: str, seed: int) -> None:
    pq = library("pyarrow.parquet")
    pq.write_table(library("pyarrow").table({"x": numbers(seed)}), path)


def write_hdf5(path: str, seed: int) -> None:
    with library("h5py").File(path, "w") as f:
        f["x"] = numbers(seed, 5000)
        f["same"] = library("h5py").SoftLink("/x")


def write_linked_hdf5(path: str, seed: int) -> None:
    """It names another file and itself, by links and as a virtual dataset."""
    h5py, name = library("h5py"), Path(path).name
    write_hdf5(path + ".other", seed)
    with h5py.File(path, "w") as f:
        f["own"] = numbers(seed + 50, 5000)
        f["link"] = h5py.ExternalLink(name + ".other", "/x")
        f["back"] = h5py.ExternalLink(name, "/own")
        for key, file, there in (
            ("v", name + ".other", "x"),
            ("w", name, "own"),
            ("z", ".", "own"),
        ):
            layout = h5py.VirtualLayout((5000,), np.int32)
            layout[:] = h5py.VirtualSource(file, there, (5000,))
            f.create_virtual_dataset(key, layout)


def write_large_hdf5(path: str, seed: int) -> None:
    with library("h5py").File(path, "w") as f:
        f["x"] = numbers(seed, 1 << 18)


def read_all(path: str) -> bytes:
    with open(path, "rb") as f:  # noqa: PTH123
        return f.read()


def read_by_io(path: str) -> bytes:
    with io.open(path, "rb") as f:  # noqa: UP020
        return f.read()


def read_pieces(path: str) -> bytes:
    with open(path, "rb") as f:  # noqa: PTH123
        f.seek(400)
        buffer = bytearray(50_000)
        assert f.readinto(buffer) == len(buffer)
        return bytes(buffer) + f.read(11) + f.readline()


def read_text(path: str) -> str:
    with open(path, encoding="ascii") as f:  # noqa: PTH123
        return f.readline() + f.mode + str(f.name) + f.read()


def read_direct(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, 1 << 16)
        got = os.readv(fd, [buffer])
        return buffer[:got]
    finally:
        os.close(fd)


def read_mapped(path: str) -> bytes:
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:  # noqa: PTH123
        return m[:]


def read_tar(path: str) -> bytes:
    with tarfile.open(path) as tar:
        member = tar.extractfile("x")
        assert member is not None
        return member.read()


def read_image(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def read_zip(path: str) -> bytes:
    with zipfile.ZipFile(path) as z:
        return z.read("x")


def read_gz(path: str) -> bytes:
    with gzip.open(path) as f:
        return f.read()


def read_bz2(path: str) -> bytes:
    with bz2.open(path) as f:
        return f.read()


def read_xz(path: str) -> bytes:
    with lzma.open(path) as f:
        return f.read()


def read_hdf5(path: str) -> Any:
    with library("h5py").File(path, "r") as f:
        return f["x"][:], f["same"][5], f.filename, f["x"].file.filename, str(f), f.mode, f.libver


def read_linked_hdf5(path: str) -> Any:
    h5py = library("h5py")
    with h5py.File(path) as f, h5py.File(path, mode="r") as again:
        return [f[key][:] for key in ["own", "link", "back", "v", "w", "z"]], again["own"][7]


def read_odd_hdf5(path: str) -> Any:
    """Refusals, and what is not served."""
    h5py, found = library("h5py"), []
    calls: list[Any] = [
        ((path, "r", "core"), {}),
        ((path, "r"), {"driver": "sec2", "rdcc_nbytes": 1 << 16}),
        ((path + ".none", "r"), {}),
        ((path, "q"), {}),
        ((path, "r"), {"nothing": 1}),
        ((f"{path}.text",), {}),
    ]
    for args, more in calls:
        try:
            with h5py.File(*args, **more) as f:
                found += [f["x"][:].sum(), f.driver]
        except Exception as e:  # noqa: BLE001, PERF203
            found += [type(e), str(e)]
    return found


def write_odd_hdf5(path: str, seed: int) -> None:
    write_hdf5(path, seed)
    Path(path + ".text").write_text("no HDF5")


def read_fileio(path: str) -> bytes:
    with io.FileIO(path) as f:
        return f.read()


def read_in_c(path: str) -> bytes:
    """As a reader in C would."""
    libc = ctypes.CDLL(None)
    fd = libc.open(path.encode(), os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


Write: TypeAlias = Callable[[str, int], None]
Read: TypeAlias = Callable[[str], Any]
#: name -> (suffix, how it is written, how it is read, whether it is served)
CALLS: dict[str, tuple[str, Write, Read, bool]] = {
    "open.read": (".bin", write_raw, read_all, True),
    "open.seek.readinto": (".bin", write_raw, read_pieces, True),
    "open, text": (".csv", write_csv, read_text, True),
    "io.open": (".bin", write_raw, read_by_io, True),
    "pathlib": (".bin", write_raw, lambda p: Path(p).read_bytes(), True),
    "os.open, small": (".npy", write_little, read_direct, True),
    "mmap, small": (".npy", write_little, read_mapped, True),
    "np.load npz": (".npz", write_npz, lambda p: np.load(p, allow_pickle=True)["x"], True),
    "np.load npy": (".npy", write_npy, np.load, True),
    "np.fromfile": (".bin", write_raw, lambda p: np.fromfile(p, np.int32), True),
    "np.memmap, small": (
        ".npy",
        write_little,
        lambda p: np.array(np.memmap(p, np.uint8, "r")),
        True,
    ),
    "np.load mmap_mode, small": (
        ".npy",
        write_little,
        lambda p: np.array(np.load(p, mmap_mode="r")),
        True,
    ),
    "np.memmap": (".npy", write_npy, lambda p: np.array(np.memmap(p, np.uint8, "r")), False),
    "PIL jpeg": (".jpg", write_jpeg, read_image, True),
    "PIL png": (".png", write_png, read_image, True),
    "torch.load": (".pt", write_pt, lambda p: torch.load(p)["x"], True),
    "torch.load, old format": (".pt", write_old_pt, torch.load, True),
    "torch.load mmap": (".pt", write_pt, lambda p: torch.load(p, mmap=True)["x"].clone(), False),
    "torch.from_file": (
        ".bin",
        write_raw,
        lambda p: torch.from_file(p, size=NUMBERS, dtype=torch.int32).clone(),
        False,
    ),
    "gzip": (".gz", write_gz, read_gz, True),
    "bz2": (".bz2", write_bz2, read_bz2, True),
    "lzma": (".xz", write_xz, read_xz, True),
    "zipfile": (".zip", write_zip, read_zip, True),
    "tarfile": (".tar", write_tar, read_tar, True),
    "pandas csv": (
        ".csv",
        write_csv,
        lambda p: library("pandas").read_csv(p)["x"].to_numpy(),
        True,
    ),
    "pandas csv.gz": (
        ".csv.gz",
        write_csv_gz,
        lambda p: library("pandas").read_csv(p)["x"].to_numpy(),
        True,
    ),
    "pandas parquet": (
        ".parquet",
        write_parquet,
        lambda p: library("pandas").read_parquet(p)["x"].to_numpy(),
        True,
    ),
    "pq.ParquetFile": (
        ".parquet",
        write_parquet,
        lambda p: library("pyarrow.parquet").ParquetFile(p).read()["x"].to_numpy(),
        True,
    ),
    "pq.read_table": (
        ".parquet",
        write_parquet,
        lambda p: library("pyarrow.parquet").read_table(p)["x"].to_numpy(),
        True,
    ),
    "pa.memory_map, small": (
        ".npy",
        write_little,
        lambda p: library("pyarrow").memory_map(p).read(),
        True,
    ),
    "cv2.imread": (".png", write_png, lambda p: library("cv2").imread(p), True),
    "torchvision read_image": (
        ".png",
        write_png,
        lambda p: images().read_image(p),
        True,
    ),
    "torchvision read_file": (
        ".bin",
        write_raw,
        lambda p: images().read_file(p),
        True,
    ),
    "skimage": (".png", write_png, lambda p: library("skimage.io").imread(p), True),
    "imageio": (".png", write_png, lambda p: library("imageio.v3").imread(p), True),
    "tifffile": (".tiff", write_tiff, lambda p: library("tifffile").imread(p), True),
    "h5py": (".h5", write_hdf5, read_hdf5, True),
    "h5py, odd": (".h5", write_odd_hdf5, read_odd_hdf5, False),
    "io.FileIO": (".bin", write_raw, read_fileio, False),
    "C": (".npy", write_little, read_in_c, False),
}


class Opaque(Dataset[Any]):
    """What people write: it knows nothing of creel."""

    def __init__(self, folder: Path, call: str) -> None:
        self.suffix, self.write, self.read, _ = CALLS[call]
        self.paths = [str(folder / f"{i}{self.suffix}") for i in range(N)]
        self.fill(0)

    def fill(self, generation: int) -> None:
        for i, path in enumerate(self.paths):
            self.write(path, 100 * generation + i)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.read(self.paths[i])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.fixture
def daemon(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    with Running(daemon_name, memory="32MB") as daemon:
        yield daemon
        connections.disconnect(daemon_name)


def loader(dataset: Any, kind: Any = creel.DataLoader, workers: int = 0, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    more |= {"collate_fn": list, "generator": generator, "num_workers": workers}
    return kind(dataset, BATCH, True, **more)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("call", CALLS)
def test_each_call_gives_what_it_gives_and_is_served_from_the_cache(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then other files lie there: whose bytes come shows where they come from."""
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
    found = [[any(same(x, y) for y in known) for x in got] for known in (before, after)]
    served = CALLS[call][3]
    assert found == [[served] * N, [not served] * N]


def read_directly(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("read", [CALLS["np.memmap"][2], read_mapped, read_directly])
@pytest.mark.parametrize("tree", [False, True])
def test_whole_files_are_cached_where_the_person_says_so(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tree: bool
) -> None:
    """What is mapped is not seen to be read."""
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
@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("call", ["np.load npy", "open, text"])
def test_files_rewritten_between_epochs_give_their_new_bytes(
    call: str, workers: int, kind: Any, tmp_path: Path
) -> None:
    bare = Opaque(tmp_path, call)
    ours, theirs = loader(creel.wrap(bare), kind, workers), loader(bare, DataLoader, workers)
    for epoch in range(5):
        assert same(list(ours), list(theirs))
        bare.fill(epoch)


def by_torchvision(path: str) -> Any:
    return sys.modules["torchvision.io"].read_image(path)


@pytest.mark.usefixtures("daemon")
def test_a_stand_in_for_torchvisions_operators_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they were built for another torch: its modules' names, and how they call each other."""
    names = "torchvision.io.image", "torchvision.io"
    image, package = (sys.modules.get(name) or types.ModuleType(name) for name in names)

    def read_file(path: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(read_in_c(str(path))), dtype=torch.uint8)

    def read_image(path: Any) -> torch.Tensor:
        found: torch.Tensor = image.read_file(path) // 2
        return found

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
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="slowfs needs root and FUSE"
)
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
            for found, wanted in zip(ours, theirs, strict=True):
                names = [sample for sample in found if not isinstance(sample, str)]
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
    found = [sample for batch in ours for sample in batch]
    assert {int(sample[0][0][0]) for sample in found} == owns  # from memory
    assert same(
        sorted(int(x[0][1][0]) for x in found), sorted(int(bare[i][0][1][0]) for i in range(N))
    )


def read_hdf5_part(path: str) -> Any:
    with library("h5py").File(path, "r") as f:
        return f["x"][1000:2000]


@pytest.mark.usefixtures("daemon")
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="slowfs needs root and FUSE"
)
@pytest.mark.parametrize(
    ("read", "write", "served"),
    [
        (read_directly, write_raw, True),
        (lambda path: library("h5py").File(path)["x"][:], write_large_hdf5, True),
        (read_hdf5_part, write_large_hdf5, False),
    ],
    ids=["os.open", "h5py", "h5py, a part"],
)
def test_what_c_reads_of_large_files_is_seen_where_the_storage_is_slow(
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


# --- what is replaced, when -----------------------------------------------------------------------


class Plain(Dataset[Any]):
    """Reads by a function of the test's."""

    def __init__(self, folder: Path, read: Callable[[str], Any] = read_all) -> None:
        self.paths = [str(folder / f"{i}.bin") for i in range(N)]
        for i, path in enumerate(self.paths):
            numbers(i, SMALL).tofile(path)
        self.read = read

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.read(self.paths[i])


ORIGINALS = builtins.open, io.open, os.open, tarfile.bltn_open  # type: ignore[attr-defined]


def originals() -> tuple[Any, ...]:
    return builtins.open, io.open, os.open, tarfile.bltn_open  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_that_are_spawned_are_served_too(daemon: Running, tmp_path: Path) -> None:
    """What each has recorded is too little for itself: a half of the samples.

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


@pytest.mark.usefixtures("daemon")
def test_other_threads_open_as_ever_and_samples_may_be_read_in_several(tmp_path: Path) -> None:
    """What another thread opens while samples are read is neither recorded nor served."""
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
def test_what_somebody_else_has_replaced_is_called_and_stays(
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
    """A file object that somebody's own `open` gives: it has no descriptor."""

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


def test_a_module_that_takes_the_place_of_another_is_served_too(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        package = types.ModuleType("torchvision.io")
        package.read_file = lambda path: torch.tensor(list(read_in_c(str(path))))  # type: ignore[attr-defined]
        package.read_image = lambda path, of=package: of.read_file(path)[:8]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchvision.io", package)
        ours = loader(creel.wrap(Plain(folder, by_torchvision)))
        read = [{tuple(x.tolist()) for batch in ours for x in batch} for _ in range(3)]
        assert read[0] == read[1] == read[2]
    assert [source["reads"] for source in daemon_stats(daemon)["sources"]] == [N, N]


def daemon_stats(daemon: Running) -> Any:
    with daemon.client("cli") as client:
        return client.ask("stats")


def test_a_proxy_that_is_wrapped_again_says_so(tmp_path: Path) -> None:
    proxy = creel.wrap(Plain(tmp_path, read_all))
    assert creel.wrap(proxy) is proxy
    with pytest.raises(ConfigError, match="wrapped already"):
        creel.wrap(proxy, whole=True)


def rewritten(path: str) -> bytes:
    """Reads what it has just written."""
    with open(path, "r+b") as f:  # noqa: PTH123
        now = bytes([(f.read(1)[0] + 1) % 256])
        f.seek(0)
        f.write(now)
    return read_all(path)


def replaced(path: str) -> bytes:
    """The same by a file that takes its place."""
    new = Path(path + ".new")
    new.write_bytes(bytes([(Path(path).read_bytes()[0] + 1) % 256]) * 1000)
    new.rename(path)
    return read_all(path)


def moved(path: str) -> tuple[bytes, bool]:
    """It is elsewhere for a while."""
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
    """torch writes in C++."""
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
@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
@pytest.mark.parametrize(
    "how", [rewritten, replaced, replaced_by_keyword, moved, saved, changed_hdf5]
)
def test_a_sample_that_changes_its_file_reads_what_is_there(
    tmp_path: Path, how: Callable[[str], Any], kind: Any
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = loader(creel.wrap(Plain(tmp_path / "ours", how)), kind)
    theirs = loader(Plain(tmp_path / "theirs", how), DataLoader)
    for _ in range(4):
        assert list(ours) == list(theirs)


def odd(path: str) -> list[Any]:
    """What a file object says and refuses, and calls that are none for the cache."""
    found: list[Any] = []
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
                found += [f.name, f.mode.replace("b", ""), f.readable(), f.seekable(), f.writable()]
                f.seek(0, 2)
                found += [f.tell(), f.seek(40), f.read(50), f.readline(), f.closed]
            found.append(f.closed)
            with pytest.raises(ValueError, match="closed file"):
                f.read()
        except Exception as e:  # noqa: BLE001, PERF203
            found += [type(e), str(e)]
    return found


@pytest.mark.usefixtures("daemon")
def test_arguments_and_refusals_are_pythons(tmp_path: Path) -> None:
    bare = Plain(tmp_path, odd)
    ours, theirs = loader(creel.wrap(bare)), loader(bare, DataLoader)
    for _ in range(3):
        for batch, expected in zip(ours, theirs, strict=True):
            for found, wanted in zip(batch, expected, strict=True):
                assert [x for x, y in zip(found, wanted, strict=True) if x != y] == []
