"""Files opened by libraries in C: which of them creel reads instead, and when it checks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from creel.loader.reading import libraries
from creel.loader.reading.observed import ObservedReads
from creel.loader.reading.observer import Intercepting
from creel.loader.reading.this_thread import this_thread


def test_neither_devices_nor_empty_files_are_read_for_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device has no end; an empty file may be a lock."""
    slow = SimpleNamespace(waited_ns=1, got_last=1, nbytes=1)  # the last file was read by C
    copies = SimpleNamespace(read_in_c=slow, read_here=0)
    monkeypatch.setattr(this_thread, "observed", SimpleNamespace(copies=copies))
    monkeypatch.setattr(libraries, "open_local", partial(open, mode="rb"))
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.touch()
    file.write_bytes(b"abc")
    assert libraries.read_for_c("/dev/zero") is None
    assert libraries.read_for_c(str(empty)) is None
    assert libraries.read_for_c(str(tmp_path / "absent")) is None
    assert libraries.read_for_c(str(file)) == b"abc"


def test_a_file_is_looked_at_before_a_library_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its reads, a network file system would have to be asked for a stat again."""
    path, stat = tmp_path / "file.h5", os.stat
    seen: list[str] = []
    path.write_bytes(b"bytes")

    def looking(file: Any, **more: Any) -> os.stat_result:
        seen.append("look")
        return stat(file, **more)

    monkeypatch.setattr(os, "stat", looking)
    opening = libraries.hdf5(lambda *_: seen.append("open"))
    with Intercepting(), ObservedReads() as observed:
        opening(None, str(path))
        assert observed.end_sample() == [str(path)]
    monkeypatch.undo()
    assert seen == ["look", "open"]
