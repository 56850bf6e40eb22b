"""What a warm batch costs: wall and CPU of the whole process tree, creel and torch in turn.

    python benchmarks/cost_per_batch.py [WORKLOAD ...] [--rounds N] [--cold] [--json]

Both read the same bytes: torch from the page cache with `num_workers=2` (memory-mapped records, or
files opened one by one), creel with `num_workers=2` through the embedded daemon, everything in
memory. The loop does nothing with the batches. `memcpy` is numpy's gather alone, into one buffer.
With --cold it is the first epoch instead, over warm page cache: the worst case for a cache that has
to be filled. `creel` makes a loader and reads it at once, daemon start included; `served` has
an (empty) daemon already, as with creeld or after the seconds that making a model takes. `first` is
the time to the first batch, `rest` that of each later one. Before each of these epochs memory is
touched and freed again (`measure.touch_memory`).
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Comparison, Round, fresh_name, measured, report, touch_memory
from torch.utils.data import DataLoader, Dataset

import creel
from creel.config import Config
from creel.loader.client.embed import connect_or_start

#: More than the largest workload's bytes and its slots.
_ROOM_NBYTES = 2 << 30


class MappedRecords(Dataset[torch.Tensor]):
    """What a torch user writes for fixed-size records: one np.memmap."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any) -> None:
        self.rows = np.memmap(path, dtype, mode="r").reshape(-1, *shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows[index]))


class Files(Dataset[Any]):
    """What a torch user writes for files: open, read, decode."""

    def __init__(self, paths: list[str], decode: Callable[[bytes], Any]) -> None:
        self.paths, self.decode = paths, decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as f:  # noqa: PTH123  (a Path per sample costs, and users have none)
            return self.decode(f.read())


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def same(data: bytes) -> bytes:
    return data


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def pil(data: bytes) -> torch.Tensor:
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def simplejpeg(data: bytes) -> torch.Tensor:
    from simplejpeg import decode_jpeg

    return torch.from_numpy(decode_jpeg(data))


@dataclass
class Workload:
    """The same data as torch's dataset and as creel's, and the loader's arguments."""

    theirs: MappedRecords | Files
    ours: Dataset[Any]
    batch: int
    collate: Callable[[list[Any]], Any] | None = None


def records(folder: Path, nbytes: int, count: int, batch: int) -> Workload:
    path = folder / f"records{nbytes}.bin"
    if not path.exists():
        np.random.default_rng(0).integers(0, 256, nbytes * count, np.uint8).tofile(path)
    theirs = MappedRecords(path, (nbytes,), np.uint8)
    return Workload(theirs, creel.RecordDataset(path, torch.uint8, (nbytes,)), batch)


def files(folder: Path, nbytes: int, count: int) -> list[str]:
    home = folder / f"files{nbytes}"
    home.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        if not (home / f"{i:06}.bin").exists():
            (home / f"{i:06}.bin").write_bytes(rng.bytes(nbytes))
    return sorted(str(p) for p in home.iterdir())


def raw(folder: Path, nbytes: int, count: int, batch: int) -> Workload:
    paths = files(folder, nbytes, count)
    sizes = [nbytes] * count
    return Workload(Files(paths, tensor_of), creel.FileDataset(paths, nbytes=sizes), batch)


def jpegs(folder: Path, count: int) -> list[str]:
    """JPEG files of about 110 KB, 500 x 375, cut from a photograph."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    home = folder / "jpegs"
    home.mkdir(exist_ok=True)
    photos = load_sample_images().images
    rng = np.random.default_rng(0)
    for i in range(count):
        path = home / f"{i:05}.jpg"
        if not path.exists():
            y, x = int(rng.integers(0, 427 - 375)), int(rng.integers(0, 640 - 500))
            crop = photos[i % 2][y : y + 375, x : x + 500]
            Image.fromarray(crop).save(path, quality=97)
    return sorted(str(p) for p in home.iterdir())


def jpeg(folder: Path, count: int, decode: Callable[[bytes], Any], batch: int = 64) -> Workload:
    paths = jpegs(folder, count)
    collate = as_list if decode is same else None
    return Workload(Files(paths, decode), creel.FileDataset(paths, decode=decode), batch, collate)


WORKLOADS: dict[str, Callable[[Path], Workload]] = {
    "records 3 KB x 64": lambda d: records(d, 3072, 60_000, 64),
    "records 3 KB x 256": lambda d: records(d, 3072, 60_000, 256),
    "tokens 8 KB x 64": lambda d: records(d, 8192, 40_000, 64),
    "tokens 8 KB x 256": lambda d: records(d, 8192, 40_000, 256),
    "files 150 KB x 256": lambda d: raw(d, 150_528, 5_120, 256),
    "files 1 MB x 64": lambda d: raw(d, 1_000_000, 1_024, 64),
    "jpeg bytes x 64": lambda d: jpeg(d, 2_560, same),
    "jpeg PIL x 64": lambda d: jpeg(d, 1_280, pil),
    "jpeg simplejpeg x 64": lambda d: jpeg(d, 1_280, simplejpeg),
}


def epochs(loader: DataLoader[Any], min_s: float) -> Callable[[Round], None]:
    """Whole epochs until `min_s` have passed."""

    def way(into: Round) -> None:
        while True:
            with measured(into):
                into.batches += sum(1 for _ in loader)
            if into.wall_s >= min_s:
                return

    return way


def first_epoch(make: Callable[[], DataLoader[Any]], *, served: bool) -> Callable[[Round], None]:
    """One epoch of a new loader with a new daemon: nothing in the arena, all in the page cache."""

    def way(into: Round) -> None:
        with fresh_name():
            client = connect_or_start(Config.load()[0]) if served else None
            touch_memory(_ROOM_NBYTES)
            with measured(into):
                start = time.perf_counter()
                batches = iter(make())
                next(batches)
                into.first_s += time.perf_counter() - start
                into.batches += 1 + sum(1 for _ in batches)
            if client is not None:
                client.close()

    return way


def memcpy(work: Workload) -> Callable[[Round], None] | None:
    """numpy's gather of the same rows out of one array into one buffer, on one core."""
    first = work.theirs[0]
    if work.collate is not None or not isinstance(first, torch.Tensor) or first.dim() != 1:
        return None
    count = min(len(work.theirs), 2048)
    rows = np.random.default_rng(0).integers(0, 256, (count, len(first)), dtype="uint8")
    out = np.zeros((work.batch, len(first)), np.uint8)
    ids = np.random.default_rng(1).integers(0, len(rows), (200, work.batch))

    def way(into: Round) -> None:
        with measured(into):
            for some in ids:
                np.take(rows, some, axis=0, out=out, mode="clip")
        into.batches += len(ids)

    return way


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time of a round")
    parser.add_argument("--cold", action="store_true", help="first epochs, with a new daemon each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads or WORKLOADS:
            work = WORKLOADS[name](Path(folder))
            kwargs: dict[str, Any] = {"batch_size": work.batch, "shuffle": True, "num_workers": 2}
            if work.collate is not None:
                kwargs["collate_fn"] = work.collate
            ways = {
                "torch": epochs(DataLoader(work.theirs, **kwargs), options.seconds),
                "creel": epochs(creel.DataLoader(work.ours, **kwargs), options.seconds),
            }
            if options.cold:
                theirs = partial(DataLoader, work.theirs, **kwargs)
                ours = partial(creel.DataLoader, work.ours, **kwargs)
                ways = {
                    "torch": first_epoch(theirs, served=False),
                    "creel": first_epoch(ours, served=False),
                    "served": first_epoch(ours, served=True),
                }
            limit = None if options.cold else memcpy(work)
            if limit is not None:
                ways["memcpy"] = limit
            rows.append(Comparison(name).run(ways, options.rounds).summary())
            report(rows[-1:]) if not options.json else None
    if options.json:
        report(rows)


if __name__ == "__main__":
    main()
