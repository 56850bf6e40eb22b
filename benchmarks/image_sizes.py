"""Cost of objects with image sizes beyond the law: bytes and reads over (1-f) of the dataset.

    python benchmarks/image_sizes.py [--objects N] [--batch B ...] [--share F ...] [--json]

Replays a job on a virtual clock with the daemon's own core. The counts are exact and the same on
every machine; only the CPU time of events depends on it. Sizes are log-normal, mean 110 KB,
deviation 100 KB; the first epoch, which reads everything, does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import report

sys.path.append(str(Path(__file__).parent.parent / "tests"))
sys.path.append(str(Path(__file__).parent.parent / "tests/sim"))
from simulate import CoreNode, Job, Replay, Started


class Timed(CoreNode):
    """A node that records the CPU time of each Progressed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.spent: list[float] = []
        super().__init__(*args, **kwargs)

    def progress(self, rank: int, done: int, wanted: int, now: float) -> list[Started]:
        start = time.thread_time()
        out = super().progress(rank, done, wanted, now)
        self.spent.append(time.thread_time() - start)
        return out


def row(n: int, batch: int, share: float, *, epochs: int, seed: int) -> dict[str, object]:
    """Replay a job of one rank; return the figures of all epochs but the first."""
    spread, rng = np.log(1 + (100 / 110) ** 2), np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(110e3) - spread / 2, np.sqrt(spread), n).astype(np.int64) + 1
    plans = [rng.permutation(n).astype(np.int32)[None] for _ in range(epochs)]
    total = int(lengths.sum())
    node = Timed(lengths, int(total * share), range(1), 1)
    out = Replay(Job(plans, batch), [node]).run()[1:]
    missing = (1 - share) * len(out)
    spent = 1e6 * np.array(node.spent)
    return {
        "batch": batch,
        "share": share,
        "bytes": round(sum(e.nbytes for e in out) / (missing * total), 4),
        "reads": round(sum(e.reads + e.direct for e in out) / (missing * n), 4),
        "worst epoch, bytes": round(max(e.nbytes for e in out) / ((1 - share) * total), 4),
        "direct": sum(e.direct for e in out),
        "event us, median": round(float(np.median(spent))),
        "event us, worst": round(float(spent.max())),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=20_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = [
        row(args.objects, batch, share, epochs=args.epochs, seed=args.seed)
        for batch in args.batch
        for share in args.share
    ]
    report(rows)


if __name__ == "__main__":
    main()
