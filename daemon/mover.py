"""Room in one piece out of room in pieces: which objects are moved, and how many. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.space import PagedPool, Space
from creel.daemon.events import Move
from creel.daemon.holding import Holding, Index
from creel.policies.retain import Need

#: Bytes of addresses looked at for one object: some hundred images, planned in about 0.2 ms.
_STRETCH_NBYTES = 16 << 20
_STRETCHES = 2  # looked at for one object, at most
#: At most so much is moved at once (2 ms at 4 GB/s), and so much per second (a quarter of a core).
_BURST_NBYTES = 8 << 20
_RATE_BPS = 1 << 30
#: What planning costs, as bytes that could be moved in that time.
_PLAN_NBYTES = 1 << 19


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

    def gather(self, h: Holding, nbytes: int, need: Need) -> bool:
        """Make room in one piece for an object of so many bytes; False: not now.

        Others are moved into holes that suit them. Where that is too much, or no hole suits, some
        that may leave anyway leave side by side. (Always to do so would cost no copying, but favour
        large objects: after four epochs 15 % more opens.)
        """
        if h.owners is None:
            return False
        ids = np.empty(0, np.intp)
        for _ in range(_STRETCHES):
            if self._credit > 0 or not len(ids):
                ids = self._next(h)
            if self._credit <= 0:
                break
            self._credit -= _PLAN_NBYTES
            if self._plan(h, ids, nbytes):
                return True
        return self._leave(h, ids, nbytes, need)

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
        if h.owners is None:
            return np.empty(0, np.intp)
        ids = h.owners.between(start, stop, h.offset)
        loose: Index = ids[h.pins[ids] == 0]
        return loose

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

    def _leave(self, h: Holding, ids: Index, nbytes: int, need: Need) -> bool:
        """Evict neighbours among `ids`."""
        if h.keeper is None or not isinstance(h.pool, PagedPool):
            return False
        ids = ids[h.keeper.dispensable(ids, need)]
        gone = h.pool.neighbours(h.offset[ids], h.length[ids], nbytes)
        return h.evict(ids[gone], "due_later") > 0
