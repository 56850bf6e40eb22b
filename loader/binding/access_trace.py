"""AccessTrace: what a dataset was recorded to read (see `access_recorder`), as a tree node."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from creel.loader.binding.adapters import Addressed
from creel.loader.binding.proxy import Wrapped, unwrap
from creel.loader.binding.tree import Objects, TreeNode, inside, unchanged
from creel.loader.datasets.base import CreelDataset, positions

if TYPE_CHECKING:
    from creel.loader.datasets.base import Indices, Sample

#: An object: its address, or (number of the part, number of the object in it).
Item = str | tuple[int, int]
Column = NDArray[np.int64]
#: Most values examined in search of parts, and longest list or dict searched.
_MAX_PARTS = 10_000


class AccessTrace:
    """What each sample of a dataset reads, as far as it was recorded.

    Args:
        size: number of samples of the dataset.
        recorded: (sample, items it reads in order); the first entry of a sample counts.
        parts: the creel datasets in the dataset, from `parts_of`.
    """

    def __init__(
        self, size: int, recorded: Iterable[tuple[int, Sequence[Item]]], parts: list[CreelDataset]
    ) -> None:
        samples, counts, leaf, place, addresses = _columns(recorded, len(parts))
        which, first = np.unique(samples, return_index=True)
        self.counts = np.zeros(size, np.int64)
        self.counts[which] = counts[first]
        kept = _stretches((counts.cumsum() - counts)[first], counts[first])
        read, self._leaf = np.unique(leaf[kept], return_inverse=True)
        self._object = place[kept]
        everything = [*parts, Addressed(addresses)]
        self.leaves = [everything[i] for i in read.tolist()]

    def keep(self, fd: int, copied: dict[str, list[int]]) -> None:
        """Keep copies of its files for the daemon: (first byte in the memfd, bytes, version)."""
        if len(self.leaves) == 1 and isinstance(self.leaves[0], Addressed) and copied:
            self.leaves[0].keep(fd, copied)

    def build(self, dataset: Dataset[Sample], place: Callable[[CreelDataset], int]) -> TreeNode:
        """The node of the dataset; `place` adds a leaf to the tree and returns its first id."""
        bases = np.array([place(leaf) for leaf in self.leaves], np.int64)
        return _TracedNode(dataset, self, (bases[self._leaf] + self._object).astype(np.int32))


class _TracedNode(TreeNode):
    """A dataset whose reads were traced, with the object ids of each sample."""

    def __init__(
        self, dataset: Dataset[Sample], trace: AccessTrace, numbers: NDArray[np.int32]
    ) -> None:
        super().__init__(dataset)
        self._leaves = trace.leaves
        self._was = [leaf.layout for leaf in self._leaves]
        self._counts = trace.counts
        self._ends = np.cumsum(trace.counts)
        self._numbers = numbers

    def _same(self) -> bool:
        pairs = zip(self._leaves, self._was, strict=True)
        return all(leaf.layout is was for leaf, was in pairs)

    def objects(self, indices: Indices) -> Objects:
        """As `TreeNode.objects`; no objects for a sample that was not traced."""
        at = positions(indices, len(self._counts))
        counts = self._counts[at]
        return self._numbers[_stretches(self._ends[at] - counts, counts)], counts


def _columns(
    recorded: Iterable[tuple[int, Sequence[Item]]], address_leaf: int
) -> tuple[Column, Column, Column, Column, list[str]]:
    """(n,) samples, (n,) item counts; (k,) leaf and (k,) object of each item; the addresses.

    Addresses are the objects of leaf `address_leaf`, numbered in sorted order, so that the result
    does not depend on the order of recording.
    """
    number: dict[str, int] = {}
    samples, counts, leaf, place = array("q"), array("q"), array("q"), array("q")
    for sample, items in recorded:
        samples.append(sample)
        counts.append(len(items))
        for item in items:
            if isinstance(item, str):
                leaf.append(address_leaf)
                place.append(number.setdefault(item, len(number)))
            else:
                leaf.append(item[0])
                place.append(item[1])
    addresses = sorted(number)
    rank = np.empty(len(addresses), np.int64)
    rank[[number[address] for address in addresses]] = np.arange(len(addresses))
    leaves, objects = np.array(leaf), np.array(place)
    objects[leaves == address_leaf] = rank[objects[leaves == address_leaf]]
    return np.array(samples), np.array(counts), leaves, objects, addresses


def _stretches(begin: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges of `counts[i]` integers from `begin[i]` on.

    >>> _stretches(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    before = counts.cumsum() - counts
    return np.repeat(begin - before, counts) + np.arange(int(counts.sum()))


def by_sample(dataset: object) -> bool:
    """Whether samples are read one by one, so that the reads of each are known."""
    below = None if unchanged(dataset, ConcatDataset) else inside(dataset)
    return not hasattr(dataset, "__getitems__") if below is None else all(map(by_sample, below))


def parts_of(dataset: object) -> list[CreelDataset]:
    """The creel datasets that a dataset holds, in an order that is the same in all processes."""
    parts: list[CreelDataset] = []
    seen: set[int] = set()
    queue = deque([dataset])  # what is held directly comes before what is in long lists
    while queue and len(seen) < _MAX_PARTS:
        one = queue.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is Wrapped:
            queue.append(unwrap(one))
        elif isinstance(one, CreelDataset):
            if one.cacheable:
                parts.append(one)
        else:
            queue.extend(_inside(one))
    return parts


def _inside(one: object) -> list[object]:
    """Members of a value that may hold datasets: datasets, lists, tuples and dicts only."""
    if isinstance(one, Dataset):
        held = list(vars(one).values())
    elif isinstance(one, dict):
        held = list(one.values()) if len(one) <= _MAX_PARTS else []
    elif isinstance(one, (list, tuple)):
        held = list(one) if len(one) <= _MAX_PARTS else []
    else:
        held = []
    return [x for x in held if isinstance(x, (Dataset, list, tuple, dict))]
