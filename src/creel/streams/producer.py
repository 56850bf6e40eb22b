"""Producer: appends records to a stream, for a simulation or an instrument. Needs numpy only."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from creel.errors import ConfigError, UnavailableError
from creel.streams import cursors
from creel.streams.chunks import KnownChunks
from creel.streams.description import Column, Description
from creel.streams.log import Log
from creel.system.forks import reset_in_child
from creel.units import parse_size

_log = logging.getLogger("creel.stream")

#: Bytes of a chunk by default: large enough that files cost little (of 1 MiB, a record of 150 KiB
#: took both sides a third more CPU time: 83 us instead of 63).
_CHUNK_NBYTES = 4 << 20
#: Records of such a chunk at most: each chunk takes up as many places in a daemon's tables, however
#: few of them a slow producer fills.
_MOST_RECORDS = 4096
#: Pauses of a producer that waits for readers, in seconds.
_PAUSE_S, _LONGEST_S = 0.0005, 0.02
_WARN_S = 60.0
#: Ranks in a message.
_SHOWN = 8
Field = DTypeLike | tuple[DTypeLike, int | Sequence[int]]


class Producer:
    """Appends records to a stream; any number of processes, and their threads, may do so at once.

    Args:
        path: the folder. In /dev/shm the stream is in memory; on a parallel file system readers may
            be on other nodes. Or redis://[user:password@]host[:port]/key, of Redis 7 or Valkey,
            with the extra `creel-data[redis]`.
        fields: type and shape of each field, as `{"u": ("float32", (64, 64)), "t": "float32"}`.
        ahead: bytes that may wait to be read by the slowest reader; `put` waits while there are
            more. Readers that need more for one batch get that; with less than two batches, they
            and producers take turns.
        keep: bytes that stay after all readers have passed them, to resume from a checkpoint.
        chunk: records written together; default: 4 MiB of them.
        linger_s: `put` writes a chunk that is not full if the last one was written longer ago.
        producers: the stream ends when so many have been closed.
        readers: names of readers that are waited for before they have begun. Without any, records
            wait for the first reader, and a reader that begins later may miss records.
        timeout_s: how long `put` waits for readers; None: for ever, with a warning each minute.

    All producers of a stream give the same arguments. One that is killed, or ends by an exception,
    leaves only whole chunks and does not end the stream: start it again, or end the stream by
    `creel stream --end`.

    A copy in a forked process, or a pickled one, begins without the records that were not written:
    those are its original's to write.

    Raises:
        ConfigError: the fields or sizes are invalid, or another stream is in the folder, or this
            one has ended.
        SourceError: the folder cannot be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, Field],
        *,
        ahead: int | str = "1GiB",
        keep: int | str = "1GiB",
        chunk: int | None = None,
        linger_s: float = 0.05,
        producers: int = 1,
        readers: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        named = tuple(readers)
        for name in named:
            cursors.check_name(name)
        if producers < 1 or (chunk is not None and chunk < 1):
            raise ConfigError(f"producers={producers} and chunk={chunk} must be 1 or more")
        listed = tuple((name, *_field(name, field)) for name, field in fields.items())
        about = Description(
            uuid.uuid4().hex, listed, 1, _nbytes(ahead), _nbytes(keep), producers, named
        )
        fitting = max(_CHUNK_NBYTES // about.layout().itemsize, 1)
        records = chunk or min(fitting, _MOST_RECORDS)
        about = msgspec.structs.replace(about, records=records)
        self._stream = Log.create(path, about)
        if self._stream.ended():
            raise ConfigError(f"the stream in {self._stream.path} has ended: use another folder")
        self._chunks: KnownChunks | None = KnownChunks(self._stream)
        self._linger_s, self._timeout_s = linger_s, timeout_s
        self._closed = False
        self.waited_s = 0.0  #: seconds that this producer has waited for readers
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        about = {"_stream", "_linger_s", "_timeout_s", "_closed"}
        return {name: value for name, value in self.__dict__.items() if name in about}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._chunks, self.waited_s = None, 0.0
        self._begin()

    def reset_for_process(self) -> None:
        """Leave what is not written to the parent; called in a forked child."""
        self._count = 0  # records of the chunk that is being filled
        self._chunks = None  # a thread that is not here may have been about to change it
        #: `_entered`: whether this thread is in a call, which a signal handler may interrupt.
        self._lock, self._entered = threading.RLock(), False

    def _begin(self) -> None:
        """Begin without records."""
        #: The chunk that is being filled, of which the first `_count` records are set.
        self._rows = np.zeros(self._stream.about.records, self._stream.layout)
        #: The same, field by field.
        self._columns = {n: Column(n, self._rows[n]) for n in self._rows.dtype.names or ()}
        self._count = 0
        self._wrote_at = time.monotonic()  # when that chunk was begun
        self._lock, self._entered = threading.RLock(), False
        reset_in_child(self)

    def put(self, **fields: ArrayLike) -> None:
        """Append one record; waits while readers are too far behind.

        Args:
            fields: a value for each field, copied: numbers of any type that fit. Fractions are
                rounded to the field's precision; no other number may change.

        Raises:
            ConfigError: a field is missing or unknown, or has another shape, or does not fit; or
                the stream has ended, since as many as `producers` says were closed.
            SourceError: the chunk could not be written; this record is then not appended.
            UnavailableError: readers were too far behind for `timeout_s`; likewise.
        """
        columns = self._columns
        if fields.keys() != columns.keys():
            raise ConfigError(f"a record has {list(columns)}: {list(fields)}")
        values = {name: columns[name].fitting(value) for name, value in fields.items()}
        with self._alone():
            if self._closed:
                raise ConfigError("this producer is closed")
            self._put(values)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out, and this one from entering twice.

        Raises:
            ConfigError: a signal handler calls while this thread is in `put`, `flush` or `close`.
        """
        with self._lock:
            if self._entered:
                raise ConfigError("this producer is at work: a signal handler cannot use it now")
            try:
                self._entered = True
                yield
            finally:
                self._entered = False

    def _put(self, values: Mapping[str, ArrayLike]) -> None:
        if len(self._rows) == 1:
            self._append(self._parts(values))
            return
        for name, value in values.items():
            self._columns[name].rows[self._count] = value
        self._count += 1
        late = time.monotonic() - self._wrote_at >= self._linger_s
        if late or self._count == len(self._rows):
            try:
                self._flush()
            except BaseException:
                self._count -= 1
                raise

    def flush(self) -> None:
        """Write the records put so far, without waiting for a full chunk.

        Raises:
            SourceError, UnavailableError: as `put`; the records are still there, and are written
                with the next ones.
        """
        with self._alone():
            self._flush()

    def _flush(self) -> None:
        if not self._count:
            return
        self._append([self._rows[: self._count].view(np.uint8).data])
        self._count = 0

    def _append(self, data: Sequence[memoryview]) -> None:
        if self._chunks is None:  # of a copy, which has another connection, and appends on its own
            self._stream = Log(copy.copy(self._stream.medium), self._stream.about)
            self._chunks = KnownChunks(self._stream)
        self._wait_for_room(self._chunks, sum(map(len, data)))
        if self._stream.ended():
            raise ConfigError(
                f"the stream in {self._stream.path} has ended, nobody would read this: producers="
                f"{self._stream.about.producers} have been closed, or copies of them elsewhere"
            )
        self._chunks.append(data)
        self._wrote_at = time.monotonic()

    def _parts(self, values: Mapping[str, ArrayLike]) -> list[memoryview]:
        """Return the bytes of a record, without a copy of its fields."""
        parts, end = [], 0
        for name, (_, offset) in (self._rows.dtype.fields or {}).items():
            column = self._rows[name]
            array = np.ascontiguousarray(values[name], column.dtype).reshape(-1)
            parts += [memoryview(bytes(offset - end)), array.view(np.uint8).data]
            end = offset + array.nbytes
        return [*parts, memoryview(bytes(self._rows.itemsize - end))]

    def close(self) -> None:
        """Write what is left. The stream ends with its last producer.

        Raises:
            SourceError, UnavailableError: as `flush`.
        """
        with self._alone():
            if not self._closed:
                self._flush()
                self._stream.end()
                self._closed = True

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        self._closed = True

    def _wait_for_room(self, chunks: KnownChunks, nbytes: int) -> None:
        """Wait until no reader is too far behind, and delete what all have passed."""
        began, warn_s, pause_s = time.monotonic(), _WARN_S, _PAUSE_S
        while True:
            readers = cursors.read(self._stream.medium, self._stream.about.readers)
            slow = chunks.in_the_way(readers, nbytes)
            if slow is None:
                break
            waited_s = time.monotonic() - began
            if self._timeout_s is not None and waited_s >= self._timeout_s:
                raise UnavailableError(self._waiting(slow, waited_s))
            if waited_s >= warn_s:
                text = "%s (creel stream shows its readers)"
                _log.warning(text, self._waiting(slow, waited_s))
                warn_s += _WARN_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        self.waited_s += time.monotonic() - began
        chunks.trim(readers, nbytes)

    def _waiting(self, reader: str, seconds: float) -> str:
        """Return a sentence that names the reader, and its ranks that have not begun."""
        ranks = cursors.lacking(self._stream.medium, reader)
        more = ", ..." if len(ranks) > _SHOWN else ""
        numbers = ", ".join(map(str, ranks[:_SHOWN])) + more
        whom = f"{reader} (not begun: rank {numbers})" if ranks else reader
        return f"{self._stream.path}: waiting for {whom} for {seconds:.0f} s"


def _field(name: str, field: Field) -> tuple[str, tuple[int, ...]]:
    """Return numpy's name of a field's type, and its shape.

    Raises:
        ConfigError: it is neither a type nor a type and a shape.
    """
    kind, shape = field if isinstance(field, tuple) else (field, ())
    try:
        full = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        if min(full, default=1) > 0:
            return np.dtype(kind).str, full
    except (TypeError, ValueError):
        pass
    raise ConfigError(f'the field {name} is {field!r}: give a type, or ("float32", (64, 64))')


def _nbytes(size: int | str) -> int:
    nbytes = parse_size(size) if isinstance(size, str) else int(size)
    if nbytes < 0:
        raise ConfigError(f"{size} bytes: give 0 or more")
    return nbytes
