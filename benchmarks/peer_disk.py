"""Objects from one daemon's disk to another host: GB/s and the reader's CPU.

    sudo python benchmarks/peer_disk.py [FOLDER ...] [--nbytes N] [--threads 1 2 4] [--json]

`peers.py` measures the same from memory. A loader in a network namespace of its own fills the disk
tier in FOLDER of its daemon, and goes on to hold a step of the next epoch. From the other end of a
veth pair `PeerSource` reads all objects in a shuffled order. The daemon's memory holds a part of
them (`--memory`). On a disk that permits direct reads, the others are read from there, past the
page cache; a FOLDER on tmpfs is the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import Round, measured, median, report
from peers import veth

import creel
from creel.cache.memory.arena import Arena
from creel.config import Config
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.wire import Credentials
from creel.loader.client.connections import client_of
from creel.messages import Join, Member

KEY = bytes(range(32))
OBJECTS_NBYTES = 768 << 20
PART_NBYTES = 4 << 20  # bytes read at once, as in `peers.py`


# --- the process that serves ------------------------------------------------------------------


def hold(host: str, folder: str, nbytes: int, memory: int) -> None:
    """Fill the disk tier and serve; print how to ask, and disk counters for each line read."""
    count = OBJECTS_NBYTES // nbytes
    data = creel.FileDataset(files(folder, count, nbytes), nbytes=[nbytes] * count)
    os.environ |= {
        "CREEL_SOCKET": f"bench-{os.getpid()}",
        "CREEL_DISK__PATH": folder,
        "CREEL_DISK__BUDGET": str(2 * OBJECTS_NBYTES),
        "CREEL_DISK__KEEP_FREE": "0",
        "CREEL_MEMORY__BUDGET": str(memory),
        "CREEL_LOADER__DIRECT": "never",
    }
    loader = creel.DataLoader(data, 8, shuffle=True, collate_fn=len)
    while on_disk(loader) < count:
        pass
    reading = iter(loader)
    next(reading)
    client = client_of(Config.load()[0])
    assert client is not None
    me = client.host(host)
    client.join(Join("cluster", KEY, [me, Member("reader", host, 9, 1 << 20)], [0, 1]))
    (name,) = client.ask("stats")["core"]["datasets"]
    print(json.dumps([me.node, me.port, name]), flush=True)
    for _ in sys.stdin:
        tiers = client.ask("stats")["tiers"]
        print(json.dumps(tiers["disk"]), flush=True)
    del reading


def on_disk(loader: Any) -> int:
    """Read an epoch; return how many objects are on disk then."""
    for _ in loader:
        time.sleep(0.002)  # so that the disk keeps up
    client = client_of(Config.load()[0])
    assert client is not None
    (dataset,) = client.ask("stats")["core"]["datasets"].values()
    return int(dataset["disk_objects"])


def files(folder: str, count: int, nbytes: int) -> list[str]:
    place = Path(folder, "data")
    place.mkdir()
    paths = [place / f"{i:06}.bin" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(i).bytes(nbytes))
    return list(map(str, paths))


@contextmanager
def holding(
    prefix: list[str], host: str, folder: str, nbytes: int, memory: int
) -> Iterator[subprocess.Popen[str]]:
    words = ["--hold", host, "--nbytes", str(nbytes), "--memory", str(memory)]
    command = [*prefix, sys.executable, __file__, folder, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.terminate()


def asked_hits(holder: subprocess.Popen[str]) -> int:
    """Return how many objects the holder has read from disk so far."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    return int(json.loads(holder.stdout.readline())["hits"])


# --- the process that reads -------------------------------------------------------------------


def read(source: PeerSource, arena: Arena, nbytes: int, threads: int, into: Round) -> None:
    """Read all objects once, part by part."""
    count, size = OBJECTS_NBYTES // nbytes, max(PART_NBYTES // nbytes, 1)
    order = np.random.default_rng(1).permutation(count).astype(np.int32)

    def some(first: int) -> None:
        for at in range(first * size, count, threads * size):
            ids = order[at : at + size]
            length = np.full(len(ids), nbytes)
            views = arena.parts(ids.astype(np.int64) * nbytes, length)
            missing = int((source.read_parts(ids, length, views).nbytes != nbytes).sum())
            if missing:
                print(f"{missing} objects were refused", file=sys.stderr)

    workers = [threading.Thread(target=some, args=(t,)) for t in range(threads)]
    with measured(into):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    into.batches += count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", default=["/dev/shm", "/var/tmp"])  # noqa: S108
    parser.add_argument("--nbytes", type=int, default=150_528)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--memory", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if o.hold:
        hold(o.hold, o.folder[0], o.nbytes, o.memory)
        return
    if os.geteuid():
        print("needs root: network namespaces")
        return
    report([row for folder in o.folder for row in measure(folder, o)])


def measure(place: str, o: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each number of threads."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        host, prefix = stack.enter_context(veth("none"))
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place))
        holder = stack.enter_context(holding(prefix, host, folder, o.nbytes, o.memory))
        assert holder.stdout is not None
        node, port, name = json.loads(holder.stdout.readline())
        source = PeerSource(
            (host, port), node, name, Credentials("reader", "cluster", KEY, encrypt=False)
        )
        arena = stack.enter_context(closing(Arena.create(OBJECTS_NBYTES)))
        stack.callback(source.close)
        before = asked_hits(holder)
        for threads in o.threads:
            rates, cpu = [], []
            for i in range(o.rounds + 1):
                into = Round()
                read(source, arena, o.nbytes, threads, into)
                if i:
                    moved = into.batches * o.nbytes
                    rates.append(moved / into.wall_s / 1e9)
                    cpu.append(into.cpu_s / moved * 1e12)
            hits = asked_hits(holder)
            rows.append(
                {
                    "name": f"{place}, {threads} threads",
                    "GBps": round(median(rates), 3),
                    "reader_cpu_us_per_MB": round(median(cpu)),
                    "from_disk": round((hits - before) / (o.rounds + 1) / into.batches, 2),
                }
            )
            before = hits
    return rows


if __name__ == "__main__":
    main()
