"""Places: the positions of objects in the arena, in one piece or in several runs. Pure.

A *place* is one number. For an object in one piece, it is the first byte; for an absent object,
NOWHERE; for an object in several runs, the first byte of the first run, converted by `chained` to a
number below NOWHERE. Each of these runs begins with a header: the number of the object's bytes that
follow, and the start of the next run. A reader thus needs only the place and the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.policies.arrays import Ints

#: Header of a run: bytes of the object in it, and the start of the next run (NOWHERE: none).
HEADER = struct.Struct("<qq")
#: Least bytes of an object in any run but its last, as runs are whole pages of 64 bytes or more.
#: This bounds the number of runs that a reader follows, even if headers were overwritten.
_LEAST = 64 - HEADER.size

Number = TypeVar("Number", int, Ints)

#: By place of an object in several runs: (r, 2) start and bytes of each run, including the header.
Runs: TypeAlias = dict[int, Ints]


def chained(number: Number) -> Number:
    """Convert the start of the first run to a place, or a place to the start.

    >>> chained(0), chained(chained(4096))
    (-2, 4096)
    """
    return 2 * NOWHERE - number


def headers(runs: Ints, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the start of each run and its header, for an object of `nbytes`.

    >>> import numpy as np
    >>> [(at, HEADER.unpack(head)) for at, head in headers(np.array([[0, 64], [640, 128]]), 100)]
    [(0, (48, 640)), (640, (52, -1))]
    """
    following = [*runs[1:, 0].tolist(), NOWHERE]
    for (start, size), after in zip(runs.tolist(), following, strict=True):
        held = min(size - HEADER.size, nbytes)
        nbytes -= held
        yield start, HEADER.pack(held, after)


def pieces(arena: memoryview, place: int, nbytes: int) -> list[memoryview] | None:
    """Return views of an object's bytes, in order; None if the object is absent.

    Also None if its length is unknown, or a header is invalid because the object left meanwhile. An
    object that is not pinned may leave at any time: the caller must check its place again
    afterwards.
    """
    if place == NOWHERE or nbytes < 0:
        return None
    if place >= 0:
        return [arena[place : place + nbytes]]
    views = list[memoryview]()
    start = chained(place)
    while nbytes > 0:
        first = start + HEADER.size
        if start < 0 or first > len(arena):
            return None
        held, start = HEADER.unpack_from(arena, first - HEADER.size)
        if not min(_LEAST, nbytes) <= held <= min(nbytes, len(arena) - first):
            return None
        views.append(arena[first : first + held])
        nbytes -= held
    return views
