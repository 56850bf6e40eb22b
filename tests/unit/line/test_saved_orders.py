"""A saved order continues as if it had never stopped."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from order_rig import Echo, Loader, any_loader, inner_of, observe, plain, same
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import creel
from creel.errors import ConfigError
from creel.loader.line.order.epoch_order import EpochOrder
from kit import seeds

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("case", seeds(60))
def test_an_epoch_goes_on_in_another_process(case: int) -> None:
    rng = random.Random(case)
    first = any_loader(case)
    torch.manual_seed(case)
    order = None
    inner = inner_of(first)
    for epoch in range(rng.randrange(1, 4)):
        if isinstance(inner, DistributedSampler):
            inner.set_epoch(epoch)
        order = observe(first, previous=order)
        if epoch < 2:
            list(order)
    order = observe(first, previous=order)
    taken = len(list(itertools.islice(order, rng.randrange(4))))
    state = json.loads(json.dumps(order.state()))
    saved = torch.get_rng_state()
    remaining = [plain(b) for b in order]
    then = observe(first, previous=order)
    follow = [plain(b) for b in then]

    second = any_loader(case)
    torch.manual_seed(rng.choice([case, 999]))
    seen = torch.get_rng_state()
    again = observe(second, state=state)
    again.skip(taken)
    assert str([plain(b) for b in again]) == str(remaining)
    assert again.base_seed == order.base_seed
    assert torch.equal(torch.get_rng_state(), seen)  # the user's global generator is unchanged
    torch.set_rng_state(saved)
    again = observe(second, state=state)
    again.skip(taken)
    assert str([plain(b) for b in again]) == str(remaining)
    if isinstance(inner, DistributedSampler):
        inner_of(second).epoch = inner.epoch
    if order.pulled and taken:  # the epoch's first draws were made before it was saved
        following = observe(second, previous=again)
        assert following.base_seed == then.base_seed
        assert str([plain(b) for b in following]) == str(follow)


def test_a_script_that_starts_over_from_its_seed_goes_on_as_before() -> None:
    def begin(state: Any = None) -> tuple[Loader, EpochOrder]:
        torch.manual_seed(7)
        loader: Loader = DataLoader(Echo(30), 4, shuffle=True)
        return loader, observe(loader, state=state)

    loader, order = begin()
    next(order)
    next(order)
    state = order.state()
    want = [plain(b) for b in order], [plain(b) for b in observe(loader)]
    loader, order = begin(state)
    order.skip(2)
    assert ([plain(b) for b in order], [plain(b) for b in observe(loader)]) == want


@pytest.mark.parametrize("weighted", [False, True])
def test_an_epoch_that_is_interrupted_twice_is_followed_by_the_same_epoch(weighted: bool) -> None:
    """The script puts the global generator back, and nothing draws from it amid an epoch."""

    def make() -> Loader:
        sampler = WeightedRandomSampler(range(1, 31), 30) if weighted else None
        return DataLoader(Echo(30), 4, shuffle=not weighted, sampler=sampler)

    loader = make()
    order = observe(loader)
    next(order)
    state, saved = order.state(), torch.get_rng_state()
    want = [plain(b) for b in order], [plain(b) for b in observe(loader)]
    for _ in range(2):
        loader = make()
        torch.set_rng_state(saved)
        order = observe(loader, state=state)
        order.skip(1)
        state = order.state()
    assert ([plain(b) for b in order], [plain(b) for b in observe(loader)]) == want


def test_a_saved_order_is_small() -> None:
    order = observe(DataLoader(Echo(1_000_000), 4, shuffle=True))
    next(order)
    assert len(json.dumps(order.state())) < 200
    assert len(pickle.dumps(order.state())) < 300
    generator = torch.Generator()
    order = observe(DataLoader(Echo(1000), 4, shuffle=True, generator=generator))
    assert len(json.dumps(order.state())) < 5000


def test_a_saved_order_of_another_dataset_is_refused() -> None:
    state = observe(DataLoader(Echo(30), 4, shuffle=True)).state()
    with pytest.raises(ConfigError, match="30 samples, this loader has 31"):
        observe(DataLoader(Echo(31), 4, shuffle=True), state=state)
    with pytest.raises(ConfigError, match="RandomSampler"):
        observe(DataLoader(Echo(30), 4), state=state)


class Reversed(BatchSampler):
    """A person's batch sampler around one of torch's samplers, which may be run ahead."""

    foreseeable = True

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch[::-1]


class Around(Sampler[int]):
    """A person's sampler around one of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(list(self.sampler)[1:])


N = 41
GENERATORS = ("global", "own", "the loader's")


def around(kind: str, generator: str, *, workers: int = 0) -> Any:
    """Return a loader whose custom sampler is around one of torch's."""
    generators = {name: torch.Generator().manual_seed(4) for name in GENERATORS[1:]}
    g = generators.get(generator)
    made_of: dict[str, Callable[[], Any]] = {
        "random": lambda: RandomSampler(range(N), generator=g),
        "replacement": lambda: RandomSampler(range(N), True, N, generator=g),
        "subset": lambda: SubsetRandomSampler(range(1, N, 2), g),
        "weighted": lambda: WeightedRandomSampler([1.0] * N, N, True, g),
    }
    inner = made_of[kind.rsplit(maxsplit=1)[-1]]()
    options: dict[str, Any] = {"generator": generators["the loader's"], "num_workers": workers}
    if kind.startswith("single"):
        options["sampler"] = Around(inner)
    else:
        options["batch_sampler"] = Reversed(inner, 4, False)
    return creel.DataLoader(Echo(N), collate_fn=same, creel=False, **options)


@pytest.mark.filterwarnings("ignore:(Reversed|Around) has neither")
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("kind", ["random", "replacement", "subset", "weighted", "single random"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_sampler_around_torchs_goes_on_with_the_same_samples(
    kind: str, generator: str, workers: int
) -> None:
    torch.manual_seed(0)
    first = around(kind, generator, workers=workers)
    list(first)
    it = iter(first)
    head = [next(it) for _ in range(3)]
    state = json.loads(json.dumps(first.state_dict()))
    remaining = list(it)
    over = json.loads(json.dumps(first.state_dict()))
    following = list(first)
    assert len(head + remaining) > 3

    torch.manual_seed(999)
    seen = torch.get_rng_state()
    second = around(kind, generator, workers=0)
    second.load_state_dict(state)
    assert list(second) == remaining
    assert torch.equal(torch.get_rng_state(), seen), "the global generator belongs to the user"
    if generator != "global":
        assert list(second) == following
        third = around(kind, generator)
        third.load_state_dict(over)
        assert list(third) == following


@pytest.mark.filterwarnings("ignore:Reversed has neither")
def test_a_script_that_seeds_and_resumes_makes_all_draws_again() -> None:
    def trained(state: Any = None) -> list[Any]:
        torch.manual_seed(7)
        loader = around("random", "global")
        if state:
            loader.load_state_dict(state)
        it = iter(loader)
        out = list(it) if state else [next(it) for _ in range(3)] + [loader.state_dict(), *it]
        return [*out, torch.rand(1).item()]

    whole = trained()
    assert trained(whole[3]) == whole[4:]
