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
    for one in datasets:
        evicted = {k: int(n) for k, n in one.items() if k.startswith("evicted_")}
        evictions.update({k.removeprefix("evicted_"): n for k, n in evicted.items()})
    hits = sum(int(d["hits"] + d["joined"]) for d in datasets)
    misses = sum(int(d["misses"]) for d in datasets)
    out: dict[str, dict[str, Any]] = {
        "memory": {"hits": hits, "misses": misses, "evictions": dict(evictions)}
    }
    disk = core["disk"]["node"]
    found, missed, spilled = (
        sum(int(d[name]) for d in datasets) for name in ("disk_reads", "disk_misses", "spilled")
    )
    if found + missed + spilled + int(disk["nbytes"]):
        out["disk"] = {
            "hits": found,
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
    tier = {key: sum(int(one[name]) for one in counted) for key, name in names.items()}
    return {"decoded": tier | {"evictions": {}}} if tier["hits"] + tier["misses"] else {}


def dataset(core: Snapshot, one: DatasetRecord) -> dict[str, Any]:
    return {
        "dataset": one.key,
        "root": public(one.manifest.root),
        "path": public(one.manifest.title),
        **core["datasets"][one.key],
    }


def datasets(node: CountedNode, now: float) -> list[dict[str, Any]]:
    """Return a row for each dataset, with its open sessions and how long nobody has used it."""
    core = node.shell.core.snapshot()
    sessions = Counter(s.dataset.key for s in node.registry.sessions.values())
    return [
        dataset(core, one)
        | {
            "sessions": sessions[one.key],
            "unused_s": 0.0 if sessions[one.key] or one.claims else now - one.used_at,
        }
        for one in node.registry.datasets.values()
        if len(one.manifest)
    ]


def source(one: DatasetRecord) -> dict[str, Any]:
    counted = one.source.counters.snapshot()
    requests = counted.requests.snapshot()
    return {
        "source": public(one.manifest.root or one.manifest.title),
        "dataset": one.key,
        "path": public(one.manifest.title),
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


def batches(one: SessionRecord, since_ns: int) -> dict[str, Any]:
    """Return the last batches of a session that were taken after `since_ns`, see `BatchRow`."""
    table = one.words.log.table()
    return {"session": one.id, "rows": table[table[:, TAKEN] > since_ns].tolist()}


def reuse(node: CountedNode, one: SessionRecord) -> dict[str, Any]:
    """Return after how many steps a session's job reads objects again: a histogram.

    `counts` of reads between whole `edges`, by the known plan, of some of the dataset's `objects`.
    """
    distances = node.shell.core.uses(one.id).reuse_distances(_MAX_REUSED)
    counts, edges = histogram(distances, _REUSE_BINS)
    told = {"counts": counts.tolist(), "edges": edges.tolist()}
    return {"session": one.id, "objects": len(one.dataset.manifest), **told}


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
    def of(cls, one: SessionRecord) -> RecordedStream:
        table, now_ns = one.words.log.table(), time.monotonic_ns()
        timeline, wait = table, overdue(one, now_ns)
        if wait["overdue_s"]:
            row = np.zeros((1, table.shape[1]), np.int64)
            row[0, WAIT_BEGAN], row[0, TAKEN] = now_ns - int(1e9 * wait["overdue_s"]), now_ns
            timeline = np.concatenate([table, row])
        return cls(table, timeline, fed([timeline]), wait)


def overdue(one: SessionRecord, now_ns: int) -> dict[str, Any]:
    """Return how long training has waited for its next batch if that is overdue, and for what."""
    since, cause, path = one.words.overdue()
    if not 0 < since <= now_ns:
        return dict(_IN_TIME)
    known = cause in CAUSES
    return {
        "overdue_s": (now_ns - since) / 1e9,
        "overdue_cause": cause * known,
        "overdue_file": path * known,
    }


def session(
    one: SessionRecord, pid: int, core: Mapping[str, Any], recorded: RecordedStream
) -> dict[str, Any]:
    """Return state and counters of one session, including its trainer's counters.

    core: the session in the core's snapshot.
    """
    table = recorded.table
    steps_ready = max(one.words[READY] - one.words[DONE], 0)
    return {
        "session": one.id,
        "dataset": one.dataset.key,
        "job": one.opened.job,
        "rank": one.opened.rank,
        "world": one.opened.world,
        "pid": pid,
        "known": core["known"],
        "ready": one.words[READY],
        "done": one.words[DONE],
        "waiting": len(one.waiters),
        "ahead": steps_ready,
        "lead_now_s": steps_ready * float(core["step_s"]),
        "made": finished(table[:, PACKED], table[:, TAKEN]),
        **recorded.fed,
        **recorded.overdue,
        "own_file": one.own_file,
        "own_remedy": one.own_remedy,
        **report(one.words.counters()),
    }


class Ranks:
    """Counters by job and rank: the sums over all of a rank's loaders, including closed ones.

    The latest 1024 ranks are kept.
    """

    def __init__(self) -> None:
        self._closed: dict[tuple[str, int], dict[str, int]] = {}
        #: A file of each, and what would help, of some ranks.
        self._own_files: dict[tuple[str, int], tuple[str, str]] = {}

    def add_closed(self, one: SessionRecord) -> None:
        """Keep the counters of a session that ends, while its shared words still exist."""
        _add(self._closed, one, leave_out=GAUGES)
        if one.own_file:
            self._own_files[one.opened.job, one.opened.rank] = one.own_file, one.own_remedy
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
        sums = {who: dict(counters) for who, counters in self._closed.items()}
        own_files = dict(self._own_files)
        streams: dict[tuple[str, int], list[RecordedStream]] = {}
        for one in sessions:
            _add(sums, one)
            who = one.opened.job, one.opened.rank
            stream = RecordedStream.of(one) if recorded is None else recorded[one.id]
            streams.setdefault(who, []).append(stream)
            if one.own_file:
                own_files[who] = one.own_file, one.own_remedy
        latest = list(sums.items())[-_MAX_RANKS:]
        return [
            {"job": who[0], "rank": who[1]}
            | dict(zip(("own_file", "own_remedy"), own_files.get(who, ("", "")), strict=True))
            | _fed_all(streams.get(who, []))
            | _most_overdue(streams.get(who, []))
            | report(n)
            for who, n in latest
        ]


def _fed_all(streams: Sequence[RecordedStream]) -> dict[str, float]:
    if len(streams) == 1:
        return streams[0].fed
    return fed([one.timeline for one in streams]) if streams else {}


def _most_overdue(streams: Sequence[RecordedStream]) -> dict[str, Any]:
    waits = [one.overdue for one in streams]
    return max(waits, key=itemgetter("overdue_s"), default=_IN_TIME)


def _add(
    sums: dict[tuple[str, int], dict[str, int]],
    one: SessionRecord,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Add a session's counters to those of its rank, and make that rank the latest."""
    who = one.opened.job, one.opened.rank
    before = sums.pop(who, {})
    # Clients may write anything: counters never go down.
    counted = {k: 0 if k in leave_out else n for k, n in one.words.counters().items()}
    sums[who] = {k: before.get(k, 0) + max(n, 0) for k, n in counted.items()}


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
        "peers": {f"{what}_nbytes": n for what, n in node.clusters.traffic().items()},
        "fetch": {
            "pending": node.fetcher.pending,
            "bugs": node.shell.bugs,
            "past_errors": dict(node.registry.past_errors),
        },
    }
