"""Room in one piece out of room in pieces: which objects are moved, and how many. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.space import PagedPool, Space
from creel.daemon.events import Move
from creel.daemon.holding import Holding, Index

#: Bytes of addresses looked at for one object: some hundred images, planned in about 0.2 ms.
_STRETCH_NBYTES = 32 << 20
_STRETCHES = 3  # looked at for one object, at most
#: At most so much is moved at once (2 ms at 4 GB/s), and this much per second (a quarter of a core).
_BURST_NBYTES = 8 << 20
_RATE_BPS = 1 << 30
#: What planning costs, as bytes that could be moved in that time.
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

    def gather(self, h: Holding, need: int) -> bool:
        """Move objects of a dataset until an object of `need` bytes has room; False: not now."""
        if h.owners is None or need > self._space.extents.nbytes:
            return False
        for _ in range(_STRETCHES):
            if self._credit <= 0:
                return False
            self._credit -= _PLAN_NBYTES
            if self._plan(h, self._next(h), need):
                return True
        return False

    def take(self) -> list[Move]:
        """The moves planned since the last call, to be done before anything planned after them."""
        moves, self._moves = self._moves, []
        return moves

    def done(self) -> None:
        """All that was decided about this event is on its way; moved objects are like others."""
        for h, ids in self._moved:
            h.unpin(ids)
            h.release(ids)
        self._moved.clear()

    def _next(self, h: Holding) -> Index:
        """(k,) objects that may move, in the next stretch of addresses."""
        start = self._cursor
        stop = min(start + _STRETCH_NBYTES, self._space.nbytes)
        self._cursor = stop if stop < self._space.nbytes else 0
        ids = h.owners.between(start, stop, h.offset) if h.owners is not None else np.empty(0, np.intp)
        return ids[h.pins[ids] == 0]

    def _plan(self, h: Holding, ids: Index, need: int) -> bool:
        if not len(ids) or not isinstance(h.pool, PagedPool):
            return False
        offset = h.offset[ids]
        src, dst, nbytes = h.pool.compact(offset, h.length[ids], need, int(self._credit))
        if not len(src):
            return False
        ids = ids[np.searchsorted(offset, src)]
        h.hide(ids, dst)
        h.pin(ids)
        self._moved.append((h, ids))
        self._moves.append(Move(h.name, ids.astype(np.int32), src, dst, nbytes))
        moved = int(nbytes.sum())
        self.nbytes += moved
        self._credit -= moved
        return True
