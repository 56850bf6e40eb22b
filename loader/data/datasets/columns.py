"""Columns of a dataset: addresses, labels and names, as arrays in place of Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from creel.cache.storage.stores.retry import public
from creel.errors import ConfigError
from creel.loader.data.datasets.base import CreelDataset, Sample, position, positions
from creel.policies.arrays import Ints

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose items are made on access; equal to a list of the same items.

    A subclass defines `__len__`, `__iter__` and `_item`.
    """

    def _item(self, i: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(len(self)))]
        return self._item(position(index, len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which are not hashable


class Names(LazySequence[str]):
    """Paths below one root, as one Arrow array: no Python object for each of some 2 million."""

    def __init__(self, prefix: str, names: pa.Array) -> None:
        self.prefix = prefix
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def _item(self, i: int) -> str:
        name: str = self.names[i].as_py()
        return self.prefix + name

    def __iter__(self) -> Iterator[str]:
        # A chunk at a time: fewer calls than one by one, less memory than all.
        for start in range(0, len(self), 4096):
            for name in self.names.slice(start, 4096).to_pylist():
                yield self.prefix + name

    def __repr__(self) -> str:
        return f"<{len(self)} paths below {public(self.prefix) or 'no common root'!r}>"


#: numpy dtypes that default_collate turns into tensors of the same dtype.
_COLLATED = frozenset(map(np.dtype, ("?", *"bBhHiIlefdFD")))


class Labels:
    """One label per sample, stored compactly and returned as given.

    Labels are copied: later changes to the given array, tensor or list have no effect. Numbers in a
    list are returned as Python numbers, numpy and torch rows with their dtype. Anything else
    (strings, tuples) is kept as it is.
    """

    def __init__(self, values: object, size: int) -> None:
        """Raises ConfigError unless there are `size` labels."""
        try:
            count = len(values)  # type: ignore[arg-type]  # checked right here
        except TypeError as e:
            raise ConfigError("labels is a sequence with one label per sample") from e
        if count != size:
            raise ConfigError(f"there are {count} labels for {size} samples")
        self._values = _compact(values)
        self._python = not isinstance(values, (np.ndarray, torch.Tensor))

    @property
    def kind(self) -> tuple[object, ...] | None:
        """How labels are collated; None if default_collate must get them one by one."""
        values = self._values
        if isinstance(values, list):
            return None
        # torch cannot batch numpy's uint64 numbers, and converts other byte orders.
        if isinstance(values, np.ndarray) and values.dtype not in _COLLATED:
            return None
        return str(values.dtype), tuple(values.shape[1:])

    def __getitem__(self, index: int) -> Sample:
        if isinstance(self._values, list):
            return self._values[index]
        if isinstance(self._values, torch.Tensor):
            return self._values[index].clone()
        label = self._values[index]
        return label.item() if self._python else label.copy()

    def collated(self, indices: Ints) -> torch.Tensor:
        """Return labels (n, ...) as default_collate would batch them; requires a `kind`."""
        if isinstance(self._values, torch.Tensor):
            return self._values[torch.from_numpy(indices)]
        return torch.from_numpy(np.asarray(self._values)[indices])


class Labelled(CreelDataset):
    """A dataset whose samples may each have a label."""

    _given_labels: Labels | None = None

    @property
    def labels(self) -> Labels | None:
        """One label per sample: a copy of those given, or assigned later.

        Raises:
            ConfigError: the number assigned is not the number of samples.
        """
        return self._given_labels

    @labels.setter
    def labels(self, labels: object) -> None:
        if labels is not None and not isinstance(labels, Labels):
            labels = Labels(labels, len(self))
        self._given_labels = labels

    def collated_labels(self) -> Callable[[Ints], torch.Tensor]:
        labels, size = self.labels, len(self)
        if labels is None:
            raise NotImplementedError
        return lambda indices: labels.collated(positions(indices, size))


def _compact(values: Any) -> NDArray[Any] | torch.Tensor | list[Sample]:
    """Return a compact copy of the labels, unaffected by later changes to the original."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(values, np.ndarray):
        return np.array(values, order="C") if values.dtype.kind in "biuf" else list(values)
    items = list(values)
    for number in (bool, int, float):
        if items and all(type(item) is number for item in items):
            column = np.array(items)
            return column if column.dtype.kind in "bif" else items
    return items
