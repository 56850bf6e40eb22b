"""Which node read each object first, in a job that rehearses: that node keeps it. Pure.

Of what no epoch has read yet no node has anything, and all nodes know how the job's epochs are
dealt. So they all know who reads an object first. That node reads it from the source, without
asking a peer, and is its home from then on, in place of the one by hash (`homes`). Rows that a job
replays were read by its earlier loaders, or else have their homes by hash.

A daemon that was restarted knows no first readers, and one that joined late may know others than
its peers: it asks a peer, as for a plan (`shared_plan`). An error costs a read of the source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ids, Index, Ints, Mask, every
from creel.policies.cluster import placement
from creel.policies.cluster.boundary import SOURCE, ClusterView
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.shared_plan import PlanDigest, SharedPlan, digest
from creel.policies.eviction.context import PlanningTask


@dataclass(frozen=True, eq=False)
class FirstReadsTask:
    """Find out, outside the event loop, which node reads each object in an epoch.

    Args:
        epoch: its number.
        order: of the epoch, without replays.
        objects: of the dataset.
        view: the nodes.
    """

    epoch: int
    order: JobOrder
    objects: int
    view: ClusterView

    def plan(self) -> placement.Uses:
        """Return which node reads each object, and when."""
        nodes = self.view.nodes.tolist()
        sizes = {"objects": self.objects, "nodes": len(self.view.names)}
        return placement.uses_of(self.order.by_rank(nodes), nodes, self.order.batch, **sizes)


class FirstReaders:
    """The first readers of a dataset's objects; takes five bytes for each.

    Attributes:
        view: the nodes, as this one sees them; None before a job is known.
        waits: whether reading ahead waits until a peer says who reads what first.
    """

    def __init__(self, dataset: str, objects: int) -> None:
        self.view: ClusterView | None = None
        self.waits = False
        self._dataset = dataset
        self._known = np.zeros(objects, np.bool_)  # whether the home of each object is known
        self._node = np.zeros(objects, np.uint16)  # its first reader + 1; 0: its home is by hash
        #: The latest epoch that reads objects first; of these, after what part of it.
        self._present: tuple[FirstReadsTask, NDArray[np.uint16]] | None = None
        self._samples: int | None = None  # a number by which nodes know what the job reads
        self._reads: Ids | slice = slice(0)  # what that is
        self._unplanned: list[FirstReadsTask] = []  # the first of them is asked for
        self._asked = False  # whether the first of these is being computed
        self._astray = False  # whether a peer must say who reads what first
        self._digest: int | None = None  # of all homes, once asked for

    # --- who reads what first --------------------------------------------------------------------

    def dealt(self, epoch: int, order: JobOrder, view: ClusterView) -> None:
        """Note how an epoch of a job that rehearses is dealt to all ranks."""
        self.seen(view)
        object_of = order.object_of
        self._samples = 0 if object_of is None else object_of.digest
        self._reads = slice(None) if object_of is None else object_of.objects
        new = slice(None) if object_of is None else object_of.objects[: order.samples]
        task = FirstReadsTask(epoch, order._replace(replays=None), len(self._known), view)
        present = self._present
        if present is not None and present[0].epoch == epoch and present[0].order != task.order:
            self._present = None  # that was of another loader
        waiting = [other.order for other in self._unplanned]
        if task.order not in waiting and not every(self._known[new]):
            self._unplanned.append(task)
        if object_of is not None and order.replays is not None:
            known = self._known[new]
            self._known[object_of.objects[order.samples :]] = True
            self._known[new] = known

    def followed(self) -> None:
        """Note that a job reads in an order that not all nodes know: all objects have homes."""
        self._known[:] = True
        self._unplanned, self._asked = [], False

    def seen(self, view: ClusterView) -> None:
        """Note the nodes as they are now. What nodes have read that are not among them is lost."""
        before = self.view
        self.view = view
        if before is None:
            self._astray = self.waits = view.again
        elif before.names != view.names:
            number = {name: node + 1 for node, name in enumerate(view.names)}
            now = np.array([0, *(number.get(name, 0) for name in before.names)], np.uint16)
            self._node = now[self._node]
            self._unplanned, self._asked, self._digest = [], False, None
            self._present = None

    def task(self) -> FirstReadsTask | None:
        """Return what to find out next, or None."""
        if self._asked or self._astray or not self._unplanned:
            return None
        self._asked = True
        return self._unplanned[0]

    def planned(self, task: PlanningTask, uses: object) -> bool:
        """Take the answer to a planning task; return whether it was the latest one from here."""
        if not self._unplanned or task is not self._unplanned[0]:
            return False
        if not isinstance(uses, placement.Uses):
            return False
        asked = self._unplanned.pop(0)
        self._asked = False
        first = (uses.owner != placement.nobody(uses.owner)) & ~self._known
        self._node[first] = uses.owner[first].astype(np.uint16) + np.uint16(1)
        self._known |= first
        self._present = asked, np.where(first, uses.when, np.uint16(0))
        self._digest = None
        return True

    def inherit(self, old: FirstReaders) -> None:
        """Take over what is known of a dataset with which this one begins; it was read before."""
        n = len(old._known)
        if self.view is None:
            self.view = old.view
        elif old.view is not None:
            old.seen(self.view)
        self._node[:n] = np.where(old._node > 0, old._node, self._node[:n])
        self._known[:n] |= old._known
        self._digest = None

    # --- where objects are -----------------------------------------------------------------------

    def origins(self, ids: NDArray[np.integer], home: Ints) -> Ints:
        """Return (k,) the peer to ask for each object, or SOURCE.

        home: (k,) its home by hash: a peer, or SOURCE if that is this node.
        """
        if self.view is None:
            return home
        elsewhere = self._elsewhere(ids)
        home = np.where(elsewhere, self.view.origin[self._reader(ids)], home)
        return np.where(self._here(ids) | ~self._known[ids], SOURCE, home)

    def asked(self, ids: NDArray[np.integer], home: Mask) -> Mask:
        """Return (k,) whether peers ask this node for each object; home: if it is home by hash."""
        return home if self.view is None else home & ~self._elsewhere(ids) | self._here(ids)

    def awaited(self, ids: Index, epoch: int, left: int) -> Mask | None:
        """Return (k,) whether each object's first reader is not known, or has yet to read it.

        It reads an object in the epoch before, at about the pace of this node; None: all have.

        Args:
            epoch: the epoch that reads the objects.
            left: steps that the ranks of this node have left of the epoch before.
        """
        if self.waits:
            return np.ones(len(ids), np.bool_)
        later = None
        if self._unplanned and epoch > self._unplanned[0].epoch:
            later = ~self._known[ids]
        if left > 0 and self._present is not None and self._present[0].epoch == epoch - 1:
            task, when = self._present
            done = (task.order.steps - left) * placement.EPOCH // task.order.steps
            unread = when[ids] > done
            later = unread if later is None else later | unread
        return later

    def _reader(self, ids: NDArray[np.integer]) -> Ints:
        """Return (k,) the first reader of each object, or -1."""
        reader: Ints = self._node[ids].astype(np.int64) - 1
        return reader

    def _here(self, ids: NDArray[np.integer]) -> Mask:
        assert self.view is not None  # noqa: S101  for mypy
        here: Mask = self._reader(ids) == self.view.me
        return here

    def _elsewhere(self, ids: NDArray[np.integer]) -> Mask:
        """Return (k,) whether a peer that can be asked has read each object first."""
        assert self.view is not None  # noqa: S101  for mypy
        reader = self._reader(ids)
        elsewhere: Mask = (reader >= 0) & (self.view.origin[reader] != SOURCE)
        return elsewhere

    # --- what nodes tell each other --------------------------------------------------------------

    @property
    def lacks(self) -> int | None:
        """The number of what the job reads, if a peer must say who reads it first; else None."""
        return self._samples if self._astray else None

    @property
    def digest(self) -> PlanDigest | None:
        """Of all first readers, which must be the same on all nodes; None while they change."""
        if self._samples is None or self._astray or self._unplanned:
            return None
        if self._digest is None:
            self._digest = digest(self._node) if self._node.any() else 0
        return PlanDigest(self._dataset, self._samples, self._digest)

    def doubt(self, seed: int) -> None:
        """Note that other nodes know other first readers of what this job reads: ask them."""
        if seed == self._samples:
            self._astray = self.waits = True

    def share(self, seed: int) -> SharedPlan | None:
        """Return the first readers of what a job reads, or None."""
        if self.view is None or self.digest is None or seed != self._samples:
            return None
        nodes = len(self.view.names)
        dtype = placement.node_type(nodes)
        holder = np.full(len(self._node), np.iinfo(dtype).max, dtype)
        known = self._node > 0
        holder[known] = self._node[known] - np.uint16(1)
        return SharedPlan(seed, nodes, holder)

    def take_plan(self, plan: SharedPlan) -> None:
        """Take over the first readers that a peer knows, if this node lacks them."""
        view, holder = self.view, plan.holder
        if view is None or holder is None or plan.seed != self.lacks:
            return
        if plan.nodes != len(view.names) or len(holder) != len(self._node):
            return
        known = holder != placement.nobody(holder)
        self._node = np.where(known, holder.astype(np.uint16) + np.uint16(1), np.uint16(0))
        self._known |= known
        self._known[self._reads] = True  # what has no first reader has its home by hash
        self._unplanned, self._asked, self._digest = [], False, None
        self.insist()

    def insist(self) -> None:
        """Go on with what this node knows: no peer knows more."""
        self._astray = self.waits = False
