"""Real daemons on emulated hosts: the goals for several nodes, and the results.

    sudo python benchmarks/several_nodes.py [--files N] [--epochs E] [--cases full half remap]

Hosts are network namespaces (tests/testbed/cluster.py); storage counts the requests that reach it
(tests/testbed/slowfs.py). The ranks run in step, as below DistributedDataParallel.
Their reads are counted from the middle of one epoch to the middle of the next, and shown beside
those that `creel simulate` predicts for the same job. The kernel keeps no names and attributes of
files (all hosts here share one kernel), so each open and each stat by path is one look-up that the
storage counts. `lost_daemons.py` shows what a lost daemon costs. Needs root.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import report, skip_without_fuse
from numpy.typing import NDArray

from creel.policies.cluster.simulate import Scenario, replay

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed import cluster as hosts
from testbed import jobs


class Case(NamedTuple):
    """A job in step: hosts, share of the data that their memories hold together, batch, remap."""

    nodes: int
    held: float
    batch: int = 8
    remap: str = ""


CASES = {
    "full2": Case(2, 1.01),
    "full": Case(4, 1.01),
    "half2": Case(2, 0.5),
    "half": Case(4, 0.5),
    "long": Case(4, 0.5, 2),
    "most": Case(4, 0.9),
    "remap": Case(2, 1.01, 256, "global-batch"),
}


def in_step(name: str, files: int, epochs: int, more: dict[str, str]) -> dict[str, object]:
    """Run a case with the variables `more`; return its figures."""
    case = CASES[name]
    memory = int(case.held * files * jobs.HELD_NBYTES / case.nodes)
    marks: list[NDArray[np.int64]] = []  # opens, stats, objects from peers, vain requests
    with jobs.storage(files, attr_timeout=0) as storage, hosts.Cluster(hosts=case.nodes) as cluster:
        words = [storage.mountpoint, str(case.batch), ",".join(["step"] * epochs)]
        words += [case.remap] * bool(case.remap)
        with jobs.job(cluster, case.nodes, words, memory, more=more) as ranks:
            for _ in range(epochs):
                tiers = [rank.next("half")["tiers"].get("peers", {}) for rank in ranks]
                sums = [sum(t.get(name, 0) for t in tiers) for name in ("hits", "misses")]
                marks.append(np.array([*asked(storage), *sums]))
            stats = [rank.next("stats")["stats"] for rank in ranks]
            # Ranks end one after the other; reads for an epoch to come do not count.
            opens, checks = asked(storage)
    later = len(marks) - 3  # without the second epoch, which moves objects to their places
    read, looked, sent, vain = ((marks[-1] - marks[2]) / later / files).tolist()
    talk = [s["peers"]["plans_nbytes"] + s["peers"]["handshakes_nbytes"] for s in stats]
    scenario = Scenario(
        case.nodes,
        files,
        1,
        int(case.held * files / case.nodes),
        case.batch,
        epochs=epochs,
        remap=bool(case.remap),
    )
    simulated = list(replay(scenario))[2:]
    weights = [0.5, *[1.0] * (later - 1), 0.5]  # from mid-epoch to mid-epoch
    return {
        "case": f"{case.nodes} nodes, f={case.held}" + ", remap" * bool(case.remap),
        "N": files,
        "job / N": round(opens / files, 4),
        "later / N": round(read, 4),
        "(1-f)": round(max(1 - case.held, 0.0), 3),
        "job: stats / N": round(checks / files, 4),
        "later stats / N": round(looked, 4),
        "sent / N": round(sent, 4),
        "simulated: later": round(np.average([e.source for e in simulated], weights=weights), 4),
        "sent": round(np.average([e.remote for e in simulated], weights=weights), 4),
        "in vain / sent": round(vain / max(sent, 1e-9), 5),
        "control B/node/epoch": round(sum(talk) / len(talk) / epochs),
        "direct / N": round(sum(s["ranks"][0]["direct_reads"] for s in stats) / files, 4),
    }


def asked(storage: Any) -> tuple[int, int]:
    """Return opens and stats by path of all hosts so far."""
    totals = storage.totals()
    return int(totals["opens"]), int(totals["lookups"]) - int(totals["opens"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=6144)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--cases", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument(
        "--never-direct", action="store_true", help="nobody reads itself what comes late"
    )
    parser.add_argument("--recheck", default="epoch", choices=("epoch", "open", "never"))
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    more = {"CREEL_LOADER__RECHECK": o.recheck}
    more |= {"CREEL_LOADER__DIRECT": "never"} if o.never_direct else {}
    report([in_step(name, o.files, o.epochs, more) for name in o.cases])


if __name__ == "__main__":
    main()
