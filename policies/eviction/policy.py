"""The base of all eviction policies: object states, interface and fallback. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NONE, Index, Ints, Mask
from creel.policies.eviction.context import PeerHomes, PlanningContext, PlanningTask
from creel.policies.next_use import NEVER, NextUses

# States of an object. States below FETCHING are not in flight. SKIPPED: left to a reader that
# overtakes the fetches. OVERDUE: in flight, but no reader waits for it any more.
ABSENT, SKIPPED, FAILED, FETCHING, RESIDENT, OVERDUE = range(6)

# Whether an object is on local disk: no, being written, yes.
NOT_STORED, STORING, STORED = range(3)


class EvictionPolicy:
    """Interface between the core and an eviction policy, with defaults and a fallback.

    Args:
        state: (n,) states, as above; pins: (n,) pin counts; both are live views, read only.
        uses: the next uses of each job that reads the dataset.
    """

    #: Name in `creel stats`.
    name: str
    #: Whether objects fetched far ahead take the room of objects that are read again, so that
    #: reading ahead must stay short.
    short_prefetch = False
    #: Whether an epoch needs all room until all its objects are read or in flight, so that no
    #: object of the next epoch is fetched before.
    by_epoch = False
    #: Whether `keeps` is a plan for memory and disk together, so that an object may replace another
    #: one on disk. Otherwise the objects written first stay there.
    replaces = False
    #: Whether this node reads objects that it is to hold from the source when peers ask for them.
    reads_for_peers = False
    #: Which node to ask for objects whose holder no plan names; None: read the source.
    homes: PeerHomes | None = None
    #: Whether plans or homes have changed, so that the eviction candidates must be listed again.
    stale = False
    #: (n,) whether each object is on disk, as above; a live view. None: the node has no disk.
    stored: NDArray[np.uint8] | None = None
    #: (n,) whether a job may read each object after all that is planned; None: any of them. Of
    #: those that no plan reads, the others leave first.
    alive: Mask | None = None

    def __init__(
        self, state: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[NextUses]
    ) -> None:
        self._state = state
        self._pins = pins
        self.all_uses = uses  # of each job that reads the dataset

    # --- notifications ---------------------------------------------------------------------------

    def released(self, ids: Index) -> None:
        """Note that residents are no longer pinned (an object may be given twice)."""

    def plan_extended(self, ids: Index, epoch: int) -> None:
        """Note that a job's plan continues with reads of these objects in `epoch`."""

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        """Note that the job of `uses` has read its first object of `epoch`."""

    def replanned(self) -> None:
        """Note that plans were rebuilt, or that a job ended."""

    def resized(self) -> None:
        """Note that the dataset's share of the memory may have changed."""

    def sent(self, ids: Index) -> None:
        """Note that objects were sent to the peer that reads them."""

    def read_ahead_room(self, room: float) -> float:  # noqa: ARG002
        """Return how many objects may be read ahead at least, in a memory for `room` objects."""
        return 0.0

    def set_homes(self, homes: PeerHomes | None) -> None:
        """Set which peers to ask; None: no peers."""
        if homes is not self.homes:
            self.homes, self.stale = homes, True

    def set_alive(self, alive: Mask | None) -> None:
        """Set which objects may be read again; see `alive`."""
        if alive is not self.alive:
            self.alive, self.stale = alive, True

    def holders(self, ids: Index, epoch: int) -> Ints | None:  # noqa: ARG002
        """Return (k,) the peer that holds each object when `epoch` reads it, or -1, or None."""
        return None if self.homes is None else self.homes.origins(ids)

    def awaited(self, ids: Index, epoch: int, clock: int) -> Mask | None:
        """Return (k,) whether each object's holder in `epoch` does not have it yet, or None."""
        if self.homes is None:
            return None
        uses = self.all_uses[0]
        left = uses.span(epoch - 1)[1] - clock if uses.knows(epoch - 1) else 0
        return self.homes.awaited(ids, epoch, left)

    def brings(self, ids: Index) -> Mask:
        """Return (k,) whether to read each absent object when a peer asks (`reads_for_peers`)."""
        if self.homes is None or not self.reads_for_peers:
            return np.zeros(len(ids), np.bool_)
        return self.homes.asked(ids)

    def planning_task(self, context: PlanningContext) -> PlanningTask | None:  # noqa: ARG002
        """Return what retention should plan outside the event loop, or None."""
        return None

    def retention_planned(self, task: PlanningTask, plan: object) -> None:
        """Take the plan of an earlier `planning_task`."""

    # --- memory and disk -------------------------------------------------------------------------

    def unneeded(self, k: int, step: int) -> Index:  # noqa: ARG002
        """Return up to k distinct objects that may leave before those that are also on disk."""
        return NONE

    def keeps(self, ids: Index) -> Mask:
        """Return (k,) whether each object is worth a place on disk."""
        return np.ones(len(ids), np.bool_)

    # --- eviction --------------------------------------------------------------------------------

    def victims(self, k: int, step: int) -> Index:
        """Return up to k distinct objects to evict for reads at `step` of the policy's clock."""
        raise NotImplementedError

    def forced_victims(self, k: int, step: int) -> Index:
        """Return up to k unpinned objects for stalled readers, farthest use first, despite L1."""
        return self._farthest(self._unpinned(), k, step)

    def _farthest(self, ids: Index, k: int, step: int) -> Index:
        """Return up to k of these objects, all used later than `step`, farthest use first."""
        due = EvictionPolicy.due(self, ids)
        if len(ids) > k:
            best = np.argpartition(due, len(ids) - k)[len(ids) - k :]
            ids, due = ids[best], due[best]
        return ids[due > step] if len(self.all_uses) == 1 else ids

    def wanted(self, ids: Index) -> Mask:
        """Return (k,) whether the current epoch is known to read each object again."""
        return np.zeros(len(ids), np.bool_)

    def due(self, ids: Index) -> Ints:
        """Return (k,) time of each object's next known use on the policy's clock, or NEVER."""
        due = np.full(len(ids), NEVER, np.int64)
        for uses in self.all_uses:
            due = np.minimum(due, uses.due[ids])
        return due

    def at(self, uses: NextUses, step: int) -> int:  # noqa: ARG002  (one job: its own clock)
        """Convert a job's step to the policy's clock."""
        return step

    def _unpinned(self) -> Index:
        return np.flatnonzero((self._state == RESIDENT) & (self._pins == 0))

    def _leaving(self, ids: Index) -> Mask:
        may: Mask = (self._state[ids] == RESIDENT) & (self._pins[ids] == 0)
        return may


class NoEviction(EvictionPolicy):
    """For a dataset without readers: its objects stay until another dataset needs room."""

    name = "none"

    def victims(self, k: int, step: int) -> Index:  # noqa: ARG002
        return NONE

    def forced_victims(self, k: int, step: int) -> Index:  # noqa: ARG002
        return NONE

    def due(self, ids: Index) -> Ints:
        """Return zeros, so that no object leaves memory because it is due late."""
        return np.zeros(len(ids), np.int64)
