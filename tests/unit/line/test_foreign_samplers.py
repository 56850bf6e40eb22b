"""Orders of custom samplers: iterated as by torch, predicted only on request."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import Echo, Loader, observe, same, states
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

from creel.loader.line.order import replay
from creel.loader.line.order.custom import sampler_copy
from creel.loader.line.order.epoch_plan import same_batch

pytestmark = pytest.mark.timeout(120)


class Lazy(Sampler[int]):
    """Draws from three generators while it is iterated: global ones, or its own."""

    def __init__(self, n: int, *, own: bool) -> None:
        self.n = n
        self.own = own
        self.pulled = 0
        self.of_torch, self.of_random = torch.Generator().manual_seed(1), random.Random(1)
        self.of_numpy = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            self.pulled += 1
            generator = self.of_torch if self.own else None
            drawn = int(torch.randint(100, (), generator=generator))
            if self.own:
                drawn += self.of_random.randrange(9) + int(self.of_numpy.integers(100))
            else:
                drawn += random.randrange(9) + int(np.random.randint(100))  # noqa: NPY002
            yield drawn

    def __len__(self) -> int:
        return self.n


class Eager(Sampler[int]):
    """Draws when an iteration begins, and shuffles in place."""

    def __init__(self, n: int, shuffle: Callable[[list[int]], None]) -> None:
        self.order = list(range(n))
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        self.shuffle(self.order)
        return iter(self.order)


class EagerGenerator(Eager):
    """The same, but torch pulls a generator."""

    def __iter__(self) -> Iterator[int]:
        return (i for i in [*super().__iter__()])


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


class ByScript(Counting):
    """Its script counts the epochs, or forgets to."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(9).tolist())


class Pairs(Sampler[list[int]]):
    """A batch sampler with batches of many sizes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(20))
        while left:
            k = self.rng.randrange(1, 4)
            yield left[:k]
            left = left[k:]


def shared(n: int) -> Any:
    """Return a sampler's and a loader's arguments: both draw from one generator."""
    generator = torch.Generator().manual_seed(4)
    sampler = SubsetOfItsOwn(range(n), generator=generator)
    return {"sampler": sampler, "generator": generator}


class SubsetOfItsOwn(SubsetRandomSampler):
    """A subclass may draw in another way than torch's class: it counts as custom."""


#: Arguments of loaders whose samplers draw only from generators of their own.
OWN: dict[str, Callable[[], Any]] = {
    "lazy": lambda: {"sampler": Lazy(9, own=True), "batch_size": 4},
    "lazy, no batches": lambda: {"sampler": Lazy(9, own=True), "batch_size": None},
    "eager": lambda: {"sampler": Eager(9, random.Random(2).shuffle), "batch_size": 4},
    "eager, no batches": lambda: {
        "sampler": Eager(9, random.Random(2).shuffle),
        "batch_size": None,
    },
    "eager, a generator": lambda: {"sampler": EagerGenerator(9, random.Random(2).shuffle)},
    "the loader's generator": lambda: {**shared(9), "batch_size": 4},
    "counting": lambda: {"sampler": Counting(range(9), generator=torch.Generator())},
    "counted by its script": lambda: {"sampler": ByScript(range(9)), "batch_size": 2},
    "pairs": lambda: {"batch_sampler": Pairs(random.Random(3))},
}


def shuffle_randomly(order: list[int]) -> None:
    random.shuffle(order)


def shuffle_by_numpy(order: list[int]) -> None:
    np.random.shuffle(order)  # noqa: NPY002  (as old samplers do)


def seed(_: list[int]) -> None:
    np.random.seed(3)  # noqa: NPY002  (as old samplers do)


#: Arguments of loaders whose samplers draw from a global generator.
GLOBAL: dict[str, Callable[[], Any]] = {
    "lazy": lambda: {"sampler": Lazy(9, own=False), "batch_size": 4},
    "lazy, no batches": lambda: {"sampler": Lazy(9, own=False), "batch_size": None},
    "random": lambda: {"sampler": Eager(9, shuffle_randomly), "batch_size": 4},
    "numpy": lambda: {"sampler": Eager(9, shuffle_by_numpy), "batch_size": None},
    "a seed": lambda: {"sampler": Eager(9, seed)},
    "torch": lambda: {"sampler": SubsetOfItsOwn(range(9)), "batch_size": 4},
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (as old samplers do)
    random.seed(seed)


def loader_of(arguments: Any, workers: int, *, persistent: bool = False) -> Loader:
    options: Any = {"num_workers": workers, "persistent_workers": persistent}
    return DataLoader(Echo(0), collate_fn=same, **arguments, **options)


def count_epochs(loader: Loader, epoch: int) -> None:
    """Call `set_epoch`, as a script does, if the sampler needs it."""
    if isinstance(loader.sampler, ByScript):
        loader.sampler.set_epoch(epoch)


@pytest.mark.parametrize(
    "name, workers, persistent",
    [
        *((name, *way) for name in OWN for way in ((0, False), (2, True))),
        *((name, 2, False) for name in ("lazy", "the loader's generator", "counted by its script")),
    ],
)
def test_a_custom_sampler_is_predicted_where_that_is_asked_for(
    name: str, workers: int, persistent: bool
) -> None:
    theirs, mine = (loader_of(OWN[name](), workers, persistent=persistent) for _ in range(2))
    seed_all(1)
    want = []
    for epoch in range(4):
        count_epochs(theirs, epoch)
        want.append((list(theirs), states(theirs)))
    seed_all(1)
    order: Any = None
    upcoming: Any = None
    got = []
    for epoch in range(4):
        count_epochs(mine, epoch)
        order = permitted(mine, order, keep_seed=persistent and order is not None)
        assert not order.known
        seen = states(mine)
        now = order.predict(0)
        assert states(mine) == seen
        assert now is not None
        assert upcoming is None or upcoming.same(now)
        pulled = [next(order)]
        seen = states(mine)
        upcoming = order.predict(1)
        assert upcoming is not None
        assert states(mine) == seen
        pulled += order
        assert now.steps == len(pulled)
        assert all(same_batch(now.cut(i, i + 1)[0], b) for i, b in enumerate(pulled))
        got.append((pulled, states(mine)))
    assert str(got) == str(want)


@pytest.mark.parametrize(
    "name, workers", [*((name, 0) for name in GLOBAL), ("lazy", 2), ("torch", 2)]
)
def test_a_custom_sampler_that_draws_globally_is_refused_and_only_followed(
    name: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mine = (loader_of(GLOBAL[name](), workers) for _ in range(2))
    seed_all(1)
    want = [(list(theirs), states(theirs)) for _ in range(3)]
    seed_all(1)
    order = None
    got = []
    for _ in range(3):
        order = permitted(mine, order)
        seen = states(mine)
        assert order.predict(0) is order.predict(1) is None
        assert states(mine) == seen, "what the copy has drawn is put back"
        got.append((list(order), states(mine)))
    assert str(got) == str(want)
    (warning,) = caplog.records
    assert "give it one of its own" in warning.getMessage()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_copy_that_raises_leaves_the_global_generators_as_they_were(
    error: type[BaseException],
) -> None:
    raises: list[bool] = []

    def shuffle(_: list[int]) -> None:
        torch.rand(1)
        if raises:
            raise error

    order = permitted(loader_of({"sampler": Eager(9, shuffle)}, 0))
    raises.append(True)
    seen = torch.get_rng_state()
    with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
        assert order.predict(0) is None
    assert torch.equal(torch.get_rng_state(), seen)
    raises.clear()
    assert len(list(order)) == 9


def test_a_draw_of_the_training_is_not_taken_for_the_copy_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The copy runs in the thread that trains, between two steps of it."""
    order = permitted(loader_of({"sampler": Lazy(9, own=True)}, 0))
    for _ in range(3):
        torch.rand(1)
        assert order.predict(0) is not None
        next(order)
        random.random()
        assert order.predict(1) is not None
    assert caplog.records == []


def test_a_custom_sampler_is_pulled_one_batch_at_a_time() -> None:
    sampler = Lazy(9, own=False)
    order = observe(DataLoader(Echo(0), sampler=sampler, batch_size=4))
    assert sampler.pulled == 0
    next(order)
    assert sampler.pulled == 4


def permitted(loader: Loader, previous: Any = None, *, keep_seed: bool = False) -> Any:
    """Return its order, begun, if the user permits running a copy ahead."""
    return observe(loader, previous=previous, foresee=True, keep_seed=keep_seed)


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
    order.note_wrong_prediction()
    assert "no copy of Declared ahead: it yielded other samples" in caplog.text
    order = observe(loader, previous=order)
    assert order.predict(0) is order.predict(1) is None
    assert len(LOG) == 1


class Numbers(list[int]):
    """A sequence whose items run the user's code."""

    def __getitem__(self, i: Any) -> Any:
        LOG.append(i)
        return super().__getitem__(i)


def test_indices_that_are_the_user_s_code_are_not_read_ahead() -> None:
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
def test_a_sampler_that_cannot_be_copied_or_never_ends_is_followed(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_copy, "COPY_S", 0.3)
    order = permitted(DataLoader(Echo(9), batch_sampler=sampler))
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
