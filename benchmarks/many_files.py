"""Many small images on a cold local disk, epoch by epoch: creel.ImageFolder against torch.

    sudo python benchmarks/many_files.py [--files 60000] [--workers 2] [--batch 256] [--rounds 3]
                                         [--raw]

One folder per class, JPEG files of 1 KB. The kernel's caches are dropped before the first epoch of
each way, which needs root. torch's way is that of torchvision's ImageFolder: `open`, PIL, a
transform; with --raw nothing is decoded, so that a sample is only a read. (The modules that a
daemon imports are read again before the clock starts, as the trainer's own are in memory.) The
figures are samples per second of the whole epoch, as ratios to torch's, and the longest time that
the loop waited for a batch. Every round makes new loaders, and a daemon that starts with its
loader; memory is enough for all files. In the first epoch the disk is slower than its readers, so
the daemon has as much in flight as it may. Later epochs are read from memory, torch's from the page
cache.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import DROP_CACHES, drop_caches, epoch_columns, fresh_name, median, report, skip_unless
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import creel

EPOCHS, CLASSES = 3, 100


def transform(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def decoded(data: bytes) -> torch.Tensor:
    return transform(Image.open(io.BytesIO(data)).convert("RGB"))


def raw(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Folder(Dataset[Any]):
    """The same as torchvision's ImageFolder."""

    def __init__(self, root: str, decode: Callable[[bytes], torch.Tensor]) -> None:
        self.decode = decode
        classes = sorted(entry.name for entry in os.scandir(root))
        self.samples = [
            (entry.path, label)
            for label, name in enumerate(classes)
            for entry in sorted(os.scandir(f"{root}/{name}"), key=lambda entry: entry.name)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as f:  # noqa: PTH123  (as torchvision does)
            return self.decode(f.read()), label


WAYS: dict[str, Any] = {
    "torch": lambda root, decode, **k: DataLoader(Folder(root, decode), **k),
    "creel.ImageFolder": lambda root, decode, **k: creel.DataLoader(
        creel.ImageFolder(root, decode=decode), **k
    ),
    "unedited, creel.wrap": lambda root, decode, **k: creel.DataLoader(
        creel.wrap(Folder(root, decode)), **k
    ),
}


def write(root: str, files: int) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(noise).save(jpeg, "JPEG")
    for label in range(CLASSES):
        Path(f"{root}/n{label:04}").mkdir()
        for i in range(label, files, CLASSES):
            Path(f"{root}/n{label:04}/{i:08}.jpeg").write_bytes(jpeg.getvalue())


def epochs(way: str, root: str, o: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of each epoch, and of the longest wait for a batch in it."""
    drop_caches()
    with fresh_name():
        options = {"batch_size": o.batch, "shuffle": True, "num_workers": o.workers}
        loader = WAYS[way](root, raw if o.raw else decoded, **options)
        out = []
        for _ in range(EPOCHS):
            began = last = time.perf_counter()
            longest = 0.0
            for _ in loader:
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            out.append((last - began, longest))
        del loader
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=60_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_unless(os.access(DROP_CACHES, os.W_OK), "root, to drop the kernel's caches")
    os.environ.setdefault("CREEL_MEMORY__BUDGET", f"{max(o.files >> 8, 256)}MiB")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        write(root, o.files)
        runs = [{w: epochs(w, root, o) for w in WAYS} for _ in range(o.rounds)]
    rows: list[dict[str, object]] = []
    seconds = {way: [[epoch[0] for epoch in run[way]] for run in runs] for way in WAYS}
    for way, its in seconds.items():
        longest_s = round(median([run[way][0][1] for run in runs]), 2)
        columns = epoch_columns(o.files, seconds["torch"], its)
        rows.append({"way": way, **columns, "longest wait in 1, s": longest_s})
    report(rows)


if __name__ == "__main__":
    main()
