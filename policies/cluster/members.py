"""Which nodes of a cluster plans count on, and since when: a log that its nodes agree on. Pure.

As soon as a node notices that another is gone, it stops asking it (`daemon/core/cluster/`). But
what each node keeps must change on all nodes together. So one node, the lowest, writes a *change*:
the members from now on, and for each dataset the moment of an epoch from which plans count on them.
Changes spread with the heartbeats. If nodes that did not hear of each other wrote two logs, a rule
decides between these, not a vote: plans made from the log that lost cost source reads, never a
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from creel.policies.arrays import Mask

#: Changes that are kept and sent. A node that has missed more takes a plan from another node.
MAX_CHANGES = 8


class ChangeId(NamedTuple):
    """The identity of a change: two parts of a cluster may write changes of the same number."""

    number: int
    proposer: int


#: The state before any change: all nodes are members.
BEGINNING = ChangeId(0, 0)


class EpochMoment(NamedTuple):
    """A moment in an epoch of a dataset.

    Args:
        dataset: its key.
        seed: of the epoch's order, by which nodes identify an epoch.
        clock: the part of the epoch that was read, in 65,536ths.
    """

    dataset: str
    seed: int
    clock: int


class Change(NamedTuple):
    """Plans count on these members from these moments on.

    Args:
        members: a bit for each node, as from `packed`.
        moments: one for each dataset that the proposer reads.
    """

    number: int
    proposer: int
    members: bytes
    moments: tuple[EpochMoment, ...]

    @property
    def id(self) -> ChangeId:
        """The change's identity."""
        return ChangeId(self.number, self.proposer)

    def moment(self, dataset: str) -> EpochMoment | None:
        """Return from when on the change counts for a dataset, or None if it does not say."""
        return next((m for m in self.moments if m.dataset == dataset), None)


def packed(members: Mask) -> bytes:
    """Return (nodes,) members as bits.

    >>> unpacked(packed(np.array([True, False, True])), 3).tolist()
    [True, False, True]
    """
    return np.packbits(members).tobytes()


def unpacked(members: bytes, nodes: int) -> Mask:
    """Return (nodes,) the members given to `packed`; nodes beyond the bits are not members."""
    bits = np.frombuffer(members.ljust(-(-nodes // 8), b"\0"), np.uint8)
    return np.unpackbits(bits, count=nodes).astype(np.bool_)


def latest(log: Sequence[Change]) -> ChangeId:
    """Return the id of the last change of a log."""
    return log[-1].id if log else BEGINNING


def merged(mine: tuple[Change, ...], theirs: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return the log that both nodes go on with; both compute the same one.

    If one log continues the other, it is the longer one. Otherwise it is the one with more members,
    as these can serve each other; of two such logs, the one of the lower proposer.

    >>> one, two = Change(1, 0, b"", ()), Change(2, 0, b"", ())
    >>> merged((one,), (one, two)) == merged((one, two), (one,)) == (one, two)
    True
    """
    if not theirs or latest(theirs) in {change.id for change in mine}:
        return mine
    if not mine or latest(mine) in {change.id for change in theirs}:
        return theirs
    return max(mine, theirs, key=lambda log: _rank(log[-1]))


def _rank(change: Change) -> tuple[int, int, int]:
    members = int(np.unpackbits(np.frombuffer(change.members, np.uint8)).sum())
    return members, change.number, -change.proposer


def after(log: Sequence[Change], known: ChangeId) -> tuple[Change, ...] | None:
    """Return the changes after a known one, or None if that is not (any more) in the log.

    >>> after((Change(1, 0, b"", ()),), BEGINNING)
    (Change(number=1, proposer=0, members=b'', moments=()),)
    """
    ids = [change.id for change in log]
    if known in ids:
        return tuple(log[ids.index(known) + 1 :])
    complete = known == BEGINNING and (not log or log[0].number == 1)
    return tuple(log) if complete else None


class PlanDigest(NamedTuple):
    """The inputs of a node's plan for an epoch, which must be the same on all nodes.

    Args:
        dataset, seed: the epoch, as in `EpochMoment`.
        known: the latest change that the plan accounts for.
        digest: of the holder of each object when the epoch began; 0: no object had one.
    """

    dataset: str
    seed: int
    known: ChangeId
    digest: int


def differing(
    mine: Sequence[PlanDigest], theirs: Sequence[PlanDigest], *, authority: bool
) -> list[PlanDigest]:
    """Return my plans that must give way to theirs.

    The plans of the authority count, unless it holds nothing.

    >>> one, none = PlanDigest("d", 1, BEGINNING, 77), PlanDigest("d", 1, BEGINNING, 0)
    >>> differing([one], [none], authority=True), differing([none], [one], authority=False)
    ([], [PlanDigest(dataset='d', seed=1, known=ChangeId(number=0, proposer=0), digest=0)])
    """
    right = {plan[:3]: plan.digest for plan in theirs if plan.digest}
    return [
        plan
        for plan in mine
        if right.get(plan[:3], plan.digest) != plan.digest and (authority or not plan.digest)
    ]


def authority(log: Sequence[Change]) -> int:
    """Return the node whose plan counts if plans differ: the one that wrote the last change."""
    return latest(log).proposer
