"""Which nodes of a cluster are there: heartbeats noted, silence judged, changes proposed. Pure.

A node that is silent for `SilenceLimits.suspect_s` is *suspected*: nothing is asked of it. Silent
for `lost_s`, it is *lost*: the lowest node that is a member and there proposes that plans no longer
count on it. The same node proposes that they do again, once the lost one is heard of. A daemon
that was restarted holds nothing; it is lost first, and then there again.
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
    """How often nodes ask each other, and after what silence a node is suspected and lost, in s.

    While a node is suspected, what it holds is read from the source; once it is lost, that is
    planned anew, and all of it read again. A short cut of the network is not worth that.
    """

    beat_s: float
    suspect_s: float
    lost_s: float

    @classmethod
    def among(cls, nodes: int, lost_s: float) -> SilenceLimits:
        """For a cluster of `nodes` nodes: a node asks and answers at most 128 times a second.

        >>> SilenceLimits.among(4, 30.0).beat_s, SilenceLimits.among(256, 30.0).beat_s
        (0.5, 2.0)
        """
        beat_s = 0.5 * max(nodes / 64, 1.0)
        return cls(beat_s, 4 * beat_s, max(lost_s, 6 * beat_s))


class Members:
    """What this node knows of the others of a cluster.

    Args:
        me: this node's number; nodes: how many there are.
        now: seconds (monotonic), here and below; at first all nodes count as heard of.
    """

    def __init__(self, me: int, nodes: int, now: float, limits: SilenceLimits) -> None:
        self.limits = limits
        self.log: tuple[Change, ...] = ()
        self._me = me
        self._began = now
        self._heard = np.full(nodes, now)
        self._anew = np.zeros(nodes, np.bool_)  # restarted, and no change has left it out since

    def heard(self, node: int, now: float) -> None:
        """A node has answered."""
        self._heard[node] = now

    def refused(self, node: int, now: float) -> None:
        """Nobody listens where a node was: it is suspected at once."""
        self._heard[node] = min(self._heard[node], now - self.limits.suspect_s)

    def restarted(self, node: int, now: float) -> None:
        """Another daemon has taken a node's place."""
        self._heard[node] = now
        self._anew[node] = True

    def reachable(self, now: float) -> Mask:
        """(nodes,) whom to ask for objects: who was heard of lately, and this node."""
        found: Mask = now - self._heard < self.limits.suspect_s
        found[self._me] = True
        return found

    def members(self) -> Mask:
        """(nodes,) whom plans count on."""
        nodes = len(self._heard)
        return unpacked(self.log[-1].members, nodes) if self.log else np.ones(nodes, np.bool_)

    def learn(self, log: tuple[Change, ...]) -> bool:
        """Take over what another node knows of changes; return whether anything is new."""
        before, self.log = self.log, merged(self.log, log)
        self._noted()
        return self.log is not before

    def due(self, now: float) -> Mask | None:
        """(nodes,) whom plans should count on; None: on whom they do, or others say so."""
        wanted = now - self._heard < self.limits.lost_s
        wanted[self._me] = True
        wanted &= ~self._anew
        members = self.members()
        # Whoever is new here knows nobody's log before it has heard of everyone who is there.
        if (wanted == members).all() or now - self._began < self.limits.suspect_s:
            return None
        there = self.reachable(now) & ~self._anew
        first = np.flatnonzero(there & members) if (there & members).any() else there.nonzero()[0]
        return wanted if int(first[0]) == self._me else None

    def change(self, members: Mask, moments: tuple[EpochMoment, ...]) -> Change:
        """Write that plans count on these members from these moments on."""
        change = Change(latest(self.log).number + 1, self._me, packed(members), moments)
        self.log = (*self.log, change)[-MAX_CHANGES:]
        self._noted()
        return change

    def _noted(self) -> None:
        self._anew &= self.members()
