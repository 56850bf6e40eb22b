"""What the daemon is told of an iterator's batches: how many, of what size, and why each waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from creel.loader.line.batches.state import LoaderState
    from creel.loader.line.observers.overdue import Overdue
    from creel.loader.line.steps.batch_stream import BatchStream
    from creel.loader.making.places.place import BatchPlace
    from creel.loader.making.workers.kernel_waits import Reader


class Statistics:
    """The statistics of one iterator, epoch by epoch, which it adds to the daemon's now and then.

    Attributes:
        counted_at: when it last did (`time.monotonic`).
        unclaimed: batches without a step, and their numbers of samples: the session's plan has the
            others.
        readers: who makes the batches.
    """

    def __init__(self, state: LoaderState, overdue: Overdue, reader: Reader) -> None:
        """`reader`: the trainer, who makes the batches until `made_by`."""
        self._state, self._overdue = state, overdue
        self.counted_at = 0.0
        self.unclaimed: dict[int, int] = {}
        self.readers: Sequence[Reader] = (reader,)
        self._skipped = self._counted = 0  # batches: not read, and known to the daemon
        self._workers = 0
        self._new_counts: Callable[[], Mapping[str, int]] | None = None

    def made_by(self, place: BatchPlace) -> None:
        """Note who makes the batches beside training."""
        self._workers, self.readers = place.makers(), place.readers()
        self._new_counts = place.new_counts

    def epoch_begins(self, skipped: int) -> None:
        self._skipped = self._counted = skipped
        self.unclaimed.clear()

    def count(self, stream: BatchStream | None, delivered: int) -> None:
        """Add the batches since the last call, up to `delivered`, to the daemon's statistics.

        The daemon learns nothing while it is not alive: if it is only stopped, a later call counts
        them.
        """
        self.counted_at = time.monotonic()
        state, observers = self._state, self._state.observers
        meter, own_files, uncounted = observers.meter, observers.own_files, observers.uncounted
        if self._new_counts is not None:
            meter.add(self._new_counts())
        state.note_kept()
        own_files.delivered(delivered - self._skipped, meter.waited_s, self.readers)
        if stream is not None and not stream.alive:
            return
        first, self._counted = self._counted, delivered
        sizes = [self.unclaimed.pop(i) for i in self.unclaimed.keys() & range(first, delivered)]
        uncounted += np.array([len(sizes), sum(sizes)])
        if stream is None:
            return
        stream.report_own_file(own_files.path, own_files.remedy)
        more = self._overdue.settle(meter.unreported())
        if uncounted.any():
            more |= dict(zip(("batches", "samples"), uncounted.tolist(), strict=True))
            uncounted[:] = 0
        stream.count(first, delivered, more, self._workers)

    def ends(self, stream: BatchStream | None, delivered: int) -> None:
        """Count once more: the workers make no more batches."""
        self._workers = 0
        self._state.observers.own_files.ends()
        self.count(stream, delivered)
        self._new_counts = None
