"""Batches on a GPU: `pin_memory=True` and `batch.to("cuda", non_blocking=True)`, creel and torch.

    python benchmarks/pinned.py [WORKLOAD ...] [--workers N] [--rounds N] [--json]

The data are those of `cost_per_batch.py`, in memory for both. The loop only copies each batch to
the device; an epoch ends when the last copy has. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Comparison, Round, measured, report, skip_unless
from torch.utils.data import DataLoader
from workloads import WORKLOADS

import creel

#: `jpeg bytes` have no tensors.
ON_A_DEVICE = [name for name in WORKLOADS if name != "jpeg bytes x 64"]


def epochs(loader: DataLoader[Any], min_s: float) -> Callable[[Round], None]:
    """Return a function that runs whole epochs until `min_s` have passed."""

    def way(into: Round) -> None:
        while into.wall_s < min_s:
            with measured(into):
                for batch in loader:
                    batch.to("cuda", non_blocking=True)
                    into.batches += 1
                torch.cuda.synchronize()

    return way


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=", ".join(ON_A_DEVICE))
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time of a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    skip_unless(torch.cuda.is_available(), "a CUDA device")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads or ON_A_DEVICE:
            for workers in options.workers:
                work = WORKLOADS[name](Path(folder))
                kwargs = work.arguments(num_workers=workers, pin_memory=True)
                ways = {
                    "torch": epochs(DataLoader(work.theirs, **kwargs), options.seconds),
                    "creel": epochs(creel.DataLoader(work.ours, **kwargs), options.seconds),
                }
                found = Comparison(f"{name}, {workers} workers").run(ways, options.rounds)
                rows.append(found.summary())
    report(rows)


if __name__ == "__main__":
    main()
