"""Build the stream of one of torch's samplers, and check that this torch still draws that way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.loader.line.order.derived import Distributed, Without
from creel.loader.line.order.generators import GeneratorCopies, RandomSource, seeded, state_of
from creel.loader.line.order.streams import (
    FromList,
    Origin,
    SamplerStream,
    Sequential,
    Shuffled,
    ShuffledList,
    StreamState,
    Weighted,
    WithReplacement,
    indices_of,
)
from creel.policies.order.remap import Exchange


def open_stream(
    sampler: object,
    source: RandomSource,
    given: StreamState | None = None,
    exchange: Exchange | None = None,
) -> SamplerStream:
    """Begin an epoch of `sampler`, as torch does when it asks the sampler for its first item.

    Args:
        sampler: an instance of exactly one of torch's samplers, or a sequence.
        source: where to draw from.
        given: `SamplerStream.state` of the epoch to reopen. Nothing is then drawn from outside
            generators, except from a user's generator, which is set back to its state at that time.
        exchange: of a DistributedSampler: how its ranks exchange samples.
    """
    given = given or {}
    stream = _opened(sampler, source, given, exchange)
    return Without(stream, given["without"], given["each"]) if "without" in given else stream


def _opened(
    sampler: object, source: RandomSource, given: StreamState, exchange: Exchange | None
) -> SamplerStream:
    if isinstance(sampler, SequentialSampler):
        return Sequential(len(sampler.data_source))
    if isinstance(sampler, DistributedSampler):
        epoch = given.get("epoch", sampler.epoch)
        n = len(sampler.dataset)  # type: ignore[arg-type]  # as torch: TypeError if it has none
        at = sampler, epoch, given.get("offset", 0), exchange
        if not sampler.shuffle:
            return Distributed(Sequential(n), *at)
        return Distributed(Shuffled(n, n, Origin.seeded(sampler.seed + epoch)), *at)
    if is_sequence(sampler):
        return FromList(sampler)  # type: ignore[arg-type]  # checked by is_sequence
    outer: torch.Generator | None = sampler.generator  # type: ignore[attr-defined]  # all other samplers have it
    if isinstance(sampler, RandomSampler) and outer is None:
        origin = Origin.seeded(given["seed"] if "seed" in given else source.seed(None))
    else:
        origin = Origin.of(outer, source, given)
    if isinstance(sampler, SubsetRandomSampler):
        n = len(sampler.indices)
        return ShuffledList(sampler.indices, Shuffled(n, n, origin))
    if isinstance(sampler, WeightedRandomSampler):
        return Weighted(sampler, origin)
    assert isinstance(sampler, RandomSampler)  # noqa: S101  torch's only other sampler
    n, total = len(sampler.data_source), sampler.num_samples
    if sampler.replacement:
        return WithReplacement(n, total, origin)
    if not (n or source.unseen):  # a prediction raises nothing
        raise ZeroDivisionError("integer division or modulo by zero")  # torch's
    return Shuffled(n, total, origin, spare=True)


def is_sequence(sampler: object) -> bool:
    """Whether iterating `sampler` gives its elements in order and draws nothing."""
    if type(sampler) in (list, tuple, range):
        return True
    return type(sampler) in (np.ndarray, torch.Tensor) and sampler.ndim == 1  # type: ignore[attr-defined]  # both have it


_SEVEN = range(7)
_Make: TypeAlias = "Callable[[torch.Generator | None], Iterable[int]]"


def _ranks_share(rank: int, shuffle: bool, drop_last: bool) -> _Make:
    return lambda _: DistributedSampler(_SEVEN, 4, rank, shuffle, 5, drop_last)  # type: ignore[arg-type]  # sized


#: Small samplers of each class that streams reproduce, made with a generator or None.
_TRIALS: dict[type, list[_Make]] = {
    SequentialSampler: [lambda _: SequentialSampler(_SEVEN)],
    RandomSampler: [
        lambda g: RandomSampler(_SEVEN, False, 3, g),
        lambda g: RandomSampler(_SEVEN, False, 7, g),
        lambda g: RandomSampler(_SEVEN, False, 17, g),
        lambda g: RandomSampler(_SEVEN, True, 40, g),
    ],
    SubsetRandomSampler: [lambda g: SubsetRandomSampler([3, 1, 4, 5], g)],
    WeightedRandomSampler: [
        lambda g: WeightedRandomSampler([0.2, 0.5, 0.3], 9, True, g),
        lambda g: WeightedRandomSampler([0.2, 0.5, 0.3], 2, False, g),
    ],
    DistributedSampler: [
        _ranks_share(0, shuffle=True, drop_last=False),
        _ranks_share(2, shuffle=True, drop_last=True),
        _ranks_share(3, shuffle=False, drop_last=False),
    ],
}


def trusted(kind: type) -> bool:
    """Whether streams reproduce samplers of exactly this class."""
    return (kind in _TRIALS or kind is BatchSampler) and agrees_with_torch(kind)


@cache
def agrees_with_torch(kind: type) -> bool:
    """Whether streams draw as this torch does, tested once on small samplers of the class.

    If a future or patched torch draws differently, its samplers are treated as custom ones. Takes
    about a millisecond; leaves the generators unchanged.
    """
    if kind is BatchSampler:
        sizes = [[len(b) for b in BatchSampler(range(7), 3, d)] for d in (False, True)]
        return sizes == [[3, 3, 1], [3, 3]]
    return all(_agrees(make, own) for make in _TRIALS[kind] for own in (False, True))


def _agrees(make: _Make, own: bool) -> bool:
    """Whether sampler and stream yield the same items and leave the same generator states."""
    generator = seeded(3) if own else None
    sampler = make(generator)
    shadow = GeneratorCopies(generator)
    stream = open_stream(sampler, shadow)
    stream.need(stream.total)
    ours = indices_of(stream.items(0, stream.total)).tolist()
    with torch.random.fork_rng(devices=[]):
        theirs = list(sampler)
        after = torch.default_generator, *([generator] if generator else [])
        return ours == theirs and all(state_of(g) == state_of(shadow.of(g)) for g in after)
