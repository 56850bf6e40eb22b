"""The laws of docs/retention.md on the real core and a virtual clock, against oracles."""

from __future__ import annotations

import numpy as np
import pytest
from classics import chance, fifo, lru, lru_hits, min_reads, pin
from numpy.typing import NDArray
from simulate import CoreNode, Job, Outcome, Replay

pytestmark = pytest.mark.timeout(120)

N, BATCH = 6_000, 16
FS = (0.1, 0.25, 0.5, 0.75, 0.9)
Epochs = list[NDArray[np.int32]]


def shuffled(epochs: int, ranks: int = 1, n: int = N, seed: int = 0) -> Epochs:
    """Return the slices that DistributedSampler makes of one permutation per epoch."""
    rng = np.random.default_rng(seed)
    return [
        rng.permutation(n)[: n // ranks * ranks].reshape(-1, ranks).T.astype(np.int32).copy()
        for _ in range(epochs)
    ]


def replay(job: Job, capacity: int, lengths: NDArray[np.int64]) -> list[Outcome]:
    each = job.ranks_per_node
    nodes = [
        CoreNode(lengths, capacity, range(r, r + each), job.ranks)
        for r in range(0, job.ranks, each)
    ]
    return Replay(job, nodes).run()


def equal(job: Job, f: float, n: int = N) -> list[Outcome]:
    return replay(job, int(f * n) * 100, np.full(n, 100))


@pytest.mark.parametrize("f", FS)
def test_an_epoch_reads_hardly_more_than_what_does_not_fit(f: float) -> None:
    """L1: no policy reads less than (1-f) N; the bound here is 1 % above."""
    out = equal(Job(shuffled(4), BATCH), f)
    for epoch in out[1:]:
        assert (1 - f) * N * 0.99 <= epoch.reads + epoch.direct <= 1.01 * (1 - f) * N
    assert sum(e.reads + e.direct for e in out) >= N + 3 * (1 - f) * N - 1


@pytest.mark.parametrize("f, ahead", [(1.0, 1), (1.2, 0)])
def test_a_dataset_that_fits_is_read_once(f: float, ahead: int) -> None:
    out = equal(Job(shuffled(3, ranks=2), BATCH, ranks_per_node=2, ahead=ahead), f)
    assert sum(e.reads for e in out) == N
    assert sum(e.direct for e in out) == 0


@pytest.mark.parametrize("f", FS[::2])
def test_a_sampler_that_cannot_be_predicted_costs_no_more_reads(f: float) -> None:
    """Theorem 2: for the number of reads, knowing one epoch at a time is enough."""
    out = equal(Job(shuffled(3), BATCH, ahead=0), f)
    assert all(e.reads + e.direct <= 1.01 * (1 - f) * N for e in out[1:])


def test_four_ranks_on_a_node_share_one_copy() -> None:
    n = 12_000
    out = equal(Job(shuffled(4, ranks=4, n=n), BATCH, ranks_per_node=4), 0.5, n)
    assert all(e.reads + e.direct <= 1.01 * 0.5 * n for e in out[1:])


@pytest.mark.parametrize(("f", "latency_s"), [(0.25, 0.0), (0.9, 2.0)])
def test_a_source_that_just_keeps_up_is_enough(f: float, latency_s: float) -> None:
    """L2, paced retention: source at 1.05 x the mean miss rate; plain MIN needs 1.2-1.7 x."""
    n, batch = 16_000, 64
    rate = 1.05 * (1 - f) * batch * 100
    job = Job(shuffled(4, n=n), batch, bandwidth_Bps=rate, latency_s=latency_s, nbytes=100)
    steps = n // batch
    # the first epoch is all misses and leaves no lead for the second to begin with
    for epoch, bound in zip(equal(job, f, n)[1:], (1.03, 1.02, 1.02), strict=True):
        assert epoch.time_s <= bound * steps
        assert epoch.reads + epoch.direct <= 1.01 * (1 - f) * n


@pytest.mark.parametrize("f, batch", [(0.25, 256), (0.5, 16)])
def test_image_sizes_read_hardly_more_bytes_than_do_not_fit(f: float, batch: int) -> None:
    """L1 in bytes, mean 110 KB and deviation 100 KB.

    The number of objects in those bytes varies by about 1 % with which objects happen to stay.
    """
    n, spread = 10_000, np.log(1 + (100 / 110) ** 2)
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(np.log(110e3) - spread / 2, np.sqrt(spread), n).astype(np.int64) + 1
    total = int(lengths.sum())
    out = replay(Job(shuffled(3, n=n), batch), int(f * total), lengths)
    for epoch in out[1:]:
        assert epoch.nbytes <= 1.01 * (1 - f) * total
        assert epoch.reads <= 1.04 * (1 - f) * n
        assert epoch.direct == 0


def drawn(kind: str, epochs: int, seed: int = 5) -> Epochs:
    rng = np.random.default_rng(seed)
    if kind == "replacement":
        return [rng.integers(0, N, (1, N)).astype(np.int32) for _ in range(epochs)]
    weights = 1 / np.arange(1, N + 1) ** 0.6
    names = rng.permutation(N).astype(np.int32)
    return [names[rng.choice(N, (1, N), p=weights / weights.sum())] for _ in range(epochs)]


@pytest.mark.parametrize("f, kind", [(0.1, "weights"), (0.75, "replacement")])
def test_streams_with_repeats_are_within_two_percent_of_min(kind: str, f: float) -> None:
    """L4."""
    epochs = drawn(kind, 5)
    out = equal(Job(epochs, BATCH), f)
    best = min_reads(np.concatenate(epochs, axis=1)[0].tolist(), int(f * N), N)
    assert sum(e.reads + e.direct for e in out[1:]) <= 1.02 * best[1:].sum()


def test_two_jobs_on_one_dataset_share_it_better_than_a_pinned_half() -> None:
    """L4 over the union of two plans."""
    n, f = 4000, 0.5
    plans = [shuffled(6, n=n, seed=s) for s in (1, 2)]
    trace = np.stack([np.concatenate(p, axis=1)[0] for p in plans], 1).ravel()
    core = TwoJobs(np.full(n, 100), int(f * n) * 100)
    out = Replay(
        Job([np.concatenate([a, b]) for a, b in zip(*plans, strict=True)], BATCH, 2), [core]
    ).run()
    best = min_reads(trace.tolist(), int(f * n), 2 * n)
    ours = sum(e.reads + e.direct for e in out[1:])
    assert ours <= 1.05 * best[1:].sum()
    pinned = int((~pin(trace, int(f * n))[2 * n :]).sum())
    assert pinned > 1.5 * ours


class TwoJobs(CoreNode):
    """Ranks 0 and 1 belong to jobs of their own."""

    def __init__(self, lengths: NDArray[np.int64], capacity: int) -> None:
        super().__init__(lengths, capacity, range(2), 2, jobs=["a", "b"])


def test_one_percent_of_memory_streams_without_a_stall() -> None:
    out = equal(Job(shuffled(2), BATCH), 0.01)
    assert all(e.direct == 0 and e.stall_s <= 1 for e in out)


def test_nodes_that_do_not_speak_to_each_other_keep_their_own_bound() -> None:
    """Each node keeps the objects that its own ranks may read again."""
    n = 8000
    out = equal(Job(shuffled(4, ranks=4, n=n), BATCH, ranks_per_node=2), 0.5, n)
    assert all(e.reads <= 1.02 * n for e in out)
    assert sum(e.reads for e in out[1:]) < 0.8 * 3 * n


@pytest.mark.parametrize("f", FS)
def test_lru_has_the_hits_of_its_closed_form(f: float) -> None:
    trace = np.concatenate(shuffled(6), axis=1)[0]
    assert lru(trace, int(f * N))[2 * N :].mean() == pytest.approx(lru_hits(f), abs=0.01)


def test_the_classics_fall_short_as_the_table_says() -> None:
    """Hits at f = .5: those of `pin` are f, the others were simulated."""
    trace = np.concatenate(shuffled(8), axis=1)[0]
    late = slice(3 * N, None)
    assert pin(trace, N // 2)[late].mean() == 0.5
    assert fifo(trace, N // 2)[late].mean() == pytest.approx(0.193, abs=0.01)
    rng = np.random.default_rng(1)
    assert chance(trace, N // 2, rng)[late].mean() == pytest.approx(0.284, abs=0.01)
