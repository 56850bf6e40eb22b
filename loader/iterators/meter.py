"""Meter: the counters of one loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from creel.loader.workers.stages import CAUSE_OF, Times, divide


@dataclass
class Meter:
    """Counters of one loader; a name ends with its unit.

    `source_ns` to `sampler_ns` are stall times of the training process, by cause.
    """

    batches: int = 0
    source_ns: int = 0
    decode_ns: int = 0
    collate_ns: int = 0
    daemon_ns: int = 0
    sampler_ns: int = 0
    direct_reads: int = 0
    direct_nbytes: int = 0
    #: ns that workers spent on batches: reading the source, decoding, collating, handing over
    busy_ns: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    _told: dict[str, int] = field(default_factory=dict)

    def awaited(self, times: Times, since: int, until: int) -> None:
        """Count a wait for a worker's batch, from `since` until `until` (monotonic ns)."""
        if times[3] <= since:  # it was finished: only the transfer through the socket was left
            self.daemon_ns += until - since
            return
        source, decode, collate, daemon = divide(times, since, until)
        self.source_ns += source
        self.decode_ns += decode
        self.collate_ns += collate
        self.daemon_ns += daemon

    def gave_up(self, stage: int, ns: int) -> None:
        """Count a wait of `ns` for a worker in `stage` that ended without a batch."""
        name = f"{CAUSE_OF.get(stage, 'daemon')}_ns"
        setattr(self, name, getattr(self, name) + ns)

    def direct(self, reads: int, nbytes: int) -> None:
        """Count direct reads and their bytes."""
        self.direct_reads += reads
        self.direct_nbytes += nbytes

    def workers(self, news: Sequence[int]) -> None:
        """Add worker counters: 4 busy times in ns, direct reads and bytes (`WorkerPool.news`)."""
        *busy, reads, nbytes = news
        self.busy_ns = [a + b for a, b in zip(self.busy_ns, busy, strict=True)]
        self.direct(reads, nbytes)

    def _stall_ns(self) -> dict[str, int]:
        return {
            "source": self.source_ns,
            "decode": self.decode_ns,
            "collate": self.collate_ns,
            "daemon": self.daemon_ns,
            "sampler": self.sampler_ns,
        }

    def _busy_ns(self) -> dict[str, int]:
        stages = ("source", "decode", "collate", "handover")
        return dict(zip(stages, self.busy_ns, strict=True))

    def unsaid(self) -> dict[str, int]:
        """Return the nonzero increments since the last call, by `shared_words.COUNTER_NAMES`."""
        now = {
            "direct_reads": self.direct_reads,
            "direct_nbytes": self.direct_nbytes,
            **{f"stall_{cause}_ns": ns for cause, ns in self._stall_ns().items()},
            **{f"busy_{stage}_ns": ns for stage, ns in self._busy_ns().items()},
        }
        news = {k: n - self._told.get(k, 0) for k, n in now.items() if n != self._told.get(k, 0)}
        self._told = now
        return news

    def stats(self) -> dict[str, object]:
        """Return all counters as plain values under stable names."""
        stall_ns, busy_ns = self._stall_ns(), self._busy_ns()
        return {
            "batches": self.batches,
            "stall_seconds": {cause: ns / 1e9 for cause, ns in stall_ns.items()},
            "stall_seconds_total": sum(stall_ns.values()) / 1e9,
            "worker_busy_seconds": sum(busy_ns.values()) / 1e9,
            "worker_stage_seconds": {stage: ns / 1e9 for stage, ns in busy_ns.items()},
            "direct_reads": self.direct_reads,
            "direct_bytes": self.direct_nbytes,
        }
