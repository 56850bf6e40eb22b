"""RecordDataset: fixed-size records in big binary files, and .npy."""

from __future__ import annotations

import ast
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from creel.cache.manifest import Manifest
from creel.errors import ConfigError
from creel.loader.base import (
    Labelled,
    Raw,
    Sample,
    check_callable,
    position,
)
from creel.loader.storage import absolute, in_threads, nbytes_of, read_range, several

T = TypeVar("T")

_MAGIC = b"\x93NUMPY"
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
        transform: from a record (without its label) to a sample.

    Raises:
        ConfigError: a missing file, a file whose size is no multiple of the record's, a .npy that
            is not in C order, a type no tensor can have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dtype: torch.dtype | DTypeLike | None = None,
        shape: SupportsIndex | Sequence[int] | None = None,
        offset: int = 0,
        *,
        labels: object = None,
        transform: Callable[[Sample], Sample] | None = None,
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
        self._size = sum(run.count for run in self._runs)
        if not self._size:
            raise ConfigError(f"{paths[0]} holds no records")
        self.labels = labels
        check_callable(transform=transform)
        self.transform = transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        i = position(index, self._size)
        sample = self._tensor(i).view(self.dtype).reshape(self.shape)
        if self.transform is not None:
            sample = self.transform(sample)
        return sample if self.labels is None else (sample, self.labels[i])

    def _build_manifest(self) -> Manifest:
        return Manifest.of_runs(
            [run.path for run in self._runs],
            np.array([run.offset for run in self._runs], np.int64),
            np.full(len(self._runs), self.nbytes, np.int64),
            np.array([run.count for run in self._runs], np.int64),
        )

    def raw(self) -> Raw | None:
        """Records are rows of a matrix unless a transform comes between."""
        if type(self) is not RecordDataset or self.transform is not None:
            return None
        kind = None if self.labels is None else self.labels.kind
        if self.labels is not None and kind is None:
            return None
        return Raw(self.nbytes, self.dtype, self.shape, kind)

    def callables(self) -> list[object]:
        return [self.transform]


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
