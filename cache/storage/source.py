"""Source: reads a manifest's objects from storage, with retries.

Transient errors (EIO, broken connections, HTTP 429 and 5xx) are retried with back-off until a
deadline. All other errors, and those that outlast the deadline, become `SourceError`. Neighbours in
one file are one read. Thread-safe. The daemon's fetch threads and the loader's direct reads use it.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import Part
from creel.cache.storage import version
from creel.cache.storage.manifest import ANY, UNKNOWN, Manifest
from creel.cache.storage.reads import Counters, Read, WholeObject
from creel.cache.storage.stores.access import options_of
from creel.cache.storage.stores.remote import Stores
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
    open_file,
    read_ahead,
    read_unchanged,
)
from creel.cache.storage.uris import is_remote, scheme_of
from creel.errors import CreelError, SourceError
from creel.messages import Grants
from creel.policies.arrays import Ints, Mask
from creel.settings import FetchSettings
from creel.system.limits import IOV_MAX

T = TypeVar("T")

log = logging.getLogger("creel.source")

#: Most objects of one read: half the buffers of a system call, as an object may have several.
_MAX_JOINED = IOV_MAX // 2
#: Bytes that are read at once although a part of them would be enough (`Source.neighbours`).
_JOINED_NBYTES = 1 << 20
#: Errors of open without a free descriptor.
_TOO_MANY = {errno.EMFILE, errno.ENFILE}


class Source:
    """Reads the objects of one manifest.

    Args:
        manifest: the objects.
        settings: attempts, pauses and deadlines; None: those of `stores`.
        files: most descriptors kept open (only of files with several objects).
        stores: of remote addresses; None: its own.
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
        stores: Stores | None = None,
        relative: bool = True,
        grants: Grants | None = None,
    ) -> None:
        self.manifest = manifest
        #: May be replaced at any time; the next read uses it.
        self.grants = grants
        self.counters = Counters()
        self._settings = settings or (stores.settings if stores else FetchSettings())
        self._relative = relative
        self._local = LocalStore(files)
        self._stores = stores or Stores(
            self._settings, handed=grants is not None, requests=self.counters.requests
        )
        self._told_refused: set[str] = set()  # reasons that were logged
        #: First row of each `manifest.access`.
        self._access_rows = [row for row, _ in manifest.access]
        #: (rows,) whether the object is the only one of its file; whether it also is all of it.
        self._single, self._whole = _single(manifest)
        self._one_a_file = bool(self._single.all())  # no file has two

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
        ((stored,), _) = self._stored_files(self.manifest.rows(ids))
        start = time.perf_counter()
        data = self._with_retries(stored, lambda store: store.read(stored, offset, length))[0]
        self.counters.count(1, len(data), time.perf_counter() - start, 1)
        return data

    def neighbours(self, ids: NDArray[np.integer], length: Ints) -> int:
        """Return how many of (k,) objects after the first continue it in its file.

        length: (k,) bytes of each; those that are counted have at most a megabyte.

        >>> from creel.cache.storage.manifest import Manifest
        >>> rows = np.array([0]), np.array([1 << 18]), np.array([9])
        >>> Source(Manifest.of_runs(["a"], *rows)).neighbours(np.arange(2, 9), np.full(7, 1 << 18))
        3
        """
        if self._one_a_file or len(ids) < 2 or ids[1] != ids[0] + 1:
            return 0
        ids, length = ids[:_MAX_JOINED], length[:_MAX_JOINED]
        files = self.manifest.file_of(ids)
        joined = (np.diff(ids) == 1) & (files[1:] == files[0])
        joined &= np.cumsum(length)[1:] <= _JOINED_NBYTES
        return int(np.logical_and.accumulate(joined).sum())

    def versions(self, files: NDArray[np.integer]) -> Ints:
        """Ask the storage for the current version of each file.

        Local files are looked up by path, so that a replaced file is noticed. All files share the
        retries after transient errors.

        Args:
            files: (k,) numbers, as in `Manifest.file_of`.

        Returns:
            (k,) versions; MISSING where a file is absent or cannot be read.
        """
        versions = np.full(len(files), version.MISSING, np.int64)
        rows = self.manifest.file_rows[:-1][files]
        uris = self.manifest.addresses(rows)
        left = list(range(len(files)))

        def ask() -> None:
            if failed := self._ask(uris, rows, left, versions):
                left[:] = failed
                raise next(iter(failed.values()))

        if uris:
            with suppress(Exception):  # files that failed are MISSING
                retried(
                    self._settings,
                    ask,
                    uris[0],
                    on_retry=self.counters.count_retry,
                    reached=self._reached,
                )
        return versions

    def _ask(
        self, uris: list[str], rows: Ints, which: list[int], versions: Ints
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
                    versions[i] = answer
                elif transient(answer):
                    failed[i] = answer
        return failed

    def read_whole(self, ids: NDArray[np.integer]) -> list[WholeObject | None]:
        """Return each object, of unknown length; None for objects that failed."""
        objects: list[WholeObject | None] = []
        total, seconds, asked = 0, 0.0, time.monotonic()
        files, remote = self._stored_files(self.manifest.rows(ids))
        local = [file.uri for file, far in zip(files, remote, strict=True) if not far]
        opened, start = self._opened(local), asked
        for stored, far in zip(files, remote, strict=True):
            file = None if far else next(opened)
            try:
                data, data_version = self._whole_of(stored, file, start)
                objects.append(WholeObject(data, data_version, asked))
            except SourceError:
                objects.append(None)
            now = time.monotonic()
            if objects[-1] is not None:
                seconds += now - start
                total += len(data)
            start = now
        reads = len(ids) - objects.count(None)
        self.counters.count(reads, total, seconds, reads)
        return objects

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
        self, stored: StoredFile, file: OpenFile | Exception | None, began: float
    ) -> tuple[bytes, int]:
        """Return bytes and version of an object; an opened local file is read before any retry."""
        error = file if isinstance(file, Exception) else None
        if isinstance(file, OpenFile):
            try:
                return read_unchanged(stored.uri, file)
            except Exception as e:  # noqa: BLE001  as `_fill`
                error = e
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
        read = Read.failed(len(ids))._replace(asked=np.full(len(ids), time.monotonic()))
        if not len(ids):
            return read
        rows = self.manifest.rows(ids)
        offset = self.manifest.ranges(ids, rows)[0]
        order, bounds, files = _neighbours(self.manifest.file_of(ids), offset, length)
        length = length[order]
        runs = _runs(offset[order], length, [parts[i] for i in order.tolist()], bounds)
        stored, remote = self._stored_files(rows[order[bounds[files[:-1]]]])
        once = [not (file.keep or far) for file, far in zip(stored, remote, strict=True)]
        ahead = self._opened([file.uri for file, alone in zip(stored, once, strict=True) if alone])
        run_versions: list[int] = []
        for file, alone, (start, stop) in zip(stored, once, pairwise(files.tolist()), strict=True):
            run_versions += self._fill(file, runs[start:stop], next(ahead) if alone else None)
        versions = np.array(run_versions).repeat(bounds[1:] - bounds[:-1])
        done = versions != version.MISSING
        read.nbytes[order[done]], read.version[order[done]] = length[done], versions[done]
        return read

    def _fill(
        self, stored: StoredFile, runs: list[Run], opened: OpenFile | Exception | None
    ) -> list[int]:
        """Return the version of each run of one file; the first attempt reads all with one open.

        `opened`: the open file, or the exception of opening it; None if its store opens it. MISSING
        is the version of a run that could not be read.
        """
        versions: list[int] = []
        while len(versions) < len(runs):
            left, read, nbytes, opens = runs[len(versions) :] if versions else runs, 0, 0, 0
            start = began = time.monotonic()
            try:
                if opened is None:
                    results = self._store(stored.uri, stored.row).fill(stored, left)
                elif isinstance(opened, Exception):
                    raise opened  # noqa: TRY301  as an exception of reading it
                else:
                    results = self._local.fill(stored, left, opened)
                for filled in results:
                    began = time.monotonic()
                    read, opens = read + filled.runs, opens + filled.opens
                    versions += [filled.version] * filled.runs
            except Exception as e:  # noqa: BLE001  stores raise anything
                versions.append(self._retry_fill(stored, left[read], e, began))
            for _, length, _ in left[:read]:
                nbytes += length
            self.counters.count(read, nbytes, began - start, opens)
            opened = None
        return versions

    def _retry_fill(self, stored: StoredFile, run: Run, error: Exception, began: float) -> int:
        """Retry the one run that failed; return its version, MISSING if the retries fail, too."""

        def again(store: Store) -> Filled:
            (filled,) = store.fill(stored, [run])
            return filled

        try:
            filled = self._with_retries(stored, again, error, began)
        except SourceError:
            return version.MISSING  # counted already; a direct read will raise it again
        self.counters.count(1, run[1], time.monotonic() - began, 1)
        return filled.version

    @property
    def _reached(self) -> bool:
        """Whether the storage has answered, perhaps to the daemon of which this process is served.

        A daemon that never got an answer gives up soon, as its clients read directly then.
        """
        return self.counters.reads > 0 or self.grants is None

    def _stored_files(self, rows: Ints) -> tuple[list[StoredFile], list[bool]]:
        """Return the files of some rows, and whether each is remote."""
        uris, ids = self.manifest.addresses(rows), rows.tolist()
        remote = [is_remote(uri) for uri in uris]
        least: Iterable[int] = repeat(UNKNOWN)
        if any(remote):
            extent = self.manifest.extent
            least = [extent(i) if far else UNKNOWN for i, far in zip(ids, remote, strict=True)]
        keep, whole = (~self._single[rows]).tolist(), self._whole[rows].tolist()
        pins = map(self.manifest.pin, ids) if self.manifest.pins else repeat(ANY)
        return list(map(StoredFile, uris, keep, whole, least, ids, pins)), remote

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
                options=lambda: self._options(stored.uri, stored.row),
                error=error,
                began=began,
                on_retry=self.counters.count_retry,
                reached=self._reached,
            )
        except CreelError as e:
            failure = source_error(e, stored.uri)
            self.counters.count_error(failure)
            self._tell_refused(failure)
            raise failure from None

    def _store(self, uri: str, row: int) -> Store:
        """Return the store of an address, which is that of a row."""
        options = self._options(uri, row)
        if options is None:
            self._check_path(uri)
            return self._local
        return self._stores.open(uri, options)

    def _options(self, uri: str, row: int) -> dict[str, Any] | None:
        """Return the options of the client for a row's address; None for a local one."""
        if not is_remote(uri):
            return None
        access, scheme = bisect_right(self._access_rows, row) - 1, scheme_of(uri)
        if access < 0:
            return options_of(scheme, None)
        if self.grants is None:
            return self.manifest.access[access][1].options(scheme)
        grant = self.grants[access].get(scheme)
        if grant is None:
            raise SourceError(errno.EACCES, "the client said nothing about such addresses", uri)
        return grant.options

    def _tell_refused(self, failure: SourceError) -> None:
        """Log a refused read in a daemon, once for each account and server."""
        reason = failure.strerror or ""
        if self.grants is None or failure.errno != errno.EACCES or not is_remote(failure.uri):
            return
        if reason not in self._told_refused:
            self._told_refused.add(reason)
            log.warning("%s: %s", failure.uri, reason)

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


def _neighbours(
    file: NDArray[np.integer], offset: Ints, length: Ints
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Sort objects by file and offset, and join adjacent ones to runs.

    Returns:
        The (k,) order of the objects, the (r + 1,) bounds of the runs in it, and the (f + 1,)
        bounds of the files among the runs.

    >>> _neighbours(np.array([1, 2, 1]), np.array([4, 0, 0]), np.full(3, 4))
    (array([2, 0, 1]), array([0, 2, 3]), array([0, 1, 2]))
    """
    if len(file) == 1:  # as often: the arrays below cost as much as the read
        return np.zeros(1, np.intp), np.arange(2), np.arange(2)
    order = np.lexsort((offset, file))
    f, o, n = file[order], offset[order], length[order]
    new_file = np.ones(len(order) + 1, np.bool_)
    new_file[1:-1] = f[1:] != f[:-1]
    new_run = new_file.copy()
    new_run[1:-1] |= o[1:] != o[:-1] + n[:-1]
    bounds = new_run.nonzero()[0]
    if len(order) > _MAX_JOINED:
        joined = pairwise(bounds.tolist())
        starts = [i for a, b in joined for i in range(a, b, _MAX_JOINED)]
        bounds = np.array([*starts, len(order)])
    return order, bounds, new_file[bounds].nonzero()[0]


def _runs(offset: Ints, length: Ints, parts: list[Part], bounds: NDArray[np.intp]) -> list[Run]:
    """Return the reads of objects that are sorted, joined between each two of `bounds`."""
    first = bounds[:-1]
    if len(first) == len(parts):
        return list(zip(offset.tolist(), length.tolist(), parts, strict=True))
    nbytes = np.add.reduceat(length, first).tolist()
    joined = (
        [buffer for part in parts[a:b] for buffer in part] for a, b in pairwise(bounds.tolist())
    )
    return list(zip(offset[first].tolist(), nbytes, joined, strict=True))
