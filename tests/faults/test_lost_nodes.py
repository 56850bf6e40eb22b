"""A node of a job is lost or cut off in the middle of an epoch.

There are four emulated hosts, whose memories together hold the data 1.6 times. The ranks run at
their own pace, as DDP would stop with a lost rank (test_lost_daemons.py has ranks in step).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kit import Cores
from testbed import cluster as hosts
from testbed import jobs
from testbed.jobs import Rank

FILES, WORLD, BATCH = 1200, 4, 8
#: Files that one node holds.
SHARE = FILES // WORLD
#: Seconds per step. Nodes join in the first epoch; in the third epoch one of them is lost.
PACES = "0.1,0.05,0.25,0.1,0.1"
FAULT, LAST = 2, 4
CUT_S = 3.0
#: A fetch that is not ended takes 45 s (fetch.deadline_s); pauses of a busy machine are shorter.
LONG_S = 20.0

pytestmark = [
    pytest.mark.skipif((why := jobs.unavailable()) != "", reason=why),
    pytest.mark.timeout(400),
]


@dataclass
class Job:
    """A job whose ranks are in the middle of epoch FAULT."""

    cluster: Any
    storage: Any
    ranks: list[Rank]
    before: int  # files opened at the source so far
    cores: Cores

    def opens(self) -> int:
        """Return the files opened at the source since the fault."""
        return int(self.storage.totals()["opens"]) - self.before


@contextmanager
def running() -> Iterator[Job]:
    cores = Cores()
    memory = int(1.6 * FILES * jobs.HELD_NBYTES / WORLD)
    with jobs.storage(FILES) as storage, hosts.Cluster(hosts=WORLD) as cluster:
        words = [storage.mountpoint, str(BATCH), PACES]
        with jobs.job(cluster, WORLD, words, memory) as ranks:
            for rank in range(WORLD):
                for epoch in range(FAULT):
                    check(ranks[rank], rank, epoch, cores)
            half = [rank.next("half") for rank in ranks]
            assert {said["half"] for said in half} == {FAULT}
            yield Job(cluster, storage, ranks, int(storage.totals()["opens"]), cores)


def check(trainer: Rank, rank: int, epoch: int, cores: Cores) -> None:
    """Check that the batches are torch's and that no rank waited long for one."""
    said = trainer.next("epoch")["epoch"]
    assert said["digest"] == jobs.digest(FILES, rank, WORLD, epoch)
    assert said["slowest"] < LONG_S or not cores.spare()


def finish(job: Job, ranks: list[int]) -> tuple[int, int]:
    """Wait until these ranks end; return files opened since the fault, and in the last epoch."""
    for epoch in range(FAULT, LAST):
        for rank in ranks:
            check(job.ranks[rank], rank, epoch, job.cores)
    until_last = job.opens()
    for rank in ranks:
        check(job.ranks[rank], rank, LAST, job.cores)
    return job.opens(), job.opens() - until_last


def test_objects_that_a_killed_node_should_hold_are_read_from_the_source() -> None:
    """In each epoch, by whoever needs it: nobody plans anew."""
    with running() as job:
        job.cluster.kill("n3")
        opens, last = finish(job, [0, 1, 2])
        # Three that know nothing of each other read 1.8 in each epoch.
        assert 0 < last <= 1.3 * SHARE
        assert opens <= 1.3 * SHARE * (LAST - FAULT + 1 / 2)
        job.cores.skip_unless_spare()
        assert last <= 1.05 * SHARE * 3 / 4
        assert opens <= 1.05 * SHARE * 3 / 4 * (LAST - FAULT + 1 / 2)


def test_a_node_that_is_cut_off_comes_back_by_itself() -> None:
    with running() as job:
        job.cluster.cut("n3")
        time.sleep(CUT_S)
        job.cluster.heal("n3")
        opens, last = finish(job, [0, 1, 2, 3])
        # While n3 is cut off, it reads the samples that the others hold for it, 3/4 of its own, and
        # they read those that it holds, 1/4 of theirs. It is back when this epoch ends, at latest.
        left = SHARE / 2
        # Four that know nothing of each other read 2.4 in each epoch.
        assert 0 < opens <= 2 * SHARE
        assert last <= 0.5 * SHARE
        job.cores.skip_unless_spare()
        assert opens <= 1.05 * left * (3 / 4 + 3 * 1 / 4)
        assert last <= 0.02 * SHARE
