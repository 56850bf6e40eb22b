"""creel.open and creel.read: the bytes at an address, from the cache where it has them.

For a person's own `__getitem__`. A dataset that says which addresses it reads (see
`creel.loader.sources`) finds them in the cache; every other address is read directly.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
from io import BufferedReader
from typing import IO, Any, cast

from creel.errors import ConfigError
from creel.loader.reading import declared, hearing, take_address, take_found
from creel.loader.storage import absolute, read_all, scheme_of

#: Of a file that is opened, what must be read for it to be worth a place in the cache: 1/4 ...
_WORTH = 4
#: ... or it is so small (bytes) that a copy of all of it costs no more than to open it.
_SMALL = 1 << 16


class Opened(io.BytesIO):
    """A file in memory: the caller's own copy."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name
        self._real: IO[bytes] | None = None

    @property
    def mode(self) -> str:
        """As open() was asked for."""
        return "rb"

    def fileno(self) -> int:
        """The real file's descriptor, for who maps it or hands it on: opened only then.

        Raises:
            io.UnsupportedOperation: it is not a local file.
            OSError: it is gone.
        """
        if self.closed or scheme_of(self.name):
            return super().fileno()
        if self._real is None:
            self._real = builtins.open(self.name, "rb")  # noqa: PTH123, SIM115
        return self._real.fileno()

    def peek(self, size: int = 0, /) -> bytes:
        """As that of a real file: bytes from here on, which are read again."""
        at = self.tell()
        return bytes(self.getbuffer()[at : at + max(size, io.DEFAULT_BUFFER_SIZE)])

    def close(self) -> None:
        """Also the real file, if it was opened."""
        if self._real is not None:
            self._real.close()
        super().close()


class Listened(io.BufferedIOBase):
    """A real file that minds how much of it is read.

    No BufferedReader: numpy would read one behind our back, by its descriptor.
    """

    def __init__(self, file: BufferedReader, before: Listened | None) -> None:
        """`before`: the same file, as it was opened earlier."""
        self._file = file
        status = os.fstat(file.fileno())
        self._nbytes, self._regular = status.st_size, stat.S_ISREG(status.st_mode)
        self.got: int = 0 if before is None else before.got
        self.handed: bool = before is not None and before.handed
        self.name, self.mode = file.name, file.mode

    def wanted(self) -> bool:
        """Whether a copy of all of it would do as well."""
        enough = self._nbytes <= _SMALL or self.got * _WORTH >= self._nbytes
        return enough and self._regular and not self.handed

    def fileno(self) -> int:
        """The descriptor, to be mapped, or read by somebody else."""
        self.handed = True
        return self._file.fileno()

    def read(self, size: int | None = -1, /) -> bytes:
        """As open()'s, and so are all below."""
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

    A local file that no lease covers is the real file (with a descriptor, so that it can be
    mapped); everything else is a copy in memory.

    Raises:
        ConfigError: a mode other than "rb".
    """
    if mode != "rb":
        raise ConfigError(f"creel.open reads bytes: its mode is 'rb', not {mode!r}")
    address = absolute(uri)
    found = declared(address)
    if found is None and not scheme_of(address):
        return _local(address)
    return Opened(take_found(found, address, read_all), address)


def _local(path: str) -> IO[bytes]:
    """The real file; somebody may listen."""
    real = builtins.open(path, "rb")  # noqa: PTH123, SIM115  the caller closes it
    listener = hearing()
    if listener is None:
        return real
    before = listener.asked.get(path)
    file = Listened(real, before if isinstance(before, Listened) else None)
    if before is not None or path not in listener.asked:  # else all of it was read
        listener.asked[path] = file
    return cast(IO[bytes], file)
