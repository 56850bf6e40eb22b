"""`creel stats --why` foretells what a change brings; then the change is made, and measured."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.cli import main
from daemons import Running
from kit import Cores

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

FILES, BATCH, NBYTES = 240, 4, 5_000
#: Seconds of each stage of a sample, and of a step of training: two workers are too few.
DECODE_S, TRANSFORM_S, TRAIN_S = 0.008, 0.004, 0.006


def decode(data: bytes) -> torch.Tensor:
    time.sleep(DECODE_S)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def transform(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(TRANSFORM_S)
    return sample


@pytest.fixture
def train(
    tmp_path: Path, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[float, Any]]:
    """Return a function that trains for two epochs.

    It returns the seconds of a step of the second, and what `creel stats --why` says during it.
    """
    monkeypatch.setattr("creel.system.limits.cores", lambda: 8.0)  # the dataset sleeps
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i:03}").write_bytes(np.random.default_rng(i).bytes(NBYTES))
    files = sorted(map(str, folder.iterdir()))

    def trained(workers: int, **more: Any) -> tuple[float, Any]:
        dataset = creel.FileDataset(files, decode=decode, transform=transform, **more)
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = creel.DataLoader(dataset, BATCH, shuffle=True, **options)
        for _ in loader:
            time.sleep(TRAIN_S)
        times, rank = [], None
        for _ in loader:
            times.append(time.monotonic())
            if len(times) == FILES // BATCH:
                rank = why(daemon)
            time.sleep(TRAIN_S)
        return float(np.mean(np.diff(times[8:]))), rank

    return trained


def why(node: Running) -> Any:
    """Return the row of the open stream of `creel stats --why --json`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.main(["--name", node.name, "stats", "--why", "--json"]) == 0
    return json.loads(out.getvalue())["why"][-1]


def test_a_change_brings_what_is_foretold_of_it(train: Callable[..., Any]) -> None:
    cores = Cores()
    step_s, rank = train(2)
    foretold = {change["what"]: change for change in rank["changes"]}
    # On busy cores, too: samples wait for their decoder, which sleeps.
    assert {"workers", "keep_decoded"} <= foretold.keys(), rank
    workers = foretold["workers"]["workers"]
    came = {"now": step_s, "workers": train(workers)[0]}
    came["keep_decoded"], kept = train(2, keep_decoded="64MiB")
    assert foretold["keep_decoded"]["nbytes"] == pytest.approx(FILES * NBYTES, rel=0.05)
    assert foretold["keep_decoded"]["fits"] == 1.0
    assert f"with {workers} workers" in rank["why"]
    assert "with keep_decoded (" in rank["why"]
    assert "with keep_decoded" not in kept["why"], "it keeps them already"
    said = {"now": rank["step_s"], **{name: change["step_s"] for name, change in foretold.items()}}
    assert max(said["workers"], said["keep_decoded"]) < said["now"]
    assert max(came["workers"], came["keep_decoded"]) < came["now"]
    cores.skip_unless_spare()
    assert said == pytest.approx(came, rel=0.25), (said, came)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_decoder_that_draws_is_not_told_to_be_kept(
    workers: int, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_why.decode", drawing)
    _, rank = train(workers)
    assert "changes" in rank
    assert "keep_decoded" not in {change["what"] for change in rank["changes"]}


def drawing(data: bytes) -> torch.Tensor:
    time.sleep(DECODE_S)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) + torch.rand(1)
