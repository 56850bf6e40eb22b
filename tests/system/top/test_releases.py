"""A loader and a daemon of neighbouring releases, each in processes of its own version.

Until a second release is tagged, the neighbours are made from this tree: they count their protocol
further, and their messages have fields that this version does not know.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from creel.errors import UnavailableError
from creel.messages import OLDEST_PROTOCOL, PROTOCOL
from daemons import Running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
SOURCES = ("src", "cache", "daemon", "loader", "policies")
N = 24

PROGRAM = """
import json, sys, torch, creel
paths = json.loads(sys.argv[1])
data = creel.FileDataset(paths, decode=lambda b: torch.frombuffer(bytearray(b), dtype=torch.uint8))
loader = creel.DataLoader(data, 4, shuffle=True, num_workers=1, creel={"loader.direct": "never"})
torch.manual_seed(3)
rows = [batch.tolist() for _ in range(2) for batch in loader]
try:
    opens = sum(source["opens"] for source in creel.stats()["sources"])
except creel.errors.UnavailableError:
    opens = 0
print(json.dumps({"file": creel.__file__, "rows": rows, "opens": opens}))
"""


def copied(folder: Path) -> Path:
    for name in SOURCES:
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    return folder


def later(folder: Path, protocol: int) -> Path:
    """Return this tree as a later release with this protocol, which speaks the one before, too."""
    path = copied(folder) / "src/creel/messages.py"
    text = path.read_text()
    edits = (
        (rf"^PROTOCOL = {PROTOCOL}$", f"PROTOCOL = {protocol}"),
        (rf"^OLDEST_PROTOCOL = {OLDEST_PROTOCOL}$", f"OLDEST_PROTOCOL = {protocol - 1}"),
        (r"^    returns: bool$", '    returns: bool\n    later: str = "later"'),  # Welcome
        (r"^    grants: Grants = \[\]$", '    grants: Grants = []\n    later: str = "later"'),
    )
    for old, new in edits:
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count >= 1, old
    path.write_text(text)
    return folder


def tagged(folder: Path) -> Path:
    """Return the tree of the newest release before this one."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "tag", "--list", "v*", "--sort=-version:refname", "--no-contains"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not listed.stdout:
        pytest.skip("no release is tagged yet")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", listed.stdout.split()[0], *SOURCES],
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    files = [tmp_path / f"data/{i}" for i in range(N)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i, *range(8)]))
    return [str(path) for path in files]


def of(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree / "src"), "CREEL_LOADER__EMBED": "false"}


def trained(tree: Path, daemon: str, paths: list[str]) -> tuple[Any, str]:
    """Return what the program prints as a loader of this tree, and its log."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(paths)],
        env=os.environ | of(tree) | {"CREEL_SOCKET": daemon},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["file"] == str(tree / "src/creel/__init__.py")
    return answer, done.stderr


def torchs(paths: list[str]) -> Any:
    data = [np.fromfile(path, dtype=np.uint8) for path in paths]
    torch.manual_seed(3)
    loader: Any = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=1)  # type: ignore[arg-type]
    return [batch.tolist() for _ in range(2) for batch in loader]


class Daemon(Running):
    """A daemon that may refuse this version's clients."""

    def _serves(self) -> bool:
        try:
            return super()._serves()
        except UnavailableError:
            return True


def served_by(daemon_of: Path, loader_of: Path, name: str, paths: list[str]) -> tuple[int, str]:
    """Train by a loader of one tree over a daemon of another; the batches are always torch's.

    Returns how many files the daemon opened, and the loader's log.
    """
    with Daemon(name, fresh=True, env=of(daemon_of)):
        answer, log = trained(loader_of, name, paths)
    assert answer["rows"] == torchs(paths)
    return answer["opens"], log


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return later(tmp_path_factory.mktemp("next"), PROTOCOL + 1)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return later(tmp_path_factory.mktemp("after"), PROTOCOL + 2)


@pytest.fixture(scope="module")
def predecessor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged(tmp_path_factory.mktemp("tagged"))


@pytest.mark.parametrize("newer", ["loader", "daemon"])
def test_neighbouring_releases_work_together(
    newer: str, neighbour: Path, daemon_name: str, paths: list[str]
) -> None:
    both = (ROOT, neighbour) if newer == "loader" else (neighbour, ROOT)
    assert served_by(*both, daemon_name, paths) == (N, "")


@pytest.mark.parametrize("newer", ["loader", "daemon"])
def test_releases_that_are_further_apart_say_so_in_one_sentence_and_training_goes_on(
    newer: str, stranger: Path, daemon_name: str, paths: list[str]
) -> None:
    both = (ROOT, stranger) if newer == "loader" else (stranger, ROOT)
    opens, log = served_by(*both, daemon_name, paths)
    (line,) = log.splitlines()
    assert opens == 0
    assert "restart the daemon with the installed version" in line


@pytest.mark.parametrize("newer", ["loader", "daemon"])
def test_the_release_before_works_with_this_version(
    newer: str, predecessor: Path, daemon_name: str, paths: list[str]
) -> None:
    both = (predecessor, ROOT) if newer == "loader" else (ROOT, predecessor)
    opens, _ = served_by(*both, daemon_name, paths)
    assert opens == N
