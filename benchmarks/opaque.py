"""A dataset that opens its files itself, over slow storage: creel.wrap against torch.

    sudo python benchmarks/opaque.py [--format npy png h5] [--list right wrong late none]
                                     [--workers 0 2] [--memory 2] [--bandwidth 200M]

The dataset is one that users write: `np.load`, `PIL.Image.open` or `h5py.File` of a path, not
edited for creel. It holds the list of its files (`right`), or one that its samples do not follow
(`wrong`), or only at first (`late`), or it computes the paths (`none`). Needs root (a FUSE mount,
tests/testbed/slowfs.py, whose counters are exact). `--memory` is the daemon's, as a share of all
files. Ways: torch's DataLoader over the dataset; creel's over `creel.wrap` of it; and torch's over
the wrapped one, which does not know the order of later reads. The figures are samples per second of
the first epoch, the second (in which the daemon reads the files that no list named) and the later
ones, their ratio to torch's, that of the first three epochs together, the files opened at the
source in each epoch, and in all as a share of N files, and whether all batches equal torch's, by a
digest. The file system has no page cache: files that torch reads again are read from it again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import median, report, skip_without_fuse
from PIL import Image
from source_reads import daemon_with
from torch.utils.data import DataLoader, Dataset

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

SIDE = 224  # pixels; a png of noise has 150 KB, like the array


class Arrays(Dataset[torch.Tensor]):
    """A dataset as users write it."""

    suffix = ".npy"

    def __init__(self, folder: str, files: int, kind: str = "right") -> None:
        self.folder, self.files, self.kind, self.samples = folder, files, kind, 0
        if kind != "none":
            self.paths = [self.computed(i) for i in range(files)]

    def computed(self, index: int) -> str:
        return f"{self.folder}/{index:06}{self.suffix}"

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        self.samples += 1
        right = self.kind == "right" or (self.kind == "late" and 4 * self.samples <= self.files)
        return self.paths[index] if right else self.computed((index * 7 + 3) % self.files)

    def __len__(self) -> int:
        return self.files

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self.path(index)))


class Pictures(Arrays):
    """The same dataset with Pillow."""

    suffix = ".png"

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.path(index)) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))


class Hdf5(Arrays):
    """The same dataset with h5py."""

    suffix = ".h5"

    def __getitem__(self, index: int) -> torch.Tensor:
        import h5py

        with h5py.File(self.path(index), "r") as f:
            return torch.from_numpy(f["pixels"][:])


LISTS = ["right", "wrong", "late", "none"]
FORMATS = {"npy": Arrays, "png": Pictures, "h5": Hdf5}
WAYS: dict[str, Any] = {
    "torch": DataLoader,
    "creel.wrap": lambda dataset, **k: creel.DataLoader(creel.wrap(dataset), **k),
    "creel.wrap, torch's loader": lambda dataset, **k: DataLoader(creel.wrap(dataset), **k),
}


def fill(folder: Path, dataset: Arrays) -> int:
    """Write the files; return their bytes."""
    rng = np.random.default_rng(0)
    for i in range(dataset.files):
        path = dataset.computed(i)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        where = folder / Path(path).name
        if dataset.suffix == ".npy":
            np.save(where, pixels)
        elif dataset.suffix == ".h5":
            import h5py

            with h5py.File(where, "w") as f:
                f["pixels"] = pixels
        else:
            Image.fromarray(pixels).save(where, compress_level=1)
    return sum(path.stat().st_size for path in folder.iterdir())


def epochs(loader: Any, fs: Any, n: int) -> tuple[list[float], list[int], str]:
    """Return seconds and source opens of each epoch, and a digest of all batches (untimed)."""
    seconds, opens, digest = [], [], hashlib.sha256()
    for _ in range(n):
        before, spent, began = fs.totals()["opens"], 0.0, time.perf_counter()
        for batch in loader:
            at = time.perf_counter()
            digest.update(batch[:, ::8, ::8].numpy().tobytes())
            spent += time.perf_counter() - at
        seconds.append(time.perf_counter() - began - spent)
        opens.append(fs.totals()["opens"] - before)
    return seconds, opens, digest.hexdigest()


def rows(kind: str, held: str, workers: int, o: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row per way."""
    by_way: dict[str, list[tuple[list[float], list[int], str]]] = {way: [] for way in WAYS}
    slow = {"bandwidth": o.bandwidth, "open_latency": o.open_latency}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        data, mount = Path(name, "data"), str(Path(name, "mount"))
        data.mkdir()
        dataset = FORMATS[kind](mount, o.files, held)
        total = fill(data, dataset)
        for _ in range(o.rounds):
            for way, make in WAYS.items():
                with SlowFS(str(data), mount, **slow) as fs, daemon_with(int(o.memory * total)):  # type: ignore[no-untyped-call]
                    torch.manual_seed(0)
                    dataset.samples = 0
                    loader = make(dataset, batch_size=o.batch, shuffle=True, num_workers=workers)
                    by_way[way].append(epochs(loader, fs, o.epochs))
                    del loader
    digests = {digest for runs in by_way.values() for _, _, digest in runs}
    times = {way: [(s[0], s[1], sum(s[2:])) for s, _, _ in runs] for way, runs in by_way.items()}
    out: list[dict[str, object]] = []
    for way, runs in by_way.items():
        first, second, later = ([each[i] for each in times[way]] for i in range(3))
        ratios = [
            round(median([t[i] / s[i] for t, s in zip(times["torch"], times[way], strict=True)]), 2)
            for i in range(3)
        ]
        whole = zip(by_way["torch"], runs, strict=True)
        together = round(median([sum(t[0][:3]) / sum(s[0][:3]) for t, s in whole]), 2)
        out.append({
            "format": kind, "list": held, "workers": workers, "way": way,
            "first, samples/s": round(o.files / median(first)),
            "second, samples/s": round(o.files / median(second)),
            "later, samples/s": round(o.files * (o.epochs - 2) / median(later)),
            "first / torch": ratios[0],
            "second / torch": ratios[1],
            "later / torch": ratios[2],
            "three epochs / torch": together,
            "opens of the source": " ".join(map(str, runs[-1][1])),
            "opens / N": round(sum(runs[-1][1]) / o.files, 3),
            "same batches": len(digests) == 1,
        })  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", nargs="+", choices=[*FORMATS], default=[*FORMATS])
    parser.add_argument("--list", nargs="+", choices=LISTS, default=["right"])
    parser.add_argument("--memory", type=float, default=2.0, help="share of all files")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--bandwidth", default="200M")
    parser.add_argument("--open-latency", type=float, default=3.0, help="ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    ways = [(kind, held, n) for kind in o.format for held in o.list for n in o.workers]
    report([row for way in ways for row in rows(*way, o)])


if __name__ == "__main__":
    main()
