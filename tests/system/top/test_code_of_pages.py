"""The code of the how-to pages runs as it stands there, between names that the reader has.

The recipes' is run by compat/test_recipes.py, what needs ranks, a bucket or another library by the
tests of these (`ELSEWHERE`).
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, RandomSampler

import creel

Image = pytest.importorskip("PIL.Image")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("served"),
]

DOCS = Path(__file__).parents[3] / "docs"
N = 40
#: Page and number of the block: what runs it.
ELSEWHERE = {
    ("checkpoints", 1): "compat/test_torch_alone.py",
    ("coming-from", 0): "unit/top/test_pages.py",
    ("frameworks", 0): "compat/test_libraries.py",
    ("frameworks", 1): "unit/making/test_prefetch_to.py",
    ("groups", 0): "system/making/test_replicate.py",
    ("mapped-files", 0): "system/data/test_mapped_pages.py",
    ("monitoring", 0): "compat/test_recipes.py",
    ("own-code", 1): "compat/test_served_libraries.py",
    ("remap", 0): "system/making/test_ranks_agree.py",
    ("s3", 0): "compat/test_recipes.py",
    ("s3", 1): "compat/test_recipes.py",
    ("samplers", 0): "system/line/test_custom_samplers.py",
}


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = [
    (page.stem, number)
    for page in sorted(DOCS.glob("*.md"))
    for number in range(len(blocks_of(page)))
]


class Pictures(Dataset[Any]):
    """A dataset of a person, which opens a file for each sample."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.targets = [i % 2 for i in range(len(paths))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return tensor(Image.open(self.paths[i])), self.targets[i]


def tensor(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).float()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page takes for granted."""
    monkeypatch.chdir(tmp_path)
    paths = []
    for i in range(N):
        path = tmp_path / f"train/{i % 2}/{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3)).astype("uint8")
        Image.fromarray(pixels).save(path)
        paths.append(str(path))
    data = Pictures(paths)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 8 * 3, 2))
    return {
        "PIL": __import__("PIL"),
        "RandomSampler": RandomSampler,
        "alpha": 0.1,
        "augment": tensor,
        "creel": creel,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "data": data,
        "dataset": data,
        "decode_and_resize": lambda raw: Image.open(io.BytesIO(raw)).resize((4, 4)),
        "model": net,
        "mse_loss": torch.nn.functional.mse_loss,
        "net": net,
        "numpy": np,
        "pairs": [(path, path) for path in paths],
        "root": str(tmp_path / "train"),
        "task": data,
        "tasks": [data, Pictures(paths[::-1])],
        "torch": torch,
        "train": lambda *_: None,
    }


def ready(block: tuple[str, int], names: dict[str, Any]) -> None:
    """Add what an earlier page or block has given the reader."""
    memory = creel.Rehearsal(per_batch=32, budget=2000)
    if block[0] in {"continual", "rehearsal"}:
        memory.add(names["task"], labels=names["task"].targets)
        names["memory"] = memory
    if block[0] == "rehearsal":
        names["loader"] = creel.DataLoader(names["task"], 32, rehearsal=memory)
        x, names["y"], *_ = next(iter(names["loader"]))
        names["out"] = names["net"](x)
    if block == ("checkpoints", 0):
        names["loader"] = creel.DataLoader(names["data"], 4, shuffle=True)
        next(iter(names["loader"]))
    if block == ("own-code", 0):
        names["transform"] = lambda picture, mask: (tensor(picture), len(mask))
    elif block[0] == "formats":
        names["transform"] = tensor
    if block == ("streams", 0):
        names["simulate"] = lambda: [(np.full((64, 64), i, "f4"), i) for i in range(64)]


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block not in ELSEWHERE], ids=lambda b: f"{b[0]}-{b[1]}"
)
def test_the_code_of_a_page_runs(
    block: tuple[str, int], names: dict[str, Any], in_memory: Path
) -> None:
    ready(block, names)
    code = blocks_of(DOCS / f"{block[0]}.md")[block[1]].replace("/dev/shm/sim", str(in_memory))
    torch.manual_seed(1)
    exec(code, names)
    loader = names.get("loader")
    if loader is not None and block[0] not in {"continual", "rehearsal"}:
        taken = block[0] == "checkpoints"  # a batch, before the state
        assert len(list(loader)) == len(loader) - taken


def test_what_runs_a_block_elsewhere_is_there() -> None:
    assert set(ELSEWHERE) <= set(BLOCKS)
    tests = DOCS.parent / "tests"
    assert all((tests / path).exists() for path in ELSEWHERE.values())
