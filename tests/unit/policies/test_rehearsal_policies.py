"""What a rehearsal memory keeps, and which of it each step replays: laws, and torch itself."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from creel.policies.arrays import Ints
from creel.policies.rehearsal.growth import Growth
from creel.policies.rehearsal.memory_rows import (
    UNLABELLED,
    Offered,
    ascending,
    kept,
    merged,
    mixed,
)
from creel.policies.rehearsal.replay_passes import Head, Passes
from kit import seeds

SEED = 5


def offered(classes: NDArray[np.integer], first: int = 0, seed: int = SEED) -> Offered:
    uids = np.arange(first, first + len(classes))
    return Offered(uids, classes.astype(np.int64), mixed(uids, seed))


def chosen(candidates: Offered, budget: int | None, seed: int = SEED) -> Offered:
    return candidates.take(kept(candidates, budget, seed))


def any_classes(rng: random.Random) -> Ints:
    sizes = [rng.choice([1, 2, 7, rng.randrange(1, 400)]) for _ in range(rng.randrange(1, 9))]
    classes = np.repeat(np.array([rng.randrange(-5, 1 << 40) for _ in sizes]), sizes)
    rng.shuffle(shuffled := classes.tolist())
    return np.array(shuffled)


@pytest.mark.parametrize("case", seeds(40))
def test_the_budget_is_used_whole_and_shares_differ_by_at_most_one(case: int) -> None:
    rng = random.Random(case)
    classes = any_classes(rng)
    budget = rng.randrange(1, 2 * len(classes))
    memory = chosen(offered(classes), budget)
    assert len(memory.uids) == min(budget, len(classes))
    assert np.all(np.diff(memory.uids) > 0)
    have, restart_objects = Counter(classes.tolist()), Counter(memory.classes.tolist())
    cut = [restart_objects[label] for label, many in have.items() if restart_objects[label] < many]
    if cut:
        assert max(restart_objects.values()) - min(cut) <= 1, (
            "no class has more than one that was cut"
        )


@pytest.mark.parametrize("case", seeds(200))
def test_samples_kept_of_two_parts_are_those_kept_of_all(case: int) -> None:
    rng = random.Random(case)
    classes = any_classes(rng)
    budget = rng.randrange(1, len(classes) + 2)
    whole = offered(classes)
    at = np.array([rng.random() < 0.5 for _ in classes])
    parts = [chosen(whole.take(np.flatnonzero(side)), budget) for side in (at, ~at)]
    again = chosen(merged(*parts), budget)
    for ours, theirs in zip(again, chosen(whole, budget), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("case", seeds(20))
def test_a_sample_that_has_left_never_comes_back(case: int) -> None:
    rng = random.Random(case)
    classes = any_classes(rng)
    budget, gone = rng.randrange(1, len(classes) + 1), set[int]()
    before: set[int] = set()
    for end in sorted(rng.sample(range(len(classes) + 1), min(len(classes), 6))):
        now = set(chosen(offered(classes[:end]), budget).uids.tolist())
        assert not now & gone
        gone |= before - now
        before = now


@pytest.mark.parametrize("case", seeds(60))
def test_a_memory_that_grew_piece_by_piece_keeps_what_it_keeps_of_all(case: int) -> None:
    """Also where samples are offered again, as by a sampler with replacement."""
    rng = random.Random(case)
    old, n, budget = any_classes(rng), rng.randrange(1, 200), rng.choice([None, 1, 20, 300])
    before = chosen(offered(old), budget, SEED + 1)
    growth = Growth(1, before, len(old), budget, SEED)
    held, seen = before, set[int]()
    for _ in range(rng.randrange(1, 9)):
        items = np.array([rng.randrange(n) for _ in range(rng.randrange(60))], np.int32)
        held = growth.grown(held, items)
        seen |= set(items.tolist())
        new = offered(np.full(n, UNLABELLED), len(old)).take(np.array(sorted(seen), np.intp))
        wanted = chosen(merged(before, new), budget, SEED + 1)
        for ours, theirs in zip(held, wanted, strict=True):
            assert np.array_equal(ours, theirs)
        rows = {uid: n + row for row, uid in enumerate(before.uids.tolist())}
        numbers = [rows.get(uid, uid - len(old)) for uid in held.uids.tolist()]
        assert growth.numbers(held, n).tolist() == numbers


def test_each_sample_of_a_class_is_kept_as_often_as_the_others() -> None:
    """Chi-square below its 1 - 1e-5 quantile, and no drift from the first to the last."""
    sizes, budget, times = (400, 200, 60), 100, 2000
    classes = np.repeat(np.arange(3), sizes)
    counts = np.zeros(len(classes))
    for seed in range(times):
        counts[kept(offered(classes, seed=seed), budget, seed + times)] += 1
    for label, size in enumerate(sizes):
        mine = counts[classes == label]
        share = mine.sum() / times / size
        square = ((mine - times * share) ** 2).sum() / (times * share * (1 - share))
        # Wilson and Hilferty 1931; 4.265 is the normal quantile of 1 - 1e-5.
        limit = (size - 1) * (1 - 2 / (9 * (size - 1)) + 4.265 * (2 / (9 * (size - 1))) ** 0.5) ** 3
        assert square < limit
        if size >= 200:
            tenth = size // 10
            assert 0.95 < mine[-tenth:].mean() / mine[:tenth].mean() < 1.05


def test_with_keys_of_the_persons_the_smallest_of_each_class_are_kept() -> None:
    values = np.array([0.3, -1.0, 5.0, 0.1, 2.0, -0.0])
    candidates = Offered(np.arange(6), np.array([0, 0, 0, 1, 1, 1]), ascending(values))
    assert chosen(candidates, 4).uids.tolist() == [0, 1, 3, 5]


def test_no_budget_keeps_everything() -> None:
    assert chosen(offered(np.array([3, 1, 3])), None).uids.tolist() == [0, 1, 2]


# --- passes -----------------------------------------------------------------------------------


def head_of(passes: Passes) -> Head:
    """Return what draws a pass with torch itself."""

    def head(number: int, k: int) -> Ints:
        generator = torch.Generator().manual_seed(passes.seed_of(number))
        return torch.randperm(passes.kept, generator=generator).numpy()[:k]

    return head


@pytest.mark.parametrize("case", seeds(30))
def test_the_steps_of_a_pass_take_its_rows_in_order_and_repeat_none(case: int) -> None:
    rng = random.Random(case)
    each, world = rng.randrange(1, 20), rng.choice([1, 2, 4, 8])
    passes = Passes(each * world + rng.randrange(300), each, world, rng.getrandbits(64))
    first = rng.randrange(1 << 40)
    rows = passes.to_all(np.arange(first, first + 3 * passes.steps), head_of(passes))
    for number in range(first // passes.steps + 1, first // passes.steps + 3):
        drawn = head_of(passes)(number, passes.kept)
        at = number * passes.steps - first
        mine = rows[at : at + passes.steps].ravel()
        assert np.array_equal(mine, drawn[: len(mine)])
        assert len(np.unique(mine)) == len(mine)
        assert passes.kept - len(mine) < passes.step_rows, "all others sit out this pass"


@pytest.mark.parametrize("case", seeds(20))
def test_the_number_of_ranks_changes_no_global_batch(case: int) -> None:
    rng = random.Random(case)
    every, seed, kept_rows = 8 * rng.randrange(1, 5), rng.getrandbits(64), rng.randrange(1, 400)
    steps = np.array([rng.randrange(1 << 20) for _ in range(20)])
    batches = []
    for world in (1, 2, 4, 8):
        passes = Passes(kept_rows, every // world, world, seed)
        ranks = [passes.to_rank(rank, steps, head_of(passes)) for rank in range(world)]
        assert all(part.shape == (20, every // world) for part in ranks)
        assert all(np.all(np.diff(part, axis=1) >= 0) for part in ranks)
        batches.append(np.sort(np.concatenate(ranks, axis=1), axis=1))
    assert all(np.array_equal(batches[0], other) for other in batches[1:])


@pytest.mark.parametrize("kept_rows", [1, 3, 7])
def test_a_memory_smaller_than_a_step_is_repeated_evenly(kept_rows: int) -> None:
    passes = Passes(kept_rows, 5, 2, 0)
    for step in passes.to_all(np.arange(9), head_of(passes)):
        counts = np.bincount(step, minlength=kept_rows)
        assert counts.max() - counts.min() <= 1


def test_other_passes_and_other_memories_have_other_orders() -> None:
    passes = Passes(50, 5, 1, 1)
    heads = [head_of(passes)(n, 50).tolist() for n in range(20)]
    heads += [head_of(passes._replace(seed=2))(n, 50).tolist() for n in range(20)]
    assert len(set(map(tuple, heads))) == 40
