"""Room in one piece out of room in pieces: which objects are moved, and how many. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.space import PagedPool, Space
from creel.daemon.events import Move
from creel.daemon.holding import Holding, Index, Sizes
from creel.policies.masks import every
from creel.policies.retain import Keeper, Need

#: Bytes of addresses looked at for one object: some hundred images, planned in about 0.2 ms.
_STRETCH_NBYTES = 16 << 20
_SHORT_NBYTES = 4 << 20  # the same where whatever nobody has pinned can make way
#: At most so much is moved at once (1 ms at 4 GB/s), and so much per second (a quarter of a core).
_BURST_NBYTES = 4 << 20
_RATE_BPS = 1 << 30
#: What planning for one object costs, as bytes that could be moved in that time.
_PLAN_NBYTES = 1 << 20


class Mover:
    """Plans moves within bounds of time; what is being moved is pinned until `done`."""

    def __init__(self, space: Space) -> None:
        self.nbytes = 0  # moved so far
        self._space = space
        self._cursor = 0
        self._credit = float(_BURST_NBYTES)
        self._last = 0.0
        self._moves: list[Move] = []
        self._moved: list[tuple[Holding, Index]] = []

    def begin(self, now: float) -> None:
        """A new event: time has passed that may be spent."""
        earned = max(now - self._last, 0.0) * _RATE_BPS
        self._credit = min(self._credit + earned, _BURST_NBYTES)
        self._last = now

    def gather(self, h: Holding, nbytes: int, need: Need, *, stalled: bool) -> bool:
        """Make room in one piece for an object of so many bytes; False: not now.

        Others are moved where they fit. Where that is too much, or they fit nowhere, some that may
        leave anyway leave side by side. (Always to do so would cost no copying, but favour large
        objects: after four epochs 15 % more opens.)
        """
        if not self.willing and not stalled:
            return False
        self._credit -= _PLAN_NBYTES
        if h.keeper is not None and h.keeper.fits:
            return self._clear(h, h.keeper, nbytes, need, stalled=stalled)
        ids = self._next(h, _STRETCH_NBYTES)
        return self._plan(h, ids, nbytes) or self._leave(h, ids, nbytes, need)

    @property
    def willing(self) -> bool:
        """Whether there is time left for one more object."""
        return self._credit > _PLAN_NBYTES

    def take(self) -> list[Move]:
        """The moves planned since the last call, to be done before anything planned after them."""
        moves, self._moves = self._moves, []
        return moves

    def copied(self, h: Holding, ids: Index, offset: Sizes) -> None:
        """The shell copies these residents there, then publishes them; until `done` they stay."""
        h.hide(ids, offset)
        h.pin(ids)
        self._moved.append((h, ids))

    def done(self) -> None:
        """All that was decided about this event is on its way; moved objects are like others."""
        for h, ids in self._moved:
            h.unpin(ids)
            h.release(ids)
        self._moved.clear()

    def _clear(self, h: Holding, keeper: Keeper, nbytes: int, need: Need, *, stalled: bool) -> bool:
        """Empty a stretch: who may leave leaves, the others take places of such elsewhere."""
        if not isinstance(h.pool, PagedPool):
            return False
        ids = self._next(h, _SHORT_NBYTES + 2 * nbytes)
        stays = ~keeper.dispensable(ids, need)
        rooms = h.room[ids]
        inside = h.pool.neighbours(h.offset[ids], rooms, nbytes, np.where(stays, rooms, 0))
        if not len(inside):
            return False
        leaving, staying = ids[inside[~stays[inside]]], ids[inside[stays[inside]]]
        cleared = ids[inside]
        h.pin(cleared)  # so that nobody moves to where all are to go
        victims = keeper.fitting(h.room[staying], need)
        h.unpin(cleared)
        found = victims >= 0
        if every(found):
            self._swap(h, staying, victims)
        elif stalled:
            h.release(victims[found])
            h.evict(staying, "stalled")
        else:
            h.release(np.concatenate([victims[found], cleared]))
            return False
        h.evict(leaving, "due_later")
        return True

    def _swap(self, h: Holding, ids: Index, victims: Index) -> None:
        """These take the places of others, and leave their own."""
        if not len(ids):
            return
        src, rooms = h.offset[ids], h.room[ids]
        dst = h.inherit(ids, rooms, victims)
        h.pool.free(src, rooms)
        self._move(h, ids, src, dst)

    def _move(self, h: Holding, ids: Index, src: Sizes, dst: Sizes) -> None:
        nbytes = h.length[ids]
        self.copied(h, ids, dst)
        self._moves.append(Move(h.name, ids.astype(np.int32), src, dst, nbytes))
        moved = int(nbytes.sum())
        self.nbytes += moved
        self._credit -= moved

    def _next(self, h: Holding, nbytes: int) -> Index:
        """(k,) objects that may move, in the next stretch of so many addresses."""
        start = self._cursor
        stop = min(start + nbytes, self._space.nbytes)
        self._cursor = stop if stop < self._space.nbytes else 0
        if h.owners is None:
            return np.empty(0, np.intp)
        ids = h.owners.between(start, stop, h.offset)
        loose: Index = ids[h.pins[ids] == 0]
        return loose

    def _plan(self, h: Holding, ids: Index, need: int) -> bool:
        if not len(ids) or not isinstance(h.pool, PagedPool):
            return False
        offset = h.offset[ids]
        src, dst, _ = h.pool.compact(offset, h.room[ids], need, int(self._credit))
        if not len(src):
            return False
        ids = ids[np.searchsorted(offset, src)]
        self._move(h, ids, src, dst)
        return True

    def _leave(self, h: Holding, ids: Index, nbytes: int, need: Need) -> bool:
        """Evict neighbours among `ids`."""
        if h.keeper is None or not isinstance(h.pool, PagedPool):
            return False
        ids = ids[h.keeper.dispensable(ids, need)]
        gone = h.pool.neighbours(h.offset[ids], h.room[ids], nbytes)
        return h.evict(ids[gone], "due_later") > 0
