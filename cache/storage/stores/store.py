"""Stores: the interface (`Store`) to all kinds of storage, and the store of local files.

Local files are read with `pread` straight into the caller's buffers. `remote.py` has the other
stores, `cache/storage/source.py` the retries.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from creel.cache.memory.buffers import cut
from creel.cache.memory.memfd import Descriptor
from creel.cache.storage import version
from creel.cache.storage.manifest import ANY, UNKNOWN
from creel.errors import SourceError
from creel.system.limits import IOV_MAX, memory


class StoredFile(NamedTuple):
    """A file. `keep`: it has several objects; `whole`: it is a single object, from byte 0 on.

    `min_nbytes`: least size in bytes that the manifest implies; the exact size if `whole`. `row`:
    one of its rows in the manifest, which tells how a remote file is reached. `pinned`: the version
    that is to be read, or ANY.
    """

    uri: str
    keep: bool = False
    whole: bool = False
    min_nbytes: int = UNKNOWN
    row: int = -1
    pinned: int = ANY


#: Adjacent bytes of one file: their offset, their number, and the buffers to fill with them.
Run: TypeAlias = tuple[int, int, Sequence[memoryview]]


class Filled(NamedTuple):
    """The result of runs: the number of opens, the version that was read, and how many they are."""

    opens: int
    version: int
    runs: int = 1


class Store(Protocol):
    """One kind of storage."""

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """Return `length` bytes from `offset` on (UNKNOWN: the whole object), and their version.

        versioned: whether the version is needed, which may cost a request. Otherwise it may be
            UNKNOWN, and a file written to meanwhile may be torn, as in the user's own reads.
        """

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterable[Filled]:
        """Fill the buffers of one run after the other; give the result of one or several.

        May end before a run that fails, of which a call that begins with it then says why.
        """

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        """Return the current version of each address, or the exception instead."""

    def status(self, uri: str) -> tuple[int | None, int]:
        """Return size (None if the storage does not tell) and version of a file, by one request."""

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """Yield the name below `root`, and the size or UNKNOWN, of each file there."""


class OneRequestStore:
    """A store whose every answer has the version, so that a read is one request."""

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        """See Store."""
        del versioned
        if length == 0 and not stored.whole:
            return b"", version.UNKNOWN
        return self._read(stored, offset, length)

    def _read(self, stored: StoredFile, offset: int, length: int) -> tuple[bytes, int]:
        raise NotImplementedError


def too_short(uri: str, length: int, got: int) -> SourceError:
    """Return the error for `got` bytes if `length` were requested."""
    return SourceError(
        errno.ENODATA, f"is {length - got} bytes shorter than the manifest says", uri
    )


def wrong_size(uri: str, length: int, size: int) -> SourceError:
    """Return the error for a whole file whose size is not the object's: it is another file."""
    return SourceError(errno.ENODATA, f"has {size} bytes, the manifest says {length}", uri)


def check_size(stored: StoredFile, size: int, length: int) -> None:
    """Raise SourceError unless a file of `size` bytes can be the one in the manifest."""
    if stored.whole and size != length:
        raise wrong_size(stored.uri, length, size)
    if size < stored.min_nbytes:
        raise too_short(stored.uri, stored.min_nbytes, size)


def check_pin(stored: StoredFile, data_version: int) -> None:
    """Raise SourceError unless a version is that which the manifest was made of."""
    if stored.pinned not in (ANY, data_version):
        reason = "was replaced since the dataset was made: make it anew"
        raise SourceError(errno.ESTALE, reason, stored.uri)


# --- local files ------------------------------------------------------------------------------


_REST_NBYTES = 1 << 20  # read at once from a file that is longer than its status says
_MAX_ATTEMPTS = 3  # attempts to read a file that changes meanwhile
#: Bytes that are read ahead around a small piece, as the kernel does for mapped files: a file that
#: fits into memory is soon cached completely, in fewer reads.
_AROUND_NBYTES = 128 << 10

#: Flag for reads from the page cache only, on Linux; 0 if Python was built without it.
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)

#: Most files that a thread opens before it reads the first, so that a disk works on all of them at
#: once (benchmarks/many_files.py --raw: 1.35 times torch's speed, .8 times without).
AHEAD_FILES = 16
#: The kernel itself reads longer files ahead.
AHEAD_NBYTES = 1 << 20


def path_of(uri: str) -> str:
    """Return the path of a local address."""
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


def version_at(path: str) -> int:
    """Return the present version of a local file (`cache/storage/version.py`)."""
    now_ns = time.time_ns()
    try:
        return version.of_stat(os.stat(path), now_ns)  # noqa: PTH116  a third of the time of Path.stat
    except (OSError, ValueError):
        return version.MISSING


def read_file(path: str) -> bytes:
    """Return all bytes of a local file of any length, without the cost of a file object.

    Raises:
        OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _bytes_left(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _bytes_left(fd: int, size: int) -> bytes:
    """Return the rest of a file, which should be `size` bytes."""
    data = os.read(fd, size + 1)
    if len(data) == size > 0:
        return data
    parts = [data]  # more than 2 GiB, a file of /proc, or a file that changes
    while parts[-1]:
        parts.append(os.read(fd, _REST_NBYTES))
    return b"".join(parts)


def open_file(uri: str) -> OpenFile:
    """Open a local file for reading.

    Raises:
        OSError: the file cannot be opened.
    """
    return _open(path_of(uri))


#: By device: whether its file system keeps read-ahead pages in the page cache.
keeps_pages: dict[int, bool] = {}


def read_ahead(fd: int, nbytes: int, device: int) -> None:
    """Have the kernel start to read the first `nbytes` of a file into the page cache.

    Does nothing if the file system does not keep pages that were read ahead. It does if it supports
    RWF_NOWAIT, which is tested once for each `device` (`st_dev` of the file).
    """
    keeps = keeps_pages.get(device)
    if keeps is None:
        keeps = keeps_pages[device] = _knows_nowait(fd)
    if keeps:
        _advise(fd, 0, nbytes)


def _knows_nowait(fd: int) -> bool:
    if not _NOWAIT:
        return False
    try:
        os.preadv(fd, [bytearray(1)], 0, _NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def _advise(fd: int, offset: int, length: int) -> None:
    """Have the kernel read a range into the page cache while this thread goes on."""
    try:  # noqa: SIM105  which takes as long as the call
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass  # a hint, which not every file supports


def read_runs(fd: int, runs: Sequence[Run]) -> int:
    """Fill the buffers of runs of a file; return how many were not in the page cache.

    Cached runs are read first; the disk is asked for all others together
    (benchmarks/cold_records.py). All count as not cached if the file system cannot tell.

    Raises:
        OSError: a read failed, or the file ends before a run does.
    """
    missing = _not_cached(fd, runs)
    for run in missing:
        if _preadv(fd, run) < run[1]:
            raise OSError(errno.ENODATA, "ends too early")
    return len(missing)


def _not_cached(fd: int, runs: Sequence[Run]) -> Sequence[Run]:
    """Read the runs in the page cache; return the others, after starting to read them ahead."""
    missing = []
    if not _NOWAIT:
        return runs
    try:
        for run in runs:
            offset, length, buffers = run
            try:
                if os.preadv(fd, buffers, offset, _NOWAIT) == length:
                    continue
            except BlockingIOError:
                pass
            missing.append(run)
    except OSError:  # the file system does not support RWF_NOWAIT, or too many buffers
        return runs
    if missing:
        step = _AROUND_NBYTES if os.fstat(fd).st_size < memory().available // 2 else 1
        around = {(at // step * step, -(-(at + n) // step) * step) for at, n, _ in missing}
        for begin, end in around:
            _advise(fd, begin, end - begin)
    return missing


def read_unchanged(uri: str, opened: OpenFile | None = None) -> tuple[bytes, int]:
    """Return all bytes of a file and their version; `opened`: the open file, which is closed.

    Raises:
        OSError: the file cannot be read, is repeatedly written to, or is no regular file (a device
            has no end).
    """
    for _ in range(_MAX_ATTEMPTS):
        file, opened = opened or _open(path_of(uri)), None
        try:
            if not stat.S_ISREG(file.status.st_mode):
                raise SourceError(errno.EINVAL, "is no regular file", uri)
            data = _bytes_left(file.fd, file.status.st_size)
            if not version.torn(file.status, os.fstat(file.fd)):
                return data, version.of_stat(file.status, file.since)
        finally:
            os.close(file.fd)
    raise SourceError(errno.EBUSY, "changed while it was read", uri)


class LocalStore:
    """Reads files by path; keeps at most `files` descriptors open.

    A file with one object must have exactly its length: else it is not the file that was listed.
    """

    def __init__(self, files: int) -> None:
        self._kept = _OpenFiles(files)

    def close(self) -> None:
        self._kept.close()

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        if length == UNKNOWN and versioned:
            return read_unchanged(stored.uri)
        if length == UNKNOWN:
            return read_file(path_of(stored.uri)), version.UNKNOWN
        with self._kept.open(path_of(stored.uri), keep=stored.keep) as file:
            check_size(stored, file.status.st_size, length)
            data = os.pread(file.fd, length, offset)
            while len(data) < length:
                more = os.pread(file.fd, length - len(data), offset + len(data))
                if not more:
                    raise too_short(stored.uri, length, len(data))
                data += more
            data_version = (
                version.of_stat(file.status, file.since) if versioned else version.UNKNOWN
            )
            return data, data_version

    def fill(
        self, stored: StoredFile, runs: Sequence[Run], opened: OpenFile | None = None
    ) -> list[Filled]:
        """See Store. `opened`: the open file, which is closed; None: it is opened here."""
        if opened is None:
            with self._kept.open(path_of(stored.uri), keep=stored.keep) as file:
                return [_fill(file, stored, runs)]
        try:
            return [_fill(opened, stored, runs)]
        finally:
            os.close(opened.fd)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        versions: list[int | Exception] = []
        for uri in uris:  # no needless calls: for a million files, each microsecond is a second
            now = time.time_ns()
            try:
                path = path_of(uri) if uri.startswith("file:") else uri
                status = os.stat(path)  # noqa: PTH116  a Path costs time
                versions.append(version.of_stat(status, now))
            except Exception as e:  # noqa: BLE001  such as ValueError for a name with a zero byte
                versions.append(e)
        return versions

    def status(self, uri: str) -> tuple[int | None, int]:
        now, status = time.time_ns(), os.stat(path_of(uri))  # noqa: PTH116  as in `versions`
        return status.st_size, version.of_stat(status, now)

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        """See Store. Takes no stat of any file; yields in the order of `sorted(os.walk(root))`.

        Links are followed; unreadable folders are skipped, as by os.walk.
        """
        cut = len(root.rstrip("/")) + 1
        for folder, _, files in sorted(os.walk(root, followlinks=True)):
            inner = folder[cut:]
            prefix = f"{inner}/" if inner else ""
            for name in sorted(files):
                yield prefix + name, UNKNOWN


def _fill(file: OpenFile, stored: StoredFile, runs: Sequence[Run]) -> Filled:
    """Fill the buffers of all runs before the first that fails; raise if that is the first.

    As in `read_runs`, the disk is asked for all runs together.
    """
    before, since, run = file.status, file.since, runs[0]
    check_size(stored, before.st_size, run[1])
    for _ in range(_MAX_ATTEMPTS):
        done = len(runs)
        try:
            for run in runs if done == 1 else _not_cached(file.fd, runs):
                if (got := _preadv(file.fd, run)) < run[1]:
                    raise too_short(stored.uri, run[1], got)
        except OSError:
            if run is runs[0]:
                raise
            done = runs.index(run)
        if not version.torn(before, os.fstat(file.fd)):
            return Filled(file.opens, version.of_stat(before, since), done)
        since, before = time.time_ns(), os.fstat(file.fd)
    raise SourceError(errno.EBUSY, "changed while it was read", stored.uri)


def _preadv(fd: int, run: Run) -> int:
    """Fill all buffers; return the bytes read, fewer than requested only at the end of the file."""
    offset, length, buffers = run
    done = os.preadv(fd, buffers[:IOV_MAX], offset) if length else 0
    while 0 < done < length:  # more buffers, or more than 2 GiB
        more = os.preadv(fd, cut(list(buffers), done)[1][:IOV_MAX], offset + done)
        if not more:
            break
        done += more
    return done


class OpenFile(NamedTuple):
    """An open file: descriptor, status of the file at its path, and the number of opens.

    `since`: `time.time_ns()` before the status was read.
    """

    fd: int
    status: os.stat_result
    opens: int
    since: int


class _LastingFile:
    """A kept descriptor, which is closed when the last reference to this object is gone."""

    def __init__(self, file: OpenFile) -> None:
        self._own = Descriptor(file.fd)
        self._file = file.status.st_ino, file.status.st_dev

    def named(self, path: str) -> OpenFile | None:
        """Return the file if `path` still names it, and the number is still open, else None."""
        now = time.time_ns()
        status = os.stat(path)  # noqa: PTH116  a Path costs time
        same = (status.st_ino, status.st_dev) == self._file and self._own.valid
        return OpenFile(self._own.fd, status, 0, now) if same else None


class _OpenFiles:
    """Open descriptors of the `limit` most recently used files, shared by all threads.

    They are closed with this object, so a dropped dataset needs no close. A descriptor whose path
    now names another file is not used again. There is no lock, as a fork could copy it locked.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, _LastingFile] = OrderedDict()

    @contextmanager
    def open(self, path: str, *, keep: bool) -> Iterator[OpenFile]:
        """Yield an open file for reads at given offsets, as other threads may read it as well."""
        if not keep:
            file = _open(path)
            try:
                yield file
            finally:
                os.close(file.fd)
            return
        kept = self._kept.get(path)  # this reference keeps it open even if the entry is removed
        try:
            shared = None if kept is None else kept.named(path)
            file = shared or _open(path)
            if shared is None:
                kept = self._kept[path] = _LastingFile(file)
            self._used(path)
            yield file
        except BaseException:
            self._kept.pop(path, None)
            raise

    def close(self) -> None:
        self._kept.clear()

    def _used(self, path: str) -> None:
        with suppress(KeyError):  # another thread has removed it
            self._kept.move_to_end(path)
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)


def _open(path: str) -> OpenFile:
    now = time.time_ns()
    # O_NONBLOCK: a dataset may list a FIFO, which no sample opens.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return OpenFile(fd, os.fstat(fd), 1, now)
    except BaseException:
        os.close(fd)
        raise
