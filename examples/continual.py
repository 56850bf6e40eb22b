"""Continual learning on scikit-learn's digits: five tasks of two classes, one after the other.

    python examples/continual.py                accuracy on each task after each task, three ways
    python examples/continual.py --check        means of ten seeds, and whether they are as expected

A network that only sees the present task forgets the earlier ones. With `creel.Rehearsal` a part of
each batch is earlier data, and the training loop stays the same. Needs scikit-learn. Two ranks of a
job are played by two loaders in this process, whose batches are joined.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it
from torch.utils.data import DistributedSampler, Subset, TensorDataset

import creel

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
TRAINED = 1437
RANKS, EPOCHS = 2, 10
#: Five would do, were it not for the gap: its standard error would be as large as its margin.
SEEDS = 10


@dataclass(frozen=True)
class Way:
    """A way to train on the tasks.

    Attributes:
        memory: share of all training samples that the memory keeps; 0: no memory.
        replays: samples of the memory in a batch of each rank.
        logits: weight of the distance to what the network said when a sample was added (DER++).
        balanced: over the classes; else a plain reservoir.
        again: each task is trained from scratch, on all data so far.
        rare: of tasks 1 and 3, only every tenth sample is there.
    """

    memory: float = 0.0
    replays: int = 8
    logits: float = 0.0
    balanced: bool = True
    again: bool = False
    rare: bool = False


WAYS = {
    "incremental": Way(),
    "rehearsal, 20 %": Way(memory=0.2),
    "from scratch": Way(again=True),
    "5 % with logits": Way(memory=0.05, logits=0.1),
    "rare, balanced": Way(memory=0.1, replays=8, rare=True),
    "rare, reservoir": Way(memory=0.1, replays=8, rare=True, balanced=False),
}


class Digits:
    """Training and test data of one seed."""

    def __init__(self, seed: int, *, rare: bool) -> None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(x))
        self.labels = y
        self.data = TensorDataset(
            torch.from_numpy(x / 16).float(), torch.from_numpy(y), torch.arange(len(y))
        )
        self.tasks = [order[:TRAINED][np.isin(y[order[:TRAINED]], task)] for task in TASKS]
        if rare:
            self.tasks = [t[::10] if k in {0, 2} else t for k, t in enumerate(self.tasks)]
        self.tests = [order[TRAINED:][np.isin(y[order[TRAINED:]], task)] for task in TASKS]


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def epochs(task: Any, memory: creel.Rehearsal | None, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield each batch of each rank in each epoch, with the rows of the memory in it."""
    loaders: list[Any] = []
    for rank in range(RANKS):
        sampler: Any = DistributedSampler(task, RANKS, rank, seed=seed)
        loaders.append(creel.DataLoader(task, 16, sampler=sampler, rehearsal=memory))
    for epoch in range(EPOCHS):
        for loader in loaders:
            loader.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            yield from zip(batches, [loader.replayed for loader in loaders], strict=True)


def train(way: Way, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return (5, 5) the accuracy on each task after each, over all ten classes."""
    torch.manual_seed(seed)
    digits = Digits(seed, rare=way.rare)
    memory, logits = None, torch.empty(0)
    if way.memory:
        budget = round(way.memory * sum(map(len, digits.tasks)))
        memory = creel.Rehearsal(way.replays, budget=budget, seed=seed)
    net, optimizer = network()
    accuracy = np.zeros((len(TASKS), len(TASKS)))
    for number in range(len(TASKS)):
        if way.again:
            net, optimizer = network()
        seen = digits.tasks[: number + 1] if way.again else digits.tasks[number : number + 1]
        chosen = np.concatenate(seen)
        task = Subset(digits.data, chosen.tolist())
        losses = []
        for (x, y, _), rows in epochs(task, memory, seed):
            out = net(x)
            loss = F.cross_entropy(out, y)
            if way.logits and len(rows):
                loss = loss + way.logits * F.mse_loss(out[-len(rows) :], logits[rows])
            losses.append(loss / RANKS)
            if len(losses) == RANKS:
                optimizer.zero_grad()
                sum(losses).backward()  # type: ignore[union-attr]  # a tensor
                optimizer.step()
                losses = []
        with torch.no_grad():
            if memory is not None:
                memory.add(task, digits.labels[chosen] if way.balanced else None)
                old = creel.DataLoader(memory.dataset, 256)
                logits = torch.cat([net(x) for x, _, _ in old])
            for k, test in enumerate(digits.tests):
                x, y, _ = digits.data[test]
                accuracy[number, k] = (net(x).argmax(1) == y).double().mean()
    return accuracy


def final(way: Way, seed: int) -> float:
    """Return the accuracy in per cent on all test samples after the last task."""
    tests = [len(test) for test in Digits(seed, rare=False).tests]
    return 100 * float(np.average(train(way, seed)[-1], weights=tests))


def check() -> int:
    began = time.monotonic()
    accuracy: dict[str, float] = {}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, way in WAYS.items():
            results = list(pool.map(final, [way] * SEEDS, range(SEEDS)))
            accuracy[name] = float(np.mean(results))
            print(
                f"{name:18s} {accuracy[name]:5.1f} +- {np.std(results, ddof=1):.1f} %", flush=True
            )
    expected = {
        "incremental <= 25": accuracy["incremental"] <= 25,
        "rehearsal >= 90.0": accuracy["rehearsal, 20 %"] >= 90,
        "gap to scratch <= 6.5": accuracy["from scratch"] - accuracy["rehearsal, 20 %"] <= 6.5,
        "5 % with logits >= 93.5": accuracy["5 % with logits"] >= 93.5,
        "balanced - reservoir >= 15": accuracy["rare, balanced"] - accuracy["rare, reservoir"]
        >= 15,
    }
    for claim, holds in expected.items():
        print(f"{claim:28s} {'yes' if holds else 'NO'}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(not all(expected.values()))


def show() -> int:
    for name in ("incremental", "rehearsal, 20 %", "from scratch"):
        print(f"\n{name}: accuracy in % on each task (columns) after each task (rows)")
        for row in train(WAYS[name], 0):
            print("  ".join(f"{100 * value:5.1f}" for value in row))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print("examples/continual.py needs scikit-learn: pip install scikit-learn")
        return int(options.check)
    torch.set_num_threads(1)
    return check() if options.check else show()


if __name__ == "__main__":
    sys.exit(main())
