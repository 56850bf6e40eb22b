"""Places: where an object is in the arena, in one piece or in several runs. Pure.

A *place* is one number: the first byte of an object in one piece; NOWHERE; or, of one in several
runs, the first byte of the first run, `chained` to a number below NOWHERE. Each of these runs
begins with a header: how many bytes of the object follow, and where the next run begins. So a
reader needs nothing but the place and the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from creel.cache.memory.free_ranges import NOWHERE
from creel.policies.arrays import Ints

#: Of a run: bytes of the object in it, and the start of the next run (NOWHERE: the last one).
HEADER = struct.Struct("<qq")
#: Least bytes of an object in any run but its last, which fills whole pages of 64 bytes or more:
#: so whatever stands where headers were, the runs soon come to an end.
_LEAST = 64 - HEADER.size

Number = TypeVar("Number", int, Ints)

#: By place, for objects in several runs: (r, 2) start and bytes of each run, header included.
Runs: TypeAlias = dict[int, Ints]


def chained(number: Number) -> Number:
    """Convert the start of the first run to a place, and back.

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
    """The bytes of an object, in order; None where it is absent.

    Also None where its length is unknown, or what should be a header is none, as the object left
    meanwhile. An object that is not pinned may leave at any time: look at its place again
    afterwards.
    """
    if place == NOWHERE or nbytes < 0:
        return None
    if place >= 0:
        return [arena[place : place + nbytes]]
    found = list[memoryview]()
    start = chained(place)
    while nbytes > 0:
        first = start + HEADER.size
        if start < 0 or first > len(arena):
            return None
        held, start = HEADER.unpack_from(arena, first - HEADER.size)
        if not min(_LEAST, nbytes) <= held <= min(nbytes, len(arena) - first):
            return None
        found.append(arena[first : first + held])
        nbytes -= held
    return found
