"""The byte ranges that a dataset's samples map into memory, as its method `ranges` says."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from torch.utils.data import ConcatDataset, Subset

from creel.loader.data.binding.tree import unchanged
from creel.loader.data.binding.wrapped import is_wrapped, unwrap
from creel.loader.data.datasets.base import CreelDataset, Transformed


class MappedRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file."""

    path: str
    offset: int
    nbytes: int


RangesOf = Callable[[int], list[MappedRange]]


def ranges_of(dataset: object) -> RangesOf | None:
    """Return what tells the byte ranges of a sample; None if the dataset does not say.

    Below torch's Subset and ConcatDataset, `creel.wrap` and creel's Transformed the dataset inside
    says it. What is returned raises whatever the person's code does, and ValueError or TypeError
    for something that is no list of ranges.
    """
    if is_wrapped(dataset):
        return ranges_of(unwrap(dataset))
    if type(dataset) is Transformed:
        return ranges_of(dataset.dataset)
    if unchanged(dataset, Subset):
        return _of_subset(dataset)
    if unchanged(dataset, ConcatDataset):
        return _of_parts(dataset)
    declared = getattr(type(dataset), "ranges", None)
    if isinstance(dataset, CreelDataset) or not callable(declared):
        return None
    return lambda index: list(map(_checked, dataset.ranges(index)))  # type: ignore[attr-defined]


def _of_subset(dataset: Subset[object]) -> RangesOf | None:
    inner = ranges_of(dataset.dataset)
    return None if inner is None else lambda index: inner(dataset.indices[index])


def _of_parts(dataset: ConcatDataset[object]) -> RangesOf | None:
    parts = [ranges_of(part) for part in dataset.datasets]
    ends = dataset.cumulative_sizes

    def ranges(index: int) -> list[MappedRange]:
        at = bisect_right(ends, index)
        part = parts[at]
        return [] if part is None else part(index - (ends[at - 1] if at else 0))

    return ranges if any(part is not None for part in parts) else None


def _checked(given: tuple[str | os.PathLike[str], int, int]) -> MappedRange:
    path, offset, nbytes = given
    checked = MappedRange(os.fspath(path), operator.index(offset), operator.index(nbytes))
    if checked.offset < 0 or checked.nbytes < 0:
        raise ValueError(f"{given!r} is no part of a file")
    return checked
