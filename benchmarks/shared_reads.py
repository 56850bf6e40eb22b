"""How often two hosts read storage if neither knows the order of the other's sampler.

    sudo python benchmarks/shared_reads.py [--case NAME ...] [--held F ...] [--alone]

Hosts are network namespaces, storage is a FUSE mount that counts (tests/testbed). The reads of each
epoch are shares of all files. `--held` is the size of both memories together, in datasets; with
`--alone` each host reads for itself. The cases are the samplers of tests/testbed/read_on_nodes.py,
and "jobs": two jobs at once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed import cluster, jobs

FILES, EPOCHS, BATCH = 1200, 4, 8


class Case(NamedTuple):
    """Hosts, ranks on each, and the sampler of each job."""

    hosts: int
    each: int
    kinds: tuple[str, ...]


CASES = {
    **{
        kind: Case(2, 1, (kind,))
        for kind in ("dealt", "random", "weighted", "batches", "subset", "pairs", "alike")
    },
    "one-node": Case(1, 2, ("alike",)),
    "tensor": Case(2, 2, ("tensor",)),
    "jobs": Case(2, 1, ("dealt", "dealt-other")),
}


def reads(case: Case, held: float, *, alone: bool) -> list[float]:
    """Return the opens of each epoch, in datasets; counting starts after each job's first epoch."""
    memory = int(held * FILES * jobs.HELD_NBYTES / case.hosts)
    counted = [0]
    with (
        jobs.storage(FILES) as storage,
        cluster.Cluster(hosts=case.hosts) as hosts,
        ExitStack() as stack,
    ):
        ranks = []
        for number, kind in enumerate(case.kinds):
            more = {"MASTER_PORT": str(29555 + number), "TORCHELASTIC_RUN_ID": f"job{number}"}
            more |= {"CREEL_LOADER__CLUSTER": "false"} if alone else {}
            words = [storage.mountpoint, str(BATCH), str(EPOCHS), kind]
            job = jobs.job(
                hosts,
                case.hosts * case.each,
                words,
                memory,
                each=case.each,
                more=more,
                script=jobs.READS,
            )
            ranks += stack.enter_context(job)
        for _ in range(EPOCHS):
            for rank in ranks:
                rank.next("read")
            counted.append(storage.totals()["opens"])
            for rank in ranks:
                said = rank.next("epoch")["epoch"]
                if said["digest"] != said["expected"]:
                    raise SystemExit(f"{case}: other samples than torch's")
    return [(after - before) / FILES for before, after in itertools.pairwise(counted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--held", nargs="+", type=float, default=[1.3, 0.6])
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    if why := jobs.unavailable():
        print(f"not here: {why}")
        return
    for name, held in itertools.product(options.case, options.held):
        shares = reads(CASES[name], held, alone=options.alone)
        print(f"{name:9} {held:4}  " + "  ".join(f"{x:.2f}" for x in shares), flush=True)


if __name__ == "__main__":
    main()
