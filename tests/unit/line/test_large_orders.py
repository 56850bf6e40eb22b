"""Orders of millions: drawn ahead in a thread, once, in little memory, as torch draws them."""

from __future__ import annotations

import os
import signal
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from order_rig import Loader, observe, plain
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from creel.loader.line.order import generators
from creel.loader.line.order.epoch_plan import same_batch

pytestmark = pytest.mark.timeout(120)

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
    assert next(order, None) is None  # makes all draws of the epoch's end
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
        if thread.name == "creel-randperm":  # an earlier test's thread, whose memory would count
            thread.join()
    n = 1_281_167
    order = observe(DataLoader(range(n), BATCH, shuffle=True))  # type: ignore[arg-type]  # sized
    tracemalloc.start()
    for _ in order:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 12 bytes per sample if this thread draws all, and 8 in the thread that prepares the first
    # quarter million, if both run at once; a list of ints would keep 40.
    assert peak < 24 * n


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
            torch.set_num_threads(1)  # a fork has no OpenMP threads
            generators.randperm = real
            os._exit(0 if len(permutation.whole()) == n else 1)
        finally:
            os._exit(2)  # on any error: only the parent runs tests
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
