"""File objects that stand in for those of Python's `open`: copies in memory, and observed files.

Each is an `io.BufferedReader` or `io.FileIO`, since libraries test for these classes.
"""

from __future__ import annotations

import errno
import io
import os
from typing import TYPE_CHECKING, Any

from creel.cache.memory.memfd import sealed_file
from creel.cache.storage.uris import scheme_of
from creel.loader.data.reading.read_counts import PartialRead, os_open
from creel.loader.data.reading.this_thread import this_thread

if TYPE_CHECKING:
    _Reader = io.BufferedReader
else:
    _Reader = object


#: A file whose methods say that it is closed.
_CLOSED = io.FileIO.__new__(io.FileIO)


class MemoryFile(io.FileIO):
    """A raw file whose bytes are in memory; it gets a descriptor once it is asked for one.

    `open` returns an `io.BufferedReader` over it, or for `buffering=0` the raw file itself.
    """

    #: Attributes, because Python's buffer asks for them at each call.
    closed, mode = False, "rb"

    def __init__(self, *args: Any, **more: Any) -> None:
        """Open a file as `io.FileIO` does; `in_memory` makes the others."""
        self._file: io.BytesIO | io.FileIO = io.FileIO(*args, **more)
        self.name, self.mode = self._file.name, self._file.mode

    @property
    def in_memory(self) -> bool:
        """Whether the file has no descriptor."""
        return isinstance(self._file, io.BytesIO)

    def _real(self) -> io.FileIO:
        """Return the file, which from now on is in a file of the system, at the same position."""
        memory = self._file
        if isinstance(memory, io.FileIO):
            return memory
        at = memory.tell()
        try:
            real = io.FileIO(memory_file(memory.getvalue()))
        except OSError:
            if scheme_of(os.fsdecode(self.name)):
                raise
            real = io.FileIO(self.name)  # no memory for another copy
        real.seek(at)
        self._file = real
        return real

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as a file does; the same holds for all methods below."""
        return self._file.read(size)

    def readall(self) -> bytes:
        return self._file.read()

    def readinto(self, buffer: Any, /) -> int:
        return self._file.readinto(buffer)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Seek as a file does. BytesIO would stop at the beginning, and has no SEEK_DATA."""
        file = self._file
        if isinstance(file, io.BytesIO):
            if not 0 <= whence <= os.SEEK_END:
                file = self._real()
            elif offset < 0 and offset + (0, file.tell(), len(file.getvalue()))[whence] < 0:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return file.seek(offset, whence)

    def readable(self) -> bool:
        return self._file.readable()

    def seekable(self) -> bool:
        return self._file.seekable()

    def isatty(self) -> bool:
        return self._file.isatty()

    def writable(self) -> bool:
        return self._real().writable()

    def write(self, data: Any, /) -> int:
        return self._real().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        return self._real().truncate(size)

    def fileno(self) -> int:
        return self._real().fileno()

    def close(self) -> None:
        self._file.close()
        self._file, self.closed = _CLOSED, True

    def __repr__(self) -> str:
        return _shown(self)


def in_memory(data: bytes, name: Any) -> MemoryFile:
    """Return a raw file with these bytes, and the name of the file that they are a copy of."""
    file = MemoryFile.__new__(MemoryFile)
    file._file, file.name = io.BytesIO(data), name  # noqa: SLF001  they share the memory
    return file


def _shown(raw: io.FileIO) -> str:
    """Return the representation of an `io.FileIO`."""
    if raw.closed:
        return "<_io.FileIO [closed]>"
    return f"<_io.FileIO name={raw.name!r} mode={raw.mode!r} closefd=True>"


class _Observed(_Reader):
    """Counts how many bytes of a real file are read; above one of Python's classes of files."""

    _part: PartialRead | None = None  # counts the bytes read
    _handed_on: int | None = None  # position when the descriptor was given out

    def observe(self, part: PartialRead) -> None:
        """Begin to count. A file that a library makes by `type(file)(...)` does not."""
        self._part = part

    def fileno(self) -> int:
        """Return the descriptor. Its position later shows the reads made through it."""
        self._count_moved()
        fd = super().fileno()
        if self._part is not None:
            self._handed_on = os.lseek(fd, 0, os.SEEK_CUR) if self.seekable() else None
        return fd

    def _count_moved(self) -> None:
        """Count the bytes read through the descriptor since it was given out."""
        if self._handed_on is not None and self._part is not None:
            moved = os.lseek(super().fileno(), 0, os.SEEK_CUR) - self._handed_on
            self._part.count(max(moved, 0))
        self._handed_on = None

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._count_moved()
        return super().seek(offset, whence)

    def close(self) -> None:
        if self._part is not None and not self.closed:
            self._count_moved()
        super().close()

    def read(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().read(size))

    def readinto(self, buffer: Any, /) -> int:
        return self._counted_in(super().readinto(buffer))

    def _counted(self, data: bytes) -> bytes:
        self._count(len(data))
        return data

    def _counted_in(self, got: int) -> int:
        self._count(got or 0)
        return got

    def _count(self, nbytes: int) -> None:
        if self._part is not None:
            self._part.count(nbytes)
            self._handed_on = None  # Python's buffer moves the position too

    def _left(self) -> None:
        """Count this thread's reads from now on, since the file is read by other means."""
        observed = this_thread.observed
        if self._part is not None and observed is not None:
            self._part.count_thread(observed.thread)


_read = io.BufferedReader.read


class ObservedFile(_Observed, io.BufferedReader):
    """What `open(path, "rb")` returns while the reads of a large file are recorded."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = _read(self, size)  # `super()` takes longer than the read of a few bytes
        if self._part is not None:
            self._part.count(len(data))
            self._handed_on = None
        return data

    def read1(self, size: int = -1, /) -> bytes:
        return self._counted(super().read1(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().readline(size))

    def readinto1(self, buffer: Any, /) -> int:
        return self._counted_in(super().readinto1(buffer))

    @property
    def raw(self) -> Any:  # type: ignore[override]  # read-only for a BufferedReader too
        """The file without Python's buffer."""
        if not self.closed:
            self.fileno()  # its position shows what is read
        return super().raw

    def detach(self) -> io.RawIOBase:
        self._left()
        return super().detach()

    def __repr__(self) -> str:
        return f"<_io.BufferedReader name={self.name!r}>"  # shown in Pillow's errors

    def __reduce_ex__(self, protocol: Any) -> Any:
        return io.BufferedReader(io.BytesIO()).__reduce_ex__(protocol)  # raises what it raises


class ObservedRaw(_Observed, io.FileIO):  # type: ignore[misc]  # `_Reader` is no base
    """The same without Python's buffer (`buffering=0`)."""

    def readall(self) -> bytes:
        return self._counted(super().readall())

    def __repr__(self) -> str:
        return _shown(self)


def taken_over(real: Any, buffering: int) -> ObservedFile | ObservedRaw:
    """Take over the file that `open(path, "rb", buffering)` has just returned."""
    if buffering:
        raw = real.detach()
        return ObservedFile(raw, raw._blksize if buffering < 0 else buffering)  # noqa: SLF001  Python's choice
    file = ObservedRaw(os.dup(real.fileno()))  # type: ignore[arg-type]  # made as a FileIO
    file.name = real.name
    real.close()
    return file


def read_by_methods(file: Any) -> bool:
    """Whether numpy shall call this file's methods, although it has a descriptor.

    A copy in memory would need another copy to get one, and reads by descriptor are not counted.
    """
    raw = file.raw if type(file) is io.BufferedReader else file
    return raw.in_memory if type(raw) is MemoryFile else isinstance(raw, _Observed)


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
