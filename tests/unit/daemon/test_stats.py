"""The page for Prometheus."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import pytest

from creel.cache.memory.memfd import sealed_memfd
from creel.cache.memory.shared_words import WORDS_NBYTES, SharedWords
from creel.daemon.reporting.prometheus import serve_page
from creel.daemon.service.stats import Ranks
from creel.messages import Open
from kit import seeds

CAUSES = ("source", "decode", "collate", "daemon", "sampler")
STAGES = ("source", "decode", "collate", "handover")
#: The promised names: kind, labels.
PROMISED = {
    "creel_cache_hits_total": ("counter", {"tier"}),
    "creel_cache_misses_total": ("counter", {"tier"}),
    "creel_cache_bytes": ("gauge", {"tier"}),
    "creel_cache_evictions_total": ("counter", {"tier", "reason"}),
    "creel_read_seconds": ("histogram", {"source"}),
    "creel_stall_seconds_total": ("counter", {"job", "rank", "cause"}),
    "creel_prefetch_lead_seconds": ("gauge", {"job", "rank"}),
    "creel_worker_busy_seconds_total": ("counter", {"job", "rank", "stage"}),
    "creel_accelerator_utilisation": ("gauge", {"job", "rank"}),
    "creel_overdue_seconds": ("gauge", {"job", "rank"}),
    "creel_samples_total": ("counter", {"job", "rank"}),
    "creel_errors_total": ("counter", {"kind"}),
    "creel_build_info": ("gauge", {"version"}),
}
SECONDS = {"le": [0.1, 1.0], "counts": [3, 2, 1], "sum": 4.5}
SOURCE: dict[str, Any] = {
    "dataset": "d" * 32,
    "nbytes": 10,
    "opens": 2,
    "retries": 1,
    "seconds": SECONDS,
}
SOURCE |= {"requests": {"GET": 5, "HEAD": 1, "LIST": 0}, "throttles": 2}
TOLD: dict[str, Any] = {
    "version": "1.2.3",
    "tiers": {"memory": {"hits": 3, "misses": 2, "evictions": {"room": 1}}},
    "memory": {"used_nbytes": 7, "budget_nbytes": 9},
    "sources": [SOURCE | {"errors_by_kind": {"EIO": 4}}],
    "fetch": {"bugs": 0, "past_errors": {"EIO": 1}},
    "sessions": [{"job": "a", "rank": 0, "ahead": 2, "lead_now_s": t} for t in (0.5, 0.7)],
    "ranks": [
        {
            "job": "a",
            "rank": 0,
            "samples": 100,
            "nbytes": 300,
            "direct_reads": 2,
            "direct_nbytes": 6,
            "utilisation": 0.75,
            "overdue_s": 14.0,
            "stall_s": dict.fromkeys(CAUSES, 0.0) | {"source": 10.0},
            "busy_s": dict.fromkeys(STAGES, 0.0) | {"decode": 20.0, "source": 1.0},
        }
    ],
}


@dataclass
class Session:
    """The parts of a session that are counted."""

    opened: Open
    words: SharedWords
    own_file: str = ""
    own_remedy: str = ""

    def count(self, **counters: int) -> None:
        """Count as a trainer does."""
        for name, value in counters.items():
            self.words.add(name, value)


@pytest.fixture
def session() -> Iterator[Callable[..., Any]]:
    """A function that makes sessions with shared words of their own."""
    all_words: list[SharedWords] = []

    def make(job: str, rank: int, **counters: int) -> Any:
        fd = sealed_memfd("words", WORDS_NBYTES)
        record = Session(Open("d", job, rank, 1500, "never"), SharedWords(fd))
        os.close(fd)
        all_words.append(record.words)
        record.count(**counters)
        return record

    yield make
    for words in all_words:
        words.close()


def test_a_ranks_counters_stay_when_a_loader_of_it_is_closed(session: Callable[..., Any]) -> None:
    ranks = Ranks()
    first = session("a", 0, samples=100, stall_source_ns=10**9)
    second = session("a", 0, samples=30, busy_decode_ns=3 * 10**9)
    other = session("a", 1, samples=5)
    ranks.add_closed(second)
    first.count(samples=10)
    by_rank = {rank["rank"]: rank for rank in ranks.reports([first, other])}
    assert (by_rank[0]["samples"], by_rank[1]["samples"]) == (140, 5)
    assert (by_rank[0]["stall_s"]["source"], by_rank[0]["busy_s"]["decode"]) == (1.0, 3.0)
    ranks.add_closed(first)
    ranks.add_closed(other)
    assert {rank["rank"]: rank["samples"] for rank in ranks.reports([])} == {0: 140, 1: 5}


def test_workers_of_a_closed_loader_are_no_workers_of_its_rank(session: Callable[..., Any]) -> None:
    ranks = Ranks()
    ranks.add_closed(session("a", 0, workers=4, cpu_ns=10**9))
    train, validate = (session("a", 0, workers=n, cpu_ns=10**9) for n in (2, 3))
    (rank,) = ranks.reports([train, validate])
    assert (rank["workers"], rank["cpu_s"]) == (5, 3.0)
    (rank,) = ranks.reports([])
    assert rank["workers"] == 0


def test_a_client_that_lies_takes_nothing_from_its_rank(session: Callable[..., Any]) -> None:
    ranks = Ranks()
    ranks.add_closed(session("a", 0, samples=7))
    (rank,) = ranks.reports([session("a", 0, samples=-1000)])
    assert rank["samples"] == 7


def test_the_loaders_of_a_rank_are_one_timeline(session: Callable[..., Any]) -> None:
    """Two loaders in turn: training waits half of each second, whichever it waits for."""
    ranks, loaders = Ranks(), [session("a", 0), session("a", 0)]
    second = 10**9
    for i in range(1, 41):
        loaders[i % 2].words.log.add(0, 0, 0, 0, i * second - second // 2, i * second, 0)
    (rank,) = ranks.reports(loaders)
    assert rank["utilisation"] == pytest.approx(0.5)
    (rank,) = ranks.reports(loaders[:1])
    assert rank["utilisation"] == pytest.approx(0.75)
    assert "utilisation" not in ranks.reports([session("a", 0)])[0]


def test_a_wait_that_has_not_ended_counts_as_one(session: Callable[..., Any]) -> None:
    """Forty batches a second apart without a wait; then one that has not come for as long."""
    record, now = session("a", 0), time.monotonic_ns()
    for i in range(40):
        record.words.log.add(0, 0, 0, 0, *[now - (80 - i) * 10**9] * 2, 0)
    assert Ranks().reports([record])[0]["overdue_s"] == 0
    record.words.set_overdue(now - 40 * 10**9, "source", "/data/1")
    (rank,) = Ranks().reports([session("a", 0), record])
    assert rank["overdue_s"] >= 40
    assert (rank["overdue_cause"], rank["overdue_file"]) == ("source", "/data/1")
    assert rank["utilisation"] < 0.5
    record.words.set_overdue(now - 40 * 10**9, "source", "/long" * 1000 + "/1")
    assert Ranks().reports([record])[0]["overdue_file"].endswith("/long/1")
    record.words.set_overdue(0)
    assert Ranks().reports([record])[0]["overdue_s"] == 0


@pytest.mark.parametrize("since", [-1, 2**63 - 1])
def test_a_client_that_lies_of_its_wait_has_none(since: int, session: Callable[..., Any]) -> None:
    record = session("a", 0)
    record.words.set_overdue(since, "\udcff", "\x1b[2J")
    assert Ranks().reports([record])[0]["overdue_s"] == 0
    record.words.set_overdue(1, "\udcff", "\x1b[2J")
    assert Ranks().reports([record])[0]["overdue_file"] == ""


@pytest.mark.parametrize("seed", seeds(5))
def test_utilisation_is_a_share_for_any_recording_of_a_client(
    seed: int, session: Callable[..., Any]
) -> None:
    rng, record = random.Random(seed), session("a", 0)
    for _ in range(50):
        record.words.log.add(*(rng.choice([0, -1, 2**63 - 1, -(2**63), 5]) for _ in range(7)))
    (rank,) = Ranks().reports([record])
    assert 0 <= rank.get("utilisation", 0) <= 1


def test_a_file_that_a_dataset_opens_itself_is_told_of_its_rank_after_the_end(
    session: Callable[..., Any],
) -> None:
    ranks, record, other = Ranks(), session("a", 0), session("a", 1)
    record.own_file = "/data/1"
    assert [r["own_file"] for r in ranks.reports([record, other])] == ["/data/1", ""]
    ranks.add_closed(record)
    assert [r["own_file"] for r in ranks.reports([])] == ["/data/1"]


def test_the_ranks_that_are_told_of_are_bounded(session: Callable[..., Any]) -> None:
    ranks = Ranks()
    for rank in range(1025):
        record = session("a", rank)
        ranks.add_closed(record)
        record.words.close()
    reports = ranks.reports([session("b", 0)])
    assert len(reports) == 1024
    assert (reports[0]["rank"], reports[-1]["job"]) == (2, "b")


@pytest.fixture(scope="module")  # its end takes half a second
def page() -> Iterator[str]:
    """The page that a scraper gets for one rank."""
    pytest.importorskip("prometheus_client")
    served = serve_page("127.0.0.1:0", lambda: TOLD)
    try:
        with urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as answer:
            yield answer.read().decode()
    finally:
        served.close()


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_promised_metric_has_its_kind_and_labels(name: str, page: str) -> None:
    kind, labels = PROMISED[name]
    assert f"# TYPE {name} {kind}\n" in page
    series = [line for line in page.splitlines() if re.match(rf"{name}(_bucket)?{{", line)]
    assert series
    for line in series:
        assert set(re.findall(r'(\w+)="', line)) - {"le"} == labels


def test_a_page_has_every_cause_and_every_stage(page: str) -> None:
    for cause in CAUSES:
        seconds = 10.0 if cause == "source" else 0.0
        assert f'creel_stall_seconds_total{{cause="{cause}",job="a",rank="0"}} {seconds}' in page
    busy = {"decode": 20.0, "source": 1.0, "collate": 0.0, "handover": 0.0}
    for stage, seconds in busy.items():
        line = f'creel_worker_busy_seconds_total{{job="a",rank="0",stage="{stage}"}} {seconds}'
        assert line in page
    assert 'creel_read_seconds_bucket{le="+Inf",source="dddddddddddd"} 6.0' in page
    assert 'creel_prefetch_lead_seconds{job="a",rank="0"} 0.5' in page
    assert 'creel_ready_steps{job="a",rank="0"} 4.0' in page
    assert 'creel_accelerator_utilisation{job="a",rank="0"} 0.75' in page
    assert 'creel_errors_total{kind="EIO"} 5.0' in page


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_promtool_finds_nothing_to_mend(page: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
