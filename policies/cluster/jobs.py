"""Several jobs on one dataset over the same nodes: their plans are one (law L4). Pure.

Each object has a home among the nodes, as in `homes`; what stays there is what any rank of any job
reads soonest. Every node knows how each job's epochs are dealt to all ranks, so a home needs nobody
to tell it who will ask for what, and when: together the memories do what one memory would by
farthest next use over the merged plans (MIN, Belady 1966), each for the objects at home there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Index, Ints, Mask, joined
from creel.policies.cluster.boundary import ClusterBoundary, Deals, Placed
from creel.policies.cluster.homes import FOR_PEERS, Homes
from creel.policies.cluster.job_order import JobOrder
from creel.policies.eviction.candidates import Sorted
from creel.policies.eviction.farthest import FarthestNextUse, soonest
from creel.policies.eviction.recent import ReleaseLog
from creel.policies.eviction.retention import EpochBoundary, Kept
from creel.policies.next_use import NEVER, NextUses

if TYPE_CHECKING:  # circular import
    from creel.policies.eviction.planned import PlanningContext

#: All residents are sorted again after this part (1/n) of an epoch: reads on other nodes show in
#: nothing but the time.
_SORT_AGAIN_PART = 16
#: This part (1/n) of the memory may hold what is read ahead.
_AHEAD_PART = 32
#: Epochs of each job that are looked at: the present one, and the next.
_EPOCHS = 2
#: In `FirstReads`, of an object that no rank reads in that epoch; an epoch has fewer units.
_UNREAD = int(np.iinfo(np.uint16).max)


class DealtJob(NamedTuple):
    """What a node knows of one job; live views.

    Args:
        uses: of the ranks here, for the steps with which epochs begin.
        deals: how epochs are dealt to all ranks.
        clock: steps that the ranks here have done.
    """

    uses: NextUses
    deals: Deals
    clock: Callable[[], int]

    @property
    def orders(self) -> dict[int, tuple[int, JobOrder]]:
        """First step and order of the present epoch and the next, as far as they are known."""
        known = sorted(e for e in self.deals.orders if self.uses.knows(e))[:_EPOCHS]
        return {e: (self._begins(e), self.deals.orders[e]) for e in known}

    def _begins(self, epoch: int) -> int:
        """First step of an epoch; of a plan that was cut, `uses` has only what is left of it."""
        if self.uses.knows(epoch + 1):
            return self.uses.span(epoch + 1)[0] - self.deals.orders[epoch].steps
        return self.uses.span(epoch)[0]


class FirstReads(NamedTuple):
    """An epoch: its first step, and (n,) after how many times `unit` steps some rank reads each.

    2 bytes per object; `_UNREAD`: no rank does.
    """

    base: int
    unit: int
    after: NDArray[np.uint16]

    def steps(self, ids: Index) -> Ints:
        """(k,) the first step that reads each object, NEVER where none does."""
        after = self.after[ids]
        return np.where(after == _UNREAD, NEVER, self.base + self.unit * after.astype(np.int64))


class JobsReads(NamedTuple):
    """What a `JobsTask` gives: the epochs of each job."""

    jobs: list[dict[int, FirstReads]]


@dataclass(frozen=True, eq=False)
class JobsTask:
    """Planned outside the loop: when an epoch of each job reads each object.

    Args:
        objects: of the dataset; nodes: (ranks,) the node of each rank, for each job.
        orders: for each job, its epochs as in `DealtJob.orders`.
    """

    objects: int
    nodes: list[list[int]]
    orders: list[dict[int, tuple[int, JobOrder]]]

    def plan(self) -> JobsReads:
        """When each epoch reads what; takes some 0.1 s for a million objects and epoch."""
        jobs = zip(self.nodes, self.orders, strict=True)
        return JobsReads(
            [
                {e: self._first(base, order, on) for e, (base, order) in known.items()}
                for on, known in jobs
            ]
        )

    def _first(self, base: int, order: JobOrder, nodes: list[int]) -> FirstReads:
        first = np.full(self.objects, _UNREAD, np.uint16)
        unit = -(-order.steps // _UNREAD)
        steps = (np.arange(order.each) // order.batch // unit).astype(np.uint16)
        for ids in order.by_rank(nodes):
            # backwards: where an object comes twice, its first read is written last
            first[ids[::-1]] = np.minimum(first[ids], steps)[::-1]
        return FirstReads(base, unit, first)


#: What policies have planned outside the loop, and what comes back.
PlanningTask: TypeAlias = EpochBoundary | ClusterBoundary | JobsTask
RetentionPlan: TypeAlias = Kept | Placed | JobsReads


class MergedUses:
    """When any rank of any job reads each object next, on a common clock."""

    def __init__(self, objects: int) -> None:
        self.jobs: list[list[FirstReads]] = []
        self.clocks: list[tuple[float, float]] = []  # (a, b): step s is at common time a * s + b
        self.done: list[int] = []  # steps of each job
        self._read = np.zeros(objects, np.int32)  # reads before this common time are over

    def due(self, ids: Index) -> Ints:
        """(k,) common time of the next read; far away where none is known."""
        read, times = self._read[ids], []
        for epochs, (a, b), done in zip(self.jobs, self.clocks, self.done, strict=True):
            since = np.maximum(np.floor((read - b) / a), done)
            due = np.full(len(ids), a * self._beyond(epochs) + b)
            for epoch in reversed(epochs):
                first = epoch.steps(ids)
                due = np.where((first < NEVER) & (first >= since), a * first + b, due)
            times.append(due)
        return soonest(times, len(ids), NEVER)

    @staticmethod
    def _beyond(epochs: list[FirstReads]) -> float:
        """The middle of the epoch after those that are known."""
        if len(epochs) < _EPOCHS:
            return float(NEVER)
        return epochs[-1].base + 1.5 * (epochs[-1].base - epochs[-2].base)

    def was_read(self, ids: Index) -> None:
        """Note that the next read of each object is over."""
        self._read[ids] = np.minimum(self.due(ids) + 1, NEVER)

    def forget(self) -> None:
        """The common clock is another one."""
        self._read[:] = 0


class HomesFarthest(FarthestNextUse):
    """Keeps what this node is home of and any job reads soonest; all else leaves before that.

    Args:
        jobs: what is known of each; clock: see `FarthestNextUse`.
    """

    name = "homes-far"
    reads_for_peers = True

    def __init__(
        self,
        state: NDArray[np.uint8],
        pins: NDArray[np.int32],
        jobs: list[DealtJob],
        clock: Callable[[], list[tuple[float, float]]],
        homes: Homes,
    ) -> None:
        self._merged = MergedUses(len(state))
        super().__init__(state, pins, [job.uses for job in jobs], clock)
        self.homes: Homes = homes
        self._jobs = jobs
        self._guests = ReleaseLog(len(state))  # at home elsewhere
        self._known: list[dict[int, FirstReads]] = [{} for _ in jobs]
        self._asking: JobsTask | None = None
        self._again = 0  # time of the first job at which all are sorted again

    def read_ahead_room(self, room: float) -> float:
        """A small part."""
        return room / _AHEAD_PART

    # --- the jobs' orders ------------------------------------------------------------------------

    def planning_task(self, context: PlanningContext) -> JobsTask | None:  # noqa: ARG002
        """Ask for the orders that are not known yet."""
        wanted = [job.orders for job in self._jobs]
        new = [
            {e: order for e, order in orders.items() if e not in known}
            for orders, known in zip(wanted, self._known, strict=True)
        ]
        if self._asking is not None or not any(new):
            return None
        views = [job.deals.view for job in self._jobs]
        nodes = [[] if view is None else view.nodes.tolist() for view in views]
        self._asking = JobsTask(len(self._state), nodes, new)
        return self._asking

    def retention_planned(self, task: PlanningTask, plan: RetentionPlan) -> None:
        """Take the orders, if they are those of the latest task."""
        if task is not self._asking or not isinstance(plan, JobsReads):
            return
        self._asking = None
        for known, new in zip(self._known, plan.jobs, strict=True):
            known.update(new)
        self.stale = True

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        for job, known in zip(self._jobs, self._known, strict=True):
            if job.uses is uses:
                job.deals.forget(epoch)
                for old in [e for e in known if e < epoch]:
                    del known[old]
        self.stale = True

    def replanned(self) -> None:
        super().replanned()
        self._merged.forget()
        self._known = [{} for _ in self._jobs]

    # --- who stays -------------------------------------------------------------------------------

    def relist(self) -> None:
        """Sort all residents again: plans or the jobs' speeds have changed."""
        self._merged.jobs = [[known[e] for e in sorted(known)] for known in self._known]
        self._merged.clocks = self._clock()
        self._merged.done = [job.clock() for job in self._jobs]
        spans = [job.uses.end - job.clock() for job in self._jobs]
        self._again = self._jobs[0].clock() + max(max(spans) // _SORT_AGAIN_PART // _EPOCHS, 1)
        self._guests.clear()
        super().relist()

    def _sorted(self, objects: int) -> Sorted:
        return Sorted(objects, partial(MergedUses.due, self._merged))

    def due(self, ids: Index) -> Ints:
        """(k,) common time of each object's next use."""
        if self.stale:
            self.relist()
        return self._merged.due(ids)

    def sent(self, ids: Index) -> None:
        if not self.stale:
            self._merged.was_read(ids)

    def _list(self, ids: Index) -> None:
        mine = self.homes.mine(ids)
        self._pool.add(ids[mine])
        self._guests.add(ids[~mine])

    def keeps(self, ids: Index) -> Mask:
        """(k,) whether each is worth a place on this node's disk: what it is home of."""
        return self.homes.mine(ids)

    def unneeded(self, k: int, step: int) -> Index:  # noqa: ARG002
        """Up to k distinct objects that are at home elsewhere."""
        if self.stale or self._jobs[0].clock() >= self._again:
            self.relist()
        return self._guests.take(k, self._leaving)

    def victims(self, k: int, step: int) -> Index:
        """Up to k distinct objects to evict for `step`, all due later than that."""
        found = self.unneeded(k, step)
        if len(found) >= k:
            return found
        step = self._jobs[0].clock() if step == FOR_PEERS else step
        return joined([found, super().victims(k - len(found), step)])
