"""The tree of a dataset: how torch's wrappers map sample numbers to objects of leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from creel.loader.data.binding.adapters import cacheable, leaf_of
from creel.loader.data.binding.wrapped import Trace, Wrapped, is_wrapped, trace_of, unwrap
from creel.loader.data.datasets.base import CreelDataset, Raw, Sample, Transformed, positions
from creel.loader.data.datasets.records import RecordDataset
from creel.loader.data.decoded.keeping import Keeping
from creel.loader.data.decoded.kept import KeptDataset
from creel.loader.data.rehearsed import MemoryRows, RehearsedRows, placed
from creel.loader.data.user_code.protected import attribute
from creel.policies.arrays import Ids, Ints, unique

D = TypeVar("D")
Objects = tuple[Ids, Ints]
Labelling = Callable[[Ints], torch.Tensor]


# --- torch's wrappers -------------------------------------------------------------------------


def unchanged(dataset: object, base: type[D]) -> TypeGuard[D]:
    """Whether this is a `base` that overrides none of its methods of sample access."""
    return isinstance(dataset, base) and all(
        getattr(type(dataset), name, None) is getattr(base, name, None)
        for name in ("__getitem__", "__getitems__", "__len__")
    )


def inside(dataset: object) -> list[Any] | None:
    """Return the datasets directly below a wrapper of torch or creel; None for other datasets.

    None also for a subclass of one that is not complete yet: its worker_init_fn may do the rest.
    """
    if is_wrapped(dataset):
        return [unwrap(dataset)]
    rows = placed(dataset)
    if rows is not None:
        return list(rows.datasets)
    try:
        return _inside(dataset)
    except Exception:  # noqa: BLE001  torch looks at these attributes in the workers only
        return None


def _inside(dataset: object) -> list[Any] | None:
    if type(dataset) is Transformed or type(dataset) is KeptDataset or unchanged(dataset, Subset):
        return [dataset.dataset]
    if unchanged(dataset, ConcatDataset):
        return list(dataset.datasets)
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        return list(parts.values() if isinstance(parts, dict) else parts)
    return None


def bindable(dataset: object) -> bool:
    """Whether `bind` would find anything to cache; its time does not depend on the length.

    Indices of Subsets are not read, so `bind` may still find nothing if they are unsuitable.
    """
    if trace_of(dataset) is not None:
        return True
    below = inside(dataset)
    return cacheable(dataset) if below is None else any(map(bindable, below))


def declares(dataset: object) -> bool:
    """Like `bindable`, without traces of `creel.wrap`: does not begin to record."""
    below = inside(dataset)
    return cacheable(dataset) if below is None else any(map(declares, below))


def wrapped_in(dataset: object) -> list[Wrapped]:
    """Return the wrapped datasets in a dataset."""
    if is_wrapped(dataset):
        return [dataset]
    return [wrapped for below in inside(dataset) or () for wrapped in wrapped_in(below)]


def keepings_in(dataset: object) -> list[Keeping]:
    """Return where the datasets in a dataset keep decoded samples."""
    mine = dataset.keeping if isinstance(dataset, (CreelDataset, KeptDataset)) else None
    below = [keeping for part in inside(dataset) or () for keeping in keepings_in(part)]
    return below if mine is None else [mine, *below]


def keeps_samples(dataset: object) -> bool:
    """Whether `creel.kept` keeps samples of which those of the dataset are made."""
    below = inside(dataset)
    if below is None:  # a class of the person's may hold it
        held = getattr(dataset, "__dict__", {}).values()
        return any(isinstance(value, KeptDataset) for value in held)
    return isinstance(dataset, KeptDataset) or any(map(keeps_samples, below))


def kept_on_top(dataset: object) -> bool:
    """Whether each sample is made of one that `creel.kept` has kept."""
    while type(dataset) is Transformed:
        dataset = dataset.dataset
    return type(dataset) is KeptDataset and dataset.keeping.complete


# --- nodes ------------------------------------------------------------------------------------


class TreeNode:
    """A dataset in the tree; this base class is one without known objects."""

    def __init__(self, dataset: Any, children: Sequence[TreeNode] = ()) -> None:
        self.dataset = dataset
        self.children = children

    def __getstate__(self) -> dict[str, object]:
        # What `is_current` compares with is not pickled.
        return {k: v for k, v in self.__dict__.items() if k not in {"_was", "_trace"}}

    def parts(self, indices: Ints) -> list[tuple[TreeNode, NDArray[np.intp] | None, Ints]]:
        """Return where (n,) samples come from.

        Returns:
            For each child used: itself; positions in `indices` of the samples it has a part in, in
                their order, None for all; their numbers in the child.
        """
        return [(child, None, indices) for child in self.children]

    def is_current(self, indices: Ints | None = None) -> bool:
        """Whether the dataset and all below it are as they were when the node was made.

        The user may assign a Subset's indices, or the samples of a folder, between epochs.

        Args:
            indices: (n,) the samples to check, in a time that depends on their number only; None
                for all.
        """
        if not self._same():
            return False
        if indices is None:
            return all(child.is_current() for child in self.children)
        return all(child.is_current(inner) for child, _, inner in self.parts(indices))

    def _same(self) -> bool:
        """`is_current` without the children, in a time independent of the dataset's length."""
        now = inside(self.dataset) if self.children else []
        were = [child.dataset for child in self.children]
        return now is not None and list(map(id, now)) == list(map(id, were))

    def objects(self, indices: Ints) -> Objects:
        """Return (k,) ids in the manifest, sample by sample; (n,) number of ids per sample."""
        parts = [(at, *child.objects(inner)) for child, at, inner in self.parts(indices)]
        return _merge(len(indices), parts)

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        """Return a private copy of the dataset. Requires that `raw` is not None.

        `copies`: copies of leaves by the id of the original; new ones are added.
        """
        return self.children[0].frozen(copies)

    def raw(self) -> Raw | None:
        """How samples are made from their bytes alone; None if user code runs per sample."""
        return None

    def labels(self) -> Labelling:
        """Return a function from (n,) sample numbers to labels, collated as by default_collate."""
        labels = {id(child): child.labels() for child in self.children}

        def collated(indices: Ints) -> torch.Tensor:
            parts = [(at, labels[id(child)](inner)) for child, at, inner in self.parts(indices)]
            if parts[0][0] is None:
                return parts[0][1]
            out = parts[0][1].new_empty((len(indices), *parts[0][1].shape[1:]))
            for at, values in parts:
                out[torch.from_numpy(at)] = values
            return out

        return collated


class LeafNode(TreeNode):
    """A leaf whose objects have the ids `base, base + 1, ...` in the manifest."""

    def __init__(self, dataset: Any, leaf: CreelDataset, base: int) -> None:
        super().__init__(dataset)
        self._leaf = leaf
        self._base = base
        self._was = leaf.layout

    def _same(self) -> bool:
        return self._leaf.layout is self._was

    def objects(self, indices: Ints) -> Objects:
        ids, counts = self._leaf.objects(indices)
        return (ids + np.int32(self._base) if self._base else ids), counts

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return copies.setdefault(id(self.dataset), copy.copy(self.dataset))

    def raw(self) -> Raw | None:
        return self._leaf.raw()

    def labels(self) -> Labelling:
        return self._leaf.collated_labels()


class WrappedNode(TreeNode):
    """A wrapped dataset, with the trace of what it wraps, if there is one."""

    def __init__(self, dataset: object, child: TreeNode, trace: Trace | None) -> None:
        super().__init__(dataset, [child])
        self._trace = trace

    def is_current(self, indices: Ints | None = None) -> bool:
        # A trace that arrives changes the node as a whole, from the next epoch on, not single
        # samples.
        if indices is None and trace_of(self.dataset) is not self._trace:
            return False
        return super().is_current(indices)

    def raw(self) -> Raw | None:
        return self.children[0].raw()


class TracedNode(TreeNode):
    """A dataset whose reads were traced; `place` is that of its `Tree`."""

    def __init__(
        self, dataset: Dataset[Sample], trace: Trace, place: Callable[[CreelDataset], int]
    ) -> None:
        super().__init__(dataset)
        self._leaves = trace.leaves
        self._was = [leaf.layout for leaf in self._leaves]
        self._counts = trace.counts
        self._ends = np.cumsum(trace.counts)
        self._numbers = trace.numbers(np.array([place(leaf) for leaf in self._leaves], np.int64))

    def _same(self) -> bool:
        pairs = zip(self._leaves, self._was, strict=True)
        return all(leaf.layout is was for leaf, was in pairs)

    def objects(self, indices: Ints) -> Objects:
        """As `TreeNode.objects`; no objects for a sample that was not traced."""
        at = positions(indices, len(self._counts))
        counts = self._counts[at]
        return self._numbers[stretches(self._ends[at] - counts, counts)], counts


class SubsetNode(TreeNode):
    """torch's Subset: sample i is sample indices[i] of the child."""

    def __init__(self, dataset: Subset[Sample], child: TreeNode, indices: Ints) -> None:
        super().__init__(dataset, [child])
        self._indices = indices
        listed: object = dataset.indices
        self._was: object = None  # a private copy that compares quickly
        if type(listed) in {list, range}:
            self._was = copy.copy(listed)

    def parts(self, indices: Ints) -> list[tuple[TreeNode, NDArray[np.intp] | None, Ints]]:
        return [(self.children[0], None, self._indices[positions(indices, len(self._indices))])]

    def is_current(self, indices: Ints | None = None) -> bool:
        return self._same_numbers(indices) and super().is_current(indices)

    def _same_numbers(self, indices: Ints | None) -> bool:
        now = self.dataset.indices
        if indices is not None:
            at = positions(indices, len(self._indices))
            try:
                was = self._indices[at].tolist()
                return all(now[i] == j for i, j in zip(at.tolist(), was))  # noqa: B905
            except IndexError:  # there are fewer indices now
                return False
        if type(now) is type(self._was):
            return bool(now == self._was)  # fast: mostly identical int objects
        return np.array_equal(np.asarray(now), self._indices)

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return Subset(self.children[0].frozen(copies), self._indices)  # type: ignore[arg-type]  # an array of ints

    def raw(self) -> Raw | None:
        return self.children[0].raw()


class ConcatNode(TreeNode):
    """torch's ConcatDataset: the samples of all children in order."""

    def __init__(self, dataset: ConcatDataset[Sample], children: list[TreeNode]) -> None:
        super().__init__(dataset, children)
        self._ends: Ints = np.array(dataset.cumulative_sizes, np.int64)

    def parts(self, indices: Ints) -> list[tuple[TreeNode, NDArray[np.intp] | None, Ints]]:
        wanted = positions(indices, int(self._ends[-1]))
        which = np.searchsorted(self._ends, wanted, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        places = [(c, np.flatnonzero(which == c)) for c in np.unique(which)]
        return [(self.children[c], at, wanted[at] - starts[c]) for c, at in places]

    def _same(self) -> bool:
        sizes: list[int] = self.dataset.cumulative_sizes
        return sizes == self._ends.tolist() and super()._same()

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        return ConcatDataset([child.frozen(copies) for child in self.children])

    def raw(self) -> Raw | None:
        return _common_raw(self.children)


class PlacedNode(TreeNode):
    """The rows of a rehearsal memory, or new data with them: a sample of one of the children."""

    def __init__(
        self, dataset: Any, children: Sequence[TreeNode], rows: MemoryRows | RehearsedRows
    ) -> None:
        super().__init__(dataset, children)
        self._rows = rows

    def parts(self, indices: Ints) -> list[tuple[TreeNode, NDArray[np.intp] | None, Ints]]:
        which, numbers = self._rows.places(np.asarray(indices, np.int64))
        places = [(c, np.flatnonzero(which == c)) for c in unique(which)]
        return [(self.children[c], at, numbers[at]) for c, at in places]

    def frozen(self, copies: dict[int, Dataset[Sample]]) -> Dataset[Sample]:
        dataset: Dataset[Sample] = self._rows.over([c.frozen(copies) for c in self.children])
        return dataset

    def raw(self) -> Raw | None:
        return _common_raw(self.children)


def _common_raw(children: Sequence[TreeNode]) -> Raw | None:
    """Return how samples of all children are made from bytes, if they are made alike."""
    first = children[0].raw() if children else None
    # Samples of several datasets are not read together: each has its own call of batch_transform.
    if first is None or first.batch_transform is not None:
        return None
    return first if all(first.same(c.raw()) for c in children[1:]) else None


def _merge(n: int, parts: Sequence[tuple[NDArray[np.intp] | None, Ids, Ints]]) -> Objects:
    """Merge lists of objects: those of each sample follow the order of the parts.

    Args:
        n: number of samples.
        parts: each (m,) samples, None for all n; (k,) their objects in order; (m,) number of
            objects per sample.

    >>> ids, counts = _merge(2, [(np.array([1, 0]), np.array([7, 8, 9]), np.array([1, 2])),
    ...                          (np.array([1]), np.array([5]), np.array([1]))])
    >>> ids.tolist(), counts.tolist()
    ([8, 9, 7, 5], [2, 2])
    """
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1:]
    everywhere = np.arange(n)
    places = [everywhere if at is None else at for at, _, _ in parts]
    counts = np.zeros(n, np.int64)
    for at, (_, _, many) in zip(places, parts, strict=True):
        counts[at] += many
    free = np.cumsum(counts) - counts  # position of the next object of each sample
    ids = np.empty(int(counts.sum()), np.int32)
    for at, (_, part_ids, many) in zip(places, parts, strict=True):
        before = np.cumsum(many) - many
        ids[np.arange(len(part_ids)) + np.repeat(free[at] - before, many)] = part_ids
        free[at] += many
    return ids, counts


def stretches(begin: Ints, counts: Ints) -> Ints:
    """Concatenate the ranges of `counts[i]` integers from `begin[i]` on.

    >>> stretches(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    before = counts.cumsum() - counts
    return np.repeat(begin - before, counts) + np.arange(int(counts.sum()))


# --- building ---------------------------------------------------------------------------------


class Tree:
    """Builds the nodes of a dataset and collects its leaves, each only once.

    Attributes:
        leaves: in the order in which their objects have ids.
        bases: of each leaf, the id of its first object. Leaves of the same objects share it: a task
            that comes back is often a new dataset over the files of an old one.
    """

    def __init__(self) -> None:
        self.leaves: list[CreelDataset] = []
        self.bases: list[int] = []
        self._nodes: dict[int, LeafNode] = {}
        self._known: dict[int, int] = {}  # base of each leaf, by its id
        self._first: dict[int, CreelDataset] = {}  # the first leaf with so many objects
        self._by_key: dict[str, int] = {}  # bases of leaves that have as many objects as others
        self._total = 0

    def build(self, dataset: Any) -> TreeNode:
        """Return the node of a dataset, with all nodes below it."""
        if is_wrapped(dataset):
            trace, inner = trace_of(dataset), unwrap(dataset)
            child = self.build(inner) if trace is None else self.traced(inner, trace)
            return WrappedNode(dataset, child, trace)
        below = inside(dataset)
        if below is None:
            return self._leaf(dataset)
        if isinstance(dataset, Subset):
            indices = _numbers(dataset)
            if indices is None:
                return TreeNode(dataset)
            return SubsetNode(dataset, self.build(dataset.dataset), indices)
        children = [self.build(child) for child in below]
        if isinstance(dataset, ConcatDataset):
            return ConcatNode(dataset, children)
        rows = placed(dataset)
        if rows is not None:
            return PlacedNode(dataset, children, rows)
        return TreeNode(dataset, children)  # Transformed or a StackDataset

    def traced(self, dataset: Dataset[Sample], trace: Trace) -> TreeNode:
        """Return the node of a dataset that declares nothing, by its trace."""
        return TracedNode(dataset, trace, self.place)

    def place(self, leaf: CreelDataset) -> int:
        """Add a leaf to the tree, if it is new, and return its first object id."""
        base = self._known.get(id(leaf))
        if base is None:
            base = self._known[id(leaf)] = self._base_of_same(leaf)
            self.leaves.append(leaf)
            self.bases.append(base)
            if base == self._total:
                self._total += leaf.object_count
        return base

    def _base_of_same(self, leaf: CreelDataset) -> int:
        """Return the base of an earlier leaf with the same objects, else the next free id.

        Builds manifests only of leaves that have equally many.
        """
        first = self._first.setdefault(leaf.object_count, leaf)
        if first is leaf:
            return self._total
        self._by_key.setdefault(first.manifest.key, self._known[id(first)])
        return self._by_key.setdefault(leaf.manifest.key, self._total)

    def _leaf(self, dataset: Any) -> TreeNode:
        if id(dataset) in self._nodes:
            return self._nodes[id(dataset)]
        if isinstance(dataset, IterableDataset) or not cacheable(dataset):
            return TreeNode(dataset)
        leaf = leaf_of(dataset)
        if leaf is None:
            return TreeNode(dataset)
        node = self._nodes[id(dataset)] = LeafNode(dataset, leaf, self.place(leaf))
        return node


def _numbers(subset: Subset[Sample]) -> Ints | None:
    """Return the (n,) indices of a Subset; None if they are not numbers."""
    try:
        indices = np.asarray(subset.indices)
    except (TypeError, ValueError):  # lists of different lengths, or other keys
        return None
    if indices.dtype.kind not in "iu" and indices.size:
        return None  # keys: the dataset is a mapping
    return indices.astype(np.int64)


def reads_singly(dataset: object) -> bool:
    """Whether `dataset[i]` for each sample is what torch's fetcher gets of a batch.

    Not if the dataset has a `__getitems__` of its own. Those of torch and creel are known to be
    the same.
    """
    below = None if unchanged(dataset, ConcatDataset) else inside(dataset)
    if below is not None:
        return all(map(reads_singly, below))
    rows = isinstance(dataset, RecordDataset) and dataset.batch_transform is None
    return rows or not attribute(dataset, "__getitems__")  # as torch: it may be None
