"""What a dataset was heard to read (see `creel.loader.learn`), as a part of the tree."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, StackDataset, Subset

from creel.loader.adapters import Addressed
from creel.loader.base import CreelDataset, Transformed, positions
from creel.loader.tree import Node, Objects, unchanged
from creel.loader.wrap import Wrapped, unwrap

if TYPE_CHECKING:
    from creel.loader.base import Indices, Sample

#: An object: its address, or (which of the parts, its number in there).
Item = str | tuple[int, int]
Column = NDArray[np.int64]
#: So many things are looked at in search of parts, and at no longer list than that.
_MOST_PARTS = 10_000


class Learnt:
    """What each sample of a dataset reads, as far as it was heard.

    Args:
        size: samples of the dataset.
        heard: (sample, what it reads in order); what is said first of a sample counts.
        parts: the creel datasets in the dataset, as `parts_of` gives them.
    """

    def __init__(
        self, size: int, heard: Iterable[tuple[int, Sequence[Item]]], parts: list[CreelDataset]
    ) -> None:
        samples, counts, leaf, place, addresses = _columns(heard, len(parts))
        which, first = np.unique(samples, return_index=True)
        self.counts = np.zeros(size, np.int64)
        self.counts[which] = counts[first]
        kept = _stretches((counts.cumsum() - counts)[first], counts[first])
        read, self._leaf = np.unique(leaf[kept], return_inverse=True)
        self._object = place[kept]
        everything = [*parts, Addressed(addresses)]
        self.leaves = [everything[i] for i in read.tolist()]

    def plant(self, dataset: Dataset[Sample], place: Callable[[CreelDataset], int]) -> Node:
        """The node of the dataset; `place` puts a leaf into the tree and tells its first id."""
        bases = np.array([place(leaf) for leaf in self.leaves], np.int64)
        return _LearntNode(dataset, self, (bases[self._leaf] + self._object).astype(np.int32))


class _LearntNode(Node):
    """A dataset that reads by code of the person's, and what that is known to read."""

    def __init__(
        self, dataset: Dataset[Sample], learnt: Learnt, numbers: NDArray[np.int32]
    ) -> None:
        super().__init__(dataset)
        self._leaves = learnt.leaves
        self._was = [leaf.layout for leaf in self._leaves]
        self._counts = learnt.counts
        self._ends = np.cumsum(learnt.counts)
        self._numbers = numbers

    def _same(self) -> bool:
        pairs = zip(self._leaves, self._was, strict=True)
        return all(leaf.layout is was for leaf, was in pairs)

    def objects(self, indices: Indices) -> Objects:
        """Nothing for a sample that nobody has heard."""
        at = positions(indices, len(self._counts))
        counts = self._counts[at]
        return self._numbers[_stretches(self._ends[at] - counts, counts)], counts


def _columns(
    heard: Iterable[tuple[int, Sequence[Item]]], named: int
) -> tuple[Column, Column, Column, Column, list[str]]:
    """(n,) samples, (n,) items of each; (k,) leaf and (k,) object of each item; the addresses.

    An address is the object of leaf `named` that has its place among all of them, sorted: whoever
    heard the same in another order says the same.
    """
    number: dict[str, int] = {}
    samples, counts, leaf, place = array("q"), array("q"), array("q"), array("q")
    for sample, items in heard:
        samples.append(sample)
        counts.append(len(items))
        for item in items:
            if isinstance(item, str):
                leaf.append(named)
                place.append(number.setdefault(item, len(number)))
            else:
                leaf.append(item[0])
                place.append(item[1])
    addresses = sorted(number)
    rank = np.empty(len(addresses), np.int64)
    rank[[number[address] for address in addresses]] = np.arange(len(addresses))
    leaves, objects = np.array(leaf), np.array(place)
    objects[leaves == named] = rank[objects[leaves == named]]
    return np.array(samples), np.array(counts), leaves, objects, addresses


def _stretches(begin: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """begin[0], begin[0] + 1, ..., `counts[0]` of them, then those of the next.

    >>> _stretches(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    before = counts.cumsum() - counts
    return np.repeat(begin - before, counts) + np.arange(int(counts.sum()))


def by_sample(dataset: object) -> bool:
    """Whether a batch is but its samples, taken one by one: all they read can be told apart."""
    if type(dataset) is Wrapped:
        return by_sample(unwrap(dataset))
    if unchanged(dataset, Subset) or type(dataset) is Transformed:
        return by_sample(dataset.dataset)
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        return all(map(by_sample, parts.values() if isinstance(parts, dict) else parts))
    return not hasattr(dataset, "__getitems__")


def parts_of(dataset: object) -> list[CreelDataset]:
    """The creel datasets that a person's dataset holds, in an order that all processes agree on."""
    parts: list[CreelDataset] = []
    seen: set[int] = set()
    queue = deque([dataset])  # what is held directly comes before what is in long lists
    while queue and len(seen) < _MOST_PARTS:
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
    """What may hold datasets: no numbers, no arrays, nothing with a life of its own."""
    if isinstance(one, Dataset):
        held = list(vars(one).values())
    elif isinstance(one, dict):
        held = list(one.values()) if len(one) <= _MOST_PARTS else []
    elif isinstance(one, (list, tuple)):
        held = list(one) if len(one) <= _MOST_PARTS else []
    else:
        held = []
    return [x for x in held if isinstance(x, (Dataset, list, tuple, dict))]
