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

from creel.loader.order.draws import (
    GeneratorCopies,
    PermutationCache,
    RandomSource,
    seeded,
    set_state,
    state_of,
    unpack,
)
from creel.loader.order.streams import (
    Distributed,
    Facts,
    FromList,
    SamplerStream,
    Sequential,
    Shuffled,
    ShuffledList,
    Weighted,
    WithReplacement,
    indices_of,
)

_Recipe: TypeAlias = "Callable[[object, RandomSource, PermutationCache, Facts], SamplerStream]"


def opened(
    sampler: object,
    source: RandomSource,
    permutations: PermutationCache,
    given: Facts | None = None,
) -> SamplerStream:
    """Begin an epoch of `sampler`, as torch does when it asks the sampler for its first item.

    Args:
        sampler: an instance of exactly one of torch's samplers, or a sequence.
        source: where to draw from.
        permutations: large permutations that are known already.
        given: `SamplerStream.facts` of the epoch to reopen. Then nothing is drawn from outside
            generators, except from a user's generator, which is set back to its state then.
    """
    if is_sequence(sampler):
        return FromList(sampler)  # type: ignore[arg-type]  # is_sequence says so
    recipe: _Recipe = _RECIPES[type(sampler)]  # type: ignore[assignment]  # each takes its own type
    return recipe(sampler, source, permutations, given or {})


def is_sequence(sampler: object) -> bool:
    """Whether iterating `sampler` gives its elements in order and draws nothing."""
    if type(sampler) in (list, tuple, range):
        return True
    return type(sampler) in (np.ndarray, torch.Tensor) and sampler.ndim == 1  # type: ignore[attr-defined]  # both have it


def _open_sequential(
    s: SequentialSampler, _source: RandomSource, _permutations: PermutationCache, _given: Facts
) -> SamplerStream:
    return Sequential(len(s.data_source))


def _open_random(
    s: RandomSampler, source: RandomSource, permutations: PermutationCache, given: Facts
) -> SamplerStream:
    n = len(s.data_source)
    if s.generator is None:
        kept: Facts = {"seed": given["seed"] if "seed" in given else source.seed(None)}
        generator = seeded(kept["seed"])
    else:
        generator, kept = _direct(s.generator, source, given)
    if s.replacement:
        return WithReplacement(n, s.num_samples, generator, s.generator, kept)
    return Shuffled(n, s.num_samples, permutations, generator, s.generator, kept, spare=True)


def _open_subset(
    s: SubsetRandomSampler, source: RandomSource, permutations: PermutationCache, given: Facts
) -> SamplerStream:
    generator, kept = _direct(s.generator, source, given)
    n = len(s.indices)
    return ShuffledList(s.indices, Shuffled(n, n, permutations, generator, s.generator, kept))


def _open_weighted(
    s: WeightedRandomSampler, source: RandomSource, _permutations: PermutationCache, given: Facts
) -> SamplerStream:
    generator, kept = _direct(s.generator, source, given)
    return Weighted(s, generator, s.generator, kept)


def _open_distributed(
    s: DistributedSampler[object],
    _source: RandomSource,
    permutations: PermutationCache,
    given: Facts,
) -> SamplerStream:
    epoch = given.get("epoch", s.epoch)
    n = len(s.dataset)  # type: ignore[arg-type]  # as torch: TypeError if it has none
    if not s.shuffle:
        return Distributed(Sequential(n), s, epoch)
    seed = s.seed + epoch
    return Distributed(Shuffled(n, n, permutations, seeded(seed), None, {"seed": seed}), s, epoch)


def _direct(
    outer: torch.Generator | None, source: RandomSource, given: Facts
) -> tuple[torch.Generator, Facts]:
    """Return the generator that a sampler draws from directly, and the facts known of it."""
    generator = source.of(outer)
    if "rng" not in given:
        return generator, {}
    start = unpack(given["rng"])
    if outer is None and state_of(generator) != start:
        # The global generator belongs to the user: draw from a copy in the old state.
        generator = torch.Generator()
        set_state(generator, start)
        return generator, {"rng": given["rng"]}
    set_state(generator, start)
    return generator, {}


_RECIPES = {
    SequentialSampler: _open_sequential,
    RandomSampler: _open_random,
    SubsetRandomSampler: _open_subset,
    WeightedRandomSampler: _open_weighted,
    DistributedSampler: _open_distributed,
}


def _trials(kind: type) -> Iterable[Callable[[torch.Generator | None], Iterable[int]]]:
    """Yield constructors of small samplers of a class; each takes a generator or None."""
    seven = range(7)
    if kind is SequentialSampler:
        yield lambda _: SequentialSampler(seven)
    elif kind is RandomSampler:
        for num in (3, 7, 17):
            yield lambda g, num=num: RandomSampler(seven, False, num, g)  # type: ignore[misc]  # bound
        yield lambda g: RandomSampler(seven, True, 40, g)
    elif kind is SubsetRandomSampler:
        yield lambda g: SubsetRandomSampler([3, 1, 4, 5], g)
    elif kind is WeightedRandomSampler:
        yield lambda g: WeightedRandomSampler([0.2, 0.5, 0.3], 9, True, g)
        yield lambda g: WeightedRandomSampler([0.2, 0.5, 0.3], 2, False, g)
    elif kind is DistributedSampler:
        for rank, shuffle, drop_last in ((0, True, False), (2, True, True), (3, False, False)):
            args = 4, rank, shuffle, 5, drop_last
            yield lambda _, args=args: DistributedSampler(seven, *args)  # type: ignore[arg-type, misc]  # sized; bound


def trusted(kind: type) -> bool:
    """Whether streams reproduce samplers of exactly this class."""
    return (kind in _RECIPES or kind is BatchSampler) and agrees_with_torch(kind)


@cache
def agrees_with_torch(kind: type) -> bool:
    """Whether streams draw as this torch does, tested once on small samplers of the class.

    If a future or patched torch draws differently, its samplers are treated as custom ones. Takes
    about a millisecond; leaves the generators unchanged.
    """
    if kind is BatchSampler:
        sizes = [[len(b) for b in BatchSampler(range(7), 3, d)] for d in (False, True)]
        return sizes == [[3, 3, 1], [3, 3]]
    return all(_agrees(make, own) for make in _trials(kind) for own in (False, True))


def _agrees(make: Callable[[torch.Generator | None], Iterable[int]], own: bool) -> bool:
    """Whether sampler and stream yield the same items and leave the same generator states."""
    generator = seeded(3) if own else None
    sampler = make(generator)
    shadow = GeneratorCopies(generator)
    stream = opened(sampler, shadow, PermutationCache())
    stream.need(stream.total)
    ours = indices_of(stream.items(0, stream.total)).tolist()
    with torch.random.fork_rng(devices=[]):
        theirs = list(sampler)
        after = torch.default_generator, *([generator] if generator else [])
        return ours == theirs and all(state_of(g) == state_of(shadow.of(g)) for g in after)
