"""Which eviction policy serves a dataset. Pure.

The plans decide between three cases (laws L1 to L5, docs/architecture.md):

- Every epoch reads each object at most once: `PlannedEviction`. What the epoch still has to read
  stays (L1); of the rest, what retention planned for the epoch's end (L2). Where nodes serve each
  other, `ClusterEviction`: planned for all of them alike (L3, L5).
- All else (replacement, weights, several jobs on one dataset): `FarthestNextUse`, the farthest
  next use first, and never for something due later than the victim (L4; MIN with bypass, Belady).
- Nothing is known beyond the steps being read (creel.wrap, samplers that cannot be run ahead):
  `MostRecentFirst`.

Where nodes serve each other but none knows the order of all, `HomesEviction` takes the place of the
first and the last case, and of the second where the memories together hold everything, or where
jobs have different nodes, which count on what each of them keeps. For several jobs whose orders all
nodes know, `HomesFarthest` takes the second case, unless the memories hold everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.cluster.boundary import Deals
from creel.policies.cluster.eviction import ClusterEviction
from creel.policies.cluster.homes import Homes, HomesEviction
from creel.policies.cluster.jobs import DealtJob, HomesFarthest
from creel.policies.eviction.farthest import FarthestNextUse
from creel.policies.eviction.planned import PlannedEviction
from creel.policies.eviction.policy import EvictionPolicy
from creel.policies.eviction.recent import MostRecentFirst
from creel.policies.next_use import NextUses


@dataclass(frozen=True)
class Readers:
    """The jobs that read a dataset, as an eviction policy sees them.

    Args:
        uses: the next uses of each job.
        clock: for each job, (a, b): its step s is at common time a * s + b.
        unplanned: whether no job knows more than the steps being read.
        once: whether every epoch reads each object at most once (except for padding).
        epoch: the epoch that the first job reads in.
        deals: what is known of the first job on other nodes.
        homes: where to ask, if the nodes serve each other without a plan for all; together: their
            memories hold all objects; by_hash: some job has other nodes than another one.
        dealt: how each job deals its epochs to all ranks; None: some job's deals are not known.
    """

    uses: list[NextUses]
    clock: Callable[[], list[tuple[float, float]]]
    unplanned: bool
    once: bool
    epoch: int
    deals: Deals
    homes: Homes | None
    together: bool
    by_hash: bool
    dealt: list[DealtJob] | None


def policy_for(
    present: EvictionPolicy, readers: Readers, state: NDArray[np.uint8], pins: NDArray[np.int32]
) -> EvictionPolicy:
    """Return the eviction policy that suits the readers: the present one where it still does."""
    uses, homes = readers.uses, readers.homes
    dealt = readers.dealt if len(uses) > 1 else None
    at_home = readers.unplanned or readers.together or (readers.by_hash and dealt is None)
    at_home |= len(uses) == 1 and readers.once
    if homes is not None and at_home:
        if not isinstance(present, HomesEviction):
            present = HomesEviction(state, pins, uses, homes)
        present.all_uses = uses
    elif homes is not None and dealt is not None:
        if not isinstance(present, HomesFarthest) or present.all_uses != uses:
            present = HomesFarthest(state, pins, dealt, readers.clock, homes)
    else:
        present = _alone(present, readers, state, pins)
    present.set_homes(homes)
    return present


def _alone(
    present: EvictionPolicy, readers: Readers, state: NDArray[np.uint8], pins: NDArray[np.int32]
) -> EvictionPolicy:
    """`policy_for` where no other node keeps anything for this one, or where that is planned."""
    uses = readers.uses
    if readers.unplanned:
        if type(present) is MostRecentFirst:
            present.all_uses = uses
            return present
        return MostRecentFirst(state, pins, uses)
    if len(uses) == 1 and readers.once:
        alone = readers.deals.view is None
        if (
            isinstance(present, PlannedEviction)
            and present.uses is uses[0]
            and isinstance(present, ClusterEviction) != alone
        ):
            return present
        if not alone:
            return ClusterEviction(state, pins, uses[0], readers.epoch, readers.deals)
        return PlannedEviction(state, pins, uses[0], readers.epoch)
    if type(present) is FarthestNextUse and present.all_uses == uses:
        return present
    return FarthestNextUse(state, pins, uses, readers.clock)
