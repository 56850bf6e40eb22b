"""A training job on emulated hosts: its data, its start, and its output."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import queue
import random
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.utils.data import DistributedSampler

from programs import Program
from testbed import cluster as hosts
from testbed.slowfs import SlowFS
from testbed.train_on_nodes import NBYTES

SCRIPT = Path(__file__).with_name("train_on_nodes.py")
#: The program with other samplers.
READS = Path(__file__).with_name("read_on_nodes.py")
#: A job that rehearses.
REHEARSES = Path(__file__).with_name("rehearse_on_nodes.py")
#: Where a rank and its daemon find these modules, and creel if it is not installed.
_PATH = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
#: Memory that a file of NBYTES takes.
HELD_NBYTES = 4096


def unavailable() -> str:
    """Return why no such job can run here, or ""."""
    return hosts.unavailable() or ("" if Path("/dev/fuse").exists() else "needs FUSE")


@contextmanager
def folder(files: int) -> Iterator[Path]:
    """Make a folder with so many files that all hosts see: each has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir=hosts.SCRATCH_DIR) as parent:
        data = Path(parent, "data")
        data.mkdir()
        for i in range(files):
            (data / f"{i:04}.bin").write_bytes(random.Random(i).randbytes(NBYTES))
        yield data


@contextmanager
def storage(files: int, attr_timeout: float = 1.0) -> Iterator[Any]:
    """Mount a file system with so many files that counts its requests.

    attr_timeout: seconds for which the kernel may keep names and attributes.
    """
    with folder(files) as data:
        mountpoint = data.with_name("mount")
        mountpoint.mkdir()
        options: dict[str, float] = {"seed": 1, "attr_timeout": attr_timeout}
        with SlowFS(str(data), str(mountpoint), **options) as mount:  # type: ignore[no-untyped-call]
            yield mount


def digest(files: int, rank: int, world: int, epoch: int) -> str:
    """Return the digest of the samples that torch's sampler deals to this rank in an epoch."""
    read = hashlib.sha256()
    for i in _dealt(files, rank, world, epoch):
        read.update(random.Random(i).randbytes(NBYTES))
    return read.hexdigest()


def _dealt(files: int, rank: int, world: int, epoch: int) -> list[int]:
    """Return the samples that torch's sampler deals to a rank, in order."""
    sampler: DistributedSampler[object] = DistributedSampler(
        range(files),  # type: ignore[arg-type]  # it has a length, all that is needed
        world,
        rank,
        seed=7,
    )
    sampler.set_epoch(epoch)
    return list(map(operator.index, sampler))  # type: ignore[arg-type]  # torch types them as object


def global_batches(files: int, batch: int, world: int, epoch: int) -> list[list[str]]:
    """Return the first bytes, sorted, of all samples of each step, as torch deals them."""
    steps: dict[int, list[str]] = {}
    for rank in range(world):
        for i, sample in enumerate(_dealt(files, rank, world, epoch)):
            head = random.Random(sample).randbytes(NBYTES)[:8].hex()
            steps.setdefault(i // batch, []).append(head)
    return [sorted(heads) for heads in steps.values()]


class Rank:
    """A rank on host n{first + rank // each}; each line of its output is a JSON object."""

    def __init__(
        self,
        cluster: Any,
        rank: int,
        world: int,
        words: list[str],
        settings: dict[str, str],
        each: int = 1,
        script: Path = SCRIPT,
        first: int = 0,
    ) -> None:
        """Start it.

        settings: variables besides torchrun's; empty ones are not set. each: ranks per host; first:
        the host of rank 0.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith("CREEL_")} | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": cluster.ip(f"n{first}"),
            "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": os.pathsep.join(_PATH),
            **settings,
        }
        env = {name: value for name, value in env.items() if value}
        self.host = f"n{first + rank // each}"
        init = cluster.state["hosts"][self.host]["pid"]
        self.process = Program(script.read_text(), *words, env=env, inside=init)
        self.errors = ""
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=call) for call in (self._listen, self._read)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _read(self) -> None:
        self.errors = self.process.stderr.read()

    def next(self, key: str) -> dict[str, Any]:
        """Return the value of the next line with this key; fail if the rank ends first."""
        while (said := self._said.get(timeout=300)) is not None:
            if key in said:
                return said
        self._threads[1].join()
        raise AssertionError(f"{self.host} ended without {key!r}: {self.errors}")

    def close(self) -> None:
        """Let the rank end, and wait for it."""
        self.process.stdin.close()
        self.process.wait(300)
        for thread in self._threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()


@contextmanager
def job(
    cluster: Any,
    world: int,
    words: list[str],
    memory: int,
    each: int = 1,
    more: Mapping[str, str] = MappingProxyType({}),
    script: Path = SCRIPT,
    first: int = 0,
) -> Iterator[list[Rank]]:
    """Run `each` ranks on each host from n{first} on, with `memory` bytes per daemon.

    more: further variables.
    """
    settings = {"CREEL_MEMORY__BUDGET": str(memory), **more}
    ranks = [
        Rank(cluster, rank, world, words, settings, each, script, first) for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
