"""A rank that hangs says so in its own log, before the other ranks' collective gives up."""

from __future__ import annotations

import datetime
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import creel
from creel.loader.making.batch_times import StallWarning
from kit import until
from testbed.ranks import ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

HUNG_S, COLLECTIVE_S = 1.5, 12.0


class Gated(Dataset[int]):
    """Samples 8 to 11 of rank 1 wait until a file is there, and so do its samples 20 to 23."""

    def __init__(self, rank: int, gates: Path) -> None:
        self.gates = {8: gates / "first", 20: gates / "second"} if rank else {}

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        gate = self.gates.get(index)
        if gate is not None:
            until(gate.exists, 120, event="the gate opens")
        return index


@pytest.mark.usefixtures("embedded")
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_late_rank_names_itself_and_its_worker_before_the_collective_gives_up(
    tmp_path: Path,
) -> None:
    """Also at its second hang: a rank that was slow once is not silent for the rest of the job."""

    def act(rank: int) -> Any:
        group = dist.new_group(timeout=datetime.timedelta(seconds=COLLECTIVE_S))
        messages: list[tuple[float, str]] = []

        def shown(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            # On a busy machine a worker's start may take long, too.
            if issubclass(category, StallWarning) and "starting" not in str(message):
                messages.append((time.monotonic(), str(message)))
                if len(messages) == 1:
                    (tmp_path / "first").touch()

        warnings.simplefilter("default", StallWarning)  # as in a program: a warning is no error
        warnings.showwarning = shown
        gated, options = Gated(rank, tmp_path), {"loader.hung_s": HUNG_S}
        loader = creel.DataLoader(gated, 4, num_workers=1, creel=options)
        gave_up = None
        for batch in loader:
            if gave_up is None:
                try:
                    dist.all_reduce(torch.as_tensor(len(batch)), group=group)
                except RuntimeError:
                    gave_up = time.monotonic()
                    (tmp_path / "second").touch()
        return gave_up, messages, os.getpid()

    (gave_up, of_0, _), (_, of_1, pid) = ranks(act, tmp_path)
    assert of_0 == [], "rank 0 had all its batches"
    assert gave_up is not None
    (_, first), (at, second) = of_1
    assert at < gave_up - COLLECTIVE_S / 4
    for said, batch in ((first, 2), (second, 5)):
        assert re.match(
            rf"\[rank 1\] no batch for \d s: batch {batch} is with worker 0 \(pid ", said
        )
        assert "reading" in said
        assert str(pid) not in said, "the worker is named, not the trainer"
