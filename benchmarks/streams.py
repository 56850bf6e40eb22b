"""Records from a running program to training: creel's streams, a queue, torch's loader, adios2 SST.

    python benchmarks/streams.py [--nbytes N] [--samples N] [--rounds N] [--folder PATH] [--way ...]

A producer in a process of its own hands over records as fast as readers take them; a reader makes
batches of 32 of them. Rates are those of one reader, without the first tenth of the records. CPU
time is that of all processes for a record, their start included, reads are the daemon's. Ways:

- queue: `multiprocessing.Queue`, the batches stacked by numpy, as hand-written couplings do
- sst: adios2's SST engine over its default transport, where adios2 is installed
- torch: torch's DataLoader with two workers over a `creel.Stream`
- creel: creel's with `num_workers=2`; creel-0: with 0; creel-2: two models at once, the slower one

Then the time from `put` to the batch, with records of one at a time, 100 a second.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import measure
import numpy as np
import psutil
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import creel
from creel.errors import NoDaemonError
from creel.loader.client.client import Client

BATCH = 32
#: Bytes that a producer may be ahead at least, under each way, and batches: with less than two, the
#: producer of a stream and its reader take turns.
AHEAD, AHEAD_BATCHES = 64 << 20, 4
CONTEXT = multiprocessing.get_context("fork")
Times = list[float]


def record(nbytes: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).random(nbytes // 4, np.float32)


def ahead(nbytes: int) -> int:
    """Return the bytes that a producer of records of `nbytes` may be ahead."""
    return max(AHEAD, AHEAD_BATCHES * BATCH * nbytes)


@contextmanager
def process(act: Callable[..., object], *args: object) -> Iterator[BaseProcess]:
    """Run a function in a process of its own, which must end with the block."""
    child = CONTEXT.Process(target=act, args=args)
    child.start()
    try:
        yield child
        child.join(60)
    finally:
        if child.is_alive():
            child.kill()
        child.join()


def apart(act: Callable[..., Any], *args: object) -> Any:
    """Return a function's result, from a process of its own: this one never has threads."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    with process(lambda: writer.send(act(*args))):
        writer.close()
        return reader.recv()


# --- the ways: each returns when the batches of each reader arrived -------------------------------


def by_stream(folder: Path, nbytes: int, samples: int, read: Any, models: int = 1) -> list[Times]:
    names = [f"model{i}" for i in range(models)]
    path = folder / "stream"
    with process(produce, path, nbytes, samples, names):
        pipes = []
        for name in names:
            reader, writer = CONTEXT.Pipe(duplex=False)
            child = CONTEXT.Process(target=_send, args=(writer, read, path, name))
            child.start()
            pipes.append((reader, child))
            writer.close()
        times: list[Times] = [reader.recv() for reader, _ in pipes]
        for _, child in pipes:
            child.join()
    shutil.rmtree(path)
    return times


def _send(writer: Any, read: Any, *args: object) -> None:
    writer.send(read(*args))


def produce(path: Path, nbytes: int, samples: int, names: list[str]) -> None:
    field = record(nbytes)
    limits: dict[str, Any] = {"ahead": ahead(nbytes), "keep": 0, "readers": names}
    with creel.Producer(path, {"x": ("float32", field.shape), "i": "int64"}, **limits) as producer:
        for i in range(samples):
            producer.put(x=field, i=i)


def arrivals(loader: DataLoader[Any]) -> Times:
    times, last = [], -1
    for batch in loader:
        times.append(time.monotonic())
        if int(batch["i"][0]) != last + 1:
            raise SystemExit("a record was lost")
        last = int(batch["i"][-1])
    return times


def read_by_creel(path: Path, name: str, workers: int = 2) -> Times:
    return arrivals(creel.DataLoader(creel.Stream(path, name), BATCH, num_workers=workers))


def read_inline(path: Path, name: str) -> Times:
    return read_by_creel(path, name, 0)


def read_by_torch(path: Path, name: str) -> Times:
    stream = creel.Stream(path, name)
    return arrivals(DataLoader(stream, batch_sampler=stream.batches(BATCH), num_workers=2))


def by_queue(_: Path, nbytes: int, samples: int) -> list[Times]:
    queue: Any = CONTEXT.Queue(maxsize=ahead(nbytes) // nbytes)

    def feed() -> None:
        field = record(nbytes)
        for i in range(samples):
            queue.put({"x": field, "i": i})

    def read() -> Times:
        times = []
        for _ in range(samples // BATCH):
            rows = [queue.get() for _ in range(BATCH)]
            {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            times.append(time.monotonic())
        return times

    with process(feed):
        return [apart(read)]


def by_sst(folder: Path, nbytes: int, samples: int) -> list[Times]:
    path = str(folder / "sst")
    adios2: Any = importlib.import_module("adios2")

    def engine() -> Any:
        io = adios2.Adios().declare_io("stream")
        io.set_engine("SST")
        limit = str(ahead(nbytes) // nbytes)
        io.set_parameters({"QueueLimit": limit, "QueueFullPolicy": "Block"})
        return io

    def feed() -> None:
        field = record(nbytes)
        with adios2.Stream(engine(), path, "w") as out:
            for _ in out.steps(samples):
                out.write("x", field, [len(field)], [0], [len(field)])

    def read() -> Times:
        times, rows = [], []
        with adios2.Stream(engine(), path, "r") as given:
            for _ in given.steps():
                rows.append(given.read("x"))
                if len(rows) == BATCH:
                    np.stack(rows)
                    rows = []
                    times.append(time.monotonic())
        return times

    with process(feed):
        return [apart(read)]


WAYS: dict[str, Callable[[Path, int, int], list[Times]]] = {
    "queue": by_queue,
    "sst": by_sst,
    "torch": partial(by_stream, read=read_by_torch),
    "creel": partial(by_stream, read=read_by_creel),
    "creel-0": partial(by_stream, read=read_inline),
    "creel-2": partial(by_stream, read=read_by_creel, models=2),
}


def rate(times: list[Times]) -> float:
    """Return the samples a second of the slowest reader, without the first tenth."""
    rates = []
    for stamps in times:
        first = len(stamps) // 10
        rates.append((len(stamps) - first - 1) * BATCH / (stamps[-1] - stamps[first]))
    return min(rates)


def asked() -> tuple[int, float]:
    """Return the bytes that the daemon has read from storage, and its CPU seconds; 0 without it."""
    try:
        with Client.connect(os.environ["CREEL_SOCKET"], "cli") as client:
            sources = client.ask("stats")["sources"]
            times = psutil.Process(client.daemon_pid).cpu_times()
    except NoDaemonError:
        return 0, 0.0
    return int(sum(source["nbytes"] for source in sources)), times.user + times.system


def ended_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the time from `put` to the batch -------------------------------------------------------------


def latencies(folder: Path, nbytes: int, samples: int, workers: int) -> Times:
    """Return the seconds from `put` to the batch of each record."""
    path = folder / "stream"

    def paced() -> None:
        field = record(nbytes)
        fields: dict[str, Any] = {"x": ("float32", field.shape), "t": "float64"}
        with creel.Producer(path, fields, chunk=1) as producer:
            for _ in range(samples):
                producer.put(x=field, t=time.monotonic())
                time.sleep(0.01)

    def read() -> Times:
        loader = creel.DataLoader(creel.Stream(path, "model"), 1, num_workers=workers)
        late = [time.monotonic() - float(batch["t"][0]) for batch in loader]
        return late[samples // 5 :]  # not those that waited for the first batch

    with process(paced):
        late: Times = apart(read)
    shutil.rmtree(path)
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=150 << 10)
    parser.add_argument("--samples", type=int, default=19_200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm", help="of the streams")  # noqa: S108  in a folder of its own
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ways = [w for w in options.way if w != "sst" or importlib.util.find_spec("adios2")]
    by_way: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}
    reads: dict[str, list[float]] = {way: [] for way in ways}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for _ in range(options.rounds):
            for way in ways:
                with measure.fresh_name():
                    os.environ["CREEL_DAEMON__LINGER_S"] = "5"  # until it is asked
                    before = ended_cpu_s()
                    by_way[way].append(rate(WAYS[way](folder, options.nbytes, options.samples)))
                    used_s = ended_cpu_s() - before
                    nbytes, daemons_s = apart(asked)
                    used[way].append(1e6 * (used_s + daemons_s) / options.samples)
                    reads[way].append(nbytes / (options.nbytes + 8) / options.samples)
        for way, rates in by_way.items():
            ratios = [r / p for r, p in zip(rates, by_way[ways[0]], strict=True)]
            rows.append(
                {
                    "way": way,
                    "samples/s": round(measure.median(rates)),
                    "MiB/s": round(measure.median(rates) * options.nbytes / (1 << 20)),
                    f"it / {ways[0]}": round(measure.median(ratios), 2),
                    "CPU us": round(measure.median(used[way])),
                    "reads": round(measure.median(reads[way]), 3),
                }
            )
        for workers in (0, 2):
            with measure.fresh_name():
                late = latencies(folder, options.nbytes, 500, workers)
            percent = 1e3 * np.percentile(late, [50, 99])
            rows.append(
                {
                    "way": f"put to batch, {workers} workers",
                    "p50 ms": round(float(percent[0]), 1),
                    "p99 ms": round(float(percent[1]), 1),
                }
            )
    measure.report(rows)


if __name__ == "__main__":
    main()
