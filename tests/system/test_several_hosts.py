"""A job over several hosts: torch's batches on each, and the source read once.

The hosts are network namespaces (`tests/testbed/cluster.py`), the storage counts what reaches it
(`tests/testbed/slowfs.py`), the process group is gloo's, and nothing is configured but the memory.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from testbed import cluster as hosts
from testbed.slowfs import SlowFS

SCRIPT = Path(__file__).with_name("train_on_nodes.py")
FILES, NBYTES, BATCH = 1200, 4000, 8

pytestmark = pytest.mark.skipif(
    (why := hosts.unavailable() or ("" if Path("/dev/fuse").exists() else "needs FUSE")) != "",
    reason=why,
)


@pytest.fixture
def storage() -> Iterator[Any]:
    # Each host has a /tmp of its own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        data, mountpoint = Path(folder, "data"), Path(folder, "mount")
        data.mkdir()
        mountpoint.mkdir()
        for i in range(FILES):
            (data / f"{i:04}.bin").write_bytes(random.Random(i).randbytes(NBYTES))
        with SlowFS(str(data), str(mountpoint), seed=1) as mount:  # type: ignore[no-untyped-call]
            yield mount


def digest(rank: int, world: int, epoch: int) -> str:
    """Of what torch's sampler has this rank read in an epoch."""
    sampler: DistributedSampler[object] = DistributedSampler(
        range(FILES),  # type: ignore[arg-type]  # it has a length, all that is needed
        *(world, rank),
        seed=7,
    )
    sampler.set_epoch(epoch)
    read = hashlib.sha256()
    for i in map(operator.index, sampler):  # type: ignore[arg-type]  # of these, torch says object
        read.update(random.Random(i).randbytes(NBYTES))
    return read.hexdigest()


def train(cluster: Any, world: int, folder: str, epochs: int, memory: int) -> list[dict[str, Any]]:
    """Run a rank on each host; what each of them said."""
    ranks = []
    for rank in range(world):
        env = {k: v for k, v in os.environ.items() if not k.startswith("CREEL_")} | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": cluster.ip("n0"),
            "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "CREEL_MEMORY__BUDGET": str(memory),
        }
        words = [sys.executable, str(SCRIPT), folder, str(epochs), str(BATCH)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(cluster.popen(f"n{rank}", words, env=env, **pipes))
    said = []
    for process in ranks:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        said.append(json.loads(out))
    return said


@pytest.mark.parametrize("world", [2])
def test_what_one_host_holds_no_other_reads_again(storage: Any, world: int) -> None:
    epochs = 4
    with hosts.Cluster(hosts=world) as cluster:
        # Together 1.3 of the data, but less than the data each.
        memory = int(1.3 * FILES * 4096 / world)
        said = train(cluster, world, storage.mountpoint, epochs, memory)
    for rank, one in enumerate(said):
        assert one["digests"] == [digest(rank, world, epoch) for epoch in range(epochs)]
    peers = [one["stats"]["tiers"]["peers"] for one in said]
    assert min(peer["hits"] for peer in peers) > 0
    # Each host alone would read a third of its part of each later epoch, twice as much in all. What
    # is above 1 is read before the hosts have joined, and while plans are made in short epochs.
    assert storage.totals()["opens"] <= 1.5 * FILES
