"""Counters of one run of a daemon that serves many."""

from __future__ import annotations

from typing import Any

import pytest

from creel.daemon.reporting.runs import Runs


def answer(hits: int, samples: int = 0) -> dict[str, Any]:
    """An answer of `stats` with so many hits and reads, and samples of rank 3."""
    source = {"dataset": "d", "reads": hits, "seconds": {"le": [0.1], "counts": [hits], "sum": 0.5}}
    rank = {
        "job": "a",
        "rank": 3,
        "samples": samples,
        "workers": 2,
        "stall_s": {"decode": 0.5},
        "utilisation": 0.9,
    }
    return {
        "memory": {"used_nbytes": 7},
        "tiers": {"memory": {"hits": hits, "evictions": {"due_later": hits}, "used_nbytes": 9}},
        "sources": [source],
        "ranks": [rank],
    }


def test_counts_from_before_a_run_are_not_of_it() -> None:
    runs = Runs()
    runs.opened("a", 10.0, lambda: answer(100, 40), alone=True)
    totals = runs.since(answer(130, 45), 12.0)
    assert totals["run_s"] == pytest.approx(2.0)
    assert totals["memory"] == {"used_nbytes": 7}
    assert totals["tiers"]["memory"] == {
        "hits": 30,
        "evictions": {"due_later": 30},
        "used_nbytes": 9,
    }
    (source,), (rank,) = totals["sources"], totals["ranks"]
    assert (source["reads"], source["seconds"]["counts"]) == (30, [30])
    assert source["seconds"]["le"] == [0.1]
    assert (rank["rank"], rank["samples"], rank["workers"]) == (3, 5, 2)
    assert (rank["stall_s"]["decode"], rank["utilisation"]) == (0, 0.9)
    assert runs.since(answer(100, 40), 12.0)["sources"] == [], "nothing was read in this run"


def test_a_run_lasts_while_its_processes_open_one_session_after_the_other() -> None:
    runs = Runs()
    runs.opened(70, 1.0, lambda: answer(0), alone=True)
    runs.opened(71, 2.0, lambda: pytest.fail("another rank"), alone=False)
    for process in (70, 71):
        runs.opened(process, 3.0, lambda: pytest.fail("its next loader"), alone=True)
    assert runs.since(answer(8), 4.0)["tiers"]["memory"]["hits"] == 8
    runs.opened(72, 5.0, lambda: answer(8), alone=True)
    assert runs.since(answer(9), 6.0)["tiers"]["memory"]["hits"] == 1
    runs.opened(70, 7.0, lambda: answer(9), alone=True)
    assert runs.began == 7.0, "a new run may have an old one's name"


def test_without_any_run_all_is_told() -> None:
    totals = Runs().since(answer(5), 100.0)
    assert (totals["run_s"], totals["tiers"]["memory"]["hits"]) == (0.0, 5)
