"""Epoch time from slow storage with memory for part of the data: creel against torch's page cache.

    sudo python benchmarks/throttled.py [--fraction .5] [--bandwidth 100M] [--rounds 3]

Needs root and cgroup v1's memory controller. Both read the same files through a rate-limited FUSE
file system. torch's processes are in a memory cgroup whose limit is their use without page cache
plus `fraction` of the data, which the kernel's page cache may take. creel's daemon has a budget of
that same fraction and sees the file system without page cache. Epochs 2.. are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import median, report, skip_unless, skip_without_fuse

TESTS = Path(__file__).parent.parent / "tests"
sys.path.append(str(TESTS))
CGROUPS = Path("/sys/fs/cgroup/memory")


def child(way: str, mount: str, epochs: int, batch: int, nbytes: int) -> None:
    """Run in a process of its own: print the seconds of each epoch as it ends."""
    import torch
    from torch.utils.data import DataLoader
    from workloads import Files, tensor_of

    import creel

    paths = sorted(str(p) for p in Path(mount).iterdir() if p.suffix == ".bin")
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {
        "batch_size": batch,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
    }
    if way == "torch":
        loader = DataLoader(Files(paths, tensor_of), **kwargs)
    else:
        data = creel.FileDataset(paths, nbytes=[nbytes] * len(paths))
        loader = creel.DataLoader(data, **kwargs)
    for _ in range(epochs):
        began = time.perf_counter()
        for _ in loader:
            pass
        print(json.dumps(time.perf_counter() - began), flush=True)
        sys.stdin.readline()  # the parent sets the limit after epoch 1


def anonymous(group: Path) -> int:
    """Return the bytes of a cgroup that are not page cache."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(stat["total_rss"])


def run(way: str, mount: str, o: argparse.Namespace, total: int) -> list[float]:
    """Return the seconds of each measured epoch."""
    group = CGROUPS / f"creel-bench-{os.getpid()}-{way}"
    group.mkdir()
    env = os.environ | {
        "CREEL_MEMORY__BUDGET": str(int(o.fraction * total)),
        "CREEL_SOCKET": f"throttled-{os.getpid()}-{time.monotonic_ns()}",
        "PYTHONPATH": f"{Path(__file__).parent}:{TESTS}",
    }
    command = [sys.executable, __file__, "--child", way, "--mount", mount]
    command += ["--epochs", str(o.epochs), "--batch", str(o.batch), "--nbytes", str(o.nbytes)]
    try:
        process = subprocess.Popen(
            ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = []
        for epoch in range(o.epochs):
            seconds.append(float(process.stdout.readline()))
            if way == "torch" and epoch == 0:
                limit = anonymous(group) + int(o.fraction * total)
                (group / "memory.limit_in_bytes").write_text(str(limit))
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait(60)
        return seconds[1:]
    finally:
        for _ in range(300):  # the daemon lingers
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--bandwidth", default="100M")
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--nbytes", type=int, default=150_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--mount", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        child(o.child, o.mount, o.epochs, o.batch, o.nbytes)
        return
    skip_without_fuse()
    skip_unless(
        os.geteuid() == 0 and CGROUPS.is_dir(), "root and the memory controller of cgroup v1"
    )
    from testbed.slowfs import SlowFS

    total = o.files * o.nbytes
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        rng = np.random.default_rng(0)
        for i in range(o.files):
            (folder / "data" / f"{i:06}.bin").write_bytes(rng.bytes(o.nbytes))
        for _ in range(o.rounds):
            row: dict[str, object] = {}
            for way in ("torch", "creel"):
                options = {"bandwidth": o.bandwidth, "page_cache": way == "torch"}
                with SlowFS(str(folder / "data"), str(folder / "mount"), **options) as fs:  # type: ignore[no-untyped-call]
                    seconds = run(way, fs.mountpoint, o, total)
                    row[f"{way}_s"] = round(median(seconds), 2)
                    row[f"{way}_read_MB"] = round(fs.totals()["bytes"] / 1e6)
            row["ratio"] = round(float(str(row["torch_s"])) / float(str(row["creel_s"])), 2)
            rows.append(row)
    ratios = [float(str(r["ratio"])) for r in rows]
    rows.append({"ratio": round(median(ratios), 2), "torch_s": "median"})
    report(rows)


if __name__ == "__main__":
    main()
