"""Run random continual trainings with torch's DataLoader over `memory.over` and with creel's.

    python -m stress.rehearsal_programs --first 0 --count 500 --jobs 2
    python -m stress.rehearsal_programs --show 17

Tasks are files, records or wrapped datasets, each of its own or a Subset of one; the memory is
balanced, a reservoir, or ordered. In a third of the programs the daemon is killed in some epoch,
in a third a training is interrupted and resumed by another loader. Prints a line for each program
that differs, with its first difference; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

import creel
from creel.loader.client import connections
from kit import unique_name
from shown import plain, states
from stress.userland import Foreseeable, Uneven

KINDS = ("files", "records", "labelled records", "noisy records", "wrapped", "plain")
ORDERS = (
    "shuffle",
    "shuffle",
    "in order",
    "distributed",
    "batches",
    "replacement",
    "own",
    "uneven",
)


class Wrapped(Dataset[Any]):
    """A person's dataset, with augmentation."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        data = np.frombuffer(self.paths[index].read_bytes(), np.uint8)
        return {"x": torch.rand(2) + int(data[0]), "size": len(data)}


class Plain(Dataset[Any]):
    """Samples that are read from nowhere."""

    def __init__(self, n: int, first: int) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return self.first + index, torch.rand(1)


def noisy(row: torch.Tensor) -> torch.Tensor:
    return row.float() + torch.rand(1)


@dataclass(frozen=True)
class RehearsalProgram:
    """One random training; `repr` is enough to repeat it."""

    seed: int
    kind: str
    order: str
    sizes: tuple[int, ...]
    subsets: bool
    batch: int
    drop_last: bool
    per_batch: int
    budget: int | None
    every: int | None
    keeps: str
    workers: int
    persistent: bool
    generator: bool
    epochs: int
    left: int  # batch at which the first epoch of each task is left, 99: not at all
    fault: str
    at: int  # batch

    @classmethod
    def draw(cls, seed: int) -> RehearsalProgram:
        r = random.Random(seed)
        workers = r.choice((0, 0, 1, 2, 3))
        return cls(
            seed=seed,
            kind=r.choice(KINDS),
            order=r.choice(ORDERS),
            sizes=tuple(r.choice((1, 9, 24, 40)) for _ in range(r.choice((2, 2, 3)))),
            subsets=r.random() < 0.5,
            batch=r.choice((1, 3, 5, 8)),
            drop_last=r.random() < 0.3,
            per_batch=r.choice((1, 2, 6)),
            budget=r.choice((None, 3, 10, 30)),
            every=(every := r.choice((None, None, None, 1, 3))),
            keeps=r.choice(("balanced", "reservoir", "reservoir" if every else "ordered")),
            workers=workers,
            persistent=workers > 0 and r.random() < 0.3,
            generator=r.random() < 0.4,
            epochs=r.choice((1, 2, 3)),
            left=r.choice((99, 99, 2)),
            fault=r.choice(("", "kill", "resume")),
            at=r.randrange(6),
        )

    # --- data -----------------------------------------------------------------------------------

    def tasks(self, home: Path, *, ours: bool) -> list[Any]:
        ends = np.cumsum(self.sizes).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        if not self.subsets:
            return [
                self._data(home / f"task-{i}", *span, ours=ours) for i, span in enumerate(spans)
            ]
        whole = self._data(home / "whole", 0, ends[-1], ours=ours)
        listed = random.Random(self.seed).sample(range(ends[-1]), ends[-1])
        return [Subset(whole, listed[first:last]) for first, last in spans]

    def _data(self, folder: Path, first: int, last: int, *, ours: bool) -> Any:
        n = last - first
        if self.kind == "plain":
            return Plain(n, first)
        folder.mkdir(exist_ok=True)
        if self.kind in ("files", "wrapped"):
            for i in range(first, last):
                (folder / f"{i:04}.bin").write_bytes(bytes([i % 251]) * (200 + i))
            paths = sorted(folder.iterdir())
            if self.kind == "wrapped":
                return creel.wrap(Wrapped(paths)) if ours else Wrapped(paths)
            return creel.FileDataset(folder, "*.bin", decode=len)
        rows = np.arange(first * 48, last * 48, dtype=np.int64).astype(np.uint8)
        rows.tofile(folder / "rows.bin")
        options: dict[str, Any] = {}
        if self.kind == "labelled records":
            options["labels"] = list(range(first, last))
        if self.kind == "noisy records":
            options["transform"] = noisy
        return creel.RecordDataset(folder / "rows.bin", torch.uint8, 48, **options)

    def add(self, memory: creel.Rehearsal, task: Any) -> None:
        n = len(task)
        labels = None if self.keeps == "reservoir" else np.arange(n) % 3
        order = -np.arange(n, dtype=np.float64) if self.keeps == "ordered" else None
        memory.add(task, labels, order=order)

    # --- loaders --------------------------------------------------------------------------------

    def arguments(self, task: Any, generator: torch.Generator | None) -> dict[str, Any]:
        """Return the arguments for creel's loader that say what is drawn, and how it is cut."""
        n = len(task)
        size: dict[str, Any] = {"batch_size": self.batch, "drop_last": self.drop_last}
        if self.order == "batches":
            inner = RandomSampler(range(n), generator=generator)
            return {"batch_sampler": BatchSampler(inner, self.batch, self.drop_last)}
        if self.order == "uneven":
            return {"batch_sampler": Uneven(n, self.seed)}
        if self.order == "distributed":
            world = 2 + self.seed % 2
            return size | {"sampler": DistributedSampler(task, world, self.seed % world, seed=3)}
        if self.order == "replacement":
            return size | {"sampler": RandomSampler(task, True, n + 3, generator)}
        if self.order == "own":
            return size | {"sampler": Foreseeable(n, self.seed)}
        return size | {"shuffle": self.order == "shuffle"}

    def loader(self, task: Any, memory: creel.Rehearsal, options: Any) -> Any:
        """Return creel's loader, or torch's if there are no options."""
        generator = torch.Generator().manual_seed(self.seed) if self.generator else None
        given = self.arguments(task, generator)
        common: dict[str, Any] = {
            "num_workers": self.workers,
            "persistent_workers": self.persistent,
            "generator": generator,
        }
        if options is not None:
            return creel.DataLoader(task, rehearsal=memory, creel=options, **given, **common)
        if "batch_sampler" in given:
            data, batches = memory.over(task, given["batch_sampler"], None)
        else:
            sampler = given.get("sampler")
            if sampler is None:
                shuffled = given["shuffle"]
                sampler = RandomSampler(task, generator=generator) if shuffled else None
            sampler = SequentialSampler(task) if sampler is None else sampler
            data, batches = memory.over(task, sampler, self.batch, self.drop_last)
        return DataLoader(data, batch_sampler=batches, **common)

    # --- training -------------------------------------------------------------------------------

    def play(self, home: Path, options: Any) -> list[Any]:
        """Train with creel's loader, or with torch's if there are no options; return all seen."""
        torch.manual_seed(self.seed)
        memory = creel.Rehearsal(
            self.per_batch, budget=self.budget, seed=self.seed, every=self.every
        )
        shown: list[Any] = []
        for number, task in enumerate(self.tasks(home, ours=options is not None)):
            loader = self.loader(task, memory, options)
            shown.append(("len", len(loader)))
            for epoch in range(self.epochs):
                if isinstance(getattr(loader, "sampler", None), DistributedSampler):
                    loader.sampler.set_epoch(epoch)
                elif self.order == "distributed":
                    loader.batch_sampler.sampler.set_epoch(epoch)
                fault = self.fault if epoch == number % self.epochs else ""
                last = self.left if not epoch else 99
                if self.fault == "resume" and self.can_resume and fault:
                    loader = self._resumed(task, memory, options, loader, last, shown)
                else:
                    self._epoch(loader, last, fault, options, shown)
                shown.append(states(loader))
            del loader
            self.add(memory, task)
            shown.append(("memory", memory.uids.tolist()))
        return shown

    @property
    def can_resume(self) -> bool:
        """Whether a loader can go on for another one, which has drawn all that torch's has then."""
        if self.kind in RANDOM or self.generator or self.persistent:
            return False  # a persistent iterator draws no base seed, another loader's does
        return self.order in ("in order", "distributed", "shuffle", "batches", "replacement")

    def _epoch(self, loader: Any, last: int, fault: str, options: Any, shown: list[Any]) -> None:
        for step, batch in enumerate(loader):
            shown.append((step, plain(batch)))
            if options is not None:
                _check_indices(loader, batch)
                if fault == "kill" and step == self.at:
                    _kill(options["daemon.name"])
            if step == last:
                break

    def _resumed(
        self,
        task: Any,
        memory: creel.Rehearsal,
        options: Any,
        loader: Any,
        last: int,
        shown: list[Any],
    ) -> Any:
        """Go through an epoch; on creel's side another loader takes over at batch `at`.

        Returns the loader that goes on: to the first one, the epoch was left early.
        """
        steps = list(zip(range(last + 1), _some(loader, self.at, options), strict=False))
        shown += [(step, plain(batch)) for step, batch in steps]
        if options is None or len(steps) <= self.at:
            return loader
        again = self.loader(task, memory, options)
        if self.order == "distributed":
            again.sampler.set_epoch(loader.sampler.epoch)
        again.load_state_dict(loader.state_dict())
        for step, batch in enumerate(again, len(steps)):
            if step > last:
                break
            shown.append((step, plain(batch)))
        return again


RANDOM = ("noisy records", "wrapped", "plain")


def _some(loader: Any, at: int, options: Any) -> Any:
    """Yield all batches under torch, those up to `at` under creel."""
    for step, batch in enumerate(loader):
        yield batch
        if options is not None and step == at:
            return


def _check_indices(loader: Any, batch: Any) -> None:
    first = batch if isinstance(batch, torch.Tensor) else next(iter(_values(batch)))
    assert len(loader.indices) == len(first)
    old = loader.indices >= len(loader.dataset)
    assert np.array_equal(loader.indices[old] - len(loader.dataset), loader.replayed)
    assert np.all(np.diff(old.astype(int)) >= 0), "replays come last"


def _values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, dict) else batch


def _kill(name: str) -> None:
    client = connections.connected(name)
    if client is not None and client.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.daemon_pid, signal.SIGKILL)


@functools.cache
def _options() -> dict[str, Any]:
    """Return the settings of this process's loaders: a daemon of its own, gone soon after it."""
    return {
        "daemon.name": unique_name(),
        "memory.budget": "64MB",
        "daemon.linger_s": "5",
    }


def compare(seed: int) -> str:
    """Return the first difference between both runs of a program, as text; "" if there is none."""
    warnings.simplefilter("ignore")
    program = RehearsalProgram.draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        theirs = program.play(Path(folder), None)
        direct = "auto" if seed % 2 else "never"
        ours = program.play(Path(folder), _options() | {"loader.direct": direct})
    if ours == theirs:
        return ""
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), same)
    both = [repr((*shown, "nothing")[first])[:200] for shown in (theirs, ours)]
    return f"{program}: {first} of {len(theirs)}: torch {both[0]}, creel {both[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, metavar="SEED", help="print that program only")
    options = parser.parse_args()
    if options.show is not None:
        print(RehearsalProgram.draw(options.show))
        return 0
    multiprocessing.set_start_method("fork", force=True)
    differences = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = range(options.first, options.first + options.count)
        for done, difference in enumerate(pool.map(compare, seeds), 1):
            if difference:
                print(difference, flush=True)
                differences += 1
            if done % 50 == 0:
                print(f"{done} of {options.count}", file=sys.stderr)
    print(f"{options.count} programs, {differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
