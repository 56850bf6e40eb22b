"""Meter: the counters of one loader."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from creel.counters import CAUSES, OF_RANKS, OF_WORKERS, report
from creel.loader.making.batch_times import (
    BATCH_CAUSES,
    CAUSE_OF,
    BatchTimes,
    divide,
    recorded_moments,
)

if TYPE_CHECKING:
    from creel.cache.memory.batch_log import BatchLog

_OWN = (word for c in OF_RANKS if c.writer == "meter" for word in c.words)
_stalls = itemgetter(*(f"stall_{cause}_ns" for cause in CAUSES))
_NAMES = ("batches", *_OWN, *OF_WORKERS)


class Meter(dict[str, int]):
    """Counters of one loader, by the names of `creel.counters` that a meter writes, and batches."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_NAMES, 0))
        self._reported = dict(self)
        self._stalls = _stalls(self)

    def awaited(self, times: BatchTimes, since: int, until: int) -> None:
        """Count a wait for a worker's batch, from `since` until `until` (monotonic ns)."""
        if times.packed <= since:  # it was finished: only the transfer through the socket was left
            self["stall_daemon_ns"] += until - since
            return
        for cause, ns in zip(BATCH_CAUSES, divide(times, since, until), strict=True):
            self[f"stall_{cause}_ns"] += ns

    def count_batch(self, times: BatchTimes, counts: Mapping[str, int]) -> None:
        """Count a batch that the trainer itself made, all of whose time it waited."""
        collating, ready = times.collating, times.ready
        self["stall_collate_ns"] += times.packed - collating
        if reading := collating - ready:  # else the rows of the arena are the batch
            at_source = min(times.direct_ns, reading)
            self["stall_source_ns"] += at_source
            self["stall_decode_ns"] += reading - at_source
        if waited := ready - times.began:
            self["stall_daemon_ns" if times.lost else "stall_source_ns"] += waited
        if counts:
            self.add(counts)

    def gave_up(self, stage: int, ns: int) -> None:
        """Count a wait of `ns` for a worker in `stage` that ended without a batch."""
        self[f"stall_{CAUSE_OF.get(stage, 'daemon')}_ns"] += ns

    def add(self, counts: Mapping[str, int]) -> None:
        """Add what workers have counted, by name."""
        for name, more in counts.items():
            self[name] += more

    def record(self, log: BatchLog, times: BatchTimes, worker: int, delivered_ns: int) -> None:
        """Write a batch into a session's flight recorder, with the waits since the last one.

        Args:
            times: of the batch.
            worker: who made it, see `BatchRow`.
            delivered_ns: when training got it.
        """
        before, self._stalls = self._stalls, _stalls(self)
        # No loop: this is done once a batch, when copies have emptied the processor's caches.
        source, decode, collate, daemon, sampler = self._stalls
        collate -= before[2]
        waited = source - before[0] + decode - before[1] + collate + daemon - before[3]
        wait_began = delivered_ns - waited - sampler + before[4]
        if worker < 0:  # all that the trainer did for it counts as waiting, without gaps
            collating = delivered_ns - collate
            ready, began = collating - decode + before[1], delivered_ns - waited
            log.add(began, ready, collating, delivered_ns, wait_began, delivered_ns, worker)
        else:
            log.add(*recorded_moments(times), wait_began, delivered_ns, worker)

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for samples to be read, by whoever reads them."""
        return (self["stall_source_ns"] + self["stall_decode_ns"]) / 1e9

    def unreported(self) -> dict[str, int]:
        """Return the nonzero increments since the last call, except for batches."""
        then, self._reported = self._reported, dict(self)
        return {k: n - then[k] for k, n in self.items() if n != then[k] and k != "batches"}

    def stats(self) -> dict[str, Any]:
        return report(self)
