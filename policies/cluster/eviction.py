"""Eviction if the nodes of a job serve each other and plan together what stays. Pure.

From the job's orders all nodes compute which of them holds each object when an epoch ends
(`placement.next_holders`). So each node knows, without a message, which peer to ask for an object,
and which objects peers will ask it for. An error of the plan costs a read of the source.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ids, Index, Ints, Mask, joined
from creel.policies.cluster import placement
from creel.policies.cluster.boundary import (
    PARTS,
    SOURCE,
    ClusterBoundary,
    ClusterView,
    Deals,
    Placed,
)
from creel.policies.cluster.placement import dataset_nbytes, nobody
from creel.policies.cluster.shared_plan import PlanDigest, SharedPlan, digest
from creel.policies.eviction.context import PlanningContext, PlanningTask
from creel.policies.eviction.planned import LISTED, PlannedEviction
from creel.policies.eviction.sampling import Nodes
from creel.policies.next_use import NextUses

#: Marks beside LISTED: held for a peer that reads it in this epoch; sent early, for the next epoch;
#: kept as a second copy.
_LENT, _SENT_EARLY, _COPY = np.uint8(2), np.uint8(4), np.uint8(8)
#: Steps of a rank whose objects are in use at once: one is being read, one waits.
_STEPS_IN_USE = 2
#: Part (1/n) of its capacity by which a node may exceed the plan in mid-epoch: .7 % were measured
#: (tests/sim/test_laws_of_placement.py).
_PEAK_PART = 128


class ClusterEviction(PlannedEviction):
    """For jobs of several nodes whose epochs read each object at most once.

    Args:
        deals: what is known of the job, a live view.
    """

    name = "cluster"
    reads_for_peers = True

    def __init__(
        self,
        state: NDArray[np.uint8],
        pins: NDArray[np.int32],
        uses: NextUses,
        epoch: int,
        deals: Deals,
    ) -> None:
        super().__init__(state, pins, uses, epoch)
        self.deals = deals
        self._holder: Nodes | None = None  # holders when this epoch began
        self._copies = NO_IDS  # second copies on this node when this epoch began
        self._second_copies = NO_IDS  # planned second copies, which make room for any fetch
        self._next: Placed | None = None  # the plan of this epoch's end
        # The plan of the next epoch's end, made ahead: its first steps' objects must not leave.
        self._later: tuple[ClusterBoundary, Placed] | None = None
        self._asking: ClusterBoundary | None = None  # the plan that is being made
        #: Whether this node does not know which node held what when this epoch began. It then
        #: reads from the source and asks a peer.
        self.astray = deals.view is not None and deals.view.again
        #: Whether reading ahead waits for the answer.
        self.waits = self.astray
        self._holders_known = False  # whether a peer has told in this epoch who holds what
        self._digested: tuple[Nodes | None, int] = None, 0  # of these holders, this digest

    @property
    def view(self) -> ClusterView | None:
        """The nodes, as this one sees them."""
        return self.deals.view

    @property
    def lacks(self) -> int | None:
        """The mark of the epoch's order if a peer must say which node holds what, else None."""
        order = self.deals.orders.get(self.epoch)
        return order.mark if self.astray and order is not None else None

    @property
    def digest(self) -> PlanDigest | None:
        """The inputs of this node's plan for this epoch, or None if there is no plan."""
        order = self.deals.orders.get(self.epoch)
        if order is None or self.astray or self._next is None:
            return None
        if self._digested[0] is not self._holder:
            self._digested = self._holder, digest(self._holder)
        return PlanDigest(self.deals.dataset, order.mark, self._digested[1])

    def doubt(self, seed: int) -> None:
        """Note that other nodes plan the epoch of this order from other inputs: ask them."""
        order = self.deals.orders.get(self.epoch)
        self.astray |= order is not None and order.mark == seed
        self.waits = self.astray

    def share(self, seed: int) -> SharedPlan | None:
        """Return what this node knows of the epoch with this mark, or None if nothing."""
        view, orders = self.deals.view, self.deals.orders
        if self.astray or view is None:
            return None
        held = [(self.epoch, self._holder)]
        if self._next is not None:
            held.append((self.epoch + 1, self._next.holder))
        for epoch, holder in held:
            if epoch in orders and orders[epoch].mark == seed:
                return SharedPlan(seed, len(view.capacity), holder)
        return None

    def take_plan(self, plan: SharedPlan) -> None:
        """Take over what a peer knows of this epoch, if this node lacks it."""
        view = self.deals.view
        if view is None or self.lacks != plan.seed or plan.nodes != len(view.capacity):
            return
        if plan.holder is None or len(plan.holder) == len(self._state):
            self._asking = self._next = self._later = None
            self._holder, self._holders_known = plan.holder, True
            self.insist()

    def insist(self) -> None:
        """Go on with what this node knows: no peer knows more."""
        self.astray = self.waits = False

    # --- the plan --------------------------------------------------------------------------------

    def planning_task(self, context: PlanningContext) -> PlanningTask | None:
        """Return what to plan now, or None; one task for each epoch."""
        view = self.deals.view
        if self._asking is not None or view is None or not self.deals.known(self.epoch):
            return None
        if self.astray:
            return None
        if self._next is None:
            self._asking = self._boundary_of(self.epoch, view, context, self._holder, self._copies)
        elif self._later is None:
            self._asking = self._boundary_of(
                self.epoch + 1, view, context, self._next.holder, self._next.copies
            )
        return self._asking

    def _boundary_of(
        self,
        epoch: int,
        view: ClusterView,
        context: PlanningContext,
        holder: Nodes | None,
        copies: Ids,
    ) -> ClusterBoundary:
        size = context.agreed_size
        samples, whole = self._read_nbytes(size)
        capacity = context.capacities(view.capacity, view.disk)
        depth = placement.useful_depth(len(view.capacity), int(capacity.sum()) / whole)
        orders = self.deals.from_epoch(self.epoch, depth, epoch - self.epoch)
        capacity -= self._in_use(view, orders[0].batch * whole // samples, capacity, whole)
        return ClusterBoundary(
            epoch=epoch,
            view=view,
            orders=orders,
            holder=holder,
            copies=copies,
            size=size,
            capacity=capacity,
            state=self._state,
            # The same on all nodes, though each reads ahead at its own pace.
            lead=placement.lead_of(orders[1].steps),
        )

    def _read_nbytes(self, size: Ints) -> tuple[int, int]:
        """Return how many objects an epoch reads, and their bytes, at least 1."""
        object_of = self.deals.orders[self.epoch].object_of
        if object_of is None:
            return len(self._state), max(dataset_nbytes(size, len(self._state)), 1)
        read = size if len(size) == 1 else size[object_of.objects]
        return len(object_of.objects), max(dataset_nbytes(read, len(object_of.objects)), 1)

    def _in_use(self, view: ClusterView, step_nbytes: int, capacity: Ints, whole: int) -> Ints:
        """Return (nodes,) bytes to leave to steps in use, if memories exceed the dataset.

        Otherwise a node full of objects that stay would have to evict some of them in each step.

        Args:
            step_nbytes: bytes of a rank's step.
            capacity: (nodes,) bytes.
            whole: bytes of all that an epoch reads.
        """
        beyond = max(int(capacity.sum()) - whole, 0) // len(capacity)
        ranks = np.bincount(view.nodes, minlength=len(capacity))
        peak = _STEPS_IN_USE * step_nbytes * ranks + capacity // _PEAK_PART
        in_use: Ints = np.minimum(peak, beyond)
        return in_use

    def retention_planned(self, task: PlanningTask, plan: object) -> None:
        if task is not self._asking or not isinstance(plan, Placed):
            return
        asked, self._asking = self._asking, None
        if asked.epoch == self.epoch:
            self._later = None
            self._follow(plan)
        else:
            self._later = asked, plan

    def _follow(self, placed: Placed) -> None:
        """Keep the objects that this plan keeps over the end of this epoch."""
        self._marks[self._second_copies] &= ~_COPY
        self._next, self._surplus, self._second_copies = placed, list(placed.surplus), placed.copies
        self._marks[self._second_copies] |= _COPY

    @property
    def _planned(self) -> bool:
        return self._next is not None

    def _staying(self, ids: Index) -> Mask:
        assert self._next is not None  # noqa: S101  `_planned`
        staying: Mask = self._next.holder[ids] == self._next.me
        return staying | self._marked(ids, _COPY)

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        if uses is not self.uses or epoch <= self.epoch:
            return
        placed = self._next if epoch == self.epoch + 1 else None
        later = self._later
        # A plan that is too late on this node may have been in time on another one.
        late = self._asking is not None and self._asking.epoch < epoch
        self.astray |= placed is None or late
        self.waits = self.astray
        super().epoch_began(uses, epoch)
        self._asking = self._next = self._later = None
        self._holders_known = False
        self._holder = None if placed is None else placed.holder
        self._copies = NO_IDS if placed is None else placed.copies
        self._second_copies = NO_IDS
        sent = np.empty(0, np.bool_) if placed is None else self._marked(placed.lent, _SENT_EARLY)
        self._marks &= LISTED
        if placed is not None:
            self._marks[placed.lent[~sent]] |= _LENT
        self.deals.drop_before(epoch)
        view = self.deals.view
        if placed is not None and view is not None and later is not None:
            asked, answer = later
            if asked.view.like(view) and self.deals.agree(epoch, asked.orders):
                self._follow(answer)

    def victims(self, k: int, step: int) -> Index:
        """Return up to k distinct objects to evict: second copies last, and the last used first."""
        victims = super().victims(k, step)
        if len(victims) >= k:
            return victims
        more, left = [victims], k - len(victims)
        while len(self._second_copies) and left > 0:
            ids, self._second_copies = (
                self._second_copies[-left:].astype(np.intp),
                self._second_copies[:-left],
            )
            self._marks[ids] &= ~_COPY
            ids = ids[self._leaving(ids) & ~self._listed(ids) & ~self.wanted(ids)]
            more.append(ids)
            left -= len(ids)
        return joined(more)

    def forced_victims(self, k: int, step: int) -> Index:
        """As in any policy, but objects that no peer is going to ask this node for come first."""
        ids = self._unpinned()
        asked = self._marked(ids, _LENT)
        if self._next is not None:
            asked |= np.isin(ids, self._next.lent)
        own = self._farthest(ids[~asked], k, step)
        if len(own) == k:
            return own
        return joined([own, self._farthest(ids[asked], k - len(own), step)])

    def wanted(self, ids: Index) -> Mask:
        """Return (k,) whether the current epoch reads each object again, here or on a peer."""
        return super().wanted(ids) | self._marked(ids, _LENT)

    def sent(self, ids: Index) -> None:
        lent = self._marked(ids, _LENT)
        if not self._holders_known:  # else what peers read in this epoch has no mark
            self._marks[ids[~lent]] |= _SENT_EARLY
        self._marks[ids[lent]] &= ~_LENT

    def awaited(self, ids: Index, epoch: int, clock: int) -> Mask | None:
        """Return (k,) whether each object's holder does not have it yet; None: all have.

        The holder gets the object by reading it in this epoch, at about the pace of this node.
        While this node does not know the holders and `waits`, it is true of all objects.

        Args:
            epoch: the epoch that reads the objects.
            clock: steps that the ranks of this node have done.
        """
        if self.waits:
            return np.ones(len(ids), np.bool_)
        if epoch != self.epoch + 1 or self.deals.view is None:
            return None
        if self._next is None:  # it is being planned
            return np.ones(len(ids), np.bool_) if self._asking is not None else None
        steps, end = self.deals.orders[self.epoch].steps, self.uses.span(self.epoch)[1]
        part = (steps - (end - clock)) * PARTS // steps  # a restarted daemon knows only the rest
        return self._next.part(ids) > part

    def holders(self, ids: Index, epoch: int) -> Ints | None:
        """Return (k,) the peer that holds each object when `epoch` reads it, or SOURCE, or None."""
        holder = None if self.astray else self._holder
        if epoch == self.epoch + 1:
            holder = None if self._next is None else self._next.holder
        elif epoch != self.epoch:
            holder = None
        if holder is None or self.deals.view is None:
            return None
        nodes, origin = holder[ids].astype(np.int64), self.deals.view.origin
        none = nodes == nobody(holder)
        nodes[none] = 0
        return np.where(none, SOURCE, origin[nodes])

    def brings(self, ids: Index) -> Mask:
        """Return (k,) whether to read each absent object when a peer asks: this node is to hold it.

        It lacks the object if its daemon was restarted, or if its own rank read the object itself.
        """
        held = self._holder if self._next is None else self._next.holder
        if self.astray or held is None or self.deals.view is None:
            return np.zeros(len(ids), np.bool_)
        brings: Mask = held[ids] == self.deals.view.me
        return brings
