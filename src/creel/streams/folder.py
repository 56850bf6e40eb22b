"""LogFolder: keeps a log in a folder of a file system, in a format that C and Fortran write.

    000000000, ...       chunks
    stream.json, end.0, readers/NAME.0, ...    notes

To append, write a temporary file and `link` it to the next free number: the file system lets one
writer have it. So a chunk is complete once it has a name, any number of writers may append, and the
order of arrival is the order of the numbers.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from creel.errors import SourceError
from creel.streams import files
from creel.system.python_open import python_open

_DIGITS = 9
#: Whether a file is one that this class writes to; those of C programs have other names.
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}").fullmatch
#: Most chunks that one call has open at a time.
_MOST_OPEN = 32


class LogFolder:
    """See `Medium`. Pickles; holds nothing open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)  # noqa: PTH100  not resolving links
        #: Elsewhere a reader on another node might not see that a chunk's file is a later one's.
        self.recycles = os.path.realpath(path).startswith("/dev/shm/")  # noqa: S108

    def address(self, number: int) -> str:
        return f"{self.path}/{number:0{_DIGITS}}"

    # --- chunks ---------------------------------------------------------------------------------

    def stat(self, number: int) -> tuple[int, float] | None:
        with self._failing(), suppress(FileNotFoundError):
            status = os.stat(self.address(number))  # noqa: PTH116  quick: for every chunk
            return None if status.st_mode & files.HOLES else (status.st_size, status.st_mtime)
        return None

    def numbers(self) -> list[int]:
        with self._failing(), suppress(FileNotFoundError):
            names = os.listdir(self.path)  # noqa: PTH208  quick
            return sorted(
                int(n) for n in names if len(n) >= _DIGITS and n.isascii() and n.isdigit()
            )
        return []

    def append(self, data: Sequence[memoryview], number: int, spare: int | None = None) -> int:
        with self._failing(), self._written(data, spare) as temporary, self._alone():
            number = self._free(number)
            while not files.linked(temporary, self.address(number)):
                number += 1
        return number

    def tidy(self) -> None:
        with self._failing(), self._alone():
            for name in os.listdir(self.path):  # noqa: PTH208  quick
                if _TEMPORARY(name):
                    files.delete_if_abandoned(f"{self.path}/{name}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other producers from appending and deleting, where the file system has locks.

        Elsewhere one that is stopped for so long, between a look at the readers and its `link`,
        that its number is used, read and deleted, would use it again.
        """
        fd = files.locked(f"{self.path}/stream.json")
        try:
            yield
        finally:
            files.unlock(fd)

    def _free(self, number: int) -> int:
        """Return where to look for the first free number, from `number` on.

        Other producers may have written and deleted chunks there: their numbers are free again, but
        gone. The newest chunk is never deleted, so those that are there follow one another.
        """
        if number and self.stat(number - 1) is not None:
            return number
        there = (chunk for chunk in self.numbers() if self.stat(chunk) is not None)
        return max(number, next(there, number))

    def fill(self, pieces: Sequence[files.Piece]) -> int | None:
        opened: dict[int, int] = {}
        number = -1
        try:
            for number, first, buffers in pieces:
                if number not in opened:
                    if len(opened) == _MOST_OPEN:
                        _close(opened)
                    opened[number] = os.open(self.address(number), os.O_RDONLY | os.O_CLOEXEC)
                stop = files.read(opened[number], first, buffers)
                if stop is None or not self._there(number, opened[number], first, stop):
                    return number
        except FileNotFoundError:
            return number
        except OSError as e:
            raise _failure(e, self.address(number)) from None
        finally:
            _close(opened)
        return None

    def _there(self, number: int, fd: int, first: int, stop: int) -> bool:
        """Whether bytes that were just read were those of a chunk.

        Asked after the read: they may have been deleted, or overwritten, since the file was opened.
        """
        status = os.stat(self.address(number))  # noqa: PTH116  quick
        if status.st_ino != os.fstat(fd).st_ino:
            return False
        return not status.st_mode & files.HOLES or os.lseek(fd, first, os.SEEK_HOLE) >= stop

    def delete(self, number: int, but: Sequence[tuple[int, int]] = ()) -> None:
        """See Medium; gives back memory though a daemon has the file open."""
        with self._failing(), suppress(FileNotFoundError), self._alone():
            fd = os.open(self.address(number), os.O_RDWR | os.O_CLOEXEC)
            try:
                if but:
                    files.punch(fd, but)
                else:
                    os.unlink(self.address(number))  # noqa: PTH108  quick
                    os.ftruncate(fd, 0)
            finally:
                os.close(fd)

    # --- notes ----------------------------------------------------------------------------------

    def note(self, name: str) -> bytes | None:
        with (
            self._failing(),
            suppress(FileNotFoundError, NotADirectoryError),
            python_open(f"{self.path}/{name}", "rb") as file,
        ):
            return file.read()
        return None

    def notes(self, folder: str) -> dict[str, bytes]:
        names: list[str] = []
        with self._failing(), suppress(FileNotFoundError):
            names = os.listdir(f"{self.path}/{folder}")  # noqa: PTH208  quick: for every chunk
        texts = {n: self.note(f"{folder}/{n}") for n in names if not n.startswith(".")}
        return {name: data for name, data in texts.items() if data is not None}

    def write(self, name: str, data: bytes, *, new: bool = False) -> bool:
        with self._failing():
            try:
                return self._note(name, data, new)
            except FileNotFoundError:  # its folder, "readers" or "memories", or the log's own
                Path(f"{self.path}/{name}").parent.mkdir(parents=True, exist_ok=True)
                return self._note(name, data, new)

    def _note(self, name: str, data: bytes, new: bool) -> bool:
        with self._written([memoryview(data)]) as temporary:
            if new:
                return files.linked(temporary, f"{self.path}/{name}")
            os.rename(temporary, f"{self.path}/{name}")  # noqa: PTH104  20 us, with every batch
            return True

    # --- files ----------------------------------------------------------------------------------

    @contextmanager
    def _written(self, data: Sequence[memoryview], spare: int | None = None) -> Iterator[str]:
        """Yield the path of a temporary file with these bytes, of this call alone; see `append`."""
        path, fd = self._temporary(spare)
        try:
            for part in data:
                while len(part):
                    part = part[os.write(fd, part) :]  # noqa: PLW2901  the rest of it
            if spare is not None:
                os.ftruncate(fd, sum(map(len, data)))
            yield path
        finally:
            with suppress(OSError):  # a note's was renamed; a chunk's must not be appended again
                os.unlink(path)  # noqa: PTH108  quick
            files.unlock(fd)

    def _temporary(self, spare: int | None) -> tuple[str, int]:
        """Return the path and the descriptor of a temporary file, which is locked while it is open.

        spare: a chunk whose file may be it. New memory costs the kernel three times the copy.
        """
        path = f"{self.path}/.{uuid.uuid4().hex}"
        if spare is not None:
            with self._alone(), suppress(OSError):
                if self.stat(spare) is not None:
                    fd = files.locked(self.address(spare), waits=False)
                    os.rename(self.address(spare), path)  # noqa: PTH104  quick
                    return path, fd
        return path, files.locked(path, os.O_CREAT | os.O_EXCL)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise SourceError for an OSError in the block."""
        try:
            yield
        except OSError as e:
            raise _failure(e, self.path) from None


def _failure(e: OSError, path: str) -> SourceError:
    if isinstance(e, SourceError):
        return e
    why = "its file system has no hard links" if e.errno == errno.EPERM else e.strerror
    return SourceError(e.errno or 0, why or str(e), path)


def _close(opened: dict[int, int]) -> None:
    while opened:
        os.close(opened.popitem()[1])
