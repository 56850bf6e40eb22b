"""What a loader counts about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from creel.loader.worker import FETCHING, IDLE, SENDING, STARTING, WAITING

_CAUSE = {
    FETCHING: "decode",
    SENDING: "handover",
    IDLE: "idle",
    STARTING: "start",
    WAITING: "source",
}
#: The board's word for a cause; what is not here is time that creel itself takes.
_TOLD_AS = {"decode": "decode", "handover": "collate", "source": "source"}


@dataclass
class Meter:
    """Counters of one loader; times in the unit their name ends with."""

    batches: int = 0
    sampler_ns: int = 0
    busy_ns: int = 0
    direct_reads: int = 0
    direct_nbytes: int = 0
    foreseen: int = 0  # epochs whose first batches were there before they were asked for
    mistaken: int = 0  # epochs whose first batches were made in vain
    stall_s: dict[str, float] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)

    def stalled(self, stage: int, seconds: float) -> None:
        """The training waited for a batch whose worker was in `stage` when the wait began."""
        self.waited(_CAUSE.get(stage, "other"), seconds)

    def waited(self, cause: str, seconds: float) -> None:
        """The training waited."""
        self.stall_s[cause] = self.stall_s.get(cause, 0.0) + seconds

    def direct(self, reads: int, nbytes: int) -> None:
        """Reads that the arena could not serve."""
        self.direct_reads += reads
        self.direct_nbytes += nbytes

    def workers(self, busy_ns: int, reads: int, nbytes: int) -> None:
        """What `Pool.news` tells."""
        self.busy_ns += busy_ns
        self.direct(reads, nbytes)

    def unsaid(self) -> dict[str, int]:
        """What was counted since the last call, by the names of `cache.board.COUNTER_NAMES`."""
        now = {
            "direct_reads": self.direct_reads,
            "direct_nbytes": self.direct_nbytes,
            "stall_sampler_ns": self.sampler_ns,
            "worker_busy_ns": self.busy_ns,
        }
        for cause, seconds in self.stall_s.items():
            name = f"stall_{_TOLD_AS.get(cause, 'daemon')}_ns"
            now[name] = now.get(name, 0) + int(1e9 * seconds)
        news = {k: n - self._told.get(k, 0) for k, n in now.items() if n != self._told.get(k, 0)}
        self._told = now
        return news

    def stats(self) -> dict[str, object]:
        """All counters as plain values; stable names."""
        return {
            "batches": self.batches,
            "stall_seconds": dict(self.stall_s),
            "stall_seconds_total": sum(self.stall_s.values()),
            "sampler_seconds": self.sampler_ns / 1e9,
            "worker_busy_seconds": self.busy_ns / 1e9,
            "direct_reads": self.direct_reads,
            "direct_bytes": self.direct_nbytes,
            "epochs_foreseen": self.foreseen,
            "epochs_mistaken": self.mistaken,
        }
