"""DLIO, the storage benchmark of MLPerf: its own loops and readers, over slow storage.

    pip install --no-deps dlio-benchmark
    pip install hydra-core mpi4py mpich h5py pandas
    sudo python benchmarks/dlio.py [--workloads unet3d ...] [--ranks 1 2]

DLIO's pytorch loader runs unedited except for two names: instead of `DataLoader(dataset, ...)` the
second way calls `creel.DataLoader(creel.wrap(dataset), ...)`. Each workload is one of DLIO's with
smaller and fewer files; its computation takes as long as makes torch wait for storage at least half
of the time. Needs root (a FUSE mount, tests/testbed/slowfs.py, whose counters are exact; without a
page cache unless `--page-cache` is given); memory is enough for all files. The figures are DLIO's
own: samples per second of the first epoch, of the second (in which the daemon reads the files) and
the geometric mean of epochs 3 to 5, as ratios to torch's; accelerator utilisation in the last
epoch; and the files opened at the source in all epochs.

Two bounds stand beside them. DLIO's accelerator sleeps, so an epoch without any wait has
`ranks * batch / compute_s` samples per second ("best possible", as a ratio to torch's). The third
way is torch over files in the page cache: such storage costs nothing, so any remaining waits are
for processors, for decoding and between the ranks.

DLIO 2.0 always imports TensorFlow and its own tracer. If they are not installed, empty modules
replace them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from measure import median, report, skip_unless

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

EPOCHS = 5


class Workload(NamedTuple):
    """`compute_s` is the time of a batch; files have `samples` records of `nbytes` each."""

    format: str
    files: int
    nbytes: int
    batch: int
    compute_s: float
    samples: int = 1


WORKLOADS = {
    "resnet50 jpeg": Workload("jpeg", 400, 112_896, 20, 0.02),
    "resnet50 npy": Workload("npy", 400, 150_528, 20, 0.02),
    "unet3d npz": Workload("npz", 56, 4_000_000, 7, 0.05),
    "cosmoflow hdf5": Workload("hdf5", 120, 2_828_486, 1, 0.0035),
    "bert hdf5": Workload("hdf5", 8, 2_500, 48, 0.1, samples=240),
    "retinanet jpeg": Workload("jpeg", 240, 322_957, 12, 0.02),
}
CACHED = "torch, page cache"
WAYS = ("torch", "creel.wrap", CACHED)


def stand_in(*names: str, **members: Any) -> None:
    """Add empty modules, the last with `members`, in place of ones that are not installed."""
    if importlib.util.find_spec(names[0]) is None:
        sys.modules.update({name: types.ModuleType(name) for name in names})
        sys.modules[names[-1]].__dict__.update(members)


class Untraced:
    """DLIO's tracer without a trace; a decorator, a context manager and an iterator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda it, *_, **__: it) if name in {"log", "log_init", "iter"} else self._nothing

    def _nothing(self, *_: Any, **__: Any) -> Untraced:
        return self

    def __enter__(self) -> Untraced:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def run_dlio(way: str) -> None:
    """Run DLIO's own main, in a process of its own."""
    stand_in("tensorflow")
    tracer = {"dft_fn": Untraced, "dftracer": Untraced(), "DFTRACER_ENABLE": False}
    stand_in("dftracer", "dftracer.logger", **tracer)
    from dlio_benchmark import main
    from dlio_benchmark.data_loader import torch_data_loader

    if way == "creel.wrap":
        import creel

        torch_data_loader.DataLoader = lambda dataset, **k: creel.DataLoader(
            creel.wrap(dataset), **k
        )
    sys.argv[1:3] = []
    main.main()


def settings(load: Workload, folder: Path, workers: int) -> list[str]:
    """Return the settings of DLIO, in the form of its command line."""
    values = {
        "framework": "pytorch",
        "workflow.evaluation": False,
        "workflow.checkpoint": False,
        "dataset.data_folder": folder,
        "dataset.format": load.format,
        "dataset.num_files_train": load.files,
        "dataset.num_files_eval": 0,
        "dataset.num_samples_per_file": load.samples,
        "dataset.record_length": load.nbytes,
        "dataset.record_length_resize": 4096,
        "dataset.generation_buffer_size": load.nbytes * load.samples,
        "reader.data_loader": "pytorch",
        "reader.batch_size": load.batch,
        "reader.read_threads": workers,
        "reader.file_shuffle": "seed",
        "reader.sample_shuffle": "seed",
        "train.epochs": EPOCHS,
        "train.computation_time": load.compute_s,
    }
    return ["workload=default", *(f"++workload.{k}={v}" for k, v in values.items())]


def dlio(way: str, arguments: list[str], out: Path, *, generate: bool, ranks: int = 1) -> None:
    """Run DLIO once."""
    mpi = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
    flags = [f"++workload.workflow.generate_data={generate}", f"hydra.run.dir={out}"]
    flags.append(f"++workload.workflow.train={not generate}")
    again = [sys.executable, str(Path(__file__).resolve()), "--dlio", way]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for mpiexec
    done = subprocess.run(
        [*mpi, *again, *arguments, *flags],
        cwd=out.parent,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"DLIO failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def row(name: str, ranks: int, o: argparse.Namespace) -> dict[str, object]:
    """Return samples per second, utilisation and opens of each way."""
    load = WORKLOADS[name]
    load = load._replace(files=load.files * o.times)
    speed: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    busy, opens = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        data, mount = Path(folder, "data"), Path(folder, "mount")
        data.mkdir()
        dlio("torch", settings(load, data, o.workers), Path(folder, "made"), generate=True)
        for i in range(o.rounds):
            for way in WAYS:
                os.environ["CREEL_SOCKET"] = f"dlio-{os.getpid()}-{time.monotonic_ns()}"
                out = Path(folder, f"{WAYS.index(way)}-{i}")
                slow = {"bandwidth": o.bandwidth, "open_latency": o.open_latency}
                slow["page_cache"] = o.page_cache
                with SlowFS(str(data), str(mount), **slow) as fs:  # type: ignore[no-untyped-call]
                    where = data if way == CACHED else mount
                    dlio(way, settings(load, where, o.workers), out, generate=False, ranks=ranks)
                    opens[way] = fs.totals()["opens"]
                metric = json.loads(Path(out, "summary.json").read_text())["metric"]
                speed[way].append(metric["train_throughput_samples_per_second"])
                busy[way] = metric["train_au_percentage"][-1]
    best = ranks * load.batch / load.compute_s
    speed["best"] = [[best] * EPOCHS] * o.rounds

    def ratio(way: str, epochs: slice = slice(2, None)) -> float:
        each = [
            [b / a for a, b in zip(torchs[epochs], others[epochs], strict=True)]
            for torchs, others in zip(speed["torch"], speed[way], strict=True)
        ]
        return median([geometric_mean(speeds) for speeds in each])

    return {
        "workload": name, "ranks": ranks,
        "torch, samples/s": round(median([s[-1] for s in speed["torch"]])),
        "creel / torch, first epoch": round(ratio("creel.wrap", slice(0, 1)), 2),
        "epoch 2": round(ratio("creel.wrap", slice(1, 2)), 2),
        "epochs 3-5": round(ratio("creel.wrap"), 2),
        "best possible": round(ratio("best"), 2),
        "page cache / torch": round(ratio(CACHED), 2),
        "AU of torch": round(busy["torch"]), "AU of creel": round(busy["creel.wrap"]),
        "files": load.files,
        "opens of torch": opens["torch"], "opens of creel": opens["creel.wrap"],
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--dlio"]:
        run_dlio(sys.argv[2])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bandwidth", default="100M")
    parser.add_argument("--open-latency", type=float, default=5.0, help="ms")
    parser.add_argument("--page-cache", action="store_true", help="of the slow file system")
    parser.add_argument("--times", type=int, default=1, help="as many files: longer epochs")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    missing = [m for m in ("dlio_benchmark", "hydra", "mpi4py") if not importlib.util.find_spec(m)]
    skip_unless(not missing, f"{', '.join(missing)} (the first lines of this file say how)")
    os.environ["CREEL_DAEMON__LINGER_S"] = "1"
    for ranks in o.ranks:
        rows = [row(name, ranks, o) for name in o.workloads]
        ratios = [name for name, value in rows[0].items() if isinstance(value, float)]
        means = {r: round(geometric_mean([float(str(row[r])) for row in rows]), 2) for r in ratios}
        report([*rows, {**dict.fromkeys(rows[0], ""), "workload": "geometric mean", **means}])


if __name__ == "__main__":
    main()
