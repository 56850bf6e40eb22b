"""AccessTrace: what a dataset was recorded to read (see `access_recorder`), as a tree node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from creel.cache.storage.version import CHANGING, UNKNOWN
from creel.loader.binding.adapters import Addressed
from creel.loader.binding.proxy import Wrapped, unwrap
from creel.loader.binding.tree import Objects, TreeNode, inside, unchanged
from creel.loader.datasets.base import CreelDataset, positions
from creel.loader.reading.observer import is_local, version_at, worth

if TYPE_CHECKING:
    from creel.loader.datasets.base import Indices, Sample

#: An object: its address, or (number of the part, number of the object in it); or a small part of a
#: file as (address, bytes that were read, bytes of the file).
Item = str | tuple[int, int] | tuple[str, int, int]
Column = NDArray[np.int64]
#: Most values examined in search of parts, and longest list or dict searched.
_MAX_PARTS = 10_000
#: Files by which `outdated` judges: it asks the storage for each, in the trainer's thread.
_LOOKED_AT = 16


class AccessTrace:
    """What each sample of a dataset reads, as far as it was recorded.

    Args:
        size: number of samples of the dataset.
        recorded: (sample, items it reads in order); the first entry of a sample counts.
        parts: the creel datasets in the dataset, from `parts_of`.
        versions: those of the local files that were read. A file without one is left out: it was
            written while it was recorded. None: all are served whatever became of them.
    """

    def __init__(
        self,
        size: int,
        recorded: Iterable[tuple[int, Sequence[Item]]],
        parts: list[CreelDataset],
        versions: Mapping[str, int] | None = None,
    ) -> None:
        samples, counts, leaf, place, addresses = _columns(recorded, len(parts), versions)
        which, first = np.unique(samples, return_index=True)
        self.counts = np.zeros(size, np.int64)
        self.counts[which] = counts[first]
        kept = _stretches((counts.cumsum() - counts)[first], counts[first])
        read, self._leaf = np.unique(leaf[kept], return_inverse=True)
        self._object = place[kept]
        files = Addressed(addresses)
        if versions is not None:
            files.versions = np.array([versions.get(one, UNKNOWN) for one in addresses], np.int64)
        everything = [*parts, files]
        self.leaves = [everything[i] for i in read.tolist()]

    def keep(self, fd: int, copied: dict[str, list[int]]) -> None:
        """Keep copies of its files for the daemon: (first byte in the memfd, bytes, version)."""
        if len(self.leaves) == 1 and isinstance(self.leaves[0], Addressed) and copied:
            self.leaves[0].keep(fd, copied)

    def ignore_versions(self) -> None:
        """Have its files served whatever became of them."""
        for leaf in self.leaves:
            if isinstance(leaf, Addressed):
                leaf.versions = None

    def outdated(self) -> bool:
        """Whether files have other versions by now, judged by a few of them."""
        for leaf in self.leaves:
            if isinstance(leaf, Addressed) and leaf.versions is not None:
                some = np.unique(np.linspace(0, leaf.object_count - 1, _LOOKED_AT).astype(np.int64))
                were = zip(leaf.addresses(some), leaf.versions_of(some), strict=True)
                if any(of not in {UNKNOWN, version_at(address)} for address, of in were):
                    return True
        return False

    def same(self, other: AccessTrace) -> bool:
        """Whether each sample reads the same by both, of files of the same versions."""
        return (
            [leaf.manifest.key for leaf in self.leaves]
            == [leaf.manifest.key for leaf in other.leaves]
            and all(map(_same_versions, self.leaves, other.leaves))
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self._leaf, other._leaf)
            and np.array_equal(self._object, other._object)
        )

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


def _same_versions(one: CreelDataset, other: CreelDataset) -> bool:
    if not (isinstance(one, Addressed) and isinstance(other, Addressed)):
        return True
    if one.versions is None or other.versions is None:
        return one.versions is other.versions
    return np.array_equal(one.versions, other.versions)


def _columns(
    recorded: Iterable[tuple[int, Sequence[Item]]],
    address_leaf: int,
    versions: Mapping[str, int] | None,
) -> tuple[Column, Column, Column, Column, list[str]]:
    """(n,) samples, (n,) item counts; (k,) leaf and (k,) object of each item; the addresses.

    Addresses are the objects of leaf `address_leaf`, numbered in sorted order, so that the result
    does not depend on the order of recording. Files of which samples read small parts only are left
    out, if all parts together are no large one; and local ones that `versions` has no version of.
    """
    entries = list(recorded)
    samples = np.array([sample for sample, _ in entries], np.int64)
    counts = np.array([len(items) for _, items in entries], np.int64)
    read = [item for _, items in entries for item in items]
    named = [
        item if isinstance(item, str) else item[0] if isinstance(item[0], str) else None
        for item in read
    ]
    addresses = sorted(set(filter(None, named)) - _little(read))
    if versions is not None:
        addresses = [a for a in addresses if versions.get(a, CHANGING) > 0 or not is_local(a)]
    number = {address: i for i, address in enumerate(addresses)}
    leaf, place = [address_leaf] * len(read), [number.get(name or "", -1) for name in named]
    for i, name in enumerate(named):
        if name is None:
            leaf[i], place[i] = cast("tuple[int, int]", read[i])
    objects = np.array(place, np.int64)
    kept = objects >= 0
    if not kept.all():
        counts = np.bincount(
            np.repeat(np.arange(len(samples)), counts)[kept], minlength=len(samples)
        )
    return samples, counts, np.array(leaf, np.int64)[kept], objects[kept], addresses


def _little(read: Iterable[Item]) -> set[str]:
    """Addresses of files of which all samples together read too little.

    >>> sorted(_little([("/a", 10, 100), ("/b", 10, 100), ("/b", 20, 100), ("/c", 1, 100), "/c"]))
    ['/a']
    """
    parts: dict[str, tuple[int, int]] = {}  # bytes that were read, and those of the file
    for item in read:
        if len(item) == 3 and not isinstance(item, str):
            address, got, nbytes = item
            parts[address] = parts.get(address, (0, 0))[0] + got, nbytes
    little = {address for address, (got, nbytes) in parts.items() if not worth(got, nbytes)}
    return little - {item for item in read if isinstance(item, str)} if little else little


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
