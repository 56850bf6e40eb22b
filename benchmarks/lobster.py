"""The three experiments of the Lobster study (ICPP 2022) at this machine's scale, beside torch.

    sudo python benchmarks/lobster.py [--small] [--rounds 3] [--json]

1. Sizes, one rank: a set as large as ImageNet-1K is to memory (which holds 60 % of it), and one as
   ImageNet-22K is to the same memory (11 times as many files, 16 % smaller: memory holds 6 %).
2. Ranks of a node, in lockstep: each adds as much data, memory and bandwidth (memory holds half).
3. Nodes, by simulation (`creel simulate`): both sets at full size, 8 ranks and 40 GB a node.

Files have the log-normal sizes of photographs, on a storage (tests/testbed/slowfs.py, which counts
opens) that gives a batch in 2.2 times the time of a training step; the kernel keeps none of their
pages, so torch reads all of them in each epoch. Decoding sleeps, so that cores do not limit. Steps
end with an all-reduce. Figures are of epochs after the first: `slowdown`, an epoch's time in parts
of training alone; `reads`, opens by sample and epoch; `uneven`, how much longer a step's last rank
waited than its first, in parts of training; and `torch / creel`, times. Medians over rounds, in
which ways take turns. Needs root (a FUSE mount).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from measure import median, report, skip_without_fuse
from numpy.typing import NDArray
from source_reads import daemon_with
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import creel
from creel.policies.cluster.simulate import Scenario, replay

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

BATCH, WORKERS, TRAIN_S, DECODE_S = 8, 2, 0.02, 0.002
MEAN, PAGE = 110_000, 4096  # bytes of a file of ImageNet-1K; an object in memory takes whole pages
BANDWIDTH = BATCH * MEAN / TRAIN_S / 2.2  # bytes a second of the storage, for each rank
FULL = {"ImageNet-1K": (1_281_167, MEAN), "ImageNet-22K": (14_197_122, 92_000)}


class Size(NamedTuple):
    """A data set: files, mean bytes, and the part that memory holds."""

    files: int
    mean: int
    held: float


class Seen(NamedTuple):
    """What a rank measured of epochs after the first: their seconds, and of each step the wait."""

    epochs: list[float]
    waits: NDArray[np.float64]


class Run(NamedTuple):
    """A job: what its ranks measured, and opens of the storage in all epochs after the first."""

    ranks: list[Seen]
    opens: int


class Plain(Dataset[Any]):
    """Files as anybody's dataset reads them."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return decode(Path(self.paths[i]).read_bytes())


def decode(data: bytes) -> torch.Tensor:
    time.sleep(DECODE_S)
    return torch.tensor([len(data)])


def write(folder: Path, size: Size) -> int:
    """Write the files; return the bytes that memory has for them."""
    rng = np.random.default_rng(0)
    shape = rng.lognormal(0, 0.5, size.files)
    nbytes = (shape / shape.mean() * size.mean).astype(np.int64)
    for i, n in enumerate(nbytes.tolist()):
        (folder / f"{i:05}").write_bytes(rng.bytes(n))
    return int(size.held * (nbytes + PAGE - nbytes % PAGE).sum())


def loader_for(way: str, mount: str, ranks: int, rank: int) -> tuple[Any, Any]:
    paths = sorted(str(path) for path in Path(mount).iterdir() if not path.name.startswith("."))
    data: Any = Plain(paths) if way == "torch" else creel.FileDataset(paths, decode=decode)
    sampler: Any = DistributedSampler(data, ranks, rank, seed=7)
    arguments = {"num_workers": WORKERS, "persistent_workers": True, "drop_last": True}
    kind: Any = DataLoader if way == "torch" else creel.DataLoader
    return kind(data, BATCH, sampler=sampler, **arguments), sampler


def train(way: str, mount: str, ranks: int, rank: int, epochs: int) -> Iterator[Seen]:
    """Train; yield what was seen after the first epoch, which is nothing yet, and at the end."""
    loader, sampler = loader_for(way, mount, ranks, rank)
    seconds, waits = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        began = at = time.perf_counter()
        for _ in loader:
            waits.append(time.perf_counter() - at)
            time.sleep(TRAIN_S)
            dist.all_reduce(torch.zeros(1))
            at = time.perf_counter()
        seconds.append(at - began)
        if epoch == 0:
            first = len(waits)
            yield Seen([], np.empty(0))
    yield Seen(seconds[1:], np.array(waits[first:]))


def _rank(rank: int, at: str, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    way, mount, ranks, epochs = args
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "CREEL_DAEMON__LINGER_S": "0"}
    dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=ranks)
    for seen in train(way, mount, ranks, rank, epochs):
        pipe.send(seen)
        pipe.recv()  # opens are counted meanwhile
    dist.destroy_process_group()


def run(way: str, data: str, nbytes: int, ranks: int, epochs: int) -> Run:
    """Run one job of so many ranks on a storage of its own."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(ranks)]
    with (
        tempfile.TemporaryDirectory() as folder,
        SlowFS(data, f"{folder}/mount", bandwidth=BANDWIDTH * ranks) as fs,  # type: ignore[no-untyped-call]
        daemon_with(nbytes),
    ):
        args = way, fs.mountpoint, ranks, epochs
        processes = [
            context.Process(target=_rank, args=(rank, f"{folder}/store", pipes[rank][1], args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that a rank that dies is noticed
        opens: list[int] = []
        for _ in range(2):
            seen: list[Seen] = [ours.recv() for ours, _ in pipes]
            opens.append(fs.totals()["opens"])
            for ours, _ in pipes:
                ours.send(None)
        for process in processes:
            process.join()
    return Run(seen, opens[1] - opens[0])


def figures(run: Run, files: int, ranks: int) -> dict[str, float]:
    """Return a round's figures of one way."""
    later = len(run.ranks[0].epochs)
    steps = files // ranks // BATCH
    epoch_s = median([max(times) for times in zip(*(r.epochs for r in run.ranks), strict=True)])
    waits = np.array([r.waits for r in run.ranks])
    return {
        "epoch_s": epoch_s,
        "slowdown": epoch_s / (steps * TRAIN_S),
        "reads": run.opens / later / (steps * BATCH * ranks),
        "uneven": float((waits.max(0) - waits.min(0)).mean() / TRAIN_S),
    }


def compared(name: str, size: Size, ranks: int, epochs: int, rounds: int) -> dict[str, object]:
    """Return the row of torch and creel, in turn, on one data set."""
    turns: dict[str, list[dict[str, float]]] = {"torch": [], "creel": []}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as data:
        nbytes = write(Path(data), size)
        for _ in range(rounds):
            for way, its in turns.items():
                its.append(figures(run(way, data, nbytes, ranks, epochs), size.files, ranks))
    row: dict[str, object] = {"experiment": name, "ranks": ranks, "memory": round(size.held, 2)}
    for key in ("slowdown", "reads", "uneven"):
        for way, its in turns.items():
            row[f"{key}, {way}"] = round(median([turn[key] for turn in its]), 2)
    pairs = zip(*turns.values(), strict=True)
    return row | {
        "torch / creel": round(median([a["epoch_s"] / b["epoch_s"] for a, b in pairs]), 2)
    }


def simulated(name: str, nodes: int, scale: int) -> dict[str, object]:
    """Return the row of a job on several nodes; torch's memory holds nothing of the data."""
    samples, nbytes = FULL[name]
    memory, batch, ranks = 40_000_000_000 // scale, 32, 8
    step_s = 0.1
    # As above: the storage gives a step's samples of 4 nodes in 2.2 times the time of a step.
    source = 4 * ranks * batch * MEAN / step_s / 2.2
    by_way = {}
    for way, held in (("torch", nbytes), ("creel", memory)):
        job = Scenario(
            nodes,
            samples // scale,
            nbytes,
            held,
            batch,
            ranks,
            epochs=3,
            link_speed=12.5e9,
            source_speed=source,
            step_s=step_s,
        )
        by_way[way] = job, list(replay(job))[-1]
    row: dict[str, object] = {"experiment": f"{name}, {nodes} nodes", "ranks": nodes * ranks}
    job, _ = by_way["creel"]
    row["memory"] = round(min(job.capacity, 1.0), 2)
    for way, (job, epoch) in by_way.items():
        row[f"slowdown, {way}"] = round(epoch.seconds / (job.steps * step_s), 2)
        row[f"reads, {way}"] = round(epoch.source, 2)
    epochs = [epoch.seconds for _, epoch in by_way.values()]
    return row | {"torch / creel": round(epochs[0] / epochs[1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a minute, to see that it runs")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    files, rounds, epochs = (64, 1, 3) if o.small else (128, o.rounds, 4)
    like = Size(files, MEAN, 0.6)
    larger = Size(11 * files, FULL["ImageNet-22K"][1], 0.6 / 11 * MEAN / FULL["ImageNet-22K"][1])
    rows = [
        compared("1K-like", like, 1, epochs, rounds),
        compared("22K-like", larger, 1, 3, rounds),
    ]
    for ranks in (2, 4):
        size = Size(files * ranks, MEAN, 0.5)
        rows.append(compared("ranks of a node", size, ranks, epochs, rounds))
    for name in FULL:
        rows += [simulated(name, nodes, 64 if o.small else 8) for nodes in (2, 4, 8)]
    report(rows)


if __name__ == "__main__":
    main()
