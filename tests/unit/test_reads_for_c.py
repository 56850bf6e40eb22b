"""Which files creel reads itself instead of a library in C."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from creel.loader.reading import opened


def test_neither_devices_nor_empty_files_are_read_for_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device has no end; an empty file may be a lock."""
    slow = SimpleNamespace(waited_ns=1, got_last=1, nbytes=1)  # the last file that C read
    copies = SimpleNamespace(read_in_c=slow, read_here=0)
    monkeypatch.setattr(opened, "observing", lambda: SimpleNamespace(copies=copies))
    monkeypatch.setattr(opened, "open_local", partial(open, mode="rb"))
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.touch()
    file.write_bytes(b"abc")
    assert opened.read_for_c("/dev/zero") is None
    assert opened.read_for_c(str(empty)) is None
    assert opened.read_for_c(str(tmp_path / "absent")) is None
    assert opened.read_for_c(str(file)) == b"abc"
