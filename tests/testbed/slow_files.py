"""Files on slow storage, and a dataset that opens them without knowing of creel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import creel
from testbed.slowfs import SlowFS

N = 24
SIDE = 128  # of a picture: too large to be cached if little of it is read


def pixels(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 6), np.uint8)


def write_png(path: Path, seed: int) -> None:
    Image.fromarray(pixels(seed)[..., :3]).save(path, "png")


def write_npy(path: Path, seed: int) -> None:
    with path.open("wb") as f:
        np.save(f, pixels(seed))


def write_text(path: Path, seed: int) -> None:
    path.write_text(pixels(seed).tobytes().hex())


def write_pt(path: Path, seed: int) -> None:
    torch.save(torch.from_numpy(pixels(seed)), path)


def read_png(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image)


def read_text(path: str) -> Any:
    with open(path) as f:  # noqa: PTH123
        return np.frombuffer(bytes.fromhex(f.read()), np.uint8)


def write_h5(path: Path, seed: int) -> None:
    with pytest.importorskip("h5py").File(path, "w") as f:
        f["x"] = pixels(seed)


def read_h5(path: str) -> Any:
    with pytest.importorskip("h5py").File(path, "r") as f:
        return f["x"][:]


def write_raw(path: Path, seed: int) -> None:
    pixels(seed).tofile(path)


def write_bit(path: Path, seed: int) -> None:
    """Write a file so small that it is cached however little of it is read."""
    pixels(seed)[:50].tofile(path)


def read_raw(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def read_by_fd(path: str) -> Any:
    fd = os.open(path, os.O_RDONLY)
    try:
        return np.frombuffer(os.read(fd, os.fstat(fd).st_size), np.uint8)
    finally:
        os.close(fd)


def read_cv2(path: str) -> Any:
    return pytest.importorskip("cv2").imread(path)


def read_torchvision(path: str) -> Any:
    try:
        return pytest.importorskip("torchvision.io").read_file(path).numpy()
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"torchvision's operators: {e}")


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[str], Any]]] = {
    "npy": (write_npy, np.load),
    "png": (write_png, read_png),
    "text": (write_text, read_text),
    "h5": (write_h5, read_h5),
    "raw": (write_raw, read_raw),
    "bit": (write_bit, read_raw),
    "fd": (write_raw, read_by_fd),
    "cv2": (write_png, read_cv2),
    "torchvision": (write_png, read_torchvision),
    "pt": (write_pt, lambda path: torch.load(path).numpy()),
}


class OpaqueFiles(Dataset[Any]):
    """A dataset as users write it."""

    def __init__(self, folder: str | Path, kind: str) -> None:
        self.paths = [f"{folder}/{i}" for i in range(N)]
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(KINDS[self.kind][1](self.paths[i]).copy())


class SlowFiles:
    """A folder of files of one kind on slow storage that counts opens."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder / "data", kind
        self.folder.mkdir()
        self.fill(0)
        KINDS[kind][1](str(self.folder / "0"))  # skips the test if the library is missing
        latency = {"open_latency": 2.0, "attr_timeout": 0.0}
        self.fs = SlowFS(str(self.folder), str(folder / "mount"), **latency)  # type: ignore[no-untyped-call]

    def fill(self, generation: int) -> None:
        for i in range(N):
            KINDS[self.kind][0](self.folder / str(i), 1000 * generation + i)

    def opens(self) -> int:
        return int(self.fs.totals()["opens"])  # type: ignore[no-untyped-call]

    def loader(self, dataset: Any = None, **more: Any) -> Any:
        dataset = creel.wrap(dataset or OpaqueFiles(self.fs.mountpoint, self.kind))
        return creel.DataLoader(dataset, 4, True, generator=generator(), **more)

    def torchs(self, dataset: Any = None, **more: Any) -> Any:
        dataset = dataset or OpaqueFiles(self.folder, self.kind)
        return DataLoader(dataset, 4, True, generator=generator(), **more)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
