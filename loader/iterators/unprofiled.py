"""torch's iterator without the cost of an inactive profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from creel.loader.torch_private import BaseDataLoaderIter, profiler_enabled

if TYPE_CHECKING:
    from creel.loader.iterators.meter import Meter


class UnprofiledIter(BaseDataLoaderIter):
    """torch's `__next__` without its profiler range (15 us), unless a profiler runs.

    For map-style datasets only: the rest of torch's method checks the length of iterable ones.
    """

    _meter: Meter

    def __next__(self) -> Any:
        if profiler_enabled():
            return super().__next__()
        if self._sampler_iter is None:  # as in torch: the iterator is not started
            self._reset()  # type: ignore[call-arg]
        take: Callable[[], Any] = self._next_data
        data = take()
        self._num_yielded += 1
        return data

    def _next_index(self) -> Any:
        """Pull the sampler, as torch does, and count the time.

        Raises:
            StopIteration: the epoch has no more batches.
        """
        start = time.monotonic_ns()
        try:
            return super()._next_index()  # type: ignore[no-untyped-call]  # torch's
        finally:
            self._meter["stall_sampler_ns"] += time.monotonic_ns() - start
