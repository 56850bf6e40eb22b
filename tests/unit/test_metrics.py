"""What Prometheus is told."""

from __future__ import annotations

from typing import Any

from creel.daemon.metrics import Totals


def _session(number: int, rank: int, samples: int) -> dict[str, Any]:
    zero = {"nbytes": 0, "direct_reads": 0, "worker_busy_s": 0.0}
    stall = {"source": samples / 10, "decode": 0.0}
    return {"session": number, "job": "a", "rank": rank, "samples": samples, **zero} | {
        "stall_s": stall
    }


def test_a_ranks_counters_stay_when_a_loader_of_it_is_closed() -> None:
    totals = Totals()
    totals.add([_session(1, 0, 100), _session(2, 0, 30), _session(3, 1, 5)])
    told = totals.add([_session(1, 0, 110), _session(3, 1, 5)])
    assert told["a", "0"]["samples"] == 140
    assert told["a", "0"]["source"] == 14.0
    assert totals.add([])["a", "1"]["samples"] == 5
    assert totals.add([_session(4, 0, 1)])["a", "0"]["samples"] == 141


def test_the_series_of_a_page_are_bounded() -> None:
    totals = Totals()
    told = totals.add([_session(i, i, 1) for i in range(1500)])
    assert len(told) == 1024
    assert ("a", "1499") in told
