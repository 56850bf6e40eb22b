"""The text of random training programs, each drawn from a seed.

A program uses the parts of `userland`, so that it can be read, repeated and shortened by hand. It
keeps to the conditions of creel's promises (docs/datasets.md): nothing changes during an epoch.

Statements that change something between two epochs are templates: {k} is a number, {i} and {j} are
samples, {some} is a list of samples, {how} says how a file is written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stress.userland import HAS_IMAGES

HEADER = """\
import os, random
import numpy as np
import torch
from torch.utils.data import *
import creel
from stress.userland import *
"""
#: Memory for decoded samples: for all, for some, for none.
LIMITS = ("'auto'", "'1MiB'", "'1MiB'", 4096 + 1500, "'9KiB'", 0)
SETTINGS = ["settings.OFFSET = {k}", "settings.Settings.factor = {k}"]
HOW = ("in place", "times put back", "renamed")
OPTIONS = (
    *(None,) * 5,
    {"loader.direct": "never"},
    {"loader.direct": "auto"},
    {"loader.slots": 1},
    {"loader.max_leased": 1},
    {"loader.wait_s": 0.05},
    False,
)


class Order(NamedTuple):
    """A loader's argument, with {d} and {n} for the dataset and its length."""

    argument: str = ""
    resumable: bool = True  # another loader can continue in the middle
    drawn: bool = False  # whether random numbers are drawn
    changes: tuple[str, ...] = ()


ORDERS = (
    Order(),
    *(Order("shuffle=True", drawn=True),) * 3,
    Order("sampler=RandomSampler({d}, num_samples={n} // 2 + 1, generator=generator)", drawn=True),
    Order(
        "sampler=RandomSampler({d}, True, {n} + 3, generator=generator)",
        drawn=True,
        changes=("loader.sampler.replacement = not loader.sampler.replacement",),
    ),
    Order(
        "sampler=SubsetRandomSampler(range(0, {n}, 2), generator=generator)",
        drawn=True,
        changes=("loader.sampler.indices = {some}",),
    ),
    Order(
        "sampler=WeightedRandomSampler(torch.ones({n}), {n} + 2, generator=generator)",
        drawn=True,
        changes=("loader.sampler.weights = torch.rand({n}, dtype=torch.float64)",),
    ),
    *(
        Order(
            f"sampler=DistributedSampler({{d}}, 2, 1, seed=3, drop_last={drop})",
            changes=("loader.sampler.set_epoch({k})",) * 3,
        )
        for drop in (True, False)
    ),
    Order("sampler=list(range({n}))[::-2]"),
    Order("sampler=Epochs({n}, 5)", False, changes=("loader.sampler.seed = {k}",)),
    Order("sampler=Foreseeable({n}, 6)", False, changes=("loader.sampler.seed = {k}",)),
    Order("sampler=Sharing({n}, generator)", False),
    Order(
        "batch_sampler=BatchSampler(RandomSampler({d}, generator=generator), 4, False)",
        drawn=True,
        changes=("loader.batch_sampler.batch_size = 3", "loader.batch_sampler.drop_last = True"),
    ),
    Order("batch_sampler=Uneven({n}, 8)", False),
    Order("batch_sampler=[[0, {n} - 1], [{n} // 2]]", False),
)


@dataclass
class Data:
    """A dataset of a program: its variable, and what the rest of the program must know of it."""

    name: str
    size: int
    alike: bool = True  # torch can collate its samples
    steady: bool = True  # a sample depends on nothing that changes within an epoch
    fresh: bool = True  # no two samples share memory with each other or with the dataset
    wrapped: bool = False
    changes: list[str] = field(default_factory=list)


class Program:
    """Draws one program; `text` is the result."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lines: list[str] = []
        self._names = 0
        self._n = self._of(1, 6, 13, 24, 24, 40)
        daemon = self._of("large", "large", "large", "small", "none")
        self._say(f"begin({seed}, {daemon!r}, {self._of('never', 'auto')!r})")
        data = self._tree()
        order = self._of(*ORDERS) if data.size else Order(resumable=False)
        manner = self._loader(data, order)
        self._epochs(data, manner)
        self.text = HEADER + "\n".join(self._lines) + "\n"

    # --- drawing --------------------------------------------------------------------------------

    def _of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _maybe(self, argument: str, *values: object) -> str:
        """Return an argument with one of the values, or half of the time nothing."""
        return f", {argument}={self._of(*values)}" if self._chance(0.5) else ""

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _assign(self, expression: str) -> str:
        """Assign to a new variable; return its name."""
        self._names += 1
        self._say(f"d{self._names} = {expression}")
        return f"d{self._names}"

    def _change(self, data: Data) -> None:
        """Write some statements between two epochs."""
        for template in self._random.sample(data.changes, self._of(0, 1, 1, 2, 4)):
            i, j, *some = (self._random.randrange(self._n) for _ in range(7))
            k, text = self._random.randrange(2, 1000), repr(self._of(*HOW))
            self._say(template.format(i=i, j=j, some=some, k=k, how=text, n=data.size))

    # --- datasets -------------------------------------------------------------------------------

    def _tree(self) -> Data:
        """Write a dataset, mostly a leaf, or one around others."""
        shape = self._of(*("leaf",) * 6, "subset", "concat", "stack", "around", "stream")
        if shape == "stream":
            files, changes = self._files(alike=False)
            return Data(self._assign(f"Streamed({files})"), 0, steady=False, changes=changes)
        data = self._leaf()
        if shape == "subset":
            data.size = self._of(1, 9, self._n)
            indices = [self._random.randrange(self._n) for _ in range(data.size)]
            data.name = self._assign(f"Subset({data.name}, {indices})")
            data.changes += [f"{data.name}.indices[0] = {{i}}", f"{data.name}.indices = {{some}}"]
        elif shape in ("concat", "stack"):
            self._combine(data, self._leaf(), shape)
        elif shape == "around":
            data.name, data.alike = self._assign(f"Around({data.name}, beside)"), False
            self._wrap(data)
        return data

    def _combine(self, data: Data, other: Data, shape: str) -> None:
        both = f"{data.name}, {other.name}"
        data.alike = shape == "stack" and data.alike and other.alike
        data.steady, data.fresh = data.steady and other.steady, data.fresh and other.fresh
        if shape == "stack":
            data.name = self._assign(f"StackDataset({both})")
        else:
            data.name, data.size = self._assign(f"ConcatDataset([{both}])"), 2 * self._n
        data.wrapped = False
        data.changes += [
            *other.changes,
            f"{data.name}.datasets = type({data.name}.datasets)(reversed({data.name}.datasets))",
        ]

    def _leaf(self) -> Data:
        own = (self._own,) * 3 + (self._kept,)
        images = (self._images,) if HAS_IMAGES else ()
        data: Data = self._of(self._file_dataset, self._records, self._tensors, *own, *images)()
        return data

    def _wrap(self, data: Data) -> None:
        if self._chance(0.6) and not data.wrapped:
            data.name, data.wrapped = self._assign(f"wrap({data.name})"), True

    def _files(self, *, alike: bool) -> tuple[str, list[str]]:
        """Write files of a folder; return the variable with their paths, and possible changes."""
        base = self._of(16, 700, 5000, 70_000)
        sizes = f"[{base}] * {self._n}" if alike else f"range({base}, {base + 9 * self._n}, 9)"
        files = self._assign(f"make_files('files{self._names}', {sizes})")
        return files, self._file_changes(files)

    def _file_changes(self, files: str, data: str = "None") -> list[str]:
        return [
            *[f"rewrite({files}[{{i}}], {data}, {{how}})"] * 3,
            f"rewrite({files}[{{i}}], {{k}}, {{how}})",
            f"for path in {files}: rewrite(path, {data}, {{how}})",
            f"touch({files}[{{i}}])",
            f"remove({files}[{{i}}])",
            *SETTINGS,
        ]

    def _labels(self) -> str:
        n = self._n
        return self._maybe("labels", f"torch.arange({n})", f"list(range({n}))", f"['ab'] * {n}")

    def _file_dataset(self) -> Data:
        alike = self._chance(0.6)
        files, changes = self._files(alike=alike)
        decode = self._maybe("decode", "size_of")
        if decode and self._chance(0.6):
            decode += f", **keeping({self._of(*LIMITS)})"
        more = self._maybe("transform", "widen", "in_place", "as_dict", "halves", "noise")
        more += self._labels() + self._maybe("nbytes", "True")
        name = self._assign(f"creel.FileDataset({files}{decode}{more})")
        changes += [
            f"{name}.transform = widen",
            f"{name}.labels = torch.arange({self._n}) + {{k}}",
        ]
        alike = alike or bool(decode)
        data = Data(name, self._n, alike, steady="noise" not in more, changes=changes)
        if self._chance(0.2):
            self._wrap(data)
        return data

    def _records(self) -> Data:
        kind, nbytes = self._of(
            ("'uint8', 16", 16), ("'int32', (2, 8)", 64), ("'int16', 600", 1200)
        )
        file = f"'records{self._names}.bin'"
        self._say(f"rewrite({file}, {nbytes * self._n})")
        functions = ("widen", "in_place", "halves")
        more = self._maybe("transform", *functions, "noise")
        more = more or self._maybe("batch_transform", *functions)
        more += self._maybe("to", "torch.int64", "torch.float64", "torch.bfloat16")
        name = self._assign(f"creel.RecordDataset({file}, {kind}{more}{self._labels()})")
        changes = [
            *[f"rewrite({file}, None, {{how}})"] * 4,
            f"rewrite({file}, {nbytes} * {{i}}, {{how}})",
            f"touch({file})",
            f"remove({file})",
            f"{name}.labels = torch.arange({self._n}) + {{k}}",
            *SETTINGS,
        ]
        return Data(name, self._n, steady="noise" not in more, changes=changes)

    def _images(self) -> Data:
        folder = f"'images{self._names}'"
        files = self._assign(f"make_images({folder}, {self._n})")
        kind = self._of("ImageFolder", "ImageFolder", "TorchImageFolder")
        transform = self._of("pixels", "pixels", "noisy_pixels")
        keeping = f", **keeping({self._of(*LIMITS)})" if kind == "ImageFolder" else ""
        name = self._assign(f"{kind}({folder}, transform={transform}{keeping})")
        changes = self._file_changes(files, "image()")
        changes += [
            f"{name}.samples = list({name}.samples)[::-1]",
            f"{name}.target_transform = minus",
        ]
        return Data(name, self._n, steady=transform == "pixels", changes=changes)

    def _kept(self) -> Data:
        files, changes = self._files(alike=False)
        way = self._of("open", "text", "mapped", "descriptor", "memmap", "fromfile", "creel.open")
        config = self._maybe("config", "'config'")
        self._say("rewrite('config', 5)")
        limit = self._of(*LIMITS)
        name = self._assign(f"kept(Reads({files}, {way!r}{config}), {limit})")
        if self._chance(0.5):
            name = self._assign(f"creel.datasets.Transformed({name}, in_place)")
        changes = [change for change in changes if change not in SETTINGS]
        changes += ["rewrite('config', {k})"] * (3 if config else 0)
        data = Data(name, self._n, changes=changes)
        if self._chance(0.3):
            self._wrap(data)
        return data

    def _own(self) -> Data:
        files, changes = self._files(alike=False)
        kind = self._of("Own", "Own", "Declared", "Declared", "Counted", "Several")
        own = self._of("open", "text", "mapped", "descriptor", "memmap", "fromfile")
        way = self._of(own, "creel.open", "creel.read")
        more = self._maybe("transform", "widen", "in_place", "as_dict", "noise")
        labels = self._maybe("labels", f"torch.arange({self._n})")
        config = self._maybe("config", "'config'")
        self._say("rewrite('config', 5)")
        name = self._assign(f"{kind}({files}, {way!r}{more}{labels}{config})")
        changes += [
            *["rewrite('config', {k})"] * (3 if config else 0),
            *[f"{name}.labels.add_({{k}})"] * bool(labels),
            f"{name}.scale = {{k}}",
            f"{name}.paths.reverse()",
            f"{name}.paths[{{i}}] = {files}[{{j}}]",
            f"{name}.transform = in_place",
            "Own.bias = {k}",
        ]
        steady = "noise" not in more and kind != "Counted"
        data = Data(name, self._n, steady=steady, fresh=not labels, changes=changes)
        self._wrap(data)
        return data

    def _tensors(self) -> Data:
        name = self._assign(f"TensorDataset(torch.arange({self._n}), torch.rand({self._n}, 3))")
        return Data(name, self._n, fresh=False, changes=[f"{name}.tensors[0].add_({{k}})"])

    # --- loader and training --------------------------------------------------------------------

    def _loader(self, data: Data, order: Order) -> dict[str, bool]:
        """Write `make`; return what may be done with its loaders."""
        workers = self._of(0, 0, 1, 2, 2, 3)
        batched = "batch_sampler" in order.argument
        batch_size = self._of(1, 3, 4, 7, None)
        alone = batch_size is None and not batched
        if alone:
            collate = self._of("", "as_list")
        else:
            plain = ("", "", "", "only_even") if data.alike else ()
            collate = self._of(*plain, "as_list", "with_noise")
        steady = data.steady and collate != "with_noise"
        in_order = not workers or not steady or self._chance(0.8)
        seeded = self._chance(0.5)
        foreseen = "Epochs" in order.argument and self._chance(0.3)
        options = {"loader.foresee": True} if foreseen else self._of(*OPTIONS)
        more = f", {order.argument.format(d=data.name, n=data.size)}" if order.argument else ""
        more += "" if batched else f", batch_size={batch_size}"
        more += "" if batched or alone else self._maybe("drop_last", True)
        more += f", collate_fn={collate}" if collate else ""
        more += ", generator=generator" if seeded else ""
        more += f", options={options}" if options is not None else ""
        if workers:
            spawned = self._chance(0.04)
            more += f", num_workers={1 if spawned else workers}"
            more += ", multiprocessing_context='spawn'" if spawned else ""
            more += "" if in_order else ", in_order=False"
            more += self._maybe("persistent_workers", True) + self._maybe("prefetch_factor", 1, 3)
            more += self._maybe("timeout", 60)
            more += self._maybe("worker_init_fn", "set_up") if in_order else ""
        kind = "TorchLoader" if data.wrapped and self._chance(0.35) else "Loader"
        generator = "torch.Generator().manual_seed(7)" if seeded else None
        self._say(f"def make():\n    generator = {generator}\n    return {kind}({data.name}{more})")
        self._say("loader = make()")
        can = kind == "Loader" and order.resumable and steady and "set_up" not in more and in_order
        resumed = can and self._chance(0.5)
        data.changes += [
            *(() if resumed else order.changes * 4),  # another sampler cannot continue
            *(("loader.generator.manual_seed({k})",) if seeded else ()),
            "torch.manual_seed({k})",
            "torch.rand({k}); np.random.rand(2); random.random()",
            "os.environ['CREEL_LOADER__DIRECT'] = 'never'",
            "os.environ['CREEL_DISABLE'] = str({k} % 2)",
            "loader = make()",
        ]
        return {
            "in order": in_order,
            "resumed": resumed,
            "goes on": seeded or not order.drawn,
            "workers stay": "persistent_workers=True" in more,
            # Batches that torch's workers share by reference can be written to at any time.
            "writes": data.fresh or (not alone and collate in {"", "only_even"}),
        }

    def _epochs(self, data: Data, may: dict[str, bool]) -> None:
        epochs = self._of(0, 1) if may["resumed"] else self._of(2, 3, 3, 4)
        reading = False  # whether workers may still read for an epoch that was left
        for number in range(epochs):
            if number and not reading:
                self._change(data)
            if not may["in order"]:
                self._say("epoch(loader, ordered=False)")
                continue
            more = f", stop={self._of(*range(6))}" if self._chance(0.2) else ""
            reading = bool(more) and may["workers stay"]
            more += ", iterators=2" if self._chance(0.1) else ""
            more += ", keep=True" if self._chance(0.2) else ""
            more += ", write=True" if may["writes"] and self._chance(0.15) else ""
            self._say(f"epoch(loader{more})")
        if may["resumed"]:
            # torch's persistent workers do not see a change, those of a resumed loader do.
            if not (epochs and may["workers stay"]):
                self._change(data)
            self._say("os.environ.pop('CREEL_DISABLE', None)")
            self._say(f"interrupted(loader, make, {self._of(*range(7))}, {int(may['goes on'])})")
