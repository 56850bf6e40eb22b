"""`creel trace`: every batch of the last seconds of a running job, as a timeline."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.cli import main
from creel.counters import CAUSES
from daemons import Running
from kit import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, BATCH, NBYTES = 64, 4, 5_000


def decode(data: bytes) -> torch.Tensor:
    time.sleep(0.002)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(FILES):
        (folder / f"{i:02}").write_bytes(rng.bytes(NBYTES))
    return sorted(map(str, folder.iterdir()))


def traced(node: Running, out: Path, *more: str) -> list[dict[str, Any]]:
    """Return the events of `creel trace`."""
    assert main.main(["--name", node.name, "trace", str(out), *more]) == 0
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def spans(events: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def check_format(events: Sequence[dict[str, Any]]) -> None:
    """Check what Chrome's Trace Event Format asks of complete events and names of threads."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["ph"] in {"X", "M"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named
            assert event["ts"] > 0
            assert event["dur"] >= 0
        else:
            assert isinstance(event["args"]["name"], str)


def check_nesting(events: Sequence[dict[str, Any]]) -> None:
    """Check that spans of one thread lie within each other or apart, as viewers need it."""
    for thread in {(event["pid"], event["tid"]) for event in events}:
        its = [
            event
            for event in events
            if (event["pid"], event["tid"]) == thread and event["ph"] == "X"
        ]
        ends: list[float] = []
        for event in sorted(its, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"] + 0.001:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.001
            ends.append(event["ts"] + event["dur"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trace_has_every_batch_of_a_running_job_and_its_waits_are_the_stalls(
    workers: int, files: list[str], daemon: Running, tmp_path: Path
) -> None:
    dataset = creel.FileDataset(files, decode=decode)
    loader = creel.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    steps = 0
    for _ in range(2):
        for _ in loader:
            steps += 1
            time.sleep(0.001)
    running = iter(loader)
    next(running)
    run: Any = loader._creel_state.position.run
    assert run is not None
    run.statistics.count(run.serving.stream, run.delivered)  # the daemon's counters lag by 0.25 s
    with daemon.client("cli") as client:
        (session,) = client.ask("stats")["sessions"]
    events = traced(daemon, tmp_path / "trace.json", "--seconds", "600")
    check_format(events)
    check_nesting(events)
    waits = spans(events, "wait")
    assert [event["args"]["step"] for event in waits] == [*range(steps + 1)]
    stalls = sum(session["stall_s"][cause] for cause in CAUSES)
    assert sum(event["dur"] for event in waits) / 1e6 == pytest.approx(stalls, rel=0.01)
    decoded = spans(events, "decode")
    assert len(decoded) == steps + 1
    assert min(event["dur"] for event in decoded) >= BATCH * 2_000
    names = {
        (o["tid"], o["args"]["name"]) for o in events if o["name"] == "thread_name" and o["pid"]
    }
    assert len(names) == 1 + workers
    assert {event["tid"] for event in decoded} == ({*range(1, workers + 1)} or {0})
    reads = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert sum(o["args"]["objects"] for o in reads if o["name"] == "read source") >= FILES
    assert session["utilisation"] == pytest.approx(fed(events), abs=0.01)


def fed(events: Sequence[dict[str, Any]]) -> float:
    """Return the share of time without waits, from all batches but the first."""
    first, *waits = spans(events, "wait")
    begin, end = (float(event["ts"] + event["dur"]) for event in (first, waits[-1]))
    return 1 - sum(float(event["dur"]) for event in waits) / (end - begin)


def test_bytes_that_threads_copy_are_traced_too(
    files: list[str], daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("creel.loader.line.batches.places.INLINE_NBYTES", 1)
    loader = creel.DataLoader(
        creel.FileDataset(files, nbytes=[NBYTES] * FILES), BATCH, shuffle=True, num_workers=3
    )
    batches = sum(1 for _ in loader)
    events = traced(daemon, tmp_path / "trace.json")
    check_format(events)
    check_nesting(events)
    assert len(spans(events, "wait")) == batches


def test_two_jobs_are_two_processes_and_only_the_last_seconds_are_told(
    files: list[str], daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        loaders.append(creel.DataLoader(creel.FileDataset(files, decode=decode), BATCH))
        assert len(list(loaders[-1])) == FILES // BATCH
    events = traced(daemon, tmp_path / "trace.json")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split()[-2:] for name in names[:2]] == [["rank", "0"], ["rank", "1"]]
    batches = itertools.chain.from_iterable(itertools.repeat(loaders[1]))

    def only_the_last() -> bool:
        """The command looks back from when it runs: long enough after the batches before."""
        ended = time.monotonic()
        for _ in range(4):
            traced(daemon, tmp_path / "all.json")
        next(batches)
        out, seconds = tmp_path / "late.json", f"{time.monotonic() - ended}"
        if main.main(["--name", daemon.name, "trace", str(out), "--seconds", seconds]) != 0:
            return False
        assert len(spans(json.loads(out.read_text())["traceEvents"], "wait")) == 1
        return True

    until(only_the_last)
    with daemon.client("cli") as client:
        ranks = client.ask("stats")["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert 0 <= ranks[0]["utilisation"] < ranks[1]["utilisation"] <= 1  # the latter did more


def test_a_trace_of_nothing_says_so(
    files: list[str], daemon: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main.main(["--name", daemon.name, "trace", str(out)]) == 2
    assert "no batch was taken" in capsys.readouterr().err
    loader = creel.DataLoader(creel.FileDataset(files, decode=decode), BATCH)
    assert len(list(loader)) == FILES // BATCH
    assert main.main(["--name", daemon.name, "trace", str(out), "--seconds", "0.001"]) == 2
    assert not out.exists()
    assert main.main(["--name", daemon.name, "trace", str(tmp_path / "no" / "where")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [{}, {"session": 10**9}, {"session": "x"}, {"session": 1, "since_ns": -1}]
)
def test_batches_of_no_session_are_refused(daemon: Running, args: dict[str, Any]) -> None:
    from creel.errors import ConfigError

    with daemon.client("cli") as client, pytest.raises(ConfigError):
        client.ask("batches", **args)
