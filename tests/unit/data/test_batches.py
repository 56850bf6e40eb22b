"""Samples read and made many at once equal samples made one by one."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.errors import ConfigError, SourceError
from creel.loader.data.binding.bind import bind
from creel.loader.data.buffers import BufferPool
from creel.loader.data.datasets.batches import rows_of, stacked, unstacked
from creel.loader.data.datasets.files import FileDataset
from creel.loader.data.datasets.records import RecordDataset

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_of_a_batch_is_the_cast_of_each_record(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, also for numbers that the new type cannot hold, and for odd lengths."""
    path, length, count = tmp_path / "r.bin", 37, 11
    bits = np.random.default_rng(1).integers(0, 256, count * length * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        bits &= 1
    bits.tofile(path)
    whole = torch.from_numpy(bits).view(dtype).view(count, length)
    for to in DTYPES:
        data = RecordDataset(path, dtype, length, to=to)
        expected = [row.clone().to(to).contiguous().view(torch.uint8).tolist() for row in whole]
        indices = np.arange(count)
        many = data.__getitems__(indices.tolist())
        binding = bind(data)
        gather = None if binding is None else binding.gather()
        assert gather is not None
        raw = torch.from_numpy(bits)
        batch = gather.collate(raw, indices, BufferPool())
        for rows_cast in ([data[i] for i in range(count)], many, batch):
            assert [row.dtype for row in rows_cast] == [to] * count
            assert [row.contiguous().view(torch.uint8).tolist() for row in rows_cast] == expected, (
                to
            )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_records_read_together_are_those_read_one_by_one(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for path, count in zip(paths, (40, 1, 25), strict=True):
        path.write_bytes(rng.bytes(16 + count * nbytes))
    data = RecordDataset(paths, dtype, shape, 16)
    for indices in ([3], [1, 2, 3, 9, 8, 7], [40, 39, 41, 40], rng.integers(-66, 66, 50).tolist()):
        got = data.__getitems__(indices)
        assert [(x.shape, x.dtype) for x in got] == [(torch.Size(shape), dtype)] * len(indices)
        for x, i in zip(got, indices, strict=True):
            assert (
                x.reshape(1, -1).view(torch.uint8).equal(data[i].reshape(1, -1).view(torch.uint8))
            )
    assert data.__getitems__([]) == []


def test_a_batch_opens_each_file_once_and_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        np.arange(100, dtype=np.int64).tofile(tmp_path / name)
    data = RecordDataset([tmp_path / "a", tmp_path / "b"], "i8", 1)
    opened: list[str] = []
    real = os.open

    def noted(path: str, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", noted)
    data.__getitems__([150, 3, 9, 4, 199, 5, 6])
    assert sorted(opened) == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_file_put_in_place_of_another_is_read_from_the_next_batch_on(tmp_path: Path) -> None:
    path = tmp_path / "r"
    np.zeros((10, 4), np.int64).tofile(path)
    data = RecordDataset(path, "i8", 4)
    kept = data.__getitems__(list(range(10)))
    np.ones((10, 4), np.int64).tofile(tmp_path / "new")
    (tmp_path / "new").rename(path)
    assert all((x == 1).all() for x in data.__getitems__(list(range(10))))
    assert all((x == 0).all() for x in kept)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: os.truncate(p, 12)])
def test_records_that_cannot_be_read_fail_as_they_do_alone(
    change: Any, count: int, tmp_path: Path
) -> None:
    path = tmp_path / "r"
    np.zeros((count, 4), np.int64).tofile(path)
    data = RecordDataset(path, "i8", 4)
    change(path)
    with pytest.raises(SourceError) as alone:
        data[count - 1]
    with pytest.raises(SourceError) as together:
        data.__getitems__([count - 1])
    assert str(together.value) == str(alone.value)


def test_a_record_file_that_grew_fails_as_it_does_alone(tmp_path: Path) -> None:
    """A record that is a whole file must have the file's length, or it is another one."""
    path = tmp_path / "r"
    np.zeros(4, np.int64).tofile(path)
    data = RecordDataset(path, "i8", 4)
    np.zeros(8, np.int64).tofile(path)
    with pytest.raises(SourceError, match="64 bytes"):
        data.__getitems__([0])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("empty", [True, False])
def test_a_file_read_directly_is_the_file_as_it_is_now(
    known: bool, empty: bool, tmp_path: Path
) -> None:
    """If its size was declared, another size is an error, as in the daemon."""
    path = tmp_path / "a b.raw"
    path.write_bytes(b"" if empty else b"old")
    data = FileDataset(tmp_path, nbytes=known)
    assert bytes(data[0].tolist()) == path.read_bytes()
    path.write_bytes(b"" if empty else b"new")
    assert bytes(data[0].tolist()) == path.read_bytes()
    path.write_bytes(b"longer")
    if known:
        with pytest.raises(SourceError, match="has 6 bytes"):
            data[0]
    else:
        assert bytes(data[0].tolist()) == b"longer"
    path.unlink()
    with pytest.raises(SourceError, match=r"a b\.raw"):
        data[0]


class Doubled(RecordDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 2


def test_a_persons_own_getitem_is_not_passed_by(tmp_path: Path) -> None:
    np.arange(20).tofile(tmp_path / "r")
    data = Doubled(tmp_path / "r", "i8", 2)
    assert [x.tolist() for x in data.__getitems__([4, 0])] == [[16, 18], [0, 2]]


def test_a_batch_transform_is_called_once_a_batch(tmp_path: Path) -> None:
    np.arange(20).tofile(tmp_path / "r")
    seen: list[torch.Size] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x

    data = RecordDataset(tmp_path / "r", "i8", 2, batch_transform=noting)
    loader = creel.DataLoader(data, 4, creel=False)
    assert [len(batch) for batch in loader] == [4, 4, 2]
    assert data[3].tolist() == [6, 7]
    assert [tuple(s) for s in seen] == [(4, 2), (4, 2), (2, 2), (1, 2)]


def test_both_kinds_of_transform_are_one_too_many(tmp_path: Path) -> None:
    np.arange(20).tofile(tmp_path / "r")
    with pytest.raises(ConfigError, match="not both"):
        RecordDataset(tmp_path / "r", "i8", 2, transform=torch.neg, batch_transform=torch.neg)
    with pytest.raises(ConfigError, match="batch_transform is a function"):
        RecordDataset(tmp_path / "r", "i8", 2, batch_transform=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="torch has no dtype"):
        RecordDataset(tmp_path / "r", "i8", 2, to="words")


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x[1:], lambda x: x.sum(), lambda x: (x, x[0]), lambda x: None],  # noqa: ARG005
)
def test_a_batch_transform_gives_a_row_for_each_sample(wrong: Any, tmp_path: Path) -> None:
    np.arange(30).tofile(tmp_path / "r")
    data = RecordDataset(tmp_path / "r", "i8", 2, batch_transform=wrong)
    with pytest.raises(ConfigError, match="batch_transform got 4 samples and gave"):
        data.__getitems__([0, 1, 2, 3])
    binding = bind(data)
    gather = None if binding is None else binding.gather()
    assert gather is not None
    with pytest.raises(ConfigError, match="batch_transform got 4 samples and gave"):
        gather.collate(torch.zeros(64, dtype=torch.uint8), np.arange(4), BufferPool())


def test_stacked_batches_have_memory_of_their_own() -> None:
    mine = torch.arange(12).view(4, 3)
    batch = stacked((mine, mine, {"a": mine[:1].expand(4, 3)}), 4, BufferPool())
    batch[0].zero_()
    batch[2]["a"][0].zero_()
    assert batch[1].tolist() == mine.tolist() == torch.arange(12).view(4, 3).tolist()
    assert batch[2]["a"][1:].tolist() == [[0, 1, 2]] * 3


def test_rows_are_tensors_of_their_own() -> None:
    for dtype, n in itertools.product((torch.int16, torch.bfloat16), (1, 3)):
        batch = torch.arange(n * 8).view(n, 2, 4).to(dtype)
        rows = list(rows_of(batch.reshape(n, -1).view(torch.uint8).numpy(), dtype, (2, 4)))
        assert [row.tolist() for row in rows] == batch.tolist()
        assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)
    assert unstacked((), 0) == []


@pytest.mark.parametrize("size", [3, 300])
def test_a_large_batch_is_cast_by_the_row(size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = torch.randint(0, 256, (size, 4000), dtype=torch.uint8)
        batch = stacked(rows.t().contiguous().t(), size, BufferPool())
    assert batch.is_contiguous()
    assert batch.equal(rows)
