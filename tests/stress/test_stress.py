"""A fixed part of what `make stress` runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit import seeds

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

TESTS = Path(__file__).parent.parent


def said(tool: str, *arguments: str) -> str:
    """Return the output of a tool, which must find nothing wrong."""
    command = [sys.executable, "-m", f"stress.{tool}", *arguments]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_random_programs_show_the_same_as_under_torch() -> None:
    assert said("random_programs", "--first", "10", "--count", "6") == "6 programs, 0 differences\n"


def test_random_programs_with_wrapped_datasets_show_the_same() -> None:
    count = len(seeds(10))
    shown = said("random_programs", "--wrapped", "--first", "2000", "--count", str(count))
    assert shown == f"{count} programs, 0 differences\n"


def test_random_continual_trainings_are_torchs_over_the_same_memory() -> None:
    shown = said("rehearsal_programs", "--first", "3000", "--count", str(len(seeds(5))))
    assert shown.endswith(" programs, 0 differences\n")


@pytest.mark.faults
def test_a_training_whose_daemons_are_killed_and_stopped_is_torchs() -> None:
    summary = said("chaos", "--kills", "1", "--first", "14", "--epochs", "2")
    assert re.fullmatch(
        r"kills [1-9]\d*, stops \d+, runs \d+, batches \d+, wrong 0, hung 0, residue 0\n", summary
    )
