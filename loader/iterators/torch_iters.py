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


def note_batches(iterator: BaseDataLoaderIter, noted: NotedSampler, returned: Returned) -> None:
    """Let an iterator of torch's over a map-style dataset note which batch it returns."""
    # By weak reference: in a cycle it would keep its workers until Python's collector runs.
    take: Callable[[], Any] = partial(_next_data, weakref.ref(iterator), noted, returned)
    iterator._next_data = take  # type: ignore[method-assign]  # noqa: SLF001  of this object only


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
