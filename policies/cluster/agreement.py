"""What the nodes of a cluster tell each other of their plans, where these may differ. Pure.

Each node plans alike from what all know (`boundary`). A node that has missed a change of the
members, or began in the middle of an epoch, cannot; it reads the source and takes a peer's plan. So
does one that takes something else for granted than the others.
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

#: A change of members spreads within a second: with less than these seconds of an epoch left, it
#: counts from the next one on.
_NOTICE_S = 3.0


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Where a node says that objects lie, for a node that missed the changes that led to it.

    Args:
        seed: of the order of the epoch that it is about.
        known: the latest change that it accounts for; members: (nodes,) from then on.
        holder: (n,) who held each object when the epoch began; None: nobody anything.
        planned: (n,) who holds each when it ends; None: that is not planned yet.
    """

    seed: int
    known: ChangeId
    members: Mask
    holder: Nodes | None
    planned: Nodes | None

    def fits(self, objects: int) -> bool:
        """Whether it describes a dataset of this many objects."""
        columns = [column for column in (self.holder, self.planned) if column is not None]
        return all(len(column) == objects for column in columns)


class Agreement:
    """Whether this node can plan as the others do.

    Args:
        deals: what is known of the job, a live view.

    Attributes:
        since: the latest change that plans account for.
        members: (nodes,) whom they count on from then on.
        astray: whether what the others know is not known here; then the source is asked, and a
            peer.
        asks: whether a peer is asked although this node wrote the last change.
        given: (n,) a peer's plan of this epoch's end; None: it is made here.
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
        """The seed of the epoch's order, where a peer has to say what lies where; else None."""
        view, order = self._deals.view, self._deals.orders.get(epoch)
        if view is None or order is None or not self.astray:
            return None
        return order.seed if self.asks or authority(view.log) != view.me else None

    def doubt(self, epoch: int, seed: int) -> None:
        """Others take something else for granted in the epoch of this order: ask them."""
        order = self._deals.orders.get(epoch)
        if order is not None and order.seed == seed:
            self.astray = self.asks = True

    def takes(self, epoch: int, plan: SharedPlan, objects: int) -> bool:
        """Go on from what a peer knows of `epoch`; False where that is not what this node lacks."""
        view = self._deals.view
        if view is None or self.lacks(epoch) != plan.seed or not plan.fits(objects):
            return False
        if len(plan.members) != len(view.capacity):
            return False
        self.astray = self.asks = False
        self.since, self.members, self.given = plan.known, plan.members, plan.planned
        return True

    def insist(self, view: ClusterView) -> None:
        """This node has the last word: it goes on with what it knows."""
        if self.astray:
            self.astray, self.since = False, latest(view.log)

    def share(
        self, epoch: int, seed: int, holder: Nodes | None, planned: Nodes | None
    ) -> SharedPlan | None:
        """What this node knows of an epoch; None: nothing, or it is another epoch's end.

        holder, planned: (n,) who held each object when `epoch` began, and who does when it ends.
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
        """The inputs of this node's plan for `epoch`, once its end is planned; None: it is not."""
        order = self._deals.orders.get(epoch)
        if order is None or self.astray:
            return None
        if self._digested[0] is not holder or holder is None:
            self._digested = holder, 0 if holder is None else zlib.crc32(holder.tobytes())
        return PlanDigest(self._deals.dataset, order.seed, self.since, self._digested[1])

    def moment(self, epoch: int, steps: tuple[int, int], clock: int, step_s: float) -> EpochMoment:
        """The moment from which all nodes can follow a change that is written now.

        Args:
            epoch: `known`, as the one after it.
            steps: its first and last + 1; clock: those that all ranks here have done.
            step_s: seconds of one.
        """
        first, end = steps
        dataset, orders = self._deals.dataset, self._deals.orders
        if (end - clock) * step_s < _NOTICE_S or clock >= end:
            return EpochMoment(dataset, orders[epoch + 1].seed, 0)
        part = max(clock - first, 0) * placement.EPOCH // max(end - first, 1)
        return EpochMoment(dataset, orders[epoch].seed, part)

    def due(self, epoch: int, view: ClusterView) -> tuple[Mask, ChangeId, int] | None:
        """The next change to plan for: members, its name, and the clock from which they count.

        Where it cannot be followed, this node is astray.
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
