"""Counters are a table; each row is found wherever a user or a program looks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import pytest

from creel.cache.memory.memfd import sealed_memfd
from creel.cache.memory.shared_words import COUNTER, WORDS_NBYTES, SharedWords
from creel.cli.watching import view
from creel.counters import CAUSES, COUNTERS, OF_RANKS, OF_WORKERS, STAGES, Counter, report
from creel.daemon.reporting.prometheus import serve_page
from creel.loader.line.observers.meter import Meter
from creel.loader.making.batch_times import CAUSE_OF
from creel.loader.making.workers import worker_words
from creel.loader.making.workers.worker_words import WorkerWords

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def words() -> Iterator[SharedWords]:
    fd = sealed_memfd("words", WORDS_NBYTES)
    shared_words = SharedWords(fd)
    os.close(fd)
    yield shared_words
    shared_words.close()


def each(counter: Counter) -> dict[str, float] | float:
    """Return the report of a counter whose words are all 3 (seconds or a number)."""
    return dict.fromkeys(counter.members, 3.0) if counter.members else 3


def answer_of(of: str) -> dict[str, Any]:
    """Return the part of `creel stats` that Prometheus reads, with a count in each row of `of`."""
    histogram = {"le": [1.0], "counts": [3, 0], "sum": 3.0}
    row: dict[str, Any] = {c.key: each(c) for c in COUNTERS if c.of == of}
    row |= {"evictions": {"due_later": 3}, "errors_by_kind": {"EIO": 3}, "seconds": histogram}
    return {
        "version": "1",
        "tiers": {"memory": row} if of == "tier" else {},
        "memory": {},
        "sources": [row | {"dataset": "d"}] if of == "source" else [],
        "fetch": {"bugs": 3, "past_errors": {}},
        "sessions": [],
        "ranks": [row | {"job": "", "rank": 0}] if of == "rank" else [],
    }


@pytest.mark.parametrize("of", ["tier", "source", "node", "rank"])
def test_the_prometheus_page_has_every_counter_with_its_kind_and_help(of: str) -> None:
    pytest.importorskip("prometheus_client")
    page = serve_page("127.0.0.1:0", lambda: answer_of(of))
    try:
        with urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        page.close()
    for counter in (c for c in COUNTERS if c.of == of):
        name = counter.metric + "_total" * (counter.kind == "counter")
        assert f"# TYPE {name} {counter.kind}" in lines
        assert f"# HELP {name} {counter.help}" in lines
        series = [line for line in lines if line.startswith(name) and line.endswith(" 3.0")]
        assert len(series) >= max(len(counter.members), 1)
        for member in counter.members:
            assert any(f'{counter.label}="{member}"' in line for line in series)


def test_every_counter_of_a_rank_is_a_word_of_its_own_and_told(words: SharedWords) -> None:
    names = [name for counter in OF_RANKS for name in counter.words]
    assert len(set(names)) == len(names) == len(COUNTER) == len(set(COUNTER.values()))
    for counter in OF_RANKS:
        for name in counter.words:
            words.add(name, 3 * 10**9 if counter.unit == "s" else 3)
    assert report(words.counters()) == {counter.key: each(counter) for counter in OF_RANKS}


def test_a_loaders_meter_counts_what_the_table_says_it_writes() -> None:
    counted = set(Meter()) - {"batches"}
    own = [counter for counter in OF_RANKS if counter.writer in {"meter", "worker"}]
    assert counted == {name for counter in own for name in counter.words}
    assert set(Meter().stats()) == {"batches", *(counter.key for counter in own)}
    assert set(CAUSE_OF.values()) <= set(CAUSES)


def test_counters_of_workers_reach_the_answer_by_name(words: SharedWords) -> None:
    fd = sealed_memfd("workers", WorkerWords.nbytes(3))
    workers = WorkerWords(fd, 3)
    os.close(fd)
    for k, row in enumerate(workers.rows):
        for i, name in enumerate(OF_WORKERS):
            row[worker_words.COUNTER[name]] += 10**k * (i + 1)
    assert workers.void == 0
    meter = Meter()
    meter.add(workers.counts())
    for name, value in meter.unreported().items():
        words.add(name, value)
    counted = words.counters()
    assert {name: counted[name] for name in OF_WORKERS} == {
        name: 111 * (i + 1) for i, name in enumerate(OF_WORKERS)
    }


def test_every_counter_of_a_rank_is_a_column() -> None:
    others = ("decoded_", "overdue")  # a tier, and a line
    ranks = [c for c in COUNTERS if c.of == "rank" and not c.name.startswith(others)]
    columns = [counter.column for counter in ranks]
    assert "" not in columns
    assert set(columns) <= set(view.SESSION_HEADER)
    assert {c.column for c in OF_RANKS if c in ranks} <= set(view.RANK_HEADER)
    assert set(columns) <= {name.removesuffix("/s") for name in view.TOP_HEADER}
    assert set(CAUSES) <= set(view.TOP_HEADER)
    session = {c.key: each(c) for c in OF_RANKS} | {"job": "a", "rank": 0, "done": 1}
    session |= {"ahead": 0, "lead_now_s": 0.0}
    assert len(view.session_row(session)) == len(view.SESSION_HEADER)
    assert len(view.rank_row(session)) == len(view.RANK_HEADER)
    assert len(view.top_row(session, None, 1.0)) == len(view.TOP_HEADER)


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda c: cast(Counter, c).metric)
def test_the_docs_name_every_counter(counter: Counter) -> None:
    metrics = (DOCS / "metrics.md").read_text()
    name = counter.metric + "_total" * (counter.kind == "counter")
    (row,) = re.findall(rf"^\* `{name}`.*(?:\n  .*)*", metrics, re.MULTILINE)
    labels = {"rank": ["job", "rank"], "node": []}.get(counter.of, [counter.of])
    assert [f"`{label}`" in row for label in (*labels, *counter.members, counter.key)].count(
        False
    ) == 0


def test_no_cause_and_no_stage_is_named_twice() -> None:
    assert len(set(CAUSES)) == len(CAUSES)
    assert len(set(STAGES)) == len(STAGES)
