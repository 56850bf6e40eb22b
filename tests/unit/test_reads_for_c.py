"""Which files are read here instead of by a library in C, and what it is given then."""

from __future__ import annotations

import mmap
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from creel.loader.reading import opened


def test_only_regular_files_with_bytes_are_read_for_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pipe's writer must not meet a reader that goes away; a device has no end."""
    slow = SimpleNamespace(waited_ns=1, got_last=1, nbytes=1)  # the last file that C read
    copies = SimpleNamespace(read_in_c=slow, read_here=0)
    monkeypatch.setattr(opened, "observing", lambda: SimpleNamespace(copies=copies))
    monkeypatch.setattr(opened, "open_local", partial(open, mode="rb"))
    pipe, empty, file = tmp_path / "pipe", tmp_path / "empty", tmp_path / "file"
    os.mkfifo(pipe)
    empty.touch()
    file.write_bytes(b"abc")
    assert opened.read_for_c(str(pipe)) is None
    assert opened.read_for_c("/dev/zero") is None
    assert opened.read_for_c(str(empty)) is None, "perhaps a lock"
    assert opened.read_for_c(str(tmp_path / "absent")) is None
    assert opened.read_for_c(str(file)) == b"abc"


def test_a_file_in_memory_can_be_mapped_as_any_file_that_is_open_for_reading() -> None:
    fd = opened.memory_file(b"abc")
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == b"abc"
        assert os.read(fd, 10) == b"abc"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)
