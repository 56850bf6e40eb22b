"""The end of an epoch of a whole job: what a node knows about it, and the plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ids, Ints, unique
from creel.policies.cluster import placement
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.placement import dataset_nbytes, nobody
from creel.policies.eviction.policy import RESIDENT
from creel.policies.eviction.sampling import Nodes

#: Origin of a fetch from the dataset's storage; in `ClusterView.origin` this node has it. All other
#: origins that policies return are numbers of peers.
SOURCE = -1
#: Parts of an epoch in which `Placed.when` counts.
PARTS = 256
#: Most epochs of a job whose orders are kept: loaders announce a few ahead.
_MAX_ORDERS = 64
_PART_BITS = (placement.EPOCH // PARTS).bit_length() - 1


@dataclass(frozen=True, eq=False)
class ClusterView:
    """The nodes of a job, as one of them sees them.

    Args:
        me: number of this node.
        nodes: (world,) node of each rank.
        capacity: (nodes,) bytes of memory of each node.
        origin: (nodes,) origin of fetches from each node; SOURCE: this node, or one out of reach.
        disk: (nodes, 2) bytes of disk of each node, and the unit in which it allocates them.
        cluster: name of the cluster.
        names: (nodes,) names of the nodes; a node has the same name in all its clusters.
        by_hash: datasets that some node also reads for a job on other nodes; for these the homes
            (`homes`) of objects count, not a plan for this cluster alone.
        again: whether this daemon has taken the place of another one in this cluster, so that it
            does not know which node holds what.
    """

    me: int
    nodes: Ints
    capacity: Ints
    origin: Ints
    disk: Ints
    cluster: str
    names: tuple[str, ...]
    by_hash: frozenset[str] = frozenset()
    again: bool = False

    def like(self, other: ClusterView | None) -> bool:
        """Whether `other` has the same nodes, with the same memory and disk."""
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

    `followed`: not all nodes know how epochs are dealt.
    """

    view: ClusterView | None = None
    followed: bool = False
    orders: dict[int, JobOrder] = field(default_factory=dict)
    dataset: str = ""

    def add(self, epoch: int, order: JobOrder) -> None:
        """Note how an epoch is dealt, unless the orders of too many others are kept."""
        if len(self.orders) < _MAX_ORDERS or epoch in self.orders:
            self.orders[epoch] = order

    def drop_before(self, epoch: int) -> None:
        """Forget all epochs before this one."""
        self.orders = {e: order for e, order in self.orders.items() if e >= epoch}

    def known(self, epoch: int) -> bool:
        """Whether an epoch and the one after it are known."""
        return self.view is not None and {epoch, epoch + 1} <= set(self.orders)

    def from_epoch(self, epoch: int, depth: int, ahead: int) -> list[JobOrder]:
        """Return the order of the epoch `ahead` of `epoch`, and of `depth` later ones.

        `epoch` must be `known`. Unknown orders are extrapolated from its seed and the next one's.
        """
        now, then = self.orders[epoch], self.orders[epoch + 1]
        later = (
            self.orders.get(epoch + 1 + i, then.after(now, i)) for i in range(1, depth + ahead)
        )
        return [now, then, *later][ahead:]

    def agree(self, epoch: int, orders: list[JobOrder]) -> bool:
        """Whether `orders` are those known from `epoch` on, as far as any are known."""
        return all(self.orders.get(epoch + i, order) == order for i, order in enumerate(orders[:2]))


class Placed(NamedTuple):
    """The plan that a `ClusterBoundary` makes.

    Args:
        holder: (n,) node that holds each object when the epoch ends, or `placement.nobody`.
        me: number of this node.
        coming: objects that this node reads in the next epoch from a peer that has yet to get them;
            ascending.
        when: after what part of this epoch, in 256ths, the peer gets each of these.
        lent: objects that this node is to hold and a peer reads in the next epoch.
        copies: objects of which this node keeps a second copy, the soonest to be read first.
        surplus: objects that this node holds but need not.
    """

    holder: Nodes
    me: int
    coming: Ids
    when: NDArray[np.uint8]
    lent: Ids
    copies: Ids
    surplus: list[Ids]

    def part(self, ids: NDArray[np.integer]) -> Ints:
        """Return (k,) the part of this epoch in which the holder gets each object, or -1."""
        if not len(self.coming):
            return np.full(len(ids), -1)
        at = np.minimum(self.coming.searchsorted(ids), len(self.coming) - 1)
        return np.where(self.coming[at] == ids, self.when[at].astype(np.int64), -1)


@dataclass(frozen=True, eq=False)
class ClusterBoundary:
    """What is known about the end of an epoch of a whole job; arrays may be live views.

    Args:
        epoch: the epoch that ends.
        view: the nodes.
        orders: of this epoch and of later ones.
        holder: (n,) node that held each object when this epoch began; None: no node held any.
        copies: objects of which this node had a second copy then.
        size: (n,) bytes of each object, or (1,) if all are equal or some are unknown.
        capacity: (nodes,) bytes of memory and disk of each node.
        state: (n,) states on this node.
        lead: share of the next epoch that is kept first.
    """

    epoch: int
    view: ClusterView
    orders: list[JobOrder]
    holder: Nodes | None
    copies: Ids
    size: Ints
    capacity: Ints
    state: NDArray[np.uint8]
    lead: float

    def plan(self) -> Placed:
        """Return which node holds what when the epoch ends; takes 1 s for a million objects."""
        object_of = self.orders[0].object_of
        if object_of is not None and all(order.object_of == object_of for order in self.orders):
            return self._of_samples(object_of.objects)
        node_of = self.view.nodes.tolist()
        now = self._uses(self.orders[0].by_rank(node_of), self.orders[0])
        following = self.orders[1].by_rank(node_of)
        owners = [self._uses(following, self.orders[1]).owner]
        owners += [self._uses(order.by_rank(node_of), order).owner for order in self.orders[2:]]
        holder = self.holder
        if holder is None:
            holder = np.full_like(now.owner, nobody(now.owner))
        after = placement.next_holders(
            holder, now, owners, following, self.size, self.capacity, lead=self.lead
        )
        me = self.view.me
        copies = self._copies(holder, after, now, owners)
        vain = (self.state == RESIDENT) & (after != me)
        vain[copies] = False
        lent = (after == me).nonzero()[0].astype(np.int32)
        lent = lent[(owners[0][lent] != me) & (owners[0][lent] != nobody(holder))]
        mine = [ids for ids, node in zip(following, node_of, strict=True) if node == me]
        coming = unique(np.concatenate([lent[:0], *mine]))
        at = after[coming]
        coming = coming[(at != me) & (at != nobody(after)) & (at != holder[coming])]
        when = (now.when[coming] >> _PART_BITS).astype(np.uint8)
        surplus = [vain.nonzero()[0].astype(np.int32)]
        return Placed(after, me, coming, when, lent, copies, surplus)

    def _of_samples(self, objects: Ids) -> Placed:
        """Return the plan for a part of a dataset: as if its samples were all objects."""
        n = len(self.state)
        sample = np.full(n, -1, np.int32)
        sample[objects] = np.arange(len(objects), dtype=np.int32)
        copies = sample[self.copies]
        placed = replace(
            self,
            orders=[order._replace(object_of=None) for order in self.orders],
            holder=None if self.holder is None else self.holder[objects],
            copies=copies[copies >= 0],
            size=self.size if len(self.size) == 1 else self.size[objects],
            state=self.state[objects],
        ).plan()
        holder = np.full(n, nobody(placed.holder), placed.holder.dtype)
        holder[objects] = placed.holder
        coming = objects[placed.coming]
        order = coming.argsort(kind="stable")
        others = ((self.state == RESIDENT) & (sample < 0)).nonzero()[0].astype(np.int32)
        return Placed(
            holder,
            placed.me,
            coming[order],
            placed.when[order],
            objects[placed.lent],
            objects[placed.copies],
            [others, *(objects[ids] for ids in placed.surplus)],
        )

    def _copies(self, holder: Nodes, after: Nodes, now: placement.Uses, owners: list[Nodes]) -> Ids:
        """Return the objects to keep as second copies, in room that the plan leaves here."""
        n, me = len(self.state), self.view.me
        if dataset_nbytes(self.size, n) >= int(self.capacity.sum()):
            return NO_IDS
        held = np.zeros(n, np.bool_)
        held[self.copies] = True
        copies = placement.replicas(
            me, held, holder, after, now, owners, self.size, int(self.capacity[me])
        )
        return placement.soonest_first(me, copies.nonzero()[0].astype(np.int32), owners)

    def _uses(self, ranks: list[Ids], order: JobOrder) -> placement.Uses:
        nodes = self.view.nodes.tolist()
        sizes = {"objects": len(self.state), "nodes": len(self.view.capacity)}
        return placement.uses_of(ranks, nodes, order.batch, **sizes)
