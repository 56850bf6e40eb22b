"""torch's own iterators, for a loader that is switched off: what they return is noted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from creel.loader.iterators.returned import Returned
from creel.loader.torch_private import BaseDataLoaderIter


class NotedSampler:
    """What torch's iterator iterates in place of its sampler: the same, and keeps what it yields.

    Attributes:
        pulled: what was yielded for each batch, by its number, as long as it may be needed.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.pulled: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        self.pulled = {}
        return self._noted(iter(self._sampler), self.pulled)

    @staticmethod
    def _noted(items: Iterator[Any], pulled: dict[int, Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            pulled[number] = item
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def noted_iterator(loader: Any, make: Callable[[], BaseDataLoaderIter]) -> BaseDataLoaderIter:
    """Return what torch's `_get_iterator`, `make`, returns for a map-style dataset.

    While it is made, the loader's `_index_sampler` is a `NotedSampler`.
    """
    loader.__dict__["_creel_noted"] = True
    try:
        made: Any = make()
    finally:
        del loader.__dict__["_creel_noted"]
    noted = made._index_sampler  # noqa: SLF001  torch's
    if isinstance(noted, NotedSampler):  # a subclass of the loader may choose the sampler
        # By weak reference: in a cycle it would keep its workers until Python's collector runs.
        what = weakref.ref(made), noted, Returned.of(loader)
        made._next_data = partial(_next_data, *what)  # noqa: SLF001  of this object only
    return made  # type: ignore[no-any-return]  # torch's


def _next_data(
    reference: weakref.ref[BaseDataLoaderIter], noted: NotedSampler, returned: Returned
) -> Any:
    iterator: Any = reference()
    _taken(iterator, noted)  # one that raised
    data = type(iterator)._next_data(iterator)  # noqa: SLF001  torch's
    for index in _taken(iterator, noted):
        returned.note(index)
    return data


def _taken(iterator: Any, noted: NotedSampler) -> list[Any]:
    """Forget and return what was yielded for batches that are not outstanding any more."""
    outstanding: Any = getattr(iterator, "_task_info", ())  # none without workers
    return [noted.pulled.pop(i) for i in list(noted.pulled) if i not in outstanding]
