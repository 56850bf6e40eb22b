"""A neighbour that floods the storage, and a job that needs a share of it: what each gets.

    sudo python benchmarks/neighbour.py [--shares .1 .2] [--streams 4] [--rounds 3]

The storage is a rate-limited FUSE file system (needs root). The job reads each file once, 16 a
batch, and needs the given share of the storage's rate: each step sleeps for as long as that takes.
The neighbour, a process of its own such as a flush of a checkpoint, moves 1 MiB at a time by so
many streams for as long as the job trains. (It reads, as the file system is read-only; both share
one rate.) By loader, medians over the rounds, in turn:

`job`: the job's time over its time without a neighbour; 1.00 if it loses nothing.
`neighbour`: the neighbour's rate over its rate alone; 1 - share is what a fair job leaves it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import median, report, skip_without_fuse
from source_reads import daemon_with

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

NBYTES, BATCH, WORKERS = 100_000, 16, 2
LARGE, PIECE = 64 << 20, 1 << 20


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """The same files for torch's loader."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[i]).read_bytes()), dtype=torch.uint8)


def flood(path: str, streams: int, moved: Any, stop: Any) -> None:
    """Move bytes until `stop`; count them in `moved`."""

    def stream() -> None:
        fd = os.open(path, os.O_RDONLY)
        while not stop.is_set():
            for at in range(0, LARGE, PIECE):
                got = len(os.pread(fd, PIECE, at))
                with moved.get_lock():
                    moved.value += got
                if stop.is_set():
                    break

    threads = [threading.Thread(target=stream) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def neighbour(path: str, streams: int) -> Iterator[Any]:
    """Flood the storage in the block; yield a counter of bytes."""
    context = multiprocessing.get_context("spawn")
    moved, stop = context.Value("q", 0), context.Event()
    process = context.Process(target=flood, args=(path, streams, moved, stop))
    process.start()
    while not moved.value:
        time.sleep(0.01)
    try:
        yield moved
    finally:
        stop.set()
        process.join()


def rate_alone(path: str, streams: int, seconds: float) -> float:
    """Bytes a second of a neighbour that has the storage for itself."""
    with neighbour(path, streams) as moved:
        before, began = moved.value, time.perf_counter()
        time.sleep(seconds)
        return float(moved.value - before) / (time.perf_counter() - began)


def job_s(kind: str, mount: str, files: int, step_s: float) -> float:
    """Seconds of the job's epoch after its first batch."""
    paths = [f"{mount}/{i:06}.bin" for i in range(files)]
    generator = torch.Generator().manual_seed(0)
    more: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS, "generator": generator}
    loader: Any
    if kind == "creel":
        loader = creel.DataLoader(creel.FileDataset(paths), BATCH, **more)
    else:
        loader = torch.utils.data.DataLoader(Files(paths), BATCH, **more)
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    for _ in batches:
        time.sleep(step_s)
    return time.perf_counter() - began


def one_round(
    kind: str, share: float, data: str, mount: str, o: argparse.Namespace
) -> tuple[float, ...]:
    """Return (time over that alone, rate over that alone) of a round."""
    rate = o.rate * 1e6
    step_s = BATCH * NBYTES / (share * rate)
    taken = []
    with SlowFS(data, mount, bandwidth=rate, open_latency=1) as fs:  # type: ignore[no-untyped-call]
        large = f"{fs.mountpoint}/large.bin"
        alone = rate_alone(large, o.streams, 3)
        with daemon_with(2 * o.files * NBYTES):
            taken.append(job_s(kind, fs.mountpoint, o.files, step_s))
        with daemon_with(2 * o.files * NBYTES), neighbour(large, o.streams) as moved:
            before, began = moved.value, time.perf_counter()
            taken.append(job_s(kind, fs.mountpoint, o.files, step_s))
            beside = (moved.value - before) / (time.perf_counter() - began)
    return taken[1] / taken[0], beside / alone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.2])
    parser.add_argument("--rate", type=float, default=40, help="of the storage, MB/s")
    parser.add_argument("--streams", type=int, default=4, help="of the neighbour")
    parser.add_argument("--files", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        data, mount = Path(name) / "data", str(Path(name) / "mount")
        data.mkdir()
        for i in range(o.files):
            (data / f"{i:06}.bin").write_bytes(bytes(NBYTES))
        (data / "large.bin").write_bytes(bytes(LARGE))
        for share in o.shares:
            rounds: dict[str, list[tuple[float, ...]]] = {"creel": [], "torch": []}
            for _ in range(o.rounds):
                for kind, of_kind in rounds.items():
                    of_kind.append(one_round(kind, share, str(data), mount, o))
            rows += [
                {
                    "share": share,
                    "loader": kind,
                    "job": round(median([a for a, _ in of_kind]), 3),
                    "neighbour": round(median([b for _, b in of_kind]), 3),
                }
                for kind, of_kind in rounds.items()
            ]
    report(rows)


if __name__ == "__main__":
    main()
