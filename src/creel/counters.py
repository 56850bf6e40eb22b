"""Counters: one table, from which everything that shows a number is made.

Each row defines the shared word that trainers count in (`cache/memory/shared_words.py`), the field
of the loader's `Meter`, the key in the answer of `creel stats`, the columns of `creel stats` and
`creel top`, and the line of the Prometheus page. tests/unit/top/test_counters.py looks for every
row in each of them and in the docs. Durations are ns in shared words, seconds elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

#: Requests to object stores and web servers that a store bills; one of a listing names up to 1,000
#: objects.
REQUESTS = ("GET", "HEAD", "LIST")


class Counter(NamedTuple):
    """One counter, or one for each of `members`.

    Args:
        of: the counter's owner: a row of `tiers`, `sources` or `ranks`, or "node", the whole
            daemon.
        name: its key there; a duration's key has "_s" appended.
        writer: "meter" (the loader's `Meter`), "worker" (whoever makes batches; the loader adds
            these to its meter), "delivery" (`BatchStream.count`) or "daemon" (for a session or for
            itself). The counters of all but the daemon, and "failed", have shared words.
        unit: "s", "bytes", "share" (0 to 1) or "" (a number).
        metric: its Prometheus family.
        help: one sentence about that family.
        column: its heading in `creel stats` and `creel top`; "": no column.
        kind: of the Prometheus family. A gauge of a rank counts its open sessions only; it has
            shared words if its rank writes it.
        label, members: label and names of the members, each with a counter of its own; (): any
            names.
        per: columns show the counter divided by this one.
    """

    of: Literal["tier", "source", "node", "rank"]
    name: str
    writer: Literal["meter", "worker", "delivery", "daemon"]
    unit: Literal["", "bytes", "s", "share"]
    metric: str
    help: str
    column: str = ""
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    label: str = ""
    members: tuple[str, ...] = ()
    per: str = ""

    @property
    def key(self) -> str:
        """The key in `creel stats --json`."""
        return f"{self.name}_s" if self.unit == "s" else self.name

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the shared words."""
        if self.of != "rank" or (self.kind == "gauge" and self.writer == "daemon"):
            return ()
        ns = "_ns" if self.unit == "s" else ""
        return tuple(f"{self.name}_{m}{ns}" for m in self.members) or (self.name + ns,)


COUNTERS = (
    Counter("tier", "hits", "daemon", "", "creel_cache_hits", "Objects found in a tier."),
    Counter("tier", "misses", "daemon", "", "creel_cache_misses", "Objects not found in a tier."),
    Counter(
        "tier",
        "evictions",
        "daemon",
        "",
        "creel_cache_evictions",
        "Objects that left a tier.",
        label="reason",
    ),
    Counter(
        "tier",
        "used_nbytes",
        "daemon",
        "bytes",
        "creel_cache_bytes",
        "Bytes of samples in a tier.",
        kind="gauge",
    ),
    Counter(
        "tier",
        "budget_nbytes",
        "daemon",
        "bytes",
        "creel_cache_budget_bytes",
        "Bytes that a tier may hold.",
        kind="gauge",
    ),
    Counter(
        "tier",
        "samples",
        "daemon",
        "",
        "creel_cache_samples",
        "Decoded samples in a tier.",
        kind="gauge",
    ),
    Counter("tier", "spilled", "daemon", "", "creel_spilled", "Objects written to a tier."),
    Counter(
        "tier",
        "spilled_nbytes",
        "daemon",
        "bytes",
        "creel_spilled_bytes",
        "Bytes of objects written to a tier.",
    ),
    Counter(
        "source",
        "seconds",
        "daemon",
        "",
        "creel_read_seconds",
        "Time of a read.",
        kind="histogram",
    ),
    Counter("source", "nbytes", "daemon", "bytes", "creel_read_bytes", "Bytes read."),
    Counter("source", "opens", "daemon", "", "creel_opens", "Files and objects opened."),
    Counter("source", "retries", "daemon", "", "creel_retries", "Reads tried again."),
    Counter(
        "source",
        "requests",
        "daemon",
        "",
        "creel_requests",
        "Requests to an object store.",
        label="kind",
        members=REQUESTS,
    ),
    Counter(
        "source",
        "throttles",
        "daemon",
        "",
        "creel_throttles",
        "Answers of an object store that asked for fewer requests (503, 429).",
    ),
    Counter("node", "errors", "daemon", "", "creel_errors", "Failures by kind.", label="kind"),
    Counter("rank", "batches", "delivery", "", "creel_batches", "Batches delivered.", "batches"),
    Counter("rank", "samples", "delivery", "", "creel_samples", "Samples delivered.", "samples"),
    Counter(
        "rank",
        "nbytes",
        "delivery",
        "bytes",
        "creel_sample_bytes",
        "Bytes of samples delivered.",
        "bytes",
    ),
    Counter(
        "rank",
        "direct_reads",
        "worker",
        "",
        "creel_direct_reads",
        "Objects that a training process read itself.",
        "direct",
    ),
    Counter(
        "rank",
        "direct_nbytes",
        "worker",
        "bytes",
        "creel_direct_read_bytes",
        "Bytes that a training process read itself.",
        "direct bytes",
    ),
    Counter(
        "rank",
        "failed",
        "daemon",
        "",
        "creel_failed_objects",
        "Objects that the daemon could not read.",
        "failed",
    ),
    Counter(
        "rank",
        "lead",
        "delivery",
        "s",
        "creel_lead_seconds",
        "Time that batches lay ready until they were taken.",
        "mean lead",
        per="batches",
    ),
    Counter(
        "rank",
        "busy",
        "worker",
        "s",
        "creel_worker_busy_seconds",
        "Time workers spent on batches.",
        "busy",
        label="stage",
        members=("source", "decode", "collate", "handover"),
    ),
    Counter(
        *("rank", "cpu", "worker", "s", "creel_worker_cpu_seconds"),
        *("Time workers were on a processor, all their threads together.", "cpu"),
    ),
    Counter(
        *("rank", "workers", "delivery", "", "creel_workers"),
        *("Workers, or threads in their place, that make batches.", "workers"),
        kind="gauge",
    ),
    Counter(
        *("rank", "stall", "meter", "s", "creel_stall_seconds"),
        *("Time a training process waited.", "stall"),
        label="cause",
        members=("source", "decode", "collate", "daemon", "sampler"),
    ),
    # These have no columns: `creel stats` shows their sums as a tier.
    Counter(
        *("rank", "decoded_hits", "worker", "", "creel_decoded_hits"),
        "Samples that were kept decoded when they were read.",
    ),
    Counter(
        *("rank", "decoded_misses", "worker", "", "creel_decoded_misses"),
        "Samples that were decoded, of those to be kept.",
    ),
    Counter(
        *("rank", "decoded_calls", "worker", "", "creel_decoder_calls"),
        "Calls of decoders whose results are not to be kept.",
    ),
    Counter(
        *("rank", "decoded_measured", "worker", "", "creel_decoder_measured"),
        "Those of these calls that were measured.",
    ),
    Counter(
        *("rank", "decoded_call", "worker", "s", "creel_decoder_seconds"),
        "Time of the measured calls.",
    ),
    Counter(
        *("rank", "decoded_call_nbytes", "worker", "bytes", "creel_decoder_bytes"),
        "Bytes of their results, as they would be kept.",
    ),
    Counter(
        *("rank", "decoded_samples", "meter", "", "creel_decoded_samples"),
        "Decoded samples in the stores that this rank made.",
        kind="gauge",
    ),
    Counter(
        *("rank", "decoded_nbytes", "meter", "bytes", "creel_decoded_bytes"),
        "Bytes of memory of these stores.",
        kind="gauge",
    ),
    Counter(
        *("rank", "ahead", "daemon", "", "creel_ready_steps"),
        *("Steps ready and not yet read.", "ahead"),
        kind="gauge",
    ),
    Counter(
        *("rank", "lead_now", "daemon", "s", "creel_prefetch_lead_seconds"),
        *("How far ahead of use samples are ready.", "lead"),
        kind="gauge",
    ),
    Counter(
        *("rank", "overdue", "daemon", "s", "creel_overdue_seconds"),
        "How long training has waited for its next batch so far, from a second on.",
        kind="gauge",
    ),
    Counter(
        *("rank", "utilisation", "daemon", "share", "creel_accelerator_utilisation"),
        *("Share of the recent time in which training did not wait for data.", "fed"),
        kind="gauge",
    ),
)

#: The counters of a rank, which have shared words.
OF_RANKS = tuple(c for c in COUNTERS if c.words)
#: Names of the words that say what is now: they end with their session.
GAUGES = frozenset(word for c in OF_RANKS if c.kind == "gauge" for word in c.words)
#: Names of the words that whoever makes batches counts, each worker in shared words of its own.
OF_WORKERS = tuple(word for c in OF_RANKS if c.writer == "worker" for word in c.words)
CAUSES, STAGES = (next(c.members for c in OF_RANKS if c.name == n) for n in ("stall", "busy"))


def report(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the counters of a rank as `creel stats` and `DataLoader.stats()` show them.

    Args:
        counts: by names of shared words; missing counters are left out.

    >>> report({"batches": 2, "lead_ns": 3_000_000_000})
    {'batches': 2, 'lead_s': 3.0}
    """
    values: dict[str, Any] = {}
    for counter in OF_RANKS:
        numbers = [
            counts[w] / 1e9 if counter.unit == "s" else counts[w]
            for w in counter.words
            if w in counts
        ]
        if numbers:
            values[counter.key] = (
                dict(zip(counter.members, numbers, strict=True)) if counter.members else numbers[0]
            )
    return values
