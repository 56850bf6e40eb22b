"""Memories: which records of a log rehearsal memories hold, in notes that producers look at.

`memories/NAME.RANK` is of a rank of a reader: 8-byte numbers, little-endian. The first is a chunk:
from there on the rank needs all records. The others are ascending samples before that chunk, which
it may replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from creel.streams.cursors import Cursor, Notes

_FOLDER = "memories"
_NUMBER = np.dtype("<i8")
#: Of a log without memories.
_NO_CHUNK = 1 << 62


class Needed(NamedTuple):
    """What memories need of what all readers have passed.

    Attributes:
        floor: the first chunk of which all is needed.
        samples: (n,) ascending; those before it.
    """

    floor: int
    samples: NDArray[np.int64]


def write(medium: Notes, name: str, rank: int, needed: Needed | None) -> None:
    """Write down what a rank needs; None: it has no memory.

    Raises:
        SourceError: the log cannot be written to.
    """
    note = f"{_FOLDER}/{name}.{rank}"
    if needed is not None:
        numbers = np.concatenate([[needed.floor], needed.samples]).astype(_NUMBER)
        medium.write(note, numbers.tobytes())
    elif medium.note(note):
        medium.write(note, b"")


def read(medium: Notes, readers: Mapping[str, Cursor]) -> Needed:
    """Return what the memories of these readers need, of all their ranks."""
    contents = set()  # all ranks have one memory, and most write the same
    for note, data in medium.notes(_FOLDER).items():
        name, _, rank = note.rpartition(".")
        cursor = readers.get(name)
        if cursor and len(data) >= 8 and rank.isdecimal() and int(rank) < cursor.ranks:
            contents.add(data[: len(data) // 8 * 8])
    if not contents:
        return Needed(_NO_CHUNK, np.empty(0, np.int64))
    ranks = [np.frombuffer(data, _NUMBER).astype(np.int64) for data in contents]
    floor = min(int(numbers[0]) for numbers in ranks)
    samples = np.concatenate([numbers[1:] for numbers in ranks])
    return Needed(floor, np.unique(samples, return_index=True)[0])  # so it sorts, which is quick
