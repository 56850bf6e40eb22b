"""`creel explain` runs a script for some steps, and ends it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creel.cli import main
from kit import unique_name
from testbed.same import needs_fuse
from testbed.slowfs import SlowFS

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

FILES, BATCH = 400, 4

SCRIPT = f"""
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import creel

kind, folder = sys.argv[1], Path(sys.argv[2])
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
(folder / "pid").write_text(str(os.getpid()))


def decode(data):
    time.sleep(0.008)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Opaque(Dataset):
    def __len__(self):
        return {FILES}

    def __getitem__(self, index):
        return decode(b"x" * 100)


if kind == "files":
    data = creel.FileDataset(sorted(map(str, (folder / "data").iterdir())), decode=decode)
elif kind == "opaque":
    data = Opaque()
else:
    data = range(20)
print("training")
sampler = torch.utils.data.DistributedSampler(data) if dist.is_initialized() else None
loader = DataLoader(data, {BATCH}, shuffle=sampler is None, sampler=sampler, num_workers=1)
for epoch in range(100 if kind != "short" else 1):
    for batch in loader:
        time.sleep(0.004)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
(folder / "end").touch()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(FILES):
        (data / f"{i:03}").write_bytes(os.urandom(5000))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    return path


def explained(script: Path, kind: str, *options: str) -> int:
    name = unique_name()
    words = ["--name", name, "explain", "--json", *options, str(script), kind, str(script.parent)]
    return main.main(words)


@pytest.mark.parametrize("kind", ["files", "opaque"])
def test_a_script_is_run_for_some_steps_and_explained(
    kind: str, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert explained(script, kind, "--steps", "40") == 0
    out, err = capfd.readouterr()
    answer: Any = json.loads(out)
    assert "training" in err, "the script's own output does not mix with the answer"
    assert not (script.parent / "end").exists(), "it was ended"
    pid = int((script.parent / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()
    assert answer["workers"] == 1
    assert answer["busy_s"]["decode"] >= BATCH * 0.008
    assert answer["train_s"] >= 0.004
    line = 1 + SCRIPT.splitlines().index(next(x for x in SCRIPT.splitlines() if "loader = " in x))
    assert answer["advice"]["where"] == f"train.py:{line}"
    inline = next(row for row in answer["by_workers"] if row["workers"] == 1)
    assert inline["step_s"] >= BATCH * 0.008
    if kind == "files":
        assert (answer["samples"], answer["steps"]) == (FILES, FILES // BATCH)
        assert answer["nbytes"] == FILES * 5000
        assert [row["reads"] for row in answer["by_memory"]] == [400, 300, 200, 100, 0]
        assert "keep_decoded" in {row["what"] for row in answer["changes"]}
    else:
        assert (answer["samples"], answer["steps"]) == (FILES, FILES // BATCH)  # as its length says
        assert (answer["by_memory"], answer["reads"]) == ([], None)


def test_ranks_that_torchrun_starts_are_explained_together(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert explained(script, "files", "--steps", "24", "--ranks", "2") == 0
    answer: Any = json.loads(capfd.readouterr().out)
    assert (answer["ranks"], answer["samples"], answer["steps"]) == (2, FILES, FILES // BATCH // 2)
    assert answer["busy_s"]["decode"] >= BATCH * 0.008
    assert answer["step_s"] >= BATCH * 0.008
    pid = int((script.parent / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_script_that_ends_too_soon_says_so(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert explained(script, "short") == 2
    assert "one DataLoader must give 17 or more before the script ends" in capfd.readouterr().err
    assert main.main(["explain", str(script) + "x"]) == 2
    assert "there is no script" in capfd.readouterr().err


def test_a_name_that_another_daemon_has_is_refused(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it must not run')")
    assert main.main(["--name", served, "explain", str(tmp_path / "train.py")]) == 1
    assert f"is already named '{served}'" in capsys.readouterr().err


READER = f"""
import sys, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

kind, folder = sys.argv[1:]


class Reader(Dataset):
    rows = None

    def __len__(self):
        return {FILES}

    def __getitem__(self, index):
        if kind == "files":
            with open(f"{{folder}}/{{index:03}}", "rb") as f:
                data = f.read()
        else:
            if self.rows is None:
                self.rows = np.memmap(f"{{folder}}/rows", "u1", "r", shape=({FILES}, 200_000))
            data = self.rows[index]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


for epoch in range(100):
    for batch in DataLoader(Reader(), {BATCH}, shuffle=True, num_workers=2):
        time.sleep(0.005)
"""
READ_S = 0.05


@needs_fuse
@pytest.mark.parametrize(
    "kind, line", [("files", "creel.wrap(dataset)"), ("maps", "a method ranges(index)")]
)
def test_what_a_script_reads_by_itself_is_told_and_which_line_serves_it(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, line: str
) -> None:
    script.write_text(READER)
    np.zeros(FILES * 200_000, np.uint8).tofile(tmp_path / "data/rows")
    mount: Any = {"page_cache": kind == "maps", "read_latency": 1000 * READ_S}
    slow: Any = SlowFS(str(tmp_path / "data"), str(tmp_path / "mount"), **mount)  # type: ignore[no-untyped-call]
    with slow:
        words = ["explain", "--json", "--steps", "16", str(script), kind, str(slow.mountpoint)]
        assert main.main(["--name", unique_name(), *words]) == 0
    answer = json.loads(capfd.readouterr().out)
    reads = answer["reads"]
    assert (answer["samples"], answer["steps"]) == (FILES, FILES // BATCH)
    assert reads["mapped"] == (kind == "maps")
    assert reads["line"].startswith(line)
    assert reads["file"].startswith(str(slow.mountpoint))
    # Each sample waits for one read at least; a look sees a part of those of a busy machine.
    assert reads["storage_s"] > 0.7 * BATCH * READ_S
    assert reads["storage_s"] <= answer["busy_s"]["decode"]
    assert reads["epoch_s"] < answer["epoch_s"] - 0.5 * reads["storage_s"] / 2 * answer["steps"]
