"""Which nodes of a cluster plans count on, and since when: the log that its nodes agree on. Pure.

A node that is gone is not asked any more as soon as one notices (`daemon/core/cluster/`); what each
node keeps must change on all of them alike. So one node, the lowest, writes a *change*: who is a
member now, and the moment of each dataset's epoch from which plans count on them. It spreads
with the heartbeats. Two logs of nodes that did not hear of each other are resolved by rule, not by
vote: a plan made from the one that lost costs source reads, never a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from creel.policies.arrays import Mask

#: Changes that are kept and sent: who has missed more takes a plan from another node.
MAX_CHANGES = 8


class ChangeId(NamedTuple):
    """The name of a change: changes of two parts of a cluster may have one number."""

    number: int
    proposer: int


#: Before the first change all nodes are members.
BEGINNING = ChangeId(0, 0)


class EpochMoment(NamedTuple):
    """A moment in an epoch of a dataset.

    Args:
        dataset: its key.
        seed: of the epoch's order, which is what nodes know an epoch by.
        clock: how much of it was read, in 65,536ths.
    """

    dataset: str
    seed: int
    clock: int


class Change(NamedTuple):
    """From these moments on, plans count on these members.

    Args:
        members: a bit for each node, as `packed` gives them.
        moments: one for each dataset that the proposer reads.
    """

    number: int
    proposer: int
    members: bytes
    moments: tuple[EpochMoment, ...]

    @property
    def id(self) -> ChangeId:
        """Its name."""
        return ChangeId(self.number, self.proposer)

    def moment(self, dataset: str) -> EpochMoment | None:
        """From when on it counts for a dataset; None: its proposer did not read that."""
        return next((m for m in self.moments if m.dataset == dataset), None)


def packed(members: Mask) -> bytes:
    """(nodes,) members as bits.

    >>> unpacked(packed(np.array([True, False, True])), 3).tolist()
    [True, False, True]
    """
    return np.packbits(members).tobytes()


def unpacked(members: bytes, nodes: int) -> Mask:
    """(nodes,) what `packed` was given; nodes beyond the bits are no members."""
    bits = np.frombuffer(members.ljust(-(-nodes // 8), b"\0"), np.uint8)
    return np.unpackbits(bits, count=nodes).astype(np.bool_)


def latest(log: Sequence[Change]) -> ChangeId:
    """The name of the last change of a log."""
    return log[-1].id if log else BEGINNING


def merged(mine: tuple[Change, ...], theirs: tuple[Change, ...]) -> tuple[Change, ...]:
    """The log that both nodes go on with; either computes the same one.

    The longer one, where one continues the other. Else the one with more members, as the others can
    serve each other: then the one of the lower proposer.

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
    """The changes that follow on a known one; None: it is not, or no longer, in the log.

    >>> after((Change(1, 0, b"", ()),), BEGINNING)
    (Change(number=1, proposer=0, members=b'', moments=()),)
    """
    ids = [change.id for change in log]
    if known in ids:
        return tuple(log[ids.index(known) + 1 :])
    complete = known == BEGINNING and (not log or log[0].number == 1)
    return tuple(log) if complete else None


class PlanDigest(NamedTuple):
    """The inputs of a node's plan for an epoch: those of all nodes must be the same.

    Args:
        dataset, seed: the epoch, as in `EpochMoment`.
        known: the latest change that its plan accounts for.
        digest: of who held each object when the epoch began; 0: nobody anything.
    """

    dataset: str
    seed: int
    known: ChangeId
    digest: int


def differing(
    mine: Sequence[PlanDigest], theirs: Sequence[PlanDigest], *, authority: bool
) -> list[PlanDigest]:
    """My plans that are to give way to theirs.

    Those of the authority are right, but for one that knows nothing.

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
    """The node whose plan the others take where they have none: who wrote the last change."""
    return latest(log).proposer
