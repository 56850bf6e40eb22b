"""The tree of a dataset: how torch's wrappers map sample numbers to objects of leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from creel.loader.binding.adapters import FolderLeaf, adapt, adapts
from creel.loader.binding.wrap import Wrapped, trace, unwrap
from creel.loader.datasets.base import (
    CreelDataset,
    Ids,
    Indices,
    Raw,
    Sample,
    Transformed,
    positions,
)

if TYPE_CHECKING:
    from creel.loader.binding.access_trace import AccessTrace

D = TypeVar("D")
Objects = tuple[Ids, NDArray[np.int64]]


class TreeNode:
    """A dataset in the tree; this base class is one without known objects."""

    _copied: tuple[Dataset[Sample], str] | None = None

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __getstate__(self) -> dict[str, object]:
        # What `current` compares with is not pickled.
        return {k: v for k, v in self.__dict__.items() if k not in {"_copied", "_was", "_trace"}}

    def children(self) -> Sequence[TreeNode]:
        return ()

    def current(self) -> bool:
        """Whether the dataset and all below it are still as they were when the node was made.

        The user may assign a Subset's indices, or the samples of a folder, between epochs.
        """
        return self._same() and all(child.current() for child in self.children())

    def still(self, indices: Indices) -> bool:
        """`current` for these samples only, in a time that depends on their number only."""
        return self._same() and all(child.still(indices) for child in self.children())

    def _same(self) -> bool:
        """`current` for the dataset without its children, in a time independent of its length."""
        if self._copied is None:
            return True
        copied, name = vars(self._copied[0]), self._copied[1]
        return all(copied.get(k) is v for k, v in vars(self.dataset).items() if k != name)

    def objects(self, indices: Indices) -> Objects:
        """(k,) ids in the manifest, sample by sample; (n,) number of ids per sample."""
        return np.zeros(0, np.int32), np.zeros(len(indices), np.int64)

    def view(self) -> Dataset[Sample]:
        """The dataset to read from: itself, or a copy where something below it has a view."""
        return self.dataset

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        """A private copy of the dataset; only where `raw` is not None.

        `copies`: copies of leaves by the id of the original; new ones are added.
        """
        raise NotImplementedError

    def raw(self) -> Raw | None:
        return None

    def labels(self) -> Callable[[Indices], torch.Tensor]:
        """A function from (n,) sample numbers to their labels, collated as by default_collate."""
        raise NotImplementedError

    def _with(self, name: str, value: object) -> Dataset[Sample]:
        """A shallow copy of the dataset with one attribute replaced."""
        copied = copy.copy(self.dataset)
        setattr(copied, name, value)
        self._copied = copied, name
        return copied


class LeafNode(TreeNode):
    """A leaf whose objects have the ids `base, base + 1, ...` in the manifest."""

    def __init__(self, dataset: Dataset[Sample], leaf: CreelDataset, base: int) -> None:
        super().__init__(dataset)
        self._leaf = leaf
        self._base = base
        self._was: object = leaf.layout

    def _same(self) -> bool:
        return self._leaf.layout is self._was

    def objects(self, indices: Indices) -> Objects:
        ids, counts = self._leaf.objects(indices)
        return (ids + np.int32(self._base) if self._base else ids), counts

    def view(self) -> Dataset[Sample]:
        return self._leaf.view() if isinstance(self._leaf, FolderLeaf) else self.dataset

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return copies.setdefault(id(self.dataset), copy.copy(self.dataset))

    def raw(self) -> Raw | None:
        return self._leaf.raw()

    def labels(self) -> Callable[[Indices], torch.Tensor]:
        return self._leaf.collated_labels()


class PassNode(TreeNode):
    """A wrapper that keeps sample numbers: Transformed, creel.wrap."""

    def __init__(
        self, dataset: Dataset[Sample], child: TreeNode, trace: AccessTrace | None = None
    ) -> None:
        """`trace`: the trace of a proxy's dataset, if it has one."""
        super().__init__(dataset)
        self._child = child
        self._trace = trace

    def children(self) -> Sequence[TreeNode]:
        return (self._child,)

    def current(self) -> bool:
        traced = trace(self.dataset) if type(self.dataset) is Wrapped else None
        return traced is self._trace and super().current()

    def _same(self) -> bool:
        if type(self.dataset) is Wrapped:
            return True
        return _below(self.dataset) is self._child.dataset and super()._same()

    def objects(self, indices: Indices) -> Objects:
        return self._child.objects(indices)

    def view(self) -> Dataset[Sample]:
        inner = self._child.view()
        if inner is self._child.dataset:
            return self.dataset
        if type(self.dataset) is Wrapped:
            return Wrapped(inner)
        return self._with("dataset", inner)

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return self._child.frozen(copies)

    def raw(self) -> Raw | None:
        return self._child.raw() if type(self.dataset) is Wrapped else None

    def labels(self) -> Callable[[Indices], torch.Tensor]:
        return self._child.labels()


class SubsetNode(TreeNode):
    """torch's Subset: sample i is sample indices[i] of the child."""

    def __init__(self, dataset: Dataset[Sample], child: TreeNode, indices: Indices) -> None:
        super().__init__(dataset)
        self._child = child
        self._indices = indices
        listed: object = cast("Subset[Sample]", dataset).indices
        self._was: object = None  # a private copy that compares quickly
        if type(listed) in {list, range}:
            self._was = copy.copy(listed)

    def children(self) -> Sequence[TreeNode]:
        return (self._child,)

    def current(self) -> bool:
        now: object = cast("Subset[Sample]", self.dataset).indices
        if type(now) is type(self._was):
            same = bool(now == self._was)  # fast: mostly identical int objects
        else:
            same = np.array_equal(np.asarray(now), self._indices)
        return same and _below(self.dataset) is self._child.dataset and super().current()

    def still(self, indices: Indices) -> bool:
        subset = cast("Subset[Sample]", self.dataset)
        at = positions(indices, len(self._indices))
        below = self._indices[at]
        try:
            same = all(subset.indices[i] == j for i, j in zip(at.tolist(), below.tolist()))  # noqa: B905
        except IndexError:  # there are fewer indices now
            return False
        return same and _below(subset) is self._child.dataset and self._child.still(below)

    def _below(self, indices: Indices) -> Indices:
        return self._indices[positions(indices, len(self._indices))]

    def objects(self, indices: Indices) -> Objects:
        return self._child.objects(self._below(indices))

    def view(self) -> Dataset[Sample]:
        inner = self._child.view()
        if inner is self._child.dataset:
            return self.dataset
        return self._with("dataset", inner)

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return Subset(self._child.frozen(copies), cast("Sequence[int]", self._indices))

    def raw(self) -> Raw | None:
        return self._child.raw()

    def labels(self) -> Callable[[Indices], torch.Tensor]:
        below = self._child.labels()
        return lambda indices: below(self._below(indices))


class ConcatNode(TreeNode):
    """torch's ConcatDataset: the samples of all children in order."""

    def __init__(self, dataset: Dataset[Sample], children: list[TreeNode], ends: Indices) -> None:
        super().__init__(dataset)
        self._children = children
        self._ends = ends

    def children(self) -> Sequence[TreeNode]:
        return self._children

    def still(self, indices: Indices) -> bool:
        parts = self._split(indices)
        return self._same() and all(child.still(inner) for child, _, inner in parts)

    def _same(self) -> bool:
        concat = cast("ConcatDataset[Sample]", self.dataset)
        same = _are(concat.datasets, self._children)
        same &= concat.cumulative_sizes == self._ends.tolist()
        return same and super()._same()

    def _split(self, indices: Indices) -> list[tuple[TreeNode, NDArray[np.intp], Indices]]:
        """(child, positions of its samples in `indices`, their numbers in it) per child used."""
        wanted = positions(indices, int(self._ends[-1]))
        which = np.searchsorted(self._ends, wanted, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        places = [(c, np.flatnonzero(which == c)) for c in np.unique(which)]
        return [(self._children[c], at, wanted[at] - starts[c]) for c, at in places]

    def objects(self, indices: Indices) -> Objects:
        parts = [(at, *child.objects(inner)) for child, at, inner in self._split(indices)]
        return _merge(len(indices), parts)

    def view(self) -> Dataset[Sample]:
        inner = [child.view() for child in self._children]
        if all(a is c.dataset for a, c in zip(inner, self._children, strict=True)):
            return self.dataset
        return self._with("datasets", inner)

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return ConcatDataset([child.frozen(copies) for child in self._children])

    def raw(self) -> Raw | None:
        first = self._children[0].raw()
        # torch's ConcatDataset takes samples one by one, each with a call of batch_transform
        if first is None or first.batch_transform is not None:
            return None
        return first if all(first.same(c.raw()) for c in self._children[1:]) else None

    def labels(self) -> Callable[[Indices], torch.Tensor]:
        labels = {id(child): child.labels() for child in self._children}

        def collated(indices: Indices) -> torch.Tensor:
            parts = [(at, labels[id(child)](inner)) for child, at, inner in self._split(indices)]
            out = parts[0][1].new_empty((len(indices), *parts[0][1].shape[1:]))
            for at, found in parts:
                out[torch.from_numpy(at)] = found
            return out

        return collated


class StackNode(TreeNode):
    """torch's StackDataset: sample i is sample i of every child."""

    def __init__(self, dataset: Dataset[Sample], children: dict[object, TreeNode]) -> None:
        super().__init__(dataset)
        self._children = children

    def children(self) -> Sequence[TreeNode]:
        return list(self._children.values())

    def _same(self) -> bool:
        named = _named(cast("StackDataset[Sample]", self.dataset))
        same = list(named) == list(self._children) and _are(named.values(), self.children())
        return same and super()._same()

    def objects(self, indices: Indices) -> Objects:
        # A sample's objects are those of child 0, then those of child 1, ...
        every = np.arange(len(indices))
        parts = [(every, *child.objects(indices)) for child in self.children()]
        return _merge(len(indices), parts)

    def view(self) -> Dataset[Sample]:
        inner = {key: child.view() for key, child in self._children.items()}
        if all(inner[key] is child.dataset for key, child in self._children.items()):
            return self.dataset
        was = cast("StackDataset[Sample]", self.dataset).datasets
        datasets = inner if isinstance(was, dict) else tuple(inner.values())
        return self._with("datasets", datasets)


def _merge(n: int, parts: Sequence[tuple[NDArray[np.intp], Ids, NDArray[np.int64]]]) -> Objects:
    """Merge lists of objects: those of each sample follow the order of the parts.

    Args:
        n: number of samples.
        parts: each (m,) samples, (k,) their objects in order, (m,) number of objects per sample.

    >>> ids, counts = _merge(2, [(np.array([1, 0]), np.array([7, 8, 9]), np.array([1, 2])),
    ...                          (np.array([1]), np.array([5]), np.array([1]))])
    >>> ids.tolist(), counts.tolist()
    ([8, 9, 7, 5], [2, 2])
    """
    counts = np.zeros(n, np.int64)
    for at, _, many in parts:
        counts[at] += many
    free = np.cumsum(counts) - counts  # position of the next object of each sample
    ids = np.empty(int(counts.sum()), np.int32)
    for at, found, many in parts:
        before = np.cumsum(many) - many
        ids[np.arange(len(found)) + np.repeat(free[at] - before, many)] = found
        free[at] += many
    return ids, counts


def _below(dataset: object) -> object:
    return getattr(dataset, "dataset", None)


def _named(dataset: StackDataset[Sample]) -> dict[object, Dataset[Sample]]:
    """The parts of a StackDataset by key or number."""
    stacked = dataset.datasets
    return stacked if isinstance(stacked, dict) else dict(enumerate(stacked))


def _are(datasets: Collection[object], nodes: Sequence[TreeNode]) -> bool:
    """Whether the nodes are those of these datasets, in order."""
    return len(datasets) == len(nodes) and all(
        dataset is node.dataset for dataset, node in zip(datasets, nodes, strict=True)
    )


def unchanged(dataset: object, base: type[D]) -> TypeGuard[D]:
    """Whether this is a `base` that overrides none of its methods of sample access."""
    return isinstance(dataset, base) and all(
        getattr(type(dataset), name, None) is getattr(base, name, None)
        for name in ("__getitem__", "__getitems__", "__len__")
    )


class Tree:
    """Builds the nodes of a dataset and collects its leaves, each only once."""

    def __init__(self) -> None:
        self.leaves: list[CreelDataset] = []
        self._nodes: dict[int, LeafNode] = {}
        self._bases: dict[int, int] = {}
        self._total = 0

    def build(self, dataset: object) -> TreeNode:
        """The node of a dataset, with all nodes below it."""
        whole = cast("Dataset[Sample]", dataset)
        if type(dataset) is Wrapped:
            traced = trace(dataset)
            return PassNode(whole, self._wrapped(dataset, traced), traced)
        if type(dataset) is Transformed:
            return PassNode(whole, self.build(dataset.dataset))
        if isinstance(dataset, IterableDataset):
            return TreeNode(whole)
        return self._torch(whole) or self._leaf(whole)

    def _wrapped(self, proxy: Wrapped, traced: AccessTrace | None) -> TreeNode:
        inner = unwrap(proxy)
        if traced is None:
            return self.build(inner)
        return traced.build(cast("Dataset[Sample]", inner), self.place)

    def place(self, leaf: CreelDataset) -> int:
        """Add a leaf to the tree, if it is new, and return its first object id."""
        base = self._bases.get(id(leaf))
        if base is None:
            base = self._bases[id(leaf)] = self._total
            self._total += leaf.object_count
            self.leaves.append(leaf)
        return base

    def _torch(self, dataset: Dataset[Sample]) -> TreeNode | None:
        if unchanged(dataset, Subset):
            return self._subset(dataset)
        if unchanged(dataset, ConcatDataset):
            children = [self.build(d) for d in dataset.datasets]
            return ConcatNode(dataset, children, np.array(dataset.cumulative_sizes, np.int64))
        if unchanged(dataset, StackDataset):
            named = _named(dataset)
            return StackNode(dataset, {key: self.build(d) for key, d in named.items()})
        return None

    def _subset(self, dataset: Subset[Sample]) -> TreeNode:
        try:
            indices = np.asarray(dataset.indices)
        except (TypeError, ValueError):  # lists of different lengths, or other keys
            return TreeNode(dataset)
        if indices.dtype.kind not in "iu" and indices.size:
            return TreeNode(dataset)  # keys, not numbers: the dataset is a mapping
        return SubsetNode(dataset, self.build(dataset.dataset), indices.astype(np.int64))

    def _leaf(self, dataset: Dataset[Sample]) -> TreeNode:
        if id(dataset) in self._nodes:
            return self._nodes[id(dataset)]
        leaf = dataset if isinstance(dataset, CreelDataset) else adapt(dataset)
        if leaf is None or not leaf.cacheable:
            return TreeNode(dataset)
        node = self._nodes[id(dataset)] = LeafNode(dataset, leaf, self.place(leaf))
        return node


class LeafProbe(Tree):
    """Finds whether there are leaves without making them, which takes time per sample."""

    found = False
    may_record = False  # whether a trace may give leaves later

    def _wrapped(self, proxy: Wrapped, traced: AccessTrace | None) -> TreeNode:
        self.may_record = True
        if traced is None:
            return super()._wrapped(proxy, traced)
        self.found = True
        return TreeNode(cast("Dataset[Sample]", proxy))

    def _subset(self, dataset: Subset[Sample]) -> TreeNode:
        self.build(dataset.dataset)  # without reading indices, of which there may be millions
        return TreeNode(dataset)

    def _leaf(self, dataset: Dataset[Sample]) -> TreeNode:
        if isinstance(dataset, CreelDataset):
            self.found |= dataset.cacheable
        else:
            self.found |= adapts(dataset)
        return TreeNode(dataset)
