"""Log: the folder of a stream, a format of a few lines that C and Fortran write without creel.

    stream.json          fields, records of a full chunk, limits (`Description`)
    000000000, ...       chunks: whole records, one after the other, laid out as a C struct
    end.0, ...           one file for each producer that has ended, numbered likewise
    readers/NAME.RANK    how far a reader is (`cursors`)

To append, write a temporary file and `link` it to the next free number: the file system lets one
writer have it. So a chunk is complete once it has a name, any number of writers may append, and the
order of arrival is the order of the numbers. A chunk may have fewer records than a full one. Its
records are numbered as if it were full: record i of chunk c is sample `c * records + i`.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from creel.errors import ConfigError, NotFoundError, SourceError
from creel.streams import cursors
from creel.streams.description import Description

ABSENT = -1
_ABOUT = "stream.json"
_DIGITS = 9


class Log:
    """The folder of a stream. Pickles; holds nothing open.

    Attributes:
        path: of the folder.
        about: what its `stream.json` says.
    """

    def __init__(self, path: str, about: Description) -> None:
        self.path = path
        self.about = about

    @classmethod
    def create(cls, path: str | os.PathLike[str], about: Description) -> Log:
        """Begin a log, or open the one that is there, which must be described alike.

        Raises:
            ConfigError: another stream is in the folder, the description is invalid, or `path` is
                no folder of a file system.
            SourceError: the folder cannot be written to.
        """
        log = cls(_folder(path), about)
        log.layout  # noqa: B018  raises
        try:
            Path(log.path).mkdir(parents=True, exist_ok=True)
            left_over = log.numbers() or cursors.read(log.path)  # first: others may begin just now
            if left_over and not Path(log.path, _ABOUT).exists():
                raise ConfigError(f"{log.path} holds parts of another stream: delete it")
            if log._write_new(msgspec.json.encode(about), f"{log.path}/{_ABOUT}"):
                return log
        except OSError as e:
            raise _failure(e, log.path) from e
        there = cls.open(path)
        for name in about.__struct_fields__:
            mine, found = getattr(about, name), getattr(there.about, name)
            if name != "id" and mine != found:
                raise ConfigError(
                    f"{log.path} holds another stream, with {name}={found!r}, not {mine!r}: delete"
                    " it, or use another folder"
                )
        return there

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Log:
        """Open a log.

        Raises:
            NotFoundError: there is none (yet).
            ConfigError: its description is invalid, or `path` is no folder of a file system.
        """
        folder = _folder(path)
        try:
            about = Path(folder, _ABOUT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"there is no stream in {folder}: no producer has begun") from None
        try:
            log = cls(folder, msgspec.json.decode(about, type=Description))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise ConfigError(f"{folder}/{_ABOUT} does not describe a stream: {e}") from e
        valid = log.about.records > 0 and min(log.about.ahead, log.about.keep) >= 0
        if not valid or log.about.producers < 1:
            raise ConfigError(f"{folder}/{_ABOUT} does not describe a stream: {log.about}")
        log.layout  # noqa: B018  raises
        return log

    @cached_property
    def layout(self) -> np.dtype[Any]:
        """The structured type of a record."""
        return self.about.layout()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.layout.itemsize

    # --- chunks ---------------------------------------------------------------------------------

    def chunk(self, number: int) -> str:
        """Return the path of a chunk."""
        return f"{self.path}/{number:0{_DIGITS}}"

    def size(self, number: int) -> int:
        """Return the bytes of a chunk; ABSENT if it has not arrived, or has been deleted.

        Raises:
            ConfigError: it does not hold whole records, or too many.
        """
        try:
            size = os.stat(self.chunk(number)).st_size  # noqa: PTH116  quick: for every chunk
        except FileNotFoundError:
            return ABSENT
        except OSError as e:
            raise _failure(e, self.chunk(number)) from e
        if size % self.nbytes or not 0 < size <= self.about.records * self.nbytes:
            raise ConfigError(
                f"{self.chunk(number)} has {size} bytes: a chunk holds 1 to {self.about.records}"
                f" records of {self.nbytes} bytes"
            )
        return size

    def numbers(self) -> list[int]:
        """Return the numbers of all chunks in the folder, ascending."""
        try:
            names = os.listdir(self.path)  # noqa: PTH208  quick
        except OSError as e:
            raise _failure(e, self.path) from e
        return sorted(int(n) for n in names if len(n) >= _DIGITS and n.isascii() and n.isdigit())

    def deleted(self, number: int) -> int | None:
        """Return the next chunk that is there if chunk `number` was deleted.

        None if it is there or will be: chunks get their numbers in order.
        """
        there = self.numbers()  # on NFS this also drops what the client knows of absent names
        later = [one for one in there if one > number]
        return later[0] if later and self.size(number) == ABSENT else None

    def append(self, data: memoryview, number: int) -> int:
        """Append a chunk; return its number, the first free one from `number` on.

        Raises:
            SourceError: it could not be written, for example on a full disk; nothing was appended.
        """
        try:
            temporary = self._written(data)
            try:
                with self._alone():
                    return _linked(temporary, self.chunk, self._free(number))
            finally:
                with suppress(OSError):  # it may have been appended: nobody must do so again
                    os.unlink(temporary)  # noqa: PTH108  quick
        except OSError as e:
            raise _failure(e, self.path) from e

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other producers from appending, where the file system has locks.

        Elsewhere one that is stopped for so long, between a look at the readers and its `link`,
        that its number is used, read and deleted, would use it again.
        """
        import fcntl  # missing on Windows, which imports this module but never a stream

        fd = os.open(f"{self.path}/{_ABOUT}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _free(self, number: int) -> int:
        """Return where to look for the first free number, from `number` on.

        Other producers may have written and deleted chunks there: their numbers are free again, but
        gone. The newest chunk is never deleted, so those that are there follow one another.
        """
        if number and self.size(number - 1) != ABSENT:
            return number
        return max([number, *self.numbers()[:1]])

    def delete(self, number: int) -> None:
        """Delete a chunk, and give back its memory though a daemon has it open."""
        path = self.chunk(number)
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.unlink(path)  # noqa: PTH108  quick
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)

    # --- the end --------------------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether all producers have ended: no chunk will arrive that is not there already."""
        return Path(self._end(self.about.producers - 1)).exists()

    def ends(self) -> int:
        """Return how many producers have ended."""
        ends = (Path(self._end(i)).exists() for i in range(self.about.producers))
        return next((i for i, there in enumerate(ends) if not there), self.about.producers)

    def end(self) -> None:
        """Note that one more producer has ended.

        Raises:
            SourceError: it cannot be written down.
        """
        try:
            temporary = self._written(memoryview(b""))
            try:
                _linked(temporary, self._end, 0)
            finally:
                os.unlink(temporary)  # noqa: PTH108  as above
        except OSError as e:
            raise _failure(e, self.path) from e

    def _end(self, i: int) -> str:
        return f"{self.path}/end.{i}"

    # --- writing --------------------------------------------------------------------------------

    def _written(self, data: memoryview) -> str:
        """Return the path of a new temporary file with these bytes."""
        path = f"{self.path}/.{uuid.uuid4().hex}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            while len(data):
                data = data[os.write(fd, data) :]
        except BaseException:
            os.unlink(path)  # noqa: PTH108  as above
            raise
        finally:
            os.close(fd)
        return path

    def _write_new(self, data: bytes, path: str) -> bool:
        """Write a file unless there is one; whether this was done."""
        temporary = self._written(memoryview(data))
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)  # noqa: PTH108  as above
        return True


def _folder(path: str | os.PathLike[str]) -> str:
    """Return an absolute path; raises ConfigError for an address of remote storage."""
    if "://" in os.fspath(path):
        raise ConfigError(f"a stream is a folder of a file system, not {os.fspath(path)}")
    return os.path.abspath(path)  # noqa: PTH100  not resolving links


def _linked(temporary: str, name: Callable[[int], str], number: int) -> int:
    """Link a file to the first free `name(number)`, and return the number."""
    while True:
        try:
            os.link(temporary, name(number))
        except FileExistsError:  # noqa: PERF203  mostly the first number is free
            number += 1
        else:
            return number


def _failure(e: OSError, path: str) -> SourceError:
    if isinstance(e, SourceError):
        return e
    why = "its file system has no hard links" if e.errno == errno.EPERM else e.strerror
    return SourceError(e.errno or 0, why or str(e), path)
