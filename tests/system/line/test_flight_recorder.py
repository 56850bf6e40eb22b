"""The flight recorder, the gauges and the CPU time of a rank agree with what happened."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import creel
from creel.cache.memory.batch_log import ROWS, BatchRow
from creel.counters import CAUSES
from creel.loader.client import connections
from creel.loader.client.client import Client
from creel.loader.line.batches import epoch_run
from daemons import Running
from kit import stopped, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, BATCH, NBYTES = 48, 4, 5_000


def decode(data: bytes) -> torch.Tensor:
    time.sleep(0.001)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def collate(samples: list[Any]) -> Any:
    time.sleep(0.001)
    return default_collate(samples)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for i in range(FILES):
        (tmp_path / f"{i:02}").write_bytes(rng.bytes(NBYTES))
    return sorted(map(str, tmp_path.iterdir()))


def stream_of(loader: creel.DataLoader[Any]) -> Any:
    """Return the session of the loader's iterator."""
    run: Any = loader._creel_state.position.run
    assert run is not None
    assert run.serving.stream is not None
    return run.serving.stream.session


def answer_of(node: Running) -> dict[str, Any]:
    with node.client("cli") as client:
        return dict(client.ask("stats"))


def check_rows(rows: list[BatchRow], workers: set[int]) -> None:
    """Check the order of all moments of a list of consecutive batches."""
    assert [row.step for row in rows] == [*range(rows[0].step, rows[0].step + len(rows))]
    assert {row.worker for row in rows} <= workers
    for row in rows:
        moments = row.began, row.ready, row.collating, row.packed, row.taken
        assert list(moments) == sorted(moments)
        assert 0 < row.wait_began <= row.taken
    for before, row in itertools.pairwise(rows):
        assert before.taken <= row.taken


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_has_its_row_and_waits_sum_to_the_stalls(
    workers: int, large: bool, files: list[str], daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`large`: batches of bytes, which threads copy if there are workers."""
    monkeypatch.setattr("creel.loader.line.batches.places.INLINE_NBYTES", 1)
    kind: dict[str, Any] = {"nbytes": [NBYTES] * FILES} if large else {"decode": decode}
    dataset = creel.FileDataset(files, **kind)
    options: dict[str, Any] = {} if large else {"collate_fn": collate}
    loader = creel.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, **options)
    began = time.monotonic_ns()
    for _ in range(2):
        batches = sum(1 for _ in loader)
        for _ in loader:  # the epoch ends early
            break
    iterator = iter(loader)
    next(iterator)
    session = stream_of(loader)
    rows = session.words.log.rows()
    assert len(rows) == 2 * (batches + 1) + 1
    check_rows(rows, {-1} if not workers else {*range(workers)})
    assert began < rows[0].wait_began
    assert rows[-1].taken < time.monotonic_ns()
    if not large:
        for row in rows:
            assert row.packed - row.collating >= 1e6
            assert row.collating - row.ready >= BATCH * 1e6
    run: Any = loader._creel_state.position.run
    run.statistics.count(run.serving.stream, run.delivered)
    stalls = sum(loader.stats()["stall_s"].values())  # type: ignore[attr-defined]
    waits = sum(row.taken - row.wait_began for row in rows)
    assert waits / 1e9 == pytest.approx(stalls, rel=0.01)
    (rank,) = answer_of(daemon)["ranks"]
    assert sum(rank["stall_s"][cause] for cause in CAUSES) == pytest.approx(waits / 1e9, rel=0.01)


@pytest.mark.usefixtures("served")
def test_the_ring_keeps_the_last_batches_of_a_long_epoch(files: list[str]) -> None:
    dataset = creel.FileDataset(files * 30, nbytes=[NBYTES] * FILES * 30)
    loader = creel.DataLoader(dataset, 1)
    batches = iter(loader)
    for _ in range(ROWS + 100):
        next(batches)
    rows = stream_of(loader).words.log.rows()
    check_rows(rows, {-1})
    assert (rows[-1].step, len(rows)) == (ROWS + 99, ROWS - 1)


def busy_decode(data: bytes) -> torch.Tensor:
    until = time.process_time() + 0.003
    while time.process_time() < until:
        pass
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_stats_tell_the_workers_and_their_processors_while_they_work(
    files: list[str], daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0.0)
    dataset = creel.FileDataset(files, decode=busy_decode)
    loader = creel.DataLoader(dataset, BATCH, num_workers=2)
    for _ in loader:
        (rank,) = answer_of(daemon)["ranks"]
        assert rank["workers"] == 2
    (rank,) = answer_of(daemon)["ranks"]
    assert rank["workers"] == 0  # they have ended with their epoch
    assert FILES * 0.003 <= rank["cpu_s"] == loader.stats()["cpu_s"]


class Opaque(Dataset[int]):
    """Nothing of it can be cached."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index

    def __len__(self) -> int:
        return 64


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_without_a_session_counts_while_its_epoch_runs(
    workers: int, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0.0)
    loader = creel.DataLoader(Opaque(), 4, num_workers=workers)
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    stats: Any = loader.stats()
    assert stats["busy_s" if workers else "stall_s"]["decode"] >= 0.03
    assert sum(stats["stall_s"].values()) > 0
    assert connections.connected(embedded) is None  # no daemon was started for that


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_without_objects_is_counted_and_recorded_where_a_daemon_runs(
    workers: int, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0.0)
    loader, epochs = creel.DataLoader(Opaque(), 4, num_workers=workers), 0

    def counted() -> bool:
        nonlocal epochs
        epochs += 1
        assert [int(i) for batch in loader for i in batch] == [*range(64)]
        # The session may have come too late for this epoch: then the next one looks again.
        return loader._creel_state._stream is not None

    until(counted, event="the daemon counts")
    before = answer_of(daemon)["ranks"][0]
    assert before["batches"] == 16 * epochs, "those before the session was there, too"
    assert before["samples"] == 64 * epochs
    batches = iter(loader)
    next(batches)
    first = stream_of(loader).words.log.rows()[-1].step
    for _ in range(7):
        next(batches)
    (session,) = answer_of(daemon)["sessions"]
    (rank,) = answer_of(daemon)["ranks"]
    assert rank["workers"] == session["workers"] == workers
    assert rank["batches"] == before["batches"] + 8
    assert rank["samples"] == before["samples"] + 32
    assert sum(rank["stall_s"].values()) > sum(before["stall_s"].values())
    if workers:
        assert rank["busy_s"]["decode"] > before["busy_s"]["decode"]
    rows = stream_of(loader).words.log.rows()
    assert rows[-1].step == first + 7
    check_rows(rows, {*range(workers)} or {-1})
    answer = answer_of(daemon)
    assert (answer["sources"], answer["fetch"]["bugs"]) == ([], 0)


def test_a_dataset_without_objects_asks_no_daemon_where_creel_is_off(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0.0)
    loader = creel.DataLoader(Opaque(), 4, creel=False)
    for _ in range(2):
        assert len(list(loader)) == 16
    assert connections.connected(daemon.name) is None


def test_a_stopped_daemon_holds_up_no_loader_that_it_would_only_count(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_run, "COUNT_S", 0.0)
    connect: Any = Client.connect
    # A loader that waited for the daemon's answer would wait longer than this test may take.
    monkeypatch.setitem(connect.__func__.__kwdefaults__, "timeout_s", 300.0)
    loader = creel.DataLoader(Opaque(), 4)
    daemon.signal(signal.SIGSTOP)
    try:
        until(lambda: stopped(daemon.pid), event="the daemon is stopped")
        assert len(list(loader)) == 16
    finally:
        daemon.signal(signal.SIGCONT)
