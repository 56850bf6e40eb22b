"""The base of all eviction policies: object states, interface and last resort. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NONE, Index, Ints, Mask
from creel.policies.next_use import NEVER, NextUses

if TYPE_CHECKING:  # circular import
    from creel.policies.cluster.eviction import ClusterEviction
    from creel.policies.cluster.homes import Homes
    from creel.policies.cluster.jobs import PlanningTask, RetentionPlan
    from creel.policies.eviction.planned import PlanningContext

# States of an object. Below FETCHING it is not in flight; SKIPPED is left to a quicker reader;
# OVERDUE is in flight, but no reader waits for it any more.
ABSENT, SKIPPED, FAILED, FETCHING, RESIDENT, OVERDUE = range(6)

# Whether an object is on local disk, too: no, being written, yes.
NOT_STORED, STORING, STORED = range(3)


class EvictionPolicy:
    """Interface of all eviction policies to the core, with defaults and the last resort.

    Args:
        state: (n,) states, as above; pins: (n,); both are live views, read only.
        uses: the next uses of each job that reads the dataset.
    """

    #: Name in `creel stats`.
    name: str
    #: Whether each object fetched far ahead takes the room of one that is read again, so that
    #: reading ahead must stay short.
    short_prefetch = False
    #: Whether an epoch needs all room until all of it is read or in flight, so that nothing of the
    #: next epoch is fetched before.
    by_epoch = False
    #: Whether `keeps` is a plan for memory and disk together, so that one object may replace
    #: another on disk; else whatever comes there first stays.
    replaces = False
    #: Whether what peers ask for, and this node is home of, is read from the source for them.
    reads_for_peers = False
    #: Where to ask for objects of which no plan says who holds them; None: at the source.
    homes: Homes | None = None
    #: Whether plans or homes have changed, so that what may leave is to be looked at anew.
    stale = False
    #: (n,) whether each object is on disk, as above; a live view. None: there is no disk.
    stored: NDArray[np.uint8] | None = None

    @property
    def cluster(self) -> ClusterEviction | None:
        """The policy itself, where the nodes of a cluster follow it together."""
        return None

    def __init__(
        self, state: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[NextUses]
    ) -> None:
        self._state = state
        self._pins = pins
        self.all_uses = uses

    # --- what happens ----------------------------------------------------------------------------

    def released(self, ids: Index) -> None:
        """Residents are no longer pinned (an object may come twice)."""

    def plan_extended(self, ids: Index, epoch: int) -> None:
        """A job's plan continues with these reads of `epoch`."""

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        """The job of `uses` read the first object of `epoch`."""

    def replanned(self) -> None:
        """Plans were rebuilt, or a job ended."""

    def resized(self) -> None:
        """The dataset's share of the memory may have changed."""

    def sent(self, ids: Index) -> None:
        """Objects were sent to the peer that reads them."""

    def read_ahead_room(self, room: float) -> float:  # noqa: ARG002
        """Least number of objects that may be read ahead, of a memory with room for `room`."""
        return 0.0

    def set_homes(self, homes: Homes | None) -> None:
        """Peers are to be asked, others than before, or none any more."""
        if homes is not self.homes:
            self.homes, self.stale = homes, True

    def holders(self, ids: Index, epoch: int) -> Ints | None:  # noqa: ARG002
        """(k,) the peer that holds each object for its read in `epoch`, or -1; None: no peers."""
        return None if self.homes is None else self.homes.origins(ids)

    def awaited(self, ids: Index, epoch: int, clock: int) -> Mask | None:  # noqa: ARG002
        """(k,) whether the peer that holds each object then will have it only later; None: none."""
        return None

    def planning_task(self, context: PlanningContext) -> PlanningTask | None:  # noqa: ARG002
        """Return what retention should plan outside the loop, or None."""
        return None

    def retention_planned(self, task: PlanningTask, plan: RetentionPlan) -> None:
        """Take the plan of an earlier `planning_task`."""

    # --- memory and disk -------------------------------------------------------------------------

    def unneeded(self, k: int, step: int) -> Index:  # noqa: ARG002
        """Up to k distinct objects that nobody keeps: they leave before what is on disk, too."""
        return NONE

    def keeps(self, ids: Index) -> Mask:
        """(k,) whether each is worth a place on disk."""
        return np.ones(len(ids), np.bool_)

    # --- who leaves ------------------------------------------------------------------------------

    def victims(self, k: int, step: int) -> Index:
        """Up to k distinct objects to evict for reads at `step` of the policy's clock."""
        raise NotImplementedError

    def forced_victims(self, k: int, step: int) -> Index:
        """Up to k unpinned objects, farthest use first: for stalled readers, even against L1."""
        return self._farthest(self._unpinned(), k, step)

    def _farthest(self, ids: Index, k: int, step: int) -> Index:
        """Up to k of these objects, all used later than `step`, farthest use first."""
        due = EvictionPolicy.due(self, ids)
        if len(ids) > k:
            best = np.argpartition(due, len(ids) - k)[len(ids) - k :]
            ids, due = ids[best], due[best]
        return ids[due > step] if len(self.all_uses) == 1 else ids

    def wanted(self, ids: Index) -> Mask:
        """(k,) whether the current epoch reads each again, as far as known."""
        return np.zeros(len(ids), np.bool_)

    def due(self, ids: Index) -> Ints:
        """(k,) time of each object's next use on the policy's clock, NEVER where none is known."""
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
    """For a dataset without readers: all that is held stays, until another dataset needs room."""

    name = "none"

    def victims(self, k: int, step: int) -> Index:  # noqa: ARG002
        return NONE

    def forced_victims(self, k: int, step: int) -> Index:  # noqa: ARG002
        return NONE

    def due(self, ids: Index) -> Ints:
        """Zeros: nothing leaves memory because it is due late."""
        return np.zeros(len(ids), np.int64)
