"""creel.open and creel.read: the bytes at an address, from the cache if they are there.

For use in a dataset's own `__getitem__`. Addresses that the dataset declares, or that it was seen
to read before (see `creel.loader.binding`), are served from the cache; every other address is read
directly.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
from io import BufferedReader
from typing import IO, Any, cast

from creel.errors import ConfigError
from creel.loader.reading.observer import find, leased, observing, take_address
from creel.loader.reading.storage import absolute, read_all, scheme_of


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

    def __repr__(self) -> str:
        return f"<_io.BufferedReader name={self.name!r}>"  # Pillow's errors show it

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

    Not a BufferedReader: numpy would read that through its descriptor, uncounted. What is not
    defined here is done by the base class with these methods.
    """

    def __init__(self, file: BufferedReader) -> None:
        """Count for the thread's `ObservedReads`."""
        observed = observing()
        assert observed is not None  # noqa: S101  see `_local`
        self._file = file
        status = os.fstat(file.fileno())
        regular = stat.S_ISREG(status.st_mode)
        self._part = observed.opened(str(file.name), status.st_size, regular=regular)
        self.name, self.mode = file.name, file.mode

    def fileno(self) -> int:
        """The descriptor; what is read through it is not counted."""
        self._part.handed_on = True
        return self._file.fileno()

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file from open(); the same for all methods below."""
        return self._counted(self._file.read(size))

    def read1(self, size: int = -1, /) -> bytes:
        return self._counted(self._file.read1(size))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(self._file.readline(size))

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
        self._part.got += len(data)
        return data


def read(uri: str | os.PathLike[str]) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: as `open` would for a local file; SourceError (an OSError) for a remote one.
    """
    address = absolute(uri)
    return take_address(address, find(address), read_all)


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
    number = find(address)
    if number is None and not scheme_of(address):
        return _local(address)
    return CachedFile(take_address(address, number, read_all), address)


def _local(path: str) -> IO[bytes]:
    """Open the real file, observed if this thread's reads are being recorded."""
    real = builtins.open(path, "rb")  # noqa: PTH123, SIM115  the caller closes it
    return real if observing() is None else cast(IO[bytes], ObservedFile(real))


def open_as_python(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
    """Python's `open`, but for a local file to be read as bytes while a lease or record is active.

    It stands in for `open` in the modules whose reads of files creel serves.
    """
    plain = mode != "rb" or args or more or not isinstance(file, (str, os.PathLike))
    if plain or not (leased() or observing()) or "://" in os.fspath(file):
        return builtins.open(file, mode, *args, **more)  # noqa: PTH123  the caller closes it
    return open(file)
