"""The page for Prometheus: the counters of `stats`, as metric families.

Label sets are bounded: no label has a sample, a path or a token.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from creel.counters import COUNTERS, Counter
from creel.daemon.reporting.page import PageServer
from creel.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PAGE_S = 2.0  # longest time that a scrape waits for the loop


def serve_page(address: str, take: Callable[[], dict[str, Any]]) -> PageServer:
    """Serve a Prometheus page on its own address.

    Args:
        address: host and port, such as "127.0.0.1:9464".
        take: returns status and stats, or raises an error if the daemon is busy.

    Raises:
        ConfigError: the address is not available, or prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ImportError as e:
        raise ConfigError("daemon.metrics needs pip install 'creel-data[prometheus]'") from e
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(_Collector(take))

    def render(accept: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accept)
        return kind, encode(registry)

    try:
        return PageServer(host.strip("[]"), int(port), render)
    except (OSError, OverflowError) as e:  # OverflowError: no such port
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"daemon.metrics = {address}: {why}") from e


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
        # The dataset's key labels the source: a root may contain a bucket's name, and the number of
        # roots is unbounded.
        sources = [([source["dataset"][:12]], source) for source in answer["sources"]]
        yield from _families("source", ["source"], sources)
        yield from _families("node", [], [([], {"errors": _errors(answer)})])
        yield from _families("rank", ["job", "rank"], _ranks(answer))


def take_by(call_soon: Callable[[Callable[[], None]], None], make: Callable[[], Any]) -> Any:
    """Return `make()`, run on the loop thread; raise futures' TimeoutError if that is busy."""
    taken: Future[Any] = Future()
    call_soon(lambda: taken.set_result(make()))
    return taken.result(_PAGE_S)


def _build_info(answer: dict[str, Any]) -> Metric:
    from prometheus_client.core import InfoMetricFamily

    build = InfoMetricFamily("creel_build", "Version of this daemon.")
    build.add_metric([], {"version": answer["version"]})
    return build


def _families(
    of: str, labels: list[str], rows: list[tuple[list[str], dict[str, Any]]]
) -> Iterator[Metric]:
    """Yield one family for each counter of `of`; `rows`: values of the labels, and counts."""
    from prometheus_client import core

    for counter in COUNTERS:
        if counter.of == of:
            kind = getattr(core, f"{counter.kind.capitalize()}MetricFamily")
            family = kind(
                counter.metric, counter.help, labels=[*labels, *filter(None, [counter.label])]
            )
            for label, counts in rows:
                if counter.key in counts:
                    _add_metric(family, counter, label, counts[counter.key])
            yield family


def _add_metric(family: Any, counter: Counter, label: list[str], count: Any) -> None:
    if counter.kind == "histogram":
        family.add_metric(label, *_buckets(count))
    elif counter.label:
        for member, value in count.items():
            family.add_metric([*label, member], value)
    else:
        family.add_metric(label, count)


def _errors(answer: dict[str, Any]) -> dict[str, int]:
    """Return failures by kind, of all sources and of the daemon itself."""
    kinds = collections.Counter(bug=answer["fetch"]["bugs"])
    for some in (answer["fetch"]["past_errors"], *(s["errors_by_kind"] for s in answer["sources"])):
        kinds.update(some)
    return kinds


def _buckets(seconds: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets, as Prometheus expects them, and the sum."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, seconds["le"]), "+Inf"], seconds["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, seconds["sum"]


def _ranks(answer: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the counters of each rank, with the steps its sessions have ready: sum, least lead."""
    ranks = {(rank["job"], rank["rank"]): dict(rank) for rank in answer["ranks"]}
    for session in answer["sessions"]:
        rank = ranks.get((session["job"], session["rank"]))
        if rank is not None:
            rank["ahead"] = rank.get("ahead", 0) + session["ahead"]
            rank["lead_now_s"] = min(
                rank.get("lead_now_s", session["lead_now_s"]), session["lead_now_s"]
            )
    return [([job, str(rank)], counts) for (job, rank), counts in ranks.items()]
