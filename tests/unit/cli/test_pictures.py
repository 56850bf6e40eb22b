"""The numbers that `creel plot` draws, and what it says of what it cannot draw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_what_if import answer, rows, session

from creel.cli import main
from creel.cli.recorded import plot
from creel.cli.recorded.pictures import STAGES, Pictures, RankSteps, Slowdown, pictures
from creel.cli.recorded.recording import KEY, Recording, TracedStream, as_json, read
from creel.errors import ConfigError
from creel.policies.next_use import NextUses, histogram
from kit import seeds

NO_REUSE: dict[str, Any] = {"counts": [], "edges": [], "objects": 0}
REUSE: dict[str, Any] = {"counts": [1, 2, 1], "edges": [0, 2, 4, 6], "objects": 768}
EACH = 256  # samples of a batch


def recording(*streams: TracedStream, cores: float = 64.0) -> Recording:
    return Recording(
        cores, answer(*(stream_of_rank.session for stream_of_rank in streams)), streams
    )


def stream(
    rank: int = 0,
    work: tuple[float, float, float] = (0.1, 0.1, 0.3),
    reuse: dict[str, Any] = REUSE,
    **more: Any,
) -> TracedStream:
    """Return a rank that trains work[0] s, and whose two workers read and decode so long."""
    whose = {"batches": 100, "samples": 100 * EACH, "world": 1} | more
    recorded = session(rank + 1, rank, **whose)
    return TracedStream(recorded, rows(*work), reuse)


def slowdown(stream_of_rank: TracedStream) -> Slowdown:
    chart = pictures(recording(stream_of_rank)).slowdown
    assert isinstance(chart, Slowdown)
    return chart


def test_steps_are_those_recorded_and_stages_are_divided_by_the_workers() -> None:
    recorded = stream()
    (steps,) = pictures(recording(recorded)).steps
    assert isinstance(steps, RankSteps)
    assert steps.steps.tolist() == [row[0] for row in recorded.rows][-len(steps.steps) :]
    assert steps.step_s == pytest.approx(0.2)
    assert steps.wait_s == pytest.approx(0.1)
    assert steps.stages["read"] == pytest.approx(0.1 / 2)
    assert steps.stages["decode"] == pytest.approx(0.3 / 2)
    # two workers that are always busy: what they do in a step takes the whole step
    assert sum(steps.stages[name] for name in STAGES) == pytest.approx(steps.step_s)


def test_memory_is_told_by_what_decoding_leaves() -> None:
    # Two workers: storage gives a batch in 0.2 s, decoding alone takes 0.15 s.
    chart = slowdown(stream())
    assert chart.times[0] == pytest.approx(0.2 / 0.15, rel=1e-3)
    assert chart.times[-1] == 1.0
    assert (np.diff(chart.times) <= 1e-9).all(), "more memory is never slower"
    assert slowdown(stream(work=(0.1, 0.0, 0.3))).times == pytest.approx(1.0)


def test_throughput_is_that_of_the_slowest_rank_and_ends_at_training() -> None:
    slow, quick = stream(0, (0.1, 0.0, 0.6)), stream(1, (0.1, 0.0, 0.2))
    chart = pictures(recording(slow, quick)).throughput
    assert not isinstance(chart, str)
    assert chart.measured == pytest.approx(2 * EACH / 0.3, rel=1e-3)
    assert chart.fed == pytest.approx(2 * EACH / 0.1, rel=1e-3)
    at = dict(zip(chart.workers.tolist(), chart.samples_s, strict=True))
    assert at[2] == pytest.approx(chart.measured, rel=1e-3), "the model begins at what was seen"
    assert [at[n] for n in (1, 3, 6)] == pytest.approx(
        [2 * EACH / (0.6 / n) for n in (1, 3, 6)], rel=1e-3
    )
    assert max(chart.samples_s) == pytest.approx(chart.fed, rel=1e-3)


def test_reuse_is_that_of_the_plan_beside_the_length_of_an_epoch() -> None:
    chart = pictures(recording(stream())).reuse
    assert not isinstance(chart, str)
    assert chart.counts.tolist() == REUSE["counts"]
    assert chart.epoch == REUSE["objects"] / EACH


@pytest.mark.parametrize("seed", seeds(20))
def test_reuse_distances_are_those_of_the_reads_in_their_order(seed: int) -> None:
    """Against a walk over all reads, some of them repeated within an epoch."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    uses, step = NextUses(n), 0
    last: dict[int, int] = {}
    expected: list[int] = []
    for epoch in range(3):
        reads = rng.integers(0, n, 30) if seed % 2 else rng.permutation(n)
        steps = step + np.arange(len(reads), dtype=np.int32) // 3
        uses.extend(epoch, steps, reads.astype(np.intp))
        for at, sample in zip(steps.tolist(), reads.tolist(), strict=True):
            if sample in last:
                expected.append(at - last[sample])
            last[sample] = at
        step = int(steps[-1]) + 1
    distances = uses.reuse_distances(most=1000)
    assert sorted(distances.tolist()) == sorted(expected)
    counts, edges = histogram(distances, bins=7)
    assert counts.sum() == len(expected)
    assert len(counts) <= 7
    assert len(edges) == len(counts) + (len(counts) > 0)


def test_of_many_objects_some_stand_for_all() -> None:
    uses, n = NextUses(1000), 1000
    for epoch in range(2):
        steps = np.arange(n, dtype=np.int32) + epoch * n
        uses.extend(epoch, steps, np.arange(n))
    assert uses.reuse_distances(most=64).tolist() == [n] * len(range(0, n, 16))


def reasons(stream_of_rank: TracedStream) -> dict[str, str]:
    charts: Pictures = pictures(recording(stream_of_rank))
    others = {name: getattr(charts, name) for name in ("slowdown", "throughput", "reuse")}
    return {name: why for name, why in others.items() if isinstance(why, str)}


def test_pictures_that_cannot_be_drawn_have_a_reason() -> None:
    assert not reasons(stream())
    assert "no epoch after" in reasons(stream(reuse=NO_REUSE))["reuse"]
    direct = reasons(stream(reuse=NO_REUSE, direct_reads=100 * EACH))
    assert "page cache" in direct["reuse"]
    opaque = reasons(stream(reuse=NO_REUSE, dataset="nothing"))
    assert {*opaque} == {"slowdown", "reuse"}
    assert all("no objects" in why for why in opaque.values())
    few = stream()
    short = reasons(TracedStream(few.session, few.rows[:6], REUSE))
    assert {*short} == {"slowdown", "throughput"}


def test_of_many_ranks_those_that_waited_most_are_shown() -> None:
    ranks = [stream(rank, (0.1, 0.0, 0.1 + 0.05 * rank), world=12) for rank in range(12)]
    charts = pictures(recording(*ranks))
    assert [rank.rank for rank in charts.steps] == [*range(4, 12)]
    assert charts.left_out == 4


def test_of_several_jobs_one_is_drawn() -> None:
    other = stream(job="other")
    short = TracedStream(session(9, job="short"), rows(0.1, 0.1, 0.1)[:5], NO_REUSE)
    assert pictures(recording(short, other)).job == "other"
    assert pictures(recording(short, other), "short").job == "short"
    with pytest.raises(ConfigError, match="no batch of job 'third'"):
        pictures(recording(short, other), "third")


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    was = recording(stream(), stream(1))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"traceEvents": [], KEY: as_json(was)}))
    recorded = read(str(path))
    assert recorded.cores == was.cores
    assert [part.rows for part in recorded.streams] == [part.rows for part in was.streams]
    assert [part.session for part in recorded.streams] == [part.session for part in was.streams]


def kept() -> dict[str, Any]:
    return json.loads(json.dumps(as_json(recording(stream()))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "text, says",
    [
        ("\x80", "no recorded run"),
        ("{", "no recorded run"),
        ("[]", "no recorded run"),
        (json.dumps({"traceEvents": []}), "no recorded run"),
        (json.dumps({KEY: kept() | {"schema": 99}}), "no recorded run"),
        (json.dumps({KEY: kept() | {"streams": [{"session": 7}]}}), "damaged"),
        (json.dumps({KEY: kept() | {"streams": [{**kept()["streams"][0], "batches": [[1]]}]}}),
         "damaged"),
        (json.dumps({KEY: kept() | {"streams": []}}), "nothing to draw"),
    ],
)  # fmt: skip
def test_files_that_are_no_recording_are_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.json", tmp_path / "run.png"
    path.write_bytes(text.encode("latin-1"))
    assert main.main(["plot", str(path), str(out)]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_files_that_are_not_there_and_other_endings_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plot", str(tmp_path / "none.json"), str(tmp_path / "run.png")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main.main(["plot", "run.json", "run.jpeg"]) == 2
    assert ".png or .svg" in capsys.readouterr().err


def test_without_matplotlib_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({KEY: kept()}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main.main(["plot", str(path), str(tmp_path / "run.png")]) == 2
    assert "creel-data[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_one_file_has_all_pictures(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "run.json", tmp_path / f"run{ending}"
    streams = [stream(rank, world=9) for rank in range(9)]
    path.write_text(json.dumps({KEY: as_json(recording(*streams))}))
    answer = plot.plot(str(path), str(out))
    assert answer["drawn"] == ["steps", "slowdown", "throughput", "reuse"]
    assert answer["left_out"] == {}
    assert answer["ranks"] == 8
    assert out.read_bytes().startswith(b"\x89PNG" if ending == ".png" else b"<?xml")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot.plot(str(path), str(tmp_path / "no" / f"where{ending}"))


def test_a_picture_of_nothing_but_steps_says_why(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "run.json", tmp_path / "run.svg"
    few = stream(reuse=NO_REUSE, dataset="nothing")
    recorded = TracedStream(few.session, few.rows[:2], NO_REUSE)
    path.write_text(json.dumps({KEY: as_json(recording(recorded))}))
    answer = plot.plot(str(path), str(out))
    assert answer["drawn"] == ["steps"]
    assert {*answer["left_out"]} == {"slowdown", "throughput", "reuse"}
    assert "not drawn: reuse: creel does not see" in plot.sentence(answer)
