"""Rehearsal (`rehearsal=`): what a step costs with it, against recipes of torch; storage reads.

    python benchmarks/rehearsal.py [--images 512] [--rounds 5] [--batches 40] [--only PART ...]
        [--json]

JPEGs of 224 x 224 pixels, decoded by PIL, 2 workers; batches of 32 new samples and 32 of a memory.

`step`: training takes 20 ms without rehearsal, and (b + r) / b times as long with it. Both loaders
read in turn an epoch of `--batches`. `step / scaled` is a step with rehearsal against the step
without it times (b + r) / b, and `p99 wait` the longest of 99 % of the waits after an epoch's
first, which has its own figure; all files are resident in the daemon (`loader.direct = "never"`).

`speed`: samples/s of epochs that train at once, by torch's loader over `memory.over(...)`, and by
the recipe of two torch loaders, one over the task and one over the memory with a RandomSampler,
which is begun again when it ends (`again`), or draws as often as the task needs (`drawn`); each of
them has 2 workers. `creel` has no settings, so that its workers read files that lie in the page
cache, as torch's do; `resident` reads them from the daemon. Ratios are medians over the rounds,
creel's speed against the other's. `small` is a memory of 100 samples, `large` one of as many as the
task.

`composing`: what the memory's rows cost for each step of a batch sampler, in microseconds of
its thread; the goal is 50 + .3 for each row of all ranks.

`reads`: what a daemon reads from storage in a whole job of four tasks, three epochs each, against
the files there are; torch reads `by torch` times that. Tasks are Subsets of one dataset, or folders
of their own. Memory holds all files, or .7 of them, where .58 may still be needed.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import fresh_name, median, report, skip_unless
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
)

import creel

try:
    from PIL import Image
except ImportError:
    skip_unless(False, "Pillow")

NEW = OLD = 32  # samples of a batch
STEP_S = 0.02
WORKERS = 2
GOALS = {
    "step / scaled": "<= 1.02",
    "with, p99 wait ms": "<= 1",
    "creel / again": ">= 1.5",
    "reads / files": "1.00",
}
RESIDENT = {"loader.direct": "never"}


def write(folder: Path, images: int) -> list[str]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = [folder / f"{i:05}.jpg" for i in range(images)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8))
        coarse.resize((224, 224), Image.Resampling.BICUBIC).save(path, quality=90)
    return [str(path) for path in paths]


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))


class Files(Dataset[torch.Tensor]):
    """A dataset as torch users write it."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return decode(Path(self.paths[index]).read_bytes())


def memory_of(dataset: Dataset[Any], rows: int | None = None) -> creel.Rehearsal:
    memory = creel.Rehearsal(OLD, budget=rows)
    memory.add(dataset)
    return memory


def mine(paths: list[str]) -> creel.FileDataset:
    return creel.FileDataset(paths, decode=decode)


# --- the time of a step -------------------------------------------------------------------------


def steps(loader: Any, train_s: float) -> tuple[float, list[float]]:
    """Return the seconds of a step after the first, and what each waited for its batch."""
    batches, waits = iter(loader), []
    began = first = time.perf_counter()
    while next(batches, None) is not None:
        waits.append(time.perf_counter() - began)
        time.sleep(train_s)
        began = time.perf_counter()
        first = first if len(waits) > 1 else began
    return (began - first) / (len(waits) - 1), waits


def step_row(old: list[str], new: list[str], o: argparse.Namespace) -> dict[str, object]:
    scale = (NEW + OLD) / NEW
    task = mine(new[: NEW * o.batches])
    options: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS, "creel": RESIDENT}
    loaders = {
        "without": (creel.DataLoader(task, NEW, **options), STEP_S),
        "with": (
            creel.DataLoader(task, NEW, **options, rehearsal=memory_of(mine(old))),
            STEP_S * scale,
        ),
    }
    rounds = [{way: steps(*loader) for way, loader in loaders.items()} for _ in range(o.rounds + 1)]
    del rounds[0]  # reads from storage
    row: dict[str, object] = {"part": "step"}
    for way in loaders:
        waits = np.concatenate([turn[way][1][1:] for turn in rounds])
        row[f"{way}, ms"] = round(1e3 * median([turn[way][0] for turn in rounds]), 2)
        row[f"{way}, p99 wait ms"] = round(1e3 * float(np.quantile(waits, 0.99)), 2)
        row[f"{way}, first ms"] = round(1e3 * median([turn[way][1][0] for turn in rounds]), 1)
    ratios = [turn["with"][0] / (scale * turn["without"][0]) for turn in rounds]
    return row | {"step / scaled": round(median(ratios), 3)}


# --- against recipes ----------------------------------------------------------------------------


def again(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def two_loaders(task: Any, kept: Any, *, begun_again: bool) -> Iterator[Any]:
    """Yield batches as most continual learning code makes them: of one loader each, joined."""
    new = DataLoader(task, NEW, shuffle=True, num_workers=WORKERS)
    drawn = None if begun_again else len(new) * OLD
    sampler = RandomSampler(kept, replacement=drawn is not None, num_samples=drawn)
    old = DataLoader(kept, OLD, sampler=sampler, num_workers=WORKERS, drop_last=begun_again)
    for batch, other in zip(new, again(old) if begun_again else old, strict=False):
        yield torch.cat([batch, other])


def speed_row(name: str, old: list[str], new: list[str], rounds: int) -> dict[str, object]:
    task, kept = Files(new), Files(old)
    data, batches = memory_of(kept).over(task, RandomSampler(task), NEW)
    rehearsing: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS}
    rehearsing |= {"rehearsal": memory_of(mine(old))}
    ours = creel.DataLoader(mine(new), NEW, **rehearsing)
    copied = creel.DataLoader(mine(new), NEW, **rehearsing, creel=RESIDENT)
    plain = DataLoader(data, batch_sampler=batches, num_workers=WORKERS)
    turns: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        ways = {
            "again": two_loaders(task, kept, begun_again=True),
            "drawn": two_loaders(task, kept, begun_again=False),
            "torch over": plain,
            "creel": ours,
            "resident": copied,
        }
        turns.append({way: speed(loader) for way, loader in ways.items()})
    del turns[0]  # reads from storage
    row: dict[str, object] = {"part": f"speed, {name}"}
    for way in turns[0]:
        row[f"{way}, samples/s"] = round(median([turn[way] for turn in turns]))
    for way in ("again", "drawn", "torch over"):
        row[f"creel / {way}"] = round(median([turn["creel"] / turn[way] for turn in turns]), 2)
    return row


def speed(batches: Any) -> float:
    """Return samples/s of an epoch, its start included."""
    began = time.perf_counter()
    samples = sum(len(batch) for batch in batches)
    return samples / (time.perf_counter() - began)


# --- composing ----------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Has samples that are never read here."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


def composing_row(kept: int, world: int, rounds: int) -> dict[str, object]:
    task, count = Numbers(NEW * world * 500), 500
    sampler: DistributedSampler[int] = DistributedSampler(task, world, 0)
    bare = BatchSampler(sampler, NEW, drop_last=False)
    _, joined = memory_of(Numbers(kept)).over(task, sampler, NEW)
    costs = []
    for _ in range(rounds):
        plain, both = (timed(batches) for batches in (bare, joined))
        costs.append((both - plain) / count)
    row: dict[str, object] = {"part": f"composing, {kept} rows, {world} ranks"}
    return row | {
        "us a step": round(1e6 * median(costs), 1),
        "goal": f"<= {50 + 0.3 * world * OLD:.0f}",
    }


def timed(batches: Any) -> float:
    """Return the seconds of this thread, which other programs change little."""
    began = time.thread_time()
    for _ in batches:
        pass
    return time.thread_time() - began


# --- reads of storage ---------------------------------------------------------------------------

TASKS, EACH, KEPT, EPOCHS, NBYTES = 4, 60, 80, 3, 50_000


def reads_row(folder: Path, tasks_are: str, share: float) -> dict[str, object]:
    folders = [folder / f"{tasks_are}-{share}-{number}" for number in range(TASKS)]
    for path in folders:
        path.mkdir()
        for i in range(EACH):
            (path / f"{i:03}.bin").write_bytes(bytes([i]) * NBYTES)
    time.sleep(0.1)  # a file that has just been written is read again
    parts = [creel.FileDataset(path, "*.bin", decode=len) for path in folders]
    tasks: list[Dataset[Any]] = [*parts]
    if tasks_are == "Subsets":
        paths = [str(path) for folder in folders for path in sorted(folder.glob("*.bin"))]
        whole = creel.FileDataset(paths, decode=len)
        tasks = [Subset(whole, range(at, at + EACH)) for at in range(0, TASKS * EACH, EACH)]
    memory, distinct = creel.Rehearsal(12, budget=KEPT), TASKS * EACH
    settings = RESIDENT | {"memory.budget": str(round(share * distinct * NBYTES))}
    direct = given = 0
    with fresh_name() as name:
        for task in tasks:
            loader: Any = creel.DataLoader(
                task, 12, shuffle=True, num_workers=WORKERS, rehearsal=memory, creel=settings
            )
            given += sum(len(batch) for _ in range(EPOCHS) for batch in loader)
            direct += loader.stats()["direct_reads"]
            del loader
            memory.add(task)
        reads = sum(source["reads"] for source in creel.stats(name)["sources"])
    return {
        "part": f"reads, {tasks_are}, memory for {share:g}",
        "files": distinct,
        "reads": reads + direct,
        "reads / files": round((reads + direct) / distinct, 3),
        "by torch": round(given / distinct, 1),
    }


def main() -> None:
    parts = ("step", "speed", "composing", "reads")
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=512, help="of the task of `speed`")
    parser.add_argument("--batches", type=int, default=40, help="of an epoch of `step`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    os.environ["CREEL_SOCKET"] = f"rehearsal-{os.getpid()}"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "step" in o.only or "speed" in o.only:
            old = write(folder / "old", o.images)
            new = write(folder / "new", max(o.images, NEW * o.batches))
        if "step" in o.only:
            rows.append(step_row(old, new, o))
        if "speed" in o.only:
            rows.append(speed_row("small", old[:100], new[: o.images], o.rounds))
            rows.append(speed_row("large", old, new[: o.images], o.rounds))
        if "composing" in o.only:
            cases = ((2_000, 1), (2_000, 8), (384_000, 8))
            rows += [composing_row(kept, world, o.rounds) for kept, world in cases]
        if "reads" in o.only:
            held = [(kind, share) for kind in ("Subsets", "folders") for share in (1.1, 0.7)]
            rows += [reads_row(folder, kind, share) for kind, share in held]
    report([figure for row in rows for figure in figures(row)])


def figures(row: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yield each figure of a part as a row of its own, with its goal."""
    part, goal = row.pop("part"), row.pop("goal", "")
    for name, value in row.items():
        yield {"part": part, "what": name, "value": value, "goal": goal or GOALS.get(name, "")}


if __name__ == "__main__":
    main()
