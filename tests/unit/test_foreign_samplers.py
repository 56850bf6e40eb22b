"""Orders of a user's own samplers: iterated as by torch, predicted only on request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import Echo, Loader, Make, observe, same, states
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.loader.order import epoch_order, replay
from creel.loader.order.epoch_plan import same_batch

pytestmark = pytest.mark.timeout(60)


class Lazy(Sampler[int]):
    """Draws from all global generators while it is iterated."""

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
    """Draws when an iteration begins, and shuffles in place."""

    def __init__(self, n: int) -> None:
        self.order = list(range(n))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class Counting(RandomSampler):
    """Like accelerate's: its own generator, and an epoch that counts itself."""

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
def test_a_foreign_sampler_is_foreseen_where_that_is_asked_for(name: str, workers: int) -> None:
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
        order = of_the_persons(mine, order)
        assert not order.known
        seen = states(mine)
        now = order.predict(0)
        assert states(mine) == seen
        assert now is not None
        if foreseen is not None:
            assert foreseen.same(now)
        pulled = list(order)
        assert now.steps == len(pulled)
        assert all(same_batch(now.cut(i, i + 1)[0], b) for i, b in enumerate(pulled))
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


def of_the_persons(loader: Loader, previous: Any = None) -> Any:
    """Return its order, begun, if the user permits running a copy ahead."""
    return observe(loader, previous=previous, foresee=True)


class Logged(Sampler[int]):
    """Writes a line for each run, like a sampler that logs or draws from elsewhere."""

    def __init__(self) -> None:
        self.runs = LOG

    def __iter__(self) -> Iterator[int]:
        LOG.append(len(LOG))
        yield from (2, 0, 1)


class Declared(Logged):
    foreseeable = True


LOG: list[int] = []


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_runs_as_often_as_under_torch_unless_it_is_declared(batched: bool) -> None:
    def epochs(make: type[Logged]) -> list[bool]:
        LOG.clear()
        loader: Loader = DataLoader(Echo(9), sampler=make(), batch_size=2 if batched else None)
        order, foreseen = None, []
        for _ in range(3):
            order = observe(loader, previous=order)
            foreseen += [order.predict(0) is not None]
            list(order)
            foreseen += [order.predict(1) is not None]
        return foreseen

    assert not any(epochs(Logged))
    assert LOG == [0, 1, 2]
    assert all(epochs(Declared))
    assert len(LOG) == 9


def test_a_declared_sampler_that_went_another_way_is_run_ahead_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LOG.clear()
    loader: Loader = DataLoader(Echo(9), sampler=Declared(), batch_size=2)
    order = observe(loader)
    assert order.predict(0) is not None
    order.record_outcome(wrong=True)
    assert "Declared yielded other samples" in caplog.text
    order = observe(loader, previous=order)
    assert order.predict(0) is order.predict(1) is None
    assert len(LOG) == 1


class Numbers(list[int]):
    """A sequence whose items run the user's code."""

    def __getitem__(self, i: Any) -> Any:
        LOG.append(i)
        return super().__getitem__(i)


def test_indices_that_are_the_persons_code_are_not_read_ahead() -> None:
    LOG.clear()
    sampler = SubsetRandomSampler(Numbers([3, 1, 4]))
    order = observe(DataLoader(Echo(9), sampler=sampler, batch_size=2))
    assert order.predict(0) is order.predict(1) is None
    assert LOG == []
    next(order)
    assert len(LOG) == 2


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    "sampler",
    [Endless(), (i for i in range(3)), map(int, (c for c in "123")), [[1], ["a"]]],
    ids=["endless", "generator", "map", "words"],
)
def test_what_cannot_be_foreseen_is_said_to_be_so(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_order, "COPY_S", 0.3)
    order = of_the_persons(DataLoader(Echo(9), batch_sampler=sampler))
    foreseen = order.predict(0)  # returns for the endless one, too
    assert foreseen is None or foreseen.steps == 0
    assert next(order) in (0, 1, 2, 3, [1])


def test_a_subclass_or_a_patched_torch_is_not_taken_for_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader: Loader = DataLoader(Echo(9), sampler=Counting(range(9), generator=torch.Generator()))
    assert not observe(loader).known
    plain_loader: Loader = DataLoader(Echo(9), shuffle=True, batch_size=2)
    assert observe(plain_loader).known
    monkeypatch.setattr(replay, "agrees_with_torch", replay.agrees_with_torch.__wrapped__)
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: iter(range(len(self))))
    order = observe(plain_loader)
    assert not order.known
    assert list(order) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_trying_torch_out_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    kinds = [
        *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
        *(DistributedSampler, BatchSampler),
    ]
    assert all(replay.agrees_with_torch.__wrapped__(k) for k in kinds)
    assert torch.equal(state, torch.get_rng_state())


def test_batches_in_a_list_are_the_user_s_own_objects() -> None:
    listed = [[3, 1], (2,), torch.tensor([0, 4])]
    order = observe(DataLoader(Echo(5), batch_sampler=listed))  # type: ignore[arg-type]  # torch accepts it
    foreseen = order.predict(0)
    assert all(a is b for a, b in zip(order, listed, strict=True))
    assert foreseen is not None
    indices, ends = foreseen.cut(0, foreseen.steps)
    assert indices.tolist() == [3, 1, 2, 0, 4]
    assert ends.tolist() == [2, 3, 5]
