"""What `creel top` says of the next steps of each job."""

from __future__ import annotations

from typing import Any

import pytest

from creel.cli.watching.forecasts import Forecasts, window

SECONDS = 10.0


def session(rank: int, batches: int, decode_s: float, stall_s: float, workers: int = 2) -> Any:
    return {
        "session": rank + 1,
        "job": "training",
        "pid": 77,
        "rank": rank,
        "batches": batches,
        "workers": workers,
        "cpu_s": decode_s,
        "busy_s": {"source": 0.0, "decode": decode_s, "collate": 0.0, "handover": 0.0},
        "stall_s": {
            "source": 0.0,
            "decode": stall_s,
            "collate": 0.0,
            "daemon": 0.0,
            "sampler": 0.0,
        },
    }


def rows(*now: Any, cores: float = 64.0, judged: Forecasts | None = None, at: float = 0.0) -> Any:
    """Return what is said of sessions whose counters were all 0 ten seconds ago."""
    before = {s["session"]: (session(s["rank"], 0, 0.0, 0.0), SECONDS) for s in now}
    return (judged or Forecasts(cores)).rows({"sessions": list(now)}, before, at)


def test_a_job_that_waits_for_nothing_is_left_in_peace() -> None:
    assert rows(session(0, 100, 5.0, 0.0)) == [("job training", "100 ms a step, no wait for data")]


def test_nothing_is_foretold_of_a_job_that_waits_for_a_batch_that_does_not_come() -> None:
    assert rows(session(0, 100, 5.0, 0.0), session(1, 100, 5.0, 0.0) | {"overdue_s": 2.0}) == []


def test_the_late_rank_is_named_with_its_cause_and_what_would_help() -> None:
    """Rank 1 decodes 0.4 s a batch with 2 workers; a step of training is 0.1 s."""
    slow, quick = session(1, 50, 20.0, 5.0), session(0, 50, 2.0, 0.0)
    ((job, text),) = rows(slow, quick)
    assert job == "job training"
    assert text == (
        "200 ms a step, 100 ms of it for data; rank 1 is late: it decodes and transforms;"
        " num_workers=4: 0 ms"
    )


def test_a_wait_that_is_to_come_is_told_with_its_beginning() -> None:
    """Batches take 125 ms, training 100; 8 are finished and last for 40 steps."""
    now = session(0, 100, 25.0, 0.0) | {"made": 8}
    ((_, text),) = rows(now)
    assert text.startswith("125 ms a step, 25 ms of it for data in 40 steps; rank 0 waits: it")


def test_each_stream_has_its_own_wait() -> None:
    forecasts = Forecasts(64.0)
    rows(session(1, 50, 20.0, 5.0), session(0, 50, 2.0, 0.0), judged=forecasts)
    assert forecasts.waits_s == pytest.approx({1: 0.0, 2: 0.1})
    rows(judged=forecasts)
    assert forecasts.waits_s == {}


def test_no_number_of_workers_is_named_where_cores_do_not_suffice() -> None:
    ((_, text),) = rows(session(0, 50, 20.0, 5.0), cores=2.0)
    assert "rank 0 waits" in text
    assert "num_workers" not in text


def test_a_loader_keeps_its_workers_between_two_epochs() -> None:
    """At that moment none run: it was told to take two, which it has."""
    between = session(0, 50, 20.0, 5.0) | {"workers": 0}
    assert rows(between) == [], "nobody knows how many they were"
    forecasts = Forecasts(2.0)
    assert rows(session(0, 50, 20.0, 5.0), judged=forecasts) == rows(between, judged=forecasts)
    ((_, text),) = rows(between, judged=forecasts)
    assert "num_workers" not in text


def test_without_workers_one_is_named() -> None:
    ((_, text),) = rows(session(0, 100, 0.0, 4.0, workers=0))
    assert text == (
        "100 ms a step, 40 ms of it for data; rank 0 waits: it decodes and transforms;"
        " num_workers=1: 0 ms"
    )


@pytest.mark.parametrize("batches", [0, 7])
def test_few_batches_foretell_nothing(batches: int) -> None:
    assert rows(session(0, batches, 1.0, 1.0)) == []
    assert Forecasts(2).rows({"sessions": [session(0, 99, 1.0, 1.0)]}, {}, 0.0) == []


def test_jobs_are_told_apart() -> None:
    other = session(1, 100, 5.0, 0.0) | {"job": "", "pid": 5}
    assert [job for job, _ in rows(session(0, 100, 5.0, 0.0), other)] == [
        "job pid 5",
        "job training",
    ]


def test_a_forecast_is_compared_with_what_came() -> None:
    judged = Forecasts(64.0)
    steady, slower = session(0, 100, 5.0, 0.0), session(0, 80, 5.0, 0.0)
    assert "off" not in rows(steady, judged=judged)[0][1]
    assert "(last forecast: 0 % off)" in rows(steady, judged=judged, at=11.0)[0][1]
    assert "(last forecast: 20 % off)" in rows(slower, judged=judged, at=22.0)[0][1]


def test_a_window_is_what_came_since() -> None:
    old, now = session(0, 10, 1.0, 0.5), session(0, 30, 4.0, 2.0)
    seen = window(now, old, SECONDS)
    assert (seen.batches, seen.busy_s["decode"], seen.stall_s["decode"]) == (20, 3.0, 1.5)
    assert seen.cpu_s == 3.0
