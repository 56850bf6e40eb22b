"""The journal in which processes record what a dataset's samples read: a file of records.

All processes that read a dataset append to one memfd, each record by one atomic write. If there is
a disk tier, the file is kept for later jobs. Reads are stored in columns, so that a few array
operations process a million samples.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.cache.memory.memfd import memfd
from creel.cache.storage.version import UNKNOWN
from creel.errors import MalformedError

#: One read of a sample: an address; (number of a part of the dataset, number of the object in it);
#: or a small part of a file as (address, bytes that were read, bytes of the file).
Item = str | tuple[int, int] | tuple[str, int, int]

#: The name of the memfd.
JOURNAL = "creel-trace"
#: The columns of items. PART: `FILE`, or the number of a part of the dataset. NUMBER: of an object
#: in that part; for a file, the bytes that were read, or `ALL` if it is cached in any case. NBYTES:
#: of a file that was read in part. VERSION: of a file, UNKNOWN if not given. DIGEST: of the item.
PART, NUMBER, NBYTES, VERSION, DIGEST = range(5)
FILE, ALL = -1, -1
_COLUMNS = 5
_BETWEEN = "\0"  # separates addresses: no path contains it
_PIECE_NBYTES = 1 << 20  # bytes of the file read at a time
#: Precedes each record: its length and xxh32. They reveal a record that was cut off for lack of
#: memory, and what another process wrote after it.
_HEAD = struct.Struct("<II")


class Reads(msgspec.Struct, frozen=True, array_like=True, tag="reads"):
    """The reads of a batch's samples; see `RecordedReads`.

    again: number of samples of the batch that had been recorded before.
    addresses: those of the items that are files, in order.
    """

    again: int
    samples: bytes
    counts: bytes
    items: bytes
    addresses: str


class CopiedFiles(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Copies of files (`file_copies`): first byte in their memfd, bytes and version, by address."""

    files: dict[str, tuple[int, int, int]]


class EndOfTrace(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Seals the journal: the records before the first of these are the trace in all processes."""


class NoTrace(msgspec.Struct, frozen=True, array_like=True, tag="none"):
    """Seals the journal without a trace, because the ranks' datasets differ."""


Record = Reads | CopiedFiles | EndOfTrace | NoTrace
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class RecordedReads(NamedTuple):
    """Reads of samples in the order of recording.

    samples: (n,) int64.
    counts: (n,) int64, the number of items of each.
    items: (k, 5) int64; columns PART, NUMBER, NBYTES, VERSION and DIGEST.
    addresses: (f,) of the items that are files.
    """

    samples: NDArray[np.int64]
    counts: NDArray[np.int64]
    items: NDArray[np.int64]
    addresses: list[str]

    @property
    def files(self) -> NDArray[np.bool_]:
        """(k,) whether an item is a file."""
        files: NDArray[np.bool_] = self.items[:, PART] == FILE
        return files

    @property
    def marks(self) -> NDArray[np.uint32]:
        """(n,) a set of digest bits; samples with no bit in common read different items."""
        marks, some = np.zeros(len(self.samples), np.uint32), self.counts > 0
        bits = np.uint32(1) << (self.items[:, DIGEST] % 32).astype(np.uint32)
        first = self.counts.cumsum() - self.counts
        marks[some] = np.bitwise_or.reduceat(bits, first[some]) if some.any() else 0
        return marks

    def only(self, kept: NDArray[np.bool_]) -> RecordedReads:
        """Return a copy with only those of the (k,) items that are `kept`."""
        if kept.all():
            return self
        sample = np.repeat(np.arange(len(self.samples)), self.counts)
        counts = np.bincount(sample[kept], minlength=len(self.samples))
        addresses = list(compress(self.addresses, kept[self.files].tolist()))
        return RecordedReads(self.samples, counts, self.items[kept], addresses)


def reads_of(recorded: Sequence[tuple[int, Sequence[tuple[Item, int]]]], again: int = 0) -> Reads:
    """Return the record of (sample, its items in order with the version of each)."""
    samples: list[int] = []
    counts: list[int] = []
    rows: list[int] = []  # flat: the columns of one item after another
    addresses: list[str] = []
    for sample, items in recorded:
        samples.append(sample)
        counts.append(len(items))
        for item, version in items:
            if isinstance(item, str):
                rows += FILE, ALL, 0, version, _digest(item)
                addresses.append(item)
            elif len(item) == 3:
                rows += FILE, item[1], item[2], version, _digest(item[0])
                addresses.append(item[0])
            else:
                rows += item[0], item[1], 0, UNKNOWN, _digest(f"{item[0]} {item[1]}")
    columns = [np.array(column, "<i8").tobytes() for column in (samples, counts, rows)]
    return Reads(again, columns[0], columns[1], columns[2], _BETWEEN.join(addresses))


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def joined(records: Sequence[Reads]) -> RecordedReads:
    """Concatenate records."""
    addresses: list[str] = []
    for one in records:
        if one.addresses:
            addresses += one.addresses.split(_BETWEEN)
    samples, counts, items = (
        np.frombuffer(b"".join([getattr(one, column) for one in records]), "<i8")
        for column in ("samples", "counts", "items")
    )
    return RecordedReads(samples, counts, items.reshape(-1, _COLUMNS), addresses)


class TraceJournal:
    """One process's view of a journal, from its beginning.

    Args:
        fd: its descriptor, which is not owned.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        #: Bytes of the file that were read.
        self.nbytes = 0

    def append(self, record: Record) -> bool:
        """Append a record; False if there is no memory for all of it."""
        body = _encode(record)
        data = _HEAD.pack(len(body), xxhash.xxh32_intdigest(body)) + body
        try:
            return os.write(self._fd, data) == len(data)
        except OSError:
            return False

    def new(self) -> Iterator[Record]:
        """Yield the records since the last call, including those of other processes.

        Raises:
            MalformedError: the next bytes are not a record.
        """
        while data := os.pread(self._fd, _PIECE_NBYTES, self.nbytes):
            self.nbytes += len(data)
            data, at = self._rest + data, 0
            while len(data) - at >= _HEAD.size:
                nbytes, digest = _HEAD.unpack_from(data, at)
                begin, end = at + _HEAD.size, at + _HEAD.size + nbytes
                if end > len(data):
                    break
                at = end
                yield _decoded(data[begin:end], digest)
            self._rest = data[at:]


def _decoded(body: bytes, digest: int) -> Record:
    try:
        if xxhash.xxh32_intdigest(body) == digest:
            record: Record = _decode(body)
            return record
    except msgspec.MsgspecError as e:
        raise MalformedError("no record of a journal") from e
    raise MalformedError("no whole record of a journal")


def new_journal(suffix: str = "") -> int:
    """Return the descriptor of a new journal. `suffix` ends the name of its memfd."""
    memory = memfd(f"{JOURNAL}{suffix}")
    # reopened: only open() makes O_APPEND atomic on every kernel
    journal = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.close(memory)
    return journal
