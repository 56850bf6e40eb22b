"""A job over several hosts: torch's batches on each, and the source read once.

The hosts are network namespaces (`tests/testbed/cluster.py`), the storage counts what reaches it
(`tests/testbed/slowfs.py`), the process group is gloo's, and nothing is configured but the memory.
"""

from __future__ import annotations

import pytest

from testbed import cluster as hosts
from testbed import jobs

FILES = 1200

pytestmark = pytest.mark.skipif((why := jobs.unavailable()) != "", reason=why)


@pytest.mark.parametrize("each", [1, 2])
def test_what_one_host_holds_no_other_reads_again(each: int) -> None:
    epochs, world = 4, 2 * each
    # Together 1.3 of the data, but less than the data each.
    memory = int(1.3 * FILES * jobs.HELD_NBYTES / 2)
    with jobs.storage(FILES) as storage, hosts.Cluster(hosts=2) as cluster:
        words = [storage.mountpoint, "8", ",".join(["step"] * epochs)]
        with jobs.job(cluster, world, words, memory, each=each) as ranks:
            for rank, one in enumerate(ranks):
                for epoch in range(epochs):
                    said = one.next("epoch")["epoch"]["digest"]
                    assert said == jobs.digest(FILES, rank, world, epoch)
            peers = [one.next("stats")["stats"]["tiers"]["peers"] for one in ranks]
        opens = storage.totals()["opens"]
    assert min(peer["hits"] for peer in peers) > 0
    # Each host alone would read a third of its part of each later epoch, twice as much in all. What
    # is above 1 is read ahead before the hosts have joined: more where they are slow to.
    assert opens <= 1.1 * FILES
