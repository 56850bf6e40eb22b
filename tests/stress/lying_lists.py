"""Run random datasets whose lists of files lie; compare batches with torch's, and count opens.

    sudo python -m stress.lying_lists --first 0 --count 300

A dataset holds a list of files, in one of many forms, and its samples read what the list says, or
not: it may be permuted, wrong at some entries, longer or shorter, right at first only, made of
aliases or links, about files that are missing, or there is none. Between epochs the list, what
samples read, and the files themselves change. The files lie below a mount that counts opens
(tests/testbed/slowfs.py, which needs root). Prints a line for each dataset whose batches differ, or
that opens more files than a wrong list may cost; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from daemons import Running
from kit import unique_name
from testbed.same import same
from testbed.slowfs import SlowFS

EPOCHS = 4
#: Samples beyond the proved ones that a list may have fetched in vain (`tracing/lists/hypothesis`).
AHEAD = 64


def _by_descriptor(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def _mapped(path: str) -> bytes:
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:  # noqa: PTH123
        return m[:]


def _head(path: str) -> bytes:
    with open(path, "rb") as f:  # noqa: PTH123
        return f.read(50)


READS: tuple[Callable[[str], bytes], ...] = (
    *(lambda path: Path(path).read_bytes(), lambda path: np.fromfile(path, np.uint8).tobytes()),
    *(_by_descriptor, _mapped, _head),
)
#: What an attribute holds of the paths.
FORMS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "paths": lambda paths: [Path(path) for path in paths],
    "pairs": lambda paths: [(path, i % 3) for i, path in enumerate(paths)],
    "rows": lambda paths: [{"image": path, "label": i} for i, path in enumerate(paths)],
    "by number": lambda paths: dict(enumerate(paths)),
    "names": lambda paths: [os.path.basename(path) for path in paths],  # noqa: PTH119
    "nested": lambda paths: {"train": {"files": paths}},
    "two lists": lambda paths: (paths, paths[::-1]),
}
LIES = ("none", "permuted", "some", "long", "short", "late", "alias", "link", "gone", "hidden")


def _listed_paths(lie: str, paths: list[str], folder: str, rng: random.Random) -> list[str]:
    """Return what a list says in place of the paths that samples read."""
    some = rng.sample(range(len(paths)), rng.randrange(1, 20))
    if lie == "permuted":
        return rng.sample(paths, len(paths))
    if lie == "long":
        return paths + [paths[i] for i in some]
    if lie == "short":
        return paths[len(some) :]
    if lie == "alias":
        return [path.replace(folder, f"{folder}/..//{Path(folder).name}/.") for path in paths]
    if lie == "link":
        return [path.replace(folder, f"{folder}-link") for path in paths]
    if lie in {"some", "gone"}:
        others = {i: rng.choice(paths) if lie == "some" else f"{folder}/gone{i}" for i in some}
        return [others.get(i, path) for i, path in enumerate(paths)]
    return paths


class Lying(Dataset[Any]):
    """Sample i reads file `order[i]`; its list says what it likes."""

    def __init__(self, folder: str, names: list[str], rng: random.Random) -> None:
        self.root, self.count = folder, len(names)
        self.lie, form = rng.choice(LIES), rng.choice([*FORMS])
        self.about = f"{self.lie}, {form}"
        self.read, self.samples = rng.choice(READS), 0
        paths = [f"{folder}/{name}" for name in names]
        order = list(range(len(names)))
        if rng.random() < 0.2:  # several samples a file
            order = [i // 2 for i in order]
        self.order = torch.tensor(order)  # of no class in which lists are looked for
        listed = [paths[i] for i in order]
        listed = _listed_paths(self.lie, listed, folder, rng)
        self.links = self.lie == "link" and rng.random() < 0.5  # samples read through it, too
        self.held = None if self.lie == "hidden" else FORMS[form](listed)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.samples += 1
        at = int(self.order[i])
        if self.lie == "late" and self.samples > 40:
            at = (7 * at + 3) % len(self)
        root = f"{self.root}-link" if self.links else self.root
        try:
            data = self.read(f"{root}/{at:03}.bin")
        except (FileNotFoundError, ValueError):  # of an empty file, by mmap
            return torch.tensor([-1, -1])
        return torch.tensor([zlib.crc32(data), len(data)])

    def change(self, rng: random.Random) -> None:
        """Change the list, or what samples read."""
        kind = rng.randrange(6)
        if kind == 0 and isinstance(self.held, list):
            self.held.reverse()
        elif kind == 1 and isinstance(self.held, list):
            a, b = rng.randrange(len(self.held)), rng.randrange(len(self.held))
            self.held[a] = self.held[b]
        elif kind == 2:
            self.order = self.order.flip(0)
        elif kind == 3:
            self.held = None


def rewrite(folder: Path, names: list[str], rng: random.Random) -> int:
    """Change some files in a way each; return how many."""
    some = rng.sample(names, rng.randrange(12))
    for name in some:
        path, data = folder / name, rng.randbytes(rng.randrange(1, 3000))
        kind = rng.randrange(5)
        if kind == 0:
            path.write_bytes(data)
        elif kind == 1:
            other = folder / "other"
            other.write_bytes(data)
            other.replace(path)
        elif kind == 2:
            path.unlink(missing_ok=True)
        elif kind == 3:
            path.touch()
        elif path.exists():  # the same length and time, by another file
            status = path.stat()
            other = folder / "other"
            other.write_bytes(rng.randbytes(status.st_size))
            os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
            other.replace(path)
    return len(some)


def check(seed: int, folder: Path, fs: Any) -> str:
    """Run one dataset; return what is wrong, or ""."""
    rng = random.Random(seed)
    data = folder / "data" / f"{seed}"
    data.mkdir()
    data.with_name(f"{seed}-link").symlink_to(f"{seed}")
    names = [f"{i:03}.bin" for i in range(rng.randrange(60, 130))]
    largest = rng.choice([3000, 3000, 3000, 100_000])
    for name in names:
        (data / name).write_bytes(rng.randbytes(rng.randrange(1, largest)))
    workers = rng.choice([0, 0, 1, 2])
    more: dict[str, Any] = {"batch_size": rng.choice([1, 4, 8]), "num_workers": workers}
    more |= {"shuffle": rng.random() < 0.7}
    more |= {"persistent_workers": workers > 0 and rng.random() < 0.5}
    direct, torchs = rng.choice(["auto", "never"]), rng.random() < 0.2
    draw = rng.randrange(1 << 30)
    theirs = Lying(f"{fs.mountpoint}/{seed}", names, random.Random(draw))
    ours: Any = creel.wrap(Lying(f"{fs.mountpoint}/{seed}", names, random.Random(draw)))
    os.environ["CREEL_LOADER__DIRECT"] = direct
    kind: Any = DataLoader if torchs else creel.DataLoader
    loaders = [
        make(dataset, generator=torch.Generator().manual_seed(seed), **more)
        for make, dataset in ((DataLoader, theirs), (kind, ours))
    ]
    about = f"{seed}: {theirs.about}, {direct}, {kind.__module__}, {more}"
    most = (
        len(names) + AHEAD + 4 * max(workers, 1) * int(more["batch_size"])
    )  # once more, and ahead
    opens = []
    for epoch in range(EPOCHS):
        batches = []
        for loader in loaders:
            fs.reset()
            batches.append(list(loader))
            opens.append(fs.totals()["opens"])
        if not same(*batches):
            return f"{about}: other batches in epoch {epoch}"
        if rng.random() < 0.5:
            most += rewrite(data, names, rng)
        if rng.random() < 0.5:
            most += len(names)  # what samples read is recorded anew
            change = rng.randrange(1 << 30)
            for dataset in (theirs, ours):
                dataset.change(random.Random(change))
    if sum(opens[1::2]) > sum(opens[::2]) + most:
        return f"{about}: opens {opens[1::2]}, torch's {opens[::2]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    o = parser.parse_args()
    wrong, name = 0, unique_name()
    os.environ["CREEL_SOCKET"] = name
    with tempfile.TemporaryDirectory() as home, Running(name, memory="256MiB"):
        folder = Path(home)
        (folder / "data").mkdir()
        slow = {"open_latency": 0.5, "attr_timeout": 0.0}
        with SlowFS(str(folder / "data"), str(folder / "mount"), **slow) as fs:  # type: ignore[no-untyped-call]
            for seed in range(o.first, o.first + o.count):
                fault = check(seed, folder, fs)
                wrong += bool(fault)
                if fault:
                    print(fault, flush=True)
    print(f"{o.count} datasets, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
