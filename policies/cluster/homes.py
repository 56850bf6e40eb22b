"""Homes: where the nodes of a job keep objects for each other without a common plan. Pure.

Each object has a home among the nodes, by a hash of its number. A node that needs the object asks
its home. The home reads it from the source, sends it, and keeps it while there is room. So each
object is read from the source once, in whatever order the ranks read, and no node needs to know
the order of another. Objects that are kept never leave for later ones; for a job that reads all
objects again and again no choice is better (law L1).

Jobs on one dataset may run on different sets of nodes that overlap. The hash ranks all nodes for
each object (rendezvous hashing, Thaler and Ravishankar 1998), and a node asks the first one of the
nodes of all its jobs. So a node in two jobs keeps one copy for both, and fetches objects for peers
of one job from peers of the other. The node asked always ranks above the node that asks, so no two
nodes wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Index, Ints, Mask, joined
from creel.policies.cluster.boundary import SOURCE, ClusterView
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.eviction.policy import RESIDENT, STORED
from creel.policies.eviction.recent import MostRecentFirst, ReleaseLog
from creel.policies.next_use import NEVER, NextUses

#: `step` of `victims` for a read for a peer: objects that are kept do not leave for it.
FOR_PEERS = NEVER
#: Knuth's multiplicative hash: objects of one kind may lie at regular distances.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: Objects are hashed to 2^16 buckets; all objects of a bucket have one home. Of 256 nodes each is
#: home of 256 buckets, give or take 16.
_BUCKETS, _SHIFT = 1 << 16, np.uint64(48)
#: Shifts and factors of splitmix64's output (Steele, Lea and Flood 2014).
_MIXED = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)
#: A node is home of at most this many times its share of the objects.
_UNEVEN = 1.02
#: Part (1/n) of the memory for objects read ahead, even if peers need the room.
_AHEAD_PART = 32
#: If more than this part (1/n) of the residents is neither kept nor in use, more are kept.
_LOOSE_PART = 8
#: Objects scanned at once for eviction.
_SCANNED = 1 << 14


class Homes:
    """The home of each object, as a node sees the others.

    The objects of a node that is out of reach have their homes on the other nodes meanwhile; no
    other object moves. Two nodes that reach different nodes ask each other in vain, and read the
    source.

    Args:
        views: the nodes of each job, one or more.
        first: nodes that are homes because they read objects first; None: all homes are by hash.

    Attributes:
        share: the part of all objects that this node is home of.
    """

    def __init__(self, views: Sequence[ClusterView], first: FirstReaders | None = None) -> None:
        self.first = first
        origins: dict[str, int] = {}
        self._asked = np.zeros(_BUCKETS, np.bool_)
        for view in views:
            own, named = view.names[view.me], zip(view.names, view.origin.tolist(), strict=True)
            there = {own: SOURCE} | {name: origin for name, origin in named if origin != SOURCE}
            self._asked |= _first(tuple(there)) == 0
            origins = {**there, **origins, own: SOURCE}
        self._origin = np.array(list(origins.values()), np.int64)[_first(tuple(origins))]
        self.share = float((self._origin == SOURCE).mean())

    def mine(self, ids: NDArray[np.integer]) -> Mask:
        """Return (k,) whether this node is home of each object."""
        mine: Mask = self.origins(ids) == SOURCE
        return mine

    def asked(self, ids: NDArray[np.integer]) -> Mask:
        """Return (k,) whether peers of some job ask this node for each object."""
        asked = self._asked[_bucket(ids)]
        return asked if self.first is None else self.first.asked(ids, asked)

    def relayed(self, ids: NDArray[np.integer]) -> Mask:
        """Return (k,) whether peers of one job ask here for an object at home in another."""
        return self.asked(ids) & ~self.mine(ids)

    def origins(self, ids: NDArray[np.integer]) -> Ints:
        """Return (k,) the peer to ask for each object, or SOURCE."""
        home = self._origin[_bucket(ids)]
        return home if self.first is None else self.first.origins(ids, home)

    def awaited(self, ids: Index, epoch: int, left: int) -> Mask | None:
        """Return (k,) whether to ask for each object only later, or None (`FirstReaders`)."""
        return None if self.first is None else self.first.awaited(ids, epoch, left)


def memory_of(views: Sequence[ClusterView]) -> int:
    """Return the bytes of memory of all nodes of these jobs; 0 without any."""
    sizes: dict[str, int] = {}
    for view in views:
        sizes |= dict(zip(view.names, view.capacity.tolist(), strict=True))
    return sum(sizes.values())


def _bucket(ids: NDArray[np.integer]) -> Index:
    return ((ids.astype(np.uint64) * _GOLDEN) >> _SHIFT).astype(np.intp)


@lru_cache(maxsize=4)
def _first(names: tuple[str, ...]) -> NDArray[np.int16]:
    """Return (buckets,) which of these nodes ranks first; takes 0.5 ms per node."""
    first, most = np.zeros(_BUCKETS, np.int16), np.zeros(_BUCKETS, np.uint64)
    for node, name in enumerate(names):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        rank = np.arange(_BUCKETS, dtype=np.uint64) * _GOLDEN + np.uint64(seed)
        for shift, factor in _MIXED:
            rank = (rank ^ (rank >> shift)) * factor
        higher = rank > most
        first[higher], most[higher] = node, rank[higher]
    return first


class HomesEviction(MostRecentFirst):
    """Keeps the objects that this node is home of, in memory and on disk; others leave first.

    If these are more than fit, the kept ones stay the same (law L1), and the others come and go.
    """

    name = "homes"
    short_prefetch = True
    reads_for_peers = True

    def __init__(
        self, state: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[NextUses], homes: Homes
    ) -> None:
        super().__init__(state, pins, uses)
        self.homes: Homes = homes
        self._kept = np.zeros(len(state), np.bool_)
        self._count = 0  # number of objects kept
        self._limit = len(state)  # most objects to keep: there was no room for more
        self._excess = ReleaseLog(len(state))  # at home here, but not kept; _log: at home elsewhere
        self._hand = 0

    def read_ahead_room(self, room: float) -> float:
        """Return the room beyond all objects at home here, or at least a small part of it."""
        return max(room - _UNEVEN * self.homes.share * len(self._state), room / _AHEAD_PART)

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        super().epoch_began(uses, epoch)
        self._recover()

    def relist(self) -> None:
        """Sort all residents again into objects that are kept and others."""
        here = self._state == RESIDENT
        if self.stored is not None:
            here |= self.stored == STORED
        kept = np.flatnonzero(self._kept & here)
        kept = kept[self.homes.mine(kept)]
        self._kept[:] = False
        self._kept[kept] = True
        self._count = len(kept)
        self._recover()
        logged = self._log.all()
        self._log.clear()
        self._excess.clear()
        self._enter(logged[self._leaving(logged)])
        super().relist()

    def _recover(self) -> None:
        """Keep more objects again once a shortage is over: if many residents are not kept.

        During a shortage there are few of them: keeping more in vain would cost some that are kept.
        """
        here = np.count_nonzero(self._state == RESIDENT)
        loose = int(np.count_nonzero(~self._kept[self._unpinned()]))
        if loose > here / _LOOSE_PART:
            self._limit = max(self._limit, self._count + loose)

    def _enter(self, ids: Index) -> None:
        loose = ids[~self._kept[ids]]
        mine = self.homes.mine(loose)
        self._log.add(loose[~mine])
        loose = loose[mine]
        k = max(self._limit - self._count, 0)
        self._kept[loose[:k]] = True
        self._count += len(loose[:k])
        self._excess.remove(loose[:k])
        self._excess.add(loose[k:])

    def keeps(self, ids: Index) -> Mask:
        """Return (k,) whether each object is worth a place on disk: if this node is its home."""
        return self.homes.mine(ids)

    def unneeded(self, k: int, step: int) -> Index:
        """Return up to k distinct objects that are at home elsewhere."""
        return super().victims(k, step)

    def victims(self, k: int, step: int) -> Index:
        """Return up to k distinct objects to evict; kept ones last, and never for a peer's read."""
        victims = self.unneeded(k, step)
        victims = joined([victims, self._excess.take(k - len(victims), self._leaving)])
        if len(victims) >= k or step == FOR_PEERS:
            return victims
        more = self._scan(k - len(victims))
        self._limit = self._count
        return joined([victims, more])

    def _scan(self, k: int) -> Index:
        """Stop keeping up to k objects, in order of numbers (a clock's hand); return them."""
        out = []
        for _ in range(-(-len(self._state) // _SCANNED)):
            stop = min(self._hand + _SCANNED, len(self._state))
            ids = self._hand + np.flatnonzero(self._kept[self._hand : stop])
            ids = ids[self._leaving(ids)][:k]
            self._kept[ids] = False
            out.append(ids)
            k -= len(ids)
            if k <= 0:
                break
            self._hand = stop if stop < len(self._state) else 0
        victims = joined(out)
        self._count -= len(victims)
        return victims
