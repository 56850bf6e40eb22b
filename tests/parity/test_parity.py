"""creel.DataLoader shows the same as torch's: batches, errors, warnings, random states."""

from __future__ import annotations

import pytest
import torch
from cases import Case, play

import creel
from kit import seeds


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", seeds(28))
def test_a_random_use_shows_the_same(seed: int) -> None:
    case = Case.draw(seed)
    ours, torchs = play(case, creel.DataLoader), play(case, torch.utils.data.DataLoader)
    for step, (mine, his) in enumerate(zip(ours.shown, torchs.shown, strict=False)):
        assert mine == his, f"step {step} of {case}"
    assert len(ours.shown) == len(torchs.shown)
    assert sorted(ours.unordered) == sorted(torchs.unordered)
    assert ours.warned == torchs.warned
