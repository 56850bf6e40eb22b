"""Eviction where the nodes of a job serve each other: what stays is planned for all alike. Pure.

All nodes compute from the job's orders which of them holds each object when an epoch turns
(`placement.turn`), so each knows where to ask and what the others will ask for, without a message.
What a plan gets wrong costs a read of the source.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.candidates import Index
from creel.policies.cluster import placement
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.members import (
    Change,
    ChangeId,
    EpochMoment,
    PlanDigest,
    after,
    authority,
    latest,
    unpacked,
)
from creel.policies.cluster.placement import dataset_nbytes, nobody
from creel.policies.eviction_policy import RESIDENT, joined
from creel.policies.next_use import NextUses
from creel.policies.planned_eviction import PlannedEviction, PlanningContext
from creel.policies.retention import Kept, Turn
from creel.policies.selection import Ids, Nodes

#: Parts of an epoch in which its holder gets an object; from `placement.EPOCH` to them.
_PARTS = 256
_PART_BITS = (placement.EPOCH // _PARTS).bit_length() - 1
#: Share of an epoch that is kept first, as it is read ahead: at least so much, and so many steps.
_LEAD, _LEAD_STEPS, _MAX_LEAD = 0.01, 8, 0.1
#: A change of members spreads within a second: with less than so much of an epoch left, in s, it
#: counts from the next one on.
_NOTICE_S = 3.0


@dataclass(frozen=True, eq=False)
class ClusterView:
    """The nodes of a job, as one of them sees them.

    Args:
        me: the number of this node among them.
        nodes: (world,) the node of each rank.
        capacity: (nodes,) bytes of memory of each.
        origin: (nodes,) what each is called as origin of a fetch; -1: this node itself.
        cluster: its name.
        log: the latest changes of its members.
    """

    me: int
    nodes: NDArray[np.int64]
    capacity: NDArray[np.int64]
    origin: NDArray[np.int64]
    cluster: str = ""
    log: tuple[Change, ...] = ()

    def like(self, other: ClusterView | None) -> bool:
        """Whether these are the same nodes, with the same memory."""
        if other is None or self.me != other.me:
            return False
        columns = (self.nodes, other.nodes), (self.capacity, other.capacity)
        return all(np.array_equal(mine, its) for mine, its in columns)


@dataclass(eq=False)
class Deals:
    """What a node knows of its job: the other nodes, and how epochs are dealt to the ranks."""

    view: ClusterView | None = None
    orders: dict[int, JobOrder] = field(default_factory=dict)
    dataset: str = ""

    def forget(self, epoch: int) -> None:
        """Forget epochs before `epoch`."""
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
    """The answer to a `ClusterTurn`.

    Args:
        holder: (n,) node that holds each object when the epoch turns; `placement.nobody`: none.
        when: (n,) after what part of this epoch, in 256ths, its holder gets each object; 0 where
            it has it. Of what this node itself is to hold: 1 where a peer reads it next, else 0.
        copies: (n,) whether this node, which is not the holder, is to have a second copy; None:
            the memories together hold no more than all objects.
        spare: these copies, the soonest to be read first.
        surplus: what this node holds in vain.
        unread: what it holds and no member reads in this epoch.
    """

    holder: Nodes
    when: NDArray[np.uint8]
    copies: NDArray[np.bool_] | None
    spare: Ids
    surplus: list[Ids]
    unread: Ids


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Where a node says that objects lie, for one that has missed how that came about.

    Args:
        seed: of the order of the epoch that it is about.
        known: the latest change that it accounts for; members: (nodes,) from then on.
        holder: (n,) who held each object when the epoch began; None: nobody anything.
        planned: (n,) who holds each when it ends; None: that is not planned yet.
    """

    seed: int
    known: ChangeId
    members: NDArray[np.bool_]
    holder: Nodes | None
    planned: Nodes | None

    def fits(self, objects: int) -> bool:
        """Whether it is about so many objects."""
        columns = [column for column in (self.holder, self.planned) if column is not None]
        return all(len(column) == objects for column in columns)


@dataclass(frozen=True, eq=False)
class ClusterTurn:
    """What is known about the turn of an epoch of a whole job; arrays may be live views.

    Args:
        epoch: the one that ends.
        view: the nodes.
        orders: of this epoch and of later ones.
        holder: (n,) who held each object when this epoch began; None: nobody anything.
        copies: (n,) whether this node had a second copy of each then; None: of nothing.
        size: (n,) bytes of each object, or (1,) where all are equal or some are unknown.
        life: (n,) states on this node.
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
    copies: NDArray[np.bool_] | None
    size: NDArray[np.int64]
    life: NDArray[np.uint8]
    lead: float
    members: NDArray[np.bool_]
    known: ChangeId
    clock: int = 0
    planned: Nodes | None = None
    given: Nodes | None = None

    def plan(self) -> Placed:
        """Return who holds what when the epoch turns; takes a second for a million objects."""
        now = self._uses(self.orders[0].by_rank(), self.orders[0])
        following = self.orders[1].by_rank()
        owners = [self._uses(following, self.orders[1]).owner]
        owners += [self._uses(order.by_rank(), order).owner for order in self.orders[2:]]
        holder, after = self._held(now), self.given
        if after is None:
            rest = owners, following, self.size, self.view.capacity * self.members
            after = placement.turn(holder, now, *rest, lead=self.lead, clock=self.clock)
        here = self.life == RESIDENT
        vain = here & (after != self.view.me)
        copies, spare = self._copies(holder, after, now, owners)
        if copies is not None:
            vain &= ~copies
        when = (now.when >> _PART_BITS).astype(np.uint8)
        when[after == holder] = 0
        mine = after == self.view.me
        reader = owners[0][mine]
        when[mine] = (reader != self.view.me) & (reader != nobody(reader))
        surplus = [vain.nonzero()[0].astype(np.int32)]
        unread = (here & (now.owner == nobody(now.owner))).nonzero()[0].astype(np.int32)
        return Placed(after, when, copies, spare, surplus, unread)

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

    def _copies(
        self, holder: Nodes, after: Nodes, now: placement.Uses, owners: list[Nodes]
    ) -> tuple[NDArray[np.bool_] | None, Ids]:
        """Plan what fills the memory that the plan for all leaves free on this node."""
        n, me = len(self.life), self.view.me
        if dataset_nbytes(self.size, n) >= int((self.view.capacity * self.members).sum()):
            return None, np.empty(0, np.int32)
        held = np.zeros(n, np.bool_) if self.copies is None else self.copies
        room = self.size, int(self.view.capacity[me])
        copies = placement.replicas(me, held, holder, after, now, owners, *room)
        return copies, placement.soonest_first(me, copies.nonzero()[0].astype(np.int32), owners)

    def _uses(self, ranks: list[Ids], order: JobOrder) -> placement.Uses:
        nodes = self.view.nodes.tolist()
        sizes = {"objects": len(self.life), "nodes": len(self.view.capacity)}
        uses = placement.uses_of(ranks, nodes, order.batch, **sizes)
        return placement.Uses(without(uses.owner, self.members), uses.when)


def without(holder: Nodes, members: NDArray[np.bool_]) -> Nodes:
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


class ClusterEviction(PlannedEviction):
    """For jobs of several nodes whose epochs read each object at most once.

    Args:
        deals: what is known of the job, a live view.
    """

    name = "cluster"
    replaces = False

    def __init__(
        self,
        life: NDArray[np.uint8],
        pins: NDArray[np.int32],
        uses: NextUses,
        epoch: int,
        deals: Deals,
    ) -> None:
        super().__init__(life, pins, uses, epoch)
        self.deals = deals
        self._holder: Nodes | None = None  # when this epoch began
        self._copies: NDArray[np.bool_] | None = None  # of this node, then
        self._spare: Ids = np.empty(0, np.int32)  # copies that yield to anything else
        self._next: Placed | None = None  # when this epoch ends
        # When the next one ends: planned ahead, as what its first steps read may not leave before.
        self._later: tuple[ClusterTurn, Placed] | None = None
        self._asking: ClusterTurn | None = None
        # Held for a peer that reads it in this epoch; sent already for the next one.
        self._lent = np.zeros(len(life), np.bool_)
        self._sent_early = np.zeros(len(life), np.bool_)
        view = deals.view
        log = () if view is None else view.log
        nodes = 0 if view is None else len(view.capacity)
        self._since = latest(log)  # the latest change that plans account for
        self._members = unpacked(log[-1].members, nodes) if log else np.ones(nodes, np.bool_)
        # Whether what the others know is not known here: then the source is asked, and a peer.
        self._astray = bool(log)
        self._asks = False  # also where the others take over this node's plans
        self._given: Nodes | None = None  # a peer's plan of this epoch's turn
        self._digested: tuple[Nodes | None, int] = None, 0

    # --- other nodes' plans ----------------------------------------------------------------------

    @property
    def lacks(self) -> int | None:
        """The seed of the epoch's order, where a peer has to say what lies where; else None."""
        view, order = self.deals.view, self.deals.orders.get(self.epoch)
        if view is None or order is None or not self._astray:
            return None
        return order.seed if self._asks or authority(view.log) != view.me else None

    @property
    def digest(self) -> PlanDigest | None:
        """What this node takes for granted in this epoch; None: that is not settled."""
        order = self.deals.orders.get(self.epoch)
        if order is None or self._astray or self._next is None:
            return None
        if self._digested[0] is not self._holder or self._holder is None:
            digest = 0 if self._holder is None else zlib.crc32(self._holder.tobytes())
            self._digested = self._holder, digest
        return PlanDigest(self.deals.dataset, order.seed, self._since, self._digested[1])

    def doubt(self, seed: int) -> None:
        """Others take something else for granted in the epoch of this order: ask them."""
        order = self.deals.orders.get(self.epoch)
        if order is not None and order.seed == seed:
            self._astray = self._asks = True

    def share(self, seed: int) -> SharedPlan | None:
        """What this node knows of an epoch; None: nothing, or it is another epoch's turn."""
        orders = self.deals.orders
        if self.lacks is not None or self.epoch not in orders:
            return None
        after = None if self._next is None else self._next.holder
        if orders[self.epoch].seed == seed:
            return SharedPlan(seed, self._since, self._members, self._holder, after)
        if after is not None and orders[self.epoch + 1].seed == seed:
            return SharedPlan(seed, self._since, self._members, after, None)
        return None

    def adopt(self, plan: SharedPlan) -> None:
        """Go on from what a peer knows, if that is what this node lacks."""
        view = self.deals.view
        if view is None or self.lacks != plan.seed or not plan.fits(len(self._life)):
            return
        if len(plan.members) != len(view.capacity):
            return
        self._astray = self._asks = False
        self._asking = self._next = self._later = None
        self._since, self._members = plan.known, plan.members
        self._holder, self._given = plan.holder, plan.planned

    def moment(self, clock: int, step_s: float) -> EpochMoment | None:
        """The moment from which all nodes can follow a change that is written now, if any.

        Args:
            clock: steps that all ranks here have done; step_s: seconds of one.
        """
        if self.lacks is not None or not self.deals.known(self.epoch):
            return None
        first, end = self.uses.span(self.epoch)
        dataset, orders = self.deals.dataset, self.deals.orders
        if (end - clock) * step_s < _NOTICE_S or clock >= end:
            return EpochMoment(dataset, orders[self.epoch + 1].seed, 0)
        part = max(clock - first, 0) * placement.EPOCH // max(end - first, 1)
        return EpochMoment(dataset, orders[self.epoch].seed, part)

    # --- the plan --------------------------------------------------------------------------------

    @property
    def among_nodes(self) -> ClusterEviction:
        """This policy."""
        return self

    def question(self, context: PlanningContext) -> Turn | ClusterTurn | None:
        """Return what to plan now, if anything: once for each epoch and each change."""
        view = self.deals.view
        if self._asking is not None or view is None or not self.deals.known(self.epoch):
            return None
        if self.lacks is not None:
            return None
        if self._astray:  # this node has the last word: it goes on with what it knows
            self._astray, self._since = False, latest(view.log)
        if self._next is None:
            turn = self._turn_of(self.epoch, view, context, self._holder, self._copies)
            self._asking = replace(turn, given=self._given)
        elif (change := self._due(view)) is not None:
            turn = self._turn_of(self.epoch, view, context, self._holder, self._copies)
            planned, (members, known, clock) = self._next.holder, change
            self._asking = replace(turn, members=members, known=known, clock=clock, planned=planned)
        elif self._later is None:
            held = self._next.holder, self._next.copies
            self._asking = self._turn_of(self.epoch + 1, view, context, *held)
        return self._asking

    def _due(self, view: ClusterView) -> tuple[NDArray[np.bool_], ChangeId, int] | None:
        """The next change to plan for: members, its name, and the clock from which they count.

        Where it cannot be followed, this node is astray.
        """
        todo, orders = after(view.log, self._since), self.deals.orders
        if todo is None:
            self._astray = True
        for change in todo or ():
            members = unpacked(change.members, len(view.capacity))
            moment = change.moment(self.deals.dataset)
            if moment is None:  # it counts from the next plan on
                self._since, self._members = change.id, members
                continue
            if moment.seed == orders[self.epoch].seed:
                if self._holder is not None:  # who comes back has nothing
                    self._holder = without(self._holder, members)
                return members, change.id, moment.clock
            self._astray = moment.seed != orders[self.epoch + 1].seed
            return None
        return None

    def _turn_of(
        self,
        epoch: int,
        view: ClusterView,
        context: PlanningContext,
        holder: Nodes | None,
        copies: NDArray[np.bool_] | None,
    ) -> ClusterTurn:
        size = context.agreed_size
        whole = max(dataset_nbytes(size, len(self._life)), 1)
        nbytes = int((view.capacity * self._members).sum())
        depth = placement.useful_depth(len(view.capacity), nbytes / whole)
        orders = self.deals.from_epoch(self.epoch, depth, epoch - self.epoch)
        # The same on all nodes, whose paces differ: one lead for all, however far each reads ahead.
        lead = min(max(_LEAD, _LEAD_STEPS / orders[1].steps), _MAX_LEAD)
        columns = holder, copies, size, self._life
        return ClusterTurn(epoch, view, orders, *columns, lead, self._members, self._since)

    def answer(self, turn: Turn | ClusterTurn, kept: Kept | Placed) -> None:
        """Take a plan, if it answers the latest question."""
        if turn is not self._asking or not isinstance(kept, Placed):
            return
        asked, self._asking = self._asking, None
        if asked.epoch == self.epoch:
            self._given, self._later = None, None
            self._since, self._members = asked.known, asked.members
            self._lent[kept.unread] = False
            self._follow(kept)
        else:
            self._later = asked, kept

    def _follow(self, placed: Placed) -> None:
        """Keep what this plan says over the turn of this epoch."""
        assert self.deals.view is not None  # noqa: S101  or nothing was asked
        self._next = placed
        self._stays, self._surplus = placed.holder == self.deals.view.me, list(placed.surplus)
        self._spare = placed.spare
        if placed.copies is not None:
            self._stays |= placed.copies

    def turn(self, uses: NextUses, epoch: int) -> None:
        """The first object of `epoch` was read."""
        if uses is not self.uses or epoch <= self.epoch:
            return
        placed = self._next if epoch == self.epoch + 1 else None
        later = self._later
        # A plan that comes too late here may have come in time elsewhere.
        late = self._asking is not None and self._asking.epoch < epoch
        self._astray |= placed is None or late
        super().turn(uses, epoch)
        self._asks = False
        self._asking = self._next = self._later = self._given = None
        self._holder = None if placed is None else placed.holder
        self._copies = None if placed is None else placed.copies
        self._spare = self._spare[:0]
        self._lent[:] = False
        view = self.deals.view
        if placed is not None and view is not None:
            np.equal(placed.holder, view.me, out=self._lent)
            self._lent &= placed.when > 0
            self._lent &= ~self._sent_early
        self._sent_early[:] = False
        self.deals.forget(epoch)
        if placed is not None and later is not None:
            asked, answer = later
            same = asked.view.like(view) and asked.known == self._since
            if same and self.deals.agree(epoch, asked.orders):
                self._follow(answer)

    def victims(self, k: int, step: int) -> Index:
        """Up to k distinct objects to evict; second copies after all else, the last used first."""
        found = super().victims(k, step)
        if len(found) >= k or self._stays is None:
            return found
        more, left = [found], k - len(found)
        while len(self._spare) and left > 0:
            ids, self._spare = self._spare[-left:].astype(np.intp), self._spare[:-left]
            self._stays[ids] = False
            ids = ids[self._leaving(ids) & ~self._listed[ids] & ~self.wanted(ids)]
            more.append(ids)
            left -= len(ids)
        return joined(more)

    def keeps(self, ids: Index) -> NDArray[np.bool_]:
        """(k,) all: what is planned is memory; a disk saves what memory has no room for."""
        return np.ones(len(ids), np.bool_)

    def wanted(self, ids: Index) -> NDArray[np.bool_]:
        """(k,) whether the current epoch reads each again, here or on a peer."""
        return super().wanted(ids) | self._lent[ids]

    def sent(self, ids: Index) -> None:
        """Objects were sent to the peer that reads them."""
        self._sent_early[ids[~self._lent[ids]]] = True
        self._lent[ids] = False

    def awaited(self, ids: Index, epoch: int, clock: int) -> NDArray[np.bool_] | None:
        """(k,) whether each object, to be read in `epoch`, is yet to come to the peer it is from.

        Its reader in this epoch is that peer, and the ranks go in step; None: none is awaited.

        Args:
            clock: steps that the ranks of this node have done.
        """
        if epoch != self.epoch + 1 or self.deals.view is None:
            return None
        if self._next is None:  # it is being planned
            return np.ones(len(ids), np.bool_) if self._asking is not None else None
        first, end = self.uses.span(self.epoch)
        part = (clock - first) * _PARTS // max(end - first, 1)
        holder = self._next.holder[ids]
        elsewhere: NDArray[np.bool_] = holder != self.deals.view.me
        elsewhere &= holder != nobody(holder)
        elsewhere &= self._next.when[ids] > part
        return elsewhere

    def holders(self, ids: Index, epoch: int) -> NDArray[np.int64] | None:
        """(k,) the peer that holds each object for its read in `epoch`, -1 none; None: no plan."""
        holder = None if self._astray else self._holder
        if epoch == self.epoch + 1:
            holder = None if self._next is None else self._next.holder
        elif epoch != self.epoch:
            holder = None
        if holder is None or self.deals.view is None:
            return None
        found, origin = holder[ids].astype(np.int64), self.deals.view.origin
        none = found == nobody(holder)
        found[none] = 0
        return np.where(none, -1, origin[found])
