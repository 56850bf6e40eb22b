"""Predicted orders come true."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import Echo, Loader, any_loader, inner_of, observe, plain
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from creel.loader.line.order.epoch_plan import same_batch
from kit import seeds

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("case", seeds(80))
def test_a_prediction_is_what_comes(case: int) -> None:
    loader = any_loader(case)
    torch.manual_seed(case)
    order, foreseen, steps = None, None, random.Random(case).randrange(4)
    inner = inner_of(loader)
    for epoch in range(3):
        if isinstance(inner, DistributedSampler):
            inner.set_epoch(epoch)
        order = observe(loader, previous=order)
        now = order.predict(0)
        assert now is not None
        if foreseen is not None:
            assert foreseen.same(now), epoch
        pulled = [plain(b) for b in itertools.islice(order, steps)]
        foreseen = order.predict(1)
        assert foreseen is not None
        again = order.predict(0)
        assert again is not None
        assert now.same(again)
        pulled += [plain(b) for b in order]
        assert now.steps == len(pulled)
        assert all(same_batch(now.cut(i, i + 1)[0], b) for i, b in enumerate(pulled))
        flat = [int(i) for b in pulled for i in (b if isinstance(b, list) else [b])]
        indices, ends = now.cut(0, now.steps)
        assert indices.tolist() == flat
        assert indices.dtype == np.int32
        assert np.diff(ends, prepend=0).tolist() == [len(np.atleast_1d(b)) for b in pulled]


def test_a_wrong_prediction_is_noticed() -> None:
    loader: Loader = DataLoader(Echo(50), batch_size=4, shuffle=True)
    order = observe(loader)
    foreseen = order.predict(1)
    assert foreseen is not None
    torch.rand(1)
    now = observe(loader, previous=order)
    actual = now.predict(0)
    assert actual is not None
    assert not foreseen.same(actual)
    assert not same_batch(foreseen.cut(0, 1)[0], next(now))
    assert not same_batch(foreseen.cut(0, 1)[0], ["a", object()])


@pytest.mark.parametrize("kind", ["distributed", "generator"])
def test_draws_of_the_training_leave_a_sampler_of_its_own_generator_predicted(kind: str) -> None:
    dataset = Echo(50)
    sampler: Any = DistributedSampler(dataset, 2, 0)
    if kind == "generator":
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    loader: Loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    order = observe(loader)
    list(order)
    foreseen = order.predict(1)
    torch.rand(1)  # from the global generator, as dropout does
    if kind == "distributed":
        sampler.set_epoch(1)
    actual = observe(loader, previous=order).predict(0)
    assert foreseen is not None
    assert actual is not None
    assert foreseen.same(actual)
