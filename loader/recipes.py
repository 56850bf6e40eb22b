"""From one of torch's samplers to its stream, and whether this torch still keeps to the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from creel.loader.draws import Dice, Memo, Shadow, seeded, set_state, state_of, unpack
from creel.loader.streams import (
    Chosen,
    Counted,
    Dealt,
    Facts,
    Listed,
    Replaced,
    Shuffled,
    Stream,
    Weighted,
)

_Recipe: TypeAlias = "Callable[[object, Dice, Memo, Facts], Stream]"


def opened(sampler: object, dice: Dice, memo: Memo, given: Facts | None = None) -> Stream:
    """Begin an epoch of `sampler`, as torch does when it asks the sampler for its first item.

    Args:
        sampler: an instance of exactly one of torch's samplers, or a sequence.
        dice: where to draw from.
        memo: large permutations that are known already.
        given: what `Stream.facts` said of the epoch to open again; then nothing is drawn for it
            from generators outside, but for a user's own generator, which is put where it was.
    """
    if is_sequence(sampler):
        return Listed(sampler)  # type: ignore[arg-type]  # is_sequence says so
    recipe: _Recipe = _RECIPES[type(sampler)]  # type: ignore[assignment]  # each takes its own type
    return recipe(sampler, dice, memo, given or {})


def is_sequence(sampler: object) -> bool:
    """Whether iterating `sampler` gives its elements in order and draws nothing."""
    if type(sampler) in (list, tuple, range):
        return True
    return type(sampler) in (np.ndarray, torch.Tensor) and sampler.ndim == 1  # type: ignore[attr-defined]  # both have it


def _open_sequential(s: SequentialSampler, _dice: Dice, _memo: Memo, _given: Facts) -> Stream:
    return Counted(len(s.data_source))


def _open_random(s: RandomSampler, dice: Dice, memo: Memo, given: Facts) -> Stream:
    n = len(s.data_source)
    if s.generator is None:
        kept: Facts = {"seed": given["seed"] if "seed" in given else dice.seed(None)}
        generator = seeded(kept["seed"])
    else:
        generator, kept = _direct(s.generator, dice, given)
    if s.replacement:
        return Replaced(n, s.num_samples, generator, s.generator, kept)
    return Shuffled(n, s.num_samples, memo, generator, s.generator, kept, spare=True)


def _open_subset(s: SubsetRandomSampler, dice: Dice, memo: Memo, given: Facts) -> Stream:
    generator, kept = _direct(s.generator, dice, given)
    n = len(s.indices)
    return Chosen(s.indices, Shuffled(n, n, memo, generator, s.generator, kept))


def _open_weighted(s: WeightedRandomSampler, dice: Dice, _memo: Memo, given: Facts) -> Stream:
    generator, kept = _direct(s.generator, dice, given)
    return Weighted(s, generator, s.generator, kept)


def _open_distributed(
    s: DistributedSampler[object], _dice: Dice, memo: Memo, given: Facts
) -> Stream:
    epoch = given.get("epoch", s.epoch)
    n = len(s.dataset)  # type: ignore[arg-type]  # as torch: TypeError if it has none
    if not s.shuffle:
        return Dealt(Counted(n), s, epoch)
    seed = s.seed + epoch
    return Dealt(Shuffled(n, n, memo, seeded(seed), None, {"seed": seed}), s, epoch)


def _direct(
    outer: torch.Generator | None, dice: Dice, given: Facts
) -> tuple[torch.Generator, Facts]:
    """The generator that a sampler draws from itself, and what is known of it."""
    generator = dice.of(outer)
    if "rng" not in given:
        return generator, {}
    start = unpack(given["rng"])
    if outer is None and state_of(generator) != start:
        # The global generator is not ours to move: draw from a copy of what it was.
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
    """Small samplers of a class, made with a generator or without."""
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


_TRUST: dict[type, bool] = {}


def trusted(kind: type) -> bool:
    """Whether samplers of exactly this class are re-created: tried once, against this torch.

    A torch that draws otherwise some day (or was patched) makes its samplers foreign: iterated
    and drained like any other. Takes about a millisecond; leaves no trace in the generators.
    """
    if kind not in _RECIPES and kind is not BatchSampler:
        return False
    if kind not in _TRUST:
        _TRUST[kind] = _tried(kind)
    return _TRUST[kind]


def _tried(kind: type) -> bool:
    if kind is BatchSampler:
        sizes = [[len(b) for b in BatchSampler(range(7), 3, d)] for d in (False, True)]
        return sizes == [[3, 3, 1], [3, 3]]
    return all(_agrees(make, own) for make in _trials(kind) for own in (False, True))


def _agrees(make: Callable[[torch.Generator | None], Iterable[int]], own: bool) -> bool:
    """Whether sampler and stream give the same and leave the same states behind."""
    generator = seeded(3) if own else None
    sampler = make(generator)
    shadow = Shadow(generator)
    stream = opened(sampler, shadow, Memo())
    ours = stream.everything().tolist()
    with torch.random.fork_rng(devices=[]):
        theirs = list(sampler)
        after = torch.default_generator, *([generator] if generator else [])
        return ours == theirs and all(state_of(g) == state_of(shadow.of(g)) for g in after)
