"""One rank of a job over several hosts, with one of several samplers: reads epochs, in step.

    python read_on_nodes.py FOLDER BATCH EPOCHS KIND

KIND: "dealt" (DistributedSampler), "random" (each rank reads all, in an order of its own),
"weighted" (with replacement), "batches" (a user's batch sampler that deals to ranks), "subset"
(DistributedSampler over a Subset), "pairs" (DistributedSampler over samples of two files), "alike"
(all ranks read the same, as in a tensor-parallel group), "tensor" (such groups of two, to which
DistributedSampler deals), "dealt-other" ("dealt" with another seed).

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are as torchrun sets them. Prints JSON objects, one
per line: {"epoch": {"digest", "expected"}} at the end of each epoch, of the samples read and of
those of torch's samplers; at the end of all epochs {"stats": ...}. Ends when its standard input is
closed.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

import creel
from creel.config import Config
from creel.loader.client.connections import client_of
from testbed.train_on_nodes import NBYTES, join, say, train


class Pairs(Dataset[Any]):
    """Sample i is two files, one from each half of the folder."""

    def __init__(self, folder: str) -> None:
        self.creel_uris = sorted(str(path) for path in Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.creel_uris) // 2

    def objects(self, index: int) -> list[int]:
        return [index, index + len(self)]

    def __getitem__(self, index: int) -> Any:
        both = b"".join(creel.read(self.creel_uris[i]) for i in self.objects(index))
        return torch.frombuffer(bytearray(both), dtype=torch.uint8)


class DealtBatches:
    """A user's batches: of a shuffled list, every world-th goes to this rank."""

    def __init__(self, n: int, batch: int, rank: int, world: int) -> None:
        self.n, self.batch, self.rank, self.world, self.epoch = n, batch, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        for first in range(self.rank * self.batch, self.n, self.world * self.batch):
            yield order[first : first + self.batch].tolist()

    def __len__(self) -> int:
        return len(range(self.rank, -(-self.n // self.batch), self.world))


def batches_of(kind: str, data: Any, batch: int, rank: int, world: int) -> Any:
    """Return a new sampler of this kind; two of them yield the same."""
    own = torch.Generator().manual_seed(0 if kind == "alike" else rank)
    if kind in {"random", "alike"}:
        return BatchSampler(RandomSampler(data, generator=own), batch, drop_last=False)
    if kind == "weighted":
        weights = torch.linspace(0.1, 1, len(data)).tolist()
        return BatchSampler(
            WeightedRandomSampler(weights, len(data) // world, generator=own), batch, False
        )
    if kind == "batches":
        return DealtBatches(len(data), batch, rank, world)
    if kind == "tensor":
        world, rank = world // 2, rank // 2
    seed = 9 if kind.endswith("other") else 7
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=seed)
    return BatchSampler(sampler, batch, drop_last=False)


def begin(batches: Any, epoch: int) -> None:
    """Set the epoch of a sampler that has one."""
    parts: list[Any] = [batches, getattr(batches, "sampler", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def numbers(kind: str, n: int, sample: int) -> list[int]:
    """Return the numbers of the files of a sample of n."""
    if kind == "pairs":
        return [sample, sample + n]
    return [2 * sample if kind == "subset" else sample]


def main(folder: str, batch: int, epochs: int, kind: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    data: Any = Pairs(folder) if kind == "pairs" else creel.FileDataset(folder)
    if kind == "subset":
        data = Subset(data, range(0, len(data), 2))
    mine, torchs = (batches_of(kind, data, batch, rank, world) for _ in range(2))
    if kind == "batches":
        loader = creel.DataLoader(data, batch_sampler=mine, collate_fn=list)
    else:
        loader = creel.DataLoader(data, batch, sampler=mine.sampler, collate_fn=list)
    dist.barrier()
    for epoch in range(epochs):
        digest, expected = hashlib.sha256(), hashlib.sha256()
        for batches in (mine, torchs):
            begin(batches, epoch)
        for read in loader:
            for sample in read:
                digest.update(bytes(sample.numpy()))
            train("step", 0.0)
        say(read=epoch)
        dist.barrier()
        for i in (i for step in torchs for i in step):
            for number in numbers(kind, len(data), i):
                expected.update(random.Random(number).randbytes(NBYTES))
        say(epoch={"digest": digest.hexdigest(), "expected": expected.hexdigest()})
        if epoch == 0:
            join()
    client = client_of(Config.load()[0])
    say(stats={} if client is None else client.ask("stats"))
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
