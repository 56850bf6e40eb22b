"""The numbers of the samples in the batch that a loader returned last.

creel's iterators record them; for torch's own (a loader that is switched off) a sampler does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creel.errors import ConfigError

if TYPE_CHECKING:  # a torch without it has no such iterator: see `MISSING`
    from creel.loader.data.reading.bad_samples import Tolerance
    from creel.loader.torch_private import BaseDataLoaderIter


class Returned:
    """What the sampler yielded for the batch that a loader returned last.

    Attributes:
        index: the same, noted when the batch is about to be returned.
    """

    def __init__(self) -> None:
        self.index: Any = None

    @classmethod
    def of(cls, loader: Any) -> Returned:
        """Return the one of a loader, which all its iterators share."""
        returned: Returned = loader.__dict__.setdefault("_creel_returned", cls())
        return returned

    def numbers(self) -> NDArray[np.int64]:
        """Return the (n,) numbers, n = 0 before the first batch.

        Raises:
            ConfigError: what the sampler yielded is no number, nor a flat group of numbers.
        """
        if self.index is None:
            return np.empty(0, np.int64)
        try:
            numbers = np.atleast_1d(np.asarray(self.index))
        except Exception as e:
            raise ConfigError(f"the samples of the last batch have no numbers: {e}") from e
        if numbers.size and (numbers.ndim != 1 or numbers.dtype.kind not in "iu"):
            raise ConfigError(f"the samples of the last batch have no numbers: {numbers.dtype}")
        return numbers.astype(np.int64)


class PulledIndices:
    """What the sampler yielded for an iterator's batches until they are returned.

    Attributes:
        by_batch: by the number of the batch after those skipped.
        batched: whether a batch is made of several samples.
        returned: the loader's.
    """

    def __init__(self, loader: Any, tolerance: Tolerance) -> None:
        """`tolerance`: it knows which samples are left out of their batches, or replaced."""
        self.by_batch: dict[int, Any] = {}
        self.batched = True
        self.returned = Returned.of(loader)
        self._dataset, self._tolerance = loader.dataset, tolerance

    def good(self, index: Any) -> Any:
        """Return the samples that a batch has, of what the sampler yielded for it."""
        return self._tolerance.delivered(index, self._dataset, many=self.batched)


# --- torch's own iterators ----------------------------------------------------------------------

#: Its `loader` is the one whose iterator this thread makes.
_making = threading.local()


class RecordingSampler:
    """What torch's iterator iterates in place of its sampler: the same, and keeps what it yields.

    Attributes:
        pulled: what was yielded for each batch, by its number, as long as it may be needed.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.pulled: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        self.pulled = {}
        return self._recorded(iter(self._sampler), self.pulled)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as torch: TypeError if it has none

    @staticmethod
    def _recorded(items: Iterator[Any], pulled: dict[int, Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            pulled[number] = item
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def recorded(loader: Any, sampler: Any) -> Any:
    """Return what `loader` iterates: a `RecordingSampler` while `recording_iterator` is at work."""
    mine = getattr(_making, "loader", None) is loader
    return RecordingSampler(sampler) if mine else sampler


def recording_iterator(
    loader: Any, make: Callable[[], BaseDataLoaderIter], returned: Returned
) -> BaseDataLoaderIter:
    """Return what torch's `_get_iterator`, `make`, returns for a map-style dataset."""
    outer, _making.loader = getattr(_making, "loader", None), loader  # a sampler may use a loader
    try:
        iterator: Any = make()
    finally:
        _making.loader = outer
    sampler = iterator._index_sampler  # noqa: SLF001  torch's
    if isinstance(sampler, RecordingSampler):  # a subclass of the loader may choose the sampler
        # By weak reference: in a cycle it would keep its workers until Python's collector runs.
        iterator._next_data = partial(_next_data, weakref.ref(iterator), sampler, returned)  # noqa: SLF001  of this object only
    return iterator  # type: ignore[no-any-return]  # torch's


def _next_data(
    reference: weakref.ref[BaseDataLoaderIter], sampler: RecordingSampler, returned: Returned
) -> Any:
    iterator: Any = reference()
    _taken(iterator, sampler)  # one that raised
    data = type(iterator)._next_data(iterator)  # noqa: SLF001  torch's
    for index in _taken(iterator, sampler):
        returned.index = index
    return data


def _taken(iterator: Any, sampler: RecordingSampler) -> list[Any]:
    """Forget and return what was yielded for batches that are not outstanding any more."""
    outstanding: Any = getattr(iterator, "_task_info", ())  # none without workers
    return [sampler.pulled.pop(i) for i in list(sampler.pulled) if i not in outstanding]
