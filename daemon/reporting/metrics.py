"""Metrics: the answers of `creel stats`, and a page for Prometheus.

Both use the same counters. Label sets are bounded: no sample, path or token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from creel.cache.memory.shared_words import COUNTER_NAMES, DONE, FAILED, READY
from creel.cache.storage.retry import public
from creel.cache.storage.source import SECONDS
from creel.daemon.reporting.page import PageServer
from creel.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from creel.daemon.service.node import Node
    from creel.daemon.service.registry import DatasetRecord, SessionRecord

_CAUSES = tuple(n[len("stall_") : -len("_ns")] for n in COUNTER_NAMES if n.startswith("stall_"))
_STAGES = tuple(n[len("busy_") : -len("_ns")] for n in COUNTER_NAMES if n.startswith("busy_"))
_MAX_RANKS = 1024  # most ranks reported
_PAGE_S = 2.0  # how long a scrape waits for the loop


def memory(node: Node) -> dict[str, int]:
    """Bytes of the arena: budget, used by objects, and read but not yet stored.

    Also what tables and plans take beside the arena, and may take.
    """
    told: Any = node.core.snapshot()["datasets"].values()
    return {
        "budget_nbytes": node.arena.nbytes,
        "used_nbytes": int(sum(d["used_nbytes"] for d in told)),
        "held_nbytes": node.fetcher.held_nbytes(),
        "tables_nbytes": node.quota.used(),
        "tables_limit_nbytes": node.quota.limit,
    }


def tiers(told: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hits, misses and evictions of each tier, over all datasets of the core's snapshot.

    An object that was in flight for another session when it was requested counts as a hit: it
    costs no read.
    """
    past = told.get("past", {}).get("datasets")
    datasets = [*told["datasets"].values(), *([past] if past else [])]
    evictions: dict[str, int] = {}
    for one in datasets:
        for name, count in one.items():
            if name.startswith("evicted_"):
                why = name.removeprefix("evicted_")
                evictions[why] = evictions.get(why, 0) + int(count)
    hits = sum(int(d["hits"] + d["joined"]) for d in datasets)
    misses = sum(int(d["misses"]) for d in datasets)
    return {"memory": {"hits": hits, "misses": misses, "evictions": evictions}}


def dataset(node: Node, one: DatasetRecord) -> dict[str, Any]:
    """Counters of one dataset."""
    told = node.core.snapshot()["datasets"][one.key]
    return {"dataset": one.key, "root": public(one.manifest.root), **told}


def datasets(node: Node) -> list[dict[str, Any]]:
    """Counters of all datasets."""
    return [dataset(node, one) for one in node.registry.datasets.values()]


def source(one: DatasetRecord) -> dict[str, Any]:
    """Counters of reads from one dataset's storage."""
    counted = one.source.counters.snapshot()
    return {
        "source": public(one.manifest.root) or one.key[:12],
        "dataset": one.key,
        "opens": counted.opens,
        "reads": counted.reads,
        "nbytes": counted.nbytes,
        "retries": counted.retries,
        "errors": sum(counted.errors.values()),
        "errors_by_kind": dict(counted.errors),
        "last_error": counted.last_error,
        "seconds": {"le": list(SECONDS), "counts": counted.seconds, "sum": counted.seconds_sum},
    }


def session(one: SessionRecord, pid: int, step_s: float) -> dict[str, Any]:
    """State and counters of one session, its trainer's counters included.

    `step_s` is the recent mean time of a step, in seconds.
    """
    counters = one.words.counters()
    ahead = max(one.words[READY] - one.words[DONE], 0)
    return {
        "session": one.id,
        "dataset": one.dataset.key,
        "job": one.opened.job,
        "name": one.opened.name,
        "rank": one.opened.rank,
        "world": one.opened.world,
        "pid": pid,
        "known": one.steps,
        "ready": one.words[READY],
        "done": one.words[DONE],
        "failed": one.words[FAILED],
        "waiting": len(one.waiters),
        "lead_s": counters["lead_ns"] / 1e9 / max(counters["batches"], 1),
        "lead_now_s": ahead * step_s,
        **counted(counters),
    }


def counted(counters: dict[str, int]) -> dict[str, Any]:
    """Trainers' counters, from shared words, in the form of `creel stats`."""
    busy_s = {stage: counters[f"busy_{stage}_ns"] / 1e9 for stage in _STAGES}
    return {
        "stall_s": {cause: counters[f"stall_{cause}_ns"] / 1e9 for cause in _CAUSES},
        "busy_s": busy_s,
        "worker_busy_s": sum(busy_s.values()),
        **{k: n for k, n in counters.items() if not k.endswith("_ns")},
    }


class Ranks:
    """Counters by job and rank: all of a rank's loaders together, closed ones included.

    The latest 1024 ranks are kept.
    """

    def __init__(self) -> None:
        self._closed: dict[tuple[str, int], dict[str, int]] = {}

    def closes(self, one: SessionRecord) -> None:
        """Keep a session's counters at its end; its shared words still exist."""
        _add(self._closed, one)
        while len(self._closed) > _MAX_RANKS:
            del self._closed[next(iter(self._closed))]

    def told(self, sessions: Iterable[SessionRecord]) -> list[dict[str, Any]]:
        """Counters of each rank, given the open sessions; the latest come last."""
        sums = {who: dict(counters) for who, counters in self._closed.items()}
        for one in sessions:
            _add(sums, one)
        latest = list(sums.items())[-_MAX_RANKS:]
        return [{"job": job, "rank": rank, **counted(n)} for (job, rank), n in latest]


def _add(sums: dict[tuple[str, int], dict[str, int]], one: SessionRecord) -> None:
    """Add a session's counters to its rank's, and make that the latest."""
    who = one.opened.job, one.opened.rank
    before = sums.pop(who, {})
    # Clients may write anything: counters never go down.
    sums[who] = {k: before.get(k, 0) + max(n, 0) for k, n in one.words.counters().items()}


def stats(node: Node) -> dict[str, Any]:
    """Return the answer to `stats`."""
    core = node.core.snapshot()
    pids = node.pids()
    sessions = [
        session(s, pids.get(s.token, 0), float(core["sessions"][str(s.id)]["step_s"]))
        for s in node.registry.sessions.values()
    ]
    return {
        "memory": memory(node),
        "tiers": tiers(core),
        "core": core,
        "sources": [source(d) for d in node.registry.datasets.values()],
        "sessions": sessions,
        "ranks": node.ranks.told(node.registry.sessions.values()),
        "fetch": {
            "pending": node.fetcher.pending,
            "bugs": node.bugs,
            "past_errors": dict(node.registry.past_errors),
        },
    }


# --- Prometheus -------------------------------------------------------------------------------


class Page:
    """A Prometheus page on its own address.

    Args:
        address: "127.0.0.1:9464".
        take: returns status and stats, or raises TimeoutError.
    """

    def __init__(self, address: str, take: Callable[[], dict[str, Any]]) -> None:
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ImportError as e:
            raise ConfigError("daemon.metrics needs `pip install creel[prometheus]`") from e
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(_Collector(take))

        def render(accept: str) -> tuple[str, bytes]:
            encode, kind = choose_encoder(accept)
            return kind, encode(registry)

        try:
            self._server = PageServer(host.strip("[]"), int(port), render)
        except (OSError, OverflowError) as e:  # the latter: no such port
            why = getattr(e, "strerror", None) or e
            raise ConfigError(f"daemon.metrics = {address}: {why}") from e
        self.port = self._server.port

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


class _Collector:
    def __init__(self, take: Callable[[], dict[str, Any]]) -> None:
        self._take = take

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        told = self._take()
        yield _build_info(told)
        yield from _of_tiers(told)
        yield from _of_sources(told)
        yield from _of_ranks(told)
        yield from _of_sessions(told)


def take_by(call_soon: Callable[[Callable[[], None]], None], make: Callable[[], Any]) -> Any:
    """Return `make()`, run on the loop thread; TimeoutError when that takes too long."""
    done = threading.Event()
    box: list[Any] = []

    def work() -> None:
        box.append(make())
        done.set()

    call_soon(work)
    if not done.wait(_PAGE_S):
        raise TimeoutError("the daemon's loop is busy")
    return box[0]


def _build_info(told: dict[str, Any]) -> Metric:
    from prometheus_client.core import InfoMetricFamily

    build = InfoMetricFamily("creel_build", "Version of this daemon.")
    build.add_metric([], {"version": told["version"]})
    return build


def _of_tiers(told: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    hits = CounterMetricFamily("creel_cache_hits", "Objects found in a tier.", labels=["tier"])
    misses = CounterMetricFamily(
        "creel_cache_misses", "Objects not found in a tier.", labels=["tier"]
    )
    gone = CounterMetricFamily(
        "creel_cache_evictions", "Objects that left a tier.", labels=["tier", "reason"]
    )
    for name, tier in told["tiers"].items():
        hits.add_metric([name], tier.get("hits", 0))
        misses.add_metric([name], tier.get("misses", 0))
        for reason, count in tier.get("evictions", {}).items():
            gone.add_metric([name, reason], count)
    used = GaugeMetricFamily("creel_cache_bytes", "Bytes of samples in a tier.", labels=["tier"])
    used.add_metric(["memory"], told["memory"]["used_nbytes"])
    budget = GaugeMetricFamily(
        "creel_cache_budget_bytes", "Bytes that a tier may hold.", labels=["tier"]
    )
    budget.add_metric(["memory"], told["memory"]["budget_nbytes"])
    yield from (hits, misses, gone, used, budget)


def _of_sources(told: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    # The key stands for the source: a root may contain a bucket's name and would grow without
    # bound.
    seconds = HistogramMetricFamily("creel_read_seconds", "Time of a read.", labels=["source"])
    nbytes = CounterMetricFamily("creel_read_bytes", "Bytes read.", labels=["source"])
    opens = CounterMetricFamily("creel_opens", "Files and objects opened.", labels=["source"])
    retries = CounterMetricFamily("creel_retries", "Reads tried again.", labels=["source"])
    errors = CounterMetricFamily("creel_errors", "Failures by kind.", labels=["kind"])
    kinds: dict[str, int] = {"bug": told["fetch"]["bugs"], **told["fetch"].get("past_errors", {})}
    for one in told["sources"]:
        label = [one["dataset"][:12]]
        seconds.add_metric(label, *_buckets(one["seconds"]))
        nbytes.add_metric(label, one["nbytes"])
        opens.add_metric(label, one["opens"])
        retries.add_metric(label, one["retries"])
        for kind, count in one["errors_by_kind"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    for kind, count in kinds.items():
        errors.add_metric([kind], count)
    yield from (seconds, nbytes, opens, retries, errors)


def _buckets(seconds: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets, as Prometheus expects them, and the sum."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, seconds["le"]), "+Inf"], seconds["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, seconds["sum"]


def _of_ranks(told: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    who = ["job", "rank"]
    stall = CounterMetricFamily(
        "creel_stall_seconds", "Time a training process waited.", labels=[*who, "cause"]
    )
    counters = {
        "samples": CounterMetricFamily("creel_samples", "Samples delivered.", labels=who),
        "nbytes": CounterMetricFamily(
            "creel_sample_bytes", "Bytes of samples delivered.", labels=who
        ),
        "direct_reads": CounterMetricFamily(
            "creel_direct_reads", "Objects that a training process read itself.", labels=who
        ),
        "direct_nbytes": CounterMetricFamily(
            "creel_direct_read_bytes", "Bytes that a training process read itself.", labels=who
        ),
    }
    busy = CounterMetricFamily(
        "creel_worker_busy_seconds", "Time workers spent on batches.", labels=[*who, "stage"]
    )
    for one in told["ranks"]:
        label = [one["job"], str(one["rank"])]
        for name, family in counters.items():
            family.add_metric(label, one[name])
        for cause, seconds in one["stall_s"].items():
            stall.add_metric([*label, cause], seconds)
        for stage, seconds in one["busy_s"].items():
            busy.add_metric([*label, stage], seconds)
    yield from (stall, busy, *counters.values())


def _of_sessions(told: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    who = ["job", "rank"]
    ahead = GaugeMetricFamily("creel_ready_steps", "Steps ready and not yet read.", labels=who)
    lead = GaugeMetricFamily(
        "creel_prefetch_lead_seconds", "How far ahead of use samples are ready.", labels=who
    )
    for (job, rank), ones in _by_rank(told["sessions"]).items():
        ahead.add_metric([job, rank], sum(max(s["ready"] - s["done"], 0) for s in ones))
        lead.add_metric([job, rank], min(s["lead_now_s"] for s in ones))
    yield from (ahead, lead)


def _by_rank(sessions: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group sessions by rank: a rank with several loaders is one series."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in sessions:
        found.setdefault((one["job"], str(one["rank"])), []).append(one)
    return found
