"""What the nodes of a cluster tell each other of their plans. Pure.

All nodes compute the same plan from what all of them know (`boundary`), so as a rule they tell each
other nothing. A daemon that was restarted does not know which node holds what, nor does one whose
plan came too late. It asks a peer once, and plans like the others from then on. Heartbeats have a
digest of the plans, which shows who plans from other inputs: that node asks as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from creel.policies.eviction.sampling import Nodes


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Which node held each object when an epoch began, according to one node.

    Args:
        seed: `JobOrder.mark` of the epoch, by which nodes identify it.
        nodes: number of nodes in the cluster.
        holder: (n,) node that held each object, or `placement.nobody`; None: no node held any.
    """

    seed: int
    nodes: int
    holder: Nodes | None


class PlanDigest(NamedTuple):
    """The inputs of a node's plan for an epoch, which must be the same on all nodes.

    Args:
        dataset: its key.
        seed: as in `SharedPlan`.
        digest: of the holder of each object when the epoch began; 0: no object had one.
    """

    dataset: str
    seed: int
    digest: int


def digest(holder: Nodes | None) -> int:
    """Return a digest of (n,) holders; 0 if no node holds any object."""
    return 0 if holder is None else zlib.crc32(holder.tobytes())


def differing(
    mine: Sequence[PlanDigest], theirs: Sequence[PlanDigest], *, lowest: bool
) -> list[PlanDigest]:
    """Return my plans that must give way to theirs.

    The plans of the lowest node that can be reached count, unless it holds nothing.

    >>> one, none = PlanDigest("d", 1, 77), PlanDigest("d", 1, 0)
    >>> differing([one], [none], lowest=True), differing([none], [one], lowest=False)
    ([], [PlanDigest(dataset='d', seed=1, digest=0)])
    """
    right = {plan[:2]: plan.digest for plan in theirs if plan.digest}
    return [
        plan
        for plan in mine
        if right.get(plan[:2], plan.digest) != plan.digest and (lowest or not plan.digest)
    ]
