"""The payload of an answer: the bytes of objects, as they lie in the arena."""

from __future__ import annotations

import numpy as np

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import pieces as pieces_of
from creel.daemon.peers import wire
from creel.daemon.peers.wire import LATER, NOT_HERE
from creel.policies.arrays import Ints


def payload(arena: Arena, place: Ints, nbytes: Ints) -> tuple[Ints, list[memoryview]]:
    """Return (k,) nbytes of an answer (or NOT_HERE, LATER), and the payload, neighbours joined."""
    nbytes = np.where((place == NOWHERE) | (nbytes < 0), NOT_HERE, nbytes)
    total = np.maximum(nbytes, 0).cumsum()
    later = (total > wire.ANSWER_NBYTES) & (nbytes >= 0)
    later[(nbytes >= 0).argmax()] = False  # the first resident is always sent
    nbytes[later] = LATER
    if (place < NOWHERE).any():
        return nbytes, _in_runs(arena, place, nbytes)
    here = np.flatnonzero(nbytes > 0)
    if not len(here):
        return nbytes, []
    start = place[here]
    stop = start + nbytes[here]
    if stop.max() > arena.nbytes:
        raise ValueError("an object ends beyond the arena")
    cuts = np.flatnonzero(stop[:-1] != start[1:])
    first, last = np.append(0, cuts + 1), np.append(cuts, len(here) - 1)
    ranges = zip(start[first].tolist(), stop[last].tolist(), strict=True)
    return nbytes, [arena.view[a:b] for a, b in ranges]


def _in_runs(arena: Arena, place: Ints, nbytes: Ints) -> list[memoryview]:
    """Return the bytes of objects, some in several runs; `nbytes` of unreadable ones: NOT_HERE."""
    views: list[memoryview] = []
    for i, (at, size) in enumerate(zip(place.tolist(), nbytes.tolist(), strict=True)):
        pieces = pieces_of(arena.view, at, size)
        if pieces is None and size >= 0:
            nbytes[i] = NOT_HERE
        views += [piece for piece in pieces or () if len(piece)]
    return views
