"""Files opened by libraries in C: when creel checks them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from creel.loader.data.interception import libraries
from creel.loader.data.reading.observer import Intercepting
from creel.loader.data.tracing.observed import ObservedReads


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
