"""Stream: the records of a log as a map-style dataset, whose future records have numbers already.

Sample `c * records + i` is record i of chunk c, whether or not it has arrived. The manifest has a
row for each chunk up to a fixed number of samples, so nothing grows while chunks arrive: the
daemon reads those that a sampler has dealt. Tables of samples to come take no memory until then.
Later samples are read directly.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from creel.cache.storage.manifest import MAX_OBJECTS, Manifest
from creel.errors import ConfigError, NotFoundError, SourceError
from creel.loader.client.backoff import pauses
from creel.loader.data.datasets.base import Raw, Sample, check_callable
from creel.loader.data.datasets.records import RecordDataset
from creel.loader.data.page_cache import local
from creel.loader.extras.streams.batches import StreamBatches
from creel.loader.extras.streams.direct import DirectBatches
from creel.loader.extras.streams.fields import Fields, Then
from creel.loader.extras.streams.share import Share
from creel.policies.arrays import Ids, Ints
from creel.streams import cursors
from creel.streams.arrivals import behind
from creel.streams.log import ABSENT, Log
from creel.streams.redis_stream import shown

if TYPE_CHECKING:
    from creel.loader.data.binding.bind import Gather

_log = logging.getLogger("creel.stream")

#: Samples that have objects by default: 25 bytes each count to the daemon's tables, 200 MB.
_CAPACITY = 1 << 23
#: Chunks that have objects at most: 33 bytes each in the manifest.
_MAX_CHUNKS = 1 << 20


class Stream(RecordDataset):
    """The records that producers append to a stream, each a dict of tensors, one per field.

    `creel.DataLoader(stream, batch_size=32)` returns them in the order of arrival, waits for them,
    and ends when the stream does. torch's own needs `batch_sampler=stream.batches(32)`.

    Args:
        path: the folder of the stream, or redis://host:port/key; waits until a producer has begun.
        name: whose position this is. Producers wait for each name, and keep what it has not read;
            all ranks of one job have one name, and different jobs different ones. None: hold back
            nobody, for example to read a finished stream again.
        shuffle: permute each so many arrivals, the same in all runs; their last one must arrive
            before the first is returned. 0: in the order of arrival.
        seed: of the permutations.
        begin: number of the chunk to begin with, for a reader that begins late.
        transform: from a record, the dict, to a sample.
        batch_transform: instead of `transform`, from a dict of (n, ...) tensors to a batch of n
            rows, as that of RecordDataset.
        capacity: samples that the node's readers share in one copy; later ones are read by each
            reader itself. All readers of a node give the same.
        timeout_s: how long to wait for a producer to begin, and for what comes next; None: for
            ever, with a warning each minute.
        rank, world: which share of the records this process is dealt: rank 0 of 1 has all. Default:
            that of torch.distributed; without it, all, or a launcher's rank and world once all its
            ranks have opened the stream under this name.

    Raises:
        NotFoundError: no producer began within `timeout_s`.
        ConfigError: the stream has other types than torch, or an argument is invalid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | None,
        *,
        shuffle: int = 0,
        seed: int = 0,
        begin: int = 0,
        transform: Callable[[Sample], Sample] | None = None,
        batch_transform: Callable[[dict[str, torch.Tensor]], Any] | None = None,
        capacity: int = _CAPACITY,
        timeout_s: float | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if name is not None:
            cursors.check_name(name)
        if min(shuffle, begin, seed) < 0 or capacity < 1:
            raise ConfigError("shuffle, seed and begin are 0 or more, capacity is 1 or more")
        check_callable(transform=transform, batch_transform=batch_transform)
        if transform is not None and batch_transform is not None:
            raise ConfigError("give transform= or batch_transform=, not both")
        self.storage_options = None  # a log has none
        #: Whether its folder is on this machine's disk; None: not looked at yet.
        self._local: bool | None = None
        self.log = _awaited(path, timeout_s)  # of the stream, which may still grow
        self.name, self.shuffle, self.seed, self.begin = name, shuffle, seed, begin
        self.timeout_s = timeout_s
        self.share = Share(self.log, name, rank, world)
        #: A sample as the daemon reads it: the bytes of a record.
        self.dtype, self.shape, self.nbytes = torch.uint8, (self.log.nbytes,), self.log.nbytes
        self.labels, self.to = None, None  # as records have them: none
        self.fields = fields = Fields(self.log.layout)
        #: Whether samples are the fields as they are.
        self._splits = transform is None and batch_transform is None
        self.transform = self.batch_transform = None
        if transform is not None:
            self.transform = Then(fields, transform)
        elif batch_transform is not None:
            self.batch_transform = Then(fields.rows, batch_transform)
        else:
            self.batch_transform = fields.rows
        records = self.log.about.records
        #: Of the dataset, those to come included.
        self._chunks = max(min(min(capacity, MAX_OBJECTS) // records, _MAX_CHUNKS), 1)
        self._size = (1 << 62) // records * records  # for numbers of samples beyond the capacity

    #: A batch's records are read from the chunks' files.
    builds_batches = True

    def batch_builder(
        self, gather: Gather, memory: Callable[[int], torch.Tensor], frozen: bool
    ) -> DirectBatches:
        """Return what reads records from files to their places in a batch."""
        return DirectBatches(gather, self, memory, frozen)

    def __len__(self) -> int:
        raise TypeError(
            "a stream has no length: use creel.DataLoader, or batch_sampler=stream.batches(n)"
        )

    def batches(
        self,
        batch_size: int,
        *,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> StreamBatches:
        """Return a batch sampler that deals the records to the ranks of a job as they arrive.

        Args:
            batch_size: of each rank.
            drop_last: whether one rank leaves out the last batch if it is incomplete. Several ranks
                always leave out an incomplete last step, since all get equally many batches.
            rank, world: default: the stream's.

        Raises:
            ConfigError: an argument is invalid.
        """
        if operator.index(batch_size) < 1:
            raise ConfigError(f"batch_size is {batch_size!r}: give the records of a batch")
        alike = rank is None and world is None
        share = self.share if alike else Share(self.log, self.name, rank, world)
        return StreamBatches(
            self.log,
            self.name,
            batch_size,
            drop_last=drop_last,
            shuffle=self.shuffle,
            seed=self.seed,
            begin=self.begin,
            share=share,
            timeout_s=self.timeout_s,
        )

    def leave(self) -> None:
        """Let producers go on without this reader: call it if training ends before the stream."""
        if self.name is not None:
            cursors.leave(self.log.medium, self.name)

    def _creel_beside(self, numbers: Sequence[int]) -> list[int]:
        """Return the records in the chunks of these, which are there as long as these are."""
        records, beside = self.log.about.records, list[int]()
        for chunk in sorted({number // records for number in numbers}):
            there = max(self.log.size(chunk), 0) // self.log.nbytes
            beside += range(chunk * records, chunk * records + there)
        return beside

    # --- as a dataset of records ----------------------------------------------------------------

    @property
    def read_once(self) -> bool:
        if self._local is None:
            self._local = local(self.log.medium.path)
        return self._local

    @property
    def object_count(self) -> int:
        return self._chunks * self.log.about.records

    def objects(self, indices: Ints) -> tuple[Ids, Ints]:
        ids = np.asarray(indices, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.object_count:
            raise IndexError(f"samples {ids.min()} to {ids.max()} are beyond the capacity")
        return ids.astype(np.int32), np.ones(len(ids), np.int64)

    def raw(self) -> Raw | None:
        if type(self) is not Stream:
            return None
        return Raw(
            self.nbytes,
            self.dtype,
            self.shape,
            None,
            None,
            self.transform,
            self.batch_transform,
            splits=self._splits,
        )

    def _build_manifest(self) -> Manifest:
        n, records = self._chunks, self.log.about.records
        offset, length = np.zeros(n, np.int64), np.full(n, self.nbytes, np.int64)
        names = _names(n, len(os.path.basename(self.log.chunk(0))))  # noqa: PTH119  a string
        count = np.full(n, records, np.int64)
        manifest = Manifest.of_runs(names, offset, length, count, root=self.log.medium.path)
        return Manifest(manifest.table, manifest.root, salt=self.log.about.id)

    def _read_direct(self, object_id: int) -> bytes:
        row = np.empty((1, self.nbytes), np.uint8)
        self.read_rows(np.array([object_id]), row)
        return row.tobytes()

    def _read_rows(self, ids: Ints, out: NDArray[np.uint8]) -> None:
        self.read_rows(ids, out)

    def read_rows(self, ids: Ints, out: NDArray[np.uint8]) -> None:
        """Fill `out`, (n, nbytes), from the log; adjacent records of a chunk in one read.

        Raises:
            SourceError: a chunk cannot be read, or has been deleted.
        """
        self._fill(ids, lambda a, b: [out[a:b].data.cast("B")])

    def read_fields(
        self, ids: Ints, memory: Callable[[int], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the fields of (n,) records, each in `memory(nbytes)`; reads as `read_rows`.

        Raises:
            SourceError: as `read_rows`.
        """
        fields, records = self.fields.empty(len(ids), memory)
        self._fill(ids, lambda a, b: [value for record in records[a:b] for value in record])
        return fields

    def _fill(self, ids: Ints, buffers: Callable[[int, int], Sequence[memoryview]]) -> None:
        """Read records; `buffers(a, b)`: where those of ids a to b - 1 go, which are adjacent."""
        chunks, inside = np.divmod(ids, self.log.about.records)
        new = (np.diff(ids) != 1) | (np.diff(chunks) != 0)
        bounds = [0, *(np.flatnonzero(new) + 1).tolist(), len(ids)]
        pieces = [
            (int(chunks[a]), int(inside[a]) * self.nbytes, buffers(a, b))
            for a, b in pairwise(bounds)
        ]
        lacking = self.log.medium.fill(sorted(pieces, key=itemgetter(0)))
        if lacking is not None:
            raise self._lacks(lacking)

    def _lacks(self, chunk: int) -> SourceError:
        """Return the error for records that are not there, or were deleted just now."""
        oldest = self.log.deleted(chunk)
        if oldest is not None:
            return behind(self.log, chunk, oldest)
        there = self.log.size(chunk) != ABSENT
        why = "has fewer records" if there else "has not arrived"
        return SourceError(errno.ENODATA, why, self.log.chunk(chunk))


def _awaited(path: str | os.PathLike[str], timeout_s: float | None) -> Log:
    """Open a log once a producer has begun it."""
    began, warn_s, waits = time.monotonic(), 5.0, pauses(0.01, 0.2)
    while True:
        try:
            return Log.open(path)
        except NotFoundError:
            waited_s = time.monotonic() - began
            if timeout_s is not None and waited_s >= timeout_s:
                raise
        if waited_s >= warn_s:
            warn_s += 60
            _log.warning("%s: waiting for a producer", shown(os.fspath(path)))
        time.sleep(next(waits))


def _names(n: int, digits: int) -> pa.Array:
    """Return the names of chunks 0 to n - 1 as an Arrow array, without n Python strings."""
    numbers = pa.array(np.arange(n) + 10**digits)
    return pc.utf8_slice_codeunits(numbers.cast(pa.large_string()), 1)


def stream_batches(
    stream: Stream,
    batch_size: int | None,
    *,
    shuffle: bool | None,
    drop_last: bool,
) -> StreamBatches:
    """Return the batch sampler of a loader that was given only a stream.

    Raises:
        ConfigError: an argument of the loader that a stream cannot follow.
    """
    if shuffle:
        raise ConfigError("a stream is shuffled by Stream(shuffle=n), n arrivals at a time")
    if batch_size is None:
        raise ConfigError("a stream is read in batches: give batch_size")
    return stream.batches(batch_size, drop_last=drop_last)
