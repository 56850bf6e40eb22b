# ruff: noqa: NPY002, N802  global generators are part of what is compared; names as torch's
"""Parts of random programs: a user's files, datasets, samplers and functions.

The same program text runs with torch's classes, or with creel's if the environment says so.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import creel
from shown import plain, states
from stress import settings

try:
    from folders import folder
except BaseException:  # noqa: BLE001  pytest's Skipped; programs have no images then
    folder = None
HAS_IMAGES = folder is not None

#: An environment variable, as spawned workers need it, too.
WITH_CREEL = "CREEL_STRESS_WITH_CREEL"

#: The daemon that each program uses: (end of its name, other settings).
DAEMONS = {
    "large": {"CREEL_MEMORY__BUDGET": "64MiB"},
    "small": {"CREEL_MEMORY__BUDGET": "256KiB"},
    "none": {"CREEL_LOADER__EMBED": "0"},
}

#: (what, value) of everything that the program showed, in order.
shown: list[tuple[str, Any]] = []
content = np.random.default_rng(0)


def with_creel() -> bool:
    return os.environ.get(WITH_CREEL) == "1"


def begin(seed: int, daemon: str, direct: str) -> None:
    """Fix all random numbers, choose the daemon, and whether page-cached files go past it."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    global content  # noqa: PLW0603  one program per process
    content = np.random.default_rng(seed)
    os.environ["CREEL_SOCKET"] = f"{os.environ['CREEL_SOCKET']}-{daemon}"
    os.environ.update(DAEMONS[daemon], CREEL_LOADER__DIRECT=direct)


# --- loaders ------------------------------------------------------------------------------------


def Loader(data: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Return the loader under test, or torch's; `options` are those of `creel=`."""
    if with_creel():
        return creel.DataLoader(data, creel=options, **kwargs)
    return DataLoader(data, **kwargs)


def TorchLoader(data: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Return torch's loader in both runs."""
    del options
    return DataLoader(data, **kwargs)


def wrap(data: Any) -> Any:
    return creel.wrap(data) if with_creel() else data


def keeping(limit: str | int) -> dict[str, Any]:
    """Return arguments by which creel's datasets keep decoded samples."""
    return {"keep_decoded": limit} if with_creel() else {}


def kept(data: Any, limit: str | int) -> Any:
    return creel.kept(data, limit) if with_creel() else data


def ImageFolder(root: str, **kwargs: Any) -> Any:
    return (creel.ImageFolder if with_creel() else folder.ImageFolder)(root, **kwargs)


def TorchImageFolder(root: str, **kwargs: Any) -> Any:
    return folder.ImageFolder(root, **kwargs)


def show(words: str, act: Callable[[], Any]) -> Any:
    """Show what a call returns, or the type of the exception that it raises; return that."""
    try:
        value = act()
    except Exception as e:  # noqa: BLE001  both loaders must raise the same
        e.__traceback__ = None  # torch's `reraise` leaves a cycle that would keep the iterator
        shown.append((words, f"raises {error(e)}"))
        return type(e)
    shown.append((words, type(value).__name__ if isinstance(value, Iterator) else plain(value)))
    return value


def error(e: Exception) -> str:
    """Return the name of an exception's class; for one of creel's, its standard base classes."""
    return next(c.__name__ for c in type(e).mro() if c.__module__ != "creel.errors")


def epoch(
    loader: Any,
    *,
    stop: int = 200,
    iterators: int = 1,
    keep: bool = False,
    write: bool = False,
    ordered: bool = True,
    generators: bool = True,
) -> None:
    """Iterate over an epoch, or over two at once, up to step `stop`.

    `keep`: show all batches again at the end; `write`: write to each; not `ordered`: the order of
    batches is a race; not `generators`: a resumed loader, whose global generators differ.
    """
    show("len", lambda: len(loader))
    first = len(shown)
    running = [iter(loader) for _ in range(iterators)]
    kept: list[Any] = []
    for step in range(stop):
        batches = [show(f"batch {step}", lambda it=it: next(it)) for it in running]  # type: ignore[misc]
        kept += [batch for batch in batches if keep and not isinstance(batch, type)]
        for batch in batches if write else []:
            for leaf in batch if isinstance(batch, (list, tuple)) else [batch]:
                if isinstance(leaf, torch.Tensor):
                    leaf.zero_()
        if all(batch is StopIteration for batch in batches):
            break
    if not ordered:
        shown[first:] = sorted((("batch", value) for _, value in shown[first:]), key=repr)
    for batch in kept:
        show("kept", lambda batch=batch: batch)  # type: ignore[misc]
    own = getattr(loader.sampler, "generator", None)
    if generators:
        show("states", lambda: states(loader))
    if generators and own is not None:
        show("state of the sampler's", lambda: zlib.crc32(own.get_state().numpy().tobytes()))


def interrupted(loader: Any, make: Callable[[], Any], at: int, more: int) -> None:
    """Run an epoch that a new loader continues at batch `at`, and `more` whole ones.

    If the last batch raised, the new loader tries it again; torch has no such feature.
    """
    it = iter(loader)
    remaining: Any = it
    batch = None
    for step in range(at):
        batch = show(f"batch {step}", lambda: next(it))
    if isinstance(batch, type):
        return
    if with_creel():
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
        remaining = iter(loader)
    while show("batch", lambda: next(remaining)) is not StopIteration:
        pass
    for _ in range(more):
        epoch(loader, generators=False)


def children_left() -> int:
    return len(multiprocessing.active_children())


# --- files, and changes to them -----------------------------------------------------------------


def make_files(name: str, sizes: Sequence[int]) -> list[str]:
    paths = [Path(name, f"{i:03}.bin").absolute() for i in range(len(sizes))]
    paths[0].parent.mkdir()
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(content.bytes(size))
    return [str(path) for path in paths]


def make_images(name: str, count: int) -> list[str]:
    paths = [Path(name, "ab"[i % 2], f"{i:03}.png").absolute() for i in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image())
    return [str(path) for path in paths]


def image() -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(content.integers(0, 255, (6, 5, 3), np.uint8)).save(out, "png")
    return out.getvalue()


def rewrite(path: str, new: int | bytes | None, mode: str = "in place") -> None:
    """Replace a file's bytes: by `new`, by `new` random ones, or by as many as it has."""
    before = Path(path).stat() if Path(path).exists() else None
    if new is None:
        new = 100 if before is None else before.st_size
    data = content.bytes(new) if isinstance(new, int) else new
    target = Path("other") if mode == "renamed" else Path(path)
    target.write_bytes(data)
    if mode != "in place" and before is not None:
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    target.replace(path)


def touch(path: str) -> None:
    Path(path).touch()


def remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


# --- datasets -----------------------------------------------------------------------------------


def _opened(path: str) -> bytes:
    with creel.open(path) if with_creel() else Path(path).open("rb") as file:
        return file.read()


def _mapped(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  (as users do)
        if not os.fstat(file.fileno()).st_size:
            return file.read()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return mapping[:3] + file.read()[3:]


def _text(path: str) -> bytes:
    with open(path, encoding="latin-1", newline="") as file:  # noqa: PTH123
        return "".join(file).encode("latin-1")


def _by_descriptor(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, 5, 0) + os.pread(fd, 1 << 20, 5)
    finally:
        os.close(fd)


READERS: dict[str, Callable[[str], Any]] = {
    "open": lambda path: Path(path).read_bytes(),
    "text": _text,
    "mapped": _mapped,
    "descriptor": _by_descriptor,
    "fromfile": lambda path: np.fromfile(path, np.uint8).tobytes(),
    "memmap": lambda path: np.memmap(path, np.uint8, "r").tobytes(),
    "creel.open": _opened,
    "creel.read": lambda path: creel.read(path) if with_creel() else Path(path).read_bytes(),
}


class Own(Dataset[Any]):
    """Reads one file per sample, and other state that a user's code may depend on."""

    bias = 0

    def __init__(
        self,
        paths: list[str],
        way: str,
        *,
        labels: torch.Tensor | None = None,
        transform: Callable[[Any], Any] | None = None,
        config: str = "",
    ) -> None:
        self.paths, self.way, self.config = paths, way, config
        self.labels, self.transform = labels, transform
        self.scale, self.touched = 1, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        self.touched += 1
        data = self.data(index)
        now = settings.OFFSET + settings.Settings.factor + self.bias
        if self.config:
            now += len(READERS[self.way](self.config))
        x = torch.tensor([zlib.crc32(data) * self.scale, len(data), now, *data[:3]])
        x = x if self.transform is None else self.transform(x)
        return x if self.labels is None else (x, self.labels[index])

    def data(self, index: int) -> bytes:
        data: bytes = READERS[self.way](self.paths[index])
        return data


class Reads(Dataset[Any]):
    """Samples depend on one or two files each, and on nothing else."""

    def __init__(self, paths: list[str], way: str, config: str = "") -> None:
        self.paths, self.way, self.config = paths, way, config

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        read = READERS[self.way]
        data = read(self.paths[index])
        more = read(self.config) if self.config else b""
        x = torch.tensor([zlib.crc32(data), len(data), zlib.crc32(more)])
        return {"x": x, "bytes": np.array([*data[:4]]), "more": (len(more), more[:3], None)}["x"]


class Declared(Own):
    """Declares which two files a sample reads."""

    @property
    def creel_uris(self) -> list[str]:
        return self.paths

    def objects(self, index: int) -> list[int]:
        return [index % len(self), len(self) - 1 - index % len(self)]

    def data(self, index: int) -> bytes:
        first, other = self.objects(index)
        return super().data(first) + super().data(other)


class Counted(Own):
    """Samples depend on how many were read before by this process's copy."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), self.touched


class Several(Own):
    """Makes a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in reversed(indices)]


class Around(Dataset[Any]):
    """A user's wrapper around another dataset."""

    def __init__(self, inner: Any, function: Callable[[Any], Any]) -> None:
        self.inner, self.function = inner, function

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.inner[index])


class Streamed(IterableDataset[Any]):
    """Worker w of n yields every n-th file."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for path in self.paths[first::step]:
            yield zlib.crc32(READERS["creel.read"](path)), torch.rand(1)


# --- functions ----------------------------------------------------------------------------------


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64) + settings.OFFSET


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def noise(x: torch.Tensor) -> Any:
    return x.double() + torch.rand(1), np.random.rand(), random.random()


def as_dict(x: torch.Tensor) -> dict[str, Any]:
    return {"x": x, "sum": x.float().sum(), "factor": settings.Settings.factor}


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., :4], x[..., -4:]


def beside(sample: Any) -> tuple[Any, int]:
    return sample, settings.OFFSET


def pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)) + settings.OFFSET


def noisy_pixels(image: Any) -> torch.Tensor:
    return pixels(image) * torch.rand(1)


def minus(label: int) -> int:
    return -label


def size_of(data: bytes) -> torch.Tensor:
    return torch.tensor([len(data), zlib.crc32(data)])


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def with_noise(samples: list[Any]) -> Any:
    return torch.rand(1), random.random(), samples


def only_even(samples: list[Any]) -> Any:
    if len(samples) % 2:
        raise OverflowError("an odd batch")
    return torch.utils.data.default_collate(samples)


def set_up(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = 10 + worker  # type: ignore[attr-defined]
    torch.rand(1)


# --- samplers -----------------------------------------------------------------------------------


class Epochs(Sampler[int]):
    """Shuffled by a seed and a count of its own epochs."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = np.random.default_rng(self.seed + self.epoch).permutation(self.size)
        yield from order.tolist()


class Foreseeable(Epochs):
    """A sampler whose copy may be run ahead."""

    foreseeable = True


class Sharing(Epochs):
    """Draws one by one from a shared generator, or from torch's."""

    def __init__(self, size: int, generator: torch.Generator | None = None) -> None:
        super().__init__(size)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, (1,), generator=self.generator))


class Uneven(Epochs):
    """Batches of 1, 2, 3, ... samples."""

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        order = list(super().__iter__())
        first, size = 0, 1
        while first < self.size:
            yield order[first : first + size]
            first, size = first + size, size + 1

    def __len__(self) -> int:
        return int(np.ceil((np.sqrt(8 * self.size + 1) - 1) / 2))
