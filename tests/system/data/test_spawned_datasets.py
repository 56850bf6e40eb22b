"""Datasets in spawned, not forked, workers: a worker has only what they pickle."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import creel
from creel.loader.data.datasets import (
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
    Transformed,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> int:
        return i * i


def as_is(sample: Any) -> Any:
    return sample


def listed(value: Any) -> Any:
    """Return a value with tensors as lists, so that `==` compares all of it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [listed(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_spawned_workers_read_every_kind_of_dataset(tmp_path: Path) -> None:
    for i, name in enumerate(("ant/1.png", "ant/2.jpg", "bee/3.png")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (9 * i, 99, 200)).save(tmp_path / "photos" / name)
    np.save(tmp_path / "r.npy", np.arange(12).reshape(3, 4))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "photos/ant/1.png", "1.png")
    every: Dataset[Any] = ConcatDataset(
        [
            ImageFolder(tmp_path / "photos", transform=np.asarray),
            FileDataset(tmp_path / "photos", "*/*.png", labels=[5, 6]),
            RecordDataset(tmp_path / "r.npy", labels=[1, 2, 3]),
            TarDataset(tmp_path / "a.tar"),
            Transformed(creel.wrap(Squares()), str),
        ]
    )
    loader = DataLoader(
        every, None, num_workers=1, multiprocessing_context="spawn", collate_fn=as_is
    )
    here = [every[i] for i in range(len(every))]  # type: ignore[arg-type]  # sized
    assert repr(listed(list(loader))) == repr(listed(here))
