"""Journals in which processes record what the samples of datasets read: a file of records.

A process and those that it forks or spawns append to one memfd, each record by one atomic write. It
holds the journals of all their datasets, by number. Reads are stored in columns, so that a few
array operations process a million samples.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.cache.memory.memfd import Descriptor, memfd
from creel.cache.storage.version import UNKNOWN
from creel.errors import MalformedError
from creel.loader.data.reading.read_counts import UNIT
from creel.system.forks import at_fork, reset_in_child

#: One read of a sample: an address; (number of a part of the dataset, number of the object in it);
#: or units of a file as (address, first unit, number of units, bytes of the file), see UNITS.
Item = str | tuple[int, int] | tuple[str, int, int, int]

#: The name of the memfd.
JOURNAL = "creel-trace"
#: The columns of items. PART: `FILE`, or the number of a part of the dataset. NUMBER: of an object
#: in that part; for a file, the first `UNIT`, or `ALL` of it. UNITS: how many (negative if an
#: earlier sample had opened the file), and NBYTES: of the file, unless it is ALL. VERSION: of a
#: file, UNKNOWN if not given. DIGEST: of the item.
PART, NUMBER, UNITS, NBYTES, VERSION, DIGEST = range(6)
FILE, ALL = -1, -1
_COLUMNS = 6
BETWEEN = "\0"  # separates addresses: no path contains it
_PIECE_NBYTES = 1 << 20  # bytes of the file read at a time
#: Precedes each record: a mark, the number of its journal, its length and xxh32. A record that was
#: cut off for lack of memory does not fit them; the next mark shows what was written after it. No
#: path contains the mark.
_HEAD = struct.Struct("<4sIII")
_MARK = b"\xe1\x4e\x0c\x00"
#: The number of a journal that has a file to itself.
ALONE = 0


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

    def sound(self) -> bool:
        """Whether the columns fit each other, and no number is impossible."""
        columns = self.samples, self.counts, self.items
        if any(len(column) % 8 for column in columns) or len(self.items) % (8 * _COLUMNS):
            return False
        # Lists: for the few samples of a batch numpy takes longer.
        samples, counts, rows = (np.frombuffer(column, "<i8").tolist() for column in columns)
        part, number = rows[PART::_COLUMNS], rows[NUMBER::_COLUMNS]
        units, nbytes = rows[UNITS::_COLUMNS], rows[NBYTES::_COLUMNS]
        addresses = self.addresses.count(BETWEEN) + 1 if self.addresses else 0
        return (
            len(samples) == len(counts)
            and min(samples, default=0) >= 0
            and min(counts, default=0) >= 0
            and sum(counts) == len(part)
            and part.count(FILE) == addresses
            and all(
                n >= (ALL if p == FILE else 0) and p >= FILE
                for p, n in zip(part, number, strict=True)
            )
            and all(
                p != FILE or n == ALL or 0 < abs(some) <= -(-size // UNIT) - n
                for p, n, some, size in zip(part, number, units, nbytes, strict=True)
            )
        )


class EndOfTrace(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Seals the journal; nothing that follows counts, in all processes.

    instead: the trace; None: the records before this one.
    """

    instead: list[Reads] | None = None


class NoTrace(msgspec.Struct, frozen=True, array_like=True, tag="none"):
    """Seals the journal without a trace, because the ranks' datasets differ."""


class ListedFiles(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """The files that all samples are thought to read, as a process found them in its dataset.

    files: of each sample. addresses: of one sample after the other.
    """

    files: int
    addresses: str


Record = Reads | EndOfTrace | NoTrace | ListedFiles
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class RecordedReads(NamedTuple):
    """Reads of samples in the order of recording.

    samples: (n,) int64.
    counts: (n,) int64, the number of items of each.
    items: (k, 6) int64; columns PART, NUMBER, UNITS, NBYTES, VERSION and DIGEST.
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


def record_of(recorded: Sequence[tuple[int, Sequence[tuple[Item, int]]]], again: int = 0) -> Reads:
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
                rows += FILE, ALL, 0, 0, version, digest_of(item)
                addresses.append(item)
            elif len(item) == 4:
                rows += FILE, *item[1:], version, digest_of(item[0])
                addresses.append(item[0])
            else:
                rows += item[0], item[1], 0, 0, UNKNOWN, digest_of(f"{item[0]} {item[1]}")
    columns = [np.array(column, "<i8").tobytes() for column in (samples, counts, rows)]
    return Reads(again, columns[0], columns[1], columns[2], BETWEEN.join(addresses))


def digest_of(text: str) -> int:
    """Return the digest of an item's address, as in the column DIGEST."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def joined(records: Sequence[Reads]) -> RecordedReads:
    """Concatenate records."""
    addresses: list[str] = []
    for record in records:
        if record.addresses:
            addresses += record.addresses.split(BETWEEN)
    samples, counts, items = (
        np.frombuffer(b"".join([getattr(record, column) for record in records]), "<i8")
        for column in ("samples", "counts", "items")
    )
    return RecordedReads(samples, counts, items.reshape(-1, _COLUMNS), addresses)


class JournalFile:
    """A file of journals. Thread-safe, and shared with forked and spawned processes."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.reset_for_process()
        reset_in_child(self)

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._seen = 0  # bytes of the file whose records are in `_places`
        #: (first byte, bytes) of each record, by number of the journal.
        self._places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def __reduce__(self) -> tuple[object, ...]:
        return JournalFile, (self.descriptor,)

    def append(self, number: int, body: bytes) -> bool:
        """Append a record; False if there is no memory for all of it, or the file is closed."""
        data = _HEAD.pack(_MARK, number, len(body), xxhash.xxh32_intdigest(body)) + body
        try:
            return self.descriptor.valid and os.write(self.descriptor.fd, data) == len(data)
        except OSError:
            return False

    def records(self, number: int, first: int) -> Iterator[bytes]:
        """Yield the records of a journal from its `first` on, except those that were cut off."""
        with self._lock:
            self._scan()
            places = self._places.get(number, ())[first:]
        for at, nbytes in places:
            yield os.pread(self.descriptor.fd, nbytes, at)

    def has(self, number: int) -> bool:
        """Whether a journal has a record."""
        with self._lock:
            self._scan()
            return number in self._places

    def _scan(self) -> None:
        """Find the records that were appended since the last call."""
        size = os.fstat(self.descriptor.fd).st_size if self.descriptor.valid else 0
        piece_nbytes = _PIECE_NBYTES
        while self._seen < size:
            piece = os.pread(self.descriptor.fd, piece_nbytes, self._seen)
            taken = self._enter(piece)
            self._seen += taken
            if not taken:  # the next record is longer, or is being written
                if len(piece) < piece_nbytes:
                    return
                piece_nbytes *= 2

    def _enter(self, piece: bytes) -> int:
        """Enter the whole records in the bytes from `_seen` on; return how far they go."""
        taken = at = 0
        while at >= 0:
            record = _record_at(piece, at)
            if record is None:  # it is being written; or cut off, and others follow
                at = piece.find(_MARK, at + 1)
            else:
                number, first, nbytes = record
                self._places[number].append((self._seen + first, nbytes))
                at = taken = first + nbytes
        return taken


def _record_at(piece: bytes, at: int) -> tuple[int, int, int] | None:
    """Return journal, first byte and bytes of the whole record that begins at `at`; else None."""
    first = at + _HEAD.size
    if first > len(piece):
        return None
    mark, number, nbytes, digest = _HEAD.unpack_from(piece, at)
    whole = mark == _MARK and first + nbytes <= len(piece)
    if not whole or digest != xxhash.xxh32_intdigest(piece[first : first + nbytes]):
        return None
    return number, first, nbytes


class JournalPlace(NamedTuple):
    """Where a dataset is recorded.

    number: of the journal in its file. joint: whether several ranks share it.
    """

    file: JournalFile
    number: int = ALONE
    joint: bool = False

    @property
    def empty(self) -> bool:
        """Whether no process has written to the journal."""
        return not self.file.has(self.number)


class TraceJournal:
    """One process's view of the journal at this place, from its beginning."""

    def __init__(self, place: JournalPlace) -> None:
        self._file, self._number, _ = place
        self._records = 0  # that were read
        #: Bytes of the records that were read.
        self.nbytes = 0

    def append(self, record: Record) -> bool:
        """Append a record; False if there is no memory for all of it."""
        return self._file.append(self._number, _encode(record))

    def new(self) -> Iterator[Record]:
        """Yield the records since the last call, including those of other processes.

        Raises:
            MalformedError: a record of another version of creel.
        """
        for body in self._file.records(self._number, self._records):
            self._records += 1
            self.nbytes += len(body)
            try:
                record: Record = _decode(body)
            except msgspec.MsgspecError as e:
                raise MalformedError("no record of a journal") from e
            reads = [record] if isinstance(record, Reads) else getattr(record, "instead", None)
            if not all(read.sound() for read in reads or ()):
                raise MalformedError("a record whose columns do not fit each other")
            yield record


def new_journal() -> Descriptor:
    """Create a file for journals, without any."""
    memory = Descriptor(memfd(JOURNAL))
    # reopened: only open() makes O_APPEND atomic on every kernel
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    return Descriptor(os.open(f"/proc/self/fd/{memory.fd}", flags))


_numbers = itertools.count(ALONE + 1)
#: The file of the journals that this process has begun.
_file: weakref.ref[JournalFile] | None = None


def own_place() -> JournalPlace:
    """Begin a journal in this process's own file, which lasts as long as one of its journals.

    Raises:
        OSError: no descriptor or memory.
    """
    global _file  # noqa: PLW0603  one for each process
    file = None if _file is None else _file()
    if file is None:
        file = JournalFile(new_journal())
        _file = weakref.ref(file)
    return JournalPlace(file, next(_numbers))


def _begin_own_file() -> None:
    """Let a forked child begin its journals in a file of its own: its numbers are the parent's."""
    global _file  # noqa: PLW0603  as above
    _file = None


at_fork(after_in_child=_begin_own_file)
