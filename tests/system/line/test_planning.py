"""Plans made and published in the background, through the public loader and a real daemon."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import creel
from creel.loader.line.order import generators
from creel.loader.line.order.epoch_plan import EpochPlan
from creel.loader.line.steps import publish
from daemons import Running
from kit import until
from programs import Program

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, NBYTES, BATCH = 2001, 16, 8
STEPS = -(-N // BATCH)
KINDS = ["seeded", "generator", "distributed", "sequential"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> creel.RecordDataset:
    path = tmp_path_factory.mktemp("rows") / "rows"
    np.random.default_rng(0).integers(0, 256, N * NBYTES, np.uint8).tofile(path)
    return creel.RecordDataset(path, torch.uint8, NBYTES)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make a small epoch be published like a large one."""
    sizes = publish.PieceSizes(whole=100, trainer=64, thread=500)
    monkeypatch.setattr(publish, "SIZES", sizes)


def loader(cls: Any, data: Any, kind: str, **more: Any) -> Any:
    every: dict[str, dict[str, Any]] = {
        "seeded": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
        "distributed": {"sampler": DistributedSampler(data, 3, 1, seed=4)},
        "sequential": {},
    }
    return cls(data, BATCH, **every[kind], **more)


def session(daemon: Running) -> Any:
    with daemon.client("cli") as client:
        (row,) = client.ask("stats")["sessions"]
    return row


def planners() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "creel-planner"]


def same(ours: Any, theirs: Any, seed: int, stops: list[int]) -> None:
    """Compare epochs of both, each left after so many batches, or read to its end."""
    got: list[list[torch.Tensor]] = []
    for loader in (ours, theirs):
        torch.manual_seed(seed)
        batches = []
        for epoch, stop in enumerate(stops):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                batches.append(batch.clone())
                if i + 1 == stop:
                    break
        got.append(batches)
    assert len(got[0]) == len(got[1])
    assert all(map(torch.equal, *got))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "kind, workers", [*((kind, 0) for kind in KINDS), ("generator", 2), ("distributed", 2)]
)
def test_batches_are_torchs_while_the_planner_is_held_up(
    daemon: Running, rows: Any, kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, gate = EpochPlan.draw, threading.Event()

    def held(self: EpochPlan) -> None:
        assert gate.wait(120)
        draw(self)

    monkeypatch.setattr(EpochPlan, "draw", held)
    ours = loader(creel.DataLoader, rows, kind, num_workers=workers)
    try:
        same(ours, loader(DataLoader, rows, kind, num_workers=workers), 3, [0, 5, 0])
        assert planners()
        assert ours.stats()["direct_reads"] == 0
    finally:
        gate.set()
    until(lambda: not planners(), event="the planner ends")
    del daemon


@pytest.mark.usefixtures("small", "daemon")
@pytest.mark.parametrize("seed, kind", enumerate(KINDS))
def test_epochs_left_early_and_read_to_the_end_are_torchs(rows: Any, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stops = [int(s) for s in rng.integers(1, 2 * STEPS, 5)]
    ours = loader(creel.DataLoader, rows, kind)
    same(ours, loader(DataLoader, rows, kind), seed, stops)
    assert ours.stats()["direct_reads"] == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_told_while_nobody_pulls(daemon: Running, rows: Any, kind: str) -> None:
    ours = loader(creel.DataLoader, rows, kind)
    iterator = iter(ours)
    next(iterator)
    until(lambda: bool(session(daemon)["known"] == 2 * len(ours)), event="both epochs are told")
    until(lambda: not planners(), event="the planner ends")
    assert sum(1 for _ in iterator) == len(ours) - 1
    both = range(2 * len(ours), 3 * len(ours) + 1)
    for i, _ in enumerate(ours):
        if not i:  # a wrongly predicted second epoch is published again
            until(lambda: session(daemon)["known"] in both, event="the second epoch is told")
    assert ours.stats()["direct_reads"] == 0


@pytest.mark.usefixtures("small", "daemon")
@pytest.mark.parametrize("kind", KINDS[1:3])
def test_an_epoch_goes_on_where_it_was_saved(rows: Any, kind: str) -> None:
    first = loader(creel.DataLoader, rows, kind)
    iterator = iter(first)
    for _ in range(STEPS // 7):
        next(iterator)
    state = first.state_dict()
    want = [batch.clone() for batch in iterator]
    second = loader(creel.DataLoader, rows, kind)
    second.load_state_dict(state)
    got = [batch.clone() for batch in second]
    assert len(got) == len(want) > 0
    assert all(map(torch.equal, got, want))
    assert second.stats()["direct_reads"] == 0


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_first_batches_do_not_wait_for_the_plan(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 1 << 18
    path = tmp_path / "many"
    path.touch()
    os.truncate(path, n * NBYTES)
    data = creel.RecordDataset(path, torch.uint8, NBYTES, labels=np.arange(n))
    randperm, drawn = generators.randperm, threading.Event()

    def late(k: int, generator: torch.Generator) -> Any:
        assert drawn.wait(120)
        return randperm(k, generator)

    monkeypatch.setattr(generators, "randperm", late)
    ours = loader(creel.DataLoader, data, kind)
    torch.manual_seed(5)
    try:
        iterator = iter(ours)
        got = [next(iterator)[1].clone() for _ in range(500)]
    finally:
        drawn.set()
    torch.manual_seed(5)
    theirs = iter(loader(DataLoader, data, kind))
    assert all(torch.equal(mine, next(theirs)[1]) for mine in got)
    assert ours.stats()["direct_reads"] == 0


@pytest.mark.usefixtures("small", "daemon")
def test_a_loader_dropped_amid_its_plan_leaves_nothing(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, inside, go_on = EpochPlan.draw, threading.Event(), threading.Event()

    def slow(self: EpochPlan) -> None:
        inside.set()
        assert go_on.wait(120)
        draw(self)

    monkeypatch.setattr(EpochPlan, "draw", slow)
    ours = loader(creel.DataLoader, rows, "seeded")
    iterator = iter(ours)
    next(iterator)
    assert inside.wait(60)
    del iterator, ours
    go_on.set()
    until(lambda: not planners(), event="the planner ends")


@pytest.mark.usefixtures("small")
def test_a_daemon_that_dies_amid_the_plan_costs_no_batch(
    daemon: Running, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, inside, go_on = EpochPlan.draw, threading.Event(), threading.Event()

    def slow(self: EpochPlan) -> None:
        inside.set()
        assert go_on.wait(120)
        draw(self)

    monkeypatch.setattr(EpochPlan, "draw", slow)
    ours, theirs = loader(creel.DataLoader, rows, "seeded"), loader(DataLoader, rows, "seeded")
    torch.manual_seed(6)
    got = []
    for i, batch in enumerate(ours):
        got.append(batch.clone())
        if not i:
            assert inside.wait(60)
            daemon.signal(signal.SIGKILL)
            daemon.process.wait()
            go_on.set()
    torch.manual_seed(6)
    want = [*theirs]
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))
    until(lambda: not planners(), event="the planner ends")


@pytest.mark.usefixtures("small", "daemon")
def test_without_a_thread_the_trainer_tells_it_all(
    daemon: Running, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def scarce(self: threading.Thread) -> None:
        if self.name == "creel-planner":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    ours = loader(creel.DataLoader, rows, "generator")
    same(ours, loader(DataLoader, rows, "generator"), 2, [0, 40, 0])
    assert ours.stats()["direct_reads"] == 0
    assert session(daemon)["known"] >= 3 * len(ours)


_ENDS = """
import os, sys, torch, creel, warnings
warnings.simplefilter("ignore")  # of a fork amid threads
path, how = sys.argv[1:]
data = creel.RecordDataset(path, torch.uint8, 16)
loader = creel.DataLoader(data, 8, shuffle=True)
iterator = iter(loader)
next(iterator)
if how == "raises":
    raise SystemExit(3)
if how == "forks":
    pid = os.fork()
    if not pid:
        del iterator, loader
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    list(zip(range(100), iterator))
"""


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("ending", ["returns", "raises", "forks"])
def test_a_program_ends_amid_its_plan(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "many"
    path.touch()
    os.truncate(path, (1 << 21) * NBYTES)
    ended = Program(_ENDS, str(path), ending)
    assert ended.communicate() == ("", "")
    assert ended.returncode == (3 if ending == "raises" else 0)
