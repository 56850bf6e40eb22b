"""Cost of a batch of samples with a transform: creel's ways and torch over np.memmap, in turn.

    python benchmarks/transforms.py [--records 40000] [--batch 64] [--rounds 5] [--workers 0 2]
        [--json]

Rows of 4 KB (1,024 int32, or 2,048 uint16), shuffled, turned into int64. `memmap` is torch's loader
over a dataset of one np.memmap that copies a row and casts it with torch; that of `numpy memmap`
casts with numpy, which also copies it. Both with `num_workers=0` and 2 (`x2`). creel's ways are
`transform` (the cast by torch, or `numpy transform`), `to` and `batch_transform` of RecordDataset,
with and without workers, through a daemon that holds all records. `torchs` is torch's own loader
over the RecordDataset, without a daemon. All read from memory: the page cache or the arena. CPU is
that of the whole process tree. `quick` is the CPU of the trainer's thread for the quickest tenth of
its batches: what a batch takes when no other process takes caches and cores away.
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
from measure import Round, measured, median, report
from torch.utils.data import DataLoader, Dataset

import creel

PEERS = ("memmap", "memmap x2", "numpy memmap", "numpy memmap x2")
KINDS = {"1,024 int32": (np.int32, 1024), "2,048 uint16": (np.uint16, 2048)}


class Mapped(Dataset[torch.Tensor]):
    """A dataset as torch users write it."""

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self.rows = np.memmap(path, dtype, mode="r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return widened(torch.from_numpy(np.array(self.rows[index])))


class MappedNumpy(Mapped):
    """The same, cast by numpy."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))


def widened(row: torch.Tensor) -> torch.Tensor:
    return row.to(torch.int64)


def widened_by_numpy(row: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(row.numpy().astype(np.int64))


def loaders(path: Path, dtype: Any, length: int, batch: int) -> dict[str, DataLoader[Any]]:
    """Return loaders by way; the first four are the peers."""

    def ours(**more: Any) -> creel.RecordDataset:
        return creel.RecordDataset(path, dtype, length, **more)

    def with_creel(workers: int, **more: Any) -> DataLoader[Any]:
        return creel.DataLoader(ours(**more), batch, shuffle=True, num_workers=workers)

    def with_torch(dataset: Dataset[torch.Tensor], workers: int) -> DataLoader[Any]:
        return DataLoader(dataset, batch, shuffle=True, num_workers=workers)

    mapped, by_numpy = Mapped(path, dtype, length), MappedNumpy(path, dtype, length)
    return {
        "memmap": with_torch(mapped, 0),
        "memmap x2": with_torch(mapped, 2),
        "numpy memmap": with_torch(by_numpy, 0),
        "numpy memmap x2": with_torch(by_numpy, 2),
        "transform": with_creel(0, transform=widened),
        "transform x2": with_creel(2, transform=widened),
        "numpy transform": with_creel(0, transform=widened_by_numpy),
        "numpy transform x2": with_creel(2, transform=widened_by_numpy),
        "to": with_creel(0, to=torch.int64),
        "to x2": with_creel(2, to=torch.int64),
        "batch_transform": with_creel(0, batch_transform=widened),
        "batch_transform x2": with_creel(2, batch_transform=widened),
        "torchs": with_torch(ours(transform=widened), 0),
        "numpy torchs": with_torch(ours(transform=widened_by_numpy), 0),
        "torchs, to": with_torch(ours(to=torch.int64), 0),
    }


def compare(kind: str, ways: dict[str, DataLoader[Any]], rounds: int) -> list[dict[str, object]]:
    """Return a row per way: us per batch, and ratios of the peers' time to its own, by round."""
    peers = [peer for peer in PEERS if peer in ways]
    runs: dict[str, list[Round]] = {way: [] for way in ways}
    quick_ns: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, loader in ways.items():
            into, spent_ns = Round(), [time.thread_time_ns()]
            with measured(into):
                spent_ns.extend(time.thread_time_ns() for _ in loader)
            into.batches = len(spent_ns) - 1
            if number:  # the first fills the arena
                runs[way].append(into)
                quick_ns[way].append(float(np.percentile(np.diff(spent_ns), 10)))
    out: list[dict[str, object]] = []
    for way, mine in runs.items():
        row: dict[str, object] = {"kind": kind, "way": way}
        for figure in ("wall", "cpu"):
            own = [getattr(r, f"{figure}_s") for r in mine]
            row[f"{figure}, us"] = round(1e6 * median(own) / mine[0].batches, 1)
            for peer in peers:
                theirs = [getattr(r, f"{figure}_s") for r in runs[peer]]
                ratios = [p / max(m, 1e-9) for p, m in zip(theirs, own, strict=True)]
                row[f"{peer} / it, {figure}"] = round(median(ratios), 2)
        row["quick, us"] = round(median(quick_ns[way]) / 1e3, 1)
        for peer in peers:
            pairs = zip(quick_ns[peer], quick_ns[way], strict=True)
            row[f"{peer} / it, quick"] = round(median([p / m for p, m in pairs]), 2)
        out.append(row)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], choices=[0, 2])
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    os.environ["CREEL_SOCKET"] = f"transforms-{os.getpid()}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (dtype, length) in KINDS.items():
            path = Path(folder) / f"{length}.bin"
            rng = np.random.default_rng(0)
            rng.integers(0, 50_000, (o.records, length)).astype(dtype).tofile(path)
            ways = loaders(path, dtype, length, o.batch)
            some = {way: loader for way, loader in ways.items() if loader.num_workers in o.workers}
            rows += compare(kind, some, o.rounds)
    report(rows)


if __name__ == "__main__":
    main()
