"""torch's own iterators, for a loader that is switched off: they only note what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from creel.loader.iterators.returned import Returned
from creel.loader.torch_private import (
    BaseDataLoaderIter,
    MultiProcessingDataLoaderIter,
    SingleProcessDataLoaderIter,
)

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader


def torch_iterator(loader: DataLoader[Any]) -> BaseDataLoaderIter:
    """Return torch's iterator for a map-style dataset."""
    if loader.num_workers == 0:
        return NotingInlineIter(loader)
    loader.check_worker_number_rationality()
    return NotingWorkerIter(loader)


class NotingInlineIter(SingleProcessDataLoaderIter):
    """torch's iterator without workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._returned = Returned.of(loader)
        self._index: Any = None
        super().__init__(loader)

    def _next_index(self) -> Any:
        self._index = super()._next_index()  # type: ignore[no-untyped-call]  # torch's
        return self._index

    def _next_data(self) -> Any:
        data = super()._next_data()  # type: ignore[no-untyped-call]  # torch's
        self._returned.note(self._index)
        return data


class NotingWorkerIter(MultiProcessingDataLoaderIter):
    """torch's iterator with workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._returned = Returned.of(loader)
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._pulled: dict[int, Any] = {}  # what was yielded for each outstanding batch
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]  # torch's
        self._pulled[self._send_idx] = index
        return index

    def _next_data(self) -> Any:
        self._taken()  # one that raised
        data = super()._next_data()  # type: ignore[no-untyped-call]  # torch's
        for index in self._taken():
            self._returned.note(index)
        return data

    def _taken(self) -> list[Any]:
        """Forget and return what was yielded for the batches that have been returned."""
        return [self._pulled.pop(i) for i in list(self._pulled) if i not in self._task_info]
