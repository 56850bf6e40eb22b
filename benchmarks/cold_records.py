"""Records of one file on a cold local disk, epoch by epoch: RecordDataset against np.memmap.

    sudo python benchmarks/cold_records.py [--nbytes 4096] [--records 600000] [--batch 256]
                                           [--workers 0 2] [--rounds 3]

The kernel's caches are dropped before the first epoch of each way, which needs root; memory is
enough for all records. torch's way is a dataset over `np.memmap`, for whose page faults the kernel
reads 128 KiB around each record. The figures are samples per second of the first epoch and of the
second (torch's from the page cache), and their ratios to torch's. Every round makes new loaders,
and a daemon that starts with its loader.
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
from measure import DROP_CACHES, drop_caches, epoch_columns, fresh_name, report, skip_unless
from torch.utils.data import DataLoader, Dataset

import creel

EPOCHS = 2


class Memmap(Dataset[torch.Tensor]):
    def __init__(self, path: str, nbytes: int) -> None:
        self.rows = np.memmap(path, np.uint8, "r").reshape(-1, nbytes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index]))


WAYS: dict[str, Any] = {
    "torch, np.memmap": lambda path, nbytes, **k: DataLoader(Memmap(path, nbytes), **k),
    "creel.RecordDataset": lambda path, nbytes, **k: creel.DataLoader(
        creel.RecordDataset(path, dtype="uint8", shape=nbytes), **k
    ),
    "np.memmap, creel.wrap": lambda path, nbytes, **k: creel.DataLoader(
        creel.wrap(Memmap(path, nbytes)), **k
    ),
}


def epochs(way: str, path: str, workers: int, o: argparse.Namespace) -> list[float]:
    """Return the seconds of each epoch."""
    drop_caches()
    with fresh_name():
        options = {"batch_size": o.batch, "shuffle": True, "num_workers": workers}
        loader = WAYS[way](path, o.nbytes, **options)
        out = []
        for _ in range(EPOCHS):
            began = time.perf_counter()
            for _ in loader:
                pass
            out.append(time.perf_counter() - began)
        del loader
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nbytes", type=int, default=4096)
    parser.add_argument("--records", type=int, default=600_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_unless(os.access(DROP_CACHES, os.W_OK), "root, to drop the kernel's caches")
    os.environ.setdefault("CREEL_MEMORY__BUDGET", f"{(o.records * o.nbytes >> 19) + 256}MiB")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        path = f"{root}/records"
        with Path(path).open("wb") as file:
            file.writelines(os.urandom(o.nbytes) for _ in range(o.records))
        for workers in o.workers:
            runs = [{w: epochs(w, path, workers, o) for w in WAYS} for _ in range(o.rounds)]
            seconds = {way: [run[way] for run in runs] for way in WAYS}
            torchs = next(iter(seconds.values()))
            for way, its in seconds.items():
                columns = epoch_columns(o.records, torchs, its)
                rows.append({"way": way, "workers": workers, **columns})
    report(rows)


if __name__ == "__main__":
    main()
