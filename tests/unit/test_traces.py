"""Traces in the folder of a disk tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from creel.cache.disk.traces import drop_traces, keep_trace, open_trace


def keep(folder: Path, name: str, data: bytes, keep_free: int = 0, *, dataset: str = "key") -> None:
    keep_trace(str(folder), name, dataset, data, keep_free)


def kept(folder: Path, name: str) -> bytes | None:
    try:
        fd = open_trace(str(folder), name)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_the_latest_of_a_name_is_kept(tmp_path: Path) -> None:
    assert kept(tmp_path, "a") is None
    for data in (b"x" * 3_000_000, b"y"):
        keep(tmp_path, "a", data)
        assert kept(tmp_path, "a") == data
    assert kept(tmp_path, "b") is None
    (own,) = tmp_path.glob("creel-*")
    assert [path.stat().st_mode & 0o777 for path in (own, own / "traces")] == [0o700] * 2


def test_they_go_with_the_dataset_to_which_they_lead(tmp_path: Path) -> None:
    drop_traces(str(tmp_path), "one")
    for name, dataset in (("a", "other"), ("a", "one"), ("b", "other"), ("c", "one")):
        keep(tmp_path, name, name.encode(), dataset=dataset)
    drop_traces(str(tmp_path), "one")
    assert [kept(tmp_path, name) for name in "abc"] == [None, b"b", None]


def test_of_many_those_go_that_were_used_longest_ago(tmp_path: Path) -> None:
    names = [f"{i:02}" for i in range(16)]
    for at, name in enumerate(names):
        keep(tmp_path, name, name.encode())
        (file,) = tmp_path.glob(f"creel-*/traces/{name}.*")
        os.utime(file, (at, at))
    assert kept(tmp_path, "00") == b"00"
    keep(tmp_path, "last", b"last")
    assert [name for name in names if kept(tmp_path, name) is None] == ["01"]


def test_no_trace_takes_what_is_to_stay_free(tmp_path: Path) -> None:
    keep(tmp_path, "a", b"x", keep_free=1 << 60)
    assert kept(tmp_path, "a") is None


def test_a_folder_that_others_may_look_into_holds_none(tmp_path: Path) -> None:
    keep(tmp_path, "a", b"x")
    (own,) = tmp_path.glob("creel-*")
    own.chmod(0o755)
    with pytest.raises(PermissionError):
        kept(tmp_path, "a")
    with pytest.raises(PermissionError):
        keep(tmp_path, "a", b"y")


def test_traces_that_another_process_writes_or_removes_meanwhile_are_its_own_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, "a", b"x")
    (own,) = tmp_path.glob("creel-*")
    writing = own / "traces/new.1"
    writing.write_bytes(b"half of it")
    os.utime(writing, (0, 0))
    found = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [*found(folder), "gone.key"])
    for i in range(20):
        keep(tmp_path, f"{i:02}", b"y")
        assert kept(tmp_path, f"{i:02}") == b"y"
    assert writing.exists()
    assert kept(tmp_path, "a") is None
