"""What the daemon tells about itself: the answers of `creel stats`, and a page for Prometheus.

Both are drawn from the same books. Label sets are bounded: no sample, no path, no token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from creel.cache.board import COUNTER_NAMES, DONE, FAILED, READY
from creel.cache.source import SECONDS
from creel.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from creel.daemon.node import Node
    from creel.daemon.registry import Dataset, Session

_CAUSES = tuple(n[len("stall_") : -len("_ns")] for n in COUNTER_NAMES if n.startswith("stall_"))
_MAX_RANKS = 1024  # series of a page, at most
_PAGE_S = 2.0  # how long a scrape waits for the loop


def memory(node: Node) -> dict[str, int]:
    """Bytes of the arena: what there is, what holds samples; and what is read but not yet there."""
    told: Any = node.core.snapshot()["datasets"].values()
    return {
        "budget_nbytes": node.arena.nbytes,
        "used_nbytes": int(sum(d["used_nbytes"] for d in told)),
        "held_nbytes": node.fetcher.held_nbytes(),
    }


def tiers(told: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hits, misses and evictions of each tier, over all data sets of the core's snapshot.

    An object that was under way for somebody else when it was asked for counts as a hit: it
    costs no read.
    """
    datasets = told["datasets"].values()
    evictions: dict[str, int] = {}
    for one in datasets:
        for name, count in one.items():
            if name.startswith("evicted_"):
                why = name.removeprefix("evicted_")
                evictions[why] = evictions.get(why, 0) + int(count)
    hits = sum(int(d["hits"] + d["joined"]) for d in datasets)
    misses = sum(int(d["misses"]) for d in datasets)
    return {"memory": {"hits": hits, "misses": misses, "evictions": evictions}}


def dataset(node: Node, one: Dataset) -> dict[str, Any]:
    """One data set in numbers."""
    told = node.core.snapshot()["datasets"][one.key]
    return {"dataset": one.key, "root": one.manifest.root, **told}


def datasets(node: Node) -> list[dict[str, Any]]:
    """All data sets."""
    return [dataset(node, one) for one in node.registry.datasets.values()]


def source(one: Dataset) -> dict[str, Any]:
    """What was read from one data set's storage."""
    counted = one.source.counters.snapshot()
    return {
        "source": one.manifest.root or one.key[:12],
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


def session(one: Session, pid: int, step_s: float) -> dict[str, Any]:
    """One stream of batches: what was asked, where it is, what its trainer counted.

    `step_s` is the mean time of a step of late, seconds.
    """
    counters = one.board.counters()
    ahead = max(one.board[READY] - one.board[DONE], 0)
    return {
        "session": one.id,
        "dataset": one.dataset.key,
        "job": one.opened.job,
        "name": one.opened.name,
        "rank": one.opened.rank,
        "world": one.opened.world,
        "pid": pid,
        "known": one.steps,
        "ready": one.board[READY],
        "done": one.board[DONE],
        "failed": one.board[FAILED],
        "waiting": len(one.waiters),
        "stall_s": {cause: counters[f"stall_{cause}_ns"] / 1e9 for cause in _CAUSES},
        "lead_s": counters["lead_ns"] / 1e9 / max(counters["batches"], 1),
        "lead_now_s": ahead * step_s,
        "worker_busy_s": counters["worker_busy_ns"] / 1e9,
        **{k: n for k, n in counters.items() if not k.endswith("_ns")},
    }


def stats(node: Node) -> dict[str, Any]:
    """The answer to `stats`."""
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
        "fetch": {"pending": node.fetcher.pending, "bugs": node.bugs},
    }


# --- Prometheus -------------------------------------------------------------------------------


class Page:
    """A Prometheus page on an address of its own.

    Args:
        address: "127.0.0.1:9464".
        take: runs a function on the loop thread and gives its result, or TimeoutError.
    """

    def __init__(self, address: str, take: Callable[[], dict[str, Any]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as e:
            raise ConfigError("daemon.metrics needs `pip install creel[prometheus]`") from e
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(_Collector(take))
        try:
            self._server, self._thread = start_http_server(int(port), host, registry)
        except OSError as e:
            raise ConfigError(f"daemon.metrics = {address}: {e.strerror}") from e
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Collector:
    def __init__(self, take: Callable[[], dict[str, Any]]) -> None:
        self._take = take
        self._totals = Totals()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        told = self._take()
        yield _build_info(told)
        yield from _of_tiers(told)
        yield from _of_sources(told)
        yield from _of_sessions(told, self._totals)


def take_by(call_soon: Callable[[Callable[[], None]], None], make: Callable[[], Any]) -> Any:
    """`make()` as the loop thread sees the world; TimeoutError when the loop does not get to it."""
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

    # The key stands for the source: a root may hold a bucket's name and grows without bound.
    seconds = HistogramMetricFamily("creel_read_seconds", "Time of a read.", labels=["source"])
    nbytes = CounterMetricFamily("creel_read_bytes", "Bytes read.", labels=["source"])
    opens = CounterMetricFamily("creel_opens", "Files and objects opened.", labels=["source"])
    retries = CounterMetricFamily("creel_retries", "Reads tried again.", labels=["source"])
    errors = CounterMetricFamily("creel_errors", "Failures by kind.", labels=["kind"])
    kinds: dict[str, int] = {"bug": told["fetch"]["bugs"]}
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
    """Cumulative buckets, as Prometheus wants them, and the sum."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, seconds["le"]), "+Inf"], seconds["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, seconds["sum"]


def _of_sessions(told: dict[str, Any], totals: Totals) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
        "worker_busy_s": CounterMetricFamily(
            "creel_worker_busy_seconds", "Time workers spent on batches.", labels=who
        ),
    }
    for (job, rank), sums in totals.add(told["sessions"]).items():
        for name, family in counters.items():
            family.add_metric([job, rank], sums[name])
        for cause in _CAUSES:
            stall.add_metric([job, rank, cause], sums[cause])
    yield from (stall, *counters.values())
    ahead = GaugeMetricFamily("creel_ready_steps", "Steps ready and not yet read.", labels=who)
    lead = GaugeMetricFamily(
        "creel_prefetch_lead_seconds", "How far ahead of use samples are ready.", labels=who
    )
    for (job, rank), ones in _by_rank(told["sessions"]).items():
        ahead.add_metric([job, rank], sum(max(s["ready"] - s["done"], 0) for s in ones))
        lead.add_metric([job, rank], min(s["lead_now_s"] for s in ones))
    yield from (ahead, lead)


def _by_rank(sessions: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """A rank may have several loaders: one series for all of them."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in sessions:
        found.setdefault((one["job"], str(one["rank"])), []).append(one)
    return found


class Totals:
    """Counters by job and rank that never go down, though a session's own go with it.

    What a session counted after the last scrape of its life is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # each scrape has a thread of its own
        self._seen: dict[int, dict[str, float]] = {}
        self._sums: dict[tuple[str, str], dict[str, float]] = {}

    def add(self, sessions: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
        """Sums over all sessions so far, given those that are open; of the latest ranks only."""
        with self._lock:
            seen = {s["session"]: _counted(s) for s in sessions}
            for one in sessions:
                before = self._seen.get(one["session"], {})
                who = one["job"], str(one["rank"])
                sums = self._sums.pop(who, {})
                self._sums[who] = sums  # the latest ones last
                for name, value in seen[one["session"]].items():
                    new = max(value - before.get(name, 0.0), 0.0)
                    sums[name] = sums.get(name, 0.0) + new
            self._seen = seen
            while len(self._sums) > _MAX_RANKS:
                del self._sums[next(iter(self._sums))]
            return {who: dict(sums) for who, sums in self._sums.items()}


def _counted(one: dict[str, Any]) -> dict[str, float]:
    own = ("samples", "nbytes", "direct_reads", "worker_busy_s")
    return {**{k: float(one[k]) for k in own}, **one["stall_s"]}
