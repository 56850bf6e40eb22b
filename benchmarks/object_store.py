"""Epochs over objects in an S3 store that is 20 ms away: samples/s, CPU, and requests per sample.

    python benchmarks/object_store.py [--samples N] [--nbytes 100000] [--latency .02] [--workers 4]
                                      [--memory 1.1 .5]

Readers of raw objects, all with the same workers and order: torch with boto3, with
s3torchconnector and with obstore (each where it is installed), torch with creel's dataset, and
creel's loader. The store is tests/testbed/s3_server.py, in a process of its own, which counts; its
threads share an interpreter, so that above some 500 requests/s it is the store that is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import fresh_name, report, tree_cpu_s
from torch.utils.data import DataLoader, Dataset

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.s3_server import S3

EPOCHS = 3


def serve(root: str, latency_s: float, pipe: Connection) -> None:
    """Run the store until the pipe closes; each message asks for its counts since the last."""
    with S3(Path(root), latency_s) as server:
        pipe.send(server.env)
        while pipe.recv():
            pipe.send(dict(server.count))
            server.count.clear()


class Raw(Dataset[int]):
    """Objects read by a client that each process makes for itself."""

    def __init__(self, keys: list[str], client: Callable[[], Callable[[str], bytes]]) -> None:
        self.keys = keys
        self.client = client
        self.read: tuple[int, Callable[[str], bytes]] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        if self.read is None or self.read[0] != os.getpid():
            self.read = os.getpid(), self.client()
        return len(self.read[1](self.keys[index]))


def boto3() -> Callable[[str], bytes]:
    import boto3

    client = boto3.client("s3", region_name="us-east-1")
    return lambda key: bytes(client.get_object(Bucket="bucket", Key=key)["Body"].read())


def s3torchconnector() -> Callable[[str], bytes]:
    from s3torchconnector import S3Checkpoint

    where = S3Checkpoint("us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"])
    return lambda key: bytes(where.reader(f"s3://bucket/{key}").read())


def obstore() -> Callable[[str], bytes]:
    from obstore.store import S3Store

    server = os.environ["AWS_ENDPOINT_URL"]
    options: Any = {"region": "us-east-1", "client_options": {"allow_http": True}}
    store = S3Store("bucket", endpoint=server, **options)
    return lambda key: bytes(store.get(key).bytes())


def length(sample: torch.Tensor | int) -> int:
    return len(sample) if isinstance(sample, torch.Tensor) else sample


def lengths(samples: list[Any]) -> int:
    return sum(map(length, samples))


def run(
    name: str, loader: Any, pipe: Connection, nbytes: int, rows: list[dict[str, object]]
) -> None:
    for epoch in range(1, EPOCHS + 1):
        pipe.send("counts")
        pipe.recv()
        start, cpu = time.monotonic(), tree_cpu_s()
        samples = len(loader.dataset)
        assert sum(loader) == samples * nbytes
        seconds, cpu = time.monotonic() - start, tree_cpu_s() - cpu
        pipe.send("counts")
        counts = pipe.recv()
        requests = counts.get("gets", 0) + counts.get("heads", 0)
        row: dict[str, object] = {"reader": name, "epoch": epoch}
        row |= {"samples/s": round(samples / seconds), "requests/sample": requests / samples}
        rows.append(row | {"CPU s/1000": round(1000 * cpu / samples, 2)})


def compare(args: argparse.Namespace, pipe: Connection) -> list[dict[str, object]]:
    names = [f"{i:06}" for i in range(args.samples)]
    rows: list[dict[str, object]] = []
    how: dict[str, Any] = {"batch_size": 32, "shuffle": True, "num_workers": args.workers}
    how |= {"collate_fn": lengths, "persistent_workers": True}
    for client in (boto3, s3torchconnector, obstore):
        if importlib.util.find_spec(client.__name__):
            raw = Raw(names, client)
            run(f"torch, {client.__name__}", DataLoader(raw, **how), pipe, args.nbytes, rows)
    sizes = [args.nbytes] * args.samples
    data = creel.FileDataset([f"s3://bucket/{name}" for name in names], nbytes=sizes)
    run("torch, creel's dataset", DataLoader(data, **how), pipe, args.nbytes, rows)
    for share in args.memory:
        budget = max(int(share * args.samples * args.nbytes), 1 << 20)
        with fresh_name() as name:
            settings = {"daemon.name": name, "memory.budget": budget}
            loader = creel.DataLoader(data, creel=settings, **how)
            run(f"creel, memory for {share:g}", loader, pipe, args.nbytes, rows)
            del loader
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--nbytes", type=int, default=100_000)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--memory", type=float, nargs="+", default=[1.1, 0.5])
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    rng = np.random.default_rng(0)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "bucket").mkdir()
        for i in range(args.samples):
            (Path(root) / f"bucket/{i:06}").write_bytes(rng.bytes(args.nbytes))
        pipe, other = spawn.Pipe()
        server = spawn.Process(target=serve, args=(root, args.latency, other), daemon=True)
        server.start()
        os.environ.update(pipe.recv())
        try:
            rows = compare(args, pipe)
        finally:
            pipe.send("")
            server.join()
    report(rows)


if __name__ == "__main__":
    main()
