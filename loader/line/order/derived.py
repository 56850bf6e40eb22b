"""Streams made of another one: one rank's share of it, or all but some batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from creel.loader.line.order.streams import (
    Derived,
    Items,
    SamplerStream,
    Sequential,
    StreamState,
)
from creel.policies.cluster.job_order import IN_ORDER, JobOrder
from creel.policies.order.dealing import Dealing, each_of
from creel.policies.order.division import Division
from creel.policies.order.remap import Exchange


class Distributed(Derived):
    """One rank's share of an order (`Dealing`).

    `offset`: items of the order that an earlier number of ranks has read; dealing begins there.
    `exchange`: how the ranks exchange their items within a step.
    """

    def __init__(
        self,
        order: SamplerStream,
        sampler: DistributedSampler[object],
        epoch: int,
        offset: int = 0,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(order)
        self._epoch, self._rank = epoch, sampler.rank
        n, world = order.total, sampler.num_replicas
        remaining = each_of(n - offset, world, drop_last=sampler.drop_last)
        self.total = remaining if offset else sampler.num_samples
        self._dealing = Dealing(n, world, self.total, offset, exchange)
        self.spread = world
        self.key = ("dealt", order.key, self._rank, self._dealing)

    def need(self, item: int) -> None:  # noqa: ARG002  the first item needs the whole order
        self._order.need(0)

    @property
    def ready(self) -> int:
        there = self._order.ready
        if there == self._order.total:
            return self.total
        return self._dealing.known(self._rank, there)

    def items(self, start: int, stop: int) -> Items:
        head = None if isinstance(self._order, Sequential) else self._head
        return self._dealing.to_rank(self._rank, head, start, stop)

    def _head(self, k: int) -> NDArray[np.integer]:
        return np.asarray(self._order.items(0, k))

    def dealt(self, division: Division) -> JobOrder | None:
        if division.starts is not None:
            return None
        each = min(division.start(division.steps(self.total)), self.total)
        n, world, _, offset, exchange = self._dealing
        in_order = isinstance(self._order, Sequential)
        seed = IN_ORDER if in_order else self._order.state().get("seed")
        if offset or seed is None:
            return None
        return JobOrder(n, world, each, division.size, seed, exchange is not None)

    def state(self) -> StreamState:
        _, world, _, offset, _ = self._dealing
        state: StreamState = {"epoch": self._epoch, "world": world}
        return {**state, "offset": offset} if offset else state

    def in_epoch(self, item: int) -> int:
        return item + self._dealing.offset // self._dealing.world

    def of_all_ranks(self, start: int, stop: int) -> Items:
        world = self._dealing.world
        return self._order.items(start * world, min(stop * world, self._order.total))


class Without(Derived):
    """A stream without some of its batches, of `each` items."""

    def __init__(self, whole: SamplerStream, batches: Sequence[int], each: int) -> None:
        """batches: their numbers in the whole stream."""
        super().__init__(whole)
        self._each = each
        self._gone = np.unique(np.asarray(batches, np.int64))
        self._gone = self._gone[self._gone * each < whole.total]
        self.total = whole.total - self._missing(whole.total)
        self.live, self.at_once = whole.live, whole.at_once
        self.spread = whole.spread
        if whole.key is not None:
            self.key = ("without", whole.key, self._gone.tobytes(), each)

    def _missing(self, items: int) -> int:
        """Count the items left out among the first `items` of the whole stream."""
        return int((items - self._gone * self._each).clip(0, self._each).sum())

    @property
    def ready(self) -> int:
        return self._order.ready - self._missing(self._order.ready)

    def need(self, item: int) -> None:
        places = in_whole(np.array([item]) // self._each, self._gone) * self._each
        self._order.need(min(int(places[0]) + item % self._each, self._order.total))

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return self._order.items(0, 0)
        batch, remainder = np.divmod(np.arange(start, stop), self._each)
        places = in_whole(batch, self._gone) * self._each + remainder
        first = int(places[0])
        items = self._order.items(first, int(places[-1]) + 1)
        if isinstance(items, np.ndarray):
            return items[places - first]
        return [items[i] for i in (places - first).tolist()]

    def state(self) -> StreamState:
        return {**self._order.state(), "without": self._gone.tolist(), "each": self._each}

    def in_epoch(self, item: int) -> int:
        batch, remainder = divmod(item, self._each)
        whole = int(in_whole(np.array([batch]), self._gone)[0])
        return self._order.in_epoch(whole * self._each + remainder)

    def of_all_ranks(self, start: int, stop: int) -> Items:
        return self._order.of_all_ranks(start, stop)


def step_in_epoch(stream: SamplerStream, division: Division, step: int) -> int:
    """Return a step's number in the whole epoch: earlier ones were read elsewhere, or left out."""
    if division.starts is not None:
        return step
    return stream.in_epoch(division.start(step)) // division.size


def in_whole(batches: NDArray[np.int64], gone: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert (k,) batch numbers in the stream without `gone` to those in the whole stream.

    >>> in_whole(np.array([0, 1, 2]), np.array([1, 2])).tolist()
    [0, 3, 4]
    """
    return batches + np.searchsorted(gone - np.arange(len(gone)), batches, side="right")
