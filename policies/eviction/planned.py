"""Eviction for epochs that read each object at most once, following a retention plan. Pure.

`EpochBoundary.plan` plans an epoch's end outside the event loop, between `planning_task` and
`retention_planned`. Until the plan is there, any object that was read may leave, and objects that
the epoch still has to read stay (law L1). That alone reaches the bound on reads. The plan adds an
even pace, and epochs that begin with hits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NONE, Ids, Index, Mask, every, joined, unique
from creel.policies.eviction.context import PlanningContext, PlanningTask
from creel.policies.eviction.policy import NOT_STORED, RESIDENT, SKIPPED, EvictionPolicy
from creel.policies.eviction.retention import EpochBoundary, Kept
from creel.policies.next_use import NextUses

#: After this part (1/n) of an epoch, retention is planned even if the next order is unknown.
_WAIT_PART = 8
#: Without the next order, room is kept free for the misses in the next epoch's first two steps, or
#: in this part of it if that is more: no object that stays would make room for them.
_UNKNOWN_ORDER_FREE = 0.0025
#: Limits of the lead, as parts of an epoch (the source is idle for as long) and of the memory.
_MAX_LEAD, _MAX_LEAD_OF_MEMORY = 0.03, 0.5
#: Factor on the lead: hits and misses do not alternate evenly, and room may be in pieces.
_LEAD_MARGIN = 1.5
#: Plan again if more than this part of the objects that should stay left during planning.
_MAX_LOST = 0.0005
#: Mark of an object that is in `_going`. Other bits are for subclasses.
LISTED = np.uint8(1)
#: Objects per scan, and most scans in one call, if no candidates are listed.
_SCAN_OBJECTS, _MAX_SCANS = 1 << 16, 4


class PlannedEviction(EvictionPolicy):
    """For epochs that read each object at most once (laws L1 and L2)."""

    name = "epoch"
    by_epoch = True
    replaces = True

    def __init__(
        self, state: NDArray[np.uint8], pins: NDArray[np.int32], uses: NextUses, epoch: int = 0
    ) -> None:
        super().__init__(state, pins, [uses])
        self.uses = uses
        self.epoch = epoch  # the latest epoch in which an object was read
        self._stays: Mask | None = None  # the plan of this epoch's end
        self._marks = np.zeros(len(state), np.uint8)  # (n,) bits of each object, as LISTED
        self._going: list[Ids] = []  # objects that may leave, the latest last
        self._surplus: list[Ids] = []  # held when the plan was made, but not part of it
        self._pending: EpochBoundary | None = None  # the task whose plan has not come yet
        self._released_since: list[Index] = []  # objects released since that task
        self._asked = 0  # the latest task planned without (1) or with (2) the next order
        self._capacity = -1  # capacity of the latest plan
        self._all_fits = False  # whether all objects fit
        self._clock_hand = 0  # position of `_scan`
        self.stale = False  # whether homes or others' plans have changed since the latest plan

    # --- the plan --------------------------------------------------------------------------------

    def planning_task(self, context: PlanningContext) -> PlanningTask | None:
        """Return what to plan now, or None; one task at a time."""
        if self._pending is not None or (self._asked == 2 and not self.stale):
            return None
        capacity = context.capacity
        self._all_fits = capacity >= context.nbytes
        clock, level = context.clock, self._known(context)
        if self._all_fits or not level or (level <= self._asked and not self.stale):
            self.stale = self.stale and not self._all_fits
            return None
        if level <= self._asked and self._stays is not None and capacity == self._capacity:
            self.stale = False
            return None
        self._asked, self._capacity, self.stale = level, capacity, False
        first, end = self.uses.span(self.epoch)
        missing = 1 - capacity / context.nbytes
        known = level == 2
        if not known:
            each = context.nbytes / max(end - first, 1)
            capacity -= int(missing * max(2 * each, _UNKNOWN_ORDER_FREE * context.nbytes))
        least, steps = context.lead
        lead = max(
            min(_LEAD_MARGIN * steps / max(end - first, 1), _MAX_LEAD), least / max(end - first, 1)
        )
        self._pending = EpochBoundary(
            context.orders(self.epoch + 1) if known else [],
            self.uses.due,
            self._state,
            min(max(clock, first), end - 1),
            end,
            context.size,
            int(context.nbytes / len(self._state)),
            context.page,
            capacity,
            min(lead, _MAX_LEAD_OF_MEMORY * (1 - missing)),
            self.stored,
        )
        return self._pending

    def _known(self, context: PlanningContext) -> int:
        """Whether to plan with the next epoch's order (2), without it (1), or not yet (0)."""
        e, uses = self.epoch, self.uses
        if not uses.knows(e):
            return 0
        if context.known > e + 1 or (
            context.known == e + 1 and uses.accesses(e + 1) >= uses.accesses(e)
        ):
            return 2 if uses.knows(e + 1) else 1
        first, end = uses.span(e)
        return int(_WAIT_PART * (context.clock - first) >= end - first)

    def retention_planned(self, task: PlanningTask, plan: object) -> None:
        if task is not self._pending or not isinstance(plan, Kept):
            return
        again, self._released_since = self._released_since, []
        self._pending, self._stays, self._surplus = None, plan.stays, plan.surplus
        lost = sum(np.count_nonzero(plan.stays[x] & self._gone(x)) for x in again)
        if lost > _MAX_LOST * len(self._state):
            self.replanned()
        for ids in again:
            self.released(ids[self._leaving(ids)])

    def _gone(self, ids: Index) -> Mask:
        """Return (k,) whether each object is neither in memory nor on disk."""
        gone: Mask = self._state[ids] <= SKIPPED
        if self.stored is not None:
            gone &= self.stored[ids] == NOT_STORED
        return gone

    # --- eviction candidates ---------------------------------------------------------------------

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        if uses is not self.uses or epoch <= self.epoch:
            return
        self.epoch = epoch
        self._stays, self._surplus, self._released_since, self._pending = None, [], [], None
        self._asked = 0

    def plan_extended(self, ids: Index, epoch: int) -> None:
        if epoch <= self.epoch:
            self._unlist(ids[self.uses.due[ids] < self._limit])
            self._asked = 0

    def replanned(self) -> None:
        self.stale, self._capacity = True, -1

    def resized(self) -> None:
        self.stale = True

    def released(self, ids: Index) -> None:
        if self._all_fits:
            return
        unwanted = ~self.wanted(ids)
        if not every(unwanted):
            ids = ids[unwanted]
        if self._pending is not None:
            self._released_since.append(ids)
        if self._planned:
            ids = ids[~self._staying(ids)]
        ids = ids[~self._listed(ids)]
        if len(ids):
            ids = unique(ids)
            self._marks[ids] |= LISTED
            self._going.append(ids.astype(np.int32))

    def _listed(self, ids: Index) -> Mask:
        return self._marked(ids, LISTED)

    def _marked(self, ids: Index | Ids, mark: np.uint8) -> Mask:
        marked: Mask = (self._marks[ids] & mark) > 0
        return marked

    def _unlist(self, ids: Index) -> None:
        self._marks[ids] &= ~LISTED

    @property
    def _planned(self) -> bool:
        """Whether there is a plan of what stays over the end of this epoch."""
        return self._stays is not None

    def _staying(self, ids: Index) -> Mask:
        """Return (k,) whether each object stays according to the plan, which must exist."""
        assert self._stays is not None  # noqa: S101  `_planned`
        return self._stays[ids]

    @property
    def _limit(self) -> int:
        return self.uses.start(self.epoch + 1)

    def wanted(self, ids: Index) -> Mask:
        wanted: Mask = self.uses.due[ids] < self._limit
        return wanted

    def dispensable(self, ids: Index) -> Mask:
        """Return (k,) whether neither this epoch nor the plan needs each object."""
        unwanted = ~self.wanted(ids)
        if self._planned:
            unwanted &= ~self._staying(ids)
        return unwanted

    def unneeded(self, k: int, step: int) -> Index:
        """Return up to k objects that may leave, once there is a plan."""
        return self.victims(k, step) if self._planned or self._all_fits else NONE

    def keeps(self, ids: Index) -> Mask:
        """Return (k,) whether each object is worth a place on disk; all are before a plan."""
        if not self._planned:
            return super().keeps(ids)
        return ~self.dispensable(ids)

    def victims(self, k: int, step: int) -> Index:  # noqa: ARG002  (the plan knows)
        if self._all_fits and self.stored is not None:
            return NONE  # memory and disk together hold all objects
        out = []
        for source in (self._from_surplus, self._from_going, self._scan):
            if k <= 0:
                break
            ids = source(k)
            self._marks[ids] |= LISTED  # so that no other source returns them, too
            out.append(ids)
            k -= len(ids)
        victims = joined(out)
        self._unlist(victims)
        return victims

    def _from_surplus(self, k: int) -> Index:
        out = []
        while self._surplus and k > 0:
            ids = self._surplus.pop().astype(np.intp)
            ids = ids[self._leaving(ids) & ~self._listed(ids)]
            ids = ids[self.dispensable(ids)]
            if len(ids) > k:
                self._surplus.append(ids[k:].astype(np.int32))
                ids = ids[:k]
            out.append(ids)
            k -= len(ids)
        return joined(out)

    def _from_going(self, k: int) -> Index:
        """Remove and return up to k objects of `_going`, the latest first."""
        out = []
        while self._going and k > 0:
            small = self._going.pop()
            ids = small.astype(np.intp)
            if len(ids) > k:
                self._going.append(small[:-k])
                ids = ids[-k:]
            good = self._listed(ids)
            self._unlist(ids)
            good &= self._leaving(ids)
            good &= self.dispensable(ids)
            if not every(good):
                ids = ids[good]
            out.append(ids)
            k -= len(ids)
        return joined(out)

    def _scan(self, k: int) -> Index:
        """Scan the objects in turn, like a clock's hand, while there is no plan."""
        n = len(self._state)
        if self._planned or not n:
            return NONE
        out = []
        for _ in range(min(_MAX_SCANS, -(-n // _SCAN_OBJECTS))):
            stop = min(self._clock_hand + _SCAN_OBJECTS, n)
            here = slice(self._clock_hand, stop)
            ids = self._clock_hand + np.flatnonzero(
                (self._state[here] == RESIDENT)
                & (self._pins[here] == 0)
                & ((self._marks[here] & LISTED) == 0)
            )
            ids = ids[~self.wanted(ids)]
            out.append(ids[:k])
            k -= len(out[-1])
            if k <= 0:
                break
            self._clock_hand = stop if stop < n else 0
        return joined(out)
