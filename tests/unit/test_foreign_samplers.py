"""Orders of samplers that nobody knows: iterated as by torch, foreseen where a copy can tell."""

from __future__ import annotations

import functools
import itertools
import queue
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_samplers import Echo, Loader, Make, same, states
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from creel.loader import recipes
from creel.loader.samplers import observe

pytestmark = pytest.mark.timeout(60)


class Lazy(Sampler[int]):
    """Draws from every global generator while it is iterated."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0
        self.pulled = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            self.pulled += 1
            of_numpy = np.random.randint(100)  # noqa: NPY002  (as old samplers do)
            yield int(torch.randint(100, ()).item()) + of_numpy + random.randrange(9)

    def __len__(self) -> int:
        return self.n


class Eager(Sampler[int]):
    """Draws when it is begun, and shuffles in place."""

    def __init__(self, n: int) -> None:
        self.order = list(range(n))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class Counting(RandomSampler):
    """As accelerate's: its own generator, an epoch that counts itself."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        assert self.generator is not None
        self.generator.manual_seed(self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Pairs(Sampler[list[int]]):
    """A batch sampler with batches of many sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(20).tolist()
        while left:
            k = random.randrange(1, 4)
            yield left[:k]
            left = left[k:]


FOREIGN: dict[str, Make] = {
    "lazy": lambda: DataLoader(Echo(0), sampler=Lazy(9), batch_size=4, collate_fn=same),
    "eager": lambda: DataLoader(Echo(0), sampler=Eager(9), batch_size=4, collate_fn=same),
    "eager, no batches": lambda: DataLoader(Echo(0), sampler=Eager(9), batch_size=None),
    "lazy, no batches": lambda: DataLoader(Echo(0), sampler=Lazy(9), batch_size=None),
    "counting": lambda: DataLoader(
        Echo(0), sampler=Counting(range(9), generator=torch.Generator()), collate_fn=same
    ),
    "pairs": lambda: DataLoader(Echo(0), batch_sampler=Pairs(), collate_fn=same),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (as old samplers do)
    random.seed(seed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_sampler_is_iterated_and_foreseen(name: str, workers: int) -> None:
    theirs, mine = FOREIGN[name](), FOREIGN[name]()
    mine.num_workers = workers
    if workers:
        theirs = DataLoader(
            theirs.dataset,
            num_workers=workers,
            collate_fn=theirs.collate_fn,
            **(
                {"batch_sampler": theirs.batch_sampler}
                if theirs.batch_sampler is not None
                else {"sampler": theirs.sampler, "batch_size": None}
            ),
        )
    seed_all(1)
    want = [(list(theirs), states(theirs)) for _ in range(3)]
    seed_all(1)
    order, foreseen = None, None
    got = []
    for _ in range(3):
        order = observe(mine, previous=order)
        assert not order.known
        seen = states(mine)
        now = order.predict(0)
        assert states(mine) == seen
        assert now is not None
        if foreseen is not None:
            assert foreseen.same(now)
        pulled = list(order)
        assert all(now.matches(i, b) for i, b in enumerate(pulled))
        assert len(now.ends) == len(pulled)
        seen = states(mine)
        foreseen = order.predict(1)
        assert states(mine) == seen
        got.append((pulled, seen))
    assert str(got) == str(want)


def test_a_foreign_sampler_is_pulled_one_batch_at_a_time() -> None:
    sampler = Lazy(9)
    order = observe(DataLoader(Echo(0), sampler=sampler, batch_size=4))
    assert sampler.pulled == 0
    next(order)
    assert sampler.pulled == 4


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


_module_rng = np.random.default_rng(0)


class Reaching(Sampler[int]):
    """Draws from a generator of its module, which no copy can keep from moving."""

    def __iter__(self) -> Iterator[int]:
        yield from _module_rng.permutation(4).tolist()


def drawn() -> list[int]:
    return _module_rng.permutation(4).tolist()  # type: ignore[no-any-return]  # numpy's


_count = 0
_counts = [0]
_tasks: queue.SimpleQueue[int] = queue.SimpleQueue()


class Asking(Sampler[int]):
    """Iterates what a function gives."""

    def __init__(self, ask: Callable[[], list[int]]) -> None:
        self.ask = ask

    def __iter__(self) -> Iterator[int]:
        return iter(self.ask())


class Holder:
    rng = np.random.default_rng(0)
    count = 0

    def drawn(self) -> list[int]:
        return self.rng.permutation(4).tolist()  # type: ignore[no-any-return]  # numpy's


class OfClass(Sampler[int]):
    count = 0

    def __iter__(self) -> Iterator[int]:
        type(self).count += 1
        return iter([self.count])


class OfData(Sampler[int]):
    """Counts in the dataset, which is never copied."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source
        data_source.count = 0

    def __iter__(self) -> Iterator[int]:
        self.data_source.count += 1
        return iter([self.data_source.count])


class Steady(Sampler[int]):
    """Reads what lies outside, and changes only what is its own."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.seen = []
        for i in _FIRST:
            self.seen.append(_RENAMED.get(i, i))
        yield from self.seen


_FIRST = [1, 0]
_RENAMED = {1: 1}


def in_global() -> list[int]:
    global _count  # noqa: PLW0603  that is the case
    _count += 1
    return [_count]


def in_closure() -> Callable[[], list[int]]:
    count = 0

    def ask() -> list[int]:
        nonlocal count
        count += 1
        return [count]

    return ask


def in_list() -> list[int]:
    _counts[0] += 1
    return [_counts[0]]


OUTSIDE: dict[str, Callable[[], Any]] = {
    "function": lambda: Asking(drawn),
    "lambda": lambda: Asking(lambda: drawn()),  # noqa: PLW0108  a function in a function
    "method": lambda: Asking(Holder().drawn),
    "partial": lambda: Asking(functools.partial(Holder.drawn, Holder())),
    "global": lambda: Asking(in_global),
    "closure": lambda: Asking(in_closure()),
    "list": lambda: Asking(in_list),
    "class": OfClass,
    "data": lambda: OfData(Echo(9)),
    "queue": lambda: Asking(lambda: [_tasks.get(timeout=0.1)]),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_sampler_that_a_copy_would_disturb_is_not_run_ahead(name: str, batched: bool) -> None:
    def first(*, ahead: bool) -> object:
        global _count  # noqa: PLW0603  every run begins alike
        _count = _counts[0] = OfClass.count = 0
        for rng in (_module_rng, Holder.rng):
            rng.bit_generator.state = np.random.default_rng(5).bit_generator.state
        _tasks.put(3)
        sampler = OUTSIDE[name]()
        data = getattr(sampler, "data_source", Echo(9))
        order = observe(DataLoader(data, sampler=sampler, batch_size=2 if batched else None))
        if ahead:
            now = order.predict(0)
            assert now is None or (name, batched) == ("list", False)  # that one has run already
            assert order.predict(1) is None
        return next(order)

    assert first(ahead=True) == first(ahead=False)


def test_a_sampler_that_only_looks_outside_is_foreseen() -> None:
    plan = observe(DataLoader(Echo(9), sampler=Steady(), batch_size=2)).predict(0)
    assert plan is not None
    assert plan.indices.tolist() == [1, 0]


@pytest.mark.parametrize(
    "sampler",
    [Endless(), Reaching(), (i for i in range(3)), map(int, (c for c in "123")), [[1], ["a"]]],
    ids=["endless", "reaching", "generator", "map", "words"],
)
def test_what_cannot_be_foreseen_is_said_to_be_so(sampler: Any) -> None:
    before = _module_rng.bit_generator.state
    order = observe(DataLoader(Echo(9), batch_sampler=sampler))
    foreseen = order.predict(0, budget_s=0.3)  # the endless one comes back too
    assert foreseen is None or len(foreseen.ends) == 0
    assert _module_rng.bit_generator.state == before
    assert next(order) in (0, 1, 2, 3, [1])


def test_a_subclass_or_a_patched_torch_is_not_taken_for_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader: Loader = DataLoader(Echo(9), sampler=Counting(range(9), generator=torch.Generator()))
    assert not observe(loader).known
    plain_loader: Loader = DataLoader(Echo(9), shuffle=True, batch_size=2)
    assert observe(plain_loader).known
    monkeypatch.setattr(recipes, "_TRUST", {})
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter(range(len(self))))
    order = observe(plain_loader)
    assert not order.known
    assert list(order) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_trying_torch_out_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_TRUST", {})
    state = torch.get_rng_state()
    kinds = [*recipes._RECIPES, BatchSampler]
    assert all(recipes.trusted(k) for k in kinds)
    assert torch.equal(state, torch.get_rng_state())


def test_batches_in_a_list_are_the_user_s_own_objects() -> None:
    listed = [[3, 1], (2,), torch.tensor([0, 4])]
    order = observe(DataLoader(Echo(5), batch_sampler=listed))  # type: ignore[arg-type]  # torch takes it
    foreseen = order.predict(0)
    assert all(a is b for a, b in zip(order, listed, strict=True))
    assert foreseen is not None
    assert foreseen.indices.tolist() == [3, 1, 2, 0, 4]
    assert foreseen.ends.tolist() == [2, 3, 5]
