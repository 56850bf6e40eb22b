"""torch's iterator without the cost of an inactive profiler, and one that asks ahead of use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from creel.loader.torch_private import BaseDataLoaderIter, profiler_enabled

if TYPE_CHECKING:
    from creel.loader.line.batches.epoch_run import EpochRun
    from creel.loader.line.observers.meter import Meter


class UnprofiledIter(BaseDataLoaderIter):
    """torch's `__next__` without its profiler range (15 us), unless a profiler runs.

    For map-style datasets only: the rest of torch's method checks the length of iterable ones.
    """

    _meter: Meter
    _run: EpochRun

    def __next__(self) -> Any:
        wait = self._run.overdue
        wait.since = time.monotonic_ns()
        try:
            if profiler_enabled():
                return super().__next__()
            if self._sampler_iter is None:  # as in torch: the iterator is not started
                self._reset()  # type: ignore[call-arg]
            take: Callable[[], Any] = self._next_data
            data = take()
            self._num_yielded += 1
            return data
        finally:
            wait.ends()

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


class AheadIter(UnprofiledIter):
    """Asks for batches ahead of use (`_try_put_index`, as torch), once their data has arrived."""

    _withheld: int  # batches that are not asked for yet, since their data had not arrived

    def _request(self) -> None:
        """Ask for one more batch if its data has arrived."""
        if not self._run.paced or self._run.arrived():
            self._try_put_index()
        else:
            self._withheld += 1

    def _request_withheld(self, under_way: Sized) -> None:
        """Ask for batches that have arrived since; wait for one if no other is `under_way`."""
        while self._withheld and (not under_way or self._run.arrived()):
            self._try_put_index()
            self._withheld -= 1

    def _try_put_index(self) -> None:
        raise NotImplementedError
