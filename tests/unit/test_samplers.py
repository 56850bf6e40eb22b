"""Orders against torch's own DataLoader: the same batches, the same draws, at the same moments."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.errors import ConfigError
from creel.loader.order import generators, samplers
from creel.loader.order.orders import EpochOrder, IteratorStart, index_sampler
from creel.loader.order.prediction import same_batch
from creel.loader.order.samplers import adopt, before
from kit import seeds

Loader = DataLoader[Any]
Make = Callable[[], Loader]

pytestmark = pytest.mark.timeout(60)


def observe(
    loader: Any,
    *,
    previous: EpochOrder | None = None,
    keep_seed: bool = False,
    foresee: bool = False,
    state: Any = None,
) -> EpochOrder:
    """Begin an epoch by the calls and draws of torch's iterator, and take it over.

    state: of the epoch to begin again instead.

    keep_seed: workers persist and this is not their first epoch: no base seed is drawn.
    """
    moment, sampler = before(loader), index_sampler(loader)
    sampler_iter = iter(sampler)
    if previous is not None and keep_seed:
        base_seed = previous.base_seed
    else:
        base_seed = generators.RandomSource().seed(loader.generator)
        if loader.num_workers > 0:
            sampler_iter = iter(sampler)  # torch's iterator with workers calls iter() twice
    begun = IteratorStart(sampler_iter, base_seed, moment)
    return adopt(loader, begun, previous=previous, foresee=foresee, state=state)


class Echo(Dataset[Any]):
    """Sample i is i, and so a batch is its indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


def same(batch: Any) -> Any:
    return batch


def inner_of(loader: Loader) -> Any:
    """The sampler that draws: what a BatchSampler wraps, or else the loader's."""
    sampler: Any = index_sampler(loader)
    return getattr(sampler, "sampler", sampler)


def plain(value: Any) -> Any:
    """What an order yields as torch would yield it."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def states(loader: Loader) -> list[bytes]:
    """Everything that a user can see of the generators."""
    inner: Any = index_sampler(loader)
    own = [getattr(s, "generator", None) for s in (loader, inner, getattr(inner, "sampler", None))]
    seen = [torch.default_generator, *(g for g in own if g is not None)]
    return [
        *(g.get_state().numpy().tobytes() for g in seen),
        pickle.dumps(np.random.get_state()),  # noqa: NPY002  (what users draw from)
        repr(hash(random.getstate())).encode(),
    ]


def any_sampler(rng: random.Random, n: int, generator: torch.Generator | None) -> Any:
    """One of torch's samplers with any arguments, or a sequence."""
    kind = rng.choice(["seq", "perm", "perm", "repl", "subset", "weighted", "dist", "list"])
    g = rng.choice([generator, generator, None, torch.Generator().manual_seed(rng.randrange(99))])
    num = rng.choice([None, n, 1, rng.randrange(1, n + 1), rng.randrange(1, 3 * n + 1), 2 * n])
    if kind == "seq":
        return SequentialSampler(range(n))
    if kind == "perm":
        return RandomSampler(range(n), False, num, g)
    if kind == "repl":
        return RandomSampler(range(n), True, num, g)
    if kind == "subset":
        return SubsetRandomSampler(rng.sample(range(n), rng.randrange(n + 1)), g)
    if kind == "weighted":
        replace = rng.random() < 0.5
        count = rng.randrange(1, n + 1) if not replace else rng.randrange(1, 2 * n + 1)
        return WeightedRandomSampler([rng.random() + 0.01 for _ in range(n)], count, replace, g)
    if kind == "dist":
        world = rng.randrange(1, 6)
        drop, shuffle = rng.random() < 0.5, rng.random() < 0.8
        args = world, rng.randrange(world), shuffle, rng.randrange(9), drop
        return DistributedSampler(Echo(n), *args)
    listed = rng.choices(range(n), k=rng.randrange(n + 1))
    return rng.choice([listed, tuple(listed), range(n), np.array(listed), torch.tensor(listed)])


def any_loader(case: int, *, workers: int = 0) -> Loader:
    """The loader of a case: equal calls give equal, separate loaders."""
    rng = random.Random(case)
    n = rng.choice([1, 2, rng.randrange(1, 12), rng.randrange(1, 60), rng.randrange(1, 200)])
    generator = torch.Generator().manual_seed(case) if rng.random() < 0.5 else None
    kwargs: dict[str, Any] = {
        "collate_fn": same,
        "generator": generator,
        "num_workers": workers,
        "persistent_workers": bool(workers) and rng.random() < 0.5,
    }
    size = rng.choice([1, 2, 3, rng.randrange(1, 70)])
    how = rng.random()
    if how < 0.25:
        kwargs |= {"shuffle": rng.random() < 0.8, "batch_size": size}
        kwargs["drop_last"] = rng.random() < 0.5
    elif how < 0.7:
        kwargs |= {"sampler": any_sampler(rng, n, generator), "batch_size": size}
        kwargs["drop_last"] = rng.random() < 0.5
    elif how < 0.8:
        kwargs |= {"sampler": any_sampler(rng, n, generator), "batch_size": None}
    elif how < 0.9:
        inner = any_sampler(rng, n, generator)
        kwargs["batch_sampler"] = BatchSampler(inner, size, rng.random() < 0.5)
    else:
        inner = any_sampler(rng, n, generator)
        kwargs |= {"sampler": BatchSampler(inner, size, False), "batch_size": None}
    return DataLoader(Echo(n), **kwargs)


def equal(a: Any, b: Any) -> bool:
    """Equal in value and in type, down to the items."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def epochs(
    loader: Loader, begin: Callable[[], Iterator[Any]], case: int, count: int = 3
) -> list[Any]:
    """Run epochs with a user in between; tell every batch and every state after every moment."""
    rng = random.Random(case + 1)
    torch.manual_seed(case)
    told: list[Any] = []
    inner = inner_of(loader)
    for epoch in range(count):
        if isinstance(inner, DistributedSampler) and rng.random() < 0.8:
            inner.set_epoch(epoch)
        stop = rng.choice([None, None, rng.randrange(1, 5)])
        it = begin()
        told.append(("iter", it.__dict__.get("_base_seed", None), states(loader)))
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
                told.append(("end", states(loader)))
                break
            told.append((plain(batch), states(loader)))
    return told


def ours(loader: Loader, *, look: bool) -> Callable[[], Iterator[Any]]:
    """Begin epochs by `observe`; `look`: predict at every moment, which nobody must notice."""
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
        # Every other one is asked for predictions all the while.
        got = epochs(mine, ours(mine, look=case % 2 > 0), case)
        assert len(want) == len(got), case
        for step, (w, g) in enumerate(zip(want, got, strict=True)):
            assert equal(list(w[:-1]), list(g[:-1])), (case, step)
            assert w[-1] == g[-1], (case, step)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("later", [1, 10, 33, 45, 60])
def test_a_dataset_that_grows_or_shrinks_amid_an_epoch_gets_torch_s_batches(
    replacement: bool, own: bool, later: int
) -> None:
    """RandomSampler asks for the number of samples again before its last draw."""

    def rest(begin: Callable[[Loader], Iterator[Any]]) -> tuple[Any, ...]:
        torch.manual_seed(5)
        data = Echo(37)
        generator = torch.Generator().manual_seed(6) if own else None
        sampler = RandomSampler(data, replacement, generator=generator)
        loader = DataLoader(data, 4, sampler=sampler, collate_fn=same)
        it = begin(loader)
        first = plain(next(it))
        data.n = later
        return first, [plain(batch) for batch in it], states(loader)

    assert rest(observe) == rest(iter)


def test_none_left_of_a_dataset_is_torch_s_error() -> None:
    for replacement, error in (False, ZeroDivisionError), (True, RuntimeError):
        data = Echo(5)
        loader = DataLoader(data, 4, sampler=RandomSampler(data, replacement))
        data.n = 0
        for begin in iter, observe:
            with pytest.raises(error):
                next(begin(loader))


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


# --- large orders ------------------------------------------------------------------------------

_LARGE, BATCH = 2_000_000, 256


def large(kind: str, n: int = _LARGE) -> Loader:
    generator = torch.Generator().manual_seed(1)
    data = range(n)
    every: dict[str, dict[str, Any]] = {
        "seeded": {"shuffle": True},
        "generator": {"shuffle": True, "generator": generator},
        "distributed": {"sampler": DistributedSampler(data, 8, 3)},  # type: ignore[arg-type]  # sized
    }
    return DataLoader(data, batch_size=BATCH, **every[kind])  # type: ignore[arg-type]  # sized


@pytest.mark.parametrize("kind", ["seeded", "generator", "distributed"])
def test_the_first_batches_of_a_large_epoch_do_not_wait_for_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    randperm, go_on = generators.randperm, threading.Event()

    def late(n: int, generator: torch.Generator) -> Any:
        assert n < _LARGE or go_on.wait(30)
        return randperm(n, generator)

    monkeypatch.setattr(generators, "randperm", late)
    order = observe(large(kind))
    first: list[Any] = [next(order) for _ in range(8)]
    go_on.set()
    whole: Any = order.predict(0)
    assert np.array_equal(np.concatenate(first), whole.cut(0, 8)[0])
    order.skip(_LARGE // BATCH // (16 if kind == "distributed" else 2))
    k = order.pulled
    assert same_batch(whole.cut(k, k + 1)[0], next(order))


@pytest.mark.parametrize("n", [10_000, _LARGE])
def test_a_permutation_that_was_foreseen_is_not_drawn_again(n: int) -> None:
    loader = large("generator", n)
    order = observe(loader)
    foreseen: Any = order.predict(1)
    indices = foreseen.cut(0, foreseen.steps)[0]
    order.skip(len(range(0, n, BATCH)))
    assert next(order, None) is None  # all draws of the epoch's end are made
    order = observe(loader, previous=order)
    now: Any = order.predict(0)
    assert foreseen.same(now)
    next(order)
    assert np.shares_memory(now.cut(0, now.steps)[0], indices)
    again: Any = order.predict(0)
    assert np.shares_memory(again.cut(0, again.steps)[0], indices)
    assert foreseen.same(again)


@pytest.mark.parametrize("n", [10_000, (1 << 17) + 3])
def test_large_permutations_in_a_row_leave_the_generator_as_torch_does(n: int) -> None:
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    torch.randn(1, generator=generators[0])
    torch.randn(1, generator=generators[1])
    data = range(n)
    loaders: list[Loader] = [
        DataLoader(data, 1000, sampler=RandomSampler(data, False, 2 * n + 9, g), generator=g)  # type: ignore[arg-type]  # sized
        for g in generators
    ]
    sampler_iter = iter(loaders[0].batch_sampler or [])
    torch.empty((), dtype=torch.int64).random_(generator=generators[0])
    order = observe(loaders[1])
    for want in sampler_iter:
        assert plain(next(order)) == want
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
    assert next(order, None) is None
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_an_epoch_takes_little_memory() -> None:
    for thread in threading.enumerate():
        if thread.name == "creel-randperm":  # an earlier test's, whose memory would count
            thread.join()
    n = 1_281_167
    order = observe(DataLoader(range(n), BATCH, shuffle=True))  # type: ignore[arg-type]  # sized
    tracemalloc.start()
    for _ in order:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 12 bytes a sample where this thread draws all of it, and 8 in the other one, that prepares the
    # first quarter million, if both work at once; a list of ints would take 40 for good.
    assert peak < 24 * n


# --- saving and restoring ----------------------------------------------------------------------


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
    rest = [plain(b) for b in order]
    then = observe(first, previous=order)
    follow = [plain(b) for b in then]

    second = any_loader(case)
    torch.manual_seed(rng.choice([case, 999]))
    seen = torch.get_rng_state()
    again = observe(second, state=state)
    again.skip(taken)
    assert str([plain(b) for b in again]) == str(rest)
    assert again.base_seed == order.base_seed
    assert torch.equal(torch.get_rng_state(), seen)  # the global generator is the user's
    torch.set_rng_state(saved)
    again = observe(second, state=state)
    again.skip(taken)
    assert str([plain(b) for b in again]) == str(rest)
    if isinstance(inner, DistributedSampler):
        inner_of(second).epoch = inner.epoch
    if order.pulled and taken:  # the draws of the epoch's start were made when it was saved
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


def test_torch_s_own_iterator_can_begin_the_epoch() -> None:
    loader: Loader = DataLoader(Echo(30), 4, shuffle=True, collate_fn=same)
    torch.manual_seed(1)
    want = list(loader)
    torch.manual_seed(1)
    moment = samplers.before(loader)
    it: Any = iter(loader)
    begun = IteratorStart(it._sampler_iter, it._base_seed, moment)
    order = samplers.adopt(loader, begun)
    it._sampler_iter = map(plain, order)
    assert list(it) == want
    torch.manual_seed(3)
    seen, moment = torch.get_rng_state(), samplers.before(loader)
    it = iter(loader)
    begun = IteratorStart(it._sampler_iter, it._base_seed, moment)
    order = samplers.adopt(loader, begun, state=order.state())
    assert torch.equal(torch.get_rng_state(), seen)
    order.skip(3)
    assert [plain(b) for b in order] == want[3:]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_amid_a_draw_leaves_the_child_able_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    real, gate, drawing = generators.randperm, threading.Event(), threading.Event()

    def slow(n: int, generator: torch.Generator) -> Any:
        drawing.set()
        gate.wait()
        return real(n, generator)

    monkeypatch.setattr(generators, "randperm", slow)
    n = 1 << 18
    permutation = generators.Permutation(n, generators.state_of(generators.seeded(5)))
    permutation.first(10)
    drawing.wait()
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            torch.set_num_threads(1)  # OpenMP's threads did not come along
            generators.randperm = real
            os._exit(0 if len(permutation.whole()) == n else 1)
        finally:
            os._exit(2)  # whatever was raised: the tests are the parent's
    gate.set()
    assert os.waitpid(pid, 0)[1] == 0
    assert (permutation.whole() == real(n, generators.seeded(5))).all()


def test_a_permutation_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", scarce)
    n = 1 << 18
    permutation = generators.Permutation(n, generators.state_of(generators.seeded(5)))
    want = generators.randperm(n, generators.seeded(5))
    assert (permutation.first(10)[:10] == want[:10]).all()
    assert (permutation.whole() == want).all()
