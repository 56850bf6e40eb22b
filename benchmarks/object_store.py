"""Epochs over objects in an S3 store that is 20 ms away: samples/s, CPU, and requests per sample.

    python benchmarks/object_store.py [--samples N] [--nbytes 100000] [--latency .02] [--rate 0]
                                      [--workers 4] [--rounds 1] [--memory 1.1 .5] [--only NAME ...]
                                      [--endpoint http://127.0.0.1:7480]

Readers of raw objects and of chunks, with the same workers and samples, in a random order: torch
with boto3, s3torchconnector and obstore, LitData's raw files and its chunks, WebDataset, MosaicML
Streaming, and creel. Peers take part where they are installed: in an environment of the benchmark's
own, as their pins are not creel's.

The store is that at --endpoint, on loopback, with the keys of the environment (Ceph's radosgw, for
example; it gets a bucket `creel-bench`, by boto3). Without it tests/testbed/s3_server.py serves, in
a process of its own, whose threads share an interpreter: above some 500 requests/s it is the store
that is measured. A proxy makes it far, and counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from measure import fresh_name, report, tree_cpu_s
from torch.utils.data import DataLoader, Dataset

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.s3_server import S3
from testbed.slow_link import SlowLink

EPOCHS = 3
BUCKET = "creel-bench"
SHARD_NBYTES = 32 << 20
#: A reader: its loader, given the arguments of a DataLoader.
Reader = Callable[..., Iterable[int]]


def serve(root: str, pipe: Connection) -> None:
    """Run the store of the test bed until the pipe closes."""
    with S3(Path(root)) as server:
        pipe.send(server.env)
        pipe.recv()


# --- readers ----------------------------------------------------------------------------------


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
    client = s3_client()
    return lambda key: bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def s3torchconnector() -> Callable[[str], bytes]:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    path_style = S3ClientConfig(force_path_style=True)
    server = os.environ["AWS_ENDPOINT_URL"]
    where = S3Checkpoint("us-east-1", endpoint=server, s3client_config=path_style)
    return lambda key: bytes(where.reader(f"s3://{BUCKET}/{key}").read())


def obstore() -> Callable[[str], bytes]:
    from obstore.store import S3Store

    server = os.environ["AWS_ENDPOINT_URL"]
    options: Any = {"region": "us-east-1", "client_options": {"allow_http": True}}
    store = S3Store(BUCKET, endpoint=server, **options)
    return lambda key: bytes(store.get(key).bytes())


def litdata_raw(folder: str, **options: Any) -> Iterable[int]:
    from litdata import StreamingRawDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001  it has no way for it
    given: Any = {"storage_options": endpoint(), "cache_dir": folder, "recompute_index": True}
    data = StreamingRawDataset(f"s3://{BUCKET}/raw", **given)
    return DataLoader(data, **options)


def litdata_chunks(folder: str, **options: Any) -> Iterable[int]:
    from litdata import StreamingDataLoader, StreamingDataset

    given: Any = {"storage_options": endpoint(), "cache_dir": folder}
    data = StreamingDataset(f"s3://{BUCKET}/chunks", shuffle=True, **given)
    loader: Iterable[int] = StreamingDataLoader(
        data, **{k: v for k, v in options.items() if k != "shuffle"}
    )
    return loader


def webdataset(shards: list[str], **options: Any) -> Iterable[int]:
    import webdataset as wds

    client = s3_client()
    urls = [
        client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key})
        for key in shards
    ]
    pipes = [f"pipe:curl -s -f '{url}'" for url in urls]
    split = wds.split_by_worker
    data = wds.WebDataset(pipes, shardshuffle=len(pipes), workersplitter=split, empty_check=False)
    more = {k: v for k, v in options.items() if k != "shuffle"}
    return DataLoader(data.shuffle(1000).map(lambda sample: len(sample["bin"])), **more)


def mosaicml(folder: str, **options: Any) -> Iterable[int]:
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]  # which its client reads
    given: Any = {
        "local": folder,
        "batch_size": options["batch_size"],
        "shuffle": options.pop("shuffle"),
    }
    return DataLoader(StreamingDataset(remote=f"s3://{BUCKET}/mds", **given), **options)


def s3_client() -> Any:
    import boto3

    return boto3.client("s3", **endpoint())


def endpoint() -> dict[str, str]:
    return {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}


class Read(Dataset[bytes]):
    """A dataset of one's own that reads by `creel.read`."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> bytes:
        return creel.read(f"s3://{BUCKET}/{self.keys[index]}")


def length(sample: Any) -> int:
    sample = sample["bin"] if isinstance(sample, dict) else sample
    return sample if isinstance(sample, int) else len(sample)


def lengths(samples: list[Any]) -> int:
    return sum(map(length, samples))


# --- the data ---------------------------------------------------------------------------------


def write(root: Path, samples: int, nbytes: int) -> list[str]:
    """Write the objects, and the same as tars; return the names of the tars."""
    rng = np.random.default_rng(0)
    (root / "raw").mkdir(parents=True)
    (root / "tars").mkdir()
    each = max(SHARD_NBYTES // nbytes, 1)
    shards = []
    for first in range(0, samples, each):
        shards.append(f"tars/{first:06}.tar")
        with tarfile.open(root / shards[-1], "w") as tar:
            for i in range(first, min(first + each, samples)):
                data = rng.bytes(nbytes)
                (root / f"raw/{i:06}.bin").write_bytes(data)
                info = tarfile.TarInfo(f"{i:06}.bin")
                info.size = nbytes
                tar.addfile(info, io.BytesIO(data))
    return shards


def write_litdata(root: Path) -> None:
    """Write the objects as LitData's chunks."""
    from litdata import optimize

    output: Any = {"output_dir": str(root / "chunks"), "chunk_bytes": SHARD_NBYTES}
    optimize(read_file, sorted(map(str, (root / "raw").iterdir())), num_workers=1, **output)
    multiprocessing.set_start_method("fork", force=True)  # which it has changed


def write_mosaicml(root: Path) -> None:
    """Write the objects as MosaicML's shards."""
    from streaming import MDSWriter

    columns, limit = {"bin": "bytes"}, {"size_limit": SHARD_NBYTES}
    with MDSWriter(out=str(root / "mds"), columns=columns, **limit) as writer:
        for path in sorted((root / "raw").iterdir()):
            writer.write({"bin": path.read_bytes()})


def read_file(path: str) -> bytes:
    return Path(path).read_bytes()


@contextmanager
def store(args: argparse.Namespace, root: Path) -> Iterator[None]:
    """Serve the files below `root`, behind a link, with its address in the environment."""
    with ExitStack() as stack:
        if args.endpoint:
            os.environ["AWS_ENDPOINT_URL"] = args.endpoint
            upload(root / BUCKET)
        else:
            spawn = multiprocessing.get_context("spawn")
            pipe, other = spawn.Pipe()
            server = spawn.Process(target=serve, args=(str(root), other), daemon=True)
            server.start()
            stack.callback(server.join)
            stack.callback(pipe.send, "")
            os.environ.update(pipe.recv())
        port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
        link = SlowLink(int(port or 80), latency_s=args.latency, rate_Bps=args.rate)
        args.link = stack.enter_context(link)
        os.environ["AWS_ENDPOINT_URL"] = args.link.url
        yield


def upload(root: Path) -> None:
    client = s3_client()
    with_bucket = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    if BUCKET not in with_bucket:
        client.create_bucket(Bucket=BUCKET)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for stored in page.get("Contents", []):
            client.delete_object(Bucket=BUCKET, Key=stored["Key"])
    for path in sorted(root.rglob("*")):
        if path.is_file():
            client.put_object(
                Bucket=BUCKET, Key=str(path.relative_to(root)), Body=path.read_bytes()
            )


# --- measuring --------------------------------------------------------------------------------


#: By reader, epoch and column: the figures of all rounds.
Figures = dict[tuple[str, int], dict[str, list[float]]]


def run(name: str, make: Reader, args: argparse.Namespace, figures: Figures) -> None:
    if not any(part in name for part in args.only):
        return
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "num_workers": args.workers}
    loader = make(**options, collate_fn=lengths, persistent_workers=True)
    for epoch in range(1, EPOCHS + 1):
        args.link.counts()
        start, cpu = time.monotonic(), tree_cpu_s()
        assert sum(loader) == args.samples * args.nbytes, name
        seconds, cpu = time.monotonic() - start, tree_cpu_s() - cpu
        columns = figures.setdefault((name, epoch), {})
        for column, figure in (
            ("samples/s", args.samples / seconds),
            ("requests/sample", args.link.counts().total() / args.samples),
            ("CPU s/1000", 1000 * cpu / args.samples),
        ):
            columns.setdefault(column, []).append(figure)


def rows_of(figures: Figures) -> list[dict[str, object]]:
    """Return a row for each reader and epoch: medians of all rounds."""
    return [
        {"reader": name, "epoch": epoch}
        | {column: round(statistics.median(values), 3) for column, values in columns.items()}
        for (name, epoch), columns in figures.items()
    ]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def loads(name: str) -> bool:
    """Return whether a peer can be imported, in another process: some need much that may lack."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {name}"]
    return installed(name) and not subprocess.call(command)


def peers(
    args: argparse.Namespace, keys: list[str], shards: list[str], cache: str
) -> dict[str, Reader]:
    """Return the readers that are not creel's; what they keep on disk lies in `cache`."""
    readers: dict[str, Reader] = {}
    for client in (boto3, s3torchconnector, obstore):
        if installed(client.__name__):
            readers[f"torch, {client.__name__}"] = partial(DataLoader, Raw(keys, client))
    if args.endpoint and installed("litdata"):
        readers["LitData, raw files"] = partial(litdata_raw, f"{cache}/raw")
        readers["LitData, chunks"] = partial(litdata_chunks, f"{cache}/chunks")
    if args.mosaicml:
        readers["MosaicML Streaming"] = partial(mosaicml, f"{cache}/mds")
    if installed("webdataset") and installed("boto3") and shutil.which("curl"):
        readers["WebDataset"] = partial(webdataset, shards)
    return readers


def compare(args: argparse.Namespace, shards: list[str]) -> list[dict[str, object]]:
    """Let all readers have a turn in each round."""
    figures: Figures = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            compare_once(args, shards, cache, figures)
    return rows_of(figures)


def compare_once(args: argparse.Namespace, shards: list[str], cache: str, figures: Figures) -> None:
    keys = [f"raw/{i:06}.bin" for i in range(args.samples)]
    for name, reader in peers(args, keys, shards, cache).items():
        run(name, reader, args, figures)
    sizes = [args.nbytes] * args.samples
    files = creel.FileDataset([f"s3://{BUCKET}/{key}" for key in keys], nbytes=sizes)
    run("torch, creel's dataset", partial(DataLoader, files), args, figures)
    datasets: dict[str, Dataset[Any]] = {
        "FileDataset": files,
        "TarDataset": creel.TarDataset(
            [f"s3://{BUCKET}/{shard}" for shard in shards], index=f"{cache}/index"
        ),
        "creel.wrap": creel.wrap(Read(keys)),
    }
    for share in args.memory:
        budget = max(int(share * args.samples * args.nbytes), 1 << 20)
        for kind, data in datasets.items():
            with fresh_name() as name:
                settings = {"daemon.name": name, "memory.budget": budget}
                reader = partial(creel.DataLoader, data, creel=settings)
                run(f"creel, {kind}, memory for {share:g}", reader, args, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--nbytes", type=int, default=100_000)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=0, help="bytes a second, 0: no limit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", type=float, nargs="+", default=[1.1, 0.5])
    parser.add_argument("--endpoint", default="", help="of a store on this machine")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of readers' names")
    args = parser.parse_args()
    if not args.endpoint:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = os.environ["AWS_ALLOW_HTTP"] = "true"
    os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    with tempfile.TemporaryDirectory() as root:
        args.mosaicml = installed("boto3") and loads("streaming")
        bucket = Path(root) / BUCKET
        shards = write(bucket, args.samples, args.nbytes)
        if args.endpoint and installed("litdata"):
            write_litdata(bucket)
        if args.mosaicml:
            write_mosaicml(bucket)
        with store(args, Path(root)):
            rows = compare(args, shards)
    report(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
