"""Streams that are part of another stream: one rank's share of it, or all but some batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from creel.loader.order.streams import Derived, Items, SamplerStream, Sequential, StreamState
from creel.policies.cluster.job_order import IN_ORDER, JobOrder
from creel.policies.cluster.remap import Exchange


class Distributed(Derived):
    """One rank's share of an order: every world-th item, with the head repeated or the tail cut.

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
        self._epoch, self._offset = epoch, offset
        self._exchange = exchange
        self._rank, self._world = sampler.rank, sampler.num_replicas
        self._n = order.total
        rest = each_of(self._n - offset, self._world, drop_last=sampler.drop_last)
        self.total = rest if offset else sampler.num_samples
        self.spread = self._world
        if exchange is not None:
            self.at_a_time = max(self.at_a_time // self._world, exchange.batch)
        self.key = ("dealt", order.key, self._rank, self._world, self.total, offset, exchange)

    def need(self, item: int) -> None:  # noqa: ARG002  the first item needs the whole order
        self._order.need(0)

    @property
    def drawn(self) -> int:
        return self.total if self._order.drawn == self._n else 0

    @property
    def ready(self) -> int:
        there = self._order.ready
        if there == self._n:
            return self.total
        there -= self._offset
        if self._exchange is not None:
            batch = self._exchange.batch
            return max(there, 0) // (batch * self._world) * batch
        return max(there - self._rank, 0) // self._world

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return np.empty(0, np.int32)
        if self._exchange is not None:
            return self._exchanged(self._exchange, start, stop)
        return self._at(self._rank + self._world * np.arange(start, stop))

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.signedinteger]:
        """Return (k,) items at these ascending places, counted from `offset`."""
        places = self._offset + places
        if isinstance(self._order, Sequential):
            return places % max(self._n, 1)
        head = self._order.items(0, min(int(places[-1]) + 1, self._n))
        return np.asarray(head)[places % self._n]

    def _exchanged(self, exchange: Exchange, start: int, stop: int) -> NDArray[np.int32]:
        """Return items [start, stop) of this rank, cut out of whole steps of all ranks."""
        batch, world = exchange.batch, self._world
        first = start // batch * batch
        last = min(-(-stop // batch) * batch, self.total)
        dealt = self._at(np.arange(first * world, last * world)).astype(np.int32)
        return exchange.apply(dealt)[self._rank :: world][start - first : stop - first]

    def deal(self, each: int, batch: int) -> JobOrder | None:
        """Return the whole job's epoch: `each` samples of every rank, in steps of `batch`.

        None if a daemon could not compute it.
        """
        if self._offset:
            return None
        in_order = isinstance(self._order, Sequential)
        seed = IN_ORDER if in_order else self._order.state().get("seed")
        if seed is None:
            return None
        return JobOrder(self._n, self._world, each, batch, seed, self._exchange is not None)

    def state(self) -> StreamState:
        state: StreamState = {"epoch": self._epoch, "world": self._world}
        return {**state, "offset": self._offset} if self._offset else state


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
        self.spread, self.thread_safe = whole.spread, whole.thread_safe
        self.at_a_time = whole.at_a_time
        if whole.key is not None:
            self.key = ("without", whole.key, self._gone.tobytes(), each)

    def _missing(self, items: int) -> int:
        """Count the items left out among the first `items` of the whole stream."""
        return int((items - self._gone * self._each).clip(0, self._each).sum())

    @property
    def drawn(self) -> int:
        return self._order.drawn - self._missing(self._order.drawn)

    @property
    def ready(self) -> int:
        return self._order.ready - self._missing(self._order.ready)

    def need(self, item: int) -> None:
        places = in_whole(np.array([item]) // self._each, self._gone) * self._each
        self._order.need(min(int(places[0]) + item % self._each, self._order.total))

    def items(self, start: int, stop: int) -> Items:
        if start >= stop:
            return self._order.items(0, 0)
        batch, rest = np.divmod(np.arange(start, stop), self._each)
        places = in_whole(batch, self._gone) * self._each + rest
        first = int(places[0])
        found = self._order.items(first, int(places[-1]) + 1)
        if isinstance(found, np.ndarray):
            return found[places - first]
        return [found[i] for i in (places - first).tolist()]

    def state(self) -> StreamState:
        return {**self._order.state(), "without": self._gone.tolist(), "each": self._each}


def in_whole(batches: NDArray[np.int64], gone: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert (k,) batch numbers in the stream without `gone` to those in the whole stream.

    >>> in_whole(np.array([0, 1, 2]), np.array([1, 2])).tolist()
    [0, 3, 4]
    """
    return batches + np.searchsorted(gone - np.arange(len(gone)), batches, side="right")


def each_of(items: int, world: int, *, drop_last: bool) -> int:
    """Return the number of items that torch's DistributedSampler deals to each rank."""
    return max(items // world if drop_last else -(-items // world), 0)
