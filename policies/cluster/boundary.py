"""The end of an epoch of a whole job: what a node knows of it, and the plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ids, Ints, Mask, unique
from creel.policies.cluster import placement
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.members import Change, ChangeId
from creel.policies.cluster.placement import dataset_nbytes, nobody
from creel.policies.eviction.policy import RESIDENT, STORED
from creel.policies.eviction.sampling import Nodes

#: Origin of a fetch from the dataset's storage, and of this node in `ClusterView.origin`. Other
#: origins that policies give are numbers of peers.
SOURCE = -1
#: Parts of an epoch in which its holder gets an object; from `placement.EPOCH` to them.
PARTS = 256
#: Most epochs of a job of which the order is kept: loaders tell a few ahead.
_MAX_ORDERS = 64
_PART_BITS = (placement.EPOCH // PARTS).bit_length() - 1


@dataclass(frozen=True, eq=False)
class ClusterView:
    """The nodes of a job, as one of them sees them.

    Args:
        me: the number of this node among them.
        nodes: (world,) the node of each rank.
        capacity: (nodes,) bytes of memory of each.
        origin: (nodes,) origin of fetches from each node; SOURCE: this node, or a lost one.
        disk: (nodes, 2) bytes of disk of each, and the unit in which it gives them.
        cluster: its name.
        names: (nodes,) names of the nodes; a node has the same name in all its clusters.
        log: the latest changes of its members.
        by_hash: datasets that some node also reads for a job on other nodes: their objects' homes
            (`homes`) say what lies where, no plan for this cluster alone.
    """

    me: int
    nodes: Ints
    capacity: Ints
    origin: Ints
    disk: Ints
    cluster: str
    names: tuple[str, ...]
    log: tuple[Change, ...] = ()
    by_hash: frozenset[str] = frozenset()

    def like(self, other: ClusterView | None) -> bool:
        """Whether these are the same nodes, with the same memory and disk."""
        if other is None or self.me != other.me:
            return False
        columns = (
            (self.nodes, other.nodes),
            (self.capacity, other.capacity),
            (self.disk, other.disk),
        )
        return all(np.array_equal(mine, its) for mine, its in columns)


@dataclass(eq=False)
class Deals:
    """What a node knows of its job: the other nodes, and how epochs are dealt to the ranks.

    `followed`: how they are dealt is not known to all nodes.
    """

    view: ClusterView | None = None
    followed: bool = False
    orders: dict[int, JobOrder] = field(default_factory=dict)
    dataset: str = ""

    def add(self, epoch: int, order: JobOrder) -> None:
        """Note how an epoch is dealt, unless orders of many others are kept."""
        if len(self.orders) < _MAX_ORDERS or epoch in self.orders:
            self.orders[epoch] = order

    def forget(self, epoch: int) -> None:
        """Forget all epochs before this one."""
        self.orders = {e: order for e, order in self.orders.items() if e >= epoch}

    def known(self, epoch: int) -> bool:
        """Whether an epoch and the one after it are known."""
        return self.view is not None and {epoch, epoch + 1} <= set(self.orders)

    def from_epoch(self, epoch: int, depth: int, ahead: int) -> list[JobOrder]:
        """The orders of the epoch `ahead` of `epoch`, which is `known`, and of `depth` later ones.

        What is not known yet goes on as these two do.
        """
        now, then = self.orders[epoch], self.orders[epoch + 1]
        later = (
            self.orders.get(epoch + 1 + i, then.after(now, i)) for i in range(1, depth + ahead)
        )
        return [now, then, *later][ahead:]

    def agree(self, epoch: int, orders: list[JobOrder]) -> bool:
        """Whether these are the orders from `epoch` on, as far as they are known."""
        return all(self.orders.get(epoch + i, order) == order for i, order in enumerate(orders[:2]))


class Placed(NamedTuple):
    """What a `ClusterBoundary` gives.

    Args:
        holder: (n,) node that holds each object when the epoch ends; `placement.nobody`: none.
        me: the number of this node.
        coming: what this node reads in the next epoch and its holder, a peer, has yet to get;
            ascending.
        when: after what part of this epoch, in 256ths, the holder gets each of these.
        lent: what this node is to hold and a peer reads in the next epoch.
        copies: what this node, which is not the holder, is to have as well, the soonest to be read
            first.
        surplus: what this node holds in vain.
        unread: what it holds and no member reads in this epoch.
    """

    holder: Nodes
    me: int
    coming: Ids
    when: NDArray[np.uint8]
    lent: Ids
    copies: Ids
    surplus: list[Ids]
    unread: Ids

    def part(self, ids: NDArray[np.integer]) -> Ints:
        """(k,) the part of this epoch in which its holder gets each object; -1: it has it."""
        if not len(self.coming):
            return np.full(len(ids), -1)
        at = np.minimum(self.coming.searchsorted(ids), len(self.coming) - 1)
        return np.where(self.coming[at] == ids, self.when[at].astype(np.int64), -1)


@dataclass(frozen=True, eq=False)
class ClusterBoundary:
    """What is known about the end of an epoch of a whole job; arrays may be live views.

    Args:
        epoch: the one that ends.
        view: the nodes.
        orders: of this epoch and of later ones.
        holder: (n,) who held each object when this epoch began; None: nobody anything.
        copies: of what this node had a second copy then.
        size: (n,) bytes of each object, or (1,) where all are equal or some are unknown.
        capacity: (nodes,) bytes of memory and disk of each.
        state: (n,) states on this node; stored: (n,) those on its disk, None: it has none.
        lead: share of the next epoch that is kept first.
        members: (nodes,) whom the plan counts on, after the change `known`.
        clock: from what moment of this epoch on, in 65,536ths; before it `planned` counted.
        planned: (n,) the earlier plan; None: there is none.
        given: (n,) the plan, where a peer has made it; None: it is to be made.
    """

    epoch: int
    view: ClusterView
    orders: list[JobOrder]
    holder: Nodes | None
    copies: Ids
    size: Ints
    capacity: Ints
    state: NDArray[np.uint8]
    stored: NDArray[np.uint8] | None
    lead: float
    members: Mask
    known: ChangeId
    clock: int = 0
    planned: Nodes | None = None
    given: Nodes | None = None

    def plan(self) -> Placed:
        """Return who holds what when the epoch ends; takes a second for a million objects."""
        node_of = self.view.nodes.tolist()
        now = self._uses(self.orders[0].by_rank(node_of), self.orders[0])
        following = self.orders[1].by_rank(node_of)
        owners = [self._uses(following, self.orders[1]).owner]
        owners += [self._uses(order.by_rank(node_of), order).owner for order in self.orders[2:]]
        holder, after = self._held(now), self.given
        if after is None:
            rest = owners, following, self.size, self.capacity * self.members
            after = placement.next_holders(holder, now, *rest, lead=self.lead, clock=self.clock)
        me, here = self.view.me, self.state == RESIDENT
        copies = self._copies(holder, after, now, owners)
        vain = here & (after != me)
        vain[copies] = False
        lent = (after == me).nonzero()[0].astype(np.int32)
        lent = lent[(owners[0][lent] != me) & (owners[0][lent] != nobody(holder))]
        mine = [ids for ids, node in zip(following, node_of, strict=True) if node == me]
        coming = unique(np.concatenate([lent[:0], *mine]))
        at = after[coming]
        coming = coming[(at != me) & (at != nobody(after)) & (at != holder[coming])]
        when = (now.when[coming] >> _PART_BITS).astype(np.uint8)
        surplus = [vain.nonzero()[0].astype(np.int32)]
        if self.stored is not None:
            here |= self.stored == STORED
        unread = (here & (now.owner == nobody(now.owner))).nonzero()[0].astype(np.int32)
        return Placed(after, me, coming, when, lent, copies, surplus, unread)

    def _held(self, now: placement.Uses) -> Nodes:
        """(n,) who holds each object at `clock`: what was read already lies where it was to go."""
        holder = self.holder
        if holder is None:
            holder = np.full_like(now.owner, nobody(now.owner))
        if self.planned is not None:
            read = (now.owner == nobody(now.owner)) | (now.when < self.clock)
            held: Nodes = holder.copy()
            held[read] = self.planned[read]
            holder = held
        return without(holder, self.members)

    def _copies(self, holder: Nodes, after: Nodes, now: placement.Uses, owners: list[Nodes]) -> Ids:
        """Plan what fills what the plan for all leaves free on this node."""
        n, me = len(self.state), self.view.me
        if dataset_nbytes(self.size, n) >= int((self.capacity * self.members).sum()):
            return NO_IDS
        held = np.zeros(n, np.bool_)
        held[self.copies] = True
        room = self.size, int(self.capacity[me])
        copies = placement.replicas(me, held, holder, after, now, owners, *room)
        return placement.soonest_first(me, copies.nonzero()[0].astype(np.int32), owners)

    def _uses(self, ranks: list[Ids], order: JobOrder) -> placement.Uses:
        nodes = self.view.nodes.tolist()
        sizes = {"objects": len(self.state), "nodes": len(self.view.capacity)}
        uses = placement.uses_of(ranks, nodes, order.batch, **sizes)
        return placement.Uses(without(uses.owner, self.members), uses.when)


def without(holder: Nodes, members: Mask) -> Nodes:
    """`holder`, with nobody in place of nodes that are no members.

    >>> without(np.array([0, 1, 255], np.uint8), np.array([True, False])).tolist()
    [0, 255, 255]
    """
    if members.all():
        return holder
    gone = np.zeros(nobody(holder) + 1, np.bool_)
    gone[: len(members)] = ~members
    out = holder.copy()
    out[gone[holder]] = nobody(holder)
    return out
