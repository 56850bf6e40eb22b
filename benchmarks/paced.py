"""Law L2: a source that just keeps up suffices if the misses are spread evenly over the epoch.

    sudo python benchmarks/paced.py [--fractions .25 .5] [--headroom 1.05] [--step .05]

A training step sleeps for `step` seconds. Memory holds the share f of the files. The source, a
rate-limited FUSE file system (needs root), delivers `headroom` times the bytes missed per second on
average, which are (1-f) of each batch. The figures are the time of each epoch after the first
divided by that of the same loop with all files in memory, round by round, and the part of it that
the loop waited.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import median, report, skip_without_fuse
from source_reads import daemon_with

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS


def epochs(loader: creel.DataLoader[torch.Tensor], step_s: float, n: int) -> Iterator[float]:
    """Yield the seconds of each of `n` epochs of training."""
    for _ in range(n):
        began = time.perf_counter()
        for _ in loader:
            time.sleep(step_s)
        yield time.perf_counter() - began


def loader_of(mount: str, o: argparse.Namespace) -> creel.DataLoader[torch.Tensor]:
    torch.manual_seed(0)
    data = creel.FileDataset(
        [f"{mount}/{i:06}.bin" for i in range(o.files)], nbytes=[o.nbytes] * o.files
    )
    return creel.DataLoader(data, batch_size=o.batch, shuffle=True, num_workers=2)


def row(folder: Path, f: float, o: argparse.Namespace) -> dict[str, object]:
    """Run the loop of the law, and the loop that never waits, one after the other."""
    data, mount = str(folder / "data"), str(folder / "mount")
    total = o.files * o.nbytes
    with SlowFS(data, mount) as fs, daemon_with(2 * total):  # type: ignore[no-untyped-call]
        free = median(list(epochs(loader_of(fs.mountpoint, o), o.step, 3))[1:])
    rate = o.headroom * (1 - f) * o.batch * o.nbytes / o.step
    reads = []
    with SlowFS(data, mount, bandwidth=rate) as fs, daemon_with(int(f * total)):  # type: ignore[no-untyped-call]
        taken = []
        for seconds in epochs(loader_of(fs.mountpoint, o), o.step, 1 + o.epochs):
            taken.append(seconds)
            reads.append(fs.totals()["opens"])
    return {
        "f": f,
        "MB/s": round(rate / 1e6, 1),
        "never_waits_s": round(free, 3),
        "epochs_s": [round(s, 2) for s in taken],
        "over_never_waits": [round(s / free, 3) for s in taken[1:]],
        "median": round(median([s / free for s in taken[1:]]), 3),
        "reads_over_law": round((reads[-1] - reads[0]) / (o.epochs * (1 - f) * o.files), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fractions", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--headroom", type=float, default=1.05)
    parser.add_argument("--files", type=int, default=6400)
    parser.add_argument("--nbytes", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--step", type=float, default=0.05, help="seconds")
    parser.add_argument("--epochs", type=int, default=3, help="measured, after the first")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        for i in range(o.files):
            (folder / "data" / f"{i:06}.bin").write_bytes(i.to_bytes(4, "little") * (o.nbytes // 4))
        report([row(folder, f, o) for f in o.fractions])


if __name__ == "__main__":
    main()
