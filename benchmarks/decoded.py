"""Decoded samples that are kept: torch, creel without and creel with `keep_decoded`, in turn.

    python benchmarks/decoded.py [--images 1280] [--batch 64] [--workers 2] [--rounds 5] [--json]
        [--only NAME ...] [--quick] [--parts]

JPEGs of 500 x 375 pixels in the page cache, shuffled. Each round reads an epoch by torch's loader
over a plain dataset, one by a new loader of creel without keeping, and two by one with a new store:
the first epoch fills it, the second copies from it. Then a named store is filled, on the disk of
`--disk`, and `next` is the first epoch of a dataset that finds it, as in the next job. Figures are
samples/s, and medians of the ratios of each round: `later`, `next / torch` and `later / creel`, and
what filling costs, `first / creel`; of wall time, and of the CPU time of the whole process tree.

`--quick` is two rounds of a quarter of the images, without `next`: two minutes for all rows. To
compare trees, run this file with the interpreter of each.

`--parts` makes samples in one process, each in turn without keeping (`plain`), by a decoder that
also encodes what it returns and writes that to fresh memory (`written`: the least that keeping can
take), and kept for the first time: medians of the thread's CPU time in us, and `plain / it`.

`full` decodes 500 x 375 (562 KB), `256` also resizes to 256 x 256 (196 KB); `crop` cuts and resizes
to 224 x 224 and flips at random, `bare` only makes a tensor. `kept` is `creel.kept` around the
dataset that torch reads. `photos` are a sixteenth as many, of 4,000 x 3,000 pixels, made 256 x 256;
`text` is 20 KB a sample, tokenised, of which 512 tokens are taken at random.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import Round, measured, median, report, skip_unless, touch_memory
from torch.utils.data import DataLoader, Dataset

import creel
from creel.loader.data.datasets import Transformed
from creel.loader.data.decoded.codec import encode
from creel.loader.data.reading.lease import Lease

try:
    from PIL import Image
except ImportError:
    skip_unless(False, "Pillow")
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

LIMIT = "4GiB"
#: Of the samples of `photos`.
FEWER = 16
MOST_NBYTES = 600_000  # of a decoded image


def write(folder: Path, images: int, width: int, height: int) -> list[str]:
    rng = np.random.default_rng(0)
    paths = [folder / f"{width}-{i:05}.jpg" for i in range(images)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        noise = rng.integers(-14, 15, pixels.shape, np.int16)
        noisy = (pixels.astype(np.int16) + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(path, quality=94)
    return [str(path) for path in paths]


def write_texts(folder: Path, texts: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = np.array(["".join(map(chr, rng.integers(97, 123, n % 9 + 1))) for n in range(5000)])
    paths = [folder / f"{i:05}.txt" for i in range(texts)]
    for path in paths:
        path.write_text(" ".join(rng.choice(words, 3400)))
    return [str(path) for path in paths]


def full(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def small(data: bytes) -> Any:
    return full(data).resize((256, 256), Image.Resampling.BILINEAR)


def crop(image: Any) -> torch.Tensor:
    """Cut 150 x 150 pixels at random, and flip them half of the time."""
    width, height = image.size
    x, y = np.random.randint(width - 150), np.random.randint(height - 150)  # noqa: NPY002
    cut = image.resize((224, 224), Image.Resampling.BILINEAR, box=(x, y, x + 150, y + 150))
    if np.random.rand() < 0.5:  # noqa: NPY002  torch seeds this generator in workers
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1).contiguous()


def bare(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def simple(data: bytes) -> Any:
    return simplejpeg.decode_jpeg(data, "RGB")


def crop_array(pixels: Any) -> torch.Tensor:
    return crop(Image.fromarray(pixels))


def tokens(data: bytes) -> Any:
    words = re.findall(rb"\w+|\W", data)
    return np.array([zlib.crc32(word) % 50257 for word in words], np.int32)


def some(ids: Any) -> torch.Tensor:
    first = np.random.randint(len(ids) - 512)  # noqa: NPY002  as above
    return torch.from_numpy(ids[first : first + 512].copy())


class Files(Dataset[Any]):
    """A dataset as torch users write it."""

    def __init__(self, paths: list[str], decode: Callable[[bytes], Any], transform: Any) -> None:
        self.paths, self.decode, self.transform = paths, decode, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        sample = self.decode(Path(self.paths[index]).read_bytes())
        return sample if self.transform is None else self.transform(sample)


def kept_files(paths: list[str], decode: Any, transform: Any, keep: Any) -> Dataset[Any]:
    return creel.FileDataset(paths, decode=decode, transform=transform, keep_decoded=keep)


def kept_any(paths: list[str], decode: Any, transform: Any, keep: Any) -> Dataset[Any]:
    return Transformed(creel.kept(Files(paths, decode, None), keep), transform)


class Case(NamedTuple):
    decode: Any
    transform: Any
    keeping: Any = kept_files
    files: str = "images"


CASES = {
    "256, crop": Case(small, crop),
    "full, crop": Case(full, crop),
    "256, bare": Case(small, bare),
    "256, crop, kept": Case(small, crop, kept_any),
    "simplejpeg, crop": Case(simple, crop_array),
    "photos, crop": Case(small, crop, files="photos"),
    "text": Case(tokens, some, files="texts"),
}


def epoch(loader: DataLoader[Any]) -> Round:
    into = Round()
    with measured(into):
        into.batches = sum(1 for _ in loader)
    return into


def compare(name: str, paths: list[str], o: argparse.Namespace) -> dict[str, object]:
    decode, transform, keeping, _ = CASES[name]
    options: dict[str, Any] = {
        "batch_size": o.batch,
        "shuffle": True,
        "num_workers": o.workers,
    }
    theirs = DataLoader(Files(paths, decode, transform), **options)
    epoch(theirs)
    rounds: list[dict[str, Round]] = []
    for number in range(o.rounds):
        touch_memory(2 * len(paths) * MOST_NBYTES)  # the last store's is not free at once
        named = creel.Decoded(LIMIT, name=f"{name} {number}")

        def loader(keep: Any) -> DataLoader[Any]:
            return creel.DataLoader(keeping(paths, decode, transform, keep), **options)

        plain = creel.FileDataset(paths, decode=decode, transform=transform)
        kept = loader(LIMIT)
        ways = {"torch": theirs, "creel": creel.DataLoader(plain, **options)}
        ways |= {"first": kept, "later": kept}
        rounds.append({way: epoch(batches) for way, batches in ways.items()})
        del kept, ways
        if o.quick:
            continue
        epoch(loader(named))
        rounds[-1]["next"] = epoch(loader(named))
    row: dict[str, object] = {"case": name}
    for way in rounds[0]:
        row[f"{way}, /s"] = round(median([len(paths) / r[way].wall_s for r in rounds]))
    pairs = ("later", "torch"), ("next", "torch"), ("later", "creel"), ("first", "creel")
    for way, peer in (pair for pair in pairs if pair[0] in rounds[0]):
        for figure in ("wall", "cpu"):
            both = [
                (getattr(r[peer], f"{figure}_s"), getattr(r[way], f"{figure}_s")) for r in rounds
            ]
            row[f"{way} / {peer}, {figure}"] = round(median([p / w for p, w in both]), 2)
    return row


def written(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    fd, place = os.memfd_create("written"), 0

    def decoding(data: bytes) -> Any:
        nonlocal place
        sample = decode(data)
        buffers: list[Any] = encode(sample)[1]
        place += os.pwritev(fd, buffers, place)
        return sample

    return decoding


def parts(name: str, paths: list[str], o: argparse.Namespace) -> dict[str, object]:
    decode, transform, keeping, _ = CASES[name]
    touch_memory(2 * len(paths) * MOST_NBYTES)
    ways = {
        "plain": kept_files(paths, decode, transform, None),
        "written": kept_files(paths, written(decode), transform, None),
        "kept": keeping(paths, decode, transform, LIMIT),
    }
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for first in range(0, len(paths), o.batch):
        with Lease():
            for number in range(first, min(first + o.batch, len(paths))):
                for turn in range(len(ways)):
                    way = [*ways][(number + turn) % len(ways)]
                    began = time.thread_time_ns()
                    ways[way][number]
                    cpu[way].append((time.thread_time_ns() - began) / 1e3)
    of = {way: median(times[o.batch :]) for way, times in cpu.items()}
    ratios = {f"plain / {way}": round(of["plain"] / of[way], 3) for way in ("written", "kept")}
    return {"case": name, **{f"{way}, us": round(us) for way, us in of.items()}, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--disk", help="a folder on a local disk; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", action="store_true")
    o = parser.parse_args()
    if o.quick or o.parts:
        o.images, o.rounds = o.images // 4, 2
    os.environ["CREEL_SOCKET"] = f"decoded-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=o.disk) as disk:
        os.environ |= {"CREEL_DISK__PATH": disk, "CREEL_DISK__KEEP_FREE": "0"}
        names = [name for name in o.only if simplejpeg or "simplejpeg" not in name]
        kinds = {CASES[name].files for name in names}
        paths = {}
        if "images" in kinds:
            paths["images"] = write(Path(folder), o.images, 500, 375)
        if "photos" in kinds:
            paths["photos"] = write(Path(folder), o.images // FEWER, 4000, 3000)
        if "texts" in kinds:
            paths["texts"] = write_texts(Path(folder), o.images)
        row = parts if o.parts else compare
        report([row(name, paths[CASES[name].files], o) for name in names])


if __name__ == "__main__":
    main()
