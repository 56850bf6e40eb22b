"""Files of many kinds, calls that read them, and datasets that know nothing of creel."""

from __future__ import annotations

import bz2
import ctypes
import gzip
import io
import lzma
import mmap
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import creel

N, BATCH = 6, 3
#: Bytes of a file too large, and of one small enough, to be cached if little of it is read.
NUMBERS, SMALL = 20_000, 10_000


def numbers(seed: int, n: int = NUMBERS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 30, n).astype(np.int32)


def library(name: str) -> Any:
    return pytest.importorskip(name)


def images() -> Any:
    """Return torchvision.io, if its operators are built for this torch."""
    try:
        module = library("torchvision.io")
        _ = torch.ops.image.read_file
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"torchvision's operators: {e}")
    return module


def write_npz(path: str, seed: int) -> None:
    np.savez(path, x=numbers(seed))


def write_npy(path: str, seed: int) -> None:
    np.save(path, numbers(seed))


def write_raw(path: str, seed: int) -> None:
    numbers(seed).tofile(path)


def write_little(path: str, seed: int) -> None:
    """Write a file so small that it is cached however little of it is read."""
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
    """Write a file that refers to another file and to itself, by links and a virtual dataset."""
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
    """Read in ways that are refused or not served."""
    h5py, values = library("h5py"), []
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
                values += [f["x"][:].sum(), f.driver]
        except Exception as e:  # noqa: BLE001, PERF203
            values += [type(e), str(e)]
    return values


def write_odd_hdf5(path: str, seed: int) -> None:
    write_hdf5(path, seed)
    Path(path + ".text").write_text("no HDF5")


def read_fileio(path: str) -> bytes:
    with io.FileIO(path) as f:
        return f.read()


def read_in_c(path: str) -> bytes:
    """Read a file as a C library does."""
    libc = ctypes.CDLL(None)
    fd = libc.open(path.encode(), os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


Write: TypeAlias = Callable[[str, int], None]
Read: TypeAlias = Callable[[str], Any]
#: name -> (suffix, function to write, function to read, whether the cache serves it)
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
    """A dataset as users write it: it knows nothing of creel."""

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


def loader(dataset: Any, kind: Any = creel.DataLoader, workers: int = 0, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    more |= {"collate_fn": list, "generator": generator, "num_workers": workers}
    return kind(dataset, BATCH, True, **more)


def read_directly(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def by_torchvision(path: str) -> Any:
    return sys.modules["torchvision.io"].read_image(path)


class Plain(Dataset[Any]):
    """Reads by a function of the test."""

    def __init__(self, folder: Path, read: Callable[[str], Any] = read_all) -> None:
        self.paths = [str(folder / f"{i}.bin") for i in range(N)]
        for i, path in enumerate(self.paths):
            numbers(i, SMALL).tofile(path)
        self.read = read

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.read(self.paths[i])
