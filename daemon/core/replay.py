"""The core as a node of `policies.simulate`, on which the laws are tested. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.allocator import Allocator, Lengths
from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.policies.prefetch import Window
from creel.policies.retention import plan
from creel.policies.simulate import Started


class CoreNode:
    """One node with a real core; implements `simulate.Node`.

    Args:
        lengths: (n,) bytes of each object of the dataset, all known.
        capacity: bytes of memory.
        ranks: those of `world` on this node.
        jobs: the job of each rank; empty: all are of one job.
    """

    def __init__(
        self,
        lengths: events.Sizes,
        capacity: int,
        ranks: range,
        world: int,
        window: Window | None = None,
        jobs: Sequence[str] = (),
    ) -> None:
        self.core = Core(Allocator(capacity), config=window)
        self._ready = dict.fromkeys(ranks, 0)
        self._failed = dict.fromkeys(ranks, 0)
        self._steps = dict.fromkeys(ranks, 0)
        self._fetches: dict[int, events.Sizes] = {}
        self._plans: list[events.PlanRetention] = []
        self._offset = np.full(len(lengths), -1, np.int64)
        length = lengths.astype(np.int64)
        self._feed(events.DatasetAdded("data", self._offset, length, Lengths.of(length)), 0.0)
        for rank, job in zip(ranks, jobs or ["job"] * len(ranks), strict=True):
            self._feed(events.SessionOpened(rank, "data", job, rank, world), 0.0)

    def extend(
        self, rank: int, epoch: int, objects: events.Ids, ends: NDArray[np.int64], now: float
    ) -> list[Started]:
        """Append steps to a rank's plan."""
        step = self._steps[rank]
        self._steps[rank] += len(ends)
        return self._feed(events.PlanExtended(rank, epoch, step, objects, ends), now)

    def progress(self, rank: int, done: int, wanted: int, now: float) -> list[Started]:
        """A rank has done `done` steps and waits for step wanted-1 (or for none)."""
        return self._feed(events.Progressed(rank, done, wanted), now)

    def landed(self, fetch: int, now: float) -> list[Started]:
        """A fetch ended."""
        return self._feed(events.Fetched(fetch, self._fetches.pop(fetch)), now)

    def ready(self, rank: int) -> int:
        """Number of steps that a rank may read."""
        return self._ready[rank]

    def failed(self) -> int:
        """Number of objects given up so far."""
        return sum(self._failed.values())

    def _feed(self, event: events.Event, now: float) -> list[Started]:
        started = [s for a in self.core.handle(event, now) for s in self._did(a)]
        while self._plans:
            asked = self._plans.pop()
            kept = plan(asked.turn)
            started += self._feed(events.RetentionPlanned(asked.dataset, asked.turn, kept), now)
        return started

    def _did(self, action: events.Action) -> list[Started]:
        if isinstance(action, events.SetReady):
            self._ready[action.session] = action.ready
            self._failed[action.session] = action.failed
        elif isinstance(action, events.FetchObjects):
            self._fetches[action.fetch] = action.length
            return [Started(action.fetch, len(action.ids), int(action.length.sum()))]
        elif isinstance(action, events.Publish):
            self._offset[action.ids] = action.offset
        elif isinstance(action, events.PlanRetention):
            self._plans.append(action)
        return []
