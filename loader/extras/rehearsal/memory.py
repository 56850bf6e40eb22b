"""`creel.Rehearsal`: a memory of earlier data, of which each batch replays some samples."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Subset

from creel.errors import ConfigError
from creel.loader.data.rehearsed import MemoryRows, Rehearsed, length_of, new_data
from creel.loader.data.user_code.attributes import changed, snapshot
from creel.loader.data.user_code.protected import attribute
from creel.loader.data.user_code.values import check_whole, shown
from creel.loader.line.order.rehearsed_order import RehearsedBatches
from creel.loader.line.order.rehearsing import Content
from creel.policies.arrays import Ints
from creel.policies.rehearsal.growth import Growth
from creel.policies.rehearsal.memory_rows import (
    UNLABELLED,
    Keys,
    Offered,
    ascending,
    kept,
    merged,
    mixed,
)

if TYPE_CHECKING:
    from torch.utils.data import Sampler

_log = logging.getLogger("creel.loader")
#: At most so many changed attributes of a dataset are named.
_NAMES = 5


class Rehearsal:
    """A memory of what was trained on before, for `creel.DataLoader(..., rehearsal=memory)`.

        memory = creel.Rehearsal(per_batch=32, budget=2000)
        for task in tasks:
            loader = creel.DataLoader(task, 32, shuffle=True, rehearsal=memory)
            ...  # 32 rows of the first task, later 32 + 32
            memory.add(task, labels=task.targets)

    It keeps references to datasets and numbers of samples, no data. Its rows are a function of what
    was added in which order, and of the seed. All ranks of a job must add alike.

    Args:
        per_batch: samples of the memory that each batch of each rank replays.
        budget: how many samples are kept; None: all.
        seed: of what is kept and in which order it is replayed.
        every: for data that is seen once: until a loader was read whole, the memory also takes in
            that loader's own samples of all finished blocks of so many steps of the epoch, on all
            ranks, as ones without labels. None: it stays as it is.

    Raises:
        ConfigError: (a ValueError) an argument is not a number of that range.
    """

    def __init__(
        self,
        per_batch: int,
        *,
        budget: int | None = None,
        seed: int = 0,
        every: int | None = None,
    ) -> None:
        check_whole("per_batch", per_batch, 1)
        check_whole("seed", seed, 0)
        if budget is not None:
            check_whole("budget", budget, 1)
        if every is not None:
            check_whole("every", every, 1)
        self.per_batch, self.budget, self.seed, self.every = per_batch, budget, seed, every
        nothing = np.empty(0, np.int64)
        self._kept = Offered(nothing, nothing, np.empty(0, np.uint64))
        self._dataset = MemoryRows([], np.empty(0, np.int32), nothing)
        self._offered = 0  # samples
        self._adds = 0  # tasks so far, which seed the draws
        self._ordered: bool | None = None  # whether tasks are added with an order; None: none was
        self._awaited: Any = None  # what a loader reads while nothing was added
        self._warned = False
        #: Plain attributes and length of each dataset when it was added, by its id: rows hold it.
        self._as_added: dict[int, tuple[dict[str, str], int]] = {}

    def add(
        self,
        dataset: Dataset[Any],
        labels: ArrayLike | None = None,
        *,
        order: ArrayLike | None = None,
    ) -> None:
        """Offer all samples of a dataset; from the next loader on, batches replay what is kept.

        Args:
            dataset: map-style; it must stay as it is, since its samples are read when they are
                replayed. If its plain attributes or its length have changed when another loader is
                made, the log names them.
            labels: (n,) numbers or texts: the memory is balanced over their values. None: all kept
                samples are a random choice (a reservoir); so are those without labels, as a class
                of their own, if others have some.
            order: (n,) numbers: in each class those with the smallest are kept, for example the
                ranks of herding, or losses. None: a random choice. Either all calls give it, or
                none.

        Raises:
            ConfigError: the dataset has no length or is iterable; or the arrays do not fit it.
        """
        if isinstance(dataset, IterableDataset):
            raise ConfigError("a memory needs a map-style dataset: rows are read by number")
        if self._ordered not in {None, order is not None}:
            raise ConfigError("give order= to all calls of add, or to none: they do not compare")
        if order is not None and self.every is not None:
            raise ConfigError(
                "order= needs a memory without every=: new samples have no such order"
            )
        dataset = new_data(dataset)
        n = length_of(dataset)
        uids = np.arange(self._offered, self._offered + n)
        classes = np.full(n, UNLABELLED) if labels is None else _classes(labels, n)
        keys = mixed(uids, self.seed) if order is None else _keys(order, n)
        both = merged(self._kept, Offered(uids, classes, keys))
        chosen = kept(both, self.budget, self.seed + 1)
        self._dataset = _rows(self._dataset, dataset, n, chosen)
        held = {id(dataset): dataset for dataset in self._dataset.datasets}
        self._as_added = {
            i: self._as_added.get(i) or _state(dataset) for i, dataset in held.items()
        }
        self._kept = both.take(chosen)
        self._offered += n
        self._adds += 1
        self._ordered = order is not None
        self._awaited = None

    @property
    def dataset(self) -> Dataset[Any]:
        """What is kept: a dataset, in the order of `uids`."""
        return self._dataset

    @property
    def uids(self) -> NDArray[np.int64]:
        """(k,) ascending: the number of each row in the concatenation of all that was added."""
        return self._kept.uids

    def content(self) -> Content:
        """Return what batches need to know of what is kept now."""
        seed = int(mixed(np.array([self._adds]), self.seed)[0])
        growth = None
        if self.every is not None:
            growth = Growth(self.every, self._kept, self._offered, self.budget, self.seed)
        grown = f"{self.every} {self._offered} {self.budget}".encode() if growth else b""
        digest = xxhash.xxh3_64_hexdigest(self.uids.tobytes() + grown, seed=seed)
        return Content(len(self.uids), self.per_batch, seed, digest, growth)

    def over(
        self,
        dataset: Dataset[Any],
        sampler: Sampler[Any] | Iterable[Any],
        batch_size: int | None,
        drop_last: bool = False,
    ) -> tuple[Dataset[Any], Sampler[list[Any]]]:
        """Return a dataset and a batch sampler for any loader, `torch.utils.data.DataLoader` too.

            data, batches = memory.over(task, RandomSampler(task), 32)
            loader = torch.utils.data.DataLoader(data, batch_sampler=batches)

        Those of a `creel.Stream` are `memory.over(stream, stream.batches(32), None)`.

        Its batches are those of `creel.DataLoader(task, 32, sampler=..., rehearsal=memory)`.

        Args:
            dataset: the new data.
            sampler: of single samples of it; of batches, if `batch_size` is None.
            batch_size: new samples in a batch.
            drop_last: see `BatchSampler`.

        Raises:
            ConfigError: the dataset has no length.
        """
        of_stream: Callable[[Content], Sampler[Any]] | None = attribute(sampler, "rehearsing")
        if of_stream is not None and batch_size is None:
            return dataset, of_stream(self.content())
        batches = sampler if batch_size is None else BatchSampler(sampler, batch_size, drop_last)
        data = self.behind(dataset)
        return data, RehearsedBatches(batches, self.content(), length_of(data))

    def behind(self, dataset: Any, *, frames: int = 1) -> Any:
        """Return new data with the memory's rows behind it; unchanged if there are none.

        frames: of creel above this one, for warnings.
        """
        dataset = new_data(dataset)
        self._warn_of_nothing(dataset, frames)
        self._warn_of_changes()
        return Rehearsed(dataset, self._dataset) if len(self._dataset) else dataset

    def _warn_of_nothing(self, dataset: object, frames: int) -> None:
        """Warn once if a second dataset is trained on and nothing was added."""
        if self._adds or self._warned:
            return
        if self._awaited is None:
            self._awaited = dataset
        elif self._awaited is not dataset:
            self._warned = True
            warnings.warn(
                "a second dataset is trained on, but nothing was added to the memory: call"
                " memory.add(task, labels=...) after each task",
                stacklevel=frames + 3,
            )

    def _warn_of_changes(self) -> None:
        """Warn, once for each dataset, if one was changed since it was added."""
        for dataset in self._dataset.datasets:
            now, n_now = _state(dataset)
            before, n = self._as_added.get(id(dataset), (now, n_now))  # none in a copy of this
            names = [*changed(before, now), *([] if n == n_now else [f"{n} samples, now {n_now}"])]
            if names:
                self._as_added[id(dataset)] = now, n_now
                _log.warning(
                    "a %s was changed after it was added to the memory, which reads its rows from"
                    " what it is now: add a dataset for each task (changed: %s)",
                    type(dataset).__name__,
                    ", ".join(names[:_NAMES]),
                )


def _state(dataset: Any) -> tuple[dict[str, str], int]:
    """Return a dataset's plain attributes and length; nothing and 0 if they cannot be had."""
    try:
        return snapshot(dataset), len(dataset)
    except Exception:  # noqa: BLE001  a user's object raises anything, such as keys of a mapping
        return {}, 0


def _rows(old: MemoryRows, dataset: Any, n: int, chosen: NDArray[np.intp]) -> MemoryRows:
    """Return the `chosen` rows of those of `old`, followed by the n samples of a dataset."""
    base, numbers = _flat(dataset, n)
    datasets, added = [*old.datasets, base], [*old.added, dataset]
    same = next(i for i, dataset in enumerate(datasets) if dataset is base)
    part = np.concatenate([old.part, np.full(n, same, np.int32)])[chosen]
    index = np.concatenate([old.index, numbers])[chosen]
    used, part = np.unique(part, return_inverse=True)
    part = part.astype(np.int32)
    return MemoryRows([datasets[i] for i in used], part, index, [added[i] for i in used])


def _flat(dataset: Any, n: int) -> tuple[Any, Ints]:
    """Return the dataset below torch's Subsets, and the (n,) numbers of the samples there."""
    numbers = np.arange(n)
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices)
        if indices.dtype.kind not in "iu" or indices.ndim != 1 or len(indices) < n:
            break  # keys of a mapping, or rows that it will not have
        dataset, numbers = dataset.dataset, indices[numbers].astype(np.int64)
    return dataset, numbers


def _classes(labels: ArrayLike, n: int) -> Ints:
    """Return the (n,) classes of labels: the numbers themselves, or hashes of texts."""
    values = _array("labels", labels)
    if values.shape != (n,):
        raise ConfigError(f"labels have the shape {values.shape}, but the dataset {n} samples")
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if values.dtype.kind not in "US" and not all(isinstance(value, str) for value in values):
        raise ConfigError(f"labels are numbers or texts, not {values.dtype}")
    texts, which = np.unique(values.astype(str), return_inverse=True)
    hashes = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts.tolist()]
    return np.array(hashes, np.uint64).astype(np.int64)[which]


def _array(name: str, values: ArrayLike) -> NDArray[Any]:
    """Return values as an array.

    Raises:
        ConfigError: they are none.
    """
    try:
        return np.asarray(values)
    except Exception as e:
        raise ConfigError(f"{name}={shown(values)}: give one value for each sample: {e}") from e


def _keys(order: ArrayLike, n: int) -> Keys:
    values = _array("order", order)
    if values.shape != (n,):
        raise ConfigError(f"order has the shape {values.shape}, but the dataset {n} samples")
    if values.dtype.kind not in "iubf" or np.isnan(values).any():
        raise ConfigError("order consists of numbers, and none of them is NaN")
    return ascending(values.astype(np.float64))
