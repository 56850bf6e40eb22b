"""A training that checks each batch and measures its waits, while its daemon is restarted.

    python train_over_restart.py make FOLDER FILES
    python train_over_restart.py FOLDER STOP

Reads epochs until the file STOP exists. Prints the number of each epoch that has ended, and at the
end JSON: the `epochs`, the batches that are not torch's (`wrong`), and the longest wait for a batch
(`wait_s`), except for the first ones of the first epoch, when workers start.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler

import creel

NBYTES = 20_000
_BATCH, _STEP_S = 16, 0.01


def order(files: int, epoch: int) -> list[int]:
    """Return the order in which torch's sampler reads an epoch."""
    sampler: DistributedSampler[int] = DistributedSampler(range(files), 1, 0, seed=7)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def train(folder: str, stop: str) -> None:
    data = creel.FileDataset(folder)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, 1, 0, seed=7)
    loader = creel.DataLoader(data, _BATCH, sampler=sampler, num_workers=2, persistent_workers=True)
    content = torch.stack(
        [torch.frombuffer(_bytes(i), dtype=torch.uint8) for i in range(len(data))]
    )
    epochs = wrong = 0
    longest = 0.0
    while not Path(stop).exists():
        sampler.set_epoch(epochs)
        expected = torch.split(content[order(len(data), epochs)], _BATCH)
        asked, seen = time.monotonic(), 0
        for batch in loader:
            waited = time.monotonic() - asked
            longest = max(longest, waited if epochs else 0.0)
            wrong += not torch.equal(batch, expected[seen])
            seen += 1
            time.sleep(_STEP_S)
            asked = time.monotonic()
        wrong += seen != len(expected)
        epochs += 1
        sys.stdout.write(f"{epochs}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"epochs": epochs, "wrong": wrong, "wait_s": longest}) + "\n")


def _bytes(i: int) -> bytearray:
    return bytearray(random.Random(i).randbytes(NBYTES))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        for i in range(int(sys.argv[3])):
            Path(sys.argv[2], f"{i:06}").write_bytes(_bytes(i))
    else:
        train(*sys.argv[1:])
