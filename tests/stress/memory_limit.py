"""Train in a memory cgroup, and grow until little of its limit is left: who is killed?

    sudo python -m stress.memory_limit [--limit 950M] [--growth 600M] [--pause .05]

The trainer grows by 30 MB a step in its second epoch. torch's loader finishes, as the kernel
reclaims the page cache. The arena cannot be reclaimed: creel finishes because the daemon gives it
back (`memory.reserve`), and is killed without a reserve. Needs root and a memory controller.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import unique_name
from testbed.cgroups import Cgroups, limits_of
from testbed.cluster import SCRATCH_DIR
from testbed.host import parse_size

_TRAINER = """
import hashlib, sys, time
import torch, creel

folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(3)
loader = creel.DataLoader(creel.FileDataset(folder, nbytes=True), 8, shuffle=True, num_workers=2)
grown, seen = [], hashlib.sha256()
for epoch in range(3):
    for batch in loader:
        seen.update(batch.numpy().tobytes())
        if epoch == 1 and len(grown) < steps:
            grown.append(bytearray(b"x" * 30_000_000))
        time.sleep(pause)
print(seen.hexdigest()[:16])
"""
_WAYS = {
    "torch": {"CREEL_DISABLE": "1"},
    "creel, no reserve": {"CREEL_MEMORY__RESERVE": "0", "CREEL_LOADER__DIRECT": "never"},
    "creel": {"CREEL_LOADER__DIRECT": "never"},
}


def train(limit: str, arguments: list[str], settings: dict[str, str], folder: Path) -> str:
    """Run the trainer in a cgroup of its own; return a digest of its batches, or its end."""
    cgroups = Cgroups(unique_name())
    joins = cgroups.create("trainer", limits_of(limit, None, None, folder))
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in joins)
    command = ["sh", "-c", f'{join} exec "$@"', "sh", sys.executable, "-c", _TRAINER]
    env = os.environ | {"CREEL_SOCKET": unique_name(), "CREEL_DAEMON__LINGER_S": "0"} | settings
    done = subprocess.run(
        [*command, str(folder), *arguments], env=env, capture_output=True, text=True, check=False
    )
    cgroups.remove(joins)
    return f"killed by signal {-done.returncode}" if done.returncode else done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", default="950M")
    parser.add_argument("--growth", default="600M")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    o = parser.parse_args()
    steps = str(int(parse_size(o.growth) // 30_000_000))
    with tempfile.TemporaryDirectory(dir=SCRATCH_DIR) as folder:
        for i in range(2000):
            Path(folder, f"{i:04}").write_bytes(os.urandom(100_000))
        for way, settings in _WAYS.items():
            print(f"{way}: {train(o.limit, [steps, str(o.pause)], settings, Path(folder))}")


if __name__ == "__main__":
    main()
