"""Which items of an order each rank reads, as torch's DistributedSampler deals them. Pure.

The loader computes one rank's share piece by piece, from as much of the permutation as is drawn;
daemons compute the shares of all ranks at once (`policies.cluster.job_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.order.remap import Exchange

#: Returns the first k entries of an order, for any k up to its length.
Head = Callable[[int], NDArray[np.integer]]


class Dealing(NamedTuple):
    """How an order is dealt: its item i goes to rank i % world, as item i // world of that rank.

    If the ranks read more than the order has, it is repeated from its head; otherwise its tail is
    left over.

    Args:
        samples: length of the order.
        world: number of ranks.
        each: items of each rank, for example `each_of` them.
        offset: items at the head of the order that an earlier number of ranks has read.
        exchange: how the ranks exchange their items within each step.
    """

    samples: int
    world: int
    each: int
    offset: int = 0
    exchange: Exchange | None = None

    def to_rank(self, rank: int, head: Head | None, start: int, stop: int) -> NDArray[np.integer]:
        """Return items [start, stop) of a rank.

        Args:
            head: of the order; None: the order is 0, 1, 2, ...

        >>> Dealing(7, 2, 4).to_rank(1, None, 1, 4).tolist()
        [3, 5, 0]
        """
        world = self.world
        if start >= stop:
            return np.empty(0, np.int32)
        if self.exchange is None:
            return self._repeated(head, rank + world * start, rank + world * (stop - 1) + 1, world)
        batch = self.exchange.batch
        first = start // batch * batch  # samples are exchanged among whole steps
        last = min(-(-stop // batch) * batch, self.each)
        return self.to_all(head, first, last)[rank::world][start - first : stop - first]

    def to_all(self, head: Head | None, start: int, stop: int) -> NDArray[np.integer]:
        """Return items [start, stop) of all ranks, in the order in which they are dealt.

        `start` begins a step if the ranks exchange items.

        >>> Dealing(3, 2, 2).to_all(None, 0, 2).tolist()
        [0, 1, 2, 0]
        """
        dealt = self._repeated(head, start * self.world, stop * self.world, 1)
        if self.exchange is None:
            return dealt
        return self.exchange.apply(dealt.astype(np.int32, copy=False))

    def known(self, rank: int, entries: int) -> int:
        """Return how many items of a rank are determined by the first `entries` of the order."""
        entries = max(entries - self.offset, 0)
        if self.exchange is not None:
            return entries // (self.exchange.batch * self.world) * self.exchange.batch
        return max(entries - rank, 0) // self.world

    def _repeated(self, head: Head | None, start: int, stop: int, step: int) -> NDArray[np.integer]:
        """Return the order's entries at start, start + step, ... < stop, counted from `offset`."""
        n, start, stop = self.samples, start + self.offset, stop + self.offset
        if head is None:
            return np.arange(start, stop, step) % max(n, 1)
        there = head(min(stop, n))
        longer = there if stop <= n else np.resize(there, stop)
        return np.ascontiguousarray(longer[start:stop:step])


def each_of(items: int, world: int, *, drop_last: bool) -> int:
    """Return how many of an order's items torch's DistributedSampler deals to each rank.

    >>> each_of(7, 2, drop_last=False), each_of(7, 2, drop_last=True)
    (4, 3)
    """
    return max(items // world if drop_last else -(-items // world), 0)
