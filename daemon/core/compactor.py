"""The compactor: which objects to move so that free ranges become one. Pure."""

from __future__ import annotations

import numpy as np

from creel.cache.memory.allocator import Allocator
from creel.daemon.core.events import MoveObjects
from creel.daemon.core.residency import Index, Residency, Sizes
from creel.policies.eviction import EvictionPolicy
from creel.policies.masks import every

#: Bytes of addresses searched for one object: some hundred images, planned in about 0.2 ms.
_STRETCH_NBYTES = 16 << 20
_SHORT_NBYTES = 4 << 20  # the same where all that is unpinned can be evicted
#: Most bytes moved at once (1 ms at 4 GB/s), and per second (a quarter of a core).
_BURST_NBYTES = 4 << 20
_RATE_BPS = 1 << 30
#: What planning for one object costs, as bytes that could be moved in that time.
_PLAN_NBYTES = 1 << 20


class Compactor:
    """Plans moves within a time budget; objects being moved are pinned until `done`."""

    def __init__(self, space: Allocator) -> None:
        self.nbytes = 0  # moved so far
        self._space = space
        self._cursor = 0
        self._credit = float(_BURST_NBYTES)
        self._last = 0.0
        self._moves: list[MoveObjects] = []
        self._moved: list[tuple[Residency, Index]] = []

    def begin(self, now: float) -> None:
        """Begin an event: add the time since the last one to the budget."""
        earned = max(now - self._last, 0.0) * _RATE_BPS
        self._credit = min(self._credit + earned, _BURST_NBYTES)
        self._last = now

    def gather(self, h: Residency, nbytes: int, *, stalled: bool) -> bool:
        """Make contiguous room for an object of `nbytes`; False when that is not possible now.

        Objects are moved where they fit elsewhere. Where that costs too much, or they fit nowhere,
        neighbours that may leave anyway are evicted. (Always doing that would copy nothing, but
        favour large objects: after four epochs 15 % more opens.)
        """
        if not self.willing and not stalled:
            return False
        self._credit -= _PLAN_NBYTES
        if h.policy is not None and h.policy.fits:
            return self._clear(h, h.policy, nbytes, stalled=stalled)
        ids = self._next(h, _STRETCH_NBYTES)
        return self._plan(h, ids, nbytes) or self._leave(h, ids, nbytes)

    @property
    def willing(self) -> bool:
        """Whether the budget allows one more object."""
        return self._credit > _PLAN_NBYTES

    def take(self) -> list[MoveObjects]:
        """Return the moves planned since the last call; execute them before later actions."""
        moves, self._moves = self._moves, []
        return moves

    def copied(self, h: Residency, ids: Index, offset: Sizes) -> None:
        """Pin residents that the shell copies to `offset` and then publishes, until `done`."""
        h.hide(ids, offset)
        h.pin(ids)
        self._moved.append((h, ids))

    def done(self) -> None:
        """End the event: all its actions are decided, so moved objects may be evicted again."""
        for h, ids in self._moved:
            h.unpin(ids)
            h.release(ids)
        self._moved.clear()

    def _clear(self, h: Residency, policy: EvictionPolicy, nbytes: int, *, stalled: bool) -> bool:
        """Clear a stretch: evict what may leave, move the rest to places of victims elsewhere."""
        ids = self._next(h, _SHORT_NBYTES + 2 * nbytes)
        stays = ~policy.dispensable(ids)
        rooms = h.room[ids]
        inside = h.pool.neighbours(h.offset[ids], rooms, nbytes, np.where(stays, rooms, 0))
        if not len(inside):
            return False
        leaving, staying = ids[inside[~stays[inside]]], ids[inside[stays[inside]]]
        cleared = ids[inside]
        h.pin(cleared)  # no victim may lie in the stretch itself
        victims = policy.fitting(h.room[staying], stalled=stalled)
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

    def _swap(self, h: Residency, ids: Index, victims: Index) -> None:
        """Move objects `ids` to the places of `victims`, and free their own."""
        if not len(ids):
            return
        src, rooms = h.offset[ids], h.room[ids]
        dst = h.inherit(ids, rooms, victims)
        h.pool.free(src, rooms)
        self._move(h, ids, src, dst)

    def _move(self, h: Residency, ids: Index, src: Sizes, dst: Sizes) -> None:
        nbytes = h.length[ids]
        self.copied(h, ids, dst)
        self._moves.append(MoveObjects(h.name, ids.astype(np.int32), src, dst, nbytes))
        moved = int(nbytes.sum())
        self.nbytes += moved
        self._credit -= moved

    def _next(self, h: Residency, nbytes: int) -> Index:
        """(k,) unpinned objects in the next stretch of `nbytes` addresses."""
        start = self._cursor
        stop = min(start + nbytes, self._space.nbytes)
        self._cursor = stop if stop < self._space.nbytes else 0
        if h.address_index is None:
            return np.empty(0, np.intp)
        ids = h.address_index.between(start, stop, h.offset)
        loose: Index = ids[h.pins[ids] == 0]
        return loose

    def _plan(self, h: Residency, ids: Index, need: int) -> bool:
        if not len(ids):
            return False
        offset = h.offset[ids]
        src, dst, _ = h.pool.compact(offset, h.room[ids], need, int(self._credit))
        if not len(src):
            return False
        ids = ids[np.searchsorted(offset, src)]
        self._move(h, ids, src, dst)
        return True

    def _leave(self, h: Residency, ids: Index, nbytes: int) -> bool:
        """Evict neighbours among `ids`."""
        if h.policy is None:
            return False
        ids = ids[h.policy.dispensable(ids)]
        gone = h.pool.neighbours(h.offset[ids], h.room[ids], nbytes)
        return h.evict(ids[gone], "due_later") > 0
