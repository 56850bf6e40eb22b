"""`creel plot` draws a run that `creel trace` recorded of a running job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.cli import main
from creel.cli.recorded.pictures import pictures
from creel.cli.recorded.recording import read
from daemons import Running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, BATCH = 96, 4


def decode(data: bytes) -> torch.Tensor:
    time.sleep(0.001)
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


def order(loader: Any) -> list[int]:
    """Return the samples of an epoch, in order."""
    return [int(i) for batch in loader for i in batch[:, 0]]


def test_a_running_job_is_drawn_from_its_trace(
    daemon: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i:03}").write_bytes(np.full(512, i, np.int64).tobytes())
    dataset = creel.FileDataset(sorted(map(str, folder.iterdir())), decode=decode)
    loader = creel.DataLoader(dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    order(loader)
    running = iter(loader)
    epochs = [[int(i) for i in next(running)[:, 0]]]
    run, out = tmp_path / "run.json", tmp_path / "run.png"
    assert main.main(["--name", daemon.name, "trace", str(run), "--seconds", "600"]) == 0
    epochs[0] += order(running)
    epochs += [order(loader) for _ in range(2)]
    capsys.readouterr()

    assert main.main(["plot", "--json", str(run), str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["drawn"] == ["steps", "slowdown", "throughput", "reuse"]
    assert out.read_bytes().startswith(b"\x89PNG")

    charts = pictures(read(str(run)))
    (rank,) = charts.steps
    assert rank.rank == 0
    assert rank.stages["decode"].min() >= BATCH * 0.001 / 2
    # The plan of a permutation: how far apart its epochs read each sample, in steps.
    assert not isinstance(charts.reuse, str)
    at = np.empty((3, FILES), np.int64)
    for epoch, samples in enumerate(epochs):
        at[epoch, samples] = (epoch * FILES + np.arange(FILES)) // BATCH
    known = int(charts.reuse.counts.sum()) // FILES  # epochs ahead that were published by then
    assert known >= 1
    apart = np.diff(at, axis=0)[:known].ravel()
    assert charts.reuse.counts.tolist() == np.histogram(apart, charts.reuse.edges)[0].tolist()
    assert charts.reuse.epoch == FILES / BATCH
