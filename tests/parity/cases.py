# ruff: noqa: NPY002  compares the global generators
"""Random uses of a DataLoader, and records of all their observable results."""

from __future__ import annotations

import gc
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from shown import plain, states

#: Read by `Knob`; the trainer changes it between epochs, which forked workers must see.
KNOB = {"value": 0}


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class OddError(Exception):
    """An exception that cannot be made from one string."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


class Plain:
    def __init__(self, n: int) -> None:
        self.n = n
        self.scale = 1
        self.touched = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.full((2, 3), float(i) * self.scale), i


class Augmented(Plain):
    def __getitem__(self, i: int) -> Any:
        return {
            "x": torch.rand(3) + i,
            "y": np.random.rand(2).astype(np.float32),
            "z": random.random(),
            "seed": (get_worker_info() or _Nobody).seed,
        }


class _Nobody:
    seed = -1


class Mutating(Plain):
    def __getitem__(self, i: int) -> Any:
        self.touched += 1
        return i * self.scale, self.touched


class Knob(Plain):
    def __getitem__(self, i: int) -> Any:
        return i + 100 * KNOB["value"]


class Counting(Plain):
    seen = 0

    def __getitem__(self, i: int) -> Any:
        Counting.seen += 1
        return i, Counting.seen


class Mixed(Plain):
    def __getitem__(self, i: int) -> Any:
        return {
            "p": Point(torch.arange(2) + i, f"n{i}"),
            "b": bytes([i % 256]) * 5,
            "l": [i, float(i), np.int16(i)],
            "e": torch.zeros(0, 3),
            "c": torch.tensor(1j * i, dtype=torch.complex64),
            "h": torch.tensor([i], dtype=torch.bfloat16),
            "f": torch.tensor(i % 2 == 0),
        }


class Raising(Plain):
    def __getitem__(self, i: int) -> Any:
        if i % 5 == 3:
            raise [ValueError("odd one"), KeyError(f"k{i}"), OddError(1, i), StopIteration(i)][
                i % 4
            ]
        return torch.tensor(i)


class Ragged(Plain):
    """Samples that default_collate cannot stack."""

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(1 + i % 2)


class Nones(Plain):
    """Samples that need a collate_fn of their own."""

    def __getitem__(self, i: int) -> Any:
        return None if i % 2 else (i, "s")


class Batched(Plain):
    def __getitems__(self, indices: list[int]) -> Any:
        return [torch.tensor([i, len(indices)]) for i in indices]


class Unpicklable(Plain):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.f: Callable[[int], int] = lambda i: i * 2 + self.touched

    def __getitem__(self, i: int) -> Any:
        self.touched += 1
        return self.f(i)


class SharedTensor(Plain):
    """Workers write to memory that the trainer reads."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.hits = torch.zeros(max(n, 1), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, i: int) -> Any:
        self.hits[i] += 1
        return i, self.hits[i].clone()


DATASETS = (
    Plain,
    Augmented,
    Mutating,
    Knob,
    Counting,
    Mixed,
    Raising,
    Ragged,
    Nones,
    Batched,
    Unpicklable,
    SharedTensor,
)


class NumpySampler(Sampler[int]):
    """Draws from numpy's global generator, all at once."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.n).tolist())


class Uneven(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        first, size = 0, 1
        while first < self.n:
            yield list(range(first, min(first + size, self.n)))
            first, size = first + size, size + 1


class Failing(Sampler[int]):
    """Raises in the middle of the epoch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        for i in range(self.n):
            if i == 9:
                raise ArithmeticError("the sampler failed")
            yield i


def as_list(samples: list[Any]) -> Any:
    return samples


def with_noise(samples: list[Any]) -> Any:
    return torch.rand(1), len(samples)


def failing(samples: list[Any]) -> Any:
    if len(samples) == 2:
        raise TypeError("cannot collate two")
    return samples


def set_up(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = 10 + worker  # type: ignore[attr-defined]
    torch.rand(1)


def refuse(worker: int) -> None:
    raise OSError(f"worker {worker} does not want to")


#: torch >= 2.6
IN_ORDER_KNOWN = "in_order" in torch.utils.data.DataLoader.__init__.__annotations__


@dataclass(frozen=True)
class Case:
    """One random use; `repr` is enough to repeat it."""

    seed: int
    dataset: type[Plain]
    n: int
    order: str
    batch_size: int | None
    drop_last: bool
    generator: bool
    workers: int
    prefetch: int | None
    persistent: bool
    in_order: bool
    pin_memory: bool
    timeout: float
    collate: Callable[[list[Any]], Any] | None
    init_fn: Callable[[int], None] | None
    script: tuple[tuple[str, int], ...]

    @classmethod
    def draw(cls, seed: int) -> Case:
        r = random.Random(seed)
        workers = r.choice((0, 1, 2, 2, 3))
        dataset = r.choice(DATASETS)
        in_order = workers == 0 or r.random() < 0.85 or not IN_ORDER_KNOWN
        if not in_order:  # then workers race for batches: only samples that do not depend on it
            dataset = r.choice((Plain, Mixed, Batched, Ragged))
        order = r.choice(
            (
                "plain",
                "shuffle",
                "shuffle",
                "list",
                "replacement",
                "weighted",
                "subset",
                "numpy",
                "uneven",
                "distributed",
                "strings",
                "batches",
                "failing",
            )
        )
        if dataset is SharedTensor and order in ("replacement", "weighted"):
            order = "shuffle"  # two workers at one sample would race
        batch_size = r.choice((1, 2, 3, 5, 7, None)) if order not in ("uneven", "batches") else 1
        collates: tuple[Any, ...] = (None, None, None, as_list, failing)
        if in_order:
            collates += (with_noise,)
        collate = as_list if dataset is Nones or batch_size is None else r.choice(collates)
        return cls(
            seed=seed,
            dataset=dataset,
            n=r.choice((0, 1, 6, 11, 20, 25)) if order != "weighted" else 12,
            order=order,
            batch_size=batch_size,
            drop_last=batch_size is not None
            and order not in ("uneven", "batches")
            and r.random() < 0.3,
            generator=r.random() < 0.4,
            workers=workers,
            prefetch=r.choice((None, 1, 3)) if workers else None,
            persistent=workers > 0 and r.random() < 0.25,
            in_order=in_order,
            pin_memory=r.random() < 0.15,
            timeout=r.choice((0, 0, 20)) if workers else 0,
            collate=collate,
            init_fn=r.choice((None, None, None, set_up)) if in_order else None,
            script=_script(r, in_order and dataset is not SharedTensor),
        )

    def loader(self, cls: type[torch.utils.data.DataLoader[Any]]) -> Any:
        """Return a loader of class `cls` for this case."""
        dataset: Any = self.dataset(self.n)
        generator = torch.Generator().manual_seed(self.seed + 7) if self.generator else None
        keywords: dict[str, Any] = {
            "num_workers": self.workers,
            "collate_fn": self.collate,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
            "worker_init_fn": self.init_fn,
            "generator": generator,
            "prefetch_factor": self.prefetch,
            "persistent_workers": self.persistent,
        }
        if IN_ORDER_KNOWN:
            keywords["in_order"] = self.in_order
        keywords |= self._order(dataset, generator)
        if "batch_sampler" not in keywords:
            keywords |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return cls(dataset, **keywords)

    def _order(self, dataset: Any, generator: torch.Generator | None) -> dict[str, Any]:
        n = self.n
        samplers: dict[str, Callable[[], Any]] = {
            "list": lambda: [i for i in range(n) if i % 3],
            "replacement": lambda: RandomSampler(dataset, True, n + 3, generator=generator),
            "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, n + 1).tolist(), 15),
            "subset": lambda: SubsetRandomSampler(range(0, n, 2), generator=generator),
            "numpy": lambda: NumpySampler(n),
            "distributed": lambda: DistributedSampler(dataset, 2, 1, shuffle=True, seed=3),
            "strings": lambda: [np.int64(i) for i in range(n)],
            "failing": lambda: Failing(n),
        }
        if self.order == "uneven":
            return {"batch_sampler": Uneven(n)}
        if self.order in ("plain", "shuffle"):
            can = n > 0 or self.order == "plain"
            return {"shuffle": can and self.order == "shuffle"}
        if n == 0 and self.order in ("replacement", "distributed", "batches"):
            return {}
        if self.order == "batches":
            return {"batch_sampler": BatchSampler(RandomSampler(range(n)), 4, False)}
        return {"sampler": samplers[self.order]()}


def _script(r: random.Random, predictable: bool) -> tuple[tuple[str, int], ...]:
    """Return what the training does, epoch by epoch."""
    steps: list[tuple[str, int]] = []
    for epoch in range(r.choice((1, 2, 3, 4))):
        kind = r.choice(("full", "full", "full", "break", "two", "past"))
        if kind in ("break", "two") and not predictable:
            kind = "full"  # how far workers are at a break is a race
        steps.append((kind, r.randrange(4)))
        between = r.choice(("nothing", "nothing", "mutate", "draw", "knob", "len"))
        steps += [(between, epoch), ("set_epoch", epoch + 1)]
    return tuple(steps)


@dataclass
class Record:
    """All observable results of a loader: batches, errors, warnings, states of all generators."""

    shown: list[Any] = field(default_factory=list)
    unordered: list[Any] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def play(case: Case, cls: type[torch.utils.data.DataLoader[Any]]) -> Record:
    """Use a loader of class `cls` as the case says, from fixed seeds."""
    torch.manual_seed(case.seed)
    np.random.seed(case.seed)
    random.seed(case.seed)
    KNOB["value"] = 0
    Counting.seen = 0
    gc.collect()  # garbage of earlier tests may warn when it is collected
    record = Record()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = case.loader(cls)
        for step, k in case.script:
            _step(case, loader, step, k, record)
        del loader
    record.warned = sorted({str(w.message) for w in caught})
    return record


def _step(case: Case, loader: Any, step: str, k: int, record: Record) -> None:
    if step in ("full", "break", "two", "past"):
        _epoch(case, loader, step, k, record)
    elif step == "mutate":
        loader.dataset.scale += 1
    elif step == "draw":
        _ = torch.rand(3), np.random.rand(), random.random()
    elif step == "knob":
        KNOB["value"] += 1
    elif step == "len":
        record.shown.append(("len", _outcome(lambda: len(loader))))
    elif hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(k)
    record.shown.append(states(loader))


def _epoch(case: Case, loader: Any, step: str, k: int, record: Record) -> None:
    iterators: list[Any] = []
    for _ in range(2 if step == "two" else 1):
        iterators.append(_outcome(lambda: iter(loader)))
        record.shown.append(states(loader))
    if any(isinstance(i, tuple) for i in iterators):
        record.shown.append(iterators)
        return
    limit = k if step == "break" else 40
    for _ in range(limit):
        outcomes = [_outcome(lambda i=i: next(i)) for i in iterators]  # type: ignore[misc]
        if case.in_order:
            record.shown += outcomes
        else:
            record.unordered += [re.sub(r"process \d+", "process N", repr(o)) for o in outcomes]
        record.shown.append(states(loader))
        if all(o[:2] == ("error", "StopIteration") for o in outcomes):
            break
    if step == "past":
        record.shown.append(_outcome(lambda: next(iterators[0])))
        record.shown.append(_outcome(lambda: next(iterators[0])))


def _outcome(act: Callable[[], Any]) -> Any:
    """Return the result of an action in comparable form; ("error", class, text) if it raises."""
    try:
        value = act()
    except Exception as e:  # noqa: BLE001  both loaders must raise the same
        e.__traceback__ = None  # torch's `reraise` leaves a cycle that would keep the iterator
        lines = [line for line in str(e).splitlines() if line.strip()]
        return ("error", type(e).__name__, lines[0] if lines else "", lines[-1] if lines else "")
    return value if isinstance(value, Iterator) else plain(value)
