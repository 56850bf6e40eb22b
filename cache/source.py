"""Source: reading a manifest's objects from the storage they live in, with patience.

Errors that may pass (EIO, broken connections, HTTP 429 and 5xx) are tried again with back-off until
a deadline; all others, and those that outlast it, become `SourceError`. Neighbours in one file are
one read. Thread-safe. Used by the daemon's fetch threads and by the loader's direct reads.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.manifest import Manifest
from creel.cache.patience import Patience, source_error
from creel.cache.stores import LocalStore, Place, Run, Store, open_store, path_of, read_file
from creel.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

#: From so many objects on it is worth while to see whether they are records of one local file.
_MANY = 8
#: If no more than one in so many is another's neighbour.
_FEW = 8
#: Most objects of one read: Linux takes 1024 buffers at once (IOV_MAX).
_VECTOR = 512
#: Addresses compared at a time: a few megabytes.
_COMPARE = 1 << 15
#: Upper ends of the histogram's buckets, in seconds: page cache to a struggling object store.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class Counters:
    """What a source did so far. All methods may be called from any thread."""

    opens: int = 0
    reads: int = 0
    nbytes: int = 0
    retries: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    last_error: str = ""
    seconds: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds_sum: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_reads(self, nbytes: int, seconds: list[float], opens: int) -> None:
        """Reads ended well, after so many seconds each."""
        with self._lock:
            self.reads += len(seconds)
            self.opens += opens
            self.nbytes += nbytes
            for s in seconds:
                self.seconds[bisect_left(SECONDS, s)] += 1
            self.seconds_sum += sum(seconds)

    def count_alike(self, reads: int, nbytes: int, seconds: float, opens: int) -> None:
        """So many reads ended well, after `seconds` in all."""
        with self._lock:
            self.reads += reads
            self.opens += opens
            self.nbytes += nbytes
            self.seconds[bisect_left(SECONDS, seconds / reads)] += reads
            self.seconds_sum += seconds

    def count_retry(self) -> None:
        """A read failed in a way that may pass and is tried again."""
        with self._lock:
            self.retries += 1

    def count_error(self, error: SourceError) -> None:
        """A read failed for good."""
        with self._lock:
            self.errors[errno.errorcode.get(error.errno or 0, "other")] += 1
            self.last_error = f"{error.uri}: {error.strerror}"

    def snapshot(self) -> Counters:
        """A copy that stands still; `seconds` are counts per bucket of SECONDS and one beyond."""
        with self._lock:
            return replace(
                self,
                errors=self.errors.copy(),
                seconds=list(self.seconds),
                _lock=threading.Lock(),
            )


class Source:
    """The objects of one manifest, readable.

    Args:
        manifest: what there is.
        patience: how errors that may pass are met.
        files: most descriptors kept open (only of files that hold several objects).
        relative: whether paths may be relative to the working directory (never in a daemon, whose
            working directory is not the client's).
    """

    def __init__(
        self,
        manifest: Manifest,
        patience: Patience | None = None,
        *,
        files: int = 64,
        relative: bool = True,
    ) -> None:
        self.manifest = manifest
        self.counters = Counters()
        self._patience = patience or Patience()
        self._relative = relative
        self._local = LocalStore(files)
        self._remote: dict[tuple[int, str, str], Store] = {}
        self._lock = threading.Lock()
        self._file_of_row, self._single = _files_of(manifest)
        self._first = manifest.table.column("offset").to_numpy() == 0

    @classmethod
    def open(cls, manifest: Manifest) -> Source:
        """A source with the usual settings; nothing is touched until the first read."""
        return cls(manifest)

    def close(self) -> None:
        """Close kept descriptors. A later read opens them again."""
        self._local.close()

    def read(self, object_id: int) -> bytes:
        """The bytes of one object.

        Raises:
            SourceError: after all tries; `errno` is ENODATA when the file ends too early.
        """
        ids = np.array([object_id])
        (offset,), (length,) = (a.tolist() for a in self.manifest.ranges(ids))
        place = self._place(int(self.manifest.rows(ids)[0]))
        start = time.perf_counter()
        data = self._patiently(place, lambda store: store.read(place, offset, length))
        self.counters.count_reads(len(data), [time.perf_counter() - start], 1)
        return data

    def read_whole(self, ids: NDArray[np.integer]) -> list[bytes | None]:
        """The bytes of each object in turn (for those of unknown length), None where it failed."""
        found: list[bytes | None] = []
        seconds: list[float] = []
        total, start = 0, time.perf_counter()
        for object_id, row in zip(ids.tolist(), self.manifest.rows(ids).tolist(), strict=True):
            data = self._read_local(self.manifest.uri(row))
            now = time.perf_counter()
            if data is None:
                data = self._read_or_none(object_id)
                now = time.perf_counter()
            else:
                seconds.append(now - start)
                total += len(data)
            found.append(data)
            start = now
        self.counters.count_reads(total, seconds, len(seconds))
        return found

    def _read_local(self, uri: str) -> bytes | None:
        """All of a local file; None for others and for what is not so simple."""
        if _is_far(uri):
            return None
        try:
            self._check_path(uri)
            return read_file(path_of(uri))
        except Exception:  # noqa: BLE001  as `_fill`: a name with a zero byte is a ValueError
            return None

    def read_into(
        self, ids: NDArray[np.integer], length: NDArray[np.int64], buffer: memoryview
    ) -> NDArray[np.int64]:
        """`read_parts` into one buffer, as long as all together, one object after the other."""
        ends = length.cumsum()
        ranges = zip((ends - length).tolist(), ends.tolist(), strict=True)
        return self.read_parts(ids, length, [buffer[start:stop] for start, stop in ranges])

    def read_parts(
        self, ids: NDArray[np.integer], length: NDArray[np.int64], parts: list[memoryview]
    ) -> NDArray[np.int64]:
        """Fill each of `parts` with an object.

        Neighbours in one file become one read. A file of its own that is longer or shorter than
        the manifest says has failed: it is not the file that was listed.

        Args:
            ids: (k,) objects.
            length: (k,) bytes of each, as the manifest says, or an earlier read where it does not.
            parts: (k,) of these lengths.

        Returns:
            (k,) bytes read; -1 where the object failed (`counters.last_error` says how).
        """
        rows = self.manifest.rows(ids)
        offset = self.manifest.ranges(ids, rows)[0]
        if len(ids) >= _MANY and self._read_pieces(rows, offset, length, parts):
            return length.copy()
        nbytes = np.full(len(ids), -1, np.int64)
        done = self._read_files(rows, length, parts, nbytes)
        for file in _files(self._file_of_row[rows[done:]], offset[done:], length[done:]):
            runs = [Run(at, n, [parts[done + i] for i in members]) for at, n, members in file]
            place = self._place(int(rows[done + file[0].members[0]]))
            for one, good in zip(file, self._fill(place, runs), strict=True):
                if good:
                    read = np.array(one.members) + done
                    nbytes[read] = length[read]
        return nbytes

    def _read_pieces(
        self,
        rows: NDArray[np.int64],
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
        parts: list[memoryview],
    ) -> bool:
        """Read scattered pieces of one local file, if that is what they are, with little ado.

        Small records from the page cache cost more to keep books of than to read. False when it is
        not so simple, or something failed: then nothing is said to be read.
        """
        file, row = self._file_of_row[rows], int(rows[0])
        if (file != file[0]).any() or self._single[row]:
            return False
        order = offset.argsort(kind="stable")  # mostly in order
        at = offset[order]
        if np.count_nonzero(at[1:] == at[:-1] + length[order[:-1]]) * _FEW > len(at):
            return False  # neighbours are better read at once
        place = self._place(row)
        try:
            store = self._store(place.uri)
            if not isinstance(store, LocalStore):
                return False
            start = time.perf_counter()
            pieces = zip(at.tolist(), [parts[i] for i in order.tolist()], strict=True)
            opens = store.pieces(place, pieces)
        except OSError:
            return False
        seconds = time.perf_counter() - start
        self.counters.count_alike(len(rows), int(length.sum()), seconds, opens)
        return True

    def _read_files(
        self,
        rows: NDArray[np.int64],
        length: NDArray[np.int64],
        parts: list[memoryview],
        nbytes: NDArray[np.int64],
    ) -> int:
        """Read local files of one object each, likewise; how many, of the first ones, are such."""
        whole = self._single[rows] & self._first[rows]
        files = len(rows) if whole.all() else int(whole.argmin())
        seconds: list[float] = []
        total, start = 0, time.perf_counter()
        for i, (row, n) in enumerate(zip(rows[:files].tolist(), length[:files].tolist())):  # noqa: B905
            uri = self.manifest.uri(row)
            if _is_far(uri):
                files = i
                break
            quick = self._read_file(uri, row, n, parts[i], nbytes[i : i + 1])
            now = time.perf_counter()
            if quick:
                seconds.append(now - start)
                total += n
            start = now
        self.counters.count_reads(total, seconds, len(seconds))
        return files

    def _read_file(
        self, uri: str, row: int, length: int, part: memoryview, nbytes: NDArray[np.int64]
    ) -> bool:
        """Read a local file of one object; whether it took but one try, and was not counted yet."""
        try:
            self._check_path(uri)
            self._local.whole(uri, length, part)
        except Exception as e:  # noqa: BLE001  as `_fill`
            if self._fill_again(self._place(row), Run(0, length, [part]), e):
                nbytes[:] = length
            return False
        nbytes[:] = length
        return True

    def _fill(self, place: Place, runs: list[Run]) -> list[bool]:
        """Whether each run of one address was read. The first try is of all with one open."""
        good: list[bool] = []
        while len(good) < len(runs):
            seconds: list[float] = []
            opens, at = 0, len(good)
            try:
                start = time.perf_counter()
                for opened in self._store(place.uri).fill(place, runs[at:]):
                    now = time.perf_counter()
                    seconds.append(now - start)
                    start, opens = now, opens + opened
                    good.append(True)
            except Exception as e:  # noqa: BLE001  stores raise what they like
                good.append(self._fill_again(place, runs[len(good)], e))
            read = sum(run.length for run in runs[at : at + len(seconds)])
            self.counters.count_reads(read, seconds, opens)
        return good

    def _fill_again(self, place: Place, run: Run, error: Exception) -> bool:
        """Patience for the one run that failed; whether it was read in the end."""
        try:
            self._patiently(place, lambda store: sum(store.fill(place, [run])), error)
        except SourceError:
            return False  # counted; the reader of the object will meet the error itself
        self.counters.count_reads(run.length, [], 1)
        return True

    def _read_or_none(self, object_id: int) -> bytes | None:
        try:
            return self.read(object_id)
        except SourceError:
            return None

    def _place(self, row: int) -> Place:
        single = bool(self._single[row])
        return Place(self.manifest.uri(row), keep=not single, whole=single and self._first[row])

    def _patiently(
        self, place: Place, job: Callable[[Store], T], error: Exception | None = None
    ) -> T:
        """Do `job`, again while errors may pass; `error` is how a first try went already.

        Raises:
            SourceError: and nothing else; it was counted.
        """
        try:
            if error is None:
                try:
                    return job(self._store(place.uri))
                except Exception as e:  # noqa: BLE001  stores raise what they like
                    error = e
            return self._patience.again(lambda: self._once_more(place, job), error, place.uri)
        except Exception as e:
            told = source_error(e, place.uri)
            self.counters.count_error(told)
            raise told from e

    def _once_more(self, place: Place, job: Callable[[Store], T]) -> T:
        self.counters.count_retry()
        return job(self._store(place.uri))

    def _store(self, uri: str) -> Store:
        scheme, found, rest = uri.partition("://")
        if not found:
            self._check_path(uri)
            return self._local
        if scheme == "file":
            return self._local
        # The process id: clients of object stores own threads and do not live through a fork.
        key = (os.getpid(), scheme, rest.partition("/")[0])
        with self._lock:
            if key not in self._remote:
                self._remote[key] = open_store(uri)
            return self._remote[key]

    def _check_path(self, path: str) -> None:
        if not self._relative and not path.startswith(("/", "file:/")):
            raise SourceError(errno.EINVAL, "a relative path means nothing to a daemon", path)


def _is_far(uri: str) -> bool:
    return "://" in uri and not uri.startswith("file:")


def _files_of(manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Number of the file of each row, and whether that file holds nothing but this row's object.

    Neighbouring rows of one address count as one file; that a file is met again further down
    costs an open, nothing else.
    """
    n = manifest.table.num_rows
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    offset = manifest.table.column("offset").to_numpy()
    changes = np.ones(n + 1, np.bool_)  # changes[i]: row i begins a file; n is the end
    # Two rows at offset 0 are two files (or one file twice, which needs no care).
    rows = np.flatnonzero((offset[1:] != 0) | (offset[:-1] != 0))
    changes[1 + rows[_like_next(manifest.table.column("uri").combine_chunks(), rows)]] = False
    single = changes[:n] & changes[1:]
    single &= manifest.table.column("count").to_numpy() == 1
    return np.cumsum(changes[:n]), single


def _like_next(uris: pa.Array, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """(k,) whether uris[rows[i]] == uris[rows[i] + 1].

    By hand, because `import pyarrow.compute` costs every daemon 8 MB: equal neighbours of L bytes
    repeat after L bytes, and rows of one length are compared in one go.
    """
    same = np.zeros(len(rows), np.bool_)
    if len(rows) == 0:
        return same
    _, ends, content = uris.buffers()
    bounds = np.frombuffer(ends, np.int64)[uris.offset : uris.offset + len(uris) + 1]
    start, size = bounds[rows], np.diff(bounds)
    alike = size[rows] == size[rows + 1]
    same |= alike & (size[rows] == 0)
    data = np.frombuffer(content or b"", np.uint8)
    for length in np.unique(size[rows[alike & ~same]]).tolist():
        window = np.lib.stride_tricks.sliding_window_view(data, 2 * length)
        members = np.flatnonzero(alike & (size[rows] == length))
        for some in np.array_split(members, len(members) // _COMPARE + 1):
            pair = window[start[some]]
            same[some] = (pair[:, :length] == pair[:, length:]).all(axis=1)
    return same


class _Neighbours(NamedTuple):
    """Objects, by position, that one read can serve."""

    offset: int
    length: int
    members: list[int]


def _files(
    file: NDArray[np.int64], offset: NDArray[np.int64], length: NDArray[np.int64]
) -> Iterator[list[_Neighbours]]:
    """The reads of each file in turn.

    >>> for reads in _files(np.array([1, 2, 1]), np.array([4, 0, 0]), np.full(3, 4)):
    ...     print([tuple(r) for r in reads])
    [(0, 8, [2, 0])]
    [(0, 4, [1])]
    """
    if not len(file):
        return
    order = np.lexsort((offset, file))
    f, o, n = file[order], offset[order], length[order]
    new_file = np.append(True, f[1:] != f[:-1])
    new_run = new_file.copy()
    new_run[1:] |= o[1:] != o[:-1] + n[:-1]
    cuts = [*np.flatnonzero(new_run).tolist(), len(order)]
    if len(order) > _VECTOR:
        cuts = [i for a, b in pairwise(cuts) for i in range(a, b, _VECTOR)] + cuts[-1:]
    members, starts, ends = order.tolist(), o.tolist(), (o + n).tolist()
    reads = [
        _Neighbours(starts[a], ends[b - 1] - starts[a], members[a:b]) for a, b in pairwise(cuts)
    ]
    for a, b in pairwise([*np.flatnonzero(new_file[cuts[:-1]]).tolist(), len(reads)]):
        yield reads[a:b]
