"""Batches on a GPU: `pin_memory=True` and `batch.to("cuda", non_blocking=True)`, creel and torch.

    python benchmarks/pinned.py [WORKLOAD ...] [--workers N] [--rounds N] [--step-ms MS] [--ahead]
        [--persistent] [--json]

The data are those of `cost_per_batch.py`, in memory for both, and `images`: raw bytes that workers
make a float32 tensor of. The loop only copies each batch to the device; an epoch ends when the last
copy has. With `--step-ms`, each batch then occupies the device for so long, and the loop waits for
that, as for a loss.

`ahead` is `creel.prefetch_to` over creel's loader: it copies the next batch meanwhile, out of the
workers' slots. `ahead, copied` is the same without the slots: a thread copies each batch to pinned
memory first. `torch, ahead` is `prefetch_to` over torch's loader. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import Comparison, Round, measured, report, skip_unless
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Files, Workload, files

import creel


def scaled(data: bytes) -> torch.Tensor:
    """Return a (3, 224, 224) float32 image."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, 224, 224).float().div_(255)


def images(folder: Path, batch: int) -> Workload:
    paths = files(folder, 3 * 224 * 224, 5_120)
    return Workload(Files(paths, scaled), creel.FileDataset(paths, decode=scaled), batch)


#: `jpeg bytes` have no tensors.
ON_A_DEVICE: dict[str, Callable[[Path], Workload]] = {
    **{name: of for name, of in WORKLOADS.items() if name != "jpeg bytes x 64"},
    "images x 64": lambda folder: images(folder, 64),
    "images x 256": lambda folder: images(folder, 256),
}


class Copied:
    """The batches of a loader, of which `prefetch_to` knows nothing else."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


def epochs(batches: Iterable[Any], min_s: float, step_s: float) -> Callable[[Round], None]:
    """Return a function that runs whole epochs until `min_s` have passed."""
    cycles = int(step_s * cycles_per_s()) if step_s else 0

    def way(into: Round) -> None:
        while into.wall_s < min_s:
            with measured(into):
                for batch in batches:
                    batch.to("cuda", non_blocking=True)  # nothing, if it is there
                    into.batches += 1
                    if cycles:
                        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
                        torch.cuda.current_stream().synchronize()  # as `loss.item()`
                torch.cuda.synchronize()

    return way


@cache
def cycles_per_s() -> float:
    """Return how fast the device counts in `torch.cuda._sleep`."""
    cycles = 100_000_000
    for _ in range(2):  # the first one also starts the device
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001
        torch.cuda.synchronize()
    return cycles / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=", ".join(ON_A_DEVICE))
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time of a round")
    parser.add_argument("--step-ms", type=float, default=0, help="of the device for each batch")
    parser.add_argument("--ahead", action="store_true", help="also without a step")
    parser.add_argument("--persistent", action="store_true", help="keep the workers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    skip_unless(torch.cuda.is_available(), "a CUDA device")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads or ON_A_DEVICE:
            for workers in options.workers:
                work = ON_A_DEVICE[name](Path(folder))
                kwargs = work.arguments(num_workers=workers, pin_memory=True)
                kwargs["persistent_workers"] = options.persistent and workers > 0
                theirs = DataLoader(work.theirs, **kwargs)
                ours = creel.DataLoader(work.ours, **kwargs)
                pace = options.seconds, options.step_ms / 1e3
                ways = {"torch": epochs(theirs, *pace), "creel": epochs(ours, *pace)}
                if options.step_ms or options.ahead:
                    lending = creel.DataLoader(work.ours, **kwargs)
                    ways |= {
                        "torch, ahead": epochs(creel.prefetch_to("cuda", theirs), *pace),
                        "ahead, copied": epochs(creel.prefetch_to("cuda", Copied(ours)), *pace),
                        "ahead": epochs(creel.prefetch_to("cuda", lending), *pace),
                    }
                comparison = Comparison(f"{name}, {workers} workers").run(ways, options.rounds)
                rows.append(comparison.summary())
    report(rows)


if __name__ == "__main__":
    main()
