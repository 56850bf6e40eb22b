"""Threads of the training process copy large batches of plain bytes, like torch's workers."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.loader.data.binding.gather import Gatherer
from creel.loader.line.batches import places
from kit import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), pytest.mark.usefixtures("served")]

ROWS, NBYTES, BATCH = 200, 512, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows"
    np.random.default_rng(0).integers(0, 256, (ROWS, NBYTES), np.uint8).tofile(path)
    return path


@pytest.fixture
def rows(path: Path) -> creel.RecordDataset:
    return creel.RecordDataset(path, torch.uint8, NBYTES)


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "INLINE_NBYTES", 0)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("creel-read-")]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event before which no thread copies rows."""
    opened, rows = threading.Event(), Gatherer.rows

    def held(*args: Any) -> Any:
        opened.wait(60)
        return rows(*args)

    monkeypatch.setattr(Gatherer, "rows", held)
    yield opened
    opened.set()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("to", [None, torch.float32])
def test_batches_are_torchs_and_threads_end_with_their_iterator(
    path: Path, persistent: bool, to: torch.dtype | None
) -> None:
    data = creel.RecordDataset(path, torch.uint8, NBYTES, to=to)
    more: Any = {"shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    ours, theirs = creel.DataLoader(data, BATCH, **more), DataLoader(data, BATCH, **more)
    for epoch, stop in enumerate([None, 3, None]):
        torch.manual_seed(epoch)
        mine = list(itertools.islice(ours, stop))
        assert threads() if persistent else True
        torch.manual_seed(epoch)
        assert all(map(torch.equal, mine, itertools.islice(theirs, stop)))
    assert ours.stats()["batches"] == 2 * (ROWS // BATCH) + 3
    del ours
    until(lambda: not threads(), event="the threads end")


def test_an_iterator_that_is_left_early_leaves_no_thread(rows: creel.RecordDataset) -> None:
    batches = iter(creel.DataLoader(rows, BATCH, num_workers=2))
    next(batches)
    assert len(threads()) == min(2, len(os.sched_getaffinity(0)))
    del batches
    until(lambda: not threads(), event="the threads end")


def test_a_batch_that_does_not_come_in_time_raises_torchs_error_and_is_not_lost(
    rows: creel.RecordDataset, gate: threading.Event
) -> None:
    gate.set()
    loader = creel.DataLoader(rows, BATCH, num_workers=1, timeout=0.2)
    batches = iter(loader)
    first = next(batches)
    del first
    gate.clear()
    batches_read: list[torch.Tensor] = []
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0.2 seconds"):
        batches_read.extend(batches)
    gate.set()
    batches_read.extend(batches)
    assert torch.equal(torch.cat(batches_read), torch.cat(list(DataLoader(rows, BATCH)))[BATCH:])


def test_ctrl_c_in_a_wait_costs_no_batch(rows: creel.RecordDataset, gate: threading.Event) -> None:
    batches = iter(creel.DataLoader(rows, BATCH, num_workers=1))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(0.3, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    timer.join()
    gate.set()
    assert torch.equal(torch.cat(list(batches)), torch.cat(list(DataLoader(rows, BATCH))))


def test_a_row_that_a_thread_cannot_read_raises_as_from_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(NBYTES * ROWS))
    loader = creel.DataLoader(creel.RecordDataset(path, torch.uint8, NBYTES), BATCH, num_workers=1)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"Caught .* in DataLoader worker process 0"):
        next(iter(loader))
