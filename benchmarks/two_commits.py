"""Whether this tree is as fast as an earlier commit: the same warm epochs by both, in turn.

    python benchmarks/two_commits.py COMMIT [WORKLOAD ...] [--rounds N] [--persistent] [--json]

Each tree has a process of its own, with a loader of two workers and an embedded daemon that holds
all data. In each round both run whole epochs for `--seconds`, one after the other; the order
alternates. Half of the rounds are of processes that started in the other order: those that start
first were up to 7 % slower. The ratio is the commit's time over this tree's, median of the rounds;
below 1 this tree is slower. `--persistent`: with `persistent_workers=True`. `--here` sets an
environment variable for this tree only, such as a setting that the commit does not know
(CREEL_LOADER__DIRECT=never).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import median, report
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent

#: A program that runs epochs for each line of standard input and prints microseconds per batch.
_RUNNER = """
import sys, time
from pathlib import Path
import creel
from workloads import WORKLOADS

folder, name, seconds, persistent = sys.argv[1:]
work = WORKLOADS[name](Path(folder))
loader = creel.DataLoader(work.ours, **work.arguments(persistent_workers=persistent == "1"))
print(creel.__file__, flush=True)
for _ in sys.stdin:
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < float(seconds):
        batches += sum(1 for _ in loader)
    print(1e6 * (time.perf_counter() - began) / batches, flush=True)
"""


class Runner:
    """A process that runs epochs with the creel of one tree."""

    def __init__(self, tree: Path, settings: dict[str, str], arguments: list[str]) -> None:
        paths = os.pathsep.join((str(tree / "src"), str(HERE)))
        own = {"PYTHONPATH": paths, "CREEL_SOCKET": f"two-{os.getpid()}-{time.monotonic_ns()}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUNNER, *arguments],
            env=os.environ | own | settings,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = self._answer().strip()
        if not imported.startswith(str(tree)):
            raise RuntimeError(f"{imported} was imported, not what is below {tree}")

    def us_per_batch(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def end(self) -> None:
        self._process.communicate()  # closes its standard input

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a runner ended with exit status {self._process.wait()}")
        return line


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", HERE.parent, "archive", commit], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder).resolve()


def compare(
    trees: dict[str, tuple[Path, dict[str, str]]], rounds: int, arguments: list[str]
) -> dict[str, object]:
    """Return a row: microseconds per batch of both trees, and the ratio."""
    times: dict[str, list[float]] = {which: [] for which in trees}
    for started in (list(trees), list(trees)[::-1]):
        runners = {which: Runner(*trees[which], arguments) for which in started}
        for number in range(-(-rounds // 2) + 1):
            for which in sorted(runners, reverse=number % 2 == 0):
                took = runners[which].us_per_batch()
                if number:  # the first fills the arena
                    times[which].append(took)
        for runner in runners.values():
            runner.end()
    ratios = [then / now for then, now in zip(times["then"], times["now"], strict=True)]
    return {
        "workload": arguments[1],
        "then, us": round(median(times["then"])),
        "now, us": round(median(times["now"])),
        "then / now": round(median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("workloads", nargs="*", help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time of a round")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--here", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in o.here)
    rows: list[dict[str, object]] = []
    with tree_of(o.commit) as then, tempfile.TemporaryDirectory() as data:
        trees = {"then": (then, {}), "now": (HERE.parent, settings)}
        for name in o.workloads or WORKLOADS:
            arguments = [data, name, str(o.seconds), str(int(o.persistent))]
            rows.append(compare(trees, o.rounds, arguments))
            report(rows[-1:]) if not o.json else None
    if o.json:
        report(rows)


if __name__ == "__main__":
    main()
