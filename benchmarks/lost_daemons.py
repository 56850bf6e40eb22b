"""A daemon of a job in step is lost or out of reach for a while: what is read again.

    sudo python benchmarks/lost_daemons.py [--epoch-s 3 6] [--faults kill stop cut] [--rounds 1]

Three emulated hosts, whose memories together hold 1.2 of the data, train in step, as below
DistributedDataParallel. In the middle of epoch 2 the daemon of n2 is killed (its loader starts
another one), or stopped for 5 s, or its host is cut off for 5 s. `extra / N` counts the files
opened at the source from then on, per epoch and in all; without a fault there are none. A third of
the data was lost with a killed daemon: `/ lost` is the sum in such thirds. `slowest step_s` is the
longest that any rank waited for a batch. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from measure import report, skip_without_fuse

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed import cluster as hosts
from testbed import jobs

WORLD, BATCH, HELD = 3, 8, 1.2
EPOCHS, FAULT = 6, 2
AWAY_S = 5.0
FAULTS = ("none", "kill", "stop", "cut")


def run(fault: str, epoch_s: float, files: int, more: dict[str, str]) -> dict[str, object]:
    """Run a job with this fault; return its figures."""
    memory = int(HELD * files * jobs.HELD_NBYTES / WORLD)
    steps = files // WORLD // BATCH
    more = more | {"STEP_S": str(epoch_s / steps)}
    marks, slowest = [], 0.0
    with jobs.storage(files) as storage, hosts.Cluster(hosts=WORLD) as cluster:
        words = [storage.mountpoint, str(BATCH), ",".join(["step"] * EPOCHS)]
        with jobs.job(cluster, WORLD, words, memory, more=more) as ranks:
            for epoch in range(FAULT):
                _epoch(ranks, epoch, files)
            for rank in ranks:
                rank.next("half")
            marks.append(int(storage.totals()["opens"]))
            strike(cluster, fault)
            for epoch in range(FAULT, EPOCHS):
                slowest = max(slowest, _epoch(ranks, epoch, files))
                marks.append(int(storage.totals()["opens"]))
    each = [round((b - a) / files, 3) for a, b in itertools.pairwise(marks)]
    total = (marks[-1] - marks[0]) / files
    return {
        "fault": fault,
        "epoch_s": epoch_s,
        "extra / N by epoch": " ".join(map(str, each)),
        "extra / N": round(total, 3),
        "/ lost": round(total * WORLD, 2),
        "slowest step_s": round(slowest, 2),
    }


def _epoch(ranks: list[Any], epoch: int, files: int) -> float:
    """Check an epoch of all ranks; return the longest wait for a batch."""
    said = [rank.next("epoch")["epoch"] for rank in ranks]
    for rank, answer in enumerate(said):
        assert answer["digest"] == jobs.digest(files, rank, WORLD, epoch), (rank, epoch)
    return max(float(answer["slowest"]) for answer in said)


def strike(cluster: Any, fault: str) -> None:
    """Kill or stop the daemon on n2, or cut n2 off."""
    if fault == "cut":
        cluster.cut("n2")
        time.sleep(AWAY_S)
        cluster.heal("n2")
    for pid in cluster.pids("n2") if fault in {"kill", "stop"} else ():
        if "creel.daemon" in " ".join(psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "stop":
                time.sleep(AWAY_S)
                os.kill(pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1200)
    parser.add_argument("--epoch-s", type=float, nargs="*", default=[3.0, 6.0])
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS[1:]))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--direct", default="auto", choices=("auto", "never"))
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    more = {"CREEL_LOADER__DIRECT": o.direct}
    report(
        [
            run(fault, epoch_s, o.files, more)
            for _ in range(o.rounds)
            for fault in o.faults
            for epoch_s in o.epoch_s
        ]
    )


if __name__ == "__main__":
    main()
