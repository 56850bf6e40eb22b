"""Run torch's own test/test_dataloader.py twice, with torch's class and with creel's; compare.

The suite is not part of torch's wheel. Take it from a source release of torch (here: Debian's
source package `pytorch`), then:

    python tests/compat/run_torch_suite.py path/to/test_dataloader.py [-k EXPRESSION]

Prints the tests that pass with torch's class and fail with creel's; exits 1 if KNOWN does not
explain all of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

#: Tests of torch's private internals, and why creel's class cannot pass them.
KNOWN: dict[str, str] = {
    "TestOutOfOrderDataLoader::test_out_of_order_index_ds": (
        "torch 2.6 deals batches out in turn even with in_order=False; creel, like later releases,"
        " gives them to workers that have none"
    ),
}


def outcomes(suite: Path, plugin: list[str], extra: list[str]) -> dict[str, str]:
    """Return test name -> PASSED, FAILED, ERROR or SKIPPED of one run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        suite.name,
        "-q",
        "-rA",
        "--tb=no",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "addopts=", "--timeout=120", *plugin, *extra]
    env = os.environ | {"PYTHONPATH": f"{HERE}:{suite.parent}"}
    run = subprocess.run(
        command, cwd=suite.parent, env=env, capture_output=True, text=True, check=False
    )
    lines = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", run.stdout, re.MULTILINE)
    if not lines:
        sys.exit(f"the suite did not run:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    return {name: outcome for outcome, name in lines}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("-k", default="", help="pytest's expression to choose tests")
    options = parser.parse_args()
    suite = options.suite.resolve()
    extra = ["-k", options.k] if options.k else []
    ours, theirs = outcomes(suite, ["-p", "creel_as_torch"], extra), outcomes(suite, [], extra)
    worse = sorted(t for t, o in theirs.items() if o == "PASSED" and ours.get(t) != "PASSED")
    good = sum(o == "PASSED" for o in ours.values())
    print(
        f"torch: {sum(o == 'PASSED' for o in theirs.values())} of {len(theirs)} pass; creel: {good}"
    )
    for test in worse:
        print(f"{test}: {KNOWN.get(test, 'UNEXPLAINED')}")
    return int(any(t not in KNOWN for t in worse))


if __name__ == "__main__":
    sys.exit(main())
