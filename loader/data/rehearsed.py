"""Datasets of a rehearsal: the rows that a memory keeps, and new data with these rows behind it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, get_worker_info

from creel.errors import ConfigError
from creel.loader.data.user_code.protected import length
from creel.policies.arrays import Ints


class MemoryRows(Dataset[Any]):
    """What a memory keeps: row k is sample `index[k]` of `datasets[part[k]]`.

    Attributes:
        datasets: those that rows are of, without torch's Subsets around them.
        part: (k,) position in `datasets`.
        index: (k,) number of the sample there.
        added: for each of `datasets` what was added, as a person's code knows it.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        part: NDArray[np.int32],
        index: Ints,
        added: Sequence[Any] | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.part, self.index = part, index
        self.added = self.datasets if added is None else list(added)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: Any) -> Any:
        row = operator.index(row)
        part = self.part[row]
        with own_dataset(self.added[part]):
            return self.datasets[part][int(self.index[row])]

    def __getitems__(self, rows: list[Any]) -> list[Any]:
        part, index = self.places(np.asarray(rows, np.int64))
        return read(self.datasets, self.added, part.tolist(), index.tolist())

    def places(self, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return where (n,) rows are: positions in `datasets`, and numbers there."""
        return self.part[rows], self.index[rows]

    def over(self, datasets: Sequence[Any]) -> MemoryRows:
        """Return the same rows of copies of `datasets`."""
        return MemoryRows(datasets, self.part, self.index)


class Rehearsed(Dataset[Any]):
    """New data, with the rows of a memory behind it: row k has the number `first + k`.

    Its length is that of the new data, so samplers made for it draw new samples only. Its
    attributes are those of the new data, also where they are assigned, but for `_creel_rows`.
    """

    _creel_rows: RehearsedRows

    def __init__(self, new: Any, kept: MemoryRows) -> None:
        """Put the rows behind the new data, as it is now.

        Raises:
            ConfigError: the new data has no length.
        """
        vars(self)["_creel_rows"] = RehearsedRows(new, kept, length_of(new))

    def __len__(self) -> int:
        new, _, first = self._creel_rows
        if len(new) != first:
            raise ConfigError(
                f"the dataset had {first} samples when its rehearsal began, and has"
                f" {len(new)} now: make another DataLoader"
            )
        return first

    def __getitem__(self, number: Any) -> Any:
        new, kept, first = self._creel_rows
        if type(number) is int and number >= first:
            return kept[number - first]
        with own_dataset(new):
            return new[number]

    def __getitems__(self, numbers: list[Any]) -> list[Any]:
        new, kept, first = self._creel_rows
        parts, inside = [len(kept.datasets)] * len(numbers), list(numbers)
        for at, number in enumerate(numbers):
            if type(number) is int and number >= first:
                parts[at] = int(kept.part[number - first])
                inside[at] = int(kept.index[number - first])
        return read([*kept.datasets, new], [*kept.added, new], parts, inside)

    def __getattr__(self, name: str) -> Any:
        if name == "_creel_rows" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._creel_rows.new, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._creel_rows.new, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._creel_rows.new, name)

    def __getstate__(self) -> RehearsedRows:
        return self._creel_rows

    def __setstate__(self, state: RehearsedRows) -> None:
        vars(self)["_creel_rows"] = state


class RehearsedRows(NamedTuple):
    """What a `Rehearsed` is made of; `first`: the number of its first row."""

    new: Any
    kept: MemoryRows
    first: int

    @property
    def datasets(self) -> list[Any]:
        """The datasets that samples are of; the old ones first, whose objects then come first."""
        return [*self.kept.datasets, self.new]

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


def placed(dataset: object) -> MemoryRows | RehearsedRows | None:
    """Return where the samples of a dataset with rows of a memory are; None for other datasets."""
    if type(dataset) is Rehearsed:
        return dataset._creel_rows  # noqa: SLF001  its own module
    return dataset if isinstance(dataset, MemoryRows) else None


def own_datasets(dataset: Any) -> list[Any]:
    """Return the datasets that a person's code knows, each once, the new data last.

    Several Subsets of one dataset count once: what is set up in one worker for one of them holds
    for all.
    """
    where = placed(dataset)
    if where is None:
        return [dataset]
    kept, new = (where, []) if isinstance(where, MemoryRows) else (where.kept, [where.new])
    base = [without_subsets(dataset) for dataset in new]
    pairs = zip(kept.datasets, kept.added, strict=True)
    old = [added for dataset, added in pairs if not any(dataset is known for known in base)]
    return [part for dataset in (*old, *new) for part in own_datasets(dataset)]


def without_subsets(dataset: Any) -> Any:
    """Return the dataset below torch's own Subsets."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


@contextmanager
def own_dataset(dataset: Any) -> Iterator[None]:
    """Let `get_worker_info().dataset` be this one meanwhile, in a worker."""
    info = get_worker_info()
    if info is None or info.dataset is dataset:
        yield
        return
    before = info.dataset
    object.__setattr__(info, "dataset", dataset)  # torch's lets no one set it
    try:
        yield
    finally:
        object.__setattr__(info, "dataset", before)


def read(
    datasets: Sequence[Any], added: Sequence[Any], parts: Sequence[int], numbers: Sequence[Any]
) -> list[Any]:
    """Read samples in order, as torch's fetcher reads those of one dataset.

    Args:
        datasets: to read from.
        added: each as a person's code knows it.
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
        dataset = datasets[part]
        with own_dataset(added[part]):
            many = getattr(dataset, "__getitems__", None)
            several = list(many(wanted)) if many else [dataset[number] for number in wanted]
        if len(several) != len(wanted):
            kind, n = type(dataset).__name__, len(several)
            raise ValueError(f"{kind}.__getitems__ returned {n} samples of {len(wanted)}")
        samples += several
    return samples


def length_of(dataset: Any) -> int:
    """Return the length of a map-style dataset.

    Raises:
        ConfigError: it has none, or its `__len__` raises anything.
    """
    try:
        return len(dataset)
    except Exception as e:
        raise ConfigError(f"rehearsal needs a dataset with a length: {e}") from e


def new_data(dataset: Any) -> Any:
    """Return the new data of a `Rehearsed`; any other dataset unchanged."""
    where = placed(dataset)
    return where.new if isinstance(where, RehearsedRows) else dataset


def span_of(dataset: Any, number: int) -> tuple[int, int] | None:
    """Return (n, first) of the samples that may take the place of this one: new data, or rows.

    None: the dataset has no length, or none that counts samples.
    """
    where = placed(dataset)
    if isinstance(where, RehearsedRows):
        n, first = (where.first, 0) if number < where.first else (len(where.kept), where.first)
    else:
        n, first = length(dataset) or 0, 0
    return (n, first) if n > 0 else None


def numbers_of(dataset: Any) -> int:
    """Return how many numbers of samples a dataset has, those of a memory's rows included."""
    where = placed(dataset)
    return len(dataset) + (len(where.kept) if isinstance(where, RehearsedRows) else 0)
