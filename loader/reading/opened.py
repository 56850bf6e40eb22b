"""creel.open and creel.read: the bytes at an address, from the cache if they are there.

For use in a dataset's own `__getitem__`. Addresses that the dataset declares (see
`creel.loader.binding.bind`) are served from the cache; every other address is read directly.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
from io import BufferedReader
from typing import IO, Any, cast

from creel.errors import ConfigError
from creel.loader.reading.lease import declared, hearing, take_address, take_found
from creel.loader.reading.storage import absolute, read_all, scheme_of

#: An opened file is worth caching if at least 1/4 of it was read ...
_WORTH = 4
#: ... or if it is at most this many bytes: copying all of it costs no more than opening it.
_SMALL = 1 << 16


class CachedFile(io.BytesIO):
    """A file in memory, over the caller's own copy of the bytes."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name
        self._real: IO[bytes] | None = None

    @property
    def mode(self) -> str:
        """As of a file from open()."""
        return "rb"

    def fileno(self) -> int:
        """The real file's descriptor, to be mapped or passed on; opened at the first call.

        Raises:
            io.UnsupportedOperation: not a local file.
            OSError: the file is gone.
        """
        if self.closed or scheme_of(self.name):
            return super().fileno()
        if self._real is None:
            self._real = builtins.open(self.name, "rb")  # noqa: PTH123, SIM115
        return self._real.fileno()

    def peek(self, size: int = 0, /) -> bytes:
        """As for a real file: the next bytes, without moving the position."""
        at = self.tell()
        return bytes(self.getbuffer()[at : at + max(size, io.DEFAULT_BUFFER_SIZE)])

    def close(self) -> None:
        """Close this and the real file, if it was opened."""
        if self._real is not None:
            self._real.close()
        super().close()


class ObservedFile(io.BufferedIOBase):
    """A real file that counts how many bytes of it are read.

    Not a BufferedReader: numpy would read that through its descriptor, uncounted.
    """

    def __init__(self, file: BufferedReader, before: ObservedFile | None) -> None:
        """`before`: the earlier ObservedFile of the same path, whose count is continued."""
        self._file = file
        status = os.fstat(file.fileno())
        self._nbytes, self._regular = status.st_size, stat.S_ISREG(status.st_mode)
        self.got: int = 0 if before is None else before.got
        self.handed: bool = before is not None and before.handed
        self.name, self.mode = file.name, file.mode

    def wanted(self) -> bool:
        """Whether the whole file is worth caching."""
        enough = self._nbytes <= _SMALL or self.got * _WORTH >= self._nbytes
        return enough and self._regular and not self.handed

    def fileno(self) -> int:
        """The descriptor; what is read through it is not counted."""
        self.handed = True
        return self._file.fileno()

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file from open(); the same for all methods below."""
        return self._counted(self._file.read(size))

    def read1(self, size: int = -1, /) -> bytes:
        return self._counted(self._file.read1(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(self._file.readline(size))

    def readinto(self, buffer: Any, /) -> int:
        got = self._file.readinto(buffer)
        self.got += got
        return got

    def readinto1(self, buffer: Any, /) -> int:
        got = self._file.readinto1(buffer)
        self.got += got
        return got

    def peek(self, size: int = 0, /) -> bytes:
        return self._file.peek(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return self._file.readable()

    def seekable(self) -> bool:
        return self._file.seekable()

    def close(self) -> None:
        self._file.close()
        super().close()

    def _counted(self, data: bytes) -> bytes:
        self.got += len(data)
        return data


def read(uri: str | os.PathLike[str]) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: as `open` would for a local file; SourceError (an OSError) for a remote one.
    """
    return take_address(absolute(uri), read_all)


def open(uri: str | os.PathLike[str], mode: str = "rb") -> IO[bytes]:  # noqa: A001 - creel.open
    """A file object over the bytes at an address.

    A local file that no lease covers is opened as the real file (with a descriptor, so that it can
    be mapped); everything else is a copy in memory.

    Raises:
        ConfigError: a mode other than "rb".
    """
    if mode != "rb":
        raise ConfigError(f"creel.open reads bytes: its mode is 'rb', not {mode!r}")
    address = absolute(uri)
    found = declared(address)
    if found is None and not scheme_of(address):
        return _local(address)
    return CachedFile(take_found(found, address, read_all), address)


def _local(path: str) -> IO[bytes]:
    """Open the real file, observed if this thread's reads are being recorded."""
    real = builtins.open(path, "rb")  # noqa: PTH123, SIM115  the caller closes it
    listener = hearing()
    if listener is None:
        return real
    before = listener.asked.get(path)
    file = ObservedFile(real, before if isinstance(before, ObservedFile) else None)
    if (
        before is not None or path not in listener.asked
    ):  # else a read of the whole file is recorded already
        listener.asked[path] = file
    return cast(IO[bytes], file)
