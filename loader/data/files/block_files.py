"""File objects of large files, which ask the cache for the blocks of each read.

So a file that stays open from sample to sample is served too. While reads are recorded, a file says
which parts of it each sample reads.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from creel.cache.memory.memfd import Descriptor
from creel.cache.storage.lookup import read_part
from creel.cache.storage.stores.access import Options
from creel.cache.storage.version import of_stat
from creel.loader.data.files.file_objects import CLOSED, MemoryFile
from creel.loader.data.reading.read_counts import PartialRead, os_open
from creel.loader.data.reading.this_thread import reader

if TYPE_CHECKING:
    from creel.loader.data.reading.lease import Lease
    from creel.loader.data.reading.this_thread import ReadRecord

T = TypeVar("T")


class _Parts:
    """Reads of a file for the samples that threads read: from the cache, else recorded."""

    _address = ""  # "": not read for samples
    _options: Options = None
    _sample = 0  # whose reads are recorded in `_part`
    _part: PartialRead | None = None

    def _state(self) -> tuple[int, int]:
        """Return the file's size and version now."""
        raise NotImplementedError

    def _recorded_by(self, observed: ReadRecord) -> PartialRead | None:
        """Return where the reads of the present sample are recorded."""
        raise NotImplementedError

    def _served(self, lease: Lease | None, buffer: Any, at: int, *, whole: bool) -> int | None:
        """Fill a buffer from the cache with what lies from `at` on.

        Returns how many bytes; None if the source has to be read. `whole`: a part is not enough.
        """
        if lease is None or not lease.serves or not self._address:
            return None
        (nbytes, version), out = self._state(), memoryview(buffer).cast("B")
        wanted, done = min(len(out), max(nbytes - at, 0)), 0
        if not wanted and not lease.in_blocks(self._address, self._options):
            return None
        while done < wanted:
            copied = lease.copy_part(
                self._address, at + done, nbytes, version, out[done:wanted], self._options
            )
            if copied is None:
                return None if whole or not done else done
            done += copied
        return done

    def _from_source(
        self,
        whose: tuple[Lease | None, ReadRecord | None],
        at: int,
        read: Callable[[], tuple[T, int]],
    ) -> T:
        """Return the result of `read`, which reads the source from `at` on; it tells how much."""
        (lease, observed), began = whose, time.monotonic_ns()
        result, got = read()
        if lease is not None and lease.serves:
            lease.count_direct(1, got, time.monotonic_ns() - began)
        self.note(observed, at, at + got)
        return result

    def note(self, observed: ReadRecord | None, start: int, stop: int) -> None:
        """Record that the present sample reads bytes `start` to `stop`."""
        if observed is None or not self._address:
            return
        if observed.sample != self._sample:
            self._part, self._sample = self._recorded_by(observed), observed.sample
        if self._part is not None:
            self._part.add(start, stop)

    def noted_by(self, observed: ReadRecord) -> bool:
        """Whether the present sample was recorded to read the file."""
        return observed.sample == self._sample


class BlockFile(_Parts, MemoryFile):
    """A raw local file.

    It may be opened for reading only once that is necessary: until then it holds the file by a
    descriptor that cannot be read (O_PATH), so that a file that is replaced stays what it was.
    """

    _held: Descriptor | None = None  # of a file that is not opened yet
    _at = 0  # the position in it
    _whole = False  # whether a read returns all it is asked for, as without Python's buffer
    _given_at: int | None = None  # position when the descriptor was given out

    @property
    def _unopened(self) -> bool:
        return self._held is not None and not self.closed

    def _real(self) -> io.FileIO:
        held = self._held
        if held is not None and not self.closed:
            fd = os_open(f"/proc/self/fd/{held.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._file, self._held = io.FileIO(fd), None
            self._file.seek(self._at)
        file = self._file
        assert isinstance(file, io.FileIO)  # noqa: S101
        return file

    def _status(self) -> os.stat_result:
        held = self._held
        return os.fstat(self._real().fileno() if held is None else held.fd)

    def _state(self) -> tuple[int, int]:
        now_ns, status = time.time_ns(), self._status()
        return status.st_size, of_stat(status, now_ns)

    def _recorded_by(self, observed: ReadRecord) -> PartialRead | None:
        now_ns = time.time_ns()
        again = self._sample != 0
        return observed.opened(self._address, self._status(), now_ns, again=again)

    def tell(self) -> int:
        return self._at if self._unopened else super().tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if self._unopened and whence in {os.SEEK_SET, os.SEEK_CUR, os.SEEK_END}:
            at = offset + (0, self._at, self._status().st_size)[whence]
            if at < 0:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._at = at
            return at
        self._note_moved()
        return self._real().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or self.closed:
            return self.readall()
        data = bytearray(size)
        return bytes(memoryview(data)[: self.readinto(data)])

    def readall(self) -> bytes:
        if self.closed:
            return super().readall()
        self._note_moved()
        at, whose = self.tell(), reader()
        if whose[0] is not None and whose[0].serves:
            data = bytearray(max(self._status().st_size - at, 0))
            if self._served(whose[0], data, at, whole=True) is not None:
                self._move(at + len(data))
                return bytes(data)
        return self._from_source(whose, at, lambda: (data := self._real().readall(), len(data)))

    def readinto(self, buffer: Any, /) -> int:
        if self.closed:
            return super().readinto(buffer)
        self._note_moved()
        at, whose = self.tell(), reader()
        got = self._served(whose[0], buffer, at, whole=self._whole)
        if got is not None:
            self._move(at + got)
            return got
        return self._from_source(
            whose, at, lambda: (got := self._real().readinto(buffer), got or 0)
        )

    def _move(self, at: int) -> None:
        if self._unopened:
            self._at = at
        else:
            self._real().seek(at)

    def _note_moved(self) -> None:
        """Record what was read through the descriptor since it was given out."""
        if self._given_at is not None:
            self.note(reader()[1], self._given_at, self._real().tell())
            self._given_at = None

    def fileno(self) -> int:
        """Return the descriptor. Its position later shows the reads made through it."""
        self._note_moved()
        fd = super().fileno()
        self._given_at = self._real().tell() if self.seekable() else None
        return fd

    def readable(self) -> bool:
        return self._unopened or super().readable()

    def seekable(self) -> bool:
        return self._unopened or super().seekable()

    def isatty(self) -> bool:
        return not self._unopened and super().isatty()

    def close(self) -> None:
        if not self.closed:
            self._note_moved()
        super().close()
        self._held = None


class RemoteFile(_Parts, io.RawIOBase):
    """A raw file of a store, of `nbytes` bytes.

    It stays the version that it was opened in, where the store tells versions: one that is replaced
    meanwhile raises SourceError, as bytes of both would be no file at all.
    """

    def __init__(self, address: str, nbytes: int, version: int, options: Options) -> None:
        """`version`: in which it is opened; UNKNOWN if its store does not tell."""
        self._address, self._options = address, options
        self._nbytes, self._version = nbytes, version
        self.name = address
        self._at = 0

    def _state(self) -> tuple[int, int]:
        return self._nbytes, self._version

    def _recorded_by(self, observed: ReadRecord) -> PartialRead | None:
        return observed.opened_remote(
            self._address, self._nbytes, self._options, again=self._sample != 0
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = offset + (0, self._at, self._nbytes)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any, /) -> int:
        out = memoryview(buffer).cast("B")
        left = min(len(out), max(self._nbytes - self._at, 0))
        whose = reader()
        got = self._served(whose[0], out, self._at, whole=False) if left else 0
        if got is None:
            data = self._from_source(whose, self._at, lambda: (self._range(left), left))
            out[:left], got = data, left
        self._at += got
        return got

    def _range(self, nbytes: int) -> bytes:
        return read_part(self._address, self._at, nbytes, self._options, self._version)


class ObservedFile(io.BufferedReader):
    """What `open(path, "rb")` returns for a large file: Python's buffer over one of the above."""

    _parts: BlockFile | RemoteFile | None = None  # None: a library has made it by `type(file)(...)`

    def _note_buffered(self) -> None:
        """Record what the present sample finds in the buffer, which an earlier one has filled."""
        parts, observed = self._parts, reader()[1]
        if observed is None or parts is None or self.closed:
            return
        if not parts.noted_by(observed):
            parts.note(observed, self.tell(), parts.tell())

    def read(self, size: int | None = -1, /) -> bytes:
        self._note_buffered()
        return _read(self, size)  # `super()` takes longer than the read of a few bytes

    def read1(self, size: int = -1, /) -> bytes:
        self._note_buffered()
        return super().read1(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        self._note_buffered()
        return super().readline(size)

    def readinto(self, buffer: Any, /) -> int:
        self._note_buffered()
        return super().readinto(buffer)

    def readinto1(self, buffer: Any, /) -> int:
        self._note_buffered()
        return super().readinto1(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        self._note_buffered()
        return super().peek(size)

    def __repr__(self) -> str:
        return f"<_io.BufferedReader name={self.name!r}>"  # shown in Pillow's errors

    def __reduce_ex__(self, protocol: Any) -> Any:
        return io.BufferedReader(io.BytesIO()).__reduce_ex__(protocol)  # raises what it raises


_read = io.BufferedReader.read


def taken_over(
    real: Any, address: str, buffering: int, sample: int = 0, part: PartialRead | None = None
) -> ObservedFile | BlockFile:
    """Take over the file that `open(path, "rb", buffering)` has just returned.

    `part`: where `sample`'s reads of it are recorded.
    """
    raw = real.detach() if buffering else real
    file = BlockFile.__new__(BlockFile)
    file._file, file.name = raw, raw.name  # noqa: SLF001
    file._sample, file._part = sample, part  # noqa: SLF001
    return _begun(file, address, raw._blksize if buffering < 0 else buffering)  # noqa: SLF001  Python's choice


def held(descriptor: Descriptor, address: str, name: Any, buffering: int) -> Any:
    """Return a file that is not opened yet; `name` and `buffering` as for `open`."""
    file = BlockFile.__new__(BlockFile)
    file._file, file._held, file.name = CLOSED, descriptor, name  # noqa: SLF001
    return _begun(file, address, io.DEFAULT_BUFFER_SIZE if buffering < 0 else buffering)


def _begun(file: BlockFile, address: str, buffering: int) -> ObservedFile | BlockFile:
    file._address, file._whole = address, not buffering  # noqa: SLF001
    return buffered(file, buffering) if buffering else file


def buffered(file: BlockFile | RemoteFile, nbytes: int) -> ObservedFile:
    """Return a file with a buffer of so many bytes over one without."""
    observed_file = ObservedFile(file, nbytes)
    observed_file._parts = file  # noqa: SLF001
    return observed_file


def read_by_methods(file: Any) -> bool:
    """Whether numpy shall call this file's methods, although it has a descriptor.

    A copy in memory would need another copy to get one, and the cache serves only methods.
    """
    raw = file.raw if isinstance(file, io.BufferedReader) else file
    return isinstance(raw, BlockFile) or (type(raw) is MemoryFile and raw.in_memory)
