"""Decoded samples that are kept: torch, creel without and creel with `keep_decoded`, in turn.

    python benchmarks/decoded.py [--images 1280] [--batch 64] [--workers 2] [--rounds 5] [--json]
        [--only NAME ...]

JPEGs of 500 x 375 pixels in the page cache, shuffled. Each round reads an epoch by torch's loader
over a plain dataset, one by creel without keeping, and two by creel with a new store: the first
epoch fills it, the second copies from it. Figures are samples/s, and medians of the ratios of each
round: `later / torch` and `later / creel`, and what filling costs, `first / creel`; of wall time,
and of the CPU time of the whole process tree.

`full` decodes 500 x 375 (562 KB), `256` also resizes to 256 x 256 (196 KB); `crop` cuts and resizes
to 224 x 224 and flips at random, `bare` only makes a tensor. `kept` is `creel.kept` around the
dataset that torch reads.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Round, measured, median, report, skip_unless, touch_memory
from torch.utils.data import DataLoader, Dataset

import creel
from creel.loader.data.datasets import Transformed

try:
    from PIL import Image
except ImportError:
    skip_unless(False, "Pillow")

LIMIT = "4GiB"
MOST_NBYTES = 600_000  # of a decoded image


def write(folder: Path, images: int) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [folder / f"{i:05}.jpg" for i in range(images)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = (pixels + rng.integers(-14, 15, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(path, quality=94)
    return [str(path) for path in paths]


def full(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def small(data: bytes) -> Any:
    return full(data).resize((256, 256), Image.Resampling.BILINEAR)


def crop(image: Any) -> torch.Tensor:
    """Cut 150 x 150 pixels at random, and flip them half of the time."""
    width, height = image.size
    x, y = np.random.randint(width - 150), np.random.randint(height - 150)  # noqa: NPY002
    cut = image.resize((224, 224), Image.Resampling.BILINEAR, box=(x, y, x + 150, y + 150))
    if np.random.rand() < 0.5:  # noqa: NPY002  torch seeds this generator in workers
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous()


def bare(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


class Files(Dataset[Any]):
    """A dataset as torch users write it."""

    def __init__(self, paths: list[str], decode: Callable[[bytes], Any], transform: Any) -> None:
        self.paths, self.decode, self.transform = paths, decode, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        sample = self.decode(Path(self.paths[index]).read_bytes())
        return sample if self.transform is None else self.transform(sample)


def kept_files(paths: list[str], decode: Any, transform: Any) -> Dataset[Any]:
    return creel.FileDataset(paths, decode=decode, transform=transform, keep_decoded=LIMIT)


def kept_any(paths: list[str], decode: Any, transform: Any) -> Dataset[Any]:
    return Transformed(creel.kept(Files(paths, decode, None), LIMIT), transform)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "256, crop": (small, crop, kept_files),
    "full, crop": (full, crop, kept_files),
    "256, bare": (small, bare, kept_files),
    "256, crop, kept": (small, crop, kept_any),
}


def epoch(loader: DataLoader[Any]) -> Round:
    into = Round()
    with measured(into):
        into.batches = sum(1 for _ in loader)
    return into


def compare(name: str, paths: list[str], o: argparse.Namespace) -> dict[str, object]:
    decode, transform, keeping = CASES[name]
    options: dict[str, Any] = {
        "batch_size": o.batch,
        "shuffle": True,
        "num_workers": o.workers,
    }
    theirs = DataLoader(Files(paths, decode, transform), **options)
    plain = creel.FileDataset(paths, decode=decode, transform=transform)
    ours = creel.DataLoader(plain, **options)
    touch_memory(2 * len(paths) * MOST_NBYTES)  # the last store's is not free at once
    epoch(theirs)
    epoch(ours)
    rounds: list[dict[str, Round]] = []
    for _ in range(o.rounds):
        kept = creel.DataLoader(keeping(paths, decode, transform), **options)
        ways = {"torch": theirs, "creel": ours, "first": kept, "later": kept}
        rounds.append({way: epoch(loader) for way, loader in ways.items()})
        del kept
    row: dict[str, object] = {"case": name}
    for way in rounds[0]:
        row[f"{way}, /s"] = round(median([len(paths) / r[way].wall_s for r in rounds]))
    for way, peer in (("later", "torch"), ("later", "creel"), ("first", "creel")):
        for figure in ("wall", "cpu"):
            both = [
                (getattr(r[peer], f"{figure}_s"), getattr(r[way], f"{figure}_s")) for r in rounds
            ]
            row[f"{way} / {peer}, {figure}"] = round(median([p / w for p, w in both]), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    os.environ["CREEL_SOCKET"] = f"decoded-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), o.images)
        report([compare(name, paths, o) for name in o.only])


if __name__ == "__main__":
    main()
