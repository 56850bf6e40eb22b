"""Ranks that exchange samples: torch's global batches, by affinity, the same on all ranks."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, TensorDataset

import creel
from creel.errors import ConfigError
from creel.loader.line.order.epoch_order import EpochOrder, IteratorStart
from creel.loader.line.order.samplers import before, resharded, take_over, without_batches
from creel.loader.making.groups import negotiation
from creel.loader.making.groups.exchange import REMAP, check_unchanged, distributed_sampler
from creel.loader.making.groups.negotiation import Decision, Terms, decide, negotiated
from creel.policies.order.remap import Exchange
from kit import seeds, until


class Job:
    """The loaders of all ranks, and the orders that they begin."""

    def __init__(self, samples: int, node_of: tuple[int, ...], batch: int, **options: bool) -> None:
        self.world, self.exchange = len(node_of), Exchange(node_of, batch)
        data = TensorDataset(torch.arange(samples))
        shuffle, drop_last, even = (
            options.get(name, False) for name in ("shuffle", "drop", "even")
        )
        self.loaders = [
            creel.DataLoader(
                data,
                batch,
                sampler=DistributedSampler(data, self.world, rank, shuffle, 7, even),
                drop_last=drop_last,
                creel=False,
            )
            for rank in range(self.world)
        ]

    def begin(self, epoch: int, states: list[Any] | None = None) -> list[EpochOrder]:
        orders = []
        for rank, loader in enumerate(self.loaders):
            loader.set_epoch(epoch)
            begun = IteratorStart(iter(()), 1, before(loader))
            state = None if states is None else states[rank]
            orders.append(take_over(loader, begun, state=state, exchange=self.exchange))
        return orders

    def torchs(self, epoch: int) -> list[list[int]]:
        """Return the samples of each global batch, sorted, as torch deals them."""
        for loader in self.loaders:
            loader.set_epoch(epoch)
        samplers: list[Any] = [loader.batch_sampler for loader in self.loaders]
        return together([list(sampler) for sampler in samplers])


def rows(order: EpochOrder) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in order]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(chain(*step)) for step in zip(*ranks, strict=True)]


def any_job(seed: int) -> Job:
    rng = random.Random(seed)
    world = rng.randint(2, 6)
    node_of = tuple(rng.randrange(rng.randint(1, 3)) for _ in range(world))
    options = {name: rng.random() < 0.5 for name in ("shuffle", "drop", "even")}
    return Job(rng.randint(world, 400), node_of, rng.randint(1, 17), **options)


@pytest.mark.parametrize("seed", seeds(40))
def test_every_step_of_all_ranks_has_the_samples_that_torch_deals_to_it(seed: int) -> None:
    job = any_job(seed)
    orders = job.begin(3)
    plans: list[Any] = [[order.predict(k) for k in (0, 1)] for order in orders]
    read = [rows(order) for order in orders]
    assert together(read) == job.torchs(3)
    following = [rows(order) for order in job.begin(4)]
    for rank, planned in enumerate(plans):
        for plan, batches in zip(planned, (read[rank], following[rank]), strict=True):
            indices, ends = plan.cut(0, plan.steps)
            assert [s.tolist() for s in np.split(indices, ends[:-1])] == batches or not batches


@pytest.mark.parametrize("seed", seeds(20))
def test_daemons_compute_from_a_few_numbers_what_every_rank_reads(seed: int) -> None:
    job = any_job(seed)
    for rank, order in enumerate(job.begin(2)):
        plan = order.predict(0)
        assert plan is not None
        deal = plan.deal
        batches = rows(order)
        if deal is not None and batches:
            dealt = deal.by_rank(job.exchange.node_of)[rank].tolist()
            assert dealt == list(chain(*batches))


@pytest.mark.parametrize("seed", seeds(20))
def test_a_resumed_epoch_goes_on_with_the_global_batches_that_are_left(seed: int) -> None:
    job, rng = any_job(seed), random.Random(seed)
    orders = job.begin(5)
    whole = job.torchs(5)
    done = rng.randint(0, len(whole))
    for order in orders:
        order.skip(done)
    states = json.loads(json.dumps([order.state() for order in orders]))
    gone = sorted(rng.sample(range(done, len(whole)), min(2, len(whole) - done)))
    left = [
        without_batches(loader, state, done, gone)
        for loader, state in zip(job.loaders, states, strict=True)
    ]
    for given, kept in ((states, whole), (left, [b for i, b in enumerate(whole) if i not in gone])):
        again = job.begin(5, given)
        for order in again:
            order.skip(done)
        assert together([rows(order) for order in again]) == kept[done:]


@pytest.mark.parametrize("new", [(0, 1), (0, 0, 1, 1), (0, 1, 1, 2, 2)])
def test_other_ranks_exchange_what_is_left_of_an_epoch(new: tuple[int, ...]) -> None:
    before_it, after_it = Job(211, (0, 1, 2), 4, shuffle=True), Job(211, new, 6, shuffle=True)
    orders = before_it.begin(1)
    head = together([[np.asarray(next(order)).tolist() for _ in range(5)] for order in orders])
    state = orders[0].state()
    states = [resharded(loader, state, batches=5, over=False)[0] for loader in after_it.loaders]
    remaining = together([rows(order) for order in after_it.begin(1, states)])
    read = list(chain(*head, *remaining))
    assert set(read) == set(range(211))
    assert len(read) < 211 + len(new)


@pytest.mark.parametrize("nodes, ranks, batch", [(2, 1, 256), (8, 2, 128), (64, 8, 32)])
def test_few_samples_go_where_they_have_no_affinity(nodes: int, ranks: int, batch: int) -> None:
    """The surplus of a binomial count, 1 / sqrt(2 pi b)."""
    exchange = Exchange(tuple(i // ranks for i in range(nodes * ranks)), batch)
    node_of = np.array(exchange.node_of)
    order = np.random.default_rng(9).permutation(len(node_of) * batch * 8).astype(np.int32)
    moved = node_of[exchange.apply(order) % len(node_of)] != np.resize(node_of, len(order))
    assert moved.mean() <= 0.03


def test_samples_unshuffled_or_on_one_node_stay_as_they_are_dealt() -> None:
    order = np.arange(100, dtype=np.int32)
    assert Exchange((0, 1, 2, 3), 5).apply(order).tolist() == order.tolist()
    shuffled = np.random.default_rng(3).permutation(order)
    assert Exchange((0, 0, 0, 0), 5).apply(shuffled).tolist() == shuffled.tolist()
    assert not Exchange((0, 0), 5).moves


def test_ranks_that_differ_are_refused_together() -> None:
    first, two = Terms("x", 0, "a", (2, 8)), Terms("y", 1, "b", (2, 8))
    assert decide(REMAP, "c", [two, first]).node_of == (0, 1)
    assert not decide(REMAP, "c", [first, two]).refused
    for other in (Terms("y", 1, "b", (2, 9)), Terms("y", 0, "b", (2, 8))):
        agreed = decide(REMAP, "c", [first, other])
        assert agreed.refused
        assert agreed.names == ("x", "y")


class Ranks:
    """Ranks of a job, each a thread, that meet in a store."""

    def __init__(self, store: Store, world: int) -> None:
        self.store, self.world = store, world
        self._threads = ThreadPoolExecutor(world)
        self._count = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def begin(self, rank: int) -> Future[Decision]:
        self._count += 1
        terms = Terms(f"process {self._count}", rank, f"n{self._count}", (self.world, 8))
        return self._threads.submit(negotiated, REMAP, rank, self.world, terms, self.store)

    def agree(self) -> None:
        both = [self.begin(rank) for rank in range(self.world)]
        assert [done.result().node_of for done in both] == [tuple(range(self.world))] * self.world


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_agree_in_a_store_that_has_the_words_of_dead_ones(first: int) -> None:
    store = HashStore()
    with Ranks(store, 2) as dead:
        dead.agree()
        store.set("creel/remap/call", "which the next process of rank 0 died after")
    with Ranks(store, 2) as ranks:
        future = ranks.begin(first)
        if first:  # it answers a rank that has left
            until(lambda: b"died after" in store.get("creel/remap/terms/1"))
        else:
            until(lambda: b"died after" not in store.get("creel/remap/call"))
        other = ranks.begin(1 - first)
        assert future.result().node_of == other.result().node_of == (0, 1)


def test_many_loaders_leave_as_many_keys_as_one(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 3)
    with Ranks(store, 3) as ranks:
        ranks.agree()
        keys = store.num_keys()
        for _ in range(3):
            ranks.agree()
        assert store.num_keys() == keys


def test_where_one_rank_gives_up_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with Ranks(store, 4) as ranks:  # the last one never comes
        there = [ranks.begin(0), ranks.begin(1)]
        until(lambda: store.check(["creel/remap/terms/1"]))
        monkeypatch.setattr(negotiation, "_GIVE_UP_S", 0.0)
        there.append(ranks.begin(2))
        for rank in there:
            with pytest.raises(ConfigError, match="not all ranks"):
                rank.result()


def test_only_torchs_distributed_sampler_deals_to_ranks() -> None:
    data = TensorDataset(torch.arange(10))
    for sampler in (BatchSampler(SequentialSampler(data), 2, False), SequentialSampler(data), [3]):
        with pytest.raises(ConfigError, match="DistributedSampler"):
            distributed_sampler(sampler)
    with pytest.raises(ConfigError, match="remap"):
        creel.DataLoader(data, remap="local")  # type: ignore[arg-type]  # tests the refusal


@pytest.mark.parametrize(
    "options",
    [{"sampler": list(range(10))}, {"batch_sampler": [[1, 2], [3]]}, {"batch_size": None}],
    ids=["sampler", "batch_sampler", "batch_size"],
)
def test_a_loader_that_deals_otherwise_is_refused_when_it_is_made(options: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(10))
    if "batch_size" in options:
        options = {**options, "sampler": DistributedSampler(data, 2, 0)}
    with pytest.raises(ConfigError, match="DistributedSampler"):
        creel.DataLoader(data, **options, creel=False, remap="global-batch")
    creel.DataLoader(data, creel=False, remap="global-batch")  # Lightning will deal its samples


def test_ranks_and_batch_size_stay_as_they_were_agreed() -> None:
    dealt = BatchSampler(DistributedSampler(TensorDataset(torch.arange(10)), 2, 0), 4, False)
    check_unchanged(Exchange((0, 1), 4), dealt)
    for other in (Exchange((0, 1), 5), Exchange((0, 1, 1), 4)):
        with pytest.raises(ConfigError, match="remap"):
            check_unchanged(other, dealt)


def test_a_job_without_a_process_group_is_told_what_it_lacks() -> None:
    data = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 0)
    loader = creel.DataLoader(data, 2, sampler=sampler, creel=False, remap="global-batch")
    with pytest.raises(ConfigError, match="remap"):
        iter(loader)
    alone: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    loader = creel.DataLoader(data, 2, sampler=alone, creel=False, remap="global-batch")
    assert sorted(torch.cat([batch for (batch,) in loader]).tolist()) == list(range(10))
