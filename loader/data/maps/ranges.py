"""The byte ranges that a dataset's samples map into memory."""

from __future__ import annotations

import math
import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from creel.loader.data.binding.tree import unchanged
from creel.loader.data.binding.wrapped import is_wrapped, unwrap
from creel.loader.data.datasets.base import CreelDataset, Transformed
from creel.loader.data.maps.arrow import is_hugging_face, rows_of
from creel.loader.data.maps.mappings import (
    Layout,
    MappedRange,
    Mappings,
    layout_of,
    mapped_ranges,
    refresh_mappings,
)

#: What sample i maps, in parts: once memory has one part, the next may be asked for, as it may have
#: to be read from that.
RangesOf = Callable[[int], Iterable[list[MappedRange]]]

_ARRAYS = {np.ndarray, np.memmap, torch.Tensor}
#: Arrays of less than this need few reads: 8 blocks.
_LEAST_NBYTES = 1 << 20
#: Arrays that lie in no file: their addresses and bytes.
_in_memory: set[tuple[int, int]] = set()
_MOST_KNOWN = 1024


def ranges_of(
    dataset: object, otherwise: Callable[[object], RangesOf | None] | None = None
) -> RangesOf | None:
    """Return what tells the byte ranges of a sample; None if that is not known.

    A dataset says it by a method `ranges`. It is known of arrays and tensors, lists and
    TensorDatasets of these, and Hugging Face's map-style datasets. Below torch's Subset,
    ConcatDataset and StackDataset, `creel.wrap` and creel's Transformed the datasets inside count.

    Takes no longer for a longer dataset. What is returned raises whatever a person's code does, and
    ValueError or TypeError for something that is no list of ranges.

    Args:
        otherwise: is asked of each other dataset.
    """
    refresh_mappings()
    return _ranges_of(dataset, otherwise or (lambda _: None))


def _ranges_of(dataset: Any, otherwise: Callable[[object], RangesOf | None]) -> RangesOf | None:
    if is_wrapped(dataset):
        return _ranges_of(unwrap(dataset), otherwise)
    if type(dataset) is Transformed:
        return _ranges_of(dataset.dataset, otherwise)
    if unchanged(dataset, Subset):
        inner = _ranges_of(dataset.dataset, otherwise)
        return None if inner is None else lambda index: inner(dataset.indices[index])
    if unchanged(dataset, ConcatDataset):
        return _chained(dataset, [_ranges_of(part, otherwise) for part in dataset.datasets])
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        each = parts.values() if isinstance(parts, dict) else parts
        return joined([_ranges_of(part, otherwise) for part in each])
    if isinstance(dataset, CreelDataset):
        return None
    if callable(getattr(type(dataset), "ranges", None)):
        return lambda index: [list(map(_checked, dataset.ranges(index)))]
    if unchanged(dataset, TensorDataset):
        return joined([rows_in_file(tensor) for tensor in dataset.tensors])
    if type(dataset) in {list, tuple} and dataset and type(dataset[0]) in _ARRAYS:
        mapped = _in_file(layout_of(dataset[0]), len(dataset))
        return (lambda index: [mapped_ranges(dataset[index])]) if mapped else None
    return rows_in_file(dataset) or otherwise(dataset)


def _chained(dataset: ConcatDataset[object], parts: list[RangesOf | None]) -> RangesOf | None:
    ends = dataset.cumulative_sizes

    def ranges(index: int) -> Iterable[list[MappedRange]]:
        at = bisect_right(ends, index)
        part = parts[at]
        return [] if part is None else part(index - (ends[at - 1] if at else 0))

    return ranges if any(part is not None for part in parts) else None


def joined(parts: Iterable[RangesOf | None]) -> RangesOf | None:
    """Return the ranges of samples that are made of one sample of each dataset."""
    known = [part for part in parts if part is not None]

    def ranges(index: int) -> Iterator[list[MappedRange]]:
        for part in known:
            yield from part(index)

    return ranges if known else None


def rows_in_file(value: Any) -> RangesOf | None:
    """Return the ranges of the rows of an array, a tensor or Hugging Face's dataset.

    None if they lie in no file, and for anything else.
    """
    if type(value) in _ARRAYS:
        return _of_rows(value)
    return rows_of(value) if is_hugging_face(value) else None


def _of_rows(array: np.ndarray[Any, Any] | torch.Tensor) -> RangesOf | None:
    """Return the ranges of the rows of an array; None if it lies in no file."""
    layout = layout_of(array)
    if not layout.shape or not layout.shape[0]:
        return None
    if not _in_file(layout.row(0), layout.shape[0]):
        return None
    mappings = Mappings()
    return lambda index: [mappings.ranges(layout.row(index).spans())]


def _in_file(first: Layout, count: int) -> bool:
    """Whether the first of so many arrays lies in a file, and all are worth a look at it.

    To look takes a millisecond, which is long for an epoch of little data.
    """
    nbytes = math.prod(first.shape) * first.itemsize * count
    known = first.address, nbytes
    if nbytes < _LEAST_NBYTES or known in _in_memory:
        return False
    if Mappings().ranges(first.spans()):
        return True
    if len(_in_memory) >= _MOST_KNOWN:
        _in_memory.clear()
    _in_memory.add(known)
    return False


def _checked(given: tuple[str | os.PathLike[str], int, int]) -> MappedRange:
    path, offset, nbytes = given
    checked = MappedRange(os.fspath(path), operator.index(offset), operator.index(nbytes))
    if checked.offset < 0 or checked.nbytes < 0:
        raise ValueError(f"{given!r} is no part of a file")
    return checked
