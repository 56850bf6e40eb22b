"""Membership of a cluster: notes heartbeats, judges silence, proposes changes. Pure.

A node that is silent for `SilenceLimits.suspect_s` is *suspected*: nodes ask it for nothing. A node
that is silent for `lost_s` is *lost*: the lowest reachable member proposes that plans exclude it.
When the lost node is heard again, the same member proposes to include it again. A restarted daemon
holds nothing, so it is first excluded and then included again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from creel.policies.arrays import Mask
from creel.policies.cluster.members import (
    MAX_CHANGES,
    Change,
    EpochMoment,
    latest,
    merged,
    packed,
    unpacked,
)


class SilenceLimits(NamedTuple):
    """Interval of heartbeats, and the silence after which a node is suspected and lost, in s.

    While a node is suspected, its objects are read from the source. Once it is lost, they are
    planned anew and all read again, which a short network failure does not justify.
    """

    beat_s: float
    suspect_s: float
    lost_s: float

    @classmethod
    def among(cls, nodes: int, lost_s: float) -> SilenceLimits:
        """Limits for `nodes` nodes: a node asks, and answers, at most 128 times a second.

        >>> SilenceLimits.among(4, 30.0).beat_s, SilenceLimits.among(256, 30.0).beat_s
        (0.5, 2.0)
        """
        beat_s = 0.5 * max(nodes / 64, 1.0)
        return cls(beat_s, 4 * beat_s, max(lost_s, 6 * beat_s))


class Members:
    """This node's knowledge of the other nodes of a cluster.

    Args:
        me: this node's number.
        nodes: number of nodes.
        now: seconds (monotonic), here and below; at first all nodes count as heard.
    """

    def __init__(self, me: int, nodes: int, now: float, limits: SilenceLimits) -> None:
        self.limits = limits
        self.log: tuple[Change, ...] = ()
        self._me = me
        self._began = now
        self._heard = np.full(nodes, now)
        self._anew = np.zeros(nodes, np.bool_)  # restarted, and not excluded by a change since

    def heard(self, node: int, now: float) -> None:
        """Note that a node has answered."""
        self._heard[node] = now

    def refused(self, node: int, now: float) -> None:
        """Suspect a node at once, because nobody listens at its address."""
        self._heard[node] = min(self._heard[node], now - self.limits.suspect_s)

    def restarted(self, node: int, now: float) -> None:
        """Note that another daemon has taken a node's place."""
        self._heard[node] = now
        self._anew[node] = True

    def reachable(self, now: float) -> Mask:
        """Return (nodes,) whether each node was heard recently; True for this node."""
        found: Mask = now - self._heard < self.limits.suspect_s
        found[self._me] = True
        return found

    def members(self) -> Mask:
        """Return (nodes,) whether plans include each node."""
        nodes = len(self._heard)
        return unpacked(self.log[-1].members, nodes) if self.log else np.ones(nodes, np.bool_)

    def learn(self, log: tuple[Change, ...]) -> bool:
        """Merge another node's log of changes; return whether it contained news."""
        before, self.log = self.log, merged(self.log, log)
        self._noted()
        return self.log is not before

    def due(self, now: float) -> Mask | None:
        """Return (nodes,) the members to propose; None if unchanged, or another node proposes."""
        wanted = now - self._heard < self.limits.lost_s
        wanted[self._me] = True
        wanted &= ~self._anew
        members = self.members()
        # A new node knows nobody's log before it has heard from every reachable node.
        if (wanted == members).all() or now - self._began < self.limits.suspect_s:
            return None
        there = self.reachable(now) & ~self._anew
        first = np.flatnonzero(there & members) if (there & members).any() else there.nonzero()[0]
        return wanted if int(first[0]) == self._me else None

    def change(self, members: Mask, moments: tuple[EpochMoment, ...]) -> Change:
        """Log that plans include these members from these moments on; return the change."""
        change = Change(latest(self.log).number + 1, self._me, packed(members), moments)
        self.log = (*self.log, change)[-MAX_CHANGES:]
        self._noted()
        return change

    def _noted(self) -> None:
        self._anew &= self.members()
