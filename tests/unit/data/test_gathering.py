"""Batches made of bytes alone equal torch's default collation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from binding_rig import bound, files, records
from numpy.typing import NDArray
from torch.utils.data import (
    ConcatDataset,
    Subset,
    default_collate,
)

import creel
from creel.cache.storage.source import Source
from creel.loader.data.binding.bind import Binding
from creel.loader.data.buffers import BufferPool
from creel.loader.data.datasets import RecordDataset
from testbed.same import same

pytestmark = pytest.mark.timeout(120)


def gathered(binding: Binding, indices: NDArray[np.int64]) -> Any:
    """Return a batch as creel makes it: rows of bytes, then `collate`."""
    gather = binding.gather()
    assert gather is not None
    source = Source(binding.manifest)
    ids, counts = binding.objects(indices)
    assert (counts == 1).all()
    rows = np.empty((len(ids), gather.nbytes), np.uint8)
    for row, i in zip(rows, ids, strict=True):
        row[:] = np.frombuffer(source.read(int(i)), np.uint8)
    return gather.collate(torch.from_numpy(rows.reshape(-1)), indices, BufferPool())


@pytest.mark.parametrize(
    "labels",
    [None, [1, 2, 3, 4, 5], [0.5] * 5, np.arange(10, dtype=np.int16).reshape(5, 2), torch.ones(5)],
    ids=lambda v: type(v).__name__,
)
def test_a_gather_is_default_collate(tmp_path: Path, labels: Any) -> None:
    a, b = records(tmp_path, "a", 5, labels=labels), records(tmp_path, "b", 5, labels=labels)
    tree: Any = creel.wrap(
        Subset(ConcatDataset([a, Subset(b, [4, 2, -1]), a]), [12, 5, 0, 7, -1, 3, 6])
    )
    indices = np.array([3, -1, 0, 0, 6, 2, 1, 4, 5])
    expected = default_collate([tree[int(i)] for i in indices])
    assert same(gathered(bound(tree), indices), expected)


def test_raw_files_of_one_size_gather(tmp_path: Path) -> None:
    a = files(tmp_path, "a", 5, nbytes=True)
    b = files(tmp_path, "b", 3, nbytes=[20, 20, 20])
    indices = np.array([7, 0, 3])
    tree: Any = ConcatDataset([a, b])
    assert same(gathered(bound(tree), indices), default_collate([tree[int(i)] for i in indices]))


def test_scalars_and_bfloat16_gather(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(range(16)))
    for dtype, shape in (("i4", ()), (torch.bfloat16, 2), ("?", (2, 2))):
        leaf = RecordDataset(tmp_path / "r", dtype, shape)
        expected = default_collate([leaf[3], leaf[1]])
        got = gathered(bound(leaf), np.array([3, 1]))
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
