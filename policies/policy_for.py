"""Which eviction policy serves a dataset. Pure.

There are three cases (laws L1 to L5, docs/retention.md):

- Every epoch reads each object at most once: `PlannedEviction`. Objects that the epoch still has to
  read stay (L1); of the others, those that retention has planned (L2).
- Nothing is known beyond the steps being read (samplers that cannot be run ahead, wrapped datasets
  below a loader that is not creel's): `MostRecentFirst`.
- All other streams (replacement, weights, rehearsal, several jobs on one dataset):
  `FarthestNextUse` evicts the farthest next use first, but never for a read that is due later than
  the victim (L4; MIN with bypass, Belady).

Which of them nodes use that serve each other, and how, says `policies/cluster/scheme.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Mask
from creel.policies.cluster.boundary import Deals
from creel.policies.cluster.eviction import ClusterEviction
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.cluster.homes import Homes, HomesEviction
from creel.policies.cluster.jobs import DealtJob, HomesFarthest
from creel.policies.cluster.scheme import Scheme
from creel.policies.eviction.farthest import FarthestNextUse
from creel.policies.eviction.planned import PlannedEviction
from creel.policies.eviction.policy import EvictionPolicy
from creel.policies.eviction.recent import MostRecentFirst
from creel.policies.next_use import NextUses


@dataclass(frozen=True)
class Readers:
    """The jobs that read a dataset, as needed to choose an eviction policy.

    Args:
        uses: the next uses of each job.
        clock: returns for each job (a, b), so that its step s is at common time a * s + b.
        unplanned: whether no job knows more than the steps being read.
        once: whether every epoch reads each object at most once (except for padding).
        epoch: the epoch that the first job reads in.
        deals: what is known of the first job on other nodes.
        scheme: how the nodes share the dataset.
        homes: which node to ask for each object, if the scheme has homes.
        dealt: how each job deals its epochs to all ranks; None: unknown for some job.
        alive: (n,) whether a job that rehearses may read each object again; None: no job does.
    """

    uses: list[NextUses]
    clock: Callable[[], list[tuple[float, float]]]
    unplanned: bool
    once: bool
    epoch: int
    deals: Deals
    scheme: Scheme
    homes: Homes | None
    dealt: list[DealtJob] | None
    alive: Mask | None = None


def policy_for(
    present: EvictionPolicy, readers: Readers, state: NDArray[np.uint8], pins: NDArray[np.int32]
) -> EvictionPolicy:
    """Return the eviction policy that suits the readers; keep the present one if it does."""
    uses, homes, scheme = readers.uses, readers.homes, readers.scheme
    if scheme is Scheme.HOMES and homes is not None:
        if not isinstance(present, HomesEviction):
            present = HomesEviction(state, pins, uses, homes)
        present.all_uses = uses
    elif scheme is Scheme.SOONEST and homes is not None and readers.dealt is not None:
        if not isinstance(present, HomesFarthest) or present.all_uses != uses:
            present = HomesFarthest(state, pins, readers.dealt, readers.clock, homes)
    elif scheme is Scheme.PLAN:
        if not isinstance(present, ClusterEviction) or present.uses is not uses[0]:
            present = ClusterEviction(state, pins, uses[0], readers.epoch, readers.deals)
    else:
        present = _alone(present, readers, state, pins)
    present.set_homes(homes)
    present.set_alive(readers.alive)
    return present


def joint(policy: EvictionPolicy) -> ClusterEviction | FirstReaders | None:
    """Return what the nodes of a cluster plan together, and may ask each other for; else None."""
    if isinstance(policy, ClusterEviction):
        return policy
    return policy.homes.first if isinstance(policy.homes, Homes) else None


def _alone(
    present: EvictionPolicy, readers: Readers, state: NDArray[np.uint8], pins: NDArray[np.int32]
) -> EvictionPolicy:
    """Return the policy of a node that keeps objects for itself alone."""
    uses = readers.uses
    if readers.unplanned:
        if type(present) is MostRecentFirst:
            present.all_uses = uses
            return present
        return MostRecentFirst(state, pins, uses)
    if len(uses) == 1 and readers.once and readers.alive is None:
        if type(present) is PlannedEviction and present.uses is uses[0]:
            return present
        return PlannedEviction(state, pins, uses[0], readers.epoch)
    if type(present) is FarthestNextUse and present.all_uses == uses:
        return present
    return FarthestNextUse(state, pins, uses, readers.clock)
