"""Forecasts of steps and waits (`policies/model.py`) against what came: median and 90 % of errors.

    python benchmarks/model.py [--batches 96] [--cpu] [--json]

One rank: 36 set-ups, 1, 2 or 4 workers with samples of one cost, of costs as different as images
are (coefficient of variation 1) and as videos are (2), and training that takes .5 to 2 times as
long as the workers need. Two ranks in lockstep: the second one's samples cost 1.3, 2 or 4 times as
much. Samples sleep, so that other work on the machine counts little; with `--cpu` they compute.

Each set-up trains through the public loader, and a daemon is asked for the recorded batches, as
`creel stats --why` does. Every `--batches` of them foretell the next ones. The error is that of the
step (training and wait) in parts of the step; of the wait, in parts of the wait, where it is more
than a tenth of the step. A straggler is right if the rank that then waited most is named, in
windows in which it waited 15 % of a step longer than the other.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import fresh_name, report

import creel
from creel.cli.watching.stats import connection
from creel.cli.watching.what_if import window
from creel.policies.model import RankWindow, forecast, straggler

BATCH = 8
#: Batches that are left out: workers start, and the first ones are waited for.
FIRST = 16
WORKERS = (1, 2, 4)
SAMPLES = ((0.002, 0.0), (0.002, 1.0), (0.004, 2.0))  # mean seconds, coefficient of variation
TRAINING = (0.5, 0.9, 1.1, 2.0)  # of the time that the workers need
HEAVIER = (1.3, 2.0, 4.0)
WINDOWS = 3  # in each set-up; all but the first one are foretold


class Costly:
    """A decoder whose time depends on the sample alone."""

    def __init__(self, mean_s: float, cv: float, cpu: bool) -> None:
        self.mean_s, self.cv, self.cpu = mean_s, cv, cpu

    def __call__(self, data: bytes) -> torch.Tensor:
        rng, sigma = np.random.default_rng(int(data)), np.sqrt(np.log(1 + self.cv**2))
        seconds = self.mean_s * (rng.lognormal(-(sigma**2) / 2, sigma) if self.cv else 1.0)
        if not self.cpu:
            time.sleep(seconds)
        else:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        return torch.zeros(8)


def files(folder: Path, count: int) -> list[str]:
    for i in range(count):
        (folder / f"{i:05}").write_text(str(i))
    return sorted(map(str, folder.iterdir()))


def train(
    paths: list[str], decode: Costly, workers: int, train_s: float, barrier: Any = None
) -> list[list[int]]:
    """Train for an epoch; return the recorded batches, as a daemon tells of them."""
    rank = int(os.environ.get("RANK", "0"))
    dataset = creel.FileDataset(paths, decode=decode)
    options = {
        "loader.direct": "never"
    }  # a session from the first batch on, though files are cached
    loader = creel.DataLoader(dataset, BATCH, num_workers=workers, creel=options)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
        if barrier is not None:
            barrier.wait(600)  # the all-reduce
        time.sleep(train_s)
    with connection(os.environ["CREEL_SOCKET"]) as client:
        sessions = client.ask("stats")["sessions"]
        mine = next(s["session"] for s in sessions if s["rank"] == rank and s["pid"] == os.getpid())
        rows: list[list[int]] = client.ask("batches", session=mine)["rows"]
    return rows


def windows(rows: list[list[int]], workers: int, batches: int) -> list[RankWindow]:
    """Return what a rank did in each of its windows."""
    counted = {"workers": workers, "cpu_s": 0.0, "busy_s": {"decode": 0.0, "collate": 0.0}}
    rank_windows = []
    for first in range(FIRST, len(rows) - batches, batches):
        rank_window = window(counted, rows[first : first + batches + 1])
        assert rank_window is not None
        rank_windows.append(rank_window)
    return rank_windows


def alone(o: argparse.Namespace, paths: list[str]) -> Iterable[dict[str, object]]:
    """Yield a row of each set-up of one rank."""
    for workers, (mean_s, cv), rel in itertools.product(WORKERS, SAMPLES, TRAINING):
        train_s = BATCH * mean_s / workers * rel
        rows = train(paths, Costly(mean_s, cv, o.cpu), workers, train_s)
        seen = windows(rows, workers, o.batches)
        for now, then in itertools.pairwise(seen):
            (outlook,) = forecast([now])
            yield errors(outlook.step_s, outlook.wait_s, then) | {
                "workers": workers,
                "cv": cv,
                "training": rel,
            }


def errors(step_s: float, wait_s: float, then: RankWindow) -> dict[str, object]:
    came_s, waited_s = then.seconds / then.batches, then.waited_s / then.batches
    row: dict[str, object] = {
        "foretold, ms": round(1e3 * step_s, 2),
        "came, ms": round(1e3 * came_s, 2),
        "error": abs(step_s - came_s) / came_s,
    }
    if waited_s > 0.1 * came_s:
        row["error of wait"] = abs(wait_s - waited_s) / waited_s
    return row


def _rank(rank: int, barrier: Any, writer: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "pair"}
    paths, decode, workers, train_s = args
    writer.send(train(paths, decode, workers, train_s, barrier))
    barrier.wait(600)


def pairs(o: argparse.Namespace, paths: list[str]) -> Iterable[dict[str, object]]:
    """Yield a row of each window of two ranks in lockstep."""
    context, workers, mean_s = multiprocessing.get_context("fork"), 2, 0.002
    for heavier, (late, cv), rel in itertools.product(HEAVIER, ((0, 0.0), (1, 1.0)), TRAINING[:3]):
        train_s = BATCH * mean_s * heavier / workers * rel
        costs = [mean_s * (heavier if rank == late else 1.0) for rank in (0, 1)]
        barrier, processes, readers = context.Barrier(2), [], []
        for rank, cost in enumerate(costs):
            reader, writer = context.Pipe(duplex=False)
            args = paths, Costly(cost, cv, o.cpu), workers, train_s
            process = context.Process(target=_rank, args=(rank, barrier, writer, args))
            process.start()
            processes.append(process)
            readers.append(reader)
        of_ranks = [windows(reader.recv(), workers, o.batches) for reader in readers]
        for process in processes:
            process.join()
        for now, then in itertools.pairwise(zip(*of_ranks, strict=True)):
            said = forecast(now)
            waits = [rank_window.waited_s / rank_window.batches for rank_window in then]
            step_s = max(rank_window.seconds / rank_window.batches for rank_window in then)
            behind = abs(waits[0] - waits[1]) / step_s
            row = errors(said[0].step_s, max(s.wait_s for s in said), max(then, key=_waited))
            row |= {"workers": workers, "cv": cv, "training": rel, "heavier": heavier}
            if behind >= 0.15:
                row["straggler right"] = straggler(said) == int(np.argmax(waits))
            yield row


def _waited(rank_window: RankWindow) -> float:
    return rank_window.waited_s


def summary(name: str, rows: list[dict[str, object]]) -> dict[str, object]:
    of_steps = [float(str(row["error"])) for row in rows]
    of_waits = [float(str(row["error of wait"])) for row in rows if "error of wait" in row]
    named = [bool(row["straggler right"]) for row in rows if "straggler right" in row]
    return {
        "set-ups": name,
        "windows": len(rows),
        "step, median": f"{100 * np.median(of_steps):.1f} %",
        "step, p90": f"{100 * np.quantile(of_steps, 0.9):.1f} %",
        "wait, median": f"{100 * np.median(of_waits):.1f} %",
        "of windows": len(of_waits),
        "straggler right": f"{sum(named)} of {len(named)}" if named else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=96, help="of a window")
    parser.add_argument("--cpu", action="store_true", help="samples compute, they do not sleep")
    parser.add_argument("--only", choices=["one", "two"], help="set-ups of so many ranks")
    parser.add_argument("--rows", action="store_true", help="also print each window")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, fresh_name():
        os.environ["CREEL_DAEMON__LINGER_S"] = "30"  # one daemon for all set-ups
        paths = files(Path(folder), BATCH * (FIRST + 1 + WINDOWS * o.batches))
        by_name = {
            f"{name} rank{'s' * (name == 'two')}": list(measure(o, paths))
            for name, measure in (("one", alone), ("two", pairs))
            if o.only in {None, name}
        }
    if o.rows:
        report([row for rows in by_name.values() for row in rows])
    report([summary(name, rows) for name, rows in by_name.items()])


if __name__ == "__main__":
    main()
