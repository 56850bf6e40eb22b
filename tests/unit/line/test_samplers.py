"""Orders against torch's own DataLoader: the same batches and draws, at the same moments."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from order_rig import Echo, Loader, any_loader, inner_of, observe, plain, same, states
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from creel.loader.line.order import samplers
from creel.loader.line.order.epoch_order import EpochOrder, IteratorStart
from kit import seeds

pytestmark = pytest.mark.timeout(120)


def equal(a: Any, b: Any) -> bool:
    """Return whether values and types are equal, down to the items."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def epochs(
    loader: Loader, begin: Callable[[], Iterator[Any]], case: int, count: int = 3
) -> list[Any]:
    """Run epochs with a user's draws in between; return every batch and all states."""
    rng = random.Random(case + 1)
    torch.manual_seed(case)
    events: list[Any] = []
    inner = inner_of(loader)
    for epoch in range(count):
        if isinstance(inner, DistributedSampler) and rng.random() < 0.8:
            inner.set_epoch(epoch)
        stop = rng.choice([None, None, rng.randrange(1, 5)])
        it = begin()
        events.append(("iter", it.__dict__.get("_base_seed", None), states(loader)))
        for step in itertools.count():
            if stop is not None and step >= stop:
                break
            if rng.random() < 0.2:
                torch.rand(rng.randrange(1, 5))  # the model draws
            if rng.random() < 0.1 and loader.generator is not None:
                torch.rand(3, generator=loader.generator)
            try:
                batch = next(it)
            except StopIteration:
                events.append(("end", states(loader)))
                break
            events.append((plain(batch), states(loader)))
    return events


def ours(loader: Loader, *, look: bool) -> Callable[[], Iterator[Any]]:
    """Begin epochs by `observe`; `look`: predict at every moment, which must have no effect."""
    last: list[EpochOrder] = []

    def begin() -> Iterator[Any]:
        order = observe(loader, previous=last[-1] if last else None)
        last.append(order)
        return Watched(order, look=look)

    return begin


class Watched(Iterator[Any]):
    """An order that is asked for predictions all the time."""

    def __init__(self, order: EpochOrder, *, look: bool) -> None:
        self.order = order
        self._base_seed = order.base_seed
        self.look = look

    def __next__(self) -> Any:
        if self.look:
            for ahead in (0, 1):
                foreseen = self.order.predict(ahead)
                assert foreseen is not None
                assert foreseen.steps >= 0
                foreseen.cut(0, foreseen.steps)
            self.order.state()
        return next(self.order)


@pytest.mark.parametrize("block", seeds(15))
def test_three_epochs_are_torch_s_at_every_moment(block: int) -> None:
    for case in range(10 * block, 10 * block + 10):
        theirs, mine = any_loader(case), any_loader(case)
        want = epochs(theirs, functools.partial(iter, theirs), case)
        # Every other order is asked for predictions all the time.
        got = epochs(mine, ours(mine, look=case % 2 > 0), case)
        assert len(want) == len(got), case
        for step, (w, g) in enumerate(zip(want, got, strict=True)):
            assert equal(list(w[:-1]), list(g[:-1])), (case, step)
            assert w[-1] == g[-1], (case, step)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("later", [1, 10, 33, 45, 60])
def test_an_epoch_has_the_length_that_its_dataset_had_at_the_start(
    replacement: bool, own: bool, later: int
) -> None:
    """Torch's RandomSampler asks for it again before its last draw, and yields some twice."""

    def two_epochs(begin: Callable[[Loader], Iterator[Any]], *, amid: bool) -> list[Any]:
        torch.manual_seed(5)
        data = Echo(37)
        generator = torch.Generator().manual_seed(6) if own else None
        sampler = RandomSampler(data, replacement, generator=generator)
        loader = DataLoader(data, 4, sampler=sampler, collate_fn=same)
        it = begin(loader)
        batches = [plain(next(it))]
        data.n = later if amid else data.n
        batches += [plain(batch) for batch in it]
        data.n = later
        return [*batches, *[plain(batch) for batch in begin(loader)], states(loader)]

    assert two_epochs(observe, amid=True) == two_epochs(iter, amid=False)


def test_none_left_of_a_dataset_is_torch_s_error() -> None:
    for replacement, error in (False, ZeroDivisionError), (True, RuntimeError):
        data = Echo(5)
        loader = DataLoader(data, 4, sampler=RandomSampler(data, replacement))
        data.n = 0
        for begin in iter, observe:
            with pytest.raises(error):
                next(begin(loader))


@pytest.mark.parametrize("case", [3, 11, 17, 29, 42, 58])
def test_with_workers_the_draws_are_torch_s_too(case: int) -> None:
    theirs, mine = any_loader(case, workers=2), any_loader(case, workers=2)
    seeds: list[list[int]] = [[], []]
    after: list[list[Any]] = [[], []]
    torch.manual_seed(case)
    for _ in range(3):
        it: Any = iter(theirs)
        seeds[0].append(it._base_seed)
        after[0].append((list(it), states(theirs)))
    del it
    torch.manual_seed(case)
    order = None
    for _ in range(3):
        keep = order is not None and mine.persistent_workers
        order = observe(mine, previous=order, keep_seed=keep)
        seeds[1].append(order.base_seed)
        after[1].append(([plain(b) for b in order], states(mine)))
    assert seeds[0] == seeds[1]
    assert str(after[0]) == str(after[1])


def test_torch_s_own_iterator_can_begin_the_epoch() -> None:
    loader: Loader = DataLoader(Echo(30), 4, shuffle=True, collate_fn=same)
    torch.manual_seed(1)
    want = list(loader)
    torch.manual_seed(1)
    moment = samplers.before(loader)
    it: Any = iter(loader)
    begun = IteratorStart(it._sampler_iter, it._base_seed, moment)
    order = samplers.take_over(loader, begun)
    it._sampler_iter = map(plain, order)
    assert list(it) == want
    torch.manual_seed(3)
    seen, moment = torch.get_rng_state(), samplers.before(loader)
    it = iter(loader)
    begun = IteratorStart(it._sampler_iter, it._base_seed, moment)
    order = samplers.take_over(loader, begun, state=order.state())
    assert torch.equal(torch.get_rng_state(), seen)
    order.skip(3)
    assert [plain(b) for b in order] == want[3:]
