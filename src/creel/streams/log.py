"""Log: what producers of a stream append to and readers read, whatever keeps it (`Medium`).

It consists of numbered *chunks*, of whole records, one after the other, each laid out as a C
struct; and of *notes*, small named values that are replaced as a whole:

    stream.json          fields, records of a full chunk, limits (`Description`)
    end.0, ...           one for each producer that has ended
    readers/NAME.RANK    how far a reader is (`cursors`)
    memories/NAME.RANK   which records its rehearsal memory holds (`memories`)
    launched/NAME.RANK   that a launcher's rank has opened it (`creel.loader.extras.streams.share`)

Any number of writers may append. A chunk is complete once it has a number, and the order of
arrival is the order of the numbers. A chunk may have fewer records than a full one. Its records are
numbered as if it were full: record i of chunk c is sample `c * records + i`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.errors import ConfigError, NotFoundError
from creel.streams import cursors
from creel.streams.description import Description
from creel.streams.files import Piece
from creel.streams.folder import LogFolder
from creel.streams.redis_stream import RedisStream, is_redis, shown

ABSENT = -1
_NOTHING = np.empty(0, np.int64)
_ABOUT = "stream.json"
_decode = msgspec.json.Decoder(Description).decode


class Medium(cursors.Notes, Protocol):
    """What keeps a log. All calls raise SourceError if it cannot be reached, read or written to.

    Attributes:
        recycles: whether `append` is quicker with the file of a chunk that nobody needs.
    """

    path: str
    recycles: bool

    def address(self, number: int) -> str:
        """Return where a chunk is, for the daemon."""

    def append(self, data: Sequence[memoryview], number: int, spare: int | None = None) -> int:
        """Append a chunk; return its number, the first free one from `number` on.

        If it raises, nothing was appended. Numbers of deleted chunks are not used again.

        data: its bytes, one part after the other.
        spare: a chunk that may be deleted for this one, or may be gone already.
        """

    def stat(self, number: int) -> tuple[int, float] | None:
        """Return a chunk's bytes, and when it was written; None if it is not there."""

    def numbers(self) -> list[int]:
        """Return the numbers of all chunks that are there, or of which records are, ascending."""

    def fill(self, pieces: Sequence[Piece]) -> int | None:
        """Read the bytes of pieces; return a chunk that lacks them.

        Pieces of one chunk are best given together.
        """

    def delete(self, number: int, but: Sequence[tuple[int, int]] = ()) -> None:
        """Delete a chunk, if it is there.

        but: its records that can still be filled in, though the chunk is not there: first byte and
            bytes. A medium that cannot delete parts of chunks leaves all of its bytes.
        """

    def tidy(self) -> None:
        """Delete what killed processes had begun to write."""


def medium_of(path: str | os.PathLike[str]) -> Medium:
    """Return what keeps the log at a path or an address.

    Raises:
        ConfigError: it is neither a folder of a file system nor in Redis.
    """
    name = os.fspath(path)
    if is_redis(name):
        return RedisStream(name)
    if "://" in name:
        text = f"a stream is a folder of a file system, or redis://host/key, not {shown(name)}"
        raise ConfigError(text)
    return LogFolder(name)


class Log:
    """A log. Pickles; holds no file open.

    Attributes:
        medium: what keeps it.
        about: what its `stream.json` says.
    """

    def __init__(self, medium: Medium, about: Description) -> None:
        self.medium = medium
        self.about = about

    @classmethod
    def create(cls, path: str | os.PathLike[str], about: Description) -> Log:
        """Begin a log, or open the one that is there, which must be described alike.

        Raises:
            ConfigError: another stream is there, the description is invalid, or `path` is neither a
                folder of a file system nor in Redis.
            SourceError: it cannot be written to.
        """
        log = cls(medium_of(path), about)
        log.layout  # noqa: B018  raises
        left_over = log.numbers() or cursors.read(log.medium)  # first: others may begin just now
        if left_over and log.medium.note(_ABOUT) is None:
            raise ConfigError(f"{log.path} holds parts of another stream: delete it")
        if log.medium.write(_ABOUT, msgspec.json.encode(about), new=True):
            return log
        there = cls.open(log.medium.path)
        for name in about.__struct_fields__:
            mine, theirs = getattr(about, name), getattr(there.about, name)
            if name != "id" and mine != theirs:
                raise ConfigError(
                    f"{log.path} holds another stream, with {name}={theirs!r}, not {mine!r}: delete"
                    " it, or use another folder"
                )
        log.medium.tidy()
        return there

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Log:
        """Open a log.

        Raises:
            NotFoundError: there is none (yet).
            ConfigError: its description is invalid, or as `medium_of`.
            SourceError: it cannot be read.
        """
        medium = medium_of(path)
        about, where = medium.note(_ABOUT), f"{shown(medium.path)}/{_ABOUT}"
        if about is None:
            raise NotFoundError(
                f"there is no stream in {shown(medium.path)}: no producer has begun"
            )
        try:
            log = cls(medium, _decode(about))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise ConfigError(f"{where} does not describe a stream: {e}") from e
        valid = log.about.records > 0 and min(log.about.ahead, log.about.keep) >= 0
        if not valid or log.about.producers < 1:
            raise ConfigError(f"{where} does not describe a stream: {log.about}")
        log.layout  # noqa: B018  raises
        return log

    @property
    def path(self) -> str:
        """Where it is, for people: without a password."""
        return shown(self.medium.path)

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
        """Return where a chunk is, for people."""
        return shown(self.medium.address(number))

    def size(self, number: int) -> int:
        """Return the bytes of a chunk; ABSENT if it has not arrived, or has been deleted.

        Raises:
            ConfigError: it does not hold whole records, or too many.
        """
        status = self.medium.stat(number)
        if status is None:
            return ABSENT
        size = status[0]
        if size % self.nbytes or not 0 < size <= self.about.records * self.nbytes:
            raise ConfigError(
                f"{self.chunk(number)} has {size} bytes: a chunk holds 1 to {self.about.records}"
                f" records of {self.nbytes} bytes"
            )
        return size

    def numbers(self) -> list[int]:
        """Return the numbers of all chunks that are there, or of which records are, ascending."""
        return self.medium.numbers()

    def deleted(self, number: int) -> int | None:
        """Return the next chunk that is there if chunk `number` was deleted.

        None if it is there or will be: chunks get their numbers in order.
        """
        there = self.numbers()  # on NFS this also drops what the client knows of absent names
        later = (chunk for chunk in there if chunk > number and self.size(chunk) != ABSENT)
        oldest = next(later, None)
        return oldest if oldest is not None and self.size(number) == ABSENT else None

    def delete(self, number: int, but: NDArray[np.int64] = _NOTHING) -> None:
        """Delete a chunk; `but`: (n,) records that stay, by their place in it, ascending."""
        self.medium.delete(number, [(i * self.nbytes, self.nbytes) for i in but.tolist()])

    # --- the end --------------------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether all producers have ended: no chunk will arrive that is not there already."""
        return self.medium.note(f"end.{self.about.producers - 1}") is not None

    def ends(self) -> int:
        """Return how many producers have ended."""
        ends = (self.medium.note(f"end.{i}") for i in range(self.about.producers))
        return next((i for i, note in enumerate(ends) if note is None), self.about.producers)

    def end(self) -> None:
        """Note that one more producer has ended.

        Raises:
            SourceError: it cannot be written down.
        """
        i = 0
        while not self.medium.write(f"end.{i}", b"", new=True):
            i += 1
