"""RecordDataset: records of fixed size in large binary or .npy files."""

from __future__ import annotations

import io
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from creel.cache.storage.lookup import read_range, status_of
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.store import Run, read_runs
from creel.cache.storage.uris import absolute, scheme_of, several
from creel.errors import ConfigError
from creel.loader.data.buffers import BufferPool
from creel.loader.data.datasets.base import Raw, Sample, check_callable, each, position
from creel.loader.data.datasets.batches import MAX_ROWS_NBYTES, cast, numbers, rows_cast, unstacked
from creel.loader.data.datasets.columns import Labelled
from creel.loader.data.datasets.mapped import MappedFiles
from creel.loader.data.reading.observer import take_rows
from creel.policies.arrays import Ints

T = TypeVar("T")

#: Longer .npy headers belong to structured types, which no tensor can hold.
_HEADER_NBYTES = 1 << 16


@dataclass(frozen=True)
class _RecordRange:
    """`count` consecutive records in one file, from byte `offset` on."""

    path: str
    offset: int
    count: int


@dataclass(frozen=True)
class _Npy:
    """The header of a .npy file; its `shape[0]` rows begin at byte `offset`."""

    offset: int
    dtype: torch.dtype | None
    itemsize: int
    shape: tuple[int, ...]


class RecordDataset(Labelled):
    """Sample i is record i of a file (or of several files in order) as a tensor.

    Args:
        path: a binary or .npy file, or a list of them, read as one.
        dtype: of the records (torch's or numpy's, or a name, also "bfloat16"). A .npy has its own.
        shape: of one record, an int for one dimension. Default for a .npy: that of its rows. With a
            shape, a .npy is cut into such records regardless of its own shape (a long row of tokens
            into sequences).
        offset: bytes before the first record of each file. Not for a .npy, whose header has it.
        labels: one per record, copied; samples are then (record, label). Assign `dataset.labels` to
            change them.
        to: the dtype that samples have, cast as by `record.to(to)`; files and cache keep `dtype`.
        transform: from a record (without its label) to a sample.
        batch_transform: instead of `transform`, from a batch of records, (n, *shape), to one with
            as many rows: a tensor or sequence of rows, or a tuple or dict of these. Sample i is row
            i. It is called once per batch, also by torch's DataLoader, and in a worker if there are
            any; for `dataset[i]`, and below torch's ConcatDataset, with a batch of one.
        storage_options: of the client that reads remote files, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides.

    Both transforms may change their input in place.

    Raises:
        ConfigError: a file whose size is not a multiple of the record's, a .npy not in C order, a
            type that no tensor can have, or both kinds of transform.
        NotFoundError: a missing file.
    """

    volatile = (*Labelled.volatile, "_buffers", "_mapped")
    _buffers: BufferPool | None = None
    _mapped: MappedFiles | None = None

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        dtype: torch.dtype | DTypeLike | None = None,
        shape: SupportsIndex | Sequence[int] | None = None,
        offset: int = 0,
        *,
        labels: object = None,
        to: torch.dtype | DTypeLike | None = None,
        transform: Callable[[Sample], Sample] | None = None,
        batch_transform: Callable[[torch.Tensor], Any] | None = None,
        storage_options: Options = None,
    ) -> None:
        self.storage_options = storage_options
        paths = [absolute(p) for p in several(path)]
        if not paths:
            raise ConfigError("a RecordDataset needs at least one file")
        wanted = None if dtype is None else torch_dtype(dtype)
        want = None if shape is None else _shape(shape)
        _check_offset(offset)
        status = each(lambda p: status_of(p, storage_options), paths)
        sizes = [size for size, _ in status]
        self._pins = [pin for _, pin in status]  # of each file: its version, or None
        headers = each(
            lambda file: _npy(*file, storage_options) if file[0].endswith(".npy") else None,
            list(zip(paths, sizes, strict=True)),
        )
        both = list(zip(paths, headers, strict=True))
        self.dtype = _same(paths, [_dtype_of(p, h, wanted) for p, h in both])
        self.shape = _same(paths, [_shape_of(p, h, want) for p, h in both])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize  # of a record
        #: Where the records of each file lie.
        self._runs = [
            _range_of(p, header, size, offset, self.nbytes)
            for (p, header), size in zip(both, sizes, strict=True)
        ]
        #: One past the last record of each run.
        self._ends = np.cumsum([run.count for run in self._runs])
        self._size = int(self._ends[-1])
        if not self._size:
            raise ConfigError(f"{paths[0]} holds no records")
        self.labels = labels
        check_callable(transform=transform, batch_transform=batch_transform)
        if transform is not None and batch_transform is not None:
            raise ConfigError("give transform= or batch_transform=, not both")
        self.to = None if to is None else torch_dtype(to)
        self.transform = transform
        self.batch_transform = batch_transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        i = position(index, self._size)
        sample = self._tensor(i).view(self.dtype).reshape(self.shape)
        if self.to is not None:
            sample = sample.to(self.to)
        if self.transform is not None:
            sample = self.transform(sample)
        elif self.batch_transform is not None:
            sample = unstacked(self.batch_transform(sample[None]), 1)[0]
        return sample if self.labels is None else (sample, self.labels[i])

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return [dataset[i] for i in indices], read together, with one batch_transform call."""
        if type(self).__getitem__ is not RecordDataset.__getitem__:  # overridden by a subclass
            return [self[i] for i in indices]
        ids = self._ids(indices)
        samples = self._samples(ids)
        if self.labels is None:
            return samples
        return [(sample, self.labels[i]) for sample, i in zip(samples, ids.tolist(), strict=True)]

    def _ids(self, indices: Sequence[int]) -> Ints:
        """Return (n,) numbers of records, none negative. Raises what `position` raises."""
        try:
            wide = np.asarray(indices)
        except (TypeError, ValueError):  # not a list of numbers: `position` raises the error
            wide = np.empty(0)
        if wide.ndim == 1 and wide.dtype.kind == "i" and len(wide):
            wide = wide.astype(np.int64, copy=False)
            inside = wide.view(np.uint64) < self._size  # negative ones are huge when unsigned
            if np.count_nonzero(inside) == len(wide):
                return wide
        return np.array([position(i, self._size) for i in indices], np.int64)

    def _samples(self, ids: Ints) -> list[Sample]:
        """Return samples without labels, read at most `MAX_ROWS_NBYTES` at a time."""
        if self.batch_transform is not None and len(ids):
            batch = cast(self._numbers(ids), self.to)
            return unstacked(self.batch_transform(batch), len(ids))
        samples: list[Sample] = []
        step = max(MAX_ROWS_NBYTES // self.nbytes, 1)
        for start in range(0, len(ids), step):
            # A row's tensor is made when it is transformed and gone when the next is made, whose
            # objects then lie in the processor's cache.
            rows = self._rows(ids[start : start + step])
            samples += rows if self.transform is None else map(self.transform, rows)
        return samples

    def _rows(self, ids: Ints) -> Iterator[torch.Tensor]:
        """Yield records in the dtype of samples; all have been read when this returns."""
        rows = self._pool().array(len(ids) * self.nbytes).reshape(-1, self.nbytes)
        take_rows(self, ids, rows, self._read_rows)
        return rows_cast(rows, self.dtype, self.shape, self.to, self._pool())

    def _numbers(self, ids: Ints) -> torch.Tensor:
        """Return records as (n, *shape) of the files' dtype, in memory of their own."""
        rows = self._pool()(len(ids) * self.nbytes)
        take_rows(self, ids, rows.numpy().reshape(-1, self.nbytes), self._read_rows)
        return numbers(rows, len(ids), self.dtype, self.shape)

    def _pool(self) -> BufferPool:
        if self._buffers is None:
            self._buffers = BufferPool(MAX_ROWS_NBYTES)
        return self._buffers

    def _read_rows(self, ids: Ints, out: NDArray[np.uint8]) -> None:
        """Fill `out`, (n, nbytes), from the source, opening each file once per batch.

        The file now at the path is read: a mapping of a replaced file is not used.
        """
        if len(self._runs) == 1:
            parts = [(0, np.arange(len(ids)))]
        else:
            which = np.searchsorted(self._ends, ids, side="right")
            parts = [(k, np.flatnonzero(which == k)) for k in np.unique(which).tolist()]
        for number, where in parts:
            run = self._runs[number]
            first = int(self._ends[number]) - run.count
            if not self._read_run(run, ids[where] - first, out, where):
                for at in where.tolist():  # with retries, or an error that names the path
                    data = self._read_direct(int(ids[at]))
                    out[at] = np.frombuffer(data, np.uint8)

    def _read_run(
        self, run: _RecordRange, records: Ints, out: NDArray[np.uint8], rows: Ints
    ) -> bool:
        """Read records of a local file to rows of `out`, adjacent ones in one read.

        False on failure: these rows are then undefined.

        Args:
            records: (k,) numbers of records in the file.
            out: (n, nbytes), contiguous.
            rows: (k,) rows of `out` to fill.
        """
        if scheme_of(run.path) or (run.count == 1 and not run.offset):
            return False  # `Source` must check the size of a whole-file object
        if self._mapped is None:
            self._mapped = MappedFiles()
        offsets = run.offset + records * self.nbytes
        scattered = not (records[1:] - records[:-1] == 1).any()
        if scattered and self._mapped.read(run.path, offsets, out, rows):
            return True
        view = memoryview(out.data).cast("B")
        try:
            fd = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            waited = read_runs(fd, _runs(offsets, rows * self.nbytes, self.nbytes, view))
            if scattered:
                self._mapped.saw(run.path, fd, cached=not waited)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _build_manifest(self) -> Manifest:
        return Manifest.of_runs(
            [run.path for run in self._runs],
            np.array([run.offset for run in self._runs], np.int64),
            np.full(len(self._runs), self.nbytes, np.int64),
            np.array([run.count for run in self._runs], np.int64),
        ).pinned(enumerate(self._pins))

    def raw(self) -> Raw | None:
        if type(self) is not RecordDataset:
            return None
        kind = None if self.labels is None else self.labels.kind
        if self.labels is not None and kind is None:
            return None
        return Raw(
            self.nbytes, self.dtype, self.shape, kind, self.to, self.transform, self.batch_transform
        )


def _runs(offsets: Ints, begins: Ints, nbytes: int, view: memoryview) -> list[Run]:
    """Return reads of records at `offsets` into places in `view`, adjacent ones together."""
    neighbours = (np.diff(offsets) == nbytes) & (np.diff(begins) == nbytes)
    first = np.append(0, np.flatnonzero(~neighbours) + 1)
    length = np.diff(first, append=len(offsets)) * nbytes
    runs = zip(offsets[first].tolist(), begins[first].tolist(), length.tolist(), strict=True)
    return [(o, n, [view[b : b + n]]) for o, b, n in runs]


def torch_dtype(dtype: torch.dtype | DTypeLike) -> torch.dtype:
    """Return the torch type with the same bytes.

    >>> torch_dtype("bfloat16"), torch_dtype(np.uint16)
    (torch.bfloat16, torch.uint16)

    Raises:
        ConfigError: there is none (text, objects, structures, big-endian numbers).
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError) as e:
        # numpy has no bfloat16; its names come first, since its "float" has 64 bits
        torch_type = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if isinstance(torch_type, torch.dtype):
            return torch_type
        raise ConfigError(f"torch has no dtype for {dtype!r}") from e


def _check_offset(offset: object) -> None:
    if not isinstance(offset, SupportsIndex) or operator.index(offset) < 0:
        raise ConfigError(
            f"offset is {offset!r}: give the bytes before the first record, 0 or more"
        )


def _shape(shape: SupportsIndex | Sequence[int]) -> tuple[int, ...]:
    items = (shape,) if isinstance(shape, SupportsIndex) else shape
    try:
        full = tuple(operator.index(n) for n in items)
    except TypeError:
        raise ConfigError(f"shape is {shape!r}: give whole numbers, as in shape=(3, 4)") from None
    if any(n <= 0 for n in full):
        raise ConfigError(f"shape is {full}: a record has at least one item in each dimension")
    return full


def _dtype_of(path: str, header: _Npy | None, wanted: torch.dtype | None) -> torch.dtype:
    own = wanted if header is None else header.dtype
    if header is not None and own is None and wanted is not None:
        # .npy files store bfloat16 and similar types as plain bytes ("|V2")
        own = wanted if wanted.itemsize == header.itemsize else None
    if own is None:
        raise ConfigError(f"{path} does not say of what type its numbers are: give dtype=")
    if wanted is not None and own != wanted:
        raise ConfigError(f"{path} holds {own}, not {wanted}")
    return own


def _shape_of(path: str, header: _Npy | None, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    if wanted is None:
        own = () if header is None else _shape(header.shape[1:])
        if not own:
            raise ConfigError(f"{path} does not say what shape a record has: give shape=")
        return own
    if header is not None and math.prod(header.shape) % math.prod(wanted):
        raise ConfigError(
            f"{path} has shape {header.shape}: that is not a whole number of records of {wanted}"
        )
    return wanted


def _same(paths: list[str], layouts: list[T]) -> T:
    """Return the value that all files share; ConfigError if they differ."""
    for path, layout in zip(paths, layouts, strict=True):
        if layout != layouts[0]:
            raise ConfigError(f"{path} holds records of {layout}, {paths[0]} of {layouts[0]}")
    return layouts[0]


def _range_of(path: str, header: _Npy | None, size: int, offset: int, nbytes: int) -> _RecordRange:
    if header is not None:
        if offset:
            raise ConfigError(
                f"{path} has a header that says where its rows begin: leave out offset={offset}"
            )
        used = math.prod(header.shape) * header.itemsize
        if header.offset + used > size:
            raise ConfigError(
                f"{path} ends {header.offset + used - size} bytes before its header says"
            )
        return _RecordRange(path, header.offset, used // nbytes)
    if size < offset:
        raise ConfigError(f"{path} has {size} bytes, fewer than the offset {offset}")
    if (size - offset) % nbytes:
        raise ConfigError(
            f"{path} has {size - offset} bytes from offset {offset} on: "
            f"not a multiple of the record size, {nbytes}"
        )
    return _RecordRange(path, offset, (size - offset) // nbytes)


def _npy(path: str, size: int, options: Options) -> _Npy:
    """Read the header of a .npy file.

    Raises:
        ConfigError: not a .npy file, not in C order, or of Python objects or structures.
    """
    start = io.BytesIO(read_range(path, 0, min(_HEADER_NBYTES, size), options))
    try:
        version = npy.read_magic(start)
    except ValueError as e:
        raise ConfigError(f"{path} is not a .npy file") from e
    try:
        # Version 3 is version 2 with field names in UTF-8; files with fields are refused in any
        # case.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(start)
    except ValueError as e:
        raise ConfigError(f"the header of {path} is damaged") from e
    if fortran and len(shape) > 1:
        raise ConfigError(
            f"{path} is in Fortran order, its rows are not in one piece: "
            "save np.ascontiguousarray(array)"
        )
    bare = dtype.kind == "V" and dtype.names is None
    return _Npy(start.tell(), None if bare else torch_dtype(dtype), dtype.itemsize, shape)
