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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.manifest import Manifest
from creel.loader.adapters import Addressed, Declared
from creel.loader.base import CreelDataset, Ids, Indices, Raw, Sample
from creel.loader.batches import cast, numbers, stacked
from creel.loader.reading import Lease, Session
from creel.loader.tree import Node, Scout, Tree

if TYPE_CHECKING:
    from creel.loader.learnt import Learnt


@dataclass(frozen=True)
class Gather:
    """Batches straight from bytes: what samples are made of, and where their labels are.

    `labels` maps (n,) numbers of samples to their collated labels; None where there are none.
    """

    raw: Raw
    labels: Callable[[Indices], torch.Tensor] | None

    @property
    def nbytes(self) -> int:
        """Of one object."""
        return self.raw.nbytes

    @property
    def batch_nbytes(self) -> int:
        """Of one sample in a batch, before any code of the person's."""
        raw = self.raw
        return raw.nbytes if raw.to is None else raw.nbytes // raw.dtype.itemsize * raw.to.itemsize

    @property
    def has_code(self) -> bool:
        """Whether code of the person's runs: once a batch, in a worker where there are any."""
        return self.raw.batch_transform is not None

    @property
    def converts(self) -> bool:
        """Whether a batch is something else than its rows."""
        return self.raw.to is not None or self.has_code

    def collate(
        self, rows: torch.Tensor, indices: Indices, memory: Callable[[int], torch.Tensor]
    ) -> Any:
        """What default_collate would make of these samples; `rows` themselves unless it `converts`.

        Args:
            rows: (n, nbytes) uint8, contiguous, aligned to the dtype's size; row i holds the
                object of sample indices[i] (`Binding.objects` has them in this order).
            indices: (n,) numbers of the samples.
            memory: gives (nbytes,) uint8 for what is made of them.
        """
        raw = self.raw
        batch: Any = numbers(rows, raw.dtype, raw.shape)
        if raw.batch_transform is not None:
            batch = raw.batch_transform(cast(batch, raw.to))
            batch = stacked(batch, len(rows), memory)
        elif raw.to is not None:
            batch = cast(batch, raw.to, memory)
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

    def reading(
        self, session: Session, ids: NDArray[np.integer] | None = None, stamp: int = -1
    ) -> Lease:
        """A context in which this thread's reads of the leaves are served by the session's arena.

        Args:
            ids: (k,) objects of the step, which the daemon has pinned; others are then read from
                the source. Without them any object may be taken that stays in its place while it
                is copied.
            stamp: what `session.hold` gave for the step.
        """
        allowed = None if ids is None else frozenset(ids.tolist())
        return Lease(session, self._bases, self._named, allowed, stamp)

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
        return Gather(raw, None if raw.labels is None else self._root.labels())

    def gathers(self, gather: Gather) -> bool:
        """Whether `gather` still says how batches are built: the person may assign attributes."""
        return gather.raw.same(self._root.raw())

    @property
    def apart(self) -> bool:
        """Whether another thread may ask for `objects`: none of the person's code runs there."""
        return not any(
            isinstance(leaf, Declared) or not type(leaf).__module__.startswith("creel.")
            for leaf in self.leaves
        )


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
