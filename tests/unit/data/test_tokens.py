"""TokenDataset against numpy: documents and stretches of Megatron's indexed tokens."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.errors import ConfigError, NotFoundError
from kit import seeds
from testbed.same import check_in_torch, same
from testbed.tokens import write_tokens

DTYPES = ["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"]


def documents(seed: int, dtype: str = "u2") -> list[Any]:
    """Return some documents, of which one is empty."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(1, 40, 9).tolist(), 0, 7]
    return [rng.integers(0, 100, size).astype(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_is_a_document(tmp_path: Path, dtype: str) -> None:
    written = documents(0, dtype)
    dataset = creel.TokenDataset(write_tokens(tmp_path / "a.b", written))
    assert len(dataset) == len(written)
    for i in range(-len(written), len(written)):
        expected = written[i] if dtype[0] == "f" else written[i].astype(np.int64)
        assert same(dataset[i], torch.from_numpy(expected))
    with pytest.raises(IndexError):
        dataset[len(written)]


@pytest.mark.parametrize("seed", seeds(10))
def test_stretches_are_those_of_all_documents_in_their_order(tmp_path: Path, seed: int) -> None:
    rng, written = np.random.default_rng(seed), documents(seed)
    order = rng.integers(0, len(written), 20)
    tokens = np.concatenate([written[i] for i in order]).astype(np.int64)
    length = int(rng.integers(1, 50))
    overlap = int(rng.integers(0, length))
    prefix = write_tokens(tmp_path / "a", written)
    dataset = creel.TokenDataset(prefix, length, overlap=overlap, documents=order)
    starts = range(0, len(tokens) - length + 1, length - overlap)
    assert len(dataset) == len(starts)
    for i, start in enumerate(starts):
        assert same(dataset[i], torch.from_numpy(tokens[start : start + length]))
    if not overlap:
        every = creel.TokenDataset(prefix, length)
        assert same(every[0], torch.from_numpy(np.concatenate(written)[:length].astype(np.int64)))


@pytest.mark.parametrize("seed", seeds(10))
def test_ranges_are_the_bytes_of_a_sample(tmp_path: Path, seed: int) -> None:
    written = documents(seed)
    prefix = write_tokens(tmp_path / "a", written)
    for dataset in (
        creel.TokenDataset(prefix),
        creel.TokenDataset(prefix, 16, documents=range(len(written))[::-1]),
    ):
        for i in range(len(dataset)):
            parts = [
                Path(path).read_bytes()[offset : offset + nbytes]
                for path, offset, nbytes in dataset.ranges(i)
            ]
            tokens = np.frombuffer(b"".join(parts), np.uint16).astype(np.int64)
            assert same(dataset[i], torch.from_numpy(tokens))


def test_workers_have_them_too(tmp_path: Path) -> None:
    written = [np.arange(i, i + 5, dtype=np.int32) for i in range(9)]
    dataset = creel.TokenDataset(write_tokens(tmp_path / "a", written))
    check_in_torch(dataset)
    copied = pickle.loads(pickle.dumps(dataset))
    assert same(copied[3], dataset[3])


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", documents(0))
    idx, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    with pytest.raises(NotFoundError, match=r"without \.bin"):
        creel.TokenDataset(tokens)
    for options in ({"length": 0}, {"length": 4, "overlap": 4}, {"documents": [99]}):
        with pytest.raises(ConfigError):
            creel.TokenDataset(prefix, **options)
    whole = idx.read_bytes()
    for wrong in (b"", whole[:20], whole[:60], b"x" + whole[1:]):
        idx.write_bytes(wrong)
        with pytest.raises(ConfigError):
            creel.TokenDataset(prefix)
    idx.write_bytes(whole)
    dataset = creel.TokenDataset(prefix)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(OSError, match="cut"):
        dataset[len(dataset) - 1]
    with pytest.raises(ConfigError, match="cut"):
        creel.TokenDataset(prefix)
