"""Placement: which node of a cluster holds each object when an epoch ends. Pure.

All nodes compute the same plan from what all of them know (law L5), so that no metadata crosses the
network: a node that needs an object asks its holder. A plan is one array, object -> node or nobody.

What moves. While an epoch runs, an object stays at its holder until it is read. Its reader then has
its bytes, so it may stay at either place without another transfer: it stays at the one that reads
it again sooner (`_Sites.best`). Where more would stay than fits, objects go to their other place,
then to any node with room (`_level`), which gets them when they are asked for. What still does not
fit has no holder, and the next epoch reads it from the source. Of equals those stay that keep the
next epoch's reads of the source even over its steps (`select`; law L2), and its first steps come
before all others: the lead, which is read ahead.

If the memories hold more than one copy, both nodes keep the objects that they soon read again, one
of them as a second copy. The first copy is then better at the node that reads it later: when the
other one has read it and gives it up, it is still there. Otherwise it would lie where no reader
needs it.

What may never happen.
* An object that this epoch is yet to read leaves its holder (law L1). A plan only says what becomes
  of objects after they were read.
* Objects on a node take more than its capacity when the epoch ends, or .7 % more while it runs
  (tests/sim/test_laws_of_placement.py): `_Sites.flow` counts what leaves and comes along the epoch,
  and the rates at which `select` lets objects stay follow from that.
* There are two first copies, or the last copy yields to a second one (law L3).
* The result depends on what only one node knows: its clock, its residents, whom it reaches. Inputs
  are the holders before, the orders and sizes, and the capacities; ties are broken by numbers, not
  by chance. The one exception is `replicas`: second copies are a node's own affair, and no other
  node counts on them.

Who writes. Nothing here changes its inputs. `ClusterBoundary.plan` calls it in the daemon's
background thread, for two boundaries ahead; `ClusterEviction` alone takes the result, in the loop's
thread, and chains it: this epoch's result is the next one's `holder`. So an error stays until nodes
compare their plans (`shared_plan`); it costs reads of the source, never a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ids, Index, Ints, Mask
from creel.policies.eviction.sampling import (
    LEAD,
    PIECE,
    Candidates,
    Nodes,
    Piece,
    Tally,
    coprime,
    in_order,
    select,
)

#: Parts of an epoch in which `Uses.when` counts.
EPOCH = 1 << 16
#: Largest part of the memory that the lead takes.
_MAX_LEAD_OF_MEMORY = 0.5
#: The lead, which is read ahead and so kept first: share of an epoch, least number of steps, and
#: largest share.
_LEAD, _LEAD_STEPS, _MAX_LEAD = 0.01, 8, 0.1
#: Most later epochs to look at: while a plan is made, each takes a byte per object.
_MAX_DEPTH = 8
#: Attempts to distribute one priority's surplus over the nodes that have room.
_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Uses:
    """Which node reads each object in an epoch that reads each object once.

    Args:
        owner: (n,) uint8 or uint16, node that reads each object, or `nobody(owner)`.
        when: (n,) uint16, after what part of the epoch, in 65,536ths; 0 if no node does.
    """

    owner: Nodes
    when: NDArray[np.uint16]


def node_type(nodes: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Return the smallest type for node numbers and `nobody`: uint8 up to 255 nodes, else uint16.

    Raises:
        ValueError: there are more than 65,535 nodes.
    """
    if nodes >= EPOCH:
        raise ValueError(f"{nodes} nodes: at most {EPOCH - 1}")
    return np.dtype(np.uint8) if nodes < 256 else np.dtype(np.uint16)


def nobody(nodes: Nodes) -> int:
    """Return the number that stands for no node in an array of the type of `nodes`."""
    return int(np.iinfo(nodes.dtype).max)


def uses_of(
    orders: Sequence[Ids], node_of: Sequence[int], batch: int, *, objects: int, nodes: int
) -> Uses:
    """Return which node reads what, from the reads of each rank.

    If two ranks read the same object (padding), the last one counts.

    Args:
        orders: for each rank, the objects that it reads, in order.
        node_of: the node of each rank.
        batch: objects that a rank reads per step.

    >>> uses = uses_of([np.array([2, 0])], [0], 1, objects=3, nodes=1)
    >>> uses.owner.tolist(), uses.when.tolist()
    ([0, 255, 0], [32768, 0, 0])
    """
    dtype = node_type(nodes)
    owner = np.full(objects, np.iinfo(dtype).max, dtype)
    when = np.zeros(objects, np.uint16)
    steps = max(-(-max(map(len, orders), default=0) // batch), 1)
    for ids, node in zip(orders, node_of, strict=True):
        owner[ids] = node
        when[ids] = np.arange(len(ids)) // batch * EPOCH // steps
    return Uses(owner, when)


def next_holders(
    holder: Nodes,
    now: Uses,
    owners: Sequence[Nodes],
    orders: Sequence[Ids],
    size: Ints,
    capacity: Ints,
    *,
    lead: float,
) -> Nodes:
    """Return (n,) holder of each object when this epoch ends, or `nobody(holder)`.

    The next epoch reads objects without a holder from the source.

    Args:
        holder: (n,) node that holds each object when this epoch begins.
        now: which node reads what in this epoch.
        owners: for each of the next d >= 1 epochs, (n,) node that reads each object in it. Local
            hits grow with d up to `useful_depth`.
        orders: for each rank, the objects that it reads in the next epoch, in order.
        size: (n,) bytes of each object, or (1,) if all are equal.
        capacity: (nodes,) bytes.
        lead: share of an epoch that is read ahead; the same share of the next one is kept first.

    >>> uses = uses_of([np.array([0, 1]), np.array([2, 3])], [0, 1], 1, objects=4, nodes=2)
    >>> swapped = uses_of([np.array([3, 0]), np.array([1, 2])], [0, 1], 1, objects=4, nodes=2)
    >>> nowhere = np.full(4, 255, np.uint8)
    >>> last = [np.array([3, 0], np.int32), np.array([1, 2], np.int32)]
    >>> size, room = np.array([1]), np.array([1, 1])
    >>> next_holders(nowhere, uses, [swapped.owner], last, size, room, lead=0.5)
    array([255,   0, 255,   1], dtype=uint8)
    """
    nodes, depth, n = len(capacity), len(owners), len(holder)
    capacity = np.asarray(capacity, np.int64)
    site = _Sites(holder, now, owners, size)
    copies = int(capacity.sum()) / max(dataset_nbytes(size, n), 1)
    where, priority = site.best(min(copied_gap(int(np.count_nonzero(capacity)), copies), depth))
    _level(where, priority, site, capacity)
    whole = int(size[0]) if len(size) == 1 else 0
    tally = Tally(-(-n // max(nodes, 1)), nodes=nodes, priorities=depth + 3, whole=whole)
    lead = min(lead, _MAX_LEAD_OF_MEMORY * int(capacity.sum()) / max(dataset_nbytes(size, n), 1))
    for ids in _pieces(n):
        site.flow(ids, tally)
    parts = []
    for piece in in_order([[ids] for ids in orders], n, lead):
        part = _sort_in(piece, where, priority, site, tally)
        if len(part.ids):
            parts.append(part)
    out = np.full_like(holder, nobody(holder))
    select(parts, tally, capacity, lead, site.nbytes, out)
    return out


def replicas(
    node: int,
    held: Mask,
    holder: Nodes,
    planned: Nodes,
    now: Uses,
    owners: Sequence[Nodes],
    size: Ints,
    capacity: int,
) -> Mask:
    """Return (n,) whether this node keeps a second copy of each object when this epoch ends.

    Each node plans its own copies: in room that the common plan leaves free, it keeps objects that
    it has read or held, those that it reads soonest first. No other node needs to know, and a last
    copy never leaves for a second one (law L3).

    Args:
        held: (n,) whether it holds a second copy of each object now.
        planned: the result of `next_holders`.
        holder, now, owners, size: as in `next_holders`.
        capacity: bytes of this node.
    """
    here = np.flatnonzero(planned == node).astype(np.int32)
    room = capacity - _nbytes(here, size).sum()
    could = (
        (held | (holder == node) | (now.owner == node))
        & (planned != node)
        & (planned != nobody(planned))
    )
    ids = soonest_first(node, _scattered(np.flatnonzero(could).astype(np.int32)), owners)
    out = np.zeros(len(planned), np.bool_)
    out[ids[_nbytes(ids, size).cumsum() <= room]] = True
    return out


def soonest_first(node: int, ids: Ids, owners: Sequence[Nodes]) -> Ids:
    """Return (k,) `ids`, sorted by the first of these epochs in which `node` reads each.

    >>> owners = [np.array([0, 1, 0], np.uint8), np.array([1, 0, 1], np.uint8)]
    >>> soonest_first(1, np.array([0, 1, 2], np.int32), owners).tolist()
    [1, 0, 2]
    """
    gap = np.full(len(ids), len(owners) + 1, np.uint8)
    for g in range(len(owners), 0, -1):
        gap[owners[g - 1][ids] == node] = g
    return ids[gap.argsort(kind="stable")]


def dataset_nbytes(size: Ints, n: int) -> int:
    """Return the bytes of n objects; `size`: (n,) bytes of each, or (1,) if all are equal."""
    return int(size[0]) * n if len(size) == 1 else int(size.sum())


def useful_depth(nodes: int, capacity: float) -> int:
    """Return how many epochs to look ahead: more hardly help. `capacity` in datasets.

    Each epoch reads an object on a random node. To keep all objects that it reads again within T
    epochs (T much less than `nodes`), a node needs (1 + ... + T) / nodes, about T^2 / (2 * nodes),
    of what it reads in an epoch. That fills its memory at T = sqrt(2 * capacity * nodes).

    >>> useful_depth(8, 1.0), useful_depth(8, 2.0), useful_depth(1, 0.5), useful_depth(99, 1.0)
    (5, 7, 1, 8)
    """
    within = math.ceil(math.sqrt(2 * capacity * nodes)) + 1
    return max(1, min(within, 2 * nodes - 1, _MAX_DEPTH))


def copied_gap(nodes: int, capacity: float) -> int:
    """Return within how many epochs a node has room to keep all that it reads again.

    A node reads an object again after g epochs with probability p (1 - p)^(g - 1), p = 1 / nodes.
    To keep all objects that come back within G epochs, all nodes together need, in datasets, the
    sum of g p (1 - p)^(g - 1) over g <= G, and room for one copy of each object that no node keeps
    in this way.

    Args:
        capacity: of all nodes, in datasets.

    >>> [copied_gap(8, capacity) for capacity in (0.5, 1.0, 1.05, 1.25, 2.0)]
    [0, 0, 2, 3, 6]
    """
    kept, again = 0.0, 1 / max(nodes, 1)
    for gap in range(1, _MAX_DEPTH + 1):
        kept += gap * again
        again *= 1 - 1 / nodes
        if kept + math.prod([1 - kept / nodes] * nodes) > capacity:
            return gap - 1
    return _MAX_DEPTH


def lead_of(steps: int) -> float:
    """Return the share of an epoch of `steps` steps that is kept first.

    >>> lead_of(10_000), lead_of(200), lead_of(10)
    (0.01, 0.04, 0.1)
    """
    return min(max(_LEAD, _LEAD_STEPS / steps), _MAX_LEAD)


def _nbytes(ids: Ids, size: Ints) -> Ints:
    return np.full(len(ids), size[0]) if len(size) == 1 else size[ids]


class _Sites:
    """Nodes that hold each object, and nodes that read it."""

    def __init__(self, holder: Nodes, now: Uses, owners: Sequence[Nodes], size: Ints) -> None:
        self.holder, self.now, self.owners = holder, now, owners
        self.size = size
        self.nobody = nobody(holder)

    def nbytes(self, ids: Ids) -> Ints:
        """Return (k,) bytes of objects."""
        return _nbytes(ids, self.size)

    def read(self, ids: Ids | slice) -> Mask:
        """Return (k,) whether this epoch reads each object."""
        read: Mask = self.now.owner[ids] != self.nobody
        return read

    def best(self, copied: int) -> tuple[Nodes, NDArray[np.uint8]]:
        """Return (n,) node where each object should stay, or nobody; (n,) epochs until it reads it.

        The node is this epoch's reader of the object or its old holder: the one that reads it again
        sooner; if both do so within `copied` epochs, the later one.
        """
        depth = len(self.owners)
        where = np.empty_like(self.holder)
        priority = np.empty(len(where), np.uint8)
        for ids in _pieces(len(where)):
            consumer, holder = self.now.owner[ids].copy(), self.holder[ids]
            unread = ~self.read(ids)
            consumer[unread] = holder[unread]
            mine = np.full(len(consumer), depth + 1, np.uint8)
            theirs = mine.copy()
            for gap in range(depth, 0, -1):
                owner = self.owners[gap - 1][ids]
                mine[owner == consumer] = gap
                theirs[owner == holder] = gap
            rank = [np.where(gap <= copied, copied - gap, gap) for gap in (theirs, mine)]
            stays = (rank[0] < rank[1]) & (holder != self.nobody)
            where[ids] = np.where(stays, holder, consumer)
            priority[ids] = np.where(stays, theirs, mine)
        return where, priority

    def flow(self, ids: slice, tally: Tally) -> None:
        """Count bytes that leave nodes along this epoch, and that they fetch for their ranks."""
        here = np.arange(ids.start, ids.stop, dtype=np.int32)
        here = here[self.read(here)]
        stretch = self.stretch(here, tally)
        nbytes = self.nbytes(here)
        holder, owner = self.holder[here], self.now.owner[here]
        held, missing = holder != self.nobody, holder != owner
        tally.leave(holder[held].astype(np.int64) * tally.width + stretch[held], nbytes[held])
        at = owner[missing].astype(np.int64) * tally.width + stretch[missing]
        tally.miss(at, nbytes[missing])

    def stretch(self, ids: Ids, tally: Tally) -> Ints:
        """Return (k,) the stretch of this epoch that reads each object."""
        return 1 + self.now.when[ids].astype(np.int64) * tally.stretches // EPOCH


def _pieces(n: int) -> Iterator[slice]:
    for start in range(0, n, PIECE):
        yield slice(start, min(start + PIECE, n))


def _sort_in(
    piece: Piece, where: Nodes, priority: NDArray[np.uint8], site: _Sites, tally: Tally
) -> Candidates:
    """Count all objects that could stay in `tally`; return them with their cells."""
    could = np.flatnonzero(where[piece.ids] != site.nobody)
    ids, early = piece.ids[could], piece.early[could]
    priorities: Ints | int = tally.priorities - 1
    if piece.read:
        priorities = np.where(early, LEAD, priority[ids]).astype(np.int64)
    stretch = np.where(site.read(ids), site.stretch(ids, tally), 0)
    cell = (where[ids].astype(np.int64) * tally.priorities + priorities) * tally.width + stretch
    tally.add(cell, site.nbytes(ids))
    return Candidates(ids, cell.astype(np.int32), piece.block[could], piece.read)


# --- nodes with more than fits, and nodes with room ----------------------------------------------


def _level(where: Nodes, priority: NDArray[np.uint8], site: _Sites, capacity: Ints) -> None:
    """Move objects that do not fit on one node to nodes that have room, as far as possible.

    At first objects move from their readers to their old holders, or the other way, which costs no
    transfer; then to any node. Of each node's objects, those that it reads latest move first.
    """
    demand = np.zeros(len(capacity), np.int64)
    for piece in _pieces(len(where)):
        some = piece.start + np.flatnonzero(where[piece] != site.nobody).astype(np.int32)
        np.add.at(demand, where[some], site.nbytes(some))
    surplus, room = np.maximum(demand - capacity, 0), np.maximum(capacity - demand, 0)
    if not surplus.any() or not room.any():
        return
    crowded = np.append(surplus > 0, np.zeros(site.nobody + 1 - len(surplus), np.bool_))
    for move in (_to_the_other, _to_any):
        for latest in range(len(site.owners) + 1, 0, -1):
            if not surplus.any() or not room.any():
                return
            ids = _scattered(np.flatnonzero((priority == latest) & crowded[where]).astype(np.int32))
            move(ids[site.read(ids)], where, site, surplus, room)


def _scattered(ids: Ids) -> Ids:
    return ids[np.arange(len(ids)) * coprime(len(ids)) % len(ids)] if len(ids) else ids


def _to_the_other(ids: Ids, where: Nodes, site: _Sites, surplus: Ints, room: Ints) -> None:
    """Move objects to their other place while `surplus` and `room` last; update all three."""
    nodes = len(surplus)
    for _ in range(_ROUNDS):
        place, owner, holder = where[ids], site.now.owner[ids], site.holder[ids]
        other = np.where(place == owner, holder, owner)
        could = other != site.nobody
        ids, place, other = ids[could], place[could].astype(np.int64), other[could]
        could = (surplus[place] > 0) & (room[other] > 0)
        ids, place, other = ids[could], place[could], other[could].astype(np.int64)
        if not len(ids):
            return
        way, nbytes = place * nodes + other, site.nbytes(ids)
        ways, index = np.unique(way, return_inverse=True)
        offered = np.zeros(len(ways), np.int64)
        np.add.at(offered, index, nbytes)
        start, end = np.divmod(ways, nodes)
        quota = _scaled(_scaled(offered, start, surplus), end, room)
        moves = _first_bytes(index, nbytes, quota)
        where[ids[moves]] = other[moves]
        np.add.at(surplus, place[moves], -nbytes[moves])
        np.add.at(room, other[moves], -nbytes[moves])


def _scaled(nbytes: Ints, node: Ints, limit: Ints) -> Ints:
    """Return `nbytes`, scaled down so that the sum for each node is at most its limit."""
    total = np.zeros(len(limit), np.int64)
    np.add.at(total, node, nbytes)
    factor = np.minimum(limit / np.maximum(total, 1), 1.0)
    return np.floor(nbytes * factor[node]).astype(np.int64)


def _to_any(ids: Ids, where: Nodes, site: _Sites, surplus: Ints, room: Ints) -> None:
    """Move objects to nodes with room while `surplus` and `room` last; update all three.

    Each of these nodes gets objects from all parts of the list.
    """
    place = where[ids].astype(np.int64)
    moves = _first_bytes(place, site.nbytes(ids), surplus)
    ids = _scattered(ids[moves])
    ends = room.cumsum()
    nbytes = site.nbytes(ids)
    node = np.searchsorted(ends, nbytes.cumsum(), side="left")
    fits = node < len(room)
    ids, node, nbytes = ids[fits], node[fits], nbytes[fits]
    np.add.at(surplus, where[ids], -nbytes)
    np.add.at(room, node, -nbytes)
    np.maximum(room, 0, out=room)
    where[ids] = node


def _first_bytes(group: NDArray[np.integer], nbytes: Ints, limit: Ints) -> Index:
    """Return the indices of the first members of each group, up to `limit` bytes together."""
    order = group.argsort(kind="stable")
    total = nbytes[order].cumsum()
    group = group[order]
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
    lengths = np.diff(np.append(first, len(group)))
    total -= np.repeat((total - nbytes[order])[first], lengths)
    fits: Index = order[total <= limit[group]]
    return fits
