"""TokenDataset: the indexed tokens of Megatron and NeMo, a `.bin` with the tokens and an `.idx`."""

from __future__ import annotations

import errno
import operator
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.memory.memfd import Descriptor
from creel.errors import ConfigError, NotFoundError
from creel.loader.data.datasets.base import position
from creel.policies.arrays import Ints
from creel.system.transfers import transfer

#: Before the arrays of an `.idx`: magic, version, type of the tokens, numbers of sequences and of
#: documents (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`).
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


class _TokenIndex(NamedTuple):
    """What an `.idx` says: the type of tokens, and of each document its tokens and first byte."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    starts: Ints


class TokenDataset(Dataset[torch.Tensor]):
    """Sample i is document i of `prefix`.bin, or with `length` the i-th stretch of all documents.

    Each sample is a tensor of int64 (of its own type, where tokens are no integers). Documents are
    the sequences of the `.idx`, as in Megatron's `IndexedDataset`.

    creel.DataLoader has what coming batches need read into the page cache, in their order.

    Args:
        prefix: the path of both files, without `.bin` and `.idx`.
        length: tokens of a sample; the documents are then one behind the other. None: a sample is a
            document. What remains at the end is left out.
        overlap: tokens that a sample has in common with the one before. Megatron's `GPTDataset`
            with sequences of n tokens has `length=n + 1, overlap=1`.
        documents: numbers of the documents to read, in their order, each as often as it is there.
            None: all, in the order of the file. With those of a `GPTDataset`
            (`gpt.document_index`), sample `gpt.shuffle_index[i]` has the tokens of `gpt[i]`.

    Raises:
        ConfigError: the `.idx` is none, or does not fit the `.bin`; or a number is out of range.
        NotFoundError: a file is missing.
    """

    _file: Descriptor | None = None

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        length: int | None = None,
        *,
        overlap: int = 0,
        documents: Sequence[int] | Ints | None = None,
    ) -> None:
        prefix = os.path.abspath(prefix)  # noqa: PTH100  a symbolic link stays one
        self._path = f"{prefix}.bin"
        index = _read_index(Path(f"{prefix}.idx"), Path(self._path))
        self.dtype = index.dtype
        self._lengths, self._starts = index.lengths, index.starts
        if documents is not None:
            at = np.asarray(documents, np.int64)
            if at.ndim != 1 or (at.size and not 0 <= at.min() <= at.max() < len(index.lengths)):
                raise ConfigError(f"documents: numbers from 0 to {len(index.lengths) - 1}")
            self._lengths, self._starts = index.lengths[at], index.starts[at]
        self._size = len(self._lengths)
        self._stretch = None if length is None else (operator.index(length), overlap)
        if length is not None:
            if not 0 <= operator.index(overlap) < length:
                raise ConfigError(f"samples of {length} tokens cannot have {overlap} in common")
            self._ends = np.cumsum(self._lengths, dtype=np.int64)
            tokens = int(self._ends[-1]) if self._size else 0
            self._size = max(tokens - overlap, 0) // (length - overlap)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        pieces = list(self._pieces(position(index, self._size)))
        out = np.empty(sum(count for _, count in pieces), self.dtype)
        at = 0
        for offset, count in pieces:
            self._read(offset, out[at : at + count])
            at += count
        return torch.from_numpy(out if self.dtype.kind == "f" else out.astype(np.int64))

    def ranges(self, index: int) -> list[tuple[str, int, int]]:
        """Return (path, offset, nbytes) of what sample `index` reads."""
        size = self.dtype.itemsize
        pieces = self._pieces(position(index, self._size))
        return [(self._path, offset, count * size) for offset, count in pieces]

    def _pieces(self, i: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, tokens) of the parts of the file that sample i consists of."""
        if self._stretch is None:
            yield int(self._starts[i]), int(self._lengths[i])
            return
        length, overlap = self._stretch
        first = i * (length - overlap)
        last = first + length
        document = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            end = int(self._ends[document])
            begin = end - int(self._lengths[document])
            stop = min(end, last)
            yield int(self._starts[document]) + (first - begin) * self.dtype.itemsize, stop - first
            first, document = stop, document + 1

    def _read(self, offset: int, out: NDArray[Any]) -> None:
        """Fill `out` from the file; not from a mapping, in which an error ends the process."""
        file = self._file
        if file is None:
            file = self._file = Descriptor(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
        if transfer(os.preadv, file.fd, [out.view(np.uint8)], offset) < out.nbytes:
            raise OSError(errno.EIO, "the file has been cut", self._path)

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k != "_file"}


def _read_index(path: Path, tokens: Path) -> _TokenIndex:
    """Read an `.idx`, and check that the `.bin` has all that it names."""
    try:
        with path.open("rb") as f:
            header = f.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise ConfigError(f"{path} is cut, or no index of tokens")
            magic, version, code, count, _ = _HEADER.unpack(header)
            if magic != _MAGIC or version != _VERSION or code not in _DTYPES:
                raise ConfigError(f"{path} is no index of tokens that creel knows")
            if path.stat().st_size < _HEADER.size + 12 * count:
                raise ConfigError(f"{path} is cut: it has {count} sequences")
            lengths, starts = np.fromfile(f, "<i4", count), np.fromfile(f, "<i8", count)
        nbytes = tokens.stat().st_size
    except FileNotFoundError as e:
        raise NotFoundError(f"{e.filename}: no such file; give the path without .bin") from None
    dtype = np.dtype("<" + _DTYPES[code])
    if count and (min(lengths.min(), starts.min()) < 0):
        raise ConfigError(f"{path} has negative numbers")
    if count and int((starts + lengths.astype(np.int64) * dtype.itemsize).max()) > nbytes:
        raise ConfigError(f"{tokens} has {nbytes} bytes, fewer than {path} says: is it cut?")
    return _TokenIndex(dtype, lengths, starts)
