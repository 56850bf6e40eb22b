"""What starting costs: the command line, the daemon, and the first batch of every epoch.

python benchmarks/startup.py [--rounds N] [--json]

The gap between epochs is the wait for the first batch of epochs 2.., in steps, of a training that
two workers can just feed (32 ms per batch, steps of 20 ms), with and without `persistent_workers`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import median, report
from torch.utils.data import DataLoader, Dataset

import creel
from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.loader.client.client import Client
from creel.loader.client.embed import connect_or_start

SAMPLE_S = 0.002
STEP_S = 0.02


class Decoding(Dataset[torch.Tensor]):
    """Samples that wait for 2 ms each, as for a decoder in another thread."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((16,), index)


def help_s() -> float:
    began = time.perf_counter()
    creel_script = Path(sys.executable).with_name("creel")
    subprocess.run([creel_script, "--help"], check=True, capture_output=True)
    return time.perf_counter() - began


def daemon_s() -> tuple[float, float, float, float, float]:
    """Return (seconds until an embedded daemon serves, its MB resident, its private MB).

    Then, for the first dataset, which imports pyarrow: seconds to register it, MB resident with it.
    """
    os.environ["CREEL_SOCKET"] = f"startup-{os.getpid()}-{time.monotonic_ns()}"
    began = time.perf_counter()
    client = connect_or_start(Config.load()[0])
    seconds = time.perf_counter() - began
    assert isinstance(client, Client)
    process = psutil.Process(int(client.ask("status")["pid"]))
    memory = process.memory_full_info()
    began = time.perf_counter()
    client.register(Manifest.of_files(["x"], root="/", lengths=[1]))
    register_s = time.perf_counter() - began
    with_data = process.memory_info().rss
    client.ask("stop")
    client.close()
    return seconds, memory.rss / 1e6, memory.uss / 1e6, register_s, with_data / 1e6


def gap(loader: DataLoader[Any], epochs: int = 5) -> float:
    """Return the median wait for the first batch of epochs 2.., in training steps of STEP_S."""
    waits: list[float] = []
    for epoch in range(epochs):
        began = time.perf_counter()
        for i, _ in enumerate(loader):
            if epoch and not i:
                waits.append(time.perf_counter() - began)
            time.sleep(STEP_S)
    return median(waits) / STEP_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    starts = [daemon_s() for _ in range(o.rounds)]
    rows: list[dict[str, object]] = [
        {"what": "creel --help, s", "value": round(median([help_s() for _ in range(o.rounds)]), 3)},
        {"what": "embedded daemon ready, s", "value": round(median([s[0] for s in starts]), 3)},
        {"what": "daemon resident, MB", "value": round(median([s[1] for s in starts]), 1)},
        {"what": "of these its own, MB", "value": round(median([s[2] for s in starts]), 1)},
        {"what": "first dataset known, s", "value": round(median([s[3] for s in starts]), 3)},
        {"what": "resident with it, MB", "value": round(median([s[4] for s in starts]), 1)},
    ]
    kwargs: dict[str, Any] = {"batch_size": 16, "shuffle": True, "num_workers": 2}
    ways: dict[str, DataLoader[Any]] = {
        f"{name}{', persistent' if lasting else ''}": cls(
            Decoding(), persistent_workers=lasting, **kwargs
        )
        for name, cls in (("torch", DataLoader), ("creel", creel.DataLoader))
        for lasting in (False, True)
    }
    for name, loader in ways.items():
        rows.append({"what": f"epoch gap in steps: {name}", "value": round(gap(loader), 2)})
    report(rows)


if __name__ == "__main__":
    main()
