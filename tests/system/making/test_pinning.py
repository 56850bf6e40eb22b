"""Batches in pinned memory, and their copies on a CUDA device, equal torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import creel
from creel.loader.making.transport.pinning import Pinning

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECORDS, NBYTES = 600, 40_000


def halved(record: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"half": record // 2, "sum": record.sum()}


def of_records(path: Path, **options: Any) -> Dataset[Any]:
    return creel.RecordDataset(path, torch.uint8, (NBYTES,), **options)


DATASETS: dict[str, Callable[[Path], Dataset[Any]]] = {
    "records": of_records,
    "labelled": lambda path: of_records(path, labels=list(range(RECORDS))),
    "converted": lambda path: of_records(path, to=torch.float32),
    "transformed": lambda path: of_records(path, transform=halved),
    "in batches": lambda path: of_records(path, batch_transform=lambda batch: batch // 2),
}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("batch", [8, 128])  # 128: threads copy ahead of use
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", DATASETS)
def test_batches_on_the_device_are_torchs(
    tmp_path: Path, kind: str, workers: int, batch: int
) -> None:
    """Each batch is released while its copy is in progress: its memory must not be reused early."""
    path = tmp_path / "records.bin"
    np.random.default_rng(0).integers(0, 256, RECORDS * NBYTES, np.uint8).tofile(path)
    dataset = DATASETS[kind](path)
    torch.manual_seed(0)
    orders = [torch.randperm(RECORDS).tolist() for _ in range(3)]
    expected = [
        default_collate([dataset[i] for i in order[at : at + batch]])
        for order in orders
        for at in range(0, RECORDS, batch)
    ]
    order: list[int] = []
    loader = creel.DataLoader(dataset, batch, sampler=order, num_workers=workers, pin_memory=True)
    batches: list[Any] = []
    for order[:] in orders:
        for data in loader:
            assert all(t.is_pinned() for t in tensors(data))
            batches.append(on_device(data))
            del data
    torch.cuda.synchronize()
    assert len(batches) == len(expected)
    for ours, other in zip(batches, expected, strict=True):
        pairs = list(zip(tensors(ours), tensors(other), strict=True))
        assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in pairs)


def tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    return [
        t for part in (data.values() if isinstance(data, dict) else data) for t in tensors(part)
    ]


def on_device(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to("cuda", non_blocking=True)
    if isinstance(data, dict):
        return {key: on_device(part) for key, part in data.items()}
    return [on_device(part) for part in data]


def test_an_iterator_that_leaves_the_kind_open_pins_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older torch names no device unless it is given one."""
    accelerator = SimpleNamespace(current_device_index=lambda: 3, set_device_index=print)
    monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    iterator: Any = SimpleNamespace(_pin_memory=True, _pin_memory_device=None)
    assert Pinning.of(iterator) == Pinning(None, 3)
    assert Pinning.of(SimpleNamespace(_pin_memory=False, _pin_memory_device=None)) is None  # type: ignore[arg-type]


class Marking(Pinning):
    """Marks what it would pin, for a machine without an accelerator."""

    def use_device(self) -> None:
        pass

    def pin(self, data: Any) -> Any:
        return data, "pinned"


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> int:
        if i == 7:
            raise KeyError(i)
        return i


@pytest.mark.parametrize("workers", ["own", "shared"])
def test_the_pinning_thread_pins_each_batch_and_passes_errors_on(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared workers, the first batches were joined of parts before they are pinned."""
    monkeypatch.setattr(Pinning, "of", lambda _: Marking(None, 0))
    loader = creel.DataLoader(Failing(), 3, num_workers=2, workers=workers, creel=False)
    for _ in range(2):  # the first iterator is left early
        batches: Any = iter(loader)
        assert [(batch.tolist(), mark) for batch, mark in (next(batches), next(batches))] == [
            ([0, 1, 2], "pinned"),
            ([3, 4, 5], "pinned"),
        ]
    with pytest.raises(KeyError):
        next(batches)
    assert next(batches)[0].tolist() == [9, 10, 11]
