"""creel.open and creel.read: the bytes at an address, from the cache if they are there.

For use in a dataset's own `__getitem__`. The cache serves addresses that the dataset declares, or
that it was seen to read before (see `creel.loader.binding`). Every other address is read directly.
A thread's *lease* (`lease.Lease`) says what it may read from the cache now: the objects of its
step.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar, cast

from creel.cache.memory.memfd import sealed_file
from creel.cache.storage.manifest import scheme_of
from creel.cache.storage.stores import read_ahead
from creel.cache.storage.version import of_stat
from creel.errors import ConfigError
from creel.loader.reading.file_copies import FileCopies, FileCopy
from creel.loader.reading.observed import SMALL, PartialRead, os_open
from creel.loader.reading.observer import find, take_address, timed
from creel.loader.reading.storage import Options, absolute, absolute_path, read_all
from creel.loader.reading.this_thread import this_thread

T = TypeVar("T")

#: Python's own open, even while `intercept` has replaced it.
_python_open = io.open
#: Files in these folders change without a change of their status.
NO_FILES = ("/proc/", "/sys/", "/dev/")
#: Bytes that the kernel reads ahead of an opened file while the open is being recorded.
_AHEAD_NBYTES = 128 << 10


class _FileOver(io.BufferedIOBase):
    """A file object that wraps another; the base class adds the methods not defined here."""

    _file: io.BytesIO | io.BufferedReader
    name: str | bytes
    mode = "rb"

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as a file from open() does; the same holds for all methods below."""
        return self._file.read(size)

    def read1(self, size: int = -1, /) -> bytes:
        return self._file.read1(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._file.readline(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readall(self) -> bytes:
        return self.read()

    def readable(self) -> bool:
        return self._file.readable()

    def seekable(self) -> bool:
        return self._file.seekable()

    @property
    def raw(self) -> Any:
        """The file without Python's buffer."""
        self.fileno()  # gives a file in memory its descriptor
        return cast("io.BufferedReader", self._file).raw

    def close(self) -> None:
        self._file.close()
        super().close()

    def __repr__(self) -> str:
        return f"<_io.BufferedReader name={self.name!r}>"  # shown in Pillow's errors


class CachedFile(_FileOver):
    """A file in memory that holds the caller's own copy of the bytes.

    Not a BufferedReader: numpy would read that through its descriptor, which costs a second copy.
    """

    def __init__(self, data: bytes, name: str | bytes) -> None:
        self._data = data
        self._file = io.BytesIO(data)  # shares the memory
        self.name = name

    def fileno(self) -> int:
        """Return a descriptor of a file in memory, made at the first call."""
        if isinstance(self._file, io.BytesIO):
            real = self._in_memory()
            real.seek(self._file.tell())
            self._file, self._data = real, b""  # they share one position from now on
        return self._file.fileno()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seek as a file does. BytesIO would stop at the beginning, and has no SEEK_DATA."""
        memory = self._file
        if isinstance(memory, io.BytesIO):
            if whence > os.SEEK_END:
                self.fileno()
            elif offset < 0 and offset + (0, memory.tell(), len(self._data))[whence] < 0:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek(offset, whence)

    def _in_memory(self) -> io.BufferedReader:
        try:
            return os.fdopen(memory_file(self._data), "rb")
        except OSError:
            if scheme_of(os.fsdecode(self.name)):
                raise
            return _python_open(self.name, "rb")  # no memory for another copy

    def readinto(self, buffer: Any, /) -> int:
        return self._file.readinto(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        """As for a real file: the next bytes, without moving the position."""
        if not isinstance(self._file, io.BytesIO):
            return self._file.peek(size)
        at = self._file.tell()
        return bytes(self._file.getbuffer()[at : at + max(size, io.DEFAULT_BUFFER_SIZE)])


class ObservedFile(_FileOver):
    """A real file that counts how many of its bytes are read.

    Not a BufferedReader: numpy would read that through its descriptor, uncounted.
    """

    _file: io.BufferedReader

    def __init__(
        self, file: io.BufferedReader, part: PartialRead, copy: FileCopy | None = None
    ) -> None:
        """`part` counts the bytes read, and `copy` receives them."""
        self._file = file
        self._part = part
        self._copy = copy
        self._at: int | None = 0  # the position, for the copy; None: ask the file
        self._thread = threading.get_ident()
        self.name = file.name
        self._handed_on: int | None = None  # position when the descriptor was given out

    def fileno(self) -> int:
        """Return the descriptor. Its position later shows the reads made through it."""
        self._count_moved()
        if self._handed_on is None and self._copy is not None and not self._in_memory():
            _left_to_c(self._part)
        fd = self._file.fileno()
        self._at = None
        self._handed_on = os.lseek(fd, 0, os.SEEK_CUR) if self._file.seekable() else None
        return fd

    def _in_memory(self) -> bool:
        """Read a whole file that C code would read by its descriptor, if useful (`read_for_c`)."""
        observed, real, copy = this_thread.observed, self._file, self._copy
        if observed is None or copy is None or self._part.nbytes > _MAX_IN_C_NBYTES:
            return False
        if not _reads_for_c(observed.copies):
            return False
        at = real.seek(real.tell())  # the position, without Python's buffer
        data = os.pread(real.fileno(), self._part.nbytes, 0)
        if len(data) < self._part.nbytes:
            return False
        with suppress(OSError):  # no memory for the file
            memory = os.fdopen(memory_file(data), "rb")
            memory.seek(at)
            copy.add(0, data)
            copy.finish(real)
            self._part.count(len(data))
            self._file, self._copy = memory, None
            real.close()
            return True
        return False

    def _count_moved(self) -> None:
        """Count the bytes read through the descriptor since it was given out."""
        if self._handed_on is not None:
            moved = os.lseek(self._file.fileno(), 0, os.SEEK_CUR) - self._handed_on
            self._part.count(max(moved, 0))
            self._handed_on = None

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._count_moved()
        self._at = self._file.seek(offset, whence)
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._count_moved()
            if self._copy is not None:
                with suppress(OSError, ValueError):  # other code has closed the real file
                    if self._at in {None, self._file.tell()}:  # else another thread has moved it
                        self._copy.finish(self._file)
            self._part.got()
        super().close()

    def read(self, size: int | None = -1, /) -> bytes:
        return self._counted(self._file.read(size))

    def read1(self, size: int = -1, /) -> bytes:
        return self._counted(self._file.read1(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(self._file.readline(size))

    def readinto(self, buffer: Any, /) -> int:
        got = self._file.readinto(buffer)
        self._count(memoryview(buffer).cast("B")[:got] if got else b"")
        return got

    def peek(self, size: int = 0, /) -> bytes:
        return self._file.peek(size)

    def _counted(self, data: bytes) -> bytes:
        self._count(data)
        return data

    def _count(self, data: bytes | memoryview) -> None:
        self._part.count(len(data))
        self._handed_on = None  # Python's buffer moves the position too
        if self._thread != threading.get_ident():  # another thread's reads would be interleaved
            self._copy = None
        if self._copy is not None:
            at = self._file.tell() - len(data) if self._at is None else self._at
            self._copy.add(at, data)
            self._at = None if self._at is None else at + len(data)


def memory_file(data: bytes) -> int:
    """Return a read-only descriptor, at position 0, of a new file in memory with these bytes.

    Raises:
        OSError: there is no memory for it, or no /proc.
    """
    fd = sealed_file("creel-file", lambda file: file.write(data))
    try:
        # Before Linux 6.7, a sealed memfd cannot be mapped shared through a writable descriptor.
        return os_open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def read(uri: str | os.PathLike[str], *, storage_options: Options = None) -> bytes:
    """Return all bytes of a file, from the cache if they are there.

    Args:
        uri: a path, or an address such as "s3://bucket/key".
        storage_options: of the client that reads a remote file, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides. The
            cache has what was read with the options of its dataset.

    Raises:
        OSError: as Python's `open` for a local file; SourceError (an OSError) for a remote one.
    """
    address = absolute(uri)
    direct = partial(read_all, options=storage_options)
    return take_address(address, find(address, storage_options), direct, storage_options)


def open(  # noqa: A001  creel.open
    uri: str | os.PathLike[str], mode: str = "rb", *, storage_options: Options = None
) -> IO[bytes]:
    """Open a file for reading bytes, from the cache if they are there.

    A local file that is not in the cache is opened as the real file (with a descriptor, so that it
    can be mapped). Everything else is a copy in memory, without a descriptor.

    Args:
        uri: a path, or an address such as "s3://bucket/key".
        mode: "rb", the only one.
        storage_options: as for `read`.

    Raises:
        ConfigError: another mode.
        OSError: as Python's `open` for a local file; SourceError (an OSError) for a remote one.
    """
    if mode != "rb":
        raise ConfigError(f"creel.open reads bytes: its mode is 'rb', not {mode!r}")
    address = absolute(uri)
    number = find(address, storage_options)
    if number is None and not scheme_of(address):
        return open_local(address)
    direct = partial(read_all, options=storage_options)
    data = take_address(address, number, direct, storage_options)
    return cast(IO[bytes], CachedFile(data, address))


def open_local(path: str) -> IO[bytes]:
    """Open the real file, observed if this thread's reads are being recorded."""
    real, waited_ns = timed(lambda: _python_open(path, "rb"))
    file: IO[bytes] = observed_file(real, path, waited_ns=waited_ns)
    return file


def observed_file(real: Any, address: str, *, waited_ns: int) -> Any:
    """Wrap a file just opened so that its reads are counted, if this thread is being recorded.

    `waited_ns`: how long the storage made the thread wait. If it did, the bytes read are kept.
    """
    observed = this_thread.observed
    if observed is None:
        return real
    fd, now_ns = real.fileno(), time.time_ns()
    status = os.fstat(fd)
    if not _cacheable(status, address):
        return real
    nbytes = status.st_size
    read_ahead(fd, min(nbytes, _AHEAD_NBYTES), status.st_dev)  # the kernel reads meanwhile
    if nbytes <= SMALL and not waited_ns:
        observed.opened_small(address, status, now_ns)
        return real
    of = of_stat(status, now_ns)
    part, copy = observed.opened(address, nbytes, of, waited_ns), None
    if waited_ns and observed.copies is not None:
        copy = observed.copies.begin(address, nbytes, of)
    if copy is not None and part is None:
        part = PartialRead(nbytes, waited_ns)
    return real if part is None else ObservedFile(real, part, copy)


#: Status of a file, and its version.
Look = tuple[os.stat_result, int]


def look(file: int | str) -> Look | None:
    """Return status and version of a file, by descriptor or path; None if unreadable or unrecorded.

    Called just before a library opens the file: a network file system then answers the library from
    its cache.
    """
    if this_thread.observed is None:
        return None
    now_ns = time.time_ns()
    try:
        status = os.stat(file)  # noqa: PTH116
    except OSError:
        return None
    return status, of_stat(status, now_ns)


def opened_part(found: Look | None, address: str, waited_ns: int = 0) -> PartialRead | None:
    """Record that a file was opened; return where its reads are counted, None if nowhere.

    `found`: the result of `look` for the file.
    """
    observed = this_thread.observed
    if observed is None or found is None or not _cacheable(found[0], address):
        return None
    return observed.opened(address, found[0].st_size, found[1], waited_ns)


def _cacheable(status: os.stat_result, address: str) -> bool:
    """Whether this is a regular file with bytes. An empty one may be a lock: never cached."""
    regular = stat.S_ISREG(status.st_mode) and status.st_size > 0
    return regular and not address.startswith(NO_FILES)


#: What C code reads cannot be kept, unless it is read here, whole, and handed to C from memory. So
#: C reads one file. If it waited, and read nearly all of that file, the next 32 are read for it.
#: Then C reads one again, since it may want only parts by now.
_READ_FOR_C = 32
#: Share of a file that counts as nearly all; a copy may lack the rest too (`file_copies`).
_NEARLY_ALL = 15 / 16
_MAX_IN_C_NBYTES = 64 << 20


def read_in_c(found: Look | None, address: str, *, waited_ns: int) -> PartialRead | None:
    """Record a file that was opened, but is not read through a Python file object.

    Args:
        found: the result of `look` for the file.
        waited_ns: how long the storage made the thread wait. If it did not, only a small file is
            worth caching: the library spends more on a copy of a large one than on the page cache.

    Returns:
        Where its reads are counted; None if nowhere.
    """
    part, observed = opened_part(found, address, waited_ns), this_thread.observed
    if part is not None and observed is not None and waited_ns:
        part.count_thread(observed.thread)
    _left_to_c(part)
    return part


def whole_in_c(address: str, reading: Callable[[], T]) -> T:
    """Call `reading`, which reads a whole file in C, and record that."""
    found, waited_ns = timed(reading)
    _left_to_c(PartialRead(0, waited_ns))  # a whole file counts as nearly all
    if this_thread.observed is not None:
        this_thread.observed.add(address)
    return found


def _left_to_c(part: PartialRead | None) -> None:
    """Remember how much of this file C reads, for `read_for_c`."""
    observed = this_thread.observed
    if observed is not None and observed.copies is not None:
        observed.copies.read_in_c, observed.copies.read_here = part, 0


def read_for_c(address: str) -> bytes | None:
    """Read a whole file in place of C code, keeping it for the daemon; None: leave it to C."""
    observed = this_thread.observed
    if observed is None or not _reads_for_c(observed.copies):
        return None
    if address.startswith(NO_FILES):
        return None
    with suppress(OSError), open_local(address) as file:
        nbytes = file.seek(0, os.SEEK_END)  # an empty file may be a lock
        file.seek(0)
        return file.read() if 0 < nbytes <= _MAX_IN_C_NBYTES else None
    return None


def _reads_for_c(copies: FileCopies | None) -> bool:
    if copies is None or copies.read_in_c is None or copies.read_here >= _READ_FOR_C:
        return False
    last = copies.read_in_c
    if not last.waited_ns or last.got_last < last.nbytes * _NEARLY_ALL:
        return False
    copies.read_here += 1
    return True


def open_as_python(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
    """Python's `open`, but local files opened with "rb" go through `open` during a lease or record.

    It replaces `open` in modules whose file reads creel serves.
    """
    plain = mode != "rb" or args or more or not isinstance(file, (str, os.PathLike))
    idle = this_thread.lease is None and this_thread.observed is None
    if plain or idle or "://" in os.fspath(file):
        return builtins.open(file, mode, *args, **more)  # noqa: PTH123  the caller closes it
    return open(file)


# --- files that user code opens itself ----------------------------------------------------------


def local_address(file: object) -> str | None:
    """Return the cache's address of `file`; None if it is not the plain path of a file.

    >>> local_address("/data/./a//b"), local_address(b"/data/a"), local_address("/data/")
    ('/data/a/b', '/data/a', None)
    """
    if type(file) is not str:
        if isinstance(file, (bytes, os.PathLike)):
            file = os.fsdecode(file)
        if not isinstance(file, str):
            return None
    if not file:
        return None
    if file[0] == "/" and "//" not in file and "/." not in file and file[-1] != "/":
        return file  # the usual case
    if file[-1] == "/" or "://" in file or "\0" in file:
        return None
    return absolute_path(file)
