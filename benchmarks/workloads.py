"""The data of `cost_per_batch.py` and `two_commits.py`, as torch users and as creel read it.

Only creel's public names are used, so that older trees run the same code.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import creel


class MappedRecords(Dataset[torch.Tensor]):
    """A dataset of fixed-size records as torch users write it: one np.memmap."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any) -> None:
        self.rows = np.memmap(path, dtype, mode="r").reshape(-1, *shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index]))


class Files(Dataset[Any]):
    """A dataset of files as torch users write it: open, read, decode."""

    def __init__(self, paths: list[str], decode: Callable[[bytes], Any]) -> None:
        self.paths, self.decode = paths, decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as f:  # noqa: PTH123  (a Path per sample costs, and users have none)
            return self.decode(f.read())


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def same(data: bytes) -> bytes:
    return data


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def pil(data: bytes) -> torch.Tensor:
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def simplejpeg(data: bytes) -> torch.Tensor:
    from simplejpeg import decode_jpeg

    return torch.from_numpy(decode_jpeg(data))


@dataclass
class Workload:
    """The same data as torch's dataset and as creel's, and the loader's arguments."""

    theirs: MappedRecords | Files
    ours: Dataset[Any]
    batch: int
    collate: Callable[[list[Any]], Any] | None = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the DataLoader's arguments besides the dataset: shuffled, two workers."""
        given: dict[str, Any] = {"batch_size": self.batch, "shuffle": True, "num_workers": 2}
        if self.collate is not None:
            given["collate_fn"] = self.collate
        return given | more


def records(folder: Path, nbytes: int, count: int, batch: int) -> Workload:
    path = folder / f"records{nbytes}.bin"
    if not path.exists():
        np.random.default_rng(0).integers(0, 256, nbytes * count, np.uint8).tofile(path)
    theirs = MappedRecords(path, (nbytes,), np.uint8)
    return Workload(theirs, creel.RecordDataset(path, torch.uint8, (nbytes,)), batch)


def files(folder: Path, nbytes: int, count: int) -> list[str]:
    home = folder / f"files{nbytes}"
    home.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        if not (home / f"{i:06}.bin").exists():
            (home / f"{i:06}.bin").write_bytes(rng.bytes(nbytes))
    return sorted(str(p) for p in home.iterdir())


def raw(folder: Path, nbytes: int, count: int, batch: int) -> Workload:
    paths = files(folder, nbytes, count)
    sizes = [nbytes] * count
    return Workload(Files(paths, tensor_of), creel.FileDataset(paths, nbytes=sizes), batch)


def jpegs(folder: Path, count: int) -> list[str]:
    """Write JPEG files of about 110 KB, 500 x 375, cut from a photograph; return their paths."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    home = folder / "jpegs"
    home.mkdir(exist_ok=True)
    photos = load_sample_images().images
    rng = np.random.default_rng(0)
    for i in range(count):
        path = home / f"{i:05}.jpg"
        if not path.exists():
            y, x = int(rng.integers(0, 427 - 375)), int(rng.integers(0, 640 - 500))
            crop = photos[i % 2][y : y + 375, x : x + 500]
            Image.fromarray(crop).save(path, quality=97)
    return sorted(str(p) for p in home.iterdir())


def jpeg(folder: Path, count: int, decode: Callable[[bytes], Any], batch: int = 64) -> Workload:
    paths = jpegs(folder, count)
    collate = as_list if decode is same else None
    return Workload(Files(paths, decode), creel.FileDataset(paths, decode=decode), batch, collate)


WORKLOADS: dict[str, Callable[[Path], Workload]] = {
    "records 3 KB x 64": lambda d: records(d, 3072, 60_000, 64),
    "records 3 KB x 256": lambda d: records(d, 3072, 60_000, 256),
    "tokens 8 KB x 64": lambda d: records(d, 8192, 40_000, 64),
    "tokens 8 KB x 256": lambda d: records(d, 8192, 40_000, 256),
    "files 150 KB x 256": lambda d: raw(d, 150_528, 5_120, 256),
    "files 1 MB x 64": lambda d: raw(d, 1_000_000, 1_024, 64),
    "jpeg bytes x 64": lambda d: jpeg(d, 2_560, same),
    "jpeg PIL x 64": lambda d: jpeg(d, 1_280, pil),
    "jpeg simplejpeg x 64": lambda d: jpeg(d, 1_280, simplejpeg),
}
