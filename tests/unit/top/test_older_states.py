"""A `state_dict` that an older release has saved goes on where that release stopped.

`python tests/unit/top/test_older_states.py`, with `src` and `tests` on PYTHONPATH, writes the
states of this release, before it is tagged (scripts/release.py asks for them).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

import creel
from creel.version import VERSION

STATES = Path(__file__).parent / "states"
N, BATCH, TAKEN = 26, 4, 3
DATA: Any = list(range(N))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


#: Arguments of a loader, by name. A later release may add some; those of the files stay.
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": seeded()},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0 + i for i in DATA], N)},
    "the second of two ranks": lambda: {"sampler": DistributedSampler(DATA, 2, 1, seed=3)},
    "by workers": lambda: {"shuffle": True, "num_workers": 2},
}


def loader(cls: Any, name: str) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    return cls(DATA, BATCH, **CASES[name]())


def rows(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def saved(name: str) -> dict[str, Any]:
    """Return a state amid the first epoch, and torch's batches from there on."""
    mine = loader(creel.DataLoader, name)
    taken = iter(mine)
    for _ in range(TAKEN):
        next(taken)
    state = mine.state_dict()
    return {"state": state, "left": rows(loader(DataLoader, name))[TAKEN:]}


@pytest.mark.parametrize("release", sorted(path.stem for path in STATES.iterdir()))
def test_a_state_of_an_older_release_goes_on_as_torch_would_have(release: str) -> None:
    for name, saved in json.loads((STATES / f"{release}.json").read_text()).items():
        resumed = loader(creel.DataLoader, name)
        resumed.load_state_dict(saved["state"])
        assert rows(resumed) == saved["left"], name


def main() -> None:
    path = STATES / f"{VERSION}.json"
    path.write_text(json.dumps({name: saved(name) for name in CASES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
