"""`creel verify`: loaders and scripts whose batches are torch's, and those that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli_system import creel, forked

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("either_way"),
]

LOADERS = """
import time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 23
    def __getitem__(self, i):
        return {"x": torch.rand(3) + i, "n": np.random.rand(2), "i": i, "s": str(i)}

class Drifting(Squares):
    def __getitem__(self, i):
        return {"x": torch.tensor(time.monotonic_ns())}

def shuffled():
    return DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2)

g = torch.Generator().manual_seed(3)
plain = DataLoader(Squares(), batch_size=5, shuffle=True, generator=g)
unbatched = DataLoader(Squares(), batch_size=None)
without_parts = DataLoader(Squares(), batch_size=4, collate_fn=lambda _: {})
drifting = DataLoader(Drifting(), batch_size=4)

def rehearsing():
    import creel
    memory = creel.Rehearsal(3, budget=9)
    memory.add(Squares(), [i % 2 for i in range(23)])
    return creel.DataLoader(Squares(), 4, shuffle=True, num_workers=2, rehearsal=memory)

class Broken(Squares):
    def __getitem__(self, i):
        if i == 9:
            raise ValueError("sample 9 is broken")
        return i

def failing():
    raise KeyError("no data")

broken = DataLoader(Broken(), batch_size=4, num_workers=1)
number = 7
"""
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=6, shuffle=True, num_workers=int(sys.argv[1])):
            x += 0
    print("the script's own words")
    assert "fail" not in sys.argv
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")  # comparing needs no cache
    (tmp_path / "loaders.py").write_text(LOADERS)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def verify(project: Path, *words: str) -> tuple[int, str, str]:
    """Run `creel verify` in the project; return its exit code, output and errors."""
    return forked("verify", *words, cwd=project)


@pytest.mark.parametrize(
    "loader, batches",
    [("shuffled", 6), ("plain", 5), ("unbatched", 23), ("without_parts", 6), ("rehearsing", 6)],
)
def test_a_loader_is_verified(project: Path, loader: str, batches: int) -> None:
    code, out, _ = verify(project, "--json", f"loaders:{loader}")
    answer: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (answer["equal"], answer["batches"], answer["difference"]) == (True, batches, None)


def test_options_behind_the_script_are_told_to_come_before_it(project: Path) -> None:
    """The script's own parser of arguments ends it, and names an error of the script's."""
    code, _, err = verify(project, "train.py", "0", "--steps", "10", "fail")
    assert (code, "'--steps' went to the script" in err) == (1, True)
    code, _, err = verify(project, "train.py", "0", "fail")
    assert (code, "went to the script" in err) == (1, False)


def test_a_difference_is_named_and_ends_with_1(project: Path) -> None:
    answer = json.loads(creel("verify", "--json", "loaders:drifting", cwd=project, code=1))
    difference = answer["difference"]
    assert (answer["equal"], answer["batches"]) == (False, 0)
    assert (difference["step"], difference["where"]) == (0, "['x']")
    code, out, _ = verify(project, "loaders:drifting")
    assert code == 1
    assert "different after 0 equal batches: loader 0, epoch 0, batch 0, at ['x']" in out
    assert "A second run with torch's DataLoader differs from the first as well" in out
    assert not answer["torch_repeats"]


def test_an_error_is_compared_like_a_batch(project: Path) -> None:
    answer = json.loads(creel("verify", "--json", "loaders:broken", cwd=project))
    assert (answer["equal"], answer["batches"]) == (True, 2)
    assert answer["raised"] == "ValueError: sample 9 is broken"


@pytest.mark.parametrize(("home", "workers"), [("torch.utils.data", "0"), ("creel", "2")])
def test_a_script_is_verified(project: Path, workers: str, home: str) -> None:
    before = "from torch.utils.data import DataLoader, TensorDataset"
    after = f"from {home} import DataLoader\nfrom torch.utils.data import TensorDataset"
    (project / "train.py").write_text(SCRIPT.replace(before, after))
    answer = json.loads(creel("verify", "--json", "train.py", workers, cwd=project))
    assert (answer["equal"], answer["batches"], answer["loaders"]) == (True, 8, 2)


def test_steps_end_a_script_early(project: Path) -> None:
    out = creel("verify", "--steps", "3", "train.py", "0", cwd=project)
    assert out.startswith("equal: 3 batches of 1 loader, bit for bit")


@pytest.mark.parametrize(
    "words, code, says",
    [
        (["nothing"], 2, "neither a script (x.py) nor a loader (module:loader)"),
        (["gone.py"], 2, "there is no script gone.py"),
        (["gone:x"], 2, "No module named 'gone'"),
        (["loaders:gone"], 2, "has no attribute 'gone'"),
        (["loaders:plain", "--steps", "3"], 2, "options come before loaders:plain"),
        (["loaders:number"], 2, "is of type int: neither a DataLoader nor a function"),
        (["loaders:"], 2, "neither a script (x.py) nor a loader (module:loader)"),
        (["loaders:failing"], 1, "\ncreel: failing raised KeyError: 'no data'\n"),
        (["train.py", "0", "fail"], 1, "train.py failed with torch's loader"),
    ],
)
def test_batches_that_cannot_be_verified_are_named(
    project: Path, words: list[str], code: int, says: str
) -> None:
    status, _, errors = verify(project, *words)
    assert status == code
    assert says in errors
    assert "verify.py" not in errors, "a traceback of ours"
