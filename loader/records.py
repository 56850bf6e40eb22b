"""RecordDataset: fixed-size records in big binary files, and .npy."""

from __future__ import annotations

import ast
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from creel.cache.manifest import Manifest
from creel.errors import ConfigError
from creel.loader.base import (
    Indices,
    Labelled,
    Raw,
    Sample,
    check_callable,
    position,
)
from creel.loader.batches import cast, numbers, rows_of, unstacked
from creel.loader.gather import Ring
from creel.loader.reading import take_rows
from creel.loader.storage import absolute, in_threads, nbytes_of, read_range, scheme_of, several

T = TypeVar("T")

_MAGIC = b"\x93NUMPY"
#: Of a batch whose samples are transformed one by one, what is read at a time: the samples may be
#: small parts of large records. More is not kept for the next batch either.
_TOGETHER_NBYTES = 4 << 20
#: Longer headers belong to structured types, which no tensor can hold.
_HEADER_NBYTES = 1 << 16


@dataclass(frozen=True)
class _Run:
    """`count` records in a row in one file."""

    path: str
    offset: int
    count: int


@dataclass(frozen=True)
class _Npy:
    """What the header of a .npy file says; `shape[0]` rows lie from `offset` on."""

    offset: int
    dtype: torch.dtype | None
    itemsize: int
    shape: tuple[int, ...]


class RecordDataset(Labelled):
    """Sample i is record i of a file (or of several, one after the other) as a tensor.

    Args:
        path: a binary file or a .npy, or a list of them, read as one.
        dtype: of the records (torch's or numpy's, or a name; "bfloat16" too). A .npy has its own.
        shape: of one record, an int for one dimension. A .npy gives its rows, or is cut into
            records of this shape, whatever its own (a long row of tokens into sequences).
        offset: bytes before the first record of each file. A .npy says that itself.
        labels: one per record, copied; samples are then (record, label). Assign `dataset.labels` to
            have others.
        to: what the numbers are turned into, as `record.to(to)` does; the files keep their own.
        transform: from a record (without its label) to a sample.
        batch_transform: in place of `transform`, from a batch of records, (n, *shape), to one with
            as many rows: a tensor or sequence of rows, or a tuple or dict of these. Sample i is row
            i. It is called once for each batch, also by torch's DataLoader, and in its worker where
            there are any; for `dataset[i]`, and below torch's ConcatDataset, with a batch of one.

    Both transforms may change what they get in place.

    Raises:
        ConfigError: a missing file, a file whose size is no multiple of the record's, a .npy that
            is not in C order, a type no tensor can have, both kinds of transform.
    """

    volatile = (*Labelled.volatile, "_ring")
    _ring: Ring | None = None

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dtype: torch.dtype | DTypeLike | None = None,
        shape: SupportsIndex | Sequence[int] | None = None,
        offset: int = 0,
        *,
        labels: object = None,
        to: torch.dtype | DTypeLike | None = None,
        transform: Callable[[Sample], Sample] | None = None,
        batch_transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        paths = [absolute(p) for p in several(path)]
        if not paths:
            raise ConfigError("a RecordDataset needs at least one file")
        wanted = None if dtype is None else torch_dtype(dtype)
        want = None if shape is None else _shape(shape)
        _check_offset(offset)
        headers = in_threads(lambda p: _npy(p) if p.endswith(".npy") else None, paths)
        both = list(zip(paths, headers, strict=True))
        self.dtype = _same(paths, [_dtype_of(p, h, wanted) for p, h in both])
        self.shape = _same(paths, [_shape_of(p, h, want) for p, h in both])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._runs = in_threads(lambda ph: _run(*ph, offset, self.nbytes), both)
        self._ends = np.cumsum([run.count for run in self._runs])
        self._size = int(self._ends[-1])
        if not self._size:
            raise ConfigError(f"{paths[0]} holds no records")
        self.labels = labels
        check_callable(transform=transform, batch_transform=batch_transform)
        if transform is not None and batch_transform is not None:
            raise ConfigError("give transform= or batch_transform=, not both")
        self.to = None if to is None else torch_dtype(to)
        self.transform = transform
        self.batch_transform = batch_transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        i = position(index, self._size)
        sample = self._tensor(i).view(self.dtype).reshape(self.shape)
        if self.to is not None:
            sample = sample.to(self.to)
        if self.transform is not None:
            sample = self.transform(sample)
        elif self.batch_transform is not None:
            sample = unstacked(self.batch_transform(sample[None]), 1)[0]
        return sample if self.labels is None else (sample, self.labels[i])

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """[dataset[i] for i in indices], read together; a batch_transform sees all of them."""
        if type(self).__getitem__ is not RecordDataset.__getitem__:  # a person's own
            return [self[i] for i in indices]
        ids = self._ids(indices)
        samples = self._samples(ids)
        if self.labels is None:
            return samples
        return [(sample, self.labels[i]) for sample, i in zip(samples, ids.tolist(), strict=True)]

    def _ids(self, indices: Sequence[int]) -> Indices:
        """(n,) numbers of records. Raises what `position` raises."""
        try:
            wide = np.asarray(indices)
        except (TypeError, ValueError):  # no list of numbers: `position` says what is wrong
            wide = np.empty(0)
        if wide.ndim == 1 and wide.dtype.kind == "i" and len(wide):
            wide = wide.astype(np.int64)
            if wide.min() >= 0 and wide.max() < self._size:
                return wide
        return np.array([position(i, self._size) for i in indices], np.int64)

    def _samples(self, ids: Indices) -> list[Sample]:
        """Samples without their labels, as many at a time as may lie in memory twice."""
        if self.batch_transform is not None and len(ids):
            batch = cast(self._numbers(ids), self.to)
            return unstacked(self.batch_transform(batch), len(ids))
        samples: list[Sample] = []
        step = max(_TOGETHER_NBYTES // self.nbytes, 1)
        for start in range(0, len(ids), step):
            rows = rows_of(cast(self._numbers(ids[start : start + step]), self.to, self._memory))
            samples += rows if self.transform is None else map(self.transform, rows)
        return samples

    def _numbers(self, ids: Indices) -> torch.Tensor:
        """(n, *shape) of the files' own type, in memory that nobody else uses."""
        rows = self._memory(len(ids) * self.nbytes).view(-1, self.nbytes)
        take_rows(self, ids, rows.numpy(), self._read_rows)
        return numbers(rows, self.dtype, self.shape)

    def _memory(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8; little of it is used again when nobody holds it any more."""
        if nbytes > _TOGETHER_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._ring is None:
            self._ring = Ring()
        return self._ring.take(nbytes)

    def _read_rows(self, ids: Indices, out: NDArray[np.uint8]) -> None:
        """Fill (n, nbytes) `out` from the source, with one open for each file of the batch.

        The file is the one that is there now: nothing of it is kept from batch to batch.
        """
        which = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(which).tolist():
            run, where = self._runs[number], np.flatnonzero(which == number)
            first = int(self._ends[number]) - run.count
            if not _read_run(run, self.nbytes, ids[where] - first, out, where):
                for at in where.tolist():  # with patience, or an error that tells the path
                    data = self._read_direct(int(ids[at]))
                    out[at] = np.frombuffer(data, np.uint8)

    def _build_manifest(self) -> Manifest:
        return Manifest.of_runs(
            [run.path for run in self._runs],
            np.array([run.offset for run in self._runs], np.int64),
            np.full(len(self._runs), self.nbytes, np.int64),
            np.array([run.count for run in self._runs], np.int64),
        )

    def raw(self) -> Raw | None:
        """Records are rows of a matrix unless a transform of single ones comes between."""
        if type(self) is not RecordDataset or self.transform is not None:
            return None
        kind = None if self.labels is None else self.labels.kind
        if self.labels is not None and kind is None:
            return None
        return Raw(self.nbytes, self.dtype, self.shape, kind, self.to, self.batch_transform)

    def callables(self) -> list[object]:
        return [self.transform, self.batch_transform]


def _read_run(
    run: _Run, nbytes: int, records: Indices, out: NDArray[np.uint8], where: NDArray[np.intp]
) -> bool:
    """Read records of a local file to rows of `out`, neighbours in both at once; False on failure.

    Args:
        records: (k,) numbers in the file. where: (k,) rows of `out`, (n, nbytes), contiguous.
    """
    if scheme_of(run.path) or (run.count == 1 and not run.offset):
        return False  # a file that is one object must be as long as it was
    cuts = np.flatnonzero((np.diff(records) != 1) | (np.diff(where) != 1)) + 1
    first = np.concatenate([[0], cuts])
    begins = where[first] * nbytes
    ends = begins + np.diff(np.append(first, len(records))) * nbytes
    offset = run.offset + records[first] * nbytes
    view = memoryview(out.data).cast("B")
    try:
        fd = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        pieces = zip(begins.tolist(), ends.tolist(), offset.tolist(), strict=True)
        return all(os.preadv(fd, [view[a:b]], at) == b - a for a, b, at in pieces)
    except OSError:
        return False
    finally:
        os.close(fd)


def torch_dtype(dtype: torch.dtype | DTypeLike) -> torch.dtype:
    """The torch type with the same bytes.

    >>> torch_dtype("bfloat16"), torch_dtype(np.uint16)
    (torch.bfloat16, torch.uint16)

    Raises:
        ConfigError: none has (text, objects, structures, big-endian numbers).
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError) as e:
        # numpy has no bfloat16, and its names are asked first: "float" is 64 bits there
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if isinstance(found, torch.dtype):
            return found
        raise ConfigError(f"no tensor can have the type {dtype!r}") from e


def _check_offset(offset: object) -> None:
    if not isinstance(offset, SupportsIndex) or operator.index(offset) < 0:
        raise ConfigError(f"offset is {offset!r}: bytes before the first record, 0 or more")


def _shape(shape: SupportsIndex | Sequence[int]) -> tuple[int, ...]:
    items = (shape,) if isinstance(shape, SupportsIndex) else shape
    try:
        full = tuple(operator.index(n) for n in items)
    except TypeError:
        raise ConfigError(f"shape is {shape!r}: give whole numbers, as in shape=(3, 4)") from None
    if any(n <= 0 for n in full):
        raise ConfigError(f"shape is {full}: a record has at least one item in each dimension")
    return full


def _dtype_of(path: str, header: _Npy | None, wanted: torch.dtype | None) -> torch.dtype:
    own = wanted if header is None else header.dtype
    if header is not None and own is None and wanted is not None:
        # bfloat16 and its kin are written to .npy as bare bytes ("|V2")
        own = wanted if wanted.itemsize == header.itemsize else None
    if own is None:
        raise ConfigError(f"{path} does not tell what its numbers are: give dtype=")
    if wanted is not None and own != wanted:
        raise ConfigError(f"{path} holds {own}, not {wanted}")
    return own


def _shape_of(path: str, header: _Npy | None, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    if wanted is None:
        own = () if header is None else _shape(header.shape[1:])
        if not own:
            raise ConfigError(f"{path} does not tell the shape of a record: give shape=")
        return own
    if header is not None and math.prod(header.shape) % math.prod(wanted):
        raise ConfigError(f"{path} has shape {header.shape}: no whole records of {wanted}")
    return wanted


def _same(paths: list[str], found: list[T]) -> T:
    """What all files have in common."""
    for path, one in zip(paths, found, strict=True):
        if one != found[0]:
            raise ConfigError(f"{path} holds records of {one}, {paths[0]} of {found[0]}")
    return found[0]


def _run(path: str, header: _Npy | None, offset: int, nbytes: int) -> _Run:
    size = nbytes_of(path)
    if header is not None:
        if offset:
            raise ConfigError(f"{path} says itself where its rows begin: leave out offset={offset}")
        used = math.prod(header.shape) * header.itemsize
        if header.offset + used > size:
            raise ConfigError(
                f"{path} ends {header.offset + used - size} bytes before its header says"
            )
        return _Run(path, header.offset, used // nbytes)
    if size < offset:
        raise ConfigError(f"{path} has {size} bytes, fewer than the offset {offset}")
    if (size - offset) % nbytes:
        raise ConfigError(
            f"{path} has {size - offset} bytes from offset {offset} on: "
            f"no multiple of a record of {nbytes}"
        )
    return _Run(path, offset, (size - offset) // nbytes)


def _npy(path: str) -> _Npy:
    """Read the header of a .npy file.

    Raises:
        ConfigError: it is none, or not in C order, or holds Python objects or structures.
    """
    data = read_range(path, 0, min(_HEADER_NBYTES, nbytes_of(path)))
    if data[:6] != _MAGIC or len(data) < 12:
        raise ConfigError(f"{path} is no .npy file")
    wide = 2 if data[6] == 1 else 4
    start = 8 + wide
    offset = start + int.from_bytes(data[8:start], "little")
    try:
        header = ast.literal_eval(data[start:offset].decode("utf-8"))
        descr, fortran, shape = header["descr"], header["fortran_order"], tuple(header["shape"])
        dtype = np.dtype(descr)
    except (ValueError, SyntaxError, KeyError, TypeError, UnicodeDecodeError) as e:
        raise ConfigError(f"the header of {path} is damaged") from e
    if fortran and len(shape) > 1:
        raise ConfigError(
            f"{path} is in Fortran order, its rows are not in one piece: "
            "save np.ascontiguousarray(array)"
        )
    bare = dtype.kind == "V" and dtype.names is None
    return _Npy(offset, None if bare else torch_dtype(dtype), dtype.itemsize, shape)
