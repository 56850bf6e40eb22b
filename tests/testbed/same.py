"""Whether two loaders give the same samples, and the requests to their storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

#: For tests that count the requests to a SlowFS.
needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="slowfs needs root and FUSE"
)


def same(a: Any, b: Any) -> bool:
    """Whether two samples or batches are equal, in types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def opened_by_epoch(
    opens: Callable[[], int], ours: Iterable[Any], theirs: Iterable[Any], epochs: int = 3
) -> list[int]:
    """Return the opens in each epoch of `ours`, whose batches must equal those of `theirs`."""
    counts = []
    for _ in range(epochs):
        before = opens()
        batches = list(ours)
        counts.append(opens() - before)
        assert same(batches, list(theirs))
    return counts


def check_in_torch(dataset: Dataset[Any]) -> None:
    """Compare batches without workers and with two forked ones; tests/system spawns them."""
    indices = list(range(len(dataset)))  # type: ignore[arg-type]
    expected = [default_collate([dataset[i] for i in indices[k : k + 3]]) for k in indices[::3]]
    assert same(list(DataLoader(dataset, 3)), expected)
    loader = DataLoader(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert same(list(loader), expected)
