"""Loaders with any of torch's samplers, and their orders as torch's iterator would begin them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
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
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.loader.extras.rehearsal.memory import Rehearsal
from creel.loader.line.order import generators
from creel.loader.line.order.epoch_order import EpochOrder, IteratorStart, index_sampler
from creel.loader.line.order.samplers import before, take_over

Loader = DataLoader[Any]
Make = Callable[[], Loader]


def observe(
    loader: Any,
    *,
    previous: EpochOrder | None = None,
    keep_seed: bool = False,
    foresee: bool = False,
    state: Any = None,
) -> EpochOrder:
    """Begin an epoch with the calls and draws of torch's iterator, and observe it.

    state: of the epoch to begin again instead.

    keep_seed: workers persist and this is not their first epoch: no base seed is drawn.
    """
    moment, sampler = before(loader, previous, foresee=foresee), loader._index_sampler
    sampler_iter = iter(sampler)
    if previous is not None and keep_seed:
        base_seed = previous.base_seed
    else:
        base_seed = generators.RandomSource().seed(loader.generator)
        if loader.num_workers > 0:
            sampler_iter = iter(sampler)  # torch's iterator with workers calls iter() twice
    begun = IteratorStart(sampler_iter, base_seed, moment)
    return take_over(loader, begun, previous=previous, state=state)


class Echo(Dataset[Any]):
    """Sample i is i, so a batch is its indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


def same(batch: Any) -> Any:
    return batch


def inner_of(loader: Loader) -> Any:
    """Return the sampler that draws: the one inside a BatchSampler, or else the loader's."""
    sampler: Any = index_sampler(loader)
    return getattr(sampler, "sampler", sampler)


def plain(value: Any) -> Any:
    """Return the items of an order as torch would yield them."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def states(loader: Loader) -> list[bytes]:
    """Return all states of generators that a user can see."""
    inner: Any = index_sampler(loader)
    own = [getattr(s, "generator", None) for s in (loader, inner, getattr(inner, "sampler", None))]
    seen = [torch.default_generator, *(g for g in own if g is not None)]
    return [
        *(g.get_state().numpy().tobytes() for g in seen),
        pickle.dumps(np.random.get_state()),  # noqa: NPY002  (what users draw from)
        repr(hash(random.getstate())).encode(),
    ]


def any_sampler(rng: random.Random, n: int, generator: torch.Generator | None) -> Any:
    """Return one of torch's samplers with any arguments, or a sequence."""
    kind = rng.choice(["seq", "perm", "perm", "repl", "subset", "weighted", "dist", "list"])
    g = rng.choice([generator, generator, None, torch.Generator().manual_seed(rng.randrange(99))])
    num = rng.choice([None, n, 1, rng.randrange(1, n + 1), rng.randrange(1, 3 * n + 1), 2 * n])
    if kind == "seq":
        return SequentialSampler(range(n))
    if kind == "perm":
        return RandomSampler(range(n), False, num, g)
    if kind == "repl":
        return RandomSampler(range(n), True, num, g)
    if kind == "subset":
        return SubsetRandomSampler(rng.sample(range(n), rng.randrange(n + 1)), g)
    if kind == "weighted":
        replace = rng.random() < 0.5
        count = rng.randrange(1, n + 1) if not replace else rng.randrange(1, 2 * n + 1)
        return WeightedRandomSampler([rng.random() + 0.01 for _ in range(n)], count, replace, g)
    if kind == "dist":
        world = rng.randrange(1, 6)
        drop, shuffle = rng.random() < 0.5, rng.random() < 0.8
        return DistributedSampler(
            Echo(n), world, rng.randrange(world), shuffle, rng.randrange(9), drop
        )
    listed = rng.choices(range(n), k=rng.randrange(n + 1))
    return rng.choice([listed, tuple(listed), range(n), np.array(listed), torch.tensor(listed)])


def any_loader(case: int, *, workers: int = 0) -> Loader:
    """Return the loader of a case: equal calls give equal, separate loaders."""
    rng = random.Random(case)
    n = rng.choice([1, 2, rng.randrange(1, 12), rng.randrange(1, 60), rng.randrange(1, 200)])
    generator = torch.Generator().manual_seed(case) if rng.random() < 0.5 else None
    kwargs: dict[str, Any] = {
        "collate_fn": same,
        "generator": generator,
        "num_workers": workers,
        "persistent_workers": bool(workers) and rng.random() < 0.5,
    }
    size = rng.choice([1, 2, 3, rng.randrange(1, 70)])
    chance = rng.random()
    if chance < 0.25:
        kwargs |= {"shuffle": rng.random() < 0.8, "batch_size": size}
        kwargs["drop_last"] = rng.random() < 0.5
    elif chance < 0.7:
        kwargs |= {"sampler": any_sampler(rng, n, generator), "batch_size": size}
        kwargs["drop_last"] = rng.random() < 0.5
    elif chance < 0.8:
        kwargs |= {"sampler": any_sampler(rng, n, generator), "batch_size": None}
    elif chance < 0.9:
        inner = any_sampler(rng, n, generator)
        kwargs["batch_sampler"] = BatchSampler(inner, size, rng.random() < 0.5)
    else:
        inner = any_sampler(rng, n, generator)
        kwargs |= {"sampler": BatchSampler(inner, size, False), "batch_size": None}
    return DataLoader(Echo(n), **kwargs)


def rehearsed(loader: Loader, memory: Rehearsal, **changes: Any) -> Loader:
    """Return a loader like another one, with rows of a memory; they have numbers above its own."""
    batches = memory.over(loader.dataset, changes.pop("batches", loader.batch_sampler), None)[1]
    names = ("collate_fn", "generator", "num_workers", "persistent_workers")
    options = {name: getattr(loader, name) for name in names} | changes
    return DataLoader(Echo(1 << 30), batch_sampler=batches, **options)


def any_memory(case: int) -> Rehearsal:
    """Return the memory of a case, empty only if it grows."""
    rng = random.Random(case + 1000)
    budget, every = rng.choice([None, rng.randrange(1, 40)]), rng.choice([None, 1, 3])
    memory = Rehearsal(rng.randrange(1, 9), budget=budget, every=every)
    for _ in range(rng.randrange(0 if every else 1, 4)):
        memory.add(Echo(n := rng.randrange(1, 40)), rng.choice([None, np.arange(n) % 3]))
    return memory


def any_rehearsed_loader(case: int, *, workers: int = 0) -> Loader:
    """Return the loader of a case: equal calls give equal, separate loaders with equal memories."""
    loader = any_loader(case, workers=workers)
    while loader.batch_sampler is None:
        case += 100_003
        loader = any_loader(case, workers=workers)
    return rehearsed(loader, any_memory(case))
