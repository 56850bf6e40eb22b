"""CreelDataset: a torch Dataset that knows which bytes each of its samples is made of."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex, TypeAlias, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.manifest import Manifest
from creel.cache.patience import public
from creel.cache.source import Source
from creel.errors import ConfigError, SourceError
from creel.loader.reading import foreign, take, take_address
from creel.loader.storage import patience

#: A sample is whatever the person's transform makes of it.
Sample: TypeAlias = Any
Ids: TypeAlias = NDArray[np.int32]
Indices: TypeAlias = NDArray[np.int64]


def position(index: SupportsIndex, size: int) -> int:
    """A sample's number, counted from the end where negative, as a list does.

    Raises:
        IndexError: outside of the dataset.
    """
    i = operator.index(index)
    if not -size <= i < size:
        raise IndexError(f"sample {i} of a dataset of {size}")
    return i + size if i < 0 else i


def positions(indices: NDArray[np.integer[Any]], size: int) -> Indices:
    """`position` for many."""
    wide = np.asarray(indices, np.int64)
    if wide.size and not (-size <= wide.min() and wide.max() < size):
        raise IndexError(f"samples {wide.min()} to {wide.max()} of a dataset of {size}")
    return np.where(wide < 0, wide + size, wide)


@dataclass(frozen=True)
class Raw:
    """Samples that follow from their bytes, many at once: what `Gather` needs to know of one leaf.

    `labels` tells how labels are collated (equal values collate alike), None for no labels; `to` is
    what the numbers are turned into, `batch_transform` what the person makes of a batch of them.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    labels: tuple[object, ...] | None
    to: torch.dtype | None = None
    batch_transform: Callable[[torch.Tensor], Any] | None = None

    def same(self, other: Raw | None) -> bool:
        """Whether the other tells of the same samples. Functions are compared by identity."""
        return (
            other is not None
            and other.batch_transform is self.batch_transform
            and (other.nbytes, other.dtype, other.shape, other.labels, other.to)
            == (self.nbytes, self.dtype, self.shape, self.labels, self.to)
        )


class CreelDataset(Dataset[Sample]):
    """Base of creel's datasets: samples are made of *objects*, byte ranges of the storage.

    A subclass gives `_build_manifest`, `__len__` and `__getitem__`, which reads by `self.read`; and
    `objects`, unless sample i is object i.
    """

    #: Attributes that a pickle leaves out, because they can be made again.
    volatile: ClassVar[tuple[str, ...]] = ("_manifest", "_opened")
    #: Whether every object is all of a file, so that its address alone says what it is.
    whole_files: ClassVar[bool] = False
    _manifest: Manifest | None = None
    _opened: tuple[int, Source] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        raise NotImplementedError

    def _build_manifest(self) -> Manifest:
        raise NotImplementedError

    @property
    def manifest(self) -> Manifest:
        """All objects; built when first asked for, never sent to a worker."""
        if self._manifest is None:
            self._manifest = self._build_manifest()
        return self._manifest

    @property
    def object_count(self) -> int:
        """Number of objects, known without building the manifest."""
        return len(self)

    @property
    def layout(self) -> object:
        """Another object once the samples are made of other objects than they were."""
        return None

    @property
    def cacheable(self) -> bool:
        """Whether samples are read through `read`, so that caching their objects pays."""
        return True

    def objects(self, indices: Indices) -> tuple[Ids, NDArray[np.int64]]:
        """What samples are made of.

        Args:
            indices: (n,) numbers of samples; negative ones count from the end.

        Returns:
            (k,) object ids, sample after sample, each in order of reading; (n,) ids per sample.

        Raises:
            IndexError: outside of the dataset.
        """
        ids = positions(indices, len(self))
        return ids.astype(np.int32), np.ones(len(ids), np.int64)

    def read(self, object_id: int) -> bytes:
        """The bytes of one object: from the cache inside a reading lease, else from the source.

        Raises:
            SourceError: the storage failed for good.
        """
        if self.whole_files and foreign(self):
            uri = self.manifest.location(object_id)[0]
            return take_address(uri, lambda _: self._read_direct(object_id))
        return take(self, object_id, self._read_direct, bytes)

    def decoded(self, object_id: int, decode: Callable[[bytes], Sample]) -> Sample:
        """What `decode` makes of an object's bytes; its error tells whose they are."""
        data = self.read(object_id)
        try:
            return decode(data)
        except Exception as e:
            if sys.version_info >= (3, 11):
                place = public(self.manifest.location(object_id)[0])
                e.add_note(f"while decoding {place} (object {object_id} of {type(self).__name__})")
            raise

    def _read_direct(self, object_id: int) -> bytes:
        try:
            return self._source().read(object_id)
        except SourceError as e:
            # The path is there already; of a million files the number is what a person can act on.
            reason = f"{e.strerror} (object {object_id} of this {type(self).__name__})"
            raise type(e)(e.errno or 0, reason, e.uri) from e

    def _tensor(self, object_id: int) -> torch.Tensor:
        """(nbytes,) uint8, in memory of its own."""
        data = take(self, object_id, self._read_direct, bytearray)
        if not data:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _source(self) -> Source:
        # Guarded by the process: descriptors and clients are not shared with a forked worker.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Source(self.manifest, patience())
        return self._opened[1]

    def raw(self) -> Raw | None:
        """How samples follow from their bytes alone; None when code of the person's comes between.

        A subclass of a creel dataset is not asked: it may have changed `__getitem__`.
        """
        return None

    def collated_labels(self) -> Callable[[Indices], torch.Tensor]:
        """From (n,) samples to what default_collate makes of their labels as these are now.

        Where `raw` says that there are any; labels assigned later make no difference to it.
        """
        raise NotImplementedError

    def callables(self) -> list[object]:
        """Code of the person's that samples pass through; None where there is none."""
        return []

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in self.volatile}


class Transformed(Dataset[Sample]):
    """`fn(sample)` for every sample of another dataset, cached as that one is.

    Args:
        dataset: any map-style dataset.
        fn: takes a sample, gives another.
    """

    def __init__(self, dataset: Dataset[Sample], fn: Callable[[Sample], Sample]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset promises no length

    def __getitem__(self, index: int) -> Sample:
        return self.fn(self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self.fn(sample) for sample in fetch_many(self.dataset, indices)]


def fetch_many(dataset: Dataset[Sample], indices: Sequence[int]) -> Iterable[Sample]:
    """Samples of a batch, by the dataset's own `__getitems__` where it has one, as torch does."""
    many: Callable[[Sequence[int]], Iterable[Sample]] | None
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[i] for i in indices]


def check_callable(**given: object) -> None:
    """Raise ConfigError unless each of these is a function or None."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is a function of one argument, not {value!r}")


# --- columns of a dataset ---------------------------------------------------------------------


def strings(values: Sequence[str] | pa.Array) -> pa.Array:
    """A column of strings as one Arrow array, without slices of a bigger one.

    Raises:
        ConfigError: a name that is not UTF-8.
    """
    try:
        column = values if isinstance(values, pa.Array) else pa.array(values, pa.large_string())
    except UnicodeEncodeError as e:
        raise ConfigError(f"a file's name is not UTF-8: {e.object!r}") from e
    column = column.cast(pa.large_string())
    # A pickle of a slice would carry the whole array it was cut from.
    sliced = column.get_total_buffer_size() > column.nbytes
    return pa.array(column.to_pylist(), pa.large_string()) if sliced else column


class Names(Sequence[str]):
    """Paths below one root, kept as one Arrow array: 2 million cost no Python object each."""

    def __init__(self, prefix: str, names: pa.Array) -> None:
        self.prefix = prefix
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: SupportsIndex) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        name: str = self.names[position(index, len(self))].as_py()
        return self.prefix + name

    def __iter__(self) -> Iterator[str]:
        for start in range(
            0, len(self), 4096
        ):  # a chunk at a time: not all at once, nor one by one
            for name in self.names.slice(start, 4096).to_pylist():
                yield self.prefix + name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return f"<{len(self)} paths below {public(self.prefix) or 'no common root'!r}>"


#: numpy's numbers of which default_collate makes tensors of the same type.
_COLLATED = frozenset(map(np.dtype, ("?", *"bBhHiIlefdFD")))


class Labels:
    """One label per sample, compact, giving back what the person gave.

    They are copied: what is done to the person's array, tensor or list afterwards changes nothing.
    Numbers in a list come back as Python numbers, numpy and torch rows with their dtype. Anything
    else (strings, tuples) is kept as it is.
    """

    def __init__(self, values: object, size: int) -> None:
        """Raises ConfigError unless there are `size` of them."""
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
        """How they are collated; None when default_collate must see them one by one."""
        values = self._values
        if isinstance(values, list):
            return None
        # Of numpy's uint64 numbers torch makes no batch, and other byte orders it turns.
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

    def collated(self, indices: Indices) -> torch.Tensor:
        """(n, ...) what default_collate would make of these labels (where they have a `kind`)."""
        if isinstance(self._values, torch.Tensor):
            return self._values[torch.from_numpy(indices)]
        return torch.from_numpy(np.asarray(self._values)[indices])


class Labelled(CreelDataset):
    """A dataset whose samples may have a label beside them."""

    _beside: Labels | None = None

    @property
    def labels(self) -> Labels | None:
        """One label per sample: a copy of what was given, or assigned since.

        Raises:
            ConfigError: there are not as many as samples.
        """
        return self._beside

    @labels.setter
    def labels(self, labels: object) -> None:
        if labels is not None and not isinstance(labels, Labels):
            labels = Labels(labels, len(self))
        self._beside = labels

    def collated_labels(self) -> Callable[[Indices], torch.Tensor]:
        labels, size = self.labels, len(self)
        if labels is None:
            raise NotImplementedError
        return lambda indices: labels.collated(positions(indices, size))


def _compact(values: Any) -> NDArray[Any] | torch.Tensor | list[Sample]:
    """A copy of the labels: what is done to the original later reaches nobody in mid-epoch."""
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
