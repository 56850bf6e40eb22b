"""Cost of a warm batch: wall and CPU time of the whole process tree, creel and torch in turn.

    python benchmarks/cost_per_batch.py [WORKLOAD ...] [--rounds N] [--cold] [--json]

Both read the same bytes from memory: torch from the page cache with `num_workers=2` (memory-mapped
records, or files opened one by one), creel with `num_workers=2` through the embedded daemon. The
loop does nothing with the batches. `memcpy` is numpy's gather alone, into one buffer.

--cold measures the first epoch over a warm page cache instead: the worst case for a cache that has
to be filled. `creel` makes a loader and reads from it at once, daemon start included. `served`
already has an (empty) daemon, as with creeld or after the seconds that making a model takes.
`first` is the time to the first batch, `rest` the time of each later one. Before each of these
epochs memory is touched and freed again (`measure.touch_memory`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Comparison, Round, fresh_name, measured, report, touch_memory
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Workload

import creel
from creel.config import Config
from creel.loader.client.embed import connect_or_start

#: More bytes than the largest workload and its slots take.
_ROOM_NBYTES = 2 << 30


def epochs(loader: DataLoader[Any], min_s: float) -> Callable[[Round], None]:
    """Return a function that runs whole epochs until `min_s` have passed."""

    def way(into: Round) -> None:
        while True:
            with measured(into):
                into.batches += sum(1 for _ in loader)
            if into.wall_s >= min_s:
                return

    return way


def first_epoch(make: Callable[[], DataLoader[Any]], *, served: bool) -> Callable[[Round], None]:
    """Return a function that runs an epoch of a new loader with a new, empty daemon."""

    def way(into: Round) -> None:
        with fresh_name():
            client = connect_or_start(Config.load()[0]) if served else None
            touch_memory(_ROOM_NBYTES)
            with measured(into):
                start = time.perf_counter()
                batches = iter(make())
                next(batches)
                into.first_s += time.perf_counter() - start
                into.batches += 1 + sum(1 for _ in batches)
            if client is not None:
                client.close()

    return way


def memcpy(work: Workload) -> Callable[[Round], None] | None:
    """Return a function that gathers the same rows with numpy into one buffer, on one core."""
    first = work.theirs[0]
    if work.collate is not None or not isinstance(first, torch.Tensor) or first.dim() != 1:
        return None
    count = min(len(work.theirs), 2048)
    rows = np.random.default_rng(0).integers(0, 256, (count, len(first)), dtype="uint8")
    out = np.zeros((work.batch, len(first)), np.uint8)
    ids = np.random.default_rng(1).integers(0, len(rows), (200, work.batch))

    def way(into: Round) -> None:
        with measured(into):
            for some in ids:
                np.take(rows, some, axis=0, out=out, mode="clip")
        into.batches += len(ids)

    return way


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time of a round")
    parser.add_argument("--cold", action="store_true", help="first epochs, with a new daemon each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads or WORKLOADS:
            work = WORKLOADS[name](Path(folder))
            kwargs = work.arguments()
            ways = {
                "torch": epochs(DataLoader(work.theirs, **kwargs), options.seconds),
                "creel": epochs(creel.DataLoader(work.ours, **kwargs), options.seconds),
            }
            if options.cold:
                theirs = partial(DataLoader, work.theirs, **kwargs)
                ours = partial(creel.DataLoader, work.ours, **kwargs)
                ways = {
                    "torch": first_epoch(theirs, served=False),
                    "creel": first_epoch(ours, served=False),
                    "served": first_epoch(ours, served=True),
                }
            limit = None if options.cold else memcpy(work)
            if limit is not None:
                ways["memcpy"] = limit
            rows.append(Comparison(name).run(ways, options.rounds).summary())
            report(rows[-1:]) if not options.json else None
    if options.json:
        report(rows)


if __name__ == "__main__":
    main()
