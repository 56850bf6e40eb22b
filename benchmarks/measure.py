"""Parts that all benchmarks share: CPU of the process tree, interleaved rounds, medians, a table.

A benchmark compares *ways* of doing the same work in one process, in turn (A B A B ...), and prints
the median of each figure and of the round-by-round ratios, with machine, versions and date.
"""

from __future__ import annotations

import datetime
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from creel.errors import CreelError
from creel.loader.client import connections
from creel.loader.client.client import Client

# Keep bytecode, as an installed creel has it; else each daemon compiles creel (0.2 s of a CPU).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: Writing here, as root, makes the kernel drop its caches.
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

_daemons: dict[str, psutil.Process] = {}


@dataclass
class Round:
    """One measured round of one way."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    batches: int = 0
    first_s: float = 0.0  # wall time until the first batch; 0: not measured

    @property
    def rest_s(self) -> float:
        """Wall seconds per batch after the first."""
        return (self.wall_s - self.first_s) / max(self.batches - 1, 1)


#: The exit code of a program that could not run, as automake's tests have it.
SKIPPED = 77


def skip_unless(possible: bool, needs: str) -> None:
    """End this program if it cannot run, with a code that `make bench` knows and goes on after."""
    if not possible:
        print(f"skipped: needs {needs}")
        sys.exit(SKIPPED)


def skip_without_fuse() -> None:
    """End this program if it cannot mount tests/testbed/slowfs.py."""
    mounts = os.geteuid() == 0 or shutil.which("fusermount3") is not None
    skip_unless(mounts and Path("/dev/fuse").exists(), "/dev/fuse, and root or fusermount3")


def touch_memory(nbytes: int) -> None:
    """Make the machine's host back so many bytes of free memory, for the next user of memory.

    A virtual machine may have given free memory back: getting a page then took 16 us here instead
    of 1.4 (150 KB from the page cache into fresh shared memory: 650 us instead of 97).
    """
    with mmap.mmap(-1, nbytes) as memory:
        for page in range(0, nbytes, mmap.PAGESIZE):
            memory[page] = 1


def drop_caches() -> None:
    """Make all files cold but those that a daemon imports; the trainer's own are warm, too."""
    os.sync()
    DROP_CACHES.write_text("3")
    subprocess.run([sys.executable, "-c", "import creel.daemon.main"], check=True)


@contextmanager
def fresh_name() -> Iterator[str]:
    """Set and yield a new daemon name for loaders in the `with`; its daemon ends with them."""
    before = {k: os.environ.get(k) for k in ("CREEL_SOCKET", "CREEL_DAEMON__LINGER_S")}
    name = f"cold-{os.getpid()}-{time.monotonic_ns()}"
    os.environ |= {"CREEL_SOCKET": name, "CREEL_DAEMON__LINGER_S": "0"}
    try:
        yield name
    finally:
        connections.disconnect(name)
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value


def tree_cpu_s() -> float:
    """CPU seconds of this process, its ended children, and all living descendants."""
    me = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = me.ru_utime + me.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        total += _cpu_s(child)
    daemon = daemon_process()
    return total + (_cpu_s(daemon) if daemon is not None else 0.0)


def _cpu_s(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:4]))  # including its ended children
    except psutil.Error:
        return 0.0


def daemon_process() -> psutil.Process | None:
    """Return the daemon of CREEL_SOCKET, which is no child of this process, or None."""
    name = os.environ.get("CREEL_SOCKET", "default")
    known = _daemons.get(name)  # asking the daemon takes time
    if known is None or not known.is_running():
        try:
            with Client.connect(name, "cli") as client:
                known = _daemons[name] = psutil.Process(client.daemon_pid)
        except (CreelError, psutil.Error):
            return None
    return known


@contextmanager
def measured(into: Round) -> Iterator[None]:
    """Add wall and CPU seconds of the block to `into`."""
    cpu, wall = tree_cpu_s(), time.perf_counter()
    yield
    into.wall_s += time.perf_counter() - wall
    into.cpu_s += tree_cpu_s() - cpu


@dataclass
class Comparison:
    """Rounds of two or more ways; ratios are against the first one, the peer."""

    name: str
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def run(self, ways: Mapping[str, Callable[[Round], None]], rounds: int) -> Comparison:
        """Run every way once unmeasured, then `rounds` times in turn."""
        for way in ways.values():
            way(Round())
        for _ in range(rounds):
            for name, way in ways.items():
                result = Round()
                way(result)
                self.rounds.setdefault(name, []).append(result)
        return self

    def summary(self) -> dict[str, object]:
        """Return medians per way (us per batch) and ratios peer / way, round by round."""
        peer = next(iter(self.rounds))
        out: dict[str, object] = {"name": self.name}
        for way, rounds in self.rounds.items():
            out[f"{way}_wall_us"] = round(median(1e6 * r.wall_s / r.batches for r in rounds), 1)
            out[f"{way}_cpu_us"] = round(median(1e6 * r.cpu_s / r.batches for r in rounds), 1)
            if rounds[0].first_s:
                out[f"{way}_first_ms"] = round(median(1e3 * r.first_s for r in rounds))
                out[f"{way}_rest_us"] = round(median(1e6 * r.rest_s for r in rounds), 1)
            if way != peer:
                pairs = list(zip(self.rounds[peer], rounds, strict=True))
                out[f"{way}_wall_ratio"] = round(
                    median((p.wall_s / p.batches) / (r.wall_s / r.batches) for p, r in pairs), 2
                )
                out[f"{way}_cpu_ratio"] = round(
                    median(
                        (p.cpu_s / p.batches) / max(r.cpu_s / r.batches, 1e-9) for p, r in pairs
                    ),
                    2,
                )
            if way != peer and rounds[0].first_s:
                rests = [p.rest_s / r.rest_s for p, r in pairs]
                out[f"{way}_rest_ratio"] = round(median(rests), 2)
        return out


def epoch_columns(
    samples: int, torchs: list[list[float]], its: list[list[float]]
) -> dict[str, object]:
    """Return a row's samples/s and ratios (torch's time / its own), by epoch, over all rounds."""
    row: dict[str, object] = {}
    rounds = list(zip(torchs, its, strict=True))
    for e in range(len(its[0])):
        row[f"epoch {e + 1}, samples/s"] = round(samples / median([it[e] for it in its]))
        row[f"torch / it, {e + 1}"] = round(median([torch[e] / it[e] for torch, it in rounds]), 2)
    return row


def median(values: Iterator[float] | list[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, str]:
    """Describe the machine that the figures were taken on."""
    import numpy
    import torch
    import zmq

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "linux": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pyzmq": zmq.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
        # Then each process, and so each daemon, of a checkout compiles creel: 0.2 s.
        **({"bytecode": "not kept"} if sys.dont_write_bytecode else {}),
    }


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def report(rows: list[dict[str, object]]) -> None:
    """Print a table for people; with --json as the last argument, one JSON object."""
    if "--json" in sys.argv:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print("  ".join(f"{k}={v}" for k, v in machine().items()))
    if not rows:
        return
    keys = list(dict.fromkeys(k for row in rows for k in row))
    width = {k: max(len(k), *(len(str(r.get(k, ""))) for r in rows)) for k in keys}
    print("  ".join(k.ljust(width[k]) for k in keys))
    for row in rows:
        print("  ".join(str(row.get(k, "")).ljust(width[k]) for k in keys))


__all__ = ["Comparison", "Round", "machine", "measured", "median", "report", "tree_cpu_s"]
