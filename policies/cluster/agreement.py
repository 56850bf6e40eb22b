"""What the nodes of a cluster tell each other of their plans if these may differ. Pure.

All nodes compute the same plan from what all of them know (`boundary`). A node cannot if it missed
a change of the members, if it began in the middle of an epoch, or if its inputs differ from those
of the others. It then reads from the source and takes a peer's plan.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from creel.policies.arrays import Mask
from creel.policies.cluster import placement
from creel.policies.cluster.boundary import ClusterView, Deals
from creel.policies.cluster.members import (
    ChangeId,
    EpochMoment,
    PlanDigest,
    after,
    authority,
    latest,
    unpacked,
)
from creel.policies.eviction.sampling import Nodes

#: A change of members spreads within a second. If an epoch has less than this left, in seconds, the
#: change counts from the next epoch on.
_NOTICE_S = 3.0


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Which node holds each object according to one node, for a node that missed changes.

    Args:
        seed: of the order of the epoch that the plan is about.
        known: the latest change that it accounts for; members: (nodes,) members from then on.
        holder: (n,) node that held each object when the epoch began; None: no node held any.
        planned: (n,) node that holds each object when it ends; None: not planned yet.
    """

    seed: int
    known: ChangeId
    members: Mask
    holder: Nodes | None
    planned: Nodes | None

    def fits(self, objects: int) -> bool:
        """Whether the plan describes a dataset of this many objects."""
        columns = [column for column in (self.holder, self.planned) if column is not None]
        return all(len(column) == objects for column in columns)


class Agreement:
    """Whether this node can plan as the others do.

    Args:
        deals: what is known of the job, a live view.

    Attributes:
        since: the latest change that plans account for.
        members: (nodes,) members that plans count on from then on.
        astray: whether this node lacks what the others know; then it reads from the source and asks
            a peer.
        asks: whether to ask a peer although this node wrote the last change.
        given: (n,) a peer's plan of this epoch's end; None: this node makes its own.
    """

    def __init__(self, deals: Deals) -> None:
        self._deals = deals
        view = deals.view
        log = () if view is None else view.log
        nodes = 0 if view is None else len(view.capacity)
        self.since = latest(log)
        self.members = unpacked(log[-1].members, nodes) if log else np.ones(nodes, np.bool_)
        self.astray = bool(log)
        self.asks = False
        self.given: Nodes | None = None
        self._digested: tuple[Nodes | None, int] = None, 0

    def lacks(self, epoch: int) -> int | None:
        """Return the seed of the epoch's order if a peer must say which node holds what."""
        view, order = self._deals.view, self._deals.orders.get(epoch)
        if view is None or order is None or not self.astray:
            return None
        return order.seed if self.asks or authority(view.log) != view.me else None

    def doubt(self, epoch: int, seed: int) -> None:
        """Note that other nodes plan the epoch of this order from other inputs: ask them."""
        order = self._deals.orders.get(epoch)
        if order is not None and order.seed == seed:
            self.astray = self.asks = True

    def takes(self, epoch: int, plan: SharedPlan, objects: int) -> bool:
        """Take over a peer's plan of `epoch`; return False if this node does not lack that plan."""
        view = self._deals.view
        if view is None or self.lacks(epoch) != plan.seed or not plan.fits(objects):
            return False
        if len(plan.members) != len(view.capacity):
            return False
        self.astray = self.asks = False
        self.since, self.members, self.given = plan.known, plan.members, plan.planned
        return True

    def insist(self, view: ClusterView) -> None:
        """Go on with what this node knows, as its plan is the one that counts."""
        if self.astray:
            self.astray, self.since = False, latest(view.log)

    def share(
        self, epoch: int, seed: int, holder: Nodes | None, planned: Nodes | None
    ) -> SharedPlan | None:
        """Return what this node knows of the epoch with this seed, or None if nothing.

        Args:
            epoch: the present one; the seed may be of this epoch or of the next one.
            holder, planned: (n,) node that held each object when `epoch` began, and holds it at its
                end.
        """
        orders = self._deals.orders
        if self.lacks(epoch) is not None or epoch not in orders:
            return None
        if orders[epoch].seed == seed:
            return SharedPlan(seed, self.since, self.members, holder, planned)
        if planned is not None and orders[epoch + 1].seed == seed:
            return SharedPlan(seed, self.since, self.members, planned, None)
        return None

    def digest(self, epoch: int, holder: Nodes | None) -> PlanDigest | None:
        """Return the inputs of this node's plan for `epoch`, or None if its end is not planned."""
        order = self._deals.orders.get(epoch)
        if order is None or self.astray:
            return None
        if self._digested[0] is not holder or holder is None:
            self._digested = holder, 0 if holder is None else zlib.crc32(holder.tobytes())
        return PlanDigest(self._deals.dataset, order.seed, self.since, self._digested[1])

    def moment(self, epoch: int, steps: tuple[int, int], clock: int, step_s: float) -> EpochMoment:
        """Return the moment from which all nodes can follow a change that is written now.

        Args:
            epoch: a known epoch, as is the one after it.
            steps: first step of the epoch, and its end; clock: steps that all ranks here have done.
            step_s: seconds per step.
        """
        first, end = steps
        dataset, orders = self._deals.dataset, self._deals.orders
        if (end - clock) * step_s < _NOTICE_S or clock >= end:
            return EpochMoment(dataset, orders[epoch + 1].seed, 0)
        part = max(clock - first, 0) * placement.EPOCH // max(end - first, 1)
        return EpochMoment(dataset, orders[epoch].seed, part)

    def due(self, epoch: int, view: ClusterView) -> tuple[Mask, ChangeId, int] | None:
        """Return the next change to plan for: its members, id, and clock from which they count.

        Set `astray` if this node cannot follow the change.
        """
        todo, orders = after(view.log, self.since), self._deals.orders
        if todo is None:
            self.astray = True
        for change in todo or ():
            members = unpacked(change.members, len(view.capacity))
            moment = change.moment(self._deals.dataset)
            if moment is None:  # it counts from the next plan on
                self.since, self.members = change.id, members
                continue
            if moment.seed == orders[epoch].seed:
                return members, change.id, moment.clock
            self.astray = moment.seed != orders[epoch + 1].seed
            return None
        return None
