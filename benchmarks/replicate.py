"""Ranks of one group that read the same batches: each with its own workers, or one rank's for all.

    python benchmarks/replicate.py [--ranks 4] [--workers 1] [--rounds 3]

Ways: torch's DataLoader and creel's in each rank with `--workers` each, and creel's with
`replicate` and as many workers as the ranks had together, at most one per core. Samples are JPEG
images of 500 x 375 (decoded, cropped to 224, batches of 64: 9.6 MB as bytes), or plain tensors of
0.6 MB (38 MB per batch), which cost no more than the copy into the batch. The figures are batches
per second of each rank in an epoch after the first, and how often each sample is made.
"""

from __future__ import annotations

import argparse
import io
import math
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measure import median, report
from PIL import Image
from torch.utils.data import DataLoader, Dataset, SequentialSampler

import creel
from creel.system.limits import cores

BATCH, BATCHES = 64, 16


class Images(Dataset[torch.Tensor]):
    """Decodes one of a few images for each sample."""

    def __init__(self, counter: Any) -> None:
        rng = np.random.default_rng(1)
        coarse = rng.integers(0, 256, (8, 24, 32, 3), np.uint8)
        self.jpegs, self.counter = [], counter
        for pixels in coarse:
            out = io.BytesIO()
            Image.fromarray(pixels).resize((500, 375)).save(out, "jpeg", quality=95)
            self.jpegs.append(out.getvalue())

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.counter:
            self.counter.value += 1
        image = Image.open(io.BytesIO(self.jpegs[index % 8])).convert("RGB")
        pixels = np.asarray(image.crop((100, 50, 324, 274)))
        return torch.from_numpy(pixels.copy())


class Tensors(Images):
    """Has tensors in memory."""

    def __init__(self, counter: Any) -> None:
        super().__init__(counter)
        self.rows = torch.rand(8, 3, 224, 224)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.counter:
            self.counter.value += 1
        return self.rows[index % 8]


def loader_of(way: str, data: Any, workers: int, ranks: int) -> Any:
    """Return a rank's loader."""
    options: dict[str, Any] = {"sampler": SequentialSampler(data), "persistent_workers": True}
    if way == "torch":
        return DataLoader(data, BATCH, num_workers=workers, **options)
    if way == "creel":
        return creel.DataLoader(data, BATCH, num_workers=workers, **options)
    shared = min(workers * ranks, math.ceil(cores()))
    return creel.DataLoader(data, BATCH, num_workers=shared, replicate=ranks, **options)


def rank_main(
    rank: int, ranks: int, way: str, data: Any, workers: int, queue: Any, at: str
) -> None:
    """Run one rank: two epochs, the second one in step with the others and timed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=ranks)
    loader = loader_of(way, data, workers, ranks)
    for _ in loader:
        pass
    dist.barrier()
    data.counter.value = 0
    dist.barrier()
    began = time.perf_counter()
    for batch in loader:
        batch.view(-1)[::4096].sum()  # reads all pages, like a copy to an accelerator
    dist.barrier()
    queue.put(time.perf_counter() - began)
    dist.destroy_process_group()


def seconds(way: str, kind: Any, ranks: int, workers: int) -> tuple[float, float]:
    """Return the seconds of the second epoch, and how often each sample was made in it."""
    context = multiprocessing.get_context("fork")
    queue, counter = context.Queue(), context.Value("q")
    data = kind(counter)
    with tempfile.TemporaryDirectory() as folder:
        at = str(Path(folder, "rendezvous"))
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, way, data, workers, queue, at))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        took = max(queue.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return took, counter.value / (BATCH * BATCHES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["CREEL_SOCKET"] = f"replicate-{os.getpid()}"
    rows: list[dict[str, object]] = []
    for kind in (Images, Tensors):
        for way in ("torch", "creel", "replicate"):
            rounds = [
                seconds(way, kind, options.ranks, options.workers) for _ in range(options.rounds)
            ]
            rate = BATCHES / median([took for took, _ in rounds])
            images = median([times for _, times in rounds])
            rows.append(
                {"data": kind.__name__, "way": way, "batches/s": round(rate, 1), "made": images}
            )
    report(rows)


if __name__ == "__main__":
    main()
