"""bind: find the objects that a dataset's samples consist of, to read them from a session.

`bind` walks through torch's Subset, ConcatDataset and StackDataset and creel's own wrappers to the
leaves it knows: creel's datasets, torchvision's image folders, and datasets that declare what they
read. A declaration is two attributes: `creel_uris`, a sequence of addresses, and `objects(index)`,
which returns one sample's positions in `creel_uris` (or addresses from it; positions are cheaper)
in order of reading. The dataset's `__getitem__` reads them with `creel.read` or `creel.open`. All
other datasets in the tree have no objects, and read directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.memory.memfd import Descriptor
from creel.cache.storage.manifest import Manifest
from creel.loader.data.binding.adapters import Addressed, Declared
from creel.loader.data.binding.tree import Tree, TreeNode, bindable, kept_on_top
from creel.loader.data.binding.wrapped import Trace
from creel.loader.data.datasets.base import Raw, Sample
from creel.loader.data.datasets.batches import cast, numbers, rows_cast, stacked
from creel.loader.data.page_cache import in_page_cache
from creel.loader.data.reading.lease import Lease
from creel.loader.data.rehearsed import numbers_of
from creel.loader.data.user_code.protected import length
from creel.messages import DecodedWords
from creel.policies.arrays import Ids, Ints
from creel.policies.cluster.job_order import JobOrder, SampleObjects

if TYPE_CHECKING:
    from creel.loader.client.session import Session

#: Samples or files that `Binding.in_objects` and `in_page_cache` check.
_PROBED = 64
#: Rows of a manifest whose addresses `Binding.serves` has as text at a time.
_LOOKED_UP = 1 << 16


@dataclass(frozen=True)
class Gather:
    """How batches are built straight from bytes.

    `labels` maps (n,) numbers of samples to their collated labels; None if there are no labels.
    """

    raw: Raw
    labels: Callable[[Ints], torch.Tensor] | None

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    @property
    def batch_nbytes(self) -> int:
        """Bytes of one sample in a batch, before any `batch_transform`."""
        raw = self.raw
        return raw.nbytes if raw.to is None else raw.nbytes // raw.dtype.itemsize * raw.to.itemsize

    @property
    def has_code(self) -> bool:
        """Whether user code runs, in a worker if there are any."""
        return self.per_sample or (self.raw.batch_transform is not None and not self.raw.splits)

    @property
    def per_sample(self) -> bool:
        """Whether user code runs for each sample."""
        return self.raw.transform is not None

    @property
    def converts(self) -> bool:
        """Whether a batch is more than a view of its rows: a copy, or the result of user code."""
        return self.raw.to not in {None, self.raw.dtype} or self.has_code or self.raw.splits

    def collate(
        self, rows: torch.Tensor, indices: Ints, memory: Callable[[int], torch.Tensor]
    ) -> Any:
        """Batch these samples as default_collate would; a view of `rows` unless it `converts`.

        Not for datasets with a function of each record: see `samples`.

        Args:
            rows: n * nbytes of uint8, contiguous, aligned to the dtype's size: the objects of the
                samples `indices`, one after the other (the order of `Binding.objects`).
            indices: (n,) numbers of the samples.
            memory: returns (nbytes,) uint8 for the converted batch.
        """
        raw = self.raw
        n = len(indices)
        batch: Any = numbers(rows, n, raw.dtype, raw.shape)
        if raw.batch_transform is not None:
            batch = raw.batch_transform(cast(batch, raw.to))
            batch = stacked(batch, n, memory)
        elif raw.to is not None:
            batch = cast(batch, raw.to, memory)
        return batch if self.labels is None else self.labelled(batch, indices)

    def samples(self, rows: torch.Tensor) -> list[Sample]:
        """Call the user's function of each record; for `rows` see `collate`."""
        raw = self.raw
        assert raw.transform is not None  # noqa: S101
        array = rows.numpy().reshape(-1, raw.nbytes)
        return list(map(raw.transform, rows_cast(array, raw.dtype, raw.shape, raw.to)))

    def labelled(self, batch: Any, indices: Ints) -> Any:
        """Return a collated batch with its labels, if there are any."""
        return batch if self.labels is None else [batch, self.labels(indices)]


class Binding:
    """A dataset whose objects are known. Made by `bind`; pickled together with its dataset."""

    def __init__(self, root: TreeNode, tree: Tree) -> None:
        """`root`: the node that was built by `tree`."""
        self._root = root
        self.leaves, self._firsts = tree.leaves, tree.bases
        self._index_leaves()

    def _index_leaves(self) -> None:
        self._bases = {id(leaf): base for leaf, base in zip(self.leaves, self._firsts, strict=True)}
        named = [leaf for leaf in self.leaves if isinstance(leaf, Addressed)]
        #: Of leaves that share a file, the last says whether its version is checked.
        self._named = sorted(named, key=lambda leaf: leaf.checked)
        self._among: SampleObjects | None = None  # the object of each sample, once asked for

    def __getstate__(self) -> dict[str, object]:
        return {"_root": self._root, "leaves": self.leaves, "_firsts": self._firsts}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._index_leaves()

    @property
    def dataset(self) -> Dataset[Sample]:
        """The dataset to take samples from."""
        dataset: Dataset[Sample] = self._root.dataset
        return dataset

    @cached_property
    def manifest(self) -> Manifest:
        """The objects of all leaves, those of the same objects once."""
        parts: list[Manifest] = []
        total = 0
        for leaf, base in zip(self.leaves, self._firsts, strict=True):
            if base == total:
                parts.append(leaf.manifest)
                total += leaf.object_count
        return Manifest.concat(parts)

    def is_current(self, indices: Ints | None = None) -> bool:
        """Whether `bind` would still give the same for these (n,) samples, None for all."""
        try:
            return self._root.is_current(indices)
        except Exception:  # noqa: BLE001  what a Subset has now compares as it likes
            return False

    def objects(self, indices: Ints) -> tuple[Ids, Ints]:
        """Return the objects that samples consist of.

        Args:
            indices: (n,) numbers of samples, as the sampler yields them.

        Returns:
            (k,) object ids in the manifest, sample by sample; (n,) number of ids per sample.

        Raises:
            IndexError: outside the dataset.
        """
        return self._root.objects(np.asarray(indices, np.int64))

    def digest(self) -> str:
        """Return a digest that is equal for bindings whose samples all have the same objects."""
        samples = np.arange(numbers_of(self.dataset))
        digest = xxhash.xxh3_128(self.manifest.key.encode())
        for column in self.objects(samples):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
        return digest.hexdigest()

    def in_objects(self, order: JobOrder) -> JobOrder | None:
        """Return an epoch's order of samples as one of objects; None if samples have several.

        None also if the user's own code would have to run for each sample.
        """
        some = np.unique(np.linspace(0, order.numbers - 1, _PROBED).astype(np.int64))
        ids, counts = self.objects(some)
        if not (counts == 1).all():
            return None
        as_it_is = order.replays is None and len(self.manifest) == order.samples
        if as_it_is and np.array_equal(ids, some):
            return order
        if self._among is None or not self._among.are(order.numbers, some, ids):
            self._among = None
        object_of = self.of_samples(order.numbers)
        return None if object_of is None else order._replace(object_of=object_of)

    def of_samples(self, n: int) -> SampleObjects | None:
        """Return the object of each of the first n samples; None as for `in_objects`."""
        if self._among is None or len(self._among.objects) != n:
            if not self.thread_safe:
                return None
            objects, counts = self.objects(np.arange(n))
            if not (counts == 1).all():
                return None
            self._among = SampleObjects(objects.astype(np.int32))
        return self._among

    @property
    def opens_files(self) -> bool:
        """Whether samples open files themselves; each is looked at before it is served."""
        return any(leaf.checked for leaf in self._named)

    def in_page_cache(self) -> bool:
        """Whether all objects are whole local files in the page cache, judged by a few."""
        if not (len(self.manifest) and all(leaf.whole_files for leaf in self.leaves)):
            return False
        some = np.random.default_rng().integers(0, len(self.manifest), _PROBED)
        return in_page_cache(self.manifest.addresses(self.manifest.rows(np.unique(some))))

    def serves(self, path: str) -> bool:
        """Whether a local file, named by its real path, is one of those that objects lie in."""
        name, rows = os.path.basename(path), len(self.manifest.table)  # noqa: PTH119  text
        for first in range(0, rows, _LOOKED_UP):
            for address in self.manifest.addresses(np.arange(first, min(first + _LOOKED_UP, rows))):
                if address.endswith(name) and (
                    address == path or os.path.realpath(address) == path
                ):
                    return True
        return False

    def kept(self) -> bool:
        """Whether all that samples read is kept decoded."""
        if kept_on_top(self.dataset):
            return True
        stores = [leaf.keeping.store if leaf.keeping else None for leaf in self.leaves]
        kept = sum(store.kept for store in stores if store is not None)
        if not kept:
            return False  # first: a stream has no length
        samples = length(self.dataset)
        if samples is None or kept < samples:
            return False
        ids = self.objects(np.arange(samples))[0]
        for leaf, store in zip(self.leaves, stores, strict=True):
            own = ids.astype(np.int64) - self._bases[id(leaf)]
            own = own[(own >= 0) & (own < leaf.object_count)]
            if len(own) and (store is None or not store.has_all(own)):
                return False
        return True

    def kept_objects(self) -> list[tuple[DecodedWords, Descriptor]]:
        """Return which objects the daemon need not bring while they are in memory decoded.

        Only those that nothing else reads, as far as creel's own code says; and of remote files
        only those of a dataset's first loader, as others decode them again.
        """
        out = []
        for leaf, first in zip(self.leaves, self._firsts, strict=True):
            own = type(leaf).__module__.startswith("creel.") and self._firsts.count(first) == 1
            keeping = leaf.keeping if own else None
            words = None if keeping is None or keeping.store is None else keeping.store.index_words
            if keeping is None or words is None:
                continue
            if keeping.loaders == 1 or not leaf.manifest.remote.any():
                out.append((DecodedWords(first, leaf.object_count, words[1]), words[0]))
        return out

    def reading(self, session: Session, step: int, ids: NDArray[np.integer], stamp: int) -> Lease:
        """Return a lease: inside its `with`, this thread's reads of a step's objects are copies.

        Args:
            ids: (k,) objects of the step, which the daemon has pinned; others are read directly.
            stamp: what `session.hold` returned for the step.
        """
        return Lease(session, step, ids, stamp, self._bases, self._named)

    def frozen(self) -> Binding:
        """Return a binding of a private copy of the dataset. Requires a `gather`."""
        tree = Tree()
        root = tree.build(self._root.frozen({}))
        return Binding(root, tree)

    def labels(self) -> list[object]:
        """Return the `labels` of all leaves, whose identity changes if the user assigns others."""
        return [getattr(leaf, "labels", None) for leaf in self.leaves]

    def gather(self) -> Gather | None:
        """Return how batches are built from bytes alone, with the present labels.

        None if user code must run for each sample.
        """
        raw = self._root.raw()
        if raw is None:
            return None
        return Gather(raw, None if raw.labels is None else self._root.labels())

    def gathers(self, gather: Gather) -> bool:
        """Whether batches are still built as in `gather`: the user may assign attributes."""
        return gather.raw.same(self._root.raw())

    def allowed(self) -> int | None:
        """Return how many samples may be fetched ahead in all; see `FetchLimit.allowed`."""
        limits = [leaf.limit.allowed() for leaf in self._named if leaf.limit is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def thread_safe(self) -> bool:
        """Whether another thread may call `objects`, because it runs no user code."""
        return not any(
            isinstance(leaf, Declared) or not type(leaf).__module__.startswith("creel.")
            for leaf in self.leaves
        )


def bind(dataset: object) -> Binding | None:
    """Bind a map-style dataset; None if nothing in it can be cached."""
    if not bindable(dataset):
        return None  # before reading a Subset's indices, perhaps millions
    tree = Tree()
    root = tree.build(dataset)
    if not tree.leaves:
        return None
    return Binding(root, tree)


@cache
def empty_binding() -> Binding:
    """Return the binding of a dataset without any objects, for sessions that only count."""
    return Binding(TreeNode(None), Tree())


def bound(dataset: Dataset[Sample], trace: Trace) -> Binding:
    """Bind a dataset that declares nothing by its trace."""
    tree = Tree()
    return Binding(tree.traced(dataset, trace), tree)
