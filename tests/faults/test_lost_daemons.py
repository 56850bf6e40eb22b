"""A daemon of a job in step is killed or stopped in the middle of an epoch.

One that is cut off is in test_lost_nodes.py, whose ranks run at their own pace.

There are three emulated hosts, whose memories together hold the data 1.2 times; the ranks run in
step, as below DistributedDataParallel. benchmarks/lost_daemons.py shows the figures.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from kit import Cores
from testbed import cluster as hosts
from testbed import jobs
from testbed.jobs import Rank

FILES, WORLD, BATCH, EPOCHS, FAULT = 1200, 3, 8, 5, 2
EPOCH_S, AWAY_S = 5.0, 4.0
#: What one node should hold.
SHARE = FILES / WORLD
#: No rank waits longer for a batch, unless it waits for a core. It is 2 s on an idle machine.
LONG_S = 5.0

pytestmark = [
    pytest.mark.skipif((why := jobs.unavailable()) != "", reason=why),
    pytest.mark.timeout(400),
]


def finished(ranks: list[Rank], epoch: int, cores: Cores) -> None:
    """Check that the batches of an epoch are torch's and that no rank waited long for one."""
    for rank, program in enumerate(ranks):
        said = program.next("epoch")["epoch"]
        assert said["digest"] == jobs.digest(FILES, rank, WORLD, epoch)
        assert said["slowest"] < LONG_S or not cores.spare()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_objects_that_a_lost_daemon_held_are_read_once_more_at_most(fault: str) -> None:
    cores = Cores()
    memory = int(1.2 * FILES * jobs.HELD_NBYTES / WORLD)
    more = {"STEP_S": str(EPOCH_S * BATCH * WORLD / FILES)}
    with jobs.storage(FILES) as storage, hosts.Cluster(hosts=WORLD) as cluster:
        words = [storage.mountpoint, str(BATCH), ",".join(["step"] * EPOCHS)]
        with jobs.job(cluster, WORLD, words, memory, more=more) as ranks:
            for epoch in range(FAULT):
                finished(ranks, epoch, cores)
            for program in ranks:
                while program.next("half")["half"] < FAULT:
                    pass
            before = int(storage.totals()["opens"])
            strike(cluster, fault)
            for epoch in range(FAULT, EPOCHS - 1):
                finished(ranks, epoch, cores)
            until_last = int(storage.totals()["opens"])
            finished(ranks, EPOCHS - 1, cores)
            peers = [program.next("stats")["stats"]["tiers"].get("peers", {}) for program in ranks]
            opens = int(storage.totals()["opens"])
    # A daemon in the place of one that was killed has counted since its start: its peers serve it.
    assert min(tier["hits"] for tier in peers) > 0
    # Daemons that know nothing of each other read 1.8 in each epoch.
    assert opens - before <= 2.5 * SHARE
    assert opens - until_last <= 0.5 * SHARE
    cores.skip_unless_spare()
    # A daemon that is stopped loses nothing, but its rank reads directly for a while, and the
    # others read what it holds.
    most = {"kill": 1.05 * SHARE, "stop": 1.2 * SHARE}[fault]
    assert opens - before <= most
    assert opens - until_last <= 0.05 * SHARE


def strike(cluster: Any, fault: str) -> None:
    """Kill or stop the daemon on n2."""
    (daemon,) = (
        pid
        for pid in cluster.pids("n2")
        if "creel.daemon" in " ".join(psutil.Process(pid).cmdline())
    )
    os.kill(daemon, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "stop":
        time.sleep(AWAY_S)
        os.kill(daemon, signal.SIGCONT)
