"""Which nodes of a cluster are silent. Pure.

A node that is silent for `SilenceLimits.suspect_s`, or where no process listens, is asked for
nothing until it answers again. One that asks this node meanwhile is alive, and may lack processors:
its answer is awaited for longer. That is all: which nodes a cluster has, and what each of them is
to hold, does not change as long as the cluster lasts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from creel.policies.arrays import Mask

#: A node that asks may be silent for so many times `SilenceLimits.suspect_s`.
_PATIENCE = 4


class SilenceLimits(NamedTuple):
    """Interval of heartbeats, and the silence after which a node is not asked, in s."""

    beat_s: float
    suspect_s: float

    @classmethod
    def of_nodes(cls, nodes: int) -> SilenceLimits:
        """Limits for `nodes` nodes: a node asks, and answers, at most 128 times a second.

        >>> SilenceLimits.of_nodes(4), SilenceLimits.of_nodes(256).beat_s
        (SilenceLimits(beat_s=0.5, suspect_s=1.5), 2.0)
        """
        beat_s = 0.5 * max(nodes / 64, 1.0)
        return cls(beat_s, 3 * beat_s)


class Silence:
    """When this node has last heard from each node of a cluster.

    Args:
        me: this node's number.
        nodes: number of nodes.
        now: seconds (monotonic), here and below; at first all nodes count as heard.
    """

    def __init__(self, me: int, nodes: int, now: float, limits: SilenceLimits) -> None:
        self.limits = limits
        self._me = me
        self._heard = np.full(nodes, now)
        self._asked = np.full(nodes, -np.inf)  # when each node has last asked this one

    def heard(self, node: int, now: float) -> None:
        """Note that a node has answered."""
        self._heard[node] = now

    def was_asked(self, node: int, now: float) -> None:
        """Note that a node has asked this one: that does not show that it can be reached."""
        self._asked[node] = now

    def refused(self, node: int, now: float) -> None:
        """Note that nobody listens at a node's address: it counts as silent at once."""
        self._heard[node] = min(self._heard[node], now - self.limits.suspect_s)
        self._asked[node] = -np.inf

    def slept(self, seconds: float) -> None:
        """Note that this daemon itself did not run for so long: it could hear nobody."""
        self._heard += seconds
        self._asked += seconds

    def reachable(self, now: float) -> Mask:
        """Return (nodes,) whether each node was heard recently; True for this node."""
        silent_s, limit_s = now - self._heard, self.limits.suspect_s
        reachable: Mask = silent_s < limit_s
        reachable |= (silent_s < _PATIENCE * limit_s) & (now - self._asked < limit_s)
        reachable[self._me] = True
        return reachable
