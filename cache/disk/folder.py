"""The folder and the data file of a disk tier: ownership, locking, direct reads and writes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from creel.cache.memory.memfd import Descriptor
from creel.system.transfers import transfer

_OBJECTS_FILE = "objects"
_LEAVING_FILE = "leaving"
#: Longest wait, in s, for a folder that a daemon is about to leave; pause between two tries.
LEAVING_S, _LOOK_AGAIN_S = 10.0, 0.05
#: The file grows by this many bytes at a time; allocation ahead keeps it in few extents.
SEGMENT_NBYTES = 256 << 20
#: Room that stays free for the index: a part (1/n) of the free bytes, and some more bytes.
_INDEX_SHARE, _INDEX_NBYTES = 64, 1 << 20
#: Alignments of direct reads and writes that disks may require.
_ALIGNMENTS = (512, 4096)


def open_folder(path: str) -> int:
    """Return the descriptor of `private_folder(path)`, locked.

    The kernel releases the lock when the process ends, however it ends. If another process holds
    the lock and has called `mark_leaving`, this waits for it.

    Raises:
        OSError: as `private_folder`; another process uses the folder (EWOULDBLOCK).
    """
    fd = private_folder(path)
    try:
        _lock(fd, _own(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def private_folder(path: str) -> int:
    """Return a descriptor of this user's own folder below `path`, creating the folder if needed.

    Raises:
        OSError: it cannot be created; another user owns it, or others have access to it (EPERM).
    """
    own = _own(path)
    own.mkdir(0o700, exist_ok=True)  # no parents: `path` is missing if the disk is not mounted
    fd = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_private(fd, own)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def subfolder(path: str, name: str) -> Iterator[int]:
    """Yield a descriptor of a folder inside `private_folder(path)`, creating it if needed.

    Raises:
        OSError: as `private_folder`.
    """
    own = private_folder(path)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=own)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(name, flags, dir_fd=own)
    finally:
        os.close(own)
    try:
        yield folder
    finally:
        os.close(folder)


def _own(path: str) -> Path:
    return Path(path) / f"creel-{os.getuid()}"


def _check_private(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(
            errno.EPERM, "other users have access to it: it needs mode 0700", str(path)
        )


def _lock(fd: int, path: Path) -> None:
    while not locked(fd):
        if not _is_left(fd):
            raise BlockingIOError(errno.EWOULDBLOCK, "another daemon uses it", str(path))
        time.sleep(_LOOK_AGAIN_S)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_LEAVING_FILE, dir_fd=fd)


def locked(fd: int) -> bool:
    """Lock until this process and its forks have closed `fd`; False if another one has the lock.

    Raises:
        OSError: the file system has no locks.
    """
    import fcntl  # missing on Windows, where this module is imported as well

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def mark_leaving(folder: int) -> None:
    """Announce in the folder that its lock will be free within `LEAVING_S`.

    Raises:
        OSError: the mark cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_LEAVING_FILE, dir_fd=folder)
    os.close(os.open(_LEAVING_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder))


def _is_left(folder: int) -> bool:
    try:
        since = os.stat(_LEAVING_FILE, dir_fd=folder).st_mtime
    except FileNotFoundError:
        return False
    return abs(time.time() - since) < LEAVING_S


class DataFile:
    """The file that holds all records, preallocated in segments.

    Reads and writes bypass the page cache if the file system allows that (less CPU, and no second
    copy in memory: benchmarks/disk.py); else the pages are dropped from the cache afterwards. All
    offsets and sizes are multiples of `unit`, and buffers begin at pages (`buffer`).

    Args:
        folder: descriptor of the folder.
        budget: largest size, in bytes.
        keep_free: bytes that must stay free on the file system.
    """

    def __init__(self, folder: int, budget: int, keep_free: int) -> None:
        self._keep_free = keep_free
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        #: None when closed; a thread that is reading has a reference of its own.
        self._open: Descriptor | None = Descriptor(
            os.open(_OBJECTS_FILE, flags, 0o600, dir_fd=folder)
        )
        least = self._probe(folder)
        self.unit = max(least, _unit(budget))
        self._budget = budget // self.unit * self.unit
        self._shrink()

    @property
    def _own(self) -> Descriptor:
        if self._open is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._open

    def _probe(self, folder: int) -> int:
        """Reopen the file for direct access if possible; return the least unit."""
        self.direct = False
        try:
            flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            own = Descriptor(os.open(_OBJECTS_FILE, flags, dir_fd=folder))
        except OSError:  # this file system has no direct access
            return _ALIGNMENTS[0]
        for least in _ALIGNMENTS:
            try:
                os.preadv(own.fd, [buffer(2 * least)[least:]], least)
            except OSError:
                continue
            self._open, self.direct = own, True
            return least
        return _ALIGNMENTS[0]

    def _shrink(self) -> None:
        self.nbytes = os.fstat(self._own.fd).st_size // self.unit * self.unit
        if self.nbytes > self._budget:
            self.nbytes = self._budget
            os.ftruncate(self._own.fd, self.nbytes)

    @property
    def limit(self) -> int:
        """Bytes that the file may grow to now."""
        stats = os.fstatvfs(self._own.fd)
        room = max(stats.f_bavail * stats.f_frsize - self._keep_free - _INDEX_NBYTES, 0)
        room -= room // _INDEX_SHARE
        return min(self._budget, self.nbytes + room) // self.unit * self.unit

    def grow(self) -> int:
        """Allocate another segment, within the limit; return the new bytes, 0 if there are none."""
        more = min(self.limit - self.nbytes, SEGMENT_NBYTES) // self.unit * self.unit
        if more <= 0:
            return 0
        try:
            os.posix_fallocate(self._own.fd, self.nbytes, more)
        except OSError as e:
            if e.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            return 0
        self.nbytes += more
        return more

    def read(self, view: memoryview, offset: int) -> int:
        """Fill a view; return the number of bytes read, fewer only at the end of the file."""
        own = self._own
        got = os.preadv(own.fd, [view], offset)
        if not self.direct:
            os.posix_fadvise(own.fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        return got

    def write(self, view: memoryview, offset: int) -> None:
        own = self._own
        transfer(os.pwritev, own.fd, [view], offset)
        if not self.direct:  # drops all pages that are written back already
            os.posix_fadvise(own.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._open = None


def buffer(nbytes: int) -> memoryview:
    """Return zeroed memory that begins at a page, as direct access requires."""
    return memoryview(mmap.mmap(-1, nbytes))


def _unit(budget: int) -> int:
    """Return the least unit with which a disk of this size has fewer than 2**31 units.

    >>> _unit(1 << 30), _unit(3 << 40)
    (512, 2048)
    """
    unit = _ALIGNMENTS[0]
    while budget // unit >= 1 << 31:
        unit *= 2
    return unit
