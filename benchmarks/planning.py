"""What foresight costs: the first batches of a huge epoch, a batch, a plan and a step of the core.

    python benchmarks/planning.py [--rounds N] [--json]

Best of `rounds`, in this process alone. The tests keep what these figures come from (so many draws,
nothing that grows with the dataset), never the figures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import report
from torch import Generator
from torch.utils.data import DataLoader, DistributedSampler

from creel.cache.space import Lengths, Space
from creel.daemon.core import Core
from creel.daemon.events import Extended, Fetch, Fetched, Opened, Progressed, Registered
from creel.loader.samplers import observe
from creel.policies import plan

HUGE, IMAGENET, BATCH = 14_200_000, 1_281_167, 256


def seconds(call: Callable[[], object]) -> float:
    """Of one call, with the garbage of others collected before."""
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def loader(n: int, kind: str) -> DataLoader[Any]:
    data: Any = range(n)
    every: dict[str, dict[str, Any]] = {
        "seeded": {"shuffle": True},
        "generator": {"shuffle": True, "generator": Generator().manual_seed(1)},
        "distributed": {"sampler": DistributedSampler(data, 8, 3)},
    }
    return DataLoader(data, batch_size=BATCH, **every[kind])


def first_batches_s(kind: str) -> float:
    """From `observe` to the eighth batch; the thread that draws the whole is waited for after."""
    order: Any = None

    def begin() -> None:
        nonlocal order
        order = observe(some)
        for _ in range(8):
            next(order)

    some = loader(HUGE, kind)
    took = seconds(begin)
    order.predict(0).indices  # noqa: B018  (or the next round would share the machine with it)
    return took


def batch_s() -> float:
    """Mean of an epoch's batches but the first."""
    order = observe(loader(IMAGENET, "seeded"))
    next(order)
    count = 0

    def rest() -> None:
        nonlocal count
        count = sum(1 for _ in order)

    took = seconds(rest)
    return took / count


def core_s() -> tuple[float, list[float]]:
    """Extended of an epoch; each Progressed of the second epoch, with half of the records held."""
    rng = np.random.default_rng(0)
    core = Core(Space(IMAGENET // 2 * 1000))
    offset, length = np.full(IMAGENET, -1), np.full(IMAGENET, 1000)
    core.handle(Registered("d", offset, length, Lengths.of(length)), 0.0)
    core.handle(Opened(1, "d", "", 0, 1), 0.0)
    ends = np.append(np.arange(BATCH, IMAGENET, BATCH), IMAGENET)
    extends, spent, fetches = [], [], []
    for epoch in range(2):
        drawn = rng.permutation(IMAGENET).astype(np.int32)
        start = time.perf_counter()
        fetches += core.handle(Extended(1, epoch, epoch * len(ends), drawn, ends), 0.0)
        extends.append(time.perf_counter() - start)
    for step in range(2 * len(ends) - 1600):
        while fetches:
            fetch = fetches.pop()
            if isinstance(fetch, Fetch):
                fetches += core.handle(Fetched(fetch.fetch, fetch.length), step * 0.1)
        start = time.perf_counter()
        fetches += core.handle(Progressed(1, step + 1, 0), step * 0.1)
        spent.append(time.perf_counter() - start)
    return min(extends), spent[len(ends) :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    rounds = range(parser.parse_args().rounds)
    extends, steps = zip(*(core_s() for _ in rounds), strict=True)
    spent = list(itertools.chain(*steps))
    named = {
        f"first 2000 of {HUGE:,}": min(
            seconds(lambda: plan.permutation_prefix(HUGE, 5, 2000)) for _ in rounds
        ),
        **{
            f"observe and 8 batches, {kind}": min(first_batches_s(kind) for _ in rounds)
            for kind in ("seeded", "generator", "distributed")
        },
        "next, per batch": min(batch_s() for _ in rounds),
        f"Extended, {IMAGENET:,} objects": min(extends),
        "Progressed, 10th percentile": float(np.percentile(spent, 10)),
        "Progressed, median": float(np.median(spent)),
        "Progressed, 99th percentile": float(np.percentile(spent, 99)),
    }
    report([{"what": what, "us": round(1e6 * took, 1)} for what, took in named.items()])


if __name__ == "__main__":
    main()
