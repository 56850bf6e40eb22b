"""Metrics: the answers of `creel stats`, and a page for Prometheus.

Both use the same counters. Label sets are bounded: no sample, path or token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from creel.cache.memory.shared_words import DONE, READY
from creel.cache.storage.retry import public
from creel.cache.storage.source import SECONDS
from creel.counters import COUNTERS, Counter, report
from creel.daemon.reporting.page import PageServer
from creel.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from creel.daemon.service.node import Node
    from creel.daemon.service.registry import DatasetRecord, SessionRecord

_MAX_RANKS = 1024  # most ranks reported
_PAGE_S = 2.0  # how long a scrape waits for the loop


def memory(node: Node) -> dict[str, int]:
    """Bytes of the arena: budget, used by objects, and read but not yet stored.

    Also what tables and plans take beside the arena, and may take.
    """
    counted: Any = node.core.snapshot()["datasets"].values()
    return {
        "budget_nbytes": node.arena.nbytes,
        "used_nbytes": int(sum(d["used_nbytes"] for d in counted)),
        "held_nbytes": node.fetcher.held_nbytes(),
        "tables_nbytes": node.quota.used(),
        "tables_limit_nbytes": node.quota.limit,
    }


def tiers(core: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hits, misses and evictions of each tier, over all datasets of the core's snapshot.

    What memory misses, disk and peers may have: "disk" is there where there is one, or was, "peers"
    once one was asked.

    An object that was in flight for another session when it was requested counts as a hit: it
    costs no read.
    """
    past = core.get("past", {}).get("datasets")
    datasets = [*core["datasets"].values(), *([past] if past else [])]
    evictions: dict[str, int] = {}
    for one in datasets:
        for name, count in one.items():
            if name.startswith("evicted_"):
                why = name.removeprefix("evicted_")
                evictions[why] = evictions.get(why, 0) + int(count)
    hits = sum(int(d["hits"] + d["joined"]) for d in datasets)
    misses = sum(int(d["misses"]) for d in datasets)
    out: dict[str, dict[str, Any]] = {
        "memory": {"hits": hits, "misses": misses, "evictions": evictions}
    }
    disk = core.get("disk", {}).get("node", {})
    found, missed, spilled = (
        sum(int(d[name]) for d in datasets) for name in ("disk_reads", "disk_misses", "spilled")
    )
    if found + missed + spilled + int(disk.get("nbytes", 0)):
        out["disk"] = {
            "hits": found,
            "misses": missed,
            "evictions": {},
            "spilled": spilled,
            "spilled_nbytes": sum(int(d["spilled_nbytes"]) for d in datasets),
            "used_nbytes": int(disk.get("used_nbytes", 0)),
            "budget_nbytes": int(disk.get("nbytes", 0)),
        }
    sent, refused = (sum(int(d[name]) for d in datasets) for name in ("peer_reads", "peer_misses"))
    if sent + refused:
        out["peers"] = {"hits": sent, "misses": refused, "evictions": {}}
    return out


def dataset(node: Node, one: DatasetRecord) -> dict[str, Any]:
    """Counters of one dataset."""
    counted = node.core.snapshot()["datasets"][one.key]
    return {"dataset": one.key, "root": public(one.manifest.root), **counted}


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
    steps_ready = max(one.words[READY] - one.words[DONE], 0)
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
        "waiting": len(one.waiters),
        "ahead": steps_ready,
        "lead_now_s": steps_ready * step_s,
        **report(one.words.counters()),
    }


class Ranks:
    """Counters by job and rank: all of a rank's loaders together, closed ones included.

    The latest 1024 ranks are kept.
    """

    def __init__(self) -> None:
        self._closed: dict[tuple[str, int], dict[str, int]] = {}

    def add_closed(self, one: SessionRecord) -> None:
        """Keep a session's counters at its end; its shared words still exist."""
        _add(self._closed, one)
        while len(self._closed) > _MAX_RANKS:
            del self._closed[next(iter(self._closed))]

    def reports(self, sessions: Iterable[SessionRecord]) -> list[dict[str, Any]]:
        """Counters of each rank, given the open sessions; the latest come last."""
        sums = {who: dict(counters) for who, counters in self._closed.items()}
        for one in sessions:
            _add(sums, one)
        latest = list(sums.items())[-_MAX_RANKS:]
        return [{"job": job, "rank": rank, **report(n)} for (job, rank), n in latest]


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
        "ranks": node.ranks.reports(node.registry.sessions.values()),
        "peers": {f"{what}_nbytes": n for what, n in node.clusters.traffic().items()},
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
        answer = self._take()
        yield _build_info(answer)
        own = {"memory": answer["memory"]}
        tiers = [([name], own.get(name, {}) | tier) for name, tier in answer["tiers"].items()]
        yield from _families("tier", ["tier"], tiers)
        # The key stands for the source: a root may contain a bucket's name and would grow without
        # bound.
        sources = [([one["dataset"][:12]], one) for one in answer["sources"]]
        yield from _families("source", ["source"], sources)
        yield from _families("node", [], [([], {"errors": _errors(answer)})])
        yield from _families("rank", ["job", "rank"], _ranks(answer))


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


def _build_info(answer: dict[str, Any]) -> Metric:
    from prometheus_client.core import InfoMetricFamily

    build = InfoMetricFamily("creel_build", "Version of this daemon.")
    build.add_metric([], {"version": answer["version"]})
    return build


def _families(
    of: str, who: list[str], rows: list[tuple[list[str], dict[str, Any]]]
) -> Iterator[Metric]:
    """One family for each counter of `of`; `rows`: values of the labels, and counts."""
    for one in COUNTERS:
        if one.of == of:
            family = _kind(one)(one.metric, one.help, labels=[*who, *filter(None, [one.label])])
            for label, counts in rows:
                if one.key in counts:
                    _add_metric(family, one, label, counts[one.key])
            yield family


def _kind(one: Counter) -> Any:
    from prometheus_client import core

    return getattr(core, f"{one.kind.capitalize()}MetricFamily")


def _add_metric(family: Any, one: Counter, label: list[str], count: Any) -> None:
    if one.kind == "histogram":
        family.add_metric(label, *_buckets(count))
    elif one.label:
        for member, value in count.items():
            family.add_metric([*label, member], value)
    else:
        family.add_metric(label, count)


def _errors(answer: dict[str, Any]) -> dict[str, int]:
    """Failures by kind, of all sources and of the daemon itself."""
    kinds: dict[str, int] = {"bug": answer["fetch"]["bugs"]}
    for some in (answer["fetch"]["past_errors"], *(s["errors_by_kind"] for s in answer["sources"])):
        for kind, count in some.items():
            kinds[kind] = kinds.get(kind, 0) + count
    return kinds


def _buckets(seconds: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets, as Prometheus expects them, and the sum."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, seconds["le"]), "+Inf"], seconds["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, seconds["sum"]


def _ranks(answer: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Counters of each rank; what its open sessions have ready: all steps, the shortest lead."""
    found = {(one["job"], one["rank"]): dict(one) for one in answer["ranks"]}
    for one in answer["sessions"]:
        rank = found.get((one["job"], one["rank"]))
        if rank is not None:
            rank["ahead"] = rank.get("ahead", 0) + one["ahead"]
            rank["lead_now_s"] = min(rank.get("lead_now_s", one["lead_now_s"]), one["lead_now_s"])
    return [([job, str(rank)], counts) for (job, rank), counts in found.items()]
