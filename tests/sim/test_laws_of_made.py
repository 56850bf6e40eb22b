"""The laws of samples that are kept decoded beside a core that brings their files.

Here the core is the daemon's own; its reader keeps what it decodes, as long as there is room, as
the loader's stores do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from core_shell import CoreShell
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import DiskOpened, Progressed, Tick
from creel.daemon.core.readers.twin import Twin
from creel.policies.memory import SampleCost, decoded_share

N, BATCH, NBYTES = 800, 8, 100
STEPS = N // BATCH
#: Steps after the current one that are being made.
HELD = 1


class Reader:
    """A rank that reads whole epochs at random, and keeps up to `room` samples decoded.

    Attributes:
        words: (N,) whether each sample is kept, as the daemon sees it.
    """

    def __init__(
        self, shell: CoreShell, room: int, rank: int = 0, world: int = 1, *, says: bool = True
    ) -> None:
        self.shell, self.room, self.rank = shell, room, rank
        self.words = np.zeros(N, np.int64)
        self.step, self._rng = 0, np.random.default_rng(rank)
        self._orders = [self._rng.permutation(N).astype(np.int32) for _ in range(5)]
        self._known = 0
        twin = Twin([(0, self.words)]) if says else None
        shell.open(rank, "d", "j", rank, world, twin=twin)

    def epoch(self, number: int) -> Counter[str]:
        """Read an epoch; return how its samples came: "kept", "memory" or "direct"."""
        while self._known < min(number + 2, len(self._orders)):
            ends = np.arange(1, STEPS + 1, dtype=np.int64) * BATCH
            self.shell.tell(self.rank, self._known, self._orders[self._known], ends)
            self._known += 1
        ways: Counter[str] = Counter()
        for at in range(0, N, BATCH):
            self.shell.feed(Progressed(self.rank, max(self.step - HELD, 0), self.step + 1))
            self.shell.settle()
            if self.shell.ready[self.rank].ready <= self.step:  # no room: a tick gives it up
                self.shell.feed(Tick())
                self.shell.settle()
            assert self.shell.ready[self.rank].ready > self.step, "a step is never ready"
            for x in self._orders[number][at : at + BATCH].tolist():
                ways[self._read(x)] += 1
            self.step += 1
        return ways

    def _read(self, x: int) -> str:
        if self.words[x]:
            return "kept"
        self.words[x] = np.count_nonzero(self.words) < self.room
        return "direct" if self.shell.offset["d"][x] == NOWHERE else "memory"


def shell_of(files: float) -> CoreShell:
    """Return a core with memory for this share of the files, known by their lengths."""
    shell = CoreShell(int(files * N) * NBYTES)
    shell.add("d", np.full(N, NBYTES, np.int64))
    return shell


def counted(shell: CoreShell, name: str) -> int:
    return int(shell.core.snapshot()["datasets"]["d"][name])


def in_memory(shell: CoreShell) -> NDArray[np.bool_]:
    held: NDArray[np.bool_] = shell.offset["d"] != NOWHERE
    return held


@pytest.mark.parametrize(("files", "kept"), [(0.25, 0.25), (0.5, 0.4), (0.3, 0.7), (0.1, 1.0)])
def test_memory_has_one_form_of_a_sample_and_what_is_decoded_is_not_read(
    files: float, kept: float
) -> None:
    """Law 6: reads + kept <= N + direct; and law L1, for the samples that are not kept."""
    shell = shell_of(files)
    reader = Reader(shell, int(kept * N))
    for number in range(4):
        before = counted(shell, "reads")
        ways = reader.epoch(number)
        reads = counted(shell, "reads") - before
        assert reads + ways["kept"] <= N + ways["direct"] + 0.01 * N
        if number:
            assert ways["kept"] == int(kept * N)
            assert reads + ways["direct"] <= max(1 - kept - files, 0) * N + 0.03 * N
    both = np.count_nonzero(in_memory(shell) & (reader.words != 0))
    assert both <= (HELD + 1) * BATCH  # what the last steps have read
    assert counted(shell, "misses") <= (4 - 3 * kept + 0.03) * N
    shell.core.check()


#: Of twelve: bytes of memory and of all decoded samples, where all files have 1; and seconds that a
#: sample takes of a worker, what of these a decoded one saves, and what storage takes for its file.
SET_UPS = [
    (room, whole, *costs)
    for room, whole in ((0.5, 2.0), (0.9, 1.8), (1.5, 3.0), (0.6, 0.5))
    for costs in ((4.0, 3.6, 2.0), (4.0, 3.6, 5.0), (4.0, 3.6, 9.0))
]


@pytest.mark.parametrize(("room", "whole", "work", "again", "storage"), SET_UPS)
def test_a_division_by_the_rule_is_never_slower_than_one_form_alone(
    room: float, whole: float, work: float, again: float, storage: float
) -> None:
    """Storage and workers work at the same time; how often each does is the core's doing."""

    def seconds(share: float) -> float:
        shell = shell_of(max(room - share * whole, 3 * BATCH / N))
        reader, took = Reader(shell, int(share * N)), 0.0
        for number in range(4):
            before = counted(shell, "reads")
            ways = reader.epoch(number)
            reads = counted(shell, "reads") - before + ways["direct"]
            took += max(N * work - ways["kept"] * again, reads * storage)
        return took

    chosen = decoded_share(room, whole, 1, SampleCost(work, again, storage))
    alone = seconds(0), seconds(min(room / whole, 1))
    assert seconds(chosen) <= min(alone) / 0.98


def test_files_stay_for_a_reader_that_keeps_nothing() -> None:
    shell = shell_of(1.1)
    keeps, plain = Reader(shell, N, 0, 2), Reader(shell, 0, 1, 2, says=False)
    for number in range(3):
        keeps.epoch(number)
        ways = plain.epoch(number)
        assert ways["memory"] == N
    assert counted(shell, "reads") == N
    assert counted(shell, "evicted_decoded") == 0


def test_what_the_disk_is_still_to_get_stays_for_it() -> None:
    shell = CoreShell(int(0.3 * N) * NBYTES)
    shell.feed(DiskOpened(N * 4096, 1))
    shell.add("d", np.full(N, NBYTES, np.int64))
    reader = Reader(shell, N // 2)
    for number in range(3):
        reader.epoch(number)
    assert counted(shell, "reads") <= 1.01 * N


@pytest.mark.parametrize("seed", range(5))
def test_no_step_waits_whatever_the_words_say(seed: int) -> None:
    """Law 4: other processes write them at any time, and may lie."""
    rng = np.random.default_rng(seed)
    shell = shell_of(0.3)

    class Lying(Reader):
        def _read(self, x: int) -> str:
            some = rng.integers(0, N, 3)
            self.words[some] = rng.integers(0, 2, 3)
            return super()._read(x)

    reader = Lying(shell, N // 2)
    for number in range(3):
        reader.epoch(number)
        shell.core.check()
