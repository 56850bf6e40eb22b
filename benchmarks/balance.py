"""Two ranks in lockstep, one of which decodes more: what balances them, and how soon.

    python benchmarks/balance.py [--ratio 4] [--steps 60] [--rounds 3] [--sample-ms 2] [--json]

Each sample of the light rank computes for `--sample-ms` of CPU time, of the heavy rank `--ratio`
times as long; after `--steps` steps the ranks change places, for as many steps. Batches of 16. Each
step ends with an all-reduce. Ways: `own` workers, one each (cores / ranks, on 2 cores) or two, and
`workers="shared", num_workers="auto"`, twice a rank's share of the cores.

`ideal` is what all cores together need for a step's samples, or training, if it takes longer:
`.1` of what samples need, where workers are the bottleneck, or `1.2` times it. Figures are a step
in parts of that, before the change without the first 10, and after it without the first 20; within
those 20, the mean of the worst 8 in a row (`change`), and the steps until 8 take at most 1.1 times
as long as before (`again`); and the share of a step that the heavy rank waits before the change.
Medians over the rounds, in which ways take turns.

Lending between ranks, workers that make batches for any rank of the node, could bring at most what
`auto` is above 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from measure import fresh_name, median, report
from numpy.typing import NDArray
from torch.utils.data import Dataset

import creel
from creel.system.limits import cores

RANKS, BATCH = 2, 16
FIRST, SETTLED, WINDOW = 10, 20, 8  # steps
WAYS: dict[str, dict[str, Any]] = {
    "one each": {"num_workers": 1},
    "two each": {"num_workers": 2},
    "auto": {"num_workers": "auto", "workers": "shared"},
}
TRAINING = (0.1, 1.2)  # of the time that all cores need for the samples of a step


class Seen(NamedTuple):
    """What a rank measured: seconds of each step and of each wait."""

    steps: NDArray[np.float64]
    waits: NDArray[np.float64]


class Computed(Dataset[Any]):
    """Samples that compute; the second rank's take longer first, then the first rank's."""

    def __init__(self, rank: int, o: argparse.Namespace) -> None:
        light = o.sample_ms / 1e3
        self.change: int = BATCH * o.steps
        self.seconds = [light, light * o.ratio][:: 1 if rank == 0 else -1]

    def __len__(self) -> int:
        return 2 * self.change

    def __getitem__(self, i: int) -> torch.Tensor:
        until = time.thread_time() + self.seconds[i >= self.change]
        while time.thread_time() < until:
            pass
        return torch.zeros(8)


def train(rank: int, way: str, train_s: float, o: argparse.Namespace) -> Seen:
    loader = creel.DataLoader(Computed(rank, o), BATCH, **WAYS[way])
    steps, waits = [], []
    dist.barrier()
    began = time.perf_counter()
    for _ in loader:
        waits.append(time.perf_counter() - began)
        time.sleep(train_s)
        dist.all_reduce(torch.zeros(8))
        steps.append(time.perf_counter() - began)
        began += steps[-1]
    return Seen(np.array(steps), np.array(waits))


def _rank(rank: int, at: str, writer: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=RANKS)
    writer.send(train(rank, *args))
    dist.destroy_process_group()


def run(way: str, train_s: float, o: argparse.Namespace) -> list[Seen]:
    """Return what each rank measured in one job."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        at, args = str(Path(folder, "rendezvous")), (way, train_s, o)
        processes = [
            context.Process(target=_rank, args=(rank, at, pipes[rank][1], args))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()  # so that a rank that dies is noticed
        reports: list[Seen] = [reader.recv() for reader, _ in pipes]
        for process in processes:
            process.join()
    return reports


def figures(reports: list[Seen], ideal_s: float, change: int) -> dict[str, float]:
    step = reports[0].steps
    before, after = step[FIRST:change], step[change + SETTLED :]
    means = np.convolve(step[change:], np.ones(WINDOW) / WINDOW, "valid")
    again = np.flatnonzero(means <= 1.1 * before.mean())
    return {
        "before / ideal": before.mean() / ideal_s,
        "heavy waits": reports[1].waits[FIRST:change].sum() / before.sum(),
        "change / ideal": means[: SETTLED - WINDOW].max() / ideal_s,
        "after / ideal": after.mean() / ideal_s,
        "again": float(again[0]) if len(again) else np.inf,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratio", type=float, default=4)
    parser.add_argument("--steps", type=int, default=60, help="until ranks change places")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample-ms", type=float, default=2)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    supply_s = BATCH * o.sample_ms / 1e3 * (1 + o.ratio) / max(cores(), 1)
    turns: dict[tuple[float, str], list[dict[str, float]]] = {}
    with fresh_name():
        for _ in range(o.rounds):
            for part in TRAINING:
                for way in WAYS:
                    reports = run(way, part * supply_s, o)
                    turn = figures(reports, max(1.0, part) * supply_s, o.steps)
                    turns.setdefault((part, way), []).append(turn)
    rows: list[dict[str, object]] = []
    for (part, way), rounds in turns.items():
        row: dict[str, object] = {"training": part, "workers": way}
        rows.append(row | {key: round(median([r[key] for r in rounds]), 2) for key in rounds[0]})
    report(rows)


if __name__ == "__main__":
    main()
