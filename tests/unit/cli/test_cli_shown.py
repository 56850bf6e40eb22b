"""How a user sees a daemon: `creel status`, `stats`, `stats --why` and `top`."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from cli_rig import SESSION, STATS, STATUS, FakeClient, answering

from creel.cli import main
from creel.cli.watching import view
from creel.cli.watching.why import reason


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    yield from answering(monkeypatch)


def test_a_pipe_gets_plain_columns(daemon: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status"]) == 0
    assert main.main(["stats"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "16.0 GiB of 64.0 GiB used (25 %)" in out
    assert "hits in memory       900 of 1,000 (90.0 %)" in out
    assert "read from            /data: 100 reads, 100 opens, 10.0 MiB\n" in out
    assert "  trouble there      3 retries\n" in out
    row, *by_stage, title, header, stalls = (line.split() for line in out.splitlines()[-7:])
    said = "resnet 3 100 64 4.0 s 87 % 100 25,600 3.58 GiB 2 293 KiB 1 3.0 s 33.5 s 28.0 s 4 12.5 s"
    assert " ".join(row) == said
    assert by_stage[0] == ["busy", "by", "stage"]
    assert by_stage[1] == ["job", "rank", *SESSION["busy_s"]]
    assert by_stage[2] == ["resnet", "3", "1.0", "s", "30.0", "s", "2.0", "s", "0.5", "s"]
    assert title == ["stall", "by", "cause"]
    assert header == ["job", "rank", *SESSION["stall_s"]]
    assert stalls == ["resnet", "3", "0.5", "s", "12.0", "s", "0.0", "s", "0.0", "s", "0.0", "s"]
    assert daemon.closed


def test_counters_are_shown_when_training_is_over(
    daemon: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ("batches", "samples", "nbytes", "direct_reads", "stall_s")
    over = {"job": "", "rank": 3} | {k: SESSION[k] for k in counted}
    monkeypatch.setitem(STATS, "sessions", [])
    monkeypatch.setitem(STATS, "ranks", [over])
    assert main.main(["stats"]) == 0
    lines = capsys.readouterr().out.splitlines()[-8:]
    row = " ".join(lines[1].split())
    assert row == "- 3 100 25,600 3.58 GiB 2 0 B 0 0.0 s 0.0 s 0.0 s 0 12.5 s"
    assert lines[7].split()[:4] == ["-", "3", "0.5", "s"]
    assert daemon.closed


CAUSES: dict[str, float] = dict.fromkeys(SESSION["stall_s"], 0.0)

THROTTLED = {
    "dataset": SESSION["dataset"],
    "requests": {"GET": 990, "HEAD": 10},
    "throttles": 20,
}
FULL = {"memory": {"budget_nbytes": 100 << 20, "used_nbytes": 95 << 20}}


@pytest.mark.parametrize(
    ("changes", "node", "says"),
    [
        ({"batches": 0}, {}, "no batch was taken yet"),
        ({"stall_s": CAUSES | {"decode": 0.1}}, {}, "faster data would gain nothing"),
        ({"stall_s": CAUSES | {"decode": 90.0}}, {}, "waited 1 min 30 s for 100 batches, 100 % of"),
        ({"stall_s": CAUSES | {"decode": 90.0}, "nbytes": 0}, {}, "creel.wrap"),
        (
            {"stall_s": CAUSES | {"decode": 90.0}, "own_file": "/data/1", "own_remedy": "try it"},
            {},
            "files that the dataset reads itself (/data/1): try it",
        ),
        (
            {"overdue_s": 14.0, "overdue_cause": "source", "overdue_file": "/data/1"},
            {},
            "has waited 14.0 s for its next batch so far: storage has not delivered /data/1",
        ),
        ({"overdue_s": 14.0, "overdue_cause": "decode"}, {}, "dataset[i] has not returned"),
        ({"overdue_s": 14.0, "batches": 0}, {}, "has waited 14.0 s for its next batch so far\n"),
        ({"stall_s": CAUSES | {"source": 90.0}, "nbytes": 0}, {}, "creel does not serve so far"),
        ({"stall_s": CAUSES | {"collate": 90.0}, "own_file": "/data/1"}, {}, "collation"),
        ({"stall_s": CAUSES | {"sampler": 90.0}}, {}, "your sampler"),
        ({"stall_s": CAUSES | {"daemon": 90.0}}, {}, "persistent_workers=True"),
        ({"stall_s": CAUSES | {"source": 90.0}}, {}, "for the first time"),
        (
            {"stall_s": CAUSES | {"source": 90.0}},
            FULL,
            "memory (100 MiB) cannot hold all objects: 100 of",
        ),
        ({"stall_s": CAUSES | {"source": 90.0}, "direct_reads": 20_000}, FULL, "read directly"),
        (
            {"stall_s": CAUSES | {"source": 90.0}},
            {"sources": [THROTTLED, THROTTLED | {"dataset": "another"}]},
            "throttled by the store: 20 of 1,000 requests",
        ),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_why_is_one_sentence_with_what_would_help(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    node: dict[str, Any],
    says: str,
) -> None:
    for key, value in node.items():
        monkeypatch.setitem(STATS, key, value)
    monkeypatch.setitem(STATS, "sessions", [SESSION | changes])
    assert main.main(["stats", "--why"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet rank 3: ")
    assert says in out
    assert out.count("\n") == 1
    assert main.main(["stats", "--why", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["why"]
    assert says.strip() in row["why"]
    assert row["pid"] == 70


@pytest.mark.usefixtures("daemon")
def test_why_says_whose_batches_are_counted_if_there_are_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATS, "sessions", [])
    monkeypatch.setitem(STATS, "ranks", [])
    assert main.main(["stats", "--why"]) == 0
    assert "creel.DataLoader counts its batches" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [{"nbytes": 1}, {"nbytes": 0, "decoded_hits": 1}])
def test_who_is_served_is_not_told_to_wrap(kept: dict[str, Any]) -> None:
    text = reason(SESSION | kept | {"stall_s": CAUSES | {"decode": 90.0}}, STATS)
    assert "a cache of files has nothing to add" in text
    assert "creel.wrap" not in text


@pytest.mark.parametrize(("word", "coloured"), [("", True), ("1", False)])
def test_no_color_is_heeded_on_a_terminal(
    word: str, *, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pty

    monkeypatch.setenv("NO_COLOR", word)
    ours, theirs = pty.openpty()
    code = "from creel.cli.main import main; main(['--name', 'nobody-at-all', 'status'])"
    try:
        subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, check=True)
        said = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"no daemon named 'nobody-at-all'" in said
    assert (b"\x1b[" in said) == coloured


def test_rates_are_differences_over_time() -> None:
    later = SESSION | {
        "samples": SESSION["samples"] + 5000,
        "nbytes": SESSION["nbytes"] + (50 << 20),
        "batches": SESSION["batches"] + 50,
        "lead_s": SESSION["lead_s"] + 100,
        "stall_s": SESSION["stall_s"] | {"source": 1.0},
        "busy_s": SESSION["busy_s"] | {"decode": 33.0},
        "cpu_s": SESSION["cpu_s"] + 2.4,
    }
    row = view.top_row(later, SESSION, 2.0, 0.012)
    rates = ("25", "2,500", "25.0 MiB", "2", "293 KiB", "1", "2.0 s", "150 %", "120 %", "4", "25 %")
    assert row[5:] == (
        "87 %",
        "12 ms",
        *rates,
        "source",
        "25 %",
        *["0 %"] * 4,
    )  # workers are no rate


def test_top_misses_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    from creel.cli.watching import top

    ours, theirs = pty.openpty()
    with open(theirs) as terminal:  # noqa: PTH123  a descriptor
        monkeypatch.setattr("sys.stdin", terminal)
        with top.keys() as pressed:
            os.write(ours, b"xq")
            assert pressed(10) == "xq"
            assert pressed(0) == ""
    os.close(ours)


def test_rates_begin_where_a_stream_was_first_told_of() -> None:
    from creel.cli.watching import top

    first, later = SESSION, SESSION | {"samples": 9}
    other = SESSION | {"session": 2}
    past = [(1.0, STATS | {"sessions": [first]}), (3.0, STATS | {"sessions": [later, other]})]
    assert top.starts(past, 4.0) == {1: (first, 3.0), 2: (other, 1.0)}


def test_processor_and_memory_are_those_of_daemon_trainers_and_what_is_below_them() -> None:
    from creel.cli.processes import Usage

    ready, done = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=ready.recv)
    worker.start()
    try:
        usage = Usage()
        usage.rows(1, [os.getpid()])
        rows = dict(usage.rows(1, [os.getpid()]))
        assert set(rows) >= {"daemon", "trainers", "workers"}
        assert rows["trainers"].startswith("1: ")
        shared = psutil.Process(worker.pid).memory_info().shared
        assert shared > 1 << 20, "which counts in none of them"
        below = len(psutil.Process().children(recursive=True))
        assert rows["workers"].startswith(f"{below}: ")
        assert "% of a core" in rows["workers"]
        assert "daemon" not in dict(usage.rows(0x7FFFFFF0, [])), "it has ended"
    finally:
        done.send(None)
        worker.join(60)


@pytest.mark.parametrize(
    ("width", "last"), [(60, "mostly"), (80, "mostly"), (110, "mostly"), (210, "sampler")]
)
def test_the_live_picture_fits_and_cuts_no_number(width: int, last: str) -> None:
    from io import StringIO

    from rich.console import Console

    from creel.cli.watching import top

    wide = SESSION | {"job": "a-rather-long-job-name", "done": 4_200_000, "ready": 4_200_256}
    stats = STATS | {"sessions": [wide, SESSION]}
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    late = (
        "200 ms a step, 100 ms of it for data in 40 steps; rank 12 is late: it waits inside"
        " dataset[i] for something that creel does not see; num_workers=4: 0 ms (last forecast:"
        " 3 % off)"
    )
    taken = [("daemon", "1: 3 % of a core, 28.0 MiB not shared"), ("job a", late)]
    console.print(top.screen(STATUS, stats, {1: (SESSION, 1.0)}, width, taken, {1: 0.1}))
    assert "28.0 MiB not shared" in out.getvalue()
    assert late in " ".join(out.getvalue().split())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    header, row = (next(i for i in lines if w in i) for w in ("samples/s", "a-rather-lon"))
    assert header.split()[-1] == last
    assert {"job", "rank", "stall", "wait"} <= set(header.split())
    assert "100 ms" in row
    assert ("4.20 M" in row) == ("step" in header)


def test_status_does_not_count_the_one_who_asks() -> None:
    assert ("in use", "1 client, 1 session, 1 dataset") in view.status_pairs(STATUS)
    assert ("in use", "0 clients, 1 session, 1 dataset") in view.status_pairs(
        STATUS | {"clients": 1}
    )


def test_datasets_are_listed_by_path_those_in_use_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        "dataset": "2b39acd83cf4" + "0" * 20,
        "path": "/data/val",
        "objects": 4000,
        "nbytes": 4 << 30,
        "resident_objects": 2000,
        "resident_nbytes": 2 << 30,
        "disk_objects": 0,
        "disk_used_nbytes": 0,
        "sessions": 0,
        "unused_s": 90.0,
    }
    view.datasets(
        [row, row | {"path": "/data/train", "sessions": 2}, row | {"path": "/a and 2 more"}]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("path", "/data/train", "/data/val", "/a and 2 more")
    ]
    assert lines[1].split()[-2:] == ["now", "2b39acd8"]
    assert "2.00 GiB (50 %)" in lines[2]
    assert "90.0 s ago" in lines[2]
    view.datasets([])
    assert "no dataset is known" in capsys.readouterr().out


def test_a_source_is_shown_by_its_path() -> None:
    source = {"source": "2b39acd83cf4", "path": "/data/train", "reads": 1, "opens": 1, "nbytes": 5}
    rows = dict(view.summary_pairs(STATS | {"sources": [source]}))
    assert rows["read from"].startswith("/data/train: 1 reads")
