"""A daemon on a machine that is short of memory gives its own back, and batches stay the same."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import creel
from daemons import Running
from kit import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def arena_nbytes(pid: int) -> int:
    """Return the memory that the system holds for a daemon's arena."""
    fds = Path(f"/proc/{pid}/fd")
    return next(
        os.stat(fd).st_blocks * 512  # noqa: PTH116  through the link
        for fd in fds.iterdir()
        if "memfd:creel-arena" in os.readlink(fd)  # noqa: PTH115  no path
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_without_any_memory_left_batches_are_torchs(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    for i, data in enumerate(np.random.default_rng(0).integers(0, 256, (200, 9000), np.uint8)):
        (tmp_path / f"{i:03}").write_bytes(data.tobytes())
    dataset = creel.FileDataset(tmp_path, nbytes=True)

    def epochs(cls: type[torch.utils.data.DataLoader[torch.Tensor]]) -> list[list[int]]:
        torch.manual_seed(5)
        loader = cls(dataset, 8, shuffle=True, num_workers=workers)
        return [[int(b.sum()) for b in loader] for _ in range(3)]

    with Running(daemon_name, env={"CREEL_MEMORY__RESERVE": "100%"}) as daemon:
        ours = epochs(creel.DataLoader)
        until(lambda: arena_nbytes(daemon.pid) == 0, event="all memory is given back")
        assert "the cache gives memory back" in daemon.log()
        with daemon.client("cli") as client:
            memory = client.ask("stats")["memory"]
        assert memory["withheld_nbytes"] == memory["budget_nbytes"] > memory["used_nbytes"] == 0
    assert ours == epochs(torch.utils.data.DataLoader)
