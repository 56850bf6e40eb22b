"""A reader that is quicker than the source, as from the page cache, in a model of time."""

from __future__ import annotations

import numpy as np
import pytest
from core_rig import Rig

from core_shell import CoreShell
from creel.daemon.core.events import Action, FetchObjects, Progressed

N, STEP = 6_400, 64
#: Seconds per object, about those of 20 KB files: read by the trainer itself, and from the arena.
DIRECT_S, HIT_S = 20e-6, 12e-6


class Model(CoreShell):
    """A reader that reads directly what is not ready, and a source of one thread."""

    def __init__(self, source_s: float) -> None:
        super().__init__(2 * N * 100)
        self.source_s = source_s
        self.source_free = 0.0
        self.done_of: dict[FetchObjects, int] = {}  # by fetch: objects already read
        self.add("d", np.broadcast_to(np.int64(100), N))
        self.open(1, "d")

    def do(self, action: Action) -> None:
        if isinstance(action, FetchObjects):
            self.done_of[action] = 0
        else:
            self.keep(action)

    def read_source(self, until: float) -> None:
        """Let the source read in the order of deadlines, some objects at a time."""
        while self.done_of:
            fetch = min(self.done_of, key=lambda f: (f.deadline, f.fetch))
            k = min(STEP, len(fetch.ids) - self.done_of[fetch])
            if self.source_free + k * self.source_s > until:
                break
            self.source_free += k * self.source_s
            self.done_of[fetch] += k
            if self.done_of[fetch] == len(fetch.ids):
                del self.done_of[fetch]
                self.now = self.source_free
                self.fulfil(fetch)
        else:
            self.source_free = until

    def epochs(self, count: int) -> list[float]:
        """Return the share of each epoch that the reader found in the arena."""
        rng, now, shares = np.random.default_rng(0), 0.0, []
        orders = [rng.permutation(N).astype(np.int32) for _ in range(count + 1)]
        for epoch, order in enumerate(orders):
            self.tell(1, epoch, order, np.arange(STEP, N + 1, STEP))
        for epoch, order in enumerate(orders[:count]):
            hits = 0
            for i, ids in enumerate(order.reshape(-1, STEP)):
                step = epoch * N // STEP + i
                self.now = now
                self.feed(Progressed(1, step, step + 1))
                held = self.ready[1].ready > step
                there = int(np.count_nonzero(self.offset["d"][ids] >= 0)) if held else 0
                hits += there
                now += there * HIT_S + (STEP - there) * DIRECT_S
                self.read_source(now)
            shares.append(hits / N)
        self.core.check()
        return shares


@pytest.mark.parametrize("slower", [1.25, 1.75])
def test_a_reader_that_overtakes_the_fetches_finds_part_of_later_steps_ready(slower: float) -> None:
    """At most what the source delivers meanwhile, about 1 / slower. If all objects were fetched in
    turn it would be nothing: the reader would always be a little ahead.
    """
    first, second, third = Model(slower * DIRECT_S).epochs(3)
    assert 1 / slower > first > 0.15 / slower
    assert second > 0.4 / slower
    assert third > 0.8 / slower


def test_objects_on_disk_are_not_left_to_the_reader() -> None:
    """It would read the source; objects read from disk too late for it stay on disk."""
    rig = Rig(3_000)
    rig.register("d", [100] * 60)
    rig.disk["d"] = dict.fromkeys(range(20, 60), 100)
    rig.open_disk(100_000)
    rig.open(1, "d")
    rig.extend(1, 0, [[i, i + 1] for i in range(0, 60, 2)])
    while rig.readers[1].ready < 10:  # slow steps, from the source
        rig.now += 1
        rig.land(min(rig.fetches))
        rig.progress(1, rig.readers[1].ready)
    reads = rig.reads
    for step in range(10, 25):  # quick steps, none of them ready
        rig.progress(1, step + 1, step + 2)
    rig.settle()
    assert rig.reads == reads
    assert rig.core.snapshot()["datasets"]["d"]["disk_misses"] == 0


def test_objects_left_to_the_reader_do_not_count_as_failed() -> None:
    model = Model(1.75 * DIRECT_S)
    model.epochs(2)
    snapshot = model.core.snapshot()
    assert snapshot["sessions"]["1"]["failed"] == snapshot["datasets"]["d"]["failed"] == 0


def test_a_reader_slower_than_the_source_is_left_nothing() -> None:
    """A single late step does not change that: only the very first one is not ready in time."""
    model = Model(0.5 * HIT_S)
    assert model.epochs(1)[0] > 0.95
