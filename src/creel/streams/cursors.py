"""Cursors: how far each reader of a log is, in small files that producers look at.

`readers/NAME.RANK` holds four numbers: chunk and record that the rank has yet to read, the bytes
from there on that it must see before it can go on, and the number of ranks; chunk -1 once the
reader has left. The file is replaced as a whole. Only ranks below rank 0's number of ranks count,
so files of an earlier, larger job do no harm.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from creel.errors import ConfigError

_FOLDER = "readers"
_FILE = re.compile(r"([\w-]+)\.(\d+)")


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
    """Raise ConfigError unless a file can have this name."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"the reader's name is {name!r}: give letters, digits, - and _")


def write(log: str, name: str, rank: int, cursor: Cursor) -> None:
    """Write a rank's cursor, in place of its last one.

    Raises:
        OSError: the folder of the log cannot be written to.
    """
    folder = f"{log}/{_FOLDER}"
    # Of this call alone: several processes may read as one rank.
    temporary = f"{folder}/.{name}.{rank}.{uuid.uuid4().hex}"
    try:
        file = open(temporary, "w", encoding="ascii")  # noqa: PTH123, SIM115  20 us, with every batch
    except FileNotFoundError:
        Path(folder).mkdir(exist_ok=True)
        file = open(temporary, "w", encoding="ascii")  # noqa: PTH123, SIM115  as above
    with file:
        file.write(" ".join(map(str, cursor)))
    os.replace(temporary, f"{folder}/{name}.{rank}")  # noqa: PTH105  as above


def read(log: str, expected: Iterable[str] = ()) -> dict[str, Cursor]:
    """Return the slowest rank's cursor of each reader, the start for an expected one without any.

    Its reach is the largest of all ranks; it is at the start while a rank has not begun.
    """
    ranks: dict[str, dict[int, Cursor]] = {name: {} for name in expected}
    with suppress(FileNotFoundError):
        for file in os.listdir(f"{log}/{_FOLDER}"):  # noqa: PTH208  quick: for every chunk
            found = _FILE.fullmatch(file)
            cursor = _parsed(f"{log}/{_FOLDER}/{file}") if found else None
            if found and cursor:
                ranks.setdefault(found[1], {})[int(found[2])] = cursor
    return {name: _slowest(of) for name, of in ranks.items() if of.get(0) != _LEFT}


def leave(log: str, name: str) -> None:
    """Let a reader hold back no producer until it begins again.

    Raises:
        OSError: as `write`.
    """
    write(log, name, 0, _LEFT)


def _slowest(ranks: dict[int, Cursor]) -> Cursor:
    first = ranks.get(0, _START)
    all_ranks = [ranks.get(rank, _START) for rank in range(first.ranks)]
    slow = min(all_ranks)
    return slow._replace(reach=max(c.reach for c in all_ranks), ranks=first.ranks)


def _parsed(path: str) -> Cursor | None:
    """Return a cursor; None if the file is gone or holds something else."""
    try:
        numbers = [int(word) for word in Path(path).read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return None
    if len(numbers) != 4:
        return None
    found = Cursor(*numbers)
    valid = min(found) >= 0 and 0 < found.ranks <= 1 << 20
    return found if valid or found == _LEFT else None
