"""The answer to `creel stats`, assembled by `stats`.

The numbers come from the core's tables, from threads of the daemon, and from the shared words of
sessions, where trainers and workers count. `creel.counters` lists all counters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from creel.cache.memory.arena import Arena
from creel.cache.memory.batch_log import PACKED, TAKEN, WAIT_BEGAN
from creel.cache.memory.shared_words import DONE, READY
from creel.cache.storage.reads import SECONDS
from creel.cache.storage.stores.retry import public
from creel.counters import CAUSES, GAUGES, REQUESTS, report
from creel.daemon.service.cluster_service import ClusterService
from creel.daemon.service.core_shell import CoreShell, Loop
from creel.daemon.service.memory.quota import Quota
from creel.daemon.service.registry import DatasetRecord, Registry, SessionRecord
from creel.daemon.service.storage.fetcher import Fetcher
from creel.policies.arrays import Ints
from creel.policies.model import finished, utilisation
from creel.policies.next_use import histogram

_MAX_RANKS = 1024  # most ranks reported
#: Objects whose reads are looked up for a histogram (25 ms for one of 14 million), and its bins.
_MAX_REUSED, _REUSE_BINS = 1 << 15, 48
#: The keys of a wait that is none, or not long.
_IN_TIME: dict[str, Any] = {"overdue_s": 0.0, "overdue_cause": "", "overdue_file": ""}


#: The result of `Core.snapshot`.
Snapshot: TypeAlias = dict[str, dict[str, dict[str, Any]]]


class CountedNode(Protocol):
    """What the answer tells of a node (`Node`)."""

    arena: Arena
    clusters: ClusterService
    fetcher: Fetcher
    quota: Quota
    ranks: Ranks
    loop: Loop
    registry: Registry
    shell: CoreShell


def memory(node: CountedNode, core: Snapshot) -> dict[str, int]:
    """Return the bytes of the arena: budget, given back to the system, and used by objects.

    Also the bytes held in private memory, those of tables and plans, and their limit.
    """
    counted = core["datasets"].values()
    return {
        "budget_nbytes": node.arena.nbytes,
        "withheld_nbytes": node.shell.core.withheld_nbytes,
        "used_nbytes": int(sum(d["used_nbytes"] for d in counted)),
        "held_nbytes": node.fetcher.held_nbytes(),
        "tables_nbytes": node.quota.used(),
        "tables_limit_nbytes": node.quota.limit,
    }


def tiers(core: Snapshot) -> dict[str, dict[str, Any]]:
    """Return hits, misses and evictions of each tier, over all datasets of the core's snapshot.

    Disk and peers may have objects that memory misses: "disk" is present if there is or was a disk,
    "peers" once a peer was asked.

    An object that was in flight for another session when it was requested counts as a hit, as it
    costs no read.
    """
    past = core["past"]["datasets"]
    datasets = [*core["datasets"].values(), *([past] if past else [])]
    evictions: Counter[str] = Counter()
    for counts in datasets:
        evicted = {k: int(n) for k, n in counts.items() if k.startswith("evicted_")}
        evictions.update({k.removeprefix("evicted_"): n for k, n in evicted.items()})
    hits = sum(int(d["hits"] + d["joined"]) for d in datasets)
    misses = sum(int(d["misses"]) for d in datasets)
    out: dict[str, dict[str, Any]] = {
        "memory": {"hits": hits, "misses": misses, "evictions": dict(evictions)}
    }
    disk = core["disk"]["node"]
    hit, missed, spilled = (
        sum(int(d[name]) for d in datasets) for name in ("disk_reads", "disk_misses", "spilled")
    )
    if hit + missed + spilled + int(disk["nbytes"]):
        out["disk"] = {
            "hits": hit,
            "misses": missed,
            "evictions": {},
            "spilled": spilled,
            "spilled_nbytes": sum(int(d["spilled_nbytes"]) for d in datasets),
            "used_nbytes": int(disk["used_nbytes"]),
            "budget_nbytes": int(disk["nbytes"]),
        }
    sent, refused = (sum(int(d[name]) for d in datasets) for name in ("peer_reads", "peer_misses"))
    if sent + refused:
        out["peers"] = {"hits": sent, "misses": refused, "evictions": {}}
    return out


def decoded(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tier of decoded samples, from the reports of ranks; {} if none was read there."""
    names = {
        "hits": "decoded_hits",
        "misses": "decoded_misses",
        "samples": "decoded_samples",
        "used_nbytes": "decoded_nbytes",
    }
    counted = list(ranks)
    tier = {key: sum(int(counts[name]) for counts in counted) for key, name in names.items()}
    return {"decoded": tier | {"evictions": {}}} if tier["hits"] + tier["misses"] else {}


def dataset(core: Snapshot, record: DatasetRecord) -> dict[str, Any]:
    return {
        "dataset": record.key,
        "root": public(record.manifest.root),
        "path": public(record.manifest.title),
        **core["datasets"][record.key],
    }


def datasets(node: CountedNode, now: float) -> list[dict[str, Any]]:
    """Return a row for each dataset, with its open sessions and how long nobody has used it."""
    core = node.shell.core.snapshot()
    sessions = Counter(s.dataset.key for s in node.registry.sessions.values())
    return [
        dataset(core, record)
        | {
            "sessions": sessions[record.key],
            "unused_s": 0.0 if sessions[record.key] or record.claims else now - record.used_at,
        }
        for record in node.registry.datasets.values()
        if len(record.manifest)
    ]


def source(record: DatasetRecord) -> dict[str, Any]:
    counted = record.source.counters.snapshot()
    requests = counted.requests.snapshot()
    return {
        "source": public(record.manifest.root or record.manifest.title),
        "dataset": record.key,
        "path": public(record.manifest.title),
        "opens": counted.opens,
        "reads": counted.reads,
        "nbytes": counted.nbytes,
        "requests": {kind: requests[kind] for kind in REQUESTS},
        "throttles": requests["throttles"],
        "retries": counted.retries + requests["resumes"],
        "errors": sum(counted.errors.values()),
        "errors_by_kind": dict(counted.errors),
        "last_error": counted.last_error,
        "seconds": {"le": list(SECONDS), "counts": counted.seconds, "sum": counted.seconds_sum},
    }


def batches(record: SessionRecord, since_ns: int) -> dict[str, Any]:
    """Return the last batches of a session that were taken after `since_ns`, see `BatchRow`."""
    table = record.words.log.table()
    return {"session": record.id, "rows": table[table[:, TAKEN] > since_ns].tolist()}


def reuse(node: CountedNode, record: SessionRecord) -> dict[str, Any]:
    """Return after how many steps a session's job reads objects again: a histogram.

    `counts` of reads between whole `edges`, by the known plan, of some of the dataset's `objects`.
    """
    distances = node.shell.core.uses(record.id).reuse_distances(_MAX_REUSED)
    counts, edges = histogram(distances, _REUSE_BINS)
    bins = {"counts": counts.tolist(), "edges": edges.tolist()}
    return {"session": record.id, "objects": len(record.dataset.manifest), **bins}


def fed(tables: Iterable[Ints]) -> dict[str, float]:
    """Return the accelerator's utilisation, from the recorded batches of all streams of a rank.

    {} where too few batches are recorded.
    """
    rows = np.clip(np.concatenate(list(tables)), 0, 1 << 62)  # clients may write anything
    rows = rows[np.argsort(rows[:, TAKEN], kind="stable")]
    share = utilisation(rows[:, WAIT_BEGAN], rows[:, TAKEN])
    return {} if share is None else {"utilisation": share}


class RecordedStream(NamedTuple):
    """The recorded batches of a session, copied once for an answer.

    Attributes:
        table: the batches.
        timeline: the same, and a last row for a wait that has not ended.
        fed: its utilisation.
        overdue: that wait; see `overdue`.
    """

    table: Ints
    timeline: Ints
    fed: dict[str, float]
    overdue: dict[str, Any]

    @classmethod
    def of(cls, record: SessionRecord) -> RecordedStream:
        table, now_ns = record.words.log.table(), time.monotonic_ns()
        timeline, wait = table, overdue(record, now_ns)
        if wait["overdue_s"]:
            row = np.zeros((1, table.shape[1]), np.int64)
            row[0, WAIT_BEGAN], row[0, TAKEN] = now_ns - int(1e9 * wait["overdue_s"]), now_ns
            timeline = np.concatenate([table, row])
        return cls(table, timeline, fed([timeline]), wait)


def overdue(record: SessionRecord, now_ns: int) -> dict[str, Any]:
    """Return how long training has waited for its next batch if that is overdue, and for what."""
    since, cause, path = record.words.overdue()
    if not 0 < since <= now_ns:
        return dict(_IN_TIME)
    known = cause in CAUSES
    return {
        "overdue_s": (now_ns - since) / 1e9,
        "overdue_cause": cause * known,
        "overdue_file": path * known,
    }


def session(
    record: SessionRecord, pid: int, core: Mapping[str, Any], recorded: RecordedStream
) -> dict[str, Any]:
    """Return state and counters of one session, including its trainer's counters.

    core: the session in the core's snapshot.
    """
    table = recorded.table
    steps_ready = max(record.words[READY] - record.words[DONE], 0)
    return {
        "session": record.id,
        "dataset": record.dataset.key,
        "job": record.opened.job,
        "rank": record.opened.rank,
        "world": record.opened.world,
        "pid": pid,
        "known": core["known"],
        "ready": record.words[READY],
        "done": record.words[DONE],
        "waiting": len(record.waiters),
        "ahead": steps_ready,
        "lead_now_s": steps_ready * float(core["step_s"]),
        "made": finished(table[:, PACKED], table[:, TAKEN]),
        **recorded.fed,
        **recorded.overdue,
        "own_file": record.own_file,
        "own_remedy": record.own_remedy,
        **report(record.words.counters()),
    }


class Ranks:
    """Counters by job and rank: the sums over all of a rank's loaders, including closed ones.

    The latest 1024 ranks are kept.
    """

    def __init__(self) -> None:
        self._closed: dict[tuple[str, int], dict[str, int]] = {}
        #: A file of each, and what would help, of some ranks.
        self._own_files: dict[tuple[str, int], tuple[str, str]] = {}

    def add_closed(self, record: SessionRecord) -> None:
        """Keep the counters of a session that ends, while its shared words still exist."""
        _add(self._closed, record, leave_out=GAUGES)
        if record.own_file:
            self._own_files[record.opened.job, record.opened.rank] = (
                record.own_file,
                record.own_remedy,
            )
        while len(self._closed) > _MAX_RANKS:
            oldest = next(iter(self._closed))
            del self._closed[oldest]
            self._own_files.pop(oldest, None)

    def reports(
        self,
        sessions: Iterable[SessionRecord],
        recorded: Mapping[int, RecordedStream] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the counters of each rank, given the open sessions; the latest come last.

        recorded: what is known already of the batches of these sessions.
        """
        sums = {job_rank: dict(counters) for job_rank, counters in self._closed.items()}
        own_files = dict(self._own_files)
        streams: dict[tuple[str, int], list[RecordedStream]] = {}
        for record in sessions:
            _add(sums, record)
            job_rank = record.opened.job, record.opened.rank
            stream = RecordedStream.of(record) if recorded is None else recorded[record.id]
            streams.setdefault(job_rank, []).append(stream)
            if record.own_file:
                own_files[job_rank] = record.own_file, record.own_remedy
        latest = list(sums.items())[-_MAX_RANKS:]
        return [
            {"job": job_rank[0], "rank": job_rank[1]}
            | dict(zip(("own_file", "own_remedy"), own_files.get(job_rank, ("", "")), strict=True))
            | _fed_all(streams.get(job_rank, []))
            | _most_overdue(streams.get(job_rank, []))
            | report(n)
            for job_rank, n in latest
        ]


def _fed_all(streams: Sequence[RecordedStream]) -> dict[str, float]:
    if len(streams) == 1:
        return streams[0].fed
    return fed([stream.timeline for stream in streams]) if streams else {}


def _most_overdue(streams: Sequence[RecordedStream]) -> dict[str, Any]:
    waits = [stream.overdue for stream in streams]
    return max(waits, key=itemgetter("overdue_s"), default=_IN_TIME)


def _add(
    sums: dict[tuple[str, int], dict[str, int]],
    record: SessionRecord,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Add a session's counters to those of its rank, and make that rank the latest."""
    job_rank = record.opened.job, record.opened.rank
    before = sums.pop(job_rank, {})
    # Clients may write anything: counters never go down.
    counted = {k: 0 if k in leave_out else n for k, n in record.words.counters().items()}
    sums[job_rank] = {k: before.get(k, 0) + max(n, 0) for k, n in counted.items()}


def stats(node: CountedNode) -> dict[str, Any]:
    core = node.shell.core.snapshot()
    pids = node.loop.pids()
    opened = list(node.registry.sessions.values())
    recorded = {s.id: RecordedStream.of(s) for s in opened}
    sessions = [
        session(s, pids.get(s.token, 0), core["sessions"][str(s.id)], recorded[s.id])
        for s in opened
    ]
    ranks = node.ranks.reports(opened, recorded)
    return {
        "memory": memory(node, core),
        "tiers": tiers(core) | decoded(ranks),
        "core": core,
        # Without objects: of loaders that only count.
        "sources": [source(d) for d in node.registry.datasets.values() if len(d.manifest)],
        "sessions": sessions,
        "ranks": ranks,
        "peers": {f"{direction}_nbytes": n for direction, n in node.clusters.traffic().items()},
        "fetch": {
            "pending": node.fetcher.pending,
            "bugs": node.shell.bugs,
            "past_errors": dict(node.registry.past_errors),
        },
    }
