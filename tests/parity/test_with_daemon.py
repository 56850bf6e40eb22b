"""With a daemon batches are torch's too: by rows, by samples, resumed, and when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.loader import feed
from creel.loader.files import FileDataset
from creel.loader.records import RecordDataset
from kit import unique_name

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def embedded() -> Iterator[dict[str, Any]]:
    """A daemon that the first loader starts, gone afterwards."""
    name = unique_name()
    yield {"daemon.name": name, "memory.budget": "64MB", "daemon.linger_s": "0.2"}
    client = feed._clients.pop((os.getpid(), name), None)
    if client is not None:
        client.close()


#: One for all tests that leave it alone, and one for each that does not.
shared = pytest.fixture(scope="module")(embedded)
options = pytest.fixture(embedded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rng.integers(0, 255, (500, 96), dtype=np.uint8).tofile(path / "records.bin")
    for i in range(60):
        (path / f"{i:03}.raw").write_bytes(rng.bytes(100 + i))
    return path


def dataset(kind: str, folder: Path) -> Any:
    if kind == "rows":
        return RecordDataset(folder / "records.bin", torch.uint8, 96)
    if kind == "labelled rows":
        return RecordDataset(folder / "records.bin", torch.float32, (4, 6), labels=range(500))
    if kind == "transformed":
        return RecordDataset(folder / "records.bin", torch.uint8, 96, transform=noisy)
    return FileDataset(folder, "*.raw", decode=bytes)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x.float() + torch.rand(1)


def run(cls: Any, data: Any, kind: str, workers: int, epochs: int = 3, **more: Any) -> list[Any]:
    torch.manual_seed(2)
    collate = list if kind == "files" else None
    loader = cls(data, 7, True, num_workers=workers, collate_fn=collate, **more)
    out = []
    for epoch in range(epochs):
        for i, batch in enumerate(loader):
            out.append(repr(batch))
            if epoch == 1 and i == 4:
                break
    return out


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "labelled rows", "transformed", "files"])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_torchs(
    kind: str, workers: int, persistent: bool, folder: Path, shared: dict[str, Any]
) -> None:
    more = {"persistent_workers": persistent and workers > 0}
    data = dataset(kind, folder)
    theirs = run(torch.utils.data.DataLoader, data, kind, workers, **more)
    assert run(creel.DataLoader, data, kind, workers, creel=shared, **more) == theirs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "files"])
def test_a_killed_daemon_costs_no_batch(
    kind: str, workers: int, folder: Path, options: dict[str, Any]
) -> None:
    data = dataset(kind, folder)
    collate = list if kind == "files" else None
    loader = creel.DataLoader(data, 7, num_workers=workers, collate_fn=collate, creel=options)
    theirs = [repr(b) for b in torch.utils.data.DataLoader(data, 7, collate_fn=collate)]
    ours = []
    for i, batch in enumerate(loader):
        ours.append(repr(batch))
        if i == 2:
            client = feed._clients[os.getpid(), options["daemon.name"]]
            assert client is not None
            os.kill(client.daemon_pid, signal.SIGKILL)
    assert ours == theirs
    assert [repr(b) for b in loader] == theirs


def test_a_resumed_run_reads_on_where_it_was(folder: Path, shared: dict[str, Any]) -> None:
    data = dataset("rows", folder)

    def make(workers: int) -> Any:
        generator = torch.Generator().manual_seed(4)
        return creel.DataLoader(
            data, 7, True, num_workers=workers, generator=generator, creel=shared
        )

    straight = [repr(b) for _ in range(2) for b in make(0)][:72]
    whole = make(2)
    iterator = iter(whole)
    head = [repr(next(iterator)) for _ in range(30)]
    later = make(0)
    later.load_state_dict(whole.state_dict())
    assert head + [repr(b) for b in later] == straight
