"""One rank of a job over several hosts that rehearses: four parts of a folder, one after another.

    python rehearse_on_nodes.py FOLDER BATCH EPOCHS BUDGET EACH KIND FIRST STOP

Each part is read EPOCHS times by a loader of its own, with EACH rows in a step of a memory that
keeps BUDGET samples of the parts before it. Parts are "subsets" of one dataset, or "datasets" of
their own; "growing": subsets, and the memory takes them in as they are read (`every=`);
"returning": datasets of three sizes, and the first of them again, once the nodes know of each
other. This job reads parts FIRST to STOP - 1, others have read those before. Environment and output
are those of `read_on_nodes.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
import time
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, Subset

import creel
from creel.config import Config
from creel.loader.client.client import Client
from creel.loader.client.connections import client_of
from testbed.train_on_nodes import NBYTES, say, train

TASKS = 4
#: Relative sizes of the datasets of a job that returns to the first of them.
SIZES = 6, 18, 10


def parts(folder: str, kind: str) -> list[tuple[Dataset[Any], range]]:
    """Return the dataset of each task, and the numbers of its files."""
    files = creel.FileDataset(folder)
    sizes = SIZES if kind == "returning" else (1,) * TASKS
    ends = [0, *itertools.accumulate(len(files) * size // sum(sizes) for size in sizes)]
    numbers = list(itertools.starmap(range, itertools.pairwise(ends)))
    if kind not in {"datasets", "returning"}:
        return [(Subset(files, some), some) for some in numbers]
    given: list[tuple[Dataset[Any], range]] = [
        (creel.FileDataset([f"{folder}/{i:04}.bin" for i in some]), some) for some in numbers
    ]
    return [*given, *given[: TASKS - len(given)]]


def started() -> Client:
    """Return the connection to this node's daemon, whose start may fail on busy cores at first."""
    while (client := client_of(Config.load()[0])) is None:
        time.sleep(0.1)
    return client


def join() -> None:
    """Wait until all nodes know each other."""
    while not started().cluster:
        time.sleep(0.01)
    dist.barrier()


def main(
    folder: str, kind: str, batch: int, epochs: int, budget: int, each: int, first: int, stop: int
) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    started()
    memory = creel.Rehearsal(each, budget=budget, every=8 if kind == "growing" else None)
    given = parts(folder, kind)
    for data, _ in given[:first]:
        memory.add(data)
    added = list(itertools.chain(*(numbers for _, numbers in given)))  # the file of each uid
    for task, (data, files) in enumerate(given[first:stop], first):
        n = len(files)
        samplers: list[DistributedSampler[Any]] = [
            DistributedSampler(data, world, rank, seed=task) for _ in range(2)
        ]
        loader = creel.DataLoader(
            data, batch, sampler=samplers[0], collate_fn=list, rehearsal=memory
        )
        expected_batches = memory.over(data, samplers[1], batch)[1]
        dist.barrier()
        for epoch in range(epochs):
            digest, expected = hashlib.sha256(), hashlib.sha256()
            for sampler in samplers:
                sampler.set_epoch(epoch)
            for step, read in enumerate(loader):
                if kind == "returning" and not (task or epoch or step):
                    join()
                for sample in read:
                    digest.update(bytes(sample.numpy()))
                train("step", 0.0)
            dist.barrier()
            for i in (i for step in expected_batches for i in step):
                number = added[memory.uids[i - n]] if i >= n else files[i]
                expected.update(random.Random(number).randbytes(NBYTES))
            say(epoch={"digest": digest.hexdigest(), "expected": expected.hexdigest()})
        memory.add(data)
    say(stats=started().ask("stats"))
    sys.stdin.read()


if __name__ == "__main__":
    folder, *numbers, kind, first, stop = sys.argv[1:]
    main(folder, kind, *map(int, [*numbers, first, stop]))
