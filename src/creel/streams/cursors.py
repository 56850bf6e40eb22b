"""Cursors: how far each reader of a log is, in notes that producers look at.

`readers/NAME.RANK` holds four numbers: chunk and record that the rank has yet to read, the bytes
from there on that it must see before it can go on, and the number of ranks; chunk -1 once the
reader has left. Only ranks below rank 0's number of ranks count,
so notes of an earlier, larger job do no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from creel.errors import ConfigError

_FOLDER = "readers"
_NOTE = re.compile(r"([\w-]+)\.(\d+)")


class Notes(Protocol):
    """What keeps notes, small named values. All calls raise SourceError, as those of `Medium`."""

    def note(self, name: str) -> bytes | None:
        """Return a note; None if there is none."""

    def notes(self, folder: str) -> dict[str, bytes]:
        """Return all notes whose names begin with `folder` and a slash, without these."""

    def write(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Write a note, in place of the last one; if `new`: unless there is one. Whether it did."""


class Cursor(NamedTuple):
    """The place of one rank of a reader.

    Attributes:
        chunk, record: the first record that it may still read.
        reach: bytes from there on without which it cannot return its next batch.
        ranks: of this reader.
    """

    chunk: int
    record: int
    reach: int
    ranks: int = 1


#: Of a reader that is expected, and of a rank that has not begun.
_START = Cursor(0, 0, 0)
#: Of a reader that has left and counts no more, though it may be expected.
_LEFT = Cursor(-1, 0, 0)


def check_name(name: str) -> None:
    """Raise ConfigError unless a note can have this name."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"the reader's name is {name!r}: give letters, digits, - and _")


def write(medium: Notes, name: str, rank: int, cursor: Cursor) -> None:
    """Write a rank's cursor, in place of its last one.

    Raises:
        SourceError: the log cannot be written to.
    """
    medium.write(f"{_FOLDER}/{name}.{rank}", " ".join(map(str, cursor)).encode())


def read(medium: Notes, expected: Iterable[str] = ()) -> dict[str, Cursor]:
    """Return the slowest rank's cursor of each reader, the start for an expected one without any.

    Its reach is the largest of all ranks; it is at the start while a rank has not begun.
    """
    ranks = {name: dict[int, Cursor]() for name in expected} | _by_rank(medium)
    return {name: _slowest(of) for name, of in ranks.items() if of.get(0) != _LEFT}


def lacking(medium: Notes, name: str) -> list[int]:
    """Return the ranks of a reader that have not begun; none if the reader has not."""
    ranks = _by_rank(medium).get(name, {})
    world = max((cursor.ranks for cursor in ranks.values()), default=0)
    return [rank for rank in range(world) if rank not in ranks]


def _by_rank(medium: Notes) -> dict[str, dict[int, Cursor]]:
    """Return the cursors that ranks of readers have written."""
    ranks: dict[str, dict[int, Cursor]] = {}
    for note, text in medium.notes(_FOLDER).items():
        match, cursor = _NOTE.fullmatch(note), _parsed(text)
        if match and cursor:
            ranks.setdefault(match[1], {})[int(match[2])] = cursor
    return ranks


def leave(medium: Notes, name: str) -> None:
    """Let a reader hold back no producer until it begins again.

    Raises:
        SourceError: as `write`.
    """
    write(medium, name, 0, _LEFT)


def _slowest(ranks: dict[int, Cursor]) -> Cursor:
    first = ranks.get(0, _START)
    all_ranks = [ranks.get(rank, _START) for rank in range(first.ranks)]
    slow = min(all_ranks)
    return slow._replace(reach=max(c.reach for c in all_ranks), ranks=first.ranks)


def _parsed(text: bytes) -> Cursor | None:
    """Return a cursor; None if the note holds something else."""
    try:
        cursor = Cursor(*map(int, text.split()))
    except (TypeError, ValueError):
        return None
    valid = len(text.split()) == 4 and min(cursor) >= 0 and 0 < cursor.ranks <= 1 << 20
    return cursor if valid or cursor == _LEFT else None
