"""`creel stats --why` in numbers, from the rows of a recorder and the counters of a daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cli_rig import SESSION

from creel.cli.watching.forecasts import ms
from creel.cli.watching.what_if import Machine, Outlook, outlooks, window

GIB = 1 << 30
BIG = Machine(64.0, 512 * GIB, 500 * GIB)
MEAN = 196_000  # bytes of a decoded sample
FILES = 1_000_000


def session(number: int = 1, rank: int = 0, workers: int = 2, **more: Any) -> dict[str, Any]:
    return SESSION | {
        "session": number,
        "rank": rank,
        "workers": workers,
        "busy_s": {"source": 40.0, "decode": 200.0, "collate": 0.0, "handover": 0.0},
        "cpu_s": 200.0,
        "decoded_calls": 6400,
        "decoded_measured": 10,
        "decoded_call_s": 0.25,  # 160 of the 200 s
        "decoded_call_nbytes": 10 * MEAN,
        **more,
    }


def answer(*sessions: Any) -> dict[str, Any]:
    held = {"d": {"objects": FILES, "nbytes": 110_000 * FILES}}
    return {"sessions": list(sessions), "core": {"datasets": held}}


def rows(
    train_s: float, source_s: float, decode_s: float, workers: int = 2, count: int = 64
) -> list[list[int]]:
    """Return the recorded batches of workers that are always busy, one of which is waited for."""
    step_s = max(train_s, (source_s + decode_s) / workers)
    batches = []
    for i in range(count):
        taken = 1000 + (i + 1) * step_s
        began = taken - source_s - decode_s
        moments = began, began + source_s, taken, taken, taken - (step_s - train_s), taken
        batches.append([i, *(int(1e9 * t) for t in moments), i % workers])
    return batches


def outlook_of(machine: Machine = BIG, session_row: Any = None, **more: Any) -> Outlook:
    """Return the outlook of a rank that trains 0.1 s, and whose two workers need 0.36 s a batch."""
    (outlook,) = outlooks(
        answer(session_row or session(**more)), {1: rows(0.1, 0.02, 0.34)}, machine
    ).values()
    return outlook


def test_the_last_batches_are_a_window() -> None:
    seen = window(session(), rows(0.1, 0.08, 0.32))
    assert seen is not None
    assert (seen.batches, seen.workers) == (50, 2), "those of the last 10 s"
    assert seen.seconds == pytest.approx(10.0)
    assert seen.waited_s == pytest.approx(5.0)
    assert seen.busy_s == pytest.approx({"source": 4.0, "decode": 16.0, "collate": 0.0})
    assert seen.cpu_s == pytest.approx(16.0)
    ended = window(session(workers=0), rows(0.1, 0.08, 0.32))
    assert ended is not None
    assert ended.workers == 2, "an epoch's workers have ended; its batches tell of them"
    assert window(session(), rows(0.1, 0.1, 0.1)[:8]) is None
    assert window(session(), []) is None


def test_each_change_is_told_with_what_it_leaves() -> None:
    outlook = outlook_of()
    workers, decoded, memory = outlook.changes
    assert (outlook.step_s, outlook.wait_s) == pytest.approx((0.18, 0.08))
    assert workers.values == {"what": "workers", "workers": 4}
    assert workers.wait_s == pytest.approx(0, abs=1e-6)
    assert decoded.values == {"what": "keep_decoded", "nbytes": MEAN * FILES, "fits": 1.0}
    assert decoded.step_s == pytest.approx(0.1)
    assert memory.step_s == pytest.approx(0.17)
    assert str(outlook) == (
        "now 180 ms a step, 80 ms of it this wait; with 4 workers no wait; with keep_decoded"
        " (183 GiB, fits 100 %) no wait; with all in memory (102 GiB) 70 ms (1.1x)"
    )
    values = outlook.values()
    assert [change["what"] for change in values["changes"]] == ["workers", "keep_decoded", "memory"]


@pytest.mark.parametrize("available", [60, 120, 200])
def test_memory_for_a_part_counts_for_its_part(available: int) -> None:
    """The kept part needs no decode and no read; transforms, a fifth of "decode" here, stay."""
    machine = Machine(2.0, 256 * GIB, available * GIB)
    outlook = outlook_of(machine)
    (decoded,) = (c for c in outlook.changes if c.values["what"] == "keep_decoded")
    fits = min((available - 2 * 4) * GIB / (MEAN * FILES), 1.0)  # 4 GiB stay free, twice
    copies = 6400 * (40e-6 + MEAN / 2.4e9) / 200  # of the time in "decode"
    left_s = 0.02 * (1 - fits) + 0.34 - fits * (0.8 - copies) * 0.34
    assert decoded.values["fits"] == pytest.approx(fits)
    assert decoded.step_s == pytest.approx(max(left_s / 2, 0.1), rel=1e-3)
    assert f"fits {100 * fits:.0f} %" in str(decoded)


def test_of_a_slow_storage_only_memory_helps() -> None:
    """It gives a batch in 0.2 s, whoever asks; files are smaller than decoded samples."""
    outlook = outlooks(answer(session()), {1: rows(0.1, 0.3, 0.1)}, BIG)[1]
    assert {change.values["what"] for change in outlook.changes} == {"keep_decoded", "memory"}
    assert str(outlook).endswith("with all in memory (102 GiB) no wait")
    half = Machine(64.0, 256 * GIB, 8 * GIB + MEAN * FILES // 4)
    outlook = outlooks(answer(session()), {1: rows(0.1, 0.3, 0.1)}, half)[1]
    assert {change.values["what"] for change in outlook.changes} == {"memory"}


def test_memory_is_no_remedy_where_all_is_in_memory() -> None:
    """The epoch that has just filled it waited for storage; the next one will not."""
    filled = answer(session())
    filled["core"]["datasets"]["d"]["resident_objects"] = FILES
    outlook = outlooks(filled, {1: rows(0.1, 0.3, 0.1)}, BIG)[1]
    assert "memory" not in {change.values["what"] for change in outlook.changes}


def test_changes_that_would_not_help_are_not_named() -> None:
    words = str(outlook_of(Machine(2.0, 512 * GIB, 500 * GIB)))
    assert "workers" not in words, "two cores already have two workers"
    assert "keep_decoded" not in str(outlook_of(decoded_measured=0)), "nothing is known of its size"
    assert "keep_decoded" not in str(outlook_of(Machine(64.0, 16 * GIB, GIB))), "there is no memory"
    idle = outlooks(answer(session()), {1: rows(0.5, 0.0, 0.4)}, BIG)[1]
    assert str(idle) == "now 500 ms a step, no wait"
    assert outlooks(answer(session()), {}, BIG) == {}
    unknown = answer(session()) | {"core": {"datasets": {}}}
    assert "keep_decoded" not in str(outlooks(unknown, {1: rows(0.1, 0.0, 0.4)}, BIG)[1])


def test_the_rank_that_holds_up_the_others_is_told_so() -> None:
    quick, slow = session(1, rank=0), session(2, rank=1)
    both = {1: rows(0.2, 0.0, 0.2), 2: rows(0.1, 0.0, 0.4)}
    by_session = outlooks(answer(quick, slow), both, BIG)
    assert (by_session[1].late, by_session[2].late) == (False, True)
    assert "which holds up the other ranks" in str(by_session[2])
    assert by_session[1].step_s == by_session[2].step_s == pytest.approx(0.2)
    other = outlooks(answer(quick, slow | {"job": "another"}), both, BIG)
    assert not other[2].late, "two jobs do not wait for each other"


@pytest.mark.parametrize("seed", range(5))
def test_any_recording_of_a_client_has_an_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lies = rng.integers(-(2**62), 2**62, (64, 8))
    lies[:, 6] = np.sort(lies[:, 6])
    outlooks(answer(session()), {1: lies.tolist()}, BIG)


def test_times_are_told_in_three_digits() -> None:
    assert (ms(0.1), ms(12.34)) == ("100 ms", "12.3 s")
