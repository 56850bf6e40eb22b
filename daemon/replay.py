"""The core as a node of `policies.simulate`; the laws are tested on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from creel.cache.space import Lengths, Space
from creel.daemon import events
from creel.daemon.core import Core
from creel.policies.prefetch import Window
from creel.policies.simulate import Started


class CoreNode:
    """One node with a real core; implements `simulate.Node`.

    Args:
        lengths: (n,) bytes of each object of the dataset, all known.
        capacity: bytes of memory.
        ranks: those of `world` that live here.
        jobs: the job of each, where they are not one.
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
        self.core = Core(Space(capacity), config=window)
        self._ready = dict.fromkeys(ranks, 0)
        self._failed = dict.fromkeys(ranks, 0)
        self._steps = dict.fromkeys(ranks, 0)
        self._fetches: dict[int, events.Sizes] = {}
        self._offset = np.full(len(lengths), -1, np.int64)
        length = lengths.astype(np.int64)
        self._feed(events.Registered("data", self._offset, length, Lengths.of(length)), 0.0)
        for rank, job in zip(ranks, jobs or ["job"] * len(ranks), strict=True):
            self._feed(events.Opened(rank, "data", job, rank, world), 0.0)

    def extend(
        self, rank: int, epoch: int, objects: events.Ids, ends: NDArray[np.int64], now: float
    ) -> list[Started]:
        """A rank will read these next."""
        step = self._steps[rank]
        self._steps[rank] += len(ends)
        return self._feed(events.Extended(rank, epoch, step, objects, ends), now)

    def progress(self, rank: int, done: int, wanted: int, now: float) -> list[Started]:
        """A rank has done so many steps and waits for step wanted-1 (or does not)."""
        return self._feed(events.Progressed(rank, done, wanted), now)

    def landed(self, fetch: int, now: float) -> list[Started]:
        """A fetch is through."""
        return self._feed(events.Fetched(fetch, self._fetches.pop(fetch)), now)

    def ready(self, rank: int) -> int:
        """Steps that a rank may read."""
        return self._ready[rank]

    def failed(self) -> int:
        """Objects given up so far."""
        return sum(self._failed.values())

    def _feed(self, event: events.Event, now: float) -> list[Started]:
        return [s for a in self.core.handle(event, now) for s in self._did(a)]

    def _did(self, action: events.Action) -> list[Started]:
        if isinstance(action, events.SetReady):
            self._ready[action.session] = action.ready
            self._failed[action.session] = action.failed
        elif isinstance(action, events.Fetch):
            self._fetches[action.fetch] = action.length
            return [Started(action.fetch, len(action.ids), int(action.length.sum()))]
        elif isinstance(action, events.Move):
            self._offset[action.ids] = action.dst
        return []
