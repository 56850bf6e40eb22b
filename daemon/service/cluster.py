"""One cluster that this node belongs to: its daemons, their reachability, and the core's view."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from creel.daemon.core.cluster.silence import Silence, SilenceLimits
from creel.daemon.core.events import SOURCE
from creel.messages import Join, Member
from creel.policies.arrays import Ints
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.shared_plan import PlanDigest

#: Most datasets that a beat names; it has room for about 200.
_MAX_BY_HASH = 64
#: A listed node that has not answered for so long, in seconds, is planned without memory.
GIVE_UP_S = 30.0


class Cluster:
    """A cluster; it exists as long as a client of its job is connected.

    Args:
        joined: the first client's request.
        me: this node's number.
        own: this daemon.
        origins: for each node, its number as origin of a fetch; SOURCE for this node.
        now: seconds (monotonic).
    """

    def __init__(self, joined: Join, me: int, own: Member, origins: list[int], now: float) -> None:
        #: `name`: the same on all its nodes; `key`: what proves to a peer that this is one of them.
        self.name, self.key = joined.cluster, joined.key
        self.tokens: set[str] = set()  # of the clients that joined it
        self.plans: tuple[PlanDigest, ...] = ()  # digests of the inputs of this node's plans
        self.joined = list(joined.members)
        self.joined[me] = own
        self.origins = origins
        self.me = me
        limits = SilenceLimits.of_nodes(len(origins))
        self.silence = Silence(self.me, len(origins), now, limits)
        self._began = now  # monotonic seconds
        self._ranks = joined.ranks
        self.view = ClusterView(
            self.me,
            np.array(joined.ranks, np.int64),
            self._capacity(),
            np.array(origins),
            self._disks(),
            joined.cluster,
            _names(joined.members),
            again=joined.again,
        )

    def same(self, request: Join) -> bool:
        """Return whether a request is about this cluster; its daemons may have restarted."""
        numbers = self.key, self._ranks, len(self.joined)
        return numbers == (request.key, request.ranks, len(request.members))

    def has(self, node: int) -> bool:
        """Return whether another node of the cluster has this number."""
        return 0 <= node < len(self.joined) and node != self.me

    def seen(self, now: float) -> ClusterView:
        """Update and return the view; the same object if nothing has changed."""
        origin = np.where(self.silence.reachable(now), self.origins, SOURCE)
        if (origin != self.view.origin).any():
            self.view = replace(self.view, origin=origin)
            self._resize()
        return self.view

    def lowest(self, now: float) -> int:
        """Return the lowest node that can be reached, whose plans count if plans differ."""
        return int(self.silence.reachable(now).argmax())

    def _capacity(self) -> Ints:
        return np.array([max(member.arena_nbytes, 1) for member in self.joined])

    def _disks(self) -> Ints:
        sizes = [(member.disk_nbytes, member.disk_unit) for member in self.joined]
        return np.clip(np.array(sizes, np.int64), [0, 1], [1 << 56, 1 << 20])

    def complete(self, now: float) -> bool:
        """Return whether plans know the memory of each node that comes; late ones are given up."""
        return now - self._began >= GIVE_UP_S or all(member.arena_nbytes for member in self.joined)

    def first_answer(self, node: int, member: Member) -> None:
        """Enter a node of a list that has answered for the first time."""
        listed = self.joined[node]
        where = {"node": listed.node, "host": listed.host, "port": listed.port}
        self.joined[node] = msgspec.structs.replace(member, **where)
        self._resize()

    def resized(self, node: int, disk_nbytes: int, disk_unit: int) -> bool:
        """Enter the present size of a node's disk; return whether it has changed."""
        before = self.joined[node]
        size = {"disk_nbytes": disk_nbytes, "disk_unit": disk_unit}
        self.joined[node] = msgspec.structs.replace(before, **size)
        if self.joined[node] == before:
            return False
        self._resize()
        return True

    def place_by_hash(self, datasets: frozenset[str]) -> bool:
        """Exclude these datasets from the cluster's plans; return whether that is news."""
        by_hash = self.view.by_hash | datasets
        if by_hash == self.view.by_hash or len(by_hash) > _MAX_BY_HASH:
            return False
        self.view = replace(self.view, by_hash=by_hash)
        return True

    def _resize(self) -> None:
        self.view = replace(self.view, capacity=self._capacity(), disk=self._disks())

    def replaced(self, node: int, member: Member, origin: int, now: float) -> None:
        """Enter another daemon that has taken a node's place; `origin` is its number."""
        self.joined[node], self.origins[node] = member, origin
        self.silence.heard(node, now)


def _names(members: list[Member]) -> tuple[str, ...]:
    """Return a name for each node, which a daemon that takes its place will have as well.

    >>> _names([Member("a", "h", 1, 9), Member("b", "i", 1, 9), Member("c", "h", 2, 9)])
    ('h', 'i', 'h 1')
    """
    hosts = [member.host for member in members]
    before = [hosts[:i].count(host) for i, host in enumerate(hosts)]
    return tuple(f"{h} {n}" if n else h for h, n in zip(hosts, before, strict=True))
