"""Workers that share their work (`workers="shared"`) against workers of their own, in turn.

    python benchmarks/shared.py [--rounds 7] [--only NAME ...] [--json]

`heavy` samples sleep, so that cores do not limit: lognormal times of 20 ms in the mean (x64: 5),
whose standard deviation is twice that (video, 3-D, detection). Training takes each batch at once.
`short` is the same in epochs of 10 batches, `even` has equal times of 5 ms. `copied` samples of 150
KB take no time but a copy, in 2 workers: what the socket costs. `JPEG` decodes 500 x 375 pixels
with Pillow and cuts 224 x 224 of them, in 2 workers. Figures are ms until the first batch of an
epoch, whose workers have started before, and batches/s of the whole epoch; `ideal` is the share of
what all workers together could make. Ratios are medians over the rounds, `shared` against `own`,
both with seeds per sample.
"""

from __future__ import annotations

import argparse
import io
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import median, report, skip_unless
from torch.utils.data import Dataset

import creel

try:
    from PIL import Image
except ImportError:
    skip_unless(False, "Pillow")


class Case(NamedTuple):
    """Samples that sleep `mean_s` with a coefficient of variation `cv`, in batches."""

    mean_s: float
    cv: float
    batch: int
    batches: int
    workers: int
    nbytes: int = 64
    decodes: bool = False


CASES = {
    "heavy x4": Case(0.02, 2, 4, 100, 8),
    "heavy x8": Case(0.02, 2, 8, 50, 8),
    "heavy x64": Case(0.005, 2, 64, 40, 8),
    "short x8": Case(0.02, 2, 8, 10, 8),
    "even x8": Case(0.005, 0, 8, 100, 8),
    "copied x64": Case(0, 0, 64, 200, 2, 150_000),
    "JPEG x64": Case(0, 0, 64, 20, 2, decodes=True),
}


class Sleeping(Dataset[Any]):
    """Each sample has a time of its own, the same in all epochs."""

    def __init__(self, case: Case) -> None:
        sigma2 = np.log1p(case.cv**2)
        drawn = np.random.default_rng(0).lognormal(-sigma2 / 2, sigma2**0.5, case.batch * 1000)
        drawn *= case.mean_s / drawn.mean()
        self.seconds = drawn[: case.batch * case.batches]
        self.bytes = torch.zeros(case.nbytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.seconds[i] > 0:
            time.sleep(self.seconds[i])
        return self.bytes


class Decoding(Sleeping):
    """Each sample is decoded from one JPEG."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
        self.file = io.BytesIO()
        Image.fromarray(noise).resize((500, 375)).save(self.file, "jpeg", quality=94)

    def __getitem__(self, i: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.file.getvalue())).convert("RGB")
        return torch.from_numpy(np.array(image.crop((i % 100, 0, i % 100 + 224, 224))))


def epoch(loader: Any) -> tuple[float, float]:
    """Return (seconds until the first batch, seconds per batch of the epoch)."""
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    count = 1 + sum(1 for _ in batches)
    return first - begin, (time.perf_counter() - begin) / count


def compare(name: str, rounds: int) -> dict[str, object]:
    case = CASES[name]
    dataset = Decoding(case) if case.decodes else Sleeping(case)
    options: dict[str, Any] = {
        "batch_size": case.batch,
        "shuffle": True,
        "num_workers": case.workers,
        "persistent_workers": True,
        "seeding": "sample",
    }
    loaders = {way: creel.DataLoader(dataset, **options, workers=way) for way in ("own", "shared")}
    turns: list[dict[str, tuple[float, float]]] = []
    for number in range(rounds + 1):
        turn = {}
        for way, loader in loaders.items():
            torch.manual_seed(number)  # the same order
            turn[way] = epoch(loader)
        turns.append(turn)
    del turns[0]  # workers start in it
    row: dict[str, object] = {"case": name}
    least = dataset.seconds.mean() * case.batch / case.workers
    for way in loaders:
        row[f"{way}, first ms"] = round(1e3 * median([turn[way][0] for turn in turns]), 1)
        row[f"{way}, batches/s"] = round(median([1 / turn[way][1] for turn in turns]), 1)
        if least:
            row[f"{way}, ideal"] = round(median([least / turn[way][1] for turn in turns]), 2)
    row["first, shared / own"] = round(median([t["shared"][0] / t["own"][0] for t in turns]), 2)
    row["speed, shared / own"] = round(median([t["own"][1] / t["shared"][1] for t in turns]), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    report([compare(name, o.rounds) for name in o.only])


if __name__ == "__main__":
    main()
