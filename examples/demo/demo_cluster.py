"""The same distributed training twice, with torch's DataLoader and with creel's, on emulated hosts.

    make demo-cluster                or    python examples/demo/demo_cluster.py --help

The hosts are network namespaces of this machine with links of their own. The storage is a slow file
system that counts the files opened. Each host runs a rank of `train_ddp.py`, which knows nothing of
the emulation. The memory of one host is too small for the data; that of all hosts together is not.
Needs root.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import CACHE, ROOT, console, images
from rich import box
from rich.table import Table

from creel.units import format_size, parse_size

# `demo` has put the folder of the tests, which also use these modules, on the path.
from testbed.cluster import Cluster, unavailable
from testbed.slowfs import SlowFS

SCRIPT = ROOT / "examples" / "train_ddp.py"
_EPOCH = re.compile(r"epoch \d+: ([\d.]+) s, loss ([\d.]+)")


@dataclass
class Result:
    """The result of one training: seconds and files opened per epoch, and each rank's reads."""

    name: str
    seconds: list[float] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    loss: str = ""
    read: list[str] = field(default_factory=list)


def train(name: str, cluster: Any, storage: Any, memory: int, args: argparse.Namespace) -> Result:
    """Run a rank on each host, and count the files that they open."""
    result = Result(name)
    storage.reset()
    ranks = [
        start(name, rank, cluster, storage.mountpoint, memory, args) for rank in range(args.hosts)
    ]
    for line in ranks[0].stdout or []:
        match = _EPOCH.match(line)
        if match:
            result.seconds.append(float(match[1]))
            result.opened.append(storage.totals()["opens"] - sum(result.opened))
            result.loss = match[2]
            console.print(f"{name:<5}  {line.strip()}", highlight=False)
        else:
            result.read.append(line.split()[-1])
    for rank in ranks:
        out, errors = rank.communicate(timeout=60)
        if rank.returncode:
            raise SystemExit(f"demo-cluster: a rank failed:\n{errors}")
        result.read += [line.split()[-1] for line in out.splitlines()]
    return result


def start(
    name: str, rank: int, cluster: Any, folder: str, memory: int, args: argparse.Namespace
) -> subprocess.Popen[str]:
    """Start one rank, as torchrun would on its host."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CREEL_")} | {
        "RANK": str(rank),
        "WORLD_SIZE": str(args.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.ip("n0"),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "CREEL_MEMORY__BUDGET": str(memory),
    }
    words = [sys.executable, str(SCRIPT), folder, "--loader", name]
    words += ["--epochs", str(args.epochs), "--workers", str(args.workers)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = cluster.popen(f"n{rank}", words, env=env, **pipes)
    return process


def report(theirs: Result, ours: Result) -> bool:
    """Print the final table; return whether both trainings were the same."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", theirs.name, ours.name, ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for i, (a, b) in enumerate(zip(theirs.seconds, ours.seconds, strict=True)):
        table.add_row(f"epoch {i + 1}", f"{a:.1f} s", f"{b:.1f} s", f"{a / b:.1f} x as fast")
    for i, (n, m) in enumerate(zip(theirs.opened, ours.opened, strict=True)):
        table.add_row(f"files opened at the storage, epoch {i + 1}", f"{n:,}", f"{m:,}")
    table.add_row("loss, last batch", theirs.loss, ours.loss)
    same = theirs.read == ours.read
    table.add_row("every batch of every rank the same", "", "yes" if same else "NO")
    console.print(table)
    return same


@contextmanager
def slow(folder: Path, bandwidth: int) -> Iterator[Any]:
    """Yield a view of the folder, visible to all hosts, that is as slow as a busy file system."""
    # Each host has a /tmp of its own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as mountpoint:
        speed = {"bandwidth": bandwidth, "open_latency": 3, "read_latency": 1}
        with SlowFS(str(folder), mountpoint, **speed) as mount:  # type: ignore[no-untyped-call]
            yield mount


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--data", help="your own folder, one subfolder per class")
    parser.add_argument("--files", type=int, default=1200, help="images to make (1200)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bandwidth", default="10MB", help="of the storage, per second (10MB)")
    parser.add_argument("--link", default="1gbit", help="of each host, each way (1gbit)")
    parser.add_argument("--share", type=float, default=1.2, help="all memory, in datasets (1.2)")
    return parser.parse_args()


def main() -> int:
    """Build, emulate, train twice, compare."""
    args = arguments()
    why = unavailable() or ("" if Path("/dev/fuse").exists() else "needs FUSE")
    if why:
        raise SystemExit(f"demo-cluster: {why}")
    CACHE.mkdir(exist_ok=True)
    folder = images(args)
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    memory = int(args.share * nbytes / args.hosts)
    bandwidth = parse_size(args.bandwidth)
    console.print(
        f"{args.hosts} hosts with {format_size(memory)} of memory for the cache each, links of"
        f" {args.link}; {format_size(nbytes)} of images on storage with {format_size(bandwidth)}/s",
        highlight=False,
    )
    hosts = Cluster(hosts=args.hosts, bandwidth=args.link)
    with slow(folder, bandwidth) as storage, hosts as cluster:
        theirs = train("torch", cluster, storage, memory, args)
        ours = train("creel", cluster, storage, memory, args)
    return 0 if report(theirs, ours) else 1


if __name__ == "__main__":
    raise SystemExit(main())
