"""The text of random training programs, each drawn from a seed.

A program is made of what `userland` has, so that it can be read, repeated and cut down by hand. It
keeps to what creel promises (docs/datasets.md): nothing changes while an epoch is under way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stress import userland

HEADER = """\
import os, random
import numpy as np
import torch
from torch.utils.data import *
import creel
from stress.userland import *
"""


@dataclass
class Data:
    """A dataset of a program: the variable that has it, and what the rest must know of it."""

    name: str
    size: int
    alike: bool = True  # torch can collate its samples
    steady: bool = True  # a sample depends on nothing that changes within an epoch
    fresh: bool = True  # no two samples share memory with each other or with the dataset
    wrapped: bool = False
    iterable: bool = False
    changes: list[Callable[[], str]] = field(default_factory=list)


@dataclass
class Order:
    """How a loader is told its order."""

    argument: str = ""
    batched: bool = False  # no batch_size beside it
    resumable: bool = True  # creel can take it over in the middle
    drawn: bool = False  # by random numbers
    changes: list[Callable[[], str]] = field(default_factory=list)


class Program:
    """Draws one program; `text` is the result."""

    def __init__(self, seed: int) -> None:
        self._r = random.Random(seed)
        self._lines: list[str] = []
        self._names = 0
        self._n = self._of(1, 6, 13, 24, 24, 40)
        daemon = self._of("large", "large", "large", "small", "none")
        self._say(f"begin({seed}, {daemon!r})")
        data = self._tree()
        order = self._order(data)
        in_order = self._loader(data, order)
        self._epochs(data, in_order)
        self.text = HEADER + "\n".join(self._lines) + "\n"

    # --- drawing --------------------------------------------------------------------------------

    def _of(self, *choices: Any) -> Any:
        return self._r.choice(choices)

    def _chance(self, share: float) -> bool:
        return self._r.random() < share

    def _some(self) -> int:
        """The number of a sample."""
        return self._r.randrange(self._n)

    def _number(self) -> int:
        return self._r.randrange(2, 1000)

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def _call(self, function: str, *given: str) -> str:
        """A call with those of the arguments that are not empty."""
        return f"{function}({', '.join(part for part in given if part)})"

    def _maybe(self, argument: str, *values: str) -> str:
        """An argument with one of the values, or half the time none."""
        return f"{argument}={self._of(*values)}" if self._chance(0.5) else ""

    # --- datasets -------------------------------------------------------------------------------

    def _tree(self) -> Data:
        """A dataset, mostly a leaf, or some around others."""
        shape = self._of(*("leaf",) * 6, "subset", "concat", "stack", "around", "stream")
        if shape == "stream":
            files, changes = self._files(alike=False)
            name = self._assign(f"Streamed({files})")
            return Data(name, 0, steady=False, iterable=True, changes=changes)
        inner = self._leaf()
        if shape == "subset":
            return self._subset(inner)
        if shape in ("concat", "stack"):
            return self._both(inner, self._leaf(), shape)
        if shape == "around":
            inner.name, inner.alike = self._assign(f"Around({inner.name}, beside)"), False
            return inner if inner.wrapped else self._wrapped(inner)
        return inner

    def _assign(self, expression: str) -> str:
        name = self._name("d")
        self._say(f"{name} = {expression}")
        return name

    def _subset(self, inner: Data) -> Data:
        indices = [self._some() for _ in range(self._of(1, 9, self._n))]
        name = self._assign(f"Subset({inner.name}, {indices})")
        changes = [
            lambda: f"{name}.indices[0] = {self._some()}",
            lambda: f"{name}.indices = {[self._some() for _ in indices]}",
        ]
        outer = Data(name, len(indices), inner.alike, inner.steady, inner.fresh)
        outer.changes = [*inner.changes, *changes]
        return outer

    def _both(self, one: Data, other: Data, shape: str) -> Data:
        if shape == "concat":
            name = self._assign(f"ConcatDataset([{one.name}, {other.name}])")
            turn = f"{name}.datasets.reverse()"
        else:
            name = self._assign(f"StackDataset({one.name}, {other.name})")
            turn = f"{name}.datasets = {name}.datasets[::-1]"
        both = Data(name, one.size + (other.size if shape == "concat" else 0))
        both.alike = shape == "stack" and one.alike and other.alike
        both.steady = one.steady and other.steady
        both.fresh = one.fresh and other.fresh
        both.changes = [*one.changes, *other.changes, lambda: turn]
        return both

    def _leaf(self) -> Data:
        kinds = [self._file_dataset, self._records, self._own, self._own, self._own, self._tensors]
        kinds += [self._images] if userland.HAS_IMAGES else []
        return self._r.choice(kinds)()

    def _wrapped(self, data: Data) -> Data:
        if self._chance(0.6):
            data.name, data.wrapped = self._assign(f"wrap({data.name})"), True
        return data

    def _files(self, *, alike: bool) -> tuple[str, list[Callable[[], str]]]:
        """Files of a folder: the variable with their paths, and what may happen to them."""
        files, base = self._name("f"), self._of(16, 700, 5000, 70_000)
        sizes = f"[{base}] * {self._n}" if alike else f"range({base}, {base + 9 * self._n}, 9)"
        self._say(f"{files} = make_files({files!r}, {sizes})")
        return files, self._file_changes(files)

    def _file_changes(self, files: str, data: str = "None") -> list[Callable[[], str]]:

        def path() -> str:
            return f"{files}[{self._some()}]"

        return [
            *[lambda: f"rewrite({path()}, {data}, {self._how()})"] * 3,
            lambda: f"rewrite({path()}, {self._number()}, {self._how()})",
            lambda: f"for path in {files}: rewrite(path, {data}, {self._how()})",
            lambda: f"touch({path()})",
            lambda: f"remove({path()})",
        ]

    def _how(self) -> str:
        return repr(self._of("in place", "times put back", "renamed"))

    def _labels(self) -> str:
        n = self._n
        return str(self._of(f"torch.arange({n})", f"list(range({n}))", f"list('ab' * {n})[:{n}]"))

    def _settings(self) -> list[Callable[[], str]]:
        return [
            lambda: f"settings.OFFSET = {self._number()}",
            lambda: f"settings.Settings.factor = {self._number()}",
        ]

    def _file_dataset(self) -> Data:
        alike = self._chance(0.6)
        files, changes = self._files(alike=alike)
        decode = self._maybe("decode", "size_of")
        transform = self._maybe("transform", "widen", "in_place", "as_dict", "halves", "noise")
        labels = self._maybe("labels", self._labels())
        nbytes = self._maybe("nbytes", "True")
        name = self._assign(
            self._call("creel.FileDataset", files, decode, transform, labels, nbytes)
        )
        changes += [
            *self._settings(),
            lambda: f"{name}.transform = {self._of('widen', 'in_place', 'None')}",
            lambda: f"{name}.labels = torch.arange({self._n}) + {self._number()}",
        ]
        steady = "noise" not in transform
        data = Data(name, self._n, alike or bool(decode), steady, changes=changes)
        return self._wrapped(data) if self._chance(0.2) else data

    def _records(self) -> Data:
        dtype, shape, nbytes = self._of(
            ("uint8", 16, 16), ("int32", (2, 8), 64), ("int16", 600, 1200)
        )
        file = f"{self._name('r')}.bin"
        self._say(f"rewrite({file!r}, {nbytes * self._n})")
        kinds = ("widen", "in_place", "halves")
        each = self._maybe("transform", *kinds, "noise")
        batch = "" if each else self._maybe("batch_transform", *kinds)
        to = self._maybe("to", "torch.int64", "torch.float64", "torch.bfloat16")
        labels = self._maybe("labels", self._labels())
        name = self._assign(
            self._call(
                "creel.RecordDataset", f"{file!r}, {dtype!r}, {shape}", to, each, batch, labels
            )
        )
        changes: list[Callable[[], str]] = [
            *[lambda: f"rewrite({file!r}, None, {self._how()})"] * 4,
            lambda: f"rewrite({file!r}, {nbytes * self._some()}, {self._how()})",
            lambda: f"{name}.labels = torch.arange({self._n}) + {self._number()}",
            lambda: f"touch({file!r})",
            lambda: f"remove({file!r})",
            *self._settings(),
        ]
        return Data(name, self._n, steady="noise" not in each, changes=changes)

    def _images(self) -> Data:
        files = self._name("i")
        self._say(f"{files} = make_images({files!r}, {self._n})")
        kind = self._of("ImageFolder", "ImageFolder", "TorchImageFolder")
        transform = self._of("pixels", "pixels", "noisy_pixels")
        name = self._assign(f"{kind}({files!r}, transform={transform})")
        changes = [
            *self._file_changes(files, "image()"),
            *self._settings(),
            lambda: f"{name}.samples = list({name}.samples)[::-1]",
            lambda: f"{name}.target_transform = minus",
        ]
        return Data(name, self._n, steady=transform == "pixels", changes=changes)

    def _own(self) -> Data:
        files, changes = self._files(alike=False)
        kind = self._of("Own", "Own", "Declared", "Declared", "Counted", "Several")
        how = self._of("open", "memmap", "creel.open", "creel.open", "creel.read", "creel.read")
        transform = self._maybe("transform", "widen", "in_place", "as_dict", "noise")
        labels = self._maybe("labels", f"torch.arange({self._n})")
        config = self._maybe("config", "'config'")
        if config:
            self._say("rewrite('config', 5)")
            changes += [lambda: f"rewrite('config', {self._number()})"] * 4
        changes += [lambda: f"{name}.labels.add_({self._number()})"] if labels else []
        name = self._assign(self._call(kind, files, repr(how), transform, labels, config))
        changes += [
            *self._settings(),
            lambda: f"{name}.scale = {self._number()}",
            lambda: f"{name}.paths.reverse()",
            lambda: f"{name}.paths[{self._some()}] = {files}[{self._some()}]",
            lambda: f"{name}.transform = {self._of('widen', 'in_place', 'None')}",
            lambda: f"Own.bias = {self._number()}",
        ]
        steady = "noise" not in transform and kind != "Counted"
        fresh = not labels
        return self._wrapped(Data(name, self._n, steady=steady, fresh=fresh, changes=changes))

    def _tensors(self) -> Data:
        name = self._assign(f"TensorDataset(torch.arange({self._n}), torch.rand({self._n}, 3))")
        changes = [lambda: f"{name}.tensors[0].add_({self._number()})"]
        return Data(name, self._n, fresh=False, changes=changes)

    # --- loader ---------------------------------------------------------------------------------

    def _order(self, data: Data) -> Order:
        d, n, g = data.name, data.size, "generator=generator"
        if data.iterable:
            return Order(resumable=False)
        sampler, batches = "loader.sampler", "loader.batch_sampler"
        shuffled = Order("shuffle=True", drawn=True)
        epochs = Order(f"sampler=Epochs({n}, 5)", resumable=False)
        foreseeable = Order(f"sampler=Foreseeable({n}, 6)", resumable=False)
        epochs.changes = foreseeable.changes = [lambda: f"{sampler}.seed = {self._number()}"]
        replaced = Order(
            f"sampler=RandomSampler({d}, replacement=True, num_samples={n + 3}, {g})", drawn=True
        )
        replaced.changes = [lambda: f"{sampler}.replacement = {n < 5}"]
        part = Order(f"sampler=SubsetRandomSampler(range(0, {n}, 2), {g})", drawn=True)
        part.changes = [lambda: f"{sampler}.indices = {[self._r.randrange(n) for _ in range(5)]}"]
        weighted = Order(
            f"sampler=WeightedRandomSampler(torch.arange(1.0, {n + 1}), {n + 2}, {g})", drawn=True
        )
        weighted.changes = [lambda: f"{sampler}.weights = torch.rand({n}, dtype=torch.float64)"]
        distributed = Order(
            f"sampler=DistributedSampler({d}, 2, 1, seed=3, drop_last={self._chance(0.5)})"
        )
        distributed.changes = [lambda: f"{sampler}.set_epoch({self._number()})"] * 3
        whole = f"RandomSampler({d}, {g}), 4, {self._chance(0.5)}"
        batched = Order(f"batch_sampler=BatchSampler({whole})", batched=True, drawn=True)
        batched.changes = [
            lambda: f"{batches}.batch_size = {self._of(2, 3)}",
            lambda: f"{batches}.drop_last = {self._chance(0.5)}",
        ]
        order: Order = self._of(
            *(shuffled, shuffled, shuffled, epochs, foreseeable, replaced, part, weighted),
            *(distributed, batched, Order()),
            Order(f"sampler=RandomSampler({d}, num_samples={n // 2 + 1}, {g})", drawn=True),
            Order(f"sampler=list(range({n}))[::-2]"),
            Order(f"sampler=Sharing({n}, {self._of('generator', 'None')})", resumable=False),
            Order(f"batch_sampler=Uneven({n}, 8)", batched=True, resumable=False),
            Order(f"batch_sampler=[[0, {n - 1}], [{n // 2}]]", batched=True, resumable=False),
        )
        return order

    def _loader(self, data: Data, order: Order) -> bool:
        """Write `make`; whether batches come in order."""
        workers = self._of(0, 0, 1, 2, 2, 3)
        spawned = workers > 0 and self._chance(0.04)
        foreseen = "Epochs" in order.argument and self._chance(0.3)
        options = self._of(
            *(None,) * 6,
            {"loader.direct": "never"},
            {"loader.direct": "never"},
            {"loader.slots": 1},
            {"loader.max_leased": 1},
            {"loader.wait_s": 0.05},
            False,
        )
        batch_size = self._of(1, 3, 4, 7, None)
        alone = batch_size is None and not order.batched
        collates = ["as_list", "with_noise"] if not data.alike and not alone else []
        collates = collates or ["", "", "", "as_list", "with_noise", "only_even"]
        collate = "as_list" if alone and self._chance(0.5) else self._of(*collates)
        collate = "" if alone and collate != "as_list" else collate
        in_order = not workers or not data.steady or collate == "with_noise" or self._chance(0.8)
        generator = "torch.Generator().manual_seed(7)" if self._chance(0.5) else "None"
        arguments = [
            data.name,
            order.argument,
            "" if order.batched else f"batch_size={batch_size}",
            "" if order.batched or alone else self._maybe("drop_last", "True"),
            f"collate_fn={collate}" if collate else "",
            f"num_workers={1 if spawned else workers}" if workers else "",
            self._maybe("persistent_workers", "True") if workers else "",
            self._maybe("prefetch_factor", "1", "3") if workers else "",
            self._maybe("timeout", "60") if workers else "",
            self._maybe("worker_init_fn", "set_up") if workers and in_order else "",
            "" if in_order else "in_order=False",
            "multiprocessing_context='spawn'" if spawned else "",
            "generator=generator" if generator != "None" else "",
            f"options={ {'loader.foresee': True} if foreseen else options }",
        ]
        kind = "TorchLoader" if data.wrapped and self._chance(0.35) else "Loader"
        self._say("def make():")
        self._say(f"    generator = {generator}")
        self._say(f"    return {self._call(kind, *arguments)}")
        self._say("loader = make()")
        certain = data.steady and collate != "with_noise" and "worker_init_fn" not in str(arguments)
        resumable = kind == "Loader" and order.resumable and certain and in_order
        # What torch's workers give by reference can be written to in the trainer, at any time.
        self._writes = data.fresh or (not alone and collate in {"", "only_even"})
        self._resumed = resumable and self._chance(0.5)
        self._goes_on = not order.drawn or generator != "None"
        data.changes += [] if self._resumed else order.changes * 4  # another sampler cannot go on
        data.changes += self._loader_changes(generator != "None")
        return in_order

    def _loader_changes(self, generator: bool) -> list[Callable[[], str]]:
        changes = [
            lambda: f"loader.generator.manual_seed({self._number()})",
            lambda: f"torch.manual_seed({self._number()})",
            lambda: f"torch.rand({self._number()}); np.random.rand(2); random.random()",
            lambda: f"os.environ['CREEL_LOADER__DIRECT'] = {self._of('never', 'auto')!r}",
            lambda: f"os.environ['CREEL_DISABLE'] = '{self._of(0, 1)}'",
            lambda: "loader = make()",
        ]
        return changes if generator else changes[1:]

    # --- training -------------------------------------------------------------------------------

    def _epochs(self, data: Data, in_order: bool) -> None:
        for number in range(self._of(0, 1) if self._resumed else self._of(2, 3, 3, 4)):
            if number:
                self._change(data)
            self._say(self._call("epoch", "loader", *self._manner(in_order)))
        if self._resumed:
            self._change(data)
            self._say("os.environ.pop('CREEL_DISABLE', None)")
            self._say(f"interrupted(loader, make, {self._r.randrange(7)}, {int(self._goes_on)})")

    def _change(self, data: Data) -> None:
        for change in self._r.sample(data.changes, self._of(0, 1, 1, 2, 4)):
            self._say(change())

    def _manner(self, in_order: bool) -> list[str]:
        if not in_order:
            return ["ordered=False"]
        return [
            f"stop={self._r.randrange(6)}" if self._chance(0.2) else "",
            "iterators=2" if self._chance(0.1) else "",
            "keep=True" if self._chance(0.2) else "",
            "write=True" if self._writes and self._chance(0.15) else "",
        ]
