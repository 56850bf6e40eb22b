"""WorkerTurns: whose turn it is to make a batch, as in torch's iterator with workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


class WorkerTurns:
    """The turns of the workers of one iterator.

    Attributes:
        in_order: whether batches are asked of the workers strictly in turn.
        alive: whether each makes batches still.
        asked: how many batches each was asked for that have not been taken.
        cycle: their numbers, over and over.
    """

    alive: list[bool]
    asked: list[int]
    cycle: Iterator[int]

    def __init__(self, workers: int, ahead: int, *, in_order: bool) -> None:
        """`ahead`: how many batches are asked for ahead of use; 0: there are no workers."""
        self.in_order = in_order
        self._count, self._ahead = max(workers, 1), max(ahead, 1)
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.alive, self.asked = [True] * self._count, [0] * self._count
        self.cycle = itertools.cycle(range(self._count))

    def free(self, worker: int) -> int:
        """Return the next worker, from this one on; out of order, one below its share.

        -1: there is none.
        """
        for _ in self.alive:
            if self.alive[worker] and (
                self.in_order or self.asked[worker] < self._ahead // sum(self.alive)
            ):
                return worker
            worker = next(self.cycle)
        return -1
