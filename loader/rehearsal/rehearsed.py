"""Datasets of a rehearsal: the rows that a memory keeps, and new data with these rows behind it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.errors import ConfigError
from creel.policies.arrays import Ints


class KeptRows(Dataset[Any]):
    """What a memory keeps: row k is sample `index[k]` of `datasets[part[k]]`.

    Attributes:
        datasets: those that rows are of, without torch's Subsets around them.
        part: (k,) position in `datasets`.
        index: (k,) number of the sample there.
    """

    def __init__(self, datasets: Sequence[Any], part: NDArray[np.int32], index: Ints) -> None:
        self.datasets = list(datasets)
        self.part, self.index = part, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: Any) -> Any:
        row = operator.index(row)
        return self.datasets[self.part[row]][int(self.index[row])]

    def __getitems__(self, rows: list[Any]) -> list[Any]:
        part, index = self.places(np.asarray(rows, np.int64))
        return read(self.datasets, part.tolist(), index.tolist())

    def places(self, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return where (n,) rows are: positions in `datasets`, and numbers there."""
        return self.part[rows], self.index[rows]

    def over(self, datasets: Sequence[Any]) -> KeptRows:
        """Return the same rows of copies of `datasets`."""
        return KeptRows(datasets, self.part, self.index)


class Rehearsed(Dataset[Any]):
    """New data, with the rows of a memory behind it: row k has the number `first + k`.

    Its length is that of the new data, so samplers made for it draw new samples only. Its other
    attributes are those of the new data.
    """

    def __init__(self, new: Any, kept: KeptRows) -> None:
        """Put the rows behind the new data, as it is now.

        Raises:
            ConfigError: the new data has no length.
        """
        self.new, self.kept = new, kept
        self.first = length_of(new)

    @property
    def datasets(self) -> list[Any]:
        """The datasets that samples are of; the old ones first, whose objects then come first."""
        return [*self.kept.datasets, self.new]

    def __len__(self) -> int:
        if len(self.new) != self.first:
            raise ConfigError(
                f"the dataset had {self.first} samples when its rehearsal began, and has"
                f" {len(self.new)} now: make another DataLoader"
            )
        return self.first

    def __getitem__(self, number: Any) -> Any:
        if type(number) is int and number >= self.first:
            return self.kept[number - self.first]
        return self.new[number]

    def __getitems__(self, numbers: list[Any]) -> list[Any]:
        parts, inside = [len(self.kept.datasets)] * len(numbers), list(numbers)
        for at, number in enumerate(numbers):
            if type(number) is int and number >= self.first:
                parts[at] = int(self.kept.part[number - self.first])
                inside[at] = int(self.kept.index[number - self.first])
        return read(self.datasets, parts, inside)

    def places(self, numbers: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return where (n,) samples are: positions in `datasets`, and numbers there."""
        which = np.full(len(numbers), len(self.kept.datasets), np.int32)
        inside, old = numbers.copy(), numbers >= self.first
        which[old], inside[old] = self.kept.places(numbers[old] - self.first)
        return which, inside

    def over(self, datasets: Sequence[Any]) -> Rehearsed:
        """Return the same samples of copies of `datasets`."""
        *old, new = datasets
        return Rehearsed(new, self.kept.over(old))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "new" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.new, name)


def read(datasets: Sequence[Any], parts: Sequence[int], numbers: Sequence[Any]) -> list[Any]:
    """Read samples in order, as torch's fetcher reads those of one dataset.

    Args:
        datasets: to read from.
        parts: (n,) the position in `datasets` of each sample.
        numbers: (n,) its number there.

    Returns:
        The (n,) samples. Consecutive ones of a dataset that has `__getitems__` are read by one
        call.

    Raises:
        ValueError: such a call returned another number of samples.
    """
    samples: list[Any] = []
    for part, run in itertools.groupby(zip(parts, numbers, strict=True), operator.itemgetter(0)):
        wanted = [number for _, number in run]
        many = getattr(datasets[part], "__getitems__", None)
        found = list(many(wanted)) if many else [datasets[part][number] for number in wanted]
        if len(found) != len(wanted):
            kind = type(datasets[part]).__name__
            raise ValueError(f"{kind}.__getitems__ returned {len(found)} samples of {len(wanted)}")
        samples += found
    return samples


def length_of(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        ConfigError: it has none.
    """
    try:
        return len(dataset)
    except TypeError as e:
        raise ConfigError(f"rehearsal needs a dataset with a length: {e}") from e


def new_data(dataset: Any) -> Any:
    """Return the new data of a `Rehearsed`; any other dataset unchanged."""
    return dataset.new if type(dataset) is Rehearsed else dataset


def span_of(dataset: Any, number: int) -> tuple[int, int]:
    """Return (n, first) of the samples that may take the place of this one: new data, or rows."""
    if type(dataset) is not Rehearsed:
        return len(dataset), 0
    new = number < dataset.first
    return (dataset.first, 0) if new else (len(dataset.kept), dataset.first)


def numbers_of(dataset: Any) -> int:
    """Return how many numbers of samples a dataset has, those of a memory's rows included."""
    return len(dataset) + (len(dataset.kept) if type(dataset) is Rehearsed else 0)
