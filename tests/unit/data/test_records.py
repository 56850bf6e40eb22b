"""RecordDataset against numpy: rows, .npy files, labels."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import creel
from creel.errors import ConfigError
from creel.loader.data.datasets import (
    RecordDataset,
)
from creel.loader.data.datasets.columns import Labels
from testbed.same import check_in_torch, same

pytestmark = pytest.mark.timeout(120)


DTYPES = ["f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "?", "c8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_records_are_rows_of_the_file(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (7, *shape)).astype(dtype)
    (tmp_path / "r.bin").write_bytes(b"head" + rows.tobytes())
    dataset = RecordDataset(tmp_path / "r.bin", dtype, shape, offset=4)
    assert len(dataset) == 7
    for i in range(-7, 7):
        assert same(dataset[i], torch.from_numpy(rows.copy())[i])
    with pytest.raises(IndexError):
        dataset[7]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_files_are_np_load(tmp_path: Path, version: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 4, 2))
    with (tmp_path / "a.npy").open("wb") as f:
        np.lib.format.write_array(f, rows[:5], version)
    np.save(tmp_path / "b.npy", rows[5:])
    dataset = RecordDataset([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert dataset.shape == (4, 2)
    assert same(torch.stack([dataset[i] for i in range(9)]), torch.from_numpy(rows))
    check_in_torch(dataset)


def test_a_row_of_tokens_is_cut_into_sequences(tmp_path: Path) -> None:
    tokens = np.arange(24, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    dataset = RecordDataset(tmp_path / "t.npy", shape=np.int64(8))
    assert [row.tolist() for row in map(dataset.__getitem__, range(3))] == tokens.reshape(
        3, 8
    ).tolist()


def test_bfloat16_records(tmp_path: Path) -> None:
    rows = torch.randn(4, 6).to(torch.bfloat16)
    (tmp_path / "r").write_bytes(rows.view(torch.int16).numpy().tobytes())
    for dtype in ("bfloat16", torch.bfloat16):
        dataset = RecordDataset(tmp_path / "r", dtype, 6)
        assert same(torch.stack([dataset[i] for i in range(4)]), rows)
    np.save(tmp_path / "r.npy", rows.view(torch.int16).numpy().view("V2"))
    assert same(RecordDataset(tmp_path / "r.npy", torch.bfloat16)[2], rows[2])


def test_records_with_labels_and_transform(tmp_path: Path) -> None:
    np.arange(12, dtype="f4").tofile(tmp_path / "r")
    labels = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int16)
    dataset = RecordDataset(tmp_path / "r", "f4", 4, labels=labels, transform=operator.neg)
    assert same(dataset[1], (-torch.arange(4.0, 8.0), labels[1]))
    dataset[1][1].fill_(0)
    assert same(dataset[1][1], labels[1])
    check_in_torch(dataset)


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        [True, False, True],
        [0.5, 1.5, 2.5],
        np.array([3, 1, 2], np.int16),
        np.array([0.5, 1, 2], np.float32),
        np.arange(6).reshape(3, 2),
        torch.tensor([1.0, 2, 3], dtype=torch.bfloat16),
        torch.arange(6).reshape(3, 2),
        (1, 2, 3),
    ],
    ids=str,
)
def test_labels_collate_as_torch_would(values: Any) -> None:
    labels = Labels(values, 3)
    at = np.array([2, 0, 0, 1])
    assert labels.kind is not None
    assert same(default_collate([labels[i] for i in at]), default_collate([values[i] for i in at]))
    assert same(labels.collated(at), default_collate([values[i] for i in at]))


@pytest.mark.parametrize("values", [["a", "b"], [(1, 2), (3, 4)], [1, 2.5], [2**70, 1]], ids=str)
def test_other_labels_are_kept_as_they_are(values: list[Any]) -> None:
    labels = Labels(values, 2)
    assert labels.kind is None
    assert [labels[0], labels[1]] == values
    assert [type(labels[0]), type(labels[1])] == [type(v) for v in values]


def test_an_npy_says_itself_where_its_rows_begin(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
    with pytest.raises(ConfigError, match=r"rows\.npy has a header that says where its rows begin"):
        RecordDataset(tmp_path / "rows.npy", offset=8)


def test_a_shape_or_offset_that_is_no_number_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(16))
    with pytest.raises(ConfigError, match="shape is '8': give whole numbers"):
        creel.RecordDataset(tmp_path / "r", torch.uint8, "8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offset is '4': give the bytes before"):
        creel.RecordDataset(tmp_path / "r", torch.uint8, 8, "4")  # type: ignore[arg-type]
