"""The first epoch over mapped files: how long training waits under torch, and under creel.

    sudo python benchmarks/maps.py [--samples 192] [--read-ms 5] [--step-ms 40] [--rounds 3]

Layouts: rows of Hugging Face's `datasets`, a `np.memmap`, Megatron's documents, and tensors of a
safetensors file (those whose library is there). Each is read once in a shuffled order, in batches
of 4, from a file system that takes `--read-ms` for each read of the kernel
(tests/testbed/slowfs.py, with the page cache, mounted anew for each way and round). A batch trains
for `--step-ms`, with 2 workers for a quarter of it: in 40 ms these read all that torch needs, and
its waits of 2 ms are those for handing a batch over. A wait is the time in `next`; the one for the
first batch, which nobody can read ahead, is also shown apart. Needs root (a FUSE mount).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import median, report, skip_without_fuse
from torch.utils.data import DataLoader, TensorDataset

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS
from testbed.tokens import write_tokens

LENGTH, BATCH = 50_000, 4  # 400 KB a sample


class Epoch(NamedTuple):
    """Seconds of the first wait and of all, reads of the source, and their bytes."""

    first_s: float
    wait_s: float
    reads: int
    nbytes: int


def write_rows(folder: Path, rows: Any) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"x": rows}).save_to_disk(folder / "hf")


def read_rows(folder: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(folder / "hf")).with_format("torch")


def write_safetensors(folder: Path, rows: Any) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.from_numpy(rows)}, folder / "x.safetensors")


def read_safetensors(folder: Path) -> Any:
    from safetensors.torch import load_file

    return TensorDataset(load_file(folder / "x.safetensors")["x"])


#: Layout: the library it needs, how it is written, and how it is opened.
LAYOUTS: dict[str, tuple[str, Callable[[Path, Any], object], Callable[[Path], Any]]] = {
    "Hugging Face rows": ("datasets", write_rows, read_rows),
    "np.memmap": (
        "numpy",
        lambda folder, rows: np.save(folder / "x.npy", rows),
        lambda folder: np.load(folder / "x.npy", mmap_mode="c"),
    ),
    "Megatron's documents": (
        "numpy",
        lambda folder, rows: write_tokens(folder / "tokens", list(rows)),
        lambda folder: creel.TokenDataset(folder / "tokens"),
    ),
    "safetensors": ("safetensors", write_safetensors, read_safetensors),
}


def epoch(loader: Any, fs: Any, step_s: float) -> Epoch:
    waits: list[float] = []
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        if next(batches, None) is None:
            totals = fs.totals()
            return Epoch(waits[0], sum(waits), totals["reads"], totals["bytes"])
        waits.append(time.perf_counter() - began)
        time.sleep(step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--read-ms", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    table: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        data, mount = Path(folder, "data"), Path(folder, "mount")
        data.mkdir()

        def cold(kind: Any, read: Callable[[Path], Any], workers: int, seed: int) -> Epoch:
            torch.manual_seed(seed)
            fs: Any = SlowFS(str(data), str(mount), page_cache=True, read_latency=o.read_ms)  # type: ignore[no-untyped-call]
            with fs:
                loader = kind(read(mount), BATCH, shuffle=True, num_workers=workers)
                result = epoch(loader, fs, o.step_ms / 1e3 / (4 if workers else 1))
                del loader  # which has files of the mount
                return result

        for layout, (library, write, read) in LAYOUTS.items():
            if importlib.util.find_spec(library) is None:
                continue
            write(data, np.arange(o.samples * LENGTH).reshape(o.samples, LENGTH))
            for workers in (0, 2):
                both = [
                    (cold(DataLoader, read, workers, i), cold(creel.DataLoader, read, workers, i))
                    for i in range(o.rounds)
                ]
                table.append(row(layout, workers, both))
    report(table)


def row(layout: str, workers: int, rounds: list[tuple[Epoch, Epoch]]) -> dict[str, object]:
    """Return medians of both ways, and of the rounds' ratios."""
    out: dict[str, object] = {"layout": layout, "workers": workers}
    for way, its in zip(("torch", "creel"), zip(*rounds, strict=True), strict=True):
        out[f"{way}: waits, s"] = round(median([turn.wait_s for turn in its]), 3)
        out[f"{way}: first, s"] = round(median([turn.first_s for turn in its]), 3)
        out[f"{way}: reads"] = round(median([turn.reads for turn in its]))
        out[f"{way}: MB"] = round(median([turn.nbytes / 1e6 for turn in its]), 1)
    out["waits, creel / torch"] = round(median([ours.wait_s / t.wait_s for t, ours in rounds]), 3)
    later = [(ours.wait_s - ours.first_s) / (t.wait_s - t.first_s) for t, ours in rounds]
    out["after the first batch"] = round(median(later), 3)
    return out


if __name__ == "__main__":
    main()
