"""Orders with rows of a rehearsal memory: torch's batches, foreseen, and resumed anywhere."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import (
    Echo,
    Loader,
    any_memory,
    any_rehearsed_loader,
    inner_of,
    observe,
    plain,
    rehearsed,
    same,
    states,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

import creel
from creel.errors import ConfigError
from creel.loader.line.order.epoch_plan import same_batch
from creel.loader.line.order.generators import seeded
from creel.loader.line.order.rehearsing import EpochStart, Replays
from creel.policies.rehearsal.memory_rows import mixed
from creel.policies.rehearsal.replay_passes import Passes
from kit import seeds

pytestmark = pytest.mark.timeout(120)


def set_epoch(loader: Loader, epoch: int) -> None:
    if isinstance(inner_of(loader), DistributedSampler):
        inner_of(loader).set_epoch(epoch)


@pytest.mark.parametrize("case", seeds(40))
def test_an_order_with_replays_is_what_torch_iterates(case: int) -> None:
    ours, theirs = any_rehearsed_loader(case), any_rehearsed_loader(case)
    previous = None
    for epoch in range(3):
        set_epoch(ours, epoch)
        set_epoch(theirs, epoch)
        torch.manual_seed(case + epoch)
        previous = observe(ours, previous=previous)
        batches = [plain(batch) for batch in previous]
        seen = states(ours)
        torch.manual_seed(case + epoch)
        assert str(batches) == str(list(theirs))
        assert seen == states(theirs)


@pytest.mark.parametrize("case", seeds(40))
def test_a_prediction_with_replays_is_what_comes(case: int) -> None:
    loader = any_rehearsed_loader(case)
    torch.manual_seed(case)
    order, foreseen, steps = None, list[Any](), random.Random(case).randrange(4)
    for epoch in range(4):
        set_epoch(loader, epoch)
        order = observe(loader, previous=order)
        assert order.known
        assert order.lookahead == 2
        now = order.predict(0)
        assert now is not None
        assert all(plan.same(now) for plan in foreseen[:1])
        pulled = [plain(b) for b in itertools.islice(order, steps)]
        foreseen = [*foreseen[1:], order.predict(1), order.predict(2)][-2:]
        pulled += [plain(b) for b in order]
        assert now.steps == len(pulled)
        assert all(same_batch(now.cut(i, i + 1)[0], b) for i, b in enumerate(pulled))
        indices, ends = now.cut(0, now.steps)
        assert indices.tolist() == [int(i) for b in pulled for i in b]
        assert np.diff(ends, prepend=0).tolist() == [len(b) for b in pulled]


@pytest.mark.parametrize("case", seeds(40))
def test_an_epoch_with_replays_goes_on_in_another_process(case: int) -> None:
    rng = random.Random(case)
    first, second = any_rehearsed_loader(case), any_rehearsed_loader(case)
    torch.manual_seed(case)
    order = None
    for epoch in range(rng.randrange(1, 4)):
        set_epoch(first, epoch)
        set_epoch(second, epoch)
        order = observe(first, previous=order)
        list(order) if rng.random() < 0.7 else list(itertools.islice(order, 2))
    order = observe(first, previous=order)
    taken = len(list(itertools.islice(order, rng.randrange(5))))
    state = json.loads(json.dumps(order.state()))
    remaining = [plain(b) for b in order]
    then = observe(first, previous=order)
    following = old_in(then, first)
    torch.manual_seed(999)
    again = observe(second, state=state)
    again.skip(taken)
    assert str([plain(b) for b in again]) == str(remaining)
    later = observe(second, previous=again)
    assert old_in(later, second) == following


def old_in(order: Any, loader: Loader) -> list[list[int]]:
    """Return the memory's rows in each batch, which no global generator draws."""
    first_row = loader.batch_sampler.first_row  # type: ignore[union-attr]  # a RehearsedBatches
    return [[int(i) for i in batch if i >= first_row] for batch in map(plain, order)]


class Buckets(Sampler[list[int]]):
    """A person's batch sampler, which may be run ahead, with or without a length."""

    foreseeable = True

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def __iter__(self) -> Any:
        rng = random.Random(self.epoch)
        self.epoch += 1
        for first in range(0, self.n, 5):
            yield rng.sample(range(self.n), rng.randrange(1, min(5, self.n - first) + 1))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_batches_of_a_persons_sampler_have_replays_too() -> None:
    def loader() -> Loader:
        data: Loader = DataLoader(Echo(23), batch_sampler=Buckets(23), collate_fn=same)
        return rehearsed(data, any_memory(3))

    ours, theirs = loader(), loader()
    order = observe(ours)
    ahead = order.predict(1)
    assert ahead is not None
    for epoch in range(3):
        batches = list(order)
        assert batches == list(theirs)
        state = json.loads(json.dumps(order.state()))
        again = loader()
        again.batch_sampler.batches.set_epoch(epoch)  # type: ignore[union-attr]  # a RehearsedBatches
        assert state["rehearsal"]["step"] == epoch << 32, "it has no length"
        order = observe(ours, previous=order)
        now = order.predict(0)
        assert now is not None
        assert epoch or ahead.same(now)


@pytest.mark.parametrize("case", seeds(30))
def test_a_growing_memory_has_what_was_kept_of_all_earlier_blocks(case: int) -> None:
    """Against a memory to which the samples of these blocks were added one by one."""
    rng = random.Random(case)
    every, world, budget = rng.randrange(1, 5), rng.choice([1, 2, 3]), rng.choice([None, 15])
    n, size, each = rng.randrange(30, 90), rng.randrange(1, 6), rng.randrange(1, 5)
    old = rng.choice([0, 12])
    steps: list[tuple[list[int], list[int]]] = []
    loaders = []
    for rank in range(world):
        memory = creel.Rehearsal(each, budget=budget, seed=case, every=every)
        if old:
            memory.add(Echo(old))
        sampler: DistributedSampler[Any] = DistributedSampler(Echo(n), world, rank, True, case)
        batches = memory.over(Echo(n), sampler, size)[1]
        loaders.append(DataLoader(Echo(1 << 30), batch_sampler=batches, collate_fn=same))
    for ranks_batches in zip(*map(list, loaders), strict=True):
        has_rows = old or len(steps) >= every
        cut = len(ranks_batches[0]) - (each if has_rows else 0)
        new = [i for b in ranks_batches for i in b[:cut]]
        steps.append((new, [i for b in ranks_batches for i in b[cut:]]))
    for step, (_, replays) in enumerate(steps):
        begun = step // every * every
        seen = sorted({i for new, _ in steps[:begun] for i in new})
        uids = np.array([*range(old), *(old + i for i in seen)], np.int64)
        keys = mixed(uids, case)
        best = uids if budget is None else uids[np.argsort(keys)[:budget]]
        allowed = {uid + n if uid < old else uid - old for uid in best.tolist()}
        assert set(replays) <= allowed
        assert len(replays) == (each * world if allowed else 0)
        if len(allowed) >= len(replays):
            assert len(set(replays)) == len(replays), "no row twice in a global batch"
    for batch in itertools.chain(*loaders):
        rows = [i for i in batch if i >= n]
        assert len(rows) == (each if old else 0), "the memory itself is as it was"
        assert len(batch) - len(rows) <= size


def test_a_growing_memory_asks_for_each_new_sample_once() -> None:
    """So an epoch takes time in proportion to its steps; an earlier block begins anew."""
    every, blocks = 3, 200
    asked = []

    def new_items(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return np.arange(2 * start, 2 * stop)

    growth = creel.Rehearsal(2, budget=10, every=every).content().growth
    replays = Replays(Passes(0, 2, 1, 0), 0, EpochStart(0, grows=True), 10_000, growth)
    replays.new_items = new_items
    rows = [replays.rows(np.array([step]))[0].tolist() for step in range(every, every * blocks)]
    assert asked == [(every * k, every * (k + 1)) for k in range(blocks - 1)]
    asked.clear()
    assert replays.rows(np.arange(every, every * blocks)).tolist() == rows
    assert len(asked) == blocks - 1


class Fives(Sampler[list[int]]):
    """A person's batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, first + 5)) for first in range(0, 25, 5))


class CountedFives(Fives):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "batches, last",
    [(BatchSampler(range(25), 5, False), 5), (CountedFives(), 5), (Fives(), 6)],
    ids=["torch's", "counted", "not counted"],
)
def test_a_memory_grows_until_an_epoch_was_read_whole(batches: Any, last: int) -> None:
    """Whatever was looked at before, and also where a loop takes the last batch and no more."""
    data: Loader = DataLoader(Echo(25), batch_sampler=batches, collate_fn=same)
    memory = creel.Rehearsal(2, every=2)
    ours, theirs, order = rehearsed(data, memory), rehearsed(data, memory), None
    for taken, grows in [(1, True), (4, True), (last, True), (last, False)]:
        order = observe(ours, previous=order)
        now, known = order.predict(0), order.known
        assert (now is None) is not known
        batches_read = [plain(batch) for batch in itertools.islice(order, taken)]
        assert batches_read == list(itertools.islice(theirs, taken))
        assert [len(batch) for batch in batches_read] == [5, 5, *[7 if grows else 5] * 3][:taken]
        saved: Any = order.state()
        assert saved["rehearsal"]["grows"] is grows
        if now is not None:
            assert np.array_equal(now.cut(0, taken)[0], np.concatenate(batches_read))
        ours.batch_sampler.set_epoch(7)  # type: ignore[union-attr]  # a RehearsedBatches
        theirs.batch_sampler.set_epoch(7)  # type: ignore[union-attr]  # a RehearsedBatches


def test_a_memory_cannot_grow_by_what_other_ranks_read_unknown_to_it() -> None:
    memory = creel.Rehearsal(2, every=3)
    batches = memory.over(Echo(9), RandomSampler(Echo(9)), 3)[1]
    batches._ranks = lambda: (0, 2)  # type: ignore[attr-defined]  # a job of two ranks
    with pytest.raises(ConfigError, match="DistributedSampler"):
        list(batches)


# --- ranks ------------------------------------------------------------------------------------

N = 203


def ranks(world: int, each: int, replays: int, *, seed: int = 0) -> list[Any]:
    """Return a loader for each rank, which reads directly."""
    data = torch.arange(N)
    loaders: list[Any] = []
    for rank in range(world):
        memory = creel.Rehearsal(replays, budget=70, seed=seed)
        memory.add(torch.arange(1000, 1100))  # type: ignore[arg-type]  # a tensor is map-style
        sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, True, 7)  # type: ignore[arg-type]  # as above
        options: dict[str, Any] = {"creel": False, "sampler": sampler, "rehearsal": memory}
        loaders.append(creel.DataLoader(data, each, **options))  # type: ignore[arg-type]  # as above
    return loaders


def global_batches(loaders: list[Any], epoch: int, steps: int | None = None) -> list[Any]:
    """Return the new and the old samples of each step of all ranks, sorted."""
    out = []
    for loader in loaders:
        loader.sampler.set_epoch(epoch)
    for batches in itertools.islice(zip(*loaders, strict=True), steps):
        numbers = sorted(x for batch in batches for x in batch.tolist())
        out.append(([x for x in numbers if x < 1000], [x for x in numbers if x >= 1000]))
    return out


def resumed(state: Any, loaders: list[Any]) -> list[Any]:
    assert len(json.dumps(state)) < 400
    assert len(json.dumps(state["order"])) <= 300
    for loader in loaders:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def test_ranks_replay_disjoint_rows_and_a_pass_before_any_row_again() -> None:
    seen: list[int] = []
    for _, old in global_batches(ranks(2, 8, 5), 0):
        assert len(set(old)) == len(old) == 10
        seen += old
    assert len(set(seen[:70])) == 70


@pytest.mark.parametrize("old, new", [((2, 8, 4), (4, 4, 2)), ((4, 4, 2), (1, 16, 8))])
@pytest.mark.parametrize("taken", [0, 1, 5, 12])
def test_other_ranks_go_on_with_the_same_global_batches(
    old: tuple[int, int, int], new: tuple[int, int, int], taken: int
) -> None:
    whole = ranks(*old)
    wanted = [global_batches(whole, epoch) for epoch in range(3)]
    before = ranks(*old)
    assert global_batches(before, 0) == wanted[0]
    assert global_batches(before, 1, taken) == wanted[1][:taken]
    after = resumed(before[-1].state_dict(), ranks(*new))
    remaining = global_batches(after, 1)
    assert [old for _, old in remaining] == [old for _, old in wanted[1][taken:]]
    assert remaining[:-1] == wanted[1][taken:-1], (
        "the last batch is filled up for more or fewer ranks"
    )
    assert [old for _, old in global_batches(after, 2)] == [old for _, old in wanted[2]]


def test_another_batch_size_goes_on_with_the_rows_of_the_steps_that_it_begins_in() -> None:
    first = ranks(1, 16, 8)
    whole = global_batches(ranks(1, 16, 8), 0)
    global_batches(first, 0, 4)
    remaining = global_batches(resumed(first[0].state_dict(), ranks(1, 32, 8)), 0)
    assert [new for new, _ in remaining] == [
        sorted(a + b)
        for (a, _), (b, _) in itertools.zip_longest(whole[4::2], whole[5::2], fillvalue=([], []))
    ]
    assert len({tuple(old) for _, old in remaining}) == len(remaining), "each step has other rows"


def test_a_batch_that_is_left_out_leaves_out_its_rows_too() -> None:
    whole = global_batches(ranks(1, 16, 8), 0)
    first = ranks(1, 16, 8)
    global_batches(first, 0, 3)
    second = ranks(1, 16, 8)
    second[0].load_state_dict(first[0].state_dict(), leave_out=[5, 6, 9])
    assert global_batches(second, 0) == [whole[k] for k in (3, 4, 7, 8, 10, 11, 12)]


def test_a_memory_grows_by_batches_that_are_left_out_too() -> None:
    """They were read before, or else what follows would not be what it is without a resume."""

    def loader() -> Any:
        memory = creel.Rehearsal(4, budget=12, every=2)
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(4), "creel": False}
        return creel.DataLoader(torch.arange(60), 5, True, rehearsal=memory, **options)  # type: ignore[arg-type]  # map-style

    whole = [batch.tolist() for batch in loader()]
    first, second = loader(), loader()
    list(itertools.islice(first, 3))
    second.load_state_dict(first.state_dict(), leave_out=[4, 7])
    assert [batch.tolist() for batch in second] == [whole[k] for k in (3, 5, 6, 8, 9, 10, 11)]


def test_a_sampler_beyond_the_data_is_said_and_reads_no_row_of_the_memory() -> None:
    memory = creel.Rehearsal(2)
    memory.add(Echo(9))
    for sampler in ([0, 1, 2, 5], iter([0, 1, 2, 5])):
        loader = rehearsed(DataLoader(Echo(5), 2, sampler=sampler), memory)
        order = observe(loader)
        assert len(plain(next(order))) == 4
        with pytest.raises(IndexError, match="sample 5: the dataset has 5"):
            next(order)


def test_another_memory_is_refused() -> None:
    first = ranks(1, 16, 8)
    global_batches(first, 0, 3)
    state = first[0].state_dict()
    with pytest.raises(ConfigError, match="another rehearsal memory"):
        ranks(1, 16, 8, seed=1)[0].load_state_dict(state)
    data = torch.arange(N)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, True, 7)  # type: ignore[arg-type]  # sized
    alone: Any = creel.DataLoader(data, 16, sampler=sampler, creel=False)  # type: ignore[arg-type]  # map-style
    with pytest.raises(ConfigError, match="another rehearsal memory"):
        alone.load_state_dict(state)
    list(alone)
    with pytest.raises(ConfigError, match="another rehearsal memory"):
        first[0].load_state_dict(alone.state_dict())


def test_a_dataset_that_is_changed_after_it_was_added_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Switched(list[int]):
        task = 0

    memory = creel.Rehearsal(per_batch=1)
    switched: Any = Switched(range(8))
    other: Any = Switched(range(8))
    memory.add(switched)
    memory.add(other)
    creel.DataLoader(other, 4, rehearsal=memory)
    assert not caplog.messages
    switched.task = 1
    other.append(8)
    for _ in range(2):
        creel.DataLoader(switched, 4, rehearsal=memory)
    first, second = caplog.messages
    assert "(changed: task)" in first
    assert "(changed: 8 samples, now 9)" in second


def test_rows_of_steps_are_those_of_torchs_permutations() -> None:
    passes = Passes(50, 3, 2, 8)
    replays = Replays(passes, 1, EpochStart(7, grows=False), 900)
    for step in range(40):
        number, slot = divmod(7 + step, 50 // 6)
        drawn = torch.randperm(50, generator=seeded(passes.seed_of(number))).tolist()
        rows = sorted(900 + row for row in drawn[6 * slot : 6 * slot + 6][1::2])
        assert replays.joined([1, 2], step) == [1, 2, *rows]


def test_a_resume_at_every_batch_is_bit_exact() -> None:
    data = torch.arange(60)

    def loader() -> Any:
        memory = creel.Rehearsal(3, budget=10)
        memory.add(torch.arange(1000, 1050))  # type: ignore[arg-type]  # map-style
        options: dict[str, Any] = {"shuffle": True, "creel": False, "rehearsal": memory}
        options["generator"] = torch.Generator().manual_seed(4)
        return creel.DataLoader(data, 7, **options)  # type: ignore[arg-type]  # map-style

    first = loader()
    batches, saved = [], [first.state_dict()]
    for _ in range(3):
        for batch in first:
            batches.append(batch.tolist())
            saved.append(json.loads(json.dumps(first.state_dict())))
        saved[-1] = json.loads(json.dumps(first.state_dict()))
    for taken, state in enumerate(saved[:-1]):
        second = loader()
        second.load_state_dict(state)
        end = 9 * (taken // 9 + 1)  # of the next epoch, if one was read whole
        assert [batch.tolist() for batch in second] == batches[taken:end]


def test_composing_and_planning_14_million_samples_takes_no_time() -> None:
    data: Loader = DataLoader(Echo(14_000_000), 64, sampler=RandomSampler(Echo(14_000_000)))
    memory = creel.Rehearsal(64)
    memory.add(Echo(1_000_000))
    loader = rehearsed(data, memory)
    began = time.thread_time()
    order = observe(loader)
    assert order.known
    plan = order.predict(0)
    assert plan is not None
    assert len(plan.cut(0, 100)[0]) == 128 * 100
    assert [len(plain(batch)) for batch in itertools.islice(order, 100)] == [128] * 100
    assert time.thread_time() - began < 0.5, "one pass over 14 M numbers takes longer"
