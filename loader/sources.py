"""bind: which objects the samples of any dataset are made of, and reading them from a session.

`bind` walks torch's Subset, ConcatDataset and StackDataset and creel's own wrappers down to the
leaves it knows: creel's datasets, torchvision's image folders, and datasets that declare what they
read. A declaration is two attributes: `creel_uris`, a sequence of addresses, and
`objects(index)`, which gives one sample's numbers in `creel_uris` (or addresses out of it; numbers
are cheaper) in order of reading; its `__getitem__` reads them by `creel.read` or `creel.open`.
Whatever else is in the tree has no objects and reads by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.manifest import Manifest
from creel.loader.adapters import Addressed
from creel.loader.base import CreelDataset, Ids, Indices, Sample
from creel.loader.reading import Lease, Session
from creel.loader.tree import Node, Scout, Tree

if TYPE_CHECKING:
    from creel.loader.learnt import Learnt


@dataclass(frozen=True)
class Gather:
    """Batches straight from bytes: every sample is `nbytes` bytes, seen as `dtype` and `shape`.

    `labels` maps (n,) numbers of samples to their collated labels; None where there are none.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    labels: Callable[[Indices], torch.Tensor] | None

    def collate(self, rows: torch.Tensor, indices: Indices) -> torch.Tensor | list[torch.Tensor]:
        """What default_collate would make of these samples, without a copy of `rows`.

        Args:
            rows: (n, nbytes) uint8, contiguous, aligned to the dtype's size; row i holds the
                object of sample indices[i] (`Binding.objects` has them in this order).
            indices: (n,) numbers of the samples.
        """
        batch = rows.view(self.dtype).reshape(len(rows), *self.shape)
        return batch if self.labels is None else [batch, self.labels(indices)]


class Binding:
    """A dataset whose objects are known. Made by `bind`; pickles together with its dataset."""

    def __init__(self, root: Node, leaves: list[CreelDataset]) -> None:
        self._root = root
        self.leaves = leaves
        self._index_leaves()

    def _index_leaves(self) -> None:
        self._bases: dict[int, int] = {}
        total = 0
        for leaf in self.leaves:
            self._bases[id(leaf)] = total
            total += leaf.object_count
        self._named = [leaf for leaf in self.leaves if isinstance(leaf, Addressed)]

    def __getstate__(self) -> dict[str, object]:
        return {"_root": self._root, "leaves": self.leaves}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._index_leaves()

    @cached_property
    def dataset(self) -> Dataset[Sample]:
        """What to take samples from: the dataset, with a view in place of each torchvision folder.

        A view has that folder's class and attributes and reads its images through the lease.
        """
        return self._root.view()

    @cached_property
    def manifest(self) -> Manifest:
        """The objects of all leaves, each leaf once."""
        return Manifest.concat([leaf.manifest for leaf in self.leaves])

    def current(self) -> bool:
        """Whether `bind` would still say the same of the dataset."""
        return self._root.current()

    def still(self, indices: NDArray[np.int64]) -> bool:
        """Whether `bind` would still say the same of these (n,) samples."""
        return self._root.still(indices)

    def objects(self, indices: NDArray[np.int64]) -> tuple[Ids, NDArray[np.int64]]:
        """What samples are made of.

        Args:
            indices: (n,) numbers of samples, as the sampler gives them.

        Returns:
            (k,) object ids in the manifest, sample after sample; (n,) ids per sample.

        Raises:
            IndexError: outside of the dataset.
        """
        return self._root.objects(np.asarray(indices, np.int64))

    def reading(self, session: Session, ids: NDArray[np.integer] | None = None) -> Lease:
        """A context in which this thread's reads of the leaves are served by the session's arena.

        Args:
            ids: (k,) objects of the step, which the daemon has pinned; others are then read from
                the source. Without them any object may be taken that stays in its place while it
                is copied.
        """
        allowed = None if ids is None else frozenset(ids.tolist())
        return Lease(session, self._bases, self._named, allowed)

    def counting(self) -> Lease:
        """The same where nothing lies ready: the leaves are read directly, which is counted."""
        return Lease(None, self._bases, self._named, None)

    def frozen(self) -> Binding:
        """The same of a copy that nobody can change; where there is a `gather`."""
        tree = Tree()
        root = tree.plant(self._root.frozen({}))
        return Binding(root, tree.leaves)

    def labels(self) -> list[object]:
        """The labels of all leaves; others, once the person has assigned others."""
        return [getattr(leaf, "labels", None) for leaf in self.leaves]

    def gather(self) -> Gather | None:
        """How batches are built from bytes alone, with the labels of now.

        None where samples need code of the person's.
        """
        raw = self._root.raw()
        if raw is None:
            return None
        labels = None if raw.labels is None else self._root.labels()
        return Gather(raw.nbytes, raw.dtype, raw.shape, labels)

    def has_code(self) -> bool:
        """Whether any sample goes through code of the person's now."""
        return any(code is not None for leaf in self.leaves for code in leaf.callables())


def bind(dataset: object) -> Binding | None:
    """The objects behind a map-style dataset; None where nothing in it can be cached."""
    if not bindable(dataset):
        return None  # without a look at the indices of Subsets, of which there may be millions
    tree = Tree()
    root = tree.plant(dataset)
    if not tree.leaves:
        return None
    return Binding(root, tree.leaves)


def bound(dataset: Dataset[Sample], learnt: Learnt) -> Binding:
    """A dataset that declares nothing with what it was heard to read."""
    tree = Tree()
    return Binding(learnt.plant(dataset, tree.place), tree.leaves)


def bindable(dataset: object) -> bool:
    """Whether `bind` finds anything to cache: the answer alone, in no time.

    Indices of Subsets are not looked at: of one that no sample has, `bind` may think otherwise.
    """
    return _scouted(dataset).found


def promising(dataset: object) -> bool:
    """Whether `bind` finds something, or may find it later: below `creel.wrap` reads are learnt."""
    scout = _scouted(dataset)
    return scout.found or scout.listens


def _scouted(dataset: object) -> Scout:
    scout = Scout()
    scout.plant(dataset)
    return scout
