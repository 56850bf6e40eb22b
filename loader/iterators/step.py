"""One step of an iterator, without the cost of an inactive profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from creel.loader.torch_private import BaseDataLoaderIter, profiler_enabled


class Step(BaseDataLoaderIter):
    """torch's `__next__` without its profiler range (15 us), unless a profiler runs.

    For map-style datasets only: the rest of torch's method checks the length of iterable ones.
    """

    def __next__(self) -> Any:
        if profiler_enabled():
            return super().__next__()
        if self._sampler_iter is None:  # as in torch: the iterator is not started
            self._reset()  # type: ignore[call-arg]
        take: Callable[[], Any] = self._next_data
        data = take()
        self._num_yielded += 1
        return data
