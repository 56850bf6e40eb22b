"""A user's own Dataset of small files, epoch by epoch: creel against torch from the page cache.

    python benchmarks/own_dataset.py [--files 20000] [--nbytes 300] [--batch 64] [--rounds 3]

Ways: torch's DataLoader over a dataset that opens its files; creel's over one that reads them by
`creel.read` and declares them (`creel_uris`, `objects`); creel's over `creel.wrap` of one that
declares nothing, whose reads are recorded in epoch 1 and cached in epoch 2; torch's over the same,
which does not know the order of later reads; and both over `creel.wrap` of torch's dataset as it
is. Small files in the page cache are the worst case: creel can save only a system call or two.
Every round has new loaders, and daemons that hold nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import median, report
from torch.utils.data import DataLoader, Dataset

import creel

EPOCHS = 4


class Plain(Dataset[torch.Tensor]):
    """A dataset as users write it."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.paths[index], "rb") as f:  # noqa: PTH123  (as users do)
            return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)


class Own(Plain):
    """The same dataset with `creel.read`."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(creel.read(self.paths[index])), dtype=torch.uint8)


class Declares(Own):
    """The same dataset, which also declares what it reads."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths)
        self.creel_uris = paths

    def objects(self, index: int) -> int:
        return index


WAYS: dict[str, Any] = {
    "torch": lambda paths, **k: DataLoader(Plain(paths), **k),
    "declared": lambda paths, **k: creel.DataLoader(Declares(paths), **k),
    "learnt": lambda paths, **k: creel.DataLoader(creel.wrap(Own(paths)), **k),
    "learnt, torch's loader": lambda paths, **k: DataLoader(creel.wrap(Own(paths)), **k),
    "unedited": lambda paths, **k: creel.DataLoader(creel.wrap(Plain(paths)), **k),
    "unedited, torch's loader": lambda paths, **k: DataLoader(creel.wrap(Plain(paths)), **k),
}


def epochs(way: str, paths: list[str], batch: int, workers: int, number: int) -> list[float]:
    """Return the seconds of each epoch, with a daemon of its own that runs already."""
    os.environ["CREEL_SOCKET"] = f"own-{os.getpid()}-{number}-{list(WAYS).index(way)}"
    os.environ["CREEL_DAEMON__LINGER_S"] = "1"
    loader = WAYS[way](paths, batch_size=batch, shuffle=True, num_workers=workers)
    time.sleep(0.5)  # users take longer before the first batch
    seconds = []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - began)
    return seconds


def rows(paths: list[str], batch: int, workers: int, rounds: int) -> list[dict[str, object]]:
    """Return a row per way: seconds of its first epochs, and the ratios to torch's."""
    runs = [{way: epochs(way, paths, batch, workers, i) for way in WAYS} for i in range(rounds)]
    out: list[dict[str, object]] = []
    for way in WAYS:
        row: dict[str, object] = {"workers": workers, "way": way}
        for e in range(EPOCHS):
            row[f"epoch {e + 1}, s"] = round(median([run[way][e] for run in runs]), 2)
        for e in range(EPOCHS):
            ratio = median([run["torch"][e] / run[way][e] for run in runs])
            row[f"torch / it, {e + 1}"] = round(ratio, 2)
        out.append(row)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--nbytes", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{i:07}.bin" for i in range(o.files)]
        for path in paths:
            Path(path).write_bytes(rng.bytes(o.nbytes))
        report([row for workers in (0, 2) for row in rows(paths, o.batch, workers, o.rounds)])


if __name__ == "__main__":
    main()
