"""Which scheme the nodes of a cluster follow for a dataset. Pure."""

from __future__ import annotations

from enum import Enum


class Scheme(Enum):
    """How nodes share a dataset; `creel.policies.cluster` explains each scheme."""

    ALONE = "alone"
    PLAN = "plan"
    HOMES = "homes"
    SOONEST = "soonest"
    ASK = "ask"

    @property
    def by_home(self) -> bool:
        """Whether a node asks the home of an object, not a planned holder."""
        return self in {Scheme.HOMES, Scheme.SOONEST, Scheme.ASK}


def scheme_of(
    jobs: int,
    *,
    peers: bool,
    dealt: bool,
    by_hash: bool,
    once: bool,
    unplanned: bool,
    together: bool,
    rehearses: bool = False,
) -> Scheme:
    """Return the scheme for a dataset; all nodes of a cluster must come to the same one.

    Args:
        jobs: jobs of this node that read it.
        peers: whether some job has other nodes.
        dealt: whether all nodes know how each job deals its epochs to all ranks.
        by_hash: whether a node reads it for two jobs that run on different nodes.
        once: whether every epoch reads each object at most once.
        unplanned: whether no job knows more than the steps being read.
        together: whether the memories of all nodes hold all objects.
        rehearses: whether some job replays earlier data, or will: all its epochs then have homes,
            since objects that change their holders would be read again.

    >>> rest = {"by_hash": False, "once": True, "unplanned": False, "together": False}
    >>> scheme_of(1, peers=True, dealt=True, **rest), scheme_of(1, peers=True, dealt=False, **rest)
    (<Scheme.PLAN: 'plan'>, <Scheme.HOMES: 'homes'>)
    >>> scheme_of(2, peers=True, dealt=True, **rest)
    <Scheme.SOONEST: 'soonest'>
    >>> scheme_of(1, peers=True, dealt=True, rehearses=True, **rest)
    <Scheme.SOONEST: 'soonest'>
    """
    if not peers:
        return Scheme.ALONE
    if jobs == 1 and dealt and not by_hash and not rehearses:
        return Scheme.PLAN if once and not unplanned else Scheme.ALONE
    merges = dealt and (jobs > 1 or rehearses)
    if unplanned or together or ((by_hash or (jobs == 1 and once)) and not merges):
        return Scheme.HOMES
    return Scheme.SOONEST if merges else Scheme.ASK
