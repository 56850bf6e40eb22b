"""One rank of a job over several hosts that rehearses: four parts of a folder, one after another.

    python rehearse_on_nodes.py FOLDER BATCH EPOCHS BUDGET EACH KIND FIRST STOP

Each part is read EPOCHS times by a loader of its own, with EACH rows in a step of a memory that
keeps BUDGET samples of the parts before it. Parts are "subsets" of one dataset, or "datasets" of
their own; "growing": subsets, and the memory takes them in as they are read (`every=`). This job
reads parts FIRST to STOP - 1, others have read those before. Environment and output are those of
`read_on_nodes.py`.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, Subset

import creel
from creel.config import Config
from creel.loader.client.connections import client_of
from testbed.train_on_nodes import NBYTES, say, train

TASKS = 4


def parts(folder: str, kind: str) -> list[Dataset[Any]]:
    files = creel.FileDataset(folder)
    n = len(files) // TASKS
    numbers = [range(task * n, (task + 1) * n) for task in range(TASKS)]
    if kind != "datasets":
        return [Subset(files, some) for some in numbers]
    return [creel.FileDataset([f"{folder}/{i:04}.bin" for i in some]) for some in numbers]


def main(
    folder: str, kind: str, batch: int, epochs: int, budget: int, each: int, first: int, stop: int
) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    memory = creel.Rehearsal(each, budget=budget, every=8 if kind == "growing" else None)
    given = parts(folder, kind)
    for data in given[:first]:
        memory.add(data)
    for task, data in enumerate(given[first:stop], first):
        n = len(data)  # type: ignore[arg-type]  # it has a length
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
            for read in loader:
                for sample in read:
                    digest.update(bytes(sample.numpy()))
                train("step", 0.0)
            dist.barrier()
            for i in (i for step in expected_batches for i in step):
                number = memory.uids[i - n] if i >= n else task * n + i
                expected.update(random.Random(int(number)).randbytes(NBYTES))
            say(epoch={"digest": digest.hexdigest(), "expected": expected.hexdigest()})
        memory.add(data)
    client = client_of(Config.load()[0])
    say(stats={} if client is None else client.ask("stats"))
    sys.stdin.read()


if __name__ == "__main__":
    folder, *numbers, kind, first, stop = sys.argv[1:]
    main(folder, kind, *map(int, [*numbers, first, stop]))
