"""One rank of a job over several hosts: reads each epoch with creel and prints what it got.

    python train_on_nodes.py FOLDER BATCH PACES [REMAP [KEEP]]

PACES: for each epoch, the seconds of a step of training ("0.1,0.1"; a late rank catches up), or
"step" for ranks that run in step, as below DDP, with steps of STEP_S seconds. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are as torchrun sets them; without MASTER_ADDR there is no process
group. REMAP: "global-batch"; then each epoch also has the first bytes of all samples of each step.
KEEP: memory for decoded samples; then each epoch has the calls of the decoder so far.

Prints JSON objects, one per line: {"half": epoch, "held": objects, "tiers": ...} in the middle of
an epoch, {"epoch": {...}} at its end; at the end of all epochs {"stats": ...}, the daemon's
counters. Ends when its standard input is closed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import creel
from creel.config import Config
from creel.loader.client.connections import client_of

#: Of a file.
NBYTES = 4000
#: Seconds of a step of training for ranks in step: time on an accelerator, none on the host.
STEP_S = float(os.environ.get("STEP_S", "0.01"))
#: Longest wait for the other nodes. Busy cores make it seconds, and a job that never joins goes on.
JOIN_S = 60.0


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values, default=str) + "\n")
    sys.stdout.flush()


def counted() -> dict[str, Any]:
    """Return the objects in the memory of this node, and hits and misses of its tiers."""
    client = client_of(Config.load()[0])
    if client is None:
        return {"held": 0, "tiers": {}}
    datasets = client.ask("datasets")["datasets"]
    held = sum(dataset["resident_objects"] for dataset in datasets)
    return {"held": held, "tiers": client.ask("stats")["tiers"]}


def join() -> None:
    """Wait until this node knows the others: what is read later depends less on busy cores."""
    client, until = client_of(Config.load()[0]), time.monotonic() + JOIN_S
    while client is not None and client.alive and not client.cluster and time.monotonic() < until:
        time.sleep(0.01)


def train(pace: str, due: float) -> float:
    """Run a step of training; return when the next one ends, if there is a pace."""
    if pace != "step":
        time.sleep(max(due - time.monotonic(), 0.0))
        return due + float(pace)
    time.sleep(STEP_S)
    dist.all_reduce(torch.zeros(1))
    return due


class Decode:
    """Counts its calls, and returns a file's bytes as they are."""

    calls = 0

    def __call__(self, data: bytes) -> torch.Tensor:
        Decode.calls += 1
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def main(
    folder: str, batch: int, paces: list[str], remap: str = "", keep: str | None = None
) -> None:
    decode = None if keep is None else Decode()
    dataset = creel.FileDataset(folder, decode=decode, keep_decoded=keep)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = "MASTER_ADDR" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    sampler: DistributedSampler[object] = DistributedSampler(dataset, world, rank, seed=7)
    options: Any = {"remap": remap or None}
    loader = creel.DataLoader(dataset, batch, sampler=sampler, collate_fn=list, **options)
    if not alone:
        dist.barrier()
    due = time.monotonic()
    for epoch, pace in enumerate(paces):
        sampler.set_epoch(epoch)
        digest, slowest, began = hashlib.sha256(), 0.0, time.monotonic()
        heads: list[list[str]] = []
        for step, read in enumerate(loader):
            slowest = max(slowest, time.monotonic() - began)
            for sample in read:
                digest.update(bytes(sample.numpy()))
            heads.append([bytes(sample[:8].numpy()).hex() for sample in read] if remap else [])
            if step == len(loader) // 2:
                say(half=epoch, **counted())
            due = train(pace, due)
            began = time.monotonic()
        read_so_far = {"digest": digest.hexdigest(), "heads": heads, "decodes": Decode.calls}
        say(epoch={**read_so_far, "slowest": slowest})
        if epoch == 0:
            join()
            due = time.monotonic()
        if pace == "step":
            dist.barrier()
    client = client_of(Config.load()[0])
    say(stats={} if client is None else client.ask("stats"))
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), *sys.argv[4:])
