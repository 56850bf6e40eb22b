"""Parts of a batch join to what default_collate makes of the whole, or are refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from creel.loader.making.transport.parts import UnevenPartsError, joined, kind_of
from creel.policies.concurrency import SampleTimes
from kit import seeds
from shown import plain


def drawn(r: random.Random, depth: int) -> Any:
    """Return a function that makes samples of one structure, some of which differ now and then."""
    odd = r.random() < 0.2
    kind = r.randrange(5 if depth else 12)
    if kind == 0 and depth:
        fields = [drawn(r, depth - 1) for _ in range(r.randrange(1, 4))]
        return lambda: tuple(field() for field in fields)
    if kind == 1 and depth:
        fields = [drawn(r, depth - 1) for _ in range(r.randrange(0, 3))]
        return lambda: [field() for field in fields]
    if kind == 2 and depth:
        named = {name: drawn(r, depth - 1) for name in r.sample("abcd", 2)}
        return lambda: {key: field() for key, field in named.items()}
    shape = [r.randrange(0, 4) for _ in range(r.randrange(3))]

    def tensor() -> Any:
        tensor_drawn = torch.rand(shape)
        return tensor_drawn.double() if odd and r.random() < 0.1 else tensor_drawn

    leaves: list[Any] = [
        tensor,
        lambda: torch.randint(0, 9, (2 + (odd and r.random() < 0.1),)),
        lambda: np.random.rand(*shape),  # noqa: NPY002  any will do
        lambda: np.float32(r.random()),
        lambda: r.random() if not odd or r.random() < 0.8 else 1,
        lambda: r.randrange(9) if not odd or r.random() < 0.8 else 2.5,
        lambda: r.random() < 0.5,
        lambda: "s" * r.randrange(3),
        lambda: bytes(r.randrange(3)),
        lambda: torch.rand(3) if not odd or r.random() < 0.9 else np.zeros(3, np.float32),
        lambda: None if odd else 1,
        lambda: {1: 2} if odd else {"a": 1},
    ]
    return leaves[r.randrange(len(leaves))]


def collated(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError):
        return None


@pytest.mark.parametrize("seed", seeds(300))
def test_joined_parts_are_torchs_batch_or_are_refused(seed: int) -> None:
    r = random.Random(seed)
    make = drawn(r, 2)
    samples = [make() for _ in range(r.randrange(2, 9))]
    ends = sorted(r.sample(range(1, len(samples)), r.randrange(1, min(len(samples), 4))))
    cut = [samples[a:b] for a, b in zip([0, *ends], [*ends, len(samples)], strict=True)]
    kinds = {kind_of(part[0]) for part in cut}
    batches = [collated(part) for part in cut]
    if len(kinds) > 1 or "" in kinds or any(part is None for part in batches):
        return  # made as a whole
    try:
        batch = joined(batches)
    except UnevenPartsError:
        return
    whole = collated(samples)
    assert plain(batch) == plain(whole)
    assert [tensor.stride() for tensor in _tensors(batch)] == [
        tensor.stride() for tensor in _tensors(whole)
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return (
        [tensor for part in inner for tensor in _tensors(part)]
        if not isinstance(value, (str, bytes))
        else []
    )


@pytest.mark.parametrize(
    "sample",
    [(torch.zeros(2, 3), 1), {"a": [1.5, "x"], "b": (b"y", np.int64(3))}, "text", ["p", "q"]],
)
def test_usual_samples_can_be_cut(sample: Any) -> None:
    assert kind_of(sample)
    whole = default_collate([sample] * 5)
    assert plain(joined([default_collate([sample] * 2), default_collate([sample] * 3)])) == plain(
        whole
    )


def timed(cv: float, batch: int, mean_s: float = 0.02) -> SampleTimes:
    """Times of batches whose samples take `mean_s`, with a coefficient of variation `cv`."""
    rng, times = np.random.default_rng(0), SampleTimes()
    sigma2 = np.log1p(cv**2)
    for _ in range(200):
        drawn = rng.lognormal(-sigma2 / 2, sigma2**0.5, batch) * mean_s
        times.measured(batch, float(drawn.sum()))
    return times


@pytest.mark.parametrize("awaited", [False, True])
def test_no_part_is_empty_and_none_is_too_short(awaited: bool) -> None:
    for mean_s in (None, 1e-6, 0.003, 1.0):
        times = SampleTimes() if mean_s is None else timed(2, 4, mean_s)
        for rows in range(1, 40):
            for workers in range(1, 9):
                count = times.parts(rows, workers, awaited=awaited)
                assert 1 <= count <= min(rows, workers)
                some = rows * times._mean_s / count
                assert count == 1 or mean_s is None or some >= 0.004


@pytest.mark.parametrize("made_of", [1, 8])
@pytest.mark.parametrize(
    ("cv", "batch", "count"), [(2, 4, 4), (2, 8, 8), (2, 64, 8), (0.2, 8, 1), (0, 8, 1)]
)
def test_all_batches_are_cut_if_their_times_differ(
    cv: float, batch: int, count: int, made_of: int
) -> None:
    """Whether the times are those of batches or of their parts."""
    times = timed(cv, batch // made_of or 1)
    assert times.parts(batch, 8, awaited=False) == count
    assert times.parts(batch, 8, awaited=True) == min(batch, 8)


def test_batches_that_take_the_trainer_long_to_join_are_not_cut() -> None:
    times = timed(2, 8)
    for _ in range(20):
        times.joined(0.003)  # 20 ms of each worker
    assert times.parts(8, 8, awaited=False) == 1
    assert times.parts(8, 8, awaited=True) == 8
