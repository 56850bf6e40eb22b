"""What a terminal is told of long work."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from creel.system import progress
from creel.system.progress import progress_line
from kit import until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_has_a_line_that_is_gone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    terminal, done = Terminal(), 3
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line("warming", lambda: done, 12):
        shown = re.compile(r"warming: 3 of 12 \(25 %\), \d+ s")
        until(lambda: bool(shown.search(terminal.getvalue())), event="a line")
    assert terminal.getvalue().endswith("\r\x1b[1A\x1b[2K")


def test_short_work_and_work_without_a_terminal_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line("warming"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    threads = threading.active_count()
    for file, shown in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", file)
        with progress_line("warming", shown=shown):
            assert threading.active_count() == threads
        assert file.getvalue() == ""


def test_a_program_may_have_no_standard_error_or_have_closed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    closed.close()
    for file in (None, closed, object()):
        monkeypatch.setattr(sys, "stderr", file)
        with progress_line("listing"):
            pass
