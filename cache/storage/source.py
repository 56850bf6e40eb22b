"""Source: reads a manifest's objects from storage, with retries.

Transient errors (EIO, broken connections, HTTP 429 and 5xx) are retried with back-off until a
deadline. All other errors, and those that outlast the deadline, become `SourceError`. Neighbours in
one file are one read. Thread-safe. The daemon's fetch threads and the loader's direct reads use it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import Part
from creel.cache.storage import version
from creel.cache.storage.manifest import UNKNOWN, Manifest, is_remote, scheme_of
from creel.cache.storage.reads import Counters, Read, WholeObject
from creel.cache.storage.stores.access import options_of
from creel.cache.storage.stores.remote import open_store, store_key
from creel.cache.storage.stores.retry import retried, source_error, transient
from creel.cache.storage.stores.store import (
    AHEAD_FILES,
    AHEAD_NBYTES,
    Filled,
    LocalStore,
    OpenFile,
    Run,
    Store,
    StoredFile,
    TornError,
    open_file,
    read_ahead,
    read_unchanged,
)
from creel.errors import SourceError
from creel.messages import Grants
from creel.policies.arrays import Ints, Mask
from creel.settings import FetchSettings
from creel.system.limits import IOV_MAX

T = TypeVar("T")

log = logging.getLogger("creel.source")

#: From this many objects on, a read checks whether all are records of one local file.
_MIN_PIECES = 8
#: Such records are read separately if at most one in this many follows another in the file.
_MAX_SEPARATE = 8
#: Most objects of one read: half the buffers of a system call, as an object may have several.
_MAX_JOINED = IOV_MAX // 2
#: Errors of open without a free descriptor.
_TOO_MANY = {errno.EMFILE, errno.ENFILE}


class Source:
    """Reads the objects of one manifest.

    Args:
        manifest: the objects.
        settings: attempts, pauses and deadlines.
        files: most descriptors kept open (only of files with several objects).
        relative: whether paths may be relative to the working directory (never in a daemon, whose
            working directory differs from the client's).
        grants: how remote addresses are reached, for each access of the manifest; None: as the
            manifest's access says in this process.
    """

    def __init__(
        self,
        manifest: Manifest,
        settings: FetchSettings | None = None,
        *,
        files: int = 64,
        relative: bool = True,
        grants: Grants | None = None,
    ) -> None:
        self.manifest = manifest
        #: May be replaced at any time; the next read uses it.
        self.grants = grants
        self.counters = Counters()
        self._settings = settings or FetchSettings()
        self._relative = relative
        self._local = LocalStore(files)
        self._remote: dict[tuple[int, int, str, str, str], tuple[dict[str, Any], Store]] = {}
        self._told_refused: set[str] = set()
        self._access_rows = [row for row, _ in manifest.access]
        self._lock = threading.Lock()
        self._single, self._whole = _single(manifest)

    def close(self) -> None:
        """Close kept descriptors; later reads open the files again."""
        self._local.close()

    def read(self, object_id: int) -> bytes:
        """Return the bytes of one object.

        Raises:
            SourceError: after all attempts; `errno` is ENODATA when the file ends too early.
        """
        ids = np.array([object_id])
        (offset,), (length,) = (a.tolist() for a in self.manifest.ranges(ids))
        stored = self._stored_file(int(self.manifest.rows(ids)[0]))
        start = time.perf_counter()
        data = self._with_retries(stored, lambda store: store.read(stored, offset, length))[0]
        self.counters.count(1, len(data), time.perf_counter() - start, 1)
        return data

    def versions(self, files: NDArray[np.integer]) -> Ints:
        """Ask the storage for the current version of each file.

        Local files are looked up by path, so that a replaced file is noticed. All files share the
        retries after transient errors.

        Args:
            files: (k,) numbers, as in `Manifest.file_of`.

        Returns:
            (k,) versions; MISSING where a file is absent or cannot be read.
        """
        found = np.full(len(files), version.MISSING, np.int64)
        rows = self.manifest.file_rows[:-1][files]
        uris = self.manifest.addresses(rows)
        left = list(range(len(files)))

        def ask() -> None:
            if failed := self._ask(uris, rows, left, found):
                left[:] = failed
                raise next(iter(failed.values()))

        if uris:
            with suppress(Exception):  # files that failed are MISSING
                retried(self._settings, ask, uris[0], on_retry=self.counters.count_retry)
        return found

    def _ask(
        self, uris: list[str], rows: Ints, which: list[int], found: Ints
    ) -> dict[int, Exception]:
        """Enter the versions of some addresses; return the transient errors by position."""
        stores: dict[Store, list[int]] = defaultdict(list)
        if not self.manifest.remote.any():
            stores[self._local] = which
        else:
            for i in which:
                with suppress(Exception):  # stores raise anything: the file is MISSING
                    stores[self._store(uris[i], int(rows[i]))].append(i)
        failed: dict[int, Exception] = {}
        for store, members in stores.items():
            answers: Sequence[int | Exception]
            try:
                answers = store.versions([uris[i] for i in members])
            except Exception as e:  # noqa: BLE001  stores raise anything
                answers = [e] * len(members)
            for i, answer in zip(members, answers, strict=True):
                if not isinstance(answer, Exception):
                    found[i] = answer
                elif transient(answer):
                    failed[i] = answer
        return failed

    def read_whole(self, ids: NDArray[np.integer]) -> list[WholeObject | None]:
        """Return each object, of unknown length; None for objects that failed."""
        found: list[WholeObject | None] = []
        total, seconds, asked = 0, 0.0, time.monotonic()
        rows = self.manifest.rows(ids)
        uris = self.manifest.addresses(rows)
        opened = self._opened([uri for uri in uris if not is_remote(uri)])
        start = asked
        for row, uri in zip(rows.tolist(), uris, strict=True):
            file = None if is_remote(uri) else next(opened)
            try:
                data, of = self._whole_of(row, uri, file, start)
                found.append(WholeObject(data, of, asked))
            except SourceError:
                found.append(None)
            now = time.monotonic()
            if found[-1] is not None:
                seconds += now - start
                total += len(data)
            start = now
        reads = len(ids) - found.count(None)
        self.counters.count(reads, total, seconds, reads)
        return found

    def _opened(self, uris: list[str]) -> Iterator[OpenFile | Exception]:
        """Yield each local file, or the exception of opening it.

        AHEAD_FILES files at a time are opened, and read ahead by the kernel.
        """
        files: deque[OpenFile | Exception] = deque()
        left = deque(uris)
        try:
            while left:
                while left and len(files) < AHEAD_FILES:
                    file = self._try_open(left[0])
                    if files and isinstance(file, OSError) and file.errno in _TOO_MANY:
                        break  # open it once these are closed
                    left.popleft()
                    files.append(file)
                for file in files if len(uris) > 1 else ():
                    if isinstance(file, OpenFile) and file.status.st_size <= AHEAD_NBYTES:
                        read_ahead(file.fd, file.status.st_size, file.status.st_dev)
                while files:
                    yield files.popleft()
        finally:
            for file in files:
                if isinstance(file, OpenFile):
                    os.close(file.fd)

    def _try_open(self, uri: str) -> OpenFile | Exception:
        try:
            self._check_path(uri)
            return open_file(uri)
        except Exception as e:  # noqa: BLE001  as `_fill`
            return e

    def _whole_of(
        self, row: int, uri: str, file: OpenFile | Exception | None, began: float
    ) -> tuple[bytes, int]:
        """Return bytes and version of an object; an opened local file is read before any retry."""
        error = file if isinstance(file, Exception) else None
        if isinstance(file, OpenFile):
            try:
                return read_unchanged(uri, file)
            except Exception as e:  # noqa: BLE001  as `_fill`
                error = e
        stored = self._stored_file(row)
        return self._with_retries(
            stored, lambda store: store.read(stored, 0, UNKNOWN, versioned=True), error, began
        )

    def read_parts(self, ids: NDArray[np.integer], length: Ints, parts: Sequence[Part]) -> Read:
        """Fill each of `parts` with an object.

        Neighbours in one file become one read. An object that is a whole file fails if the file's
        length is not the manifest's, as it is not the file that was listed. An object also fails if
        its file is repeatedly written to during reads.

        Args:
            ids: (k,) objects.
            length: (k,) bytes of each, from the manifest or an earlier read.
            parts: (k,) lists of buffers, of these lengths together.
        """
        rows = self.manifest.rows(ids)
        offset = self.manifest.ranges(ids, rows)[0]
        asked = np.full(len(ids), time.monotonic())
        if len(ids) >= _MIN_PIECES and (
            found := self._read_pieces(ids, rows, offset, length, parts)
        ):
            return Read(length.copy(), np.full(len(ids), found.version), asked)
        read = Read.failed(len(ids))._replace(asked=asked)
        done = self._read_files(rows, length, parts, read)
        file = self.manifest.file_of(ids[done:])
        for reads in _files(file, offset[done:], length[done:]):
            runs = [
                Run(at, n, [buffer for i in members for buffer in parts[done + i]])
                for at, n, members in reads
            ]
            stored = self._stored_file(int(rows[done + reads[0].members[0]]))
            for one, filled in zip(reads, self._fill(stored, runs), strict=True):
                if filled is not None:
                    members = np.array(one.members) + done
                    read.nbytes[members] = length[members]
                    read.version[members] = filled.version
        return read

    def _read_pieces(
        self,
        ids: NDArray[np.integer],
        rows: Ints,
        offset: Ints,
        length: Ints,
        parts: Sequence[Part],
    ) -> Filled | None:
        """Read scattered pieces of one local file by a fast path.

        For small records in the page cache, the general way costs more than the reads. Returns None
        if the objects are of another kind or a read failed; then no object counts as read.
        """
        file, row = self.manifest.file_of(ids), int(rows[0])
        if (file != file[0]).any() or self._single[row]:
            return None
        order = offset.argsort(kind="stable")  # quick, as offsets are mostly in order
        at = offset[order]
        if np.count_nonzero(at[1:] == at[:-1] + length[order[:-1]]) * _MAX_SEPARATE > len(at):
            return None  # neighbours are better read together
        stored = self._stored_file(row)
        try:
            store = self._store(stored.uri, row)
            if not isinstance(store, LocalStore):
                return None
            start = time.perf_counter()
            into = [parts[i] for i in order.tolist()]
            pieces = zip(at.tolist(), length[order].tolist(), into, strict=True)
            filled = store.pieces(stored, list(pieces))
        except OSError:
            return None
        seconds = time.perf_counter() - start
        self.counters.count(len(rows), int(length.sum()), seconds, filled.opens)
        return filled

    def _read_files(self, rows: Ints, length: Ints, parts: Sequence[Part], read: Read) -> int:
        """Read the first rows that are local files of one object, quickly; return their number."""
        whole = self._whole[rows]
        files = len(rows) if whole.all() else int(whole.argmin())
        uris = self.manifest.addresses(rows[:files])
        files = next((i for i, uri in enumerate(uris) if is_remote(uri)), files)
        total, seconds, reads, start = 0, 0.0, 0, time.perf_counter()
        for i, (file, n) in enumerate(zip(self._opened(uris[:files]), length.tolist())):  # noqa: B905
            found, quick = self._read_file(uris[i], file, int(rows[i]), Run(0, n, parts[i]))
            if found is not None:
                read.nbytes[i], read.version[i] = n, found
            now = time.perf_counter()
            if quick:
                seconds += now - start
                total, reads = total + n, reads + 1
            start = now
        self.counters.count(reads, total, seconds, reads)
        return files

    def _read_file(
        self, uri: str, file: OpenFile | Exception, row: int, run: Run
    ) -> tuple[int | None, bool]:
        """Read a local file of one object.

        Returns its version, None if that failed; and whether the first attempt succeeded, which the
        caller must count.
        """
        error: Exception
        if isinstance(file, Exception):
            error = file
        else:
            try:
                return self._local.single(file, uri, run.length, run.buffers), True
            except Exception as e:  # noqa: BLE001  as `_fill`
                error = e
        filled = self._retry_fill(self._stored_file(row), run, error, time.monotonic())
        return None if filled is None else filled.version, False

    def _fill(self, stored: StoredFile, runs: list[Run]) -> list[Filled | None]:
        """Return the result of each run of one file; the first attempt reads all with one open."""
        done: list[Filled | None] = []
        while len(done) < len(runs):
            left, read, opens = runs[len(done) :], 0, 0
            start = began = time.monotonic()
            try:
                for filled in self._store(stored.uri, stored.row).fill(stored, left):
                    began, read, opens = time.monotonic(), read + 1, opens + filled.opens
                    done.append(filled)
            except Exception as e:  # noqa: BLE001  stores raise anything
                done.append(self._retry_fill(stored, left[read], e, began))
            self.counters.count(read, sum(r.length for r in left[:read]), began - start, opens)
        return done

    def _retry_fill(
        self, stored: StoredFile, run: Run, error: Exception, began: float
    ) -> Filled | None:
        """Retry the one run that failed; return None if the retries fail as well."""

        def once(store: Store) -> Filled:
            (filled,) = store.fill(stored, [run])
            return filled

        try:
            first = None if isinstance(error, TornError) else error
            filled = self._with_retries(stored, once, first, began)
        except SourceError:
            return None  # counted already; a direct read of the object will raise it again
        self.counters.count(1, run.length, time.monotonic() - began, 1)
        return filled

    def _stored_file(self, row: int) -> StoredFile:
        uri, single = self.manifest.uri(row), bool(self._single[row])
        min_nbytes = self.manifest.extent(row) if is_remote(uri) else UNKNOWN
        whole = bool(self._whole[row])
        return StoredFile(uri, keep=not single, whole=whole, min_nbytes=min_nbytes, row=row)

    def _with_retries(
        self,
        stored: StoredFile,
        job: Callable[[Store], T],
        error: Exception | None = None,
        began: float | None = None,
    ) -> T:
        """Return `job(store)`, with retries after transient errors.

        `error` is the failure of a first attempt, if there was one, at `began` (`time.monotonic`).

        Raises:
            SourceError: after all attempts; no other error is raised. It has been counted.
        """
        try:
            return retried(
                self._settings,
                lambda: job(self._store(stored.uri, stored.row)),
                stored.uri,
                error=error,
                began=began,
                on_retry=self.counters.count_retry,
            )
        except Exception as e:
            options = self._options(stored.uri, stored.row)[1] if is_remote(stored.uri) else None
            failure = source_error(e, stored.uri, options)
            self.counters.count_error(failure)
            if options is not None and self.grants is not None:
                self._tell_refused(failure)
            raise failure from e

    def _store(self, uri: str, row: int) -> Store:
        """Return the store of an address, which is that of a row."""
        if not is_remote(uri):
            self._check_path(uri)
            return self._local
        access, options = self._options(uri, row)
        # With the process id, as clients of object stores have threads and do not survive a fork.
        key = (os.getpid(), access, *store_key(uri))
        with self._lock:
            opened = self._remote.get(key)
            if opened is None or opened[0] != options:  # no client yet, or keys were renewed
                store = open_store(
                    uri, self._settings.deadline_s, options, handed=self.grants is not None
                )
                opened = self._remote[key] = options, store
            return opened[1]

    def _options(self, uri: str, row: int) -> tuple[int, dict[str, Any]]:
        """Return the number of a row's access (-1: none), and the options of its client."""
        access, scheme = bisect_right(self._access_rows, row) - 1, scheme_of(uri)
        if access < 0:
            return access, options_of(scheme, None)
        if self.grants is None:
            return access, self.manifest.access[access][1].options(scheme)
        grant = self.grants[access].get(scheme)
        if grant is None:
            raise SourceError(errno.EACCES, "the client said nothing about such addresses", uri)
        return access, grant.options

    def _tell_refused(self, failure: SourceError) -> None:
        """Log a refused read in a daemon, once for each account and server."""
        what = failure.strerror or ""
        if failure.errno == errno.EACCES and what not in self._told_refused:
            self._told_refused.add(what)
            log.warning("%s: %s", failure.uri, what)

    def _check_path(self, path: str) -> None:
        if not self._relative and not path.startswith(("/", "file:/")):
            raise SourceError(
                errno.EINVAL, "is a relative path: the daemon reads absolute ones only", path
            )


def _single(manifest: Manifest) -> tuple[Mask, Mask]:
    """Return (rows,) whether the object is the only one of its file, and if so from byte 0 on."""
    rows = manifest.file_rows
    single = np.zeros(manifest.table.num_rows, np.bool_)
    single[rows[:-1][np.diff(rows) == 1]] = True
    single &= manifest.counts == 1
    return single, single & (manifest.offsets == 0)


class _Neighbours(NamedTuple):
    """Adjacent objects in a file, by position, which are one read."""

    offset: int
    length: int
    members: list[int]


def _files(file: NDArray[np.integer], offset: Ints, length: Ints) -> Iterator[list[_Neighbours]]:
    """Yield the reads of each file.

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
    if len(order) > _MAX_JOINED:
        cuts = [i for a, b in pairwise(cuts) for i in range(a, b, _MAX_JOINED)] + cuts[-1:]
    members, starts, ends = order.tolist(), o.tolist(), (o + n).tolist()
    reads = [
        _Neighbours(starts[a], ends[b - 1] - starts[a], members[a:b]) for a, b in pairwise(cuts)
    ]
    for a, b in pairwise([*np.flatnonzero(new_file[cuts[:-1]]).tolist(), len(reads)]):
        yield reads[a:b]
