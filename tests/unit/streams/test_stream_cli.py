"""`creel stream`, which needs no daemon."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from creel.cli import main
from creel.cli.watching import stream as shown
from creel.errors import ConfigError, SourceError
from creel.streams import cursors
from creel.streams.cursors import Cursor
from creel.streams.log import Log, medium_of
from creel.streams.producer import Producer
from kit import unique_name
from testbed.redis_server import LACKING, Address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stream of 10 chunks of 4 records of 12 bytes, one a second until 2 s ago."""
    path = tmp_path / "stream"
    fields: dict[str, Any] = {"u": ("float32", (2,)), "n": "int32"}
    limits: dict[str, Any] = {"ahead": "1MiB", "keep": 0, "readers": ("b",), "producers": 2}
    producer = Producer(path, fields, chunk=4, linger_s=1e9, **limits)
    for i in range(40):
        producer.put(u=[i, i], n=i)
    now = time.time()
    for number in range(10):
        os.utime(path / f"{number:09}", (0, now - 2 - 9 + number))
    cursors.write(medium_of(path), "a", 0, Cursor(7, 1, 96, ranks=2))
    cursors.write(medium_of(path), "a", 1, Cursor(8, 0, 96, ranks=2))
    return path


def test_chunks_rate_and_lags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stream", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["chunks"], said["oldest"], said["newest"]) == (10, 0, 9)
    assert (said["records"], said["nbytes"], said["record_nbytes"]) == (40, 480, 12)
    assert (said["producers"], said["ended"]) == (2, 0)
    assert said["records_per_s"] == pytest.approx(4.0)
    assert 1.9 < said["idle_s"] < 60
    a, b = said["readers"]
    assert (a["name"], a["ranks"], a["chunk"], a["record"]) == ("a", 2, 7, 1)
    assert (a["lag_records"], a["lag_nbytes"], a["needs_nbytes"]) == (11, 132, 96)
    assert a["lag_s"] - said["idle_s"] == pytest.approx(2.0, abs=0.5)
    assert (b["name"], b["lag_records"]) == ("b", 40)


def test_one_screen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stream", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("stream", "record", "chunks", "limits", "rate", "producers", "reader", "a", "b")
    ]
    assert "12 B: u <f4[2], n <i4" in lines[1]
    assert "10 (0 to 9), 480 B, the last 2" in lines[2]
    assert "4 records/s" in lines[4]
    assert "0 of 2 have ended" in lines[5]
    assert lines[7].split()[:5] == ["a", "2", "7:1", "11", "132"]


def test_an_empty_stream_and_none_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Producer(tmp_path / "s", {"x": "int8"})
    assert main.main(["stream", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "chunks     0, 0 B" in out
    assert "no reader has begun" in out
    assert main.main(["stream", str(tmp_path)]) == 2
    assert "no producer has begun" in capsys.readouterr().err


def test_a_reader_is_forgotten_and_a_stream_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["stream", str(folder), "--forget", "zz"]) == 2
    assert "no reader 'zz'; there are: a, b" in capsys.readouterr().err
    for name in ("a", "b"):  # also one that never began
        assert main.main(["stream", str(folder), "--forget", name]) == 0
    assert main.main(["stream", str(folder), "--end"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("all have ended\nno reader has begun\n")
    assert Log.open(folder).ended()


def test_a_chunk_that_is_deleted_meanwhile_does_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Log.numbers

    def then_delete(log: Log) -> list[int]:
        records = numbers(log)
        log.delete(0)
        return records

    monkeypatch.setattr(Log, "numbers", then_delete)
    assert shown.state(str(folder))["oldest"] == 1


def test_a_stream_in_redis_is_shown_alike(
    redis: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    place = redis / unique_name()
    with Producer(place, {"x": "int32"}, chunk=4) as producer:
        for i in range(10):
            producer.put(x=i)
    assert main.main(["stream", place, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["chunks"], said["records"], said["nbytes"], said["ended"]) == (3, 10, 40, 1)
    assert said["path"] == place
    assert said["idle_s"] < 60
    assert main.main(["stream", redis / "none"]) == 2


@pytest.mark.skipif(LACKING != "", reason=f"no Redis: {LACKING}")
def test_a_password_is_never_shown() -> None:
    address = "redis://me:secret@localhost:1/sim"
    with pytest.raises(SourceError) as failed:
        Log.open(address)
    assert "secret" not in str(failed.value)
    for wrong in ("redis://localhost", "redis:///sim", "redis://localhost/a/b"):
        with pytest.raises(ConfigError, match="is not redis://host:port/key"):
            Log.open(wrong)
