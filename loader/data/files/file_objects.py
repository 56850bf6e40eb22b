"""File objects that stand in for those of Python's `open`: copies in memory.

Each is an `io.BufferedReader` or `io.FileIO`, since libraries test for these classes.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any

from creel.cache.memory.memfd import sealed_file
from creel.cache.storage.uris import scheme_of
from creel.loader.data.reading.read_counts import os_open

#: A file whose methods say that it is closed.
CLOSED = io.FileIO.__new__(io.FileIO)


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
        self._file, self.closed = CLOSED, True

    def __repr__(self) -> str:
        return shown(self)


def in_memory(data: bytes, name: Any) -> MemoryFile:
    """Return a raw file with these bytes, and the name of the file that they are a copy of."""
    file = MemoryFile.__new__(MemoryFile)
    file._file, file.name = io.BytesIO(data), name  # noqa: SLF001  they share the memory
    return file


def shown(raw: io.FileIO) -> str:
    """Return the representation of an `io.FileIO`."""
    if raw.closed:
        return "<_io.FileIO [closed]>"
    return f"<_io.FileIO name={raw.name!r} mode={raw.mode!r} closefd=True>"


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
