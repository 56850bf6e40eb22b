"""Several jobs on one dataset over the same nodes: their plans are merged (law L4). Pure.

Each object has a home among the nodes, as in `homes`. Of the objects at home there, a node keeps
those that any rank of any job reads soonest. Every node knows how each job deals its epochs to all
ranks, so no node needs to be told which objects others will ask for, and when. Together the
memories do what one memory would do by farthest next use over the merged plans (MIN, Belady 1966).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Floats, Index, Ints, Mask, joined, unique
from creel.policies.cluster.boundary import Deals
from creel.policies.cluster.homes import FOR_PEERS, Homes
from creel.policies.cluster.job_order import JobOrder
from creel.policies.eviction.candidates import Sorted
from creel.policies.eviction.context import PlanningContext, PlanningTask
from creel.policies.eviction.farthest import FarthestNextUse, soonest
from creel.policies.eviction.recent import ReleaseLog
from creel.policies.next_use import NEVER, NextUses

#: All residents are sorted again after this part (1/n) of an epoch: reads on other nodes are not
#: reported, but follow from the time.
_SORT_AGAIN_PART = 16
#: Part (1/n) of the memory for objects read ahead.
_AHEAD_PART = 32
#: Most epochs of each job that are merged: the present one, the next, and one more for rehearsals.
_EPOCHS = 3
#: Common time at which an object is due that no job will read: after all others.
_DEAD = NEVER + 1
#: In `FirstReads`: no rank reads the object in that epoch. Epochs have fewer units.
_UNREAD = int(np.iinfo(np.uint16).max)
_LOW = (1 << 32) - 1


class DealtJob(NamedTuple):
    """What a node knows of one job; live views.

    Args:
        uses: next uses by the ranks here, for the first steps of epochs.
        deals: how epochs are dealt to all ranks.
        clock: returns the steps that the ranks here have done.
    """

    uses: NextUses
    deals: Deals
    clock: Callable[[], int]

    @property
    def orders(self) -> dict[int, tuple[int, JobOrder]]:
        """First step and order of the present epoch and later ones, as far as they are known."""
        known = sorted(e for e in self.deals.orders if self.uses.knows(e))[:_EPOCHS]
        return {e: (self._begins(e), self.deals.orders[e]) for e in known}

    def _begins(self, epoch: int) -> int:
        """Return the first step of an epoch; after a plan was cut, `uses` has only its rest."""
        if self.uses.knows(epoch + 1):
            return self.uses.span(epoch + 1)[0] - self.deals.orders[epoch].steps
        return self.uses.span(epoch)[0]


class FirstReads(NamedTuple):
    """The first reads of an epoch by any rank, 2 bytes per object, and those of replayed rows.

    Args:
        base: first step of the epoch.
        after: (n,) how many times `unit` steps later each object is read, or `_UNREAD`.
        again: (m,) object << 32 | units of further reads, ascending.
    """

    base: int
    unit: int
    after: NDArray[np.uint16]
    again: Ints

    def steps(self, ids: Index) -> Ints:
        """Return (k,) the first step that reads each object, or NEVER."""
        after = self.after[ids]
        return np.where(after == _UNREAD, NEVER, self.base + self.unit * after.astype(np.int64))

    def steps_since(self, ids: Index, since: Floats) -> Ints:
        """Return (k,) the first step from `since` (k,) on that reads each object, or NEVER."""
        steps = self.steps(ids)
        over = (steps < since).nonzero()[0]
        steps[over] = NEVER
        if len(over) and len(self.again):
            units = np.ceil((since[over] - self.base) / self.unit).astype(np.int64)
            at = self.again.searchsorted((ids[over] << 32) | units)
            entries = self.again[np.minimum(at, len(self.again) - 1)]
            there = (at < len(self.again)) & (entries >> 32 == ids[over])
            steps[over[there]] = self.base + self.unit * (entries[there] & _LOW)
        return steps


class JobsReads(NamedTuple):
    """The result of a `JobsTask`: the first reads of each job's epochs."""

    jobs: list[dict[int, FirstReads]]


@dataclass(frozen=True, eq=False)
class JobsTask:
    """Find out, outside the event loop, when an epoch of each job reads each object.

    Args:
        objects: number of objects; nodes: for each job, (ranks,) the node of each rank.
        orders: for each job, its epochs as in `DealtJob.orders`.
    """

    objects: int
    nodes: list[list[int]]
    orders: list[dict[int, tuple[int, JobOrder]]]

    def plan(self) -> JobsReads:
        """Return when each epoch reads what; takes 0.1 s per epoch and million objects."""
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
        reads = np.diff(order.ends, prepend=0)
        steps = (np.arange(order.steps) // unit).astype(np.uint16).repeat(reads)
        ranks = order.by_rank(nodes)
        for ids in ranks:
            # backwards, so that the first read of an object that comes twice is written last
            first[ids[::-1]] = np.minimum(first[ids], steps)[::-1]
        again = [np.empty(0, np.int64)]
        for ids in ranks if order.replays is not None else []:
            later = steps > first[ids]
            again.append((ids[later].astype(np.int64) << 32) | steps[later])
        return FirstReads(base, unit, first, unique(np.concatenate(again)))


class MergedUses:
    """When any rank of any job reads each object next, on a common clock."""

    def __init__(self, objects: int) -> None:
        self.jobs: list[list[FirstReads]] = []
        self.clocks: list[tuple[float, float]] = []  # (a, b): step s is at common time a * s + b
        self.done: list[int] = []  # steps of each job
        self.alive: Mask | None = None  # (n,) as in `EvictionPolicy`
        self._read = np.zeros(objects, np.int32)  # reads before this common time are done

    def due(self, ids: Index) -> Ints:
        """Return (k,) common time of each object's next read; far away if none is known."""
        read, times = self._read[ids], []
        for epochs, (a, b), done in zip(self.jobs, self.clocks, self.done, strict=True):
            since = np.maximum(np.floor((read - b) / a), done)
            due = np.full(len(ids), a * self._beyond(epochs) + b)
            if self.alive is not None:
                due[~self.alive[ids]] = _DEAD
            for epoch in reversed(epochs):
                step = epoch.steps_since(ids, since)
                due = np.where(step < NEVER, a * step + b, due)
            times.append(due)
        return soonest(times, len(ids), _DEAD)

    @staticmethod
    def _beyond(epochs: list[FirstReads]) -> float:
        """Return the middle of the first epoch that is not known."""
        if len(epochs) < 2:
            return float(NEVER)
        return epochs[-1].base + 1.5 * (epochs[-1].base - epochs[-2].base)

    def was_read(self, ids: Index) -> None:
        """Note that the next read of each object is done."""
        self._read[ids] = np.minimum(self.due(ids) + 1, NEVER)

    def clear(self) -> None:
        """Forget all reads, as the common clock has changed."""
        self._read[:] = 0


class HomesFarthest(FarthestNextUse):
    """Keeps objects that this node is home of and some job reads soonest; others leave first.

    Args:
        jobs: what is known of each job; clock: as in `FarthestNextUse`.
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
        self._guests = ReleaseLog(len(state))  # residents at home elsewhere
        self._known: list[dict[int, FirstReads]] = [{} for _ in jobs]
        self._asking: JobsTask | None = None
        self._again = 0  # step of the first job at which all are sorted again

    def read_ahead_room(self, room: float) -> float:
        """Return a small part of the room."""
        return room / _AHEAD_PART

    # --- the jobs' orders ------------------------------------------------------------------------

    def planning_task(self, context: PlanningContext) -> JobsTask | None:  # noqa: ARG002
        """Return a task for the orders whose first reads are not known yet, or None."""
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

    def retention_planned(self, task: PlanningTask, plan: object) -> None:
        """Take the first reads, if they answer the latest task."""
        if task is not self._asking or not isinstance(plan, JobsReads):
            return
        self._asking = None
        for known, new in zip(self._known, plan.jobs, strict=True):
            known.update(new)
        self.stale = True

    def epoch_began(self, uses: NextUses, epoch: int) -> None:
        for job, known in zip(self._jobs, self._known, strict=True):
            if job.uses is uses:
                job.deals.drop_before(epoch)
                for old in [e for e in known if e < epoch]:
                    del known[old]
        self.stale = True

    def replanned(self) -> None:
        super().replanned()
        self._merged.clear()
        self._known = [{} for _ in self._jobs]

    # --- eviction --------------------------------------------------------------------------------

    def relist(self) -> None:
        """Sort all residents again, as plans or the jobs' speeds have changed."""
        self._merged.jobs = [[known[e] for e in sorted(known)] for known in self._known]
        self._merged.alive = self.alive
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
        """Return (k,) whether each object is worth a place on disk: if this node is its home."""
        return self.homes.mine(ids)

    def unneeded(self, k: int, step: int) -> Index:  # noqa: ARG002
        """Return up to k distinct objects that are at home elsewhere."""
        if self.stale or self._jobs[0].clock() >= self._again:
            self.relist()
        return self._guests.take(k, self._leaving)

    def victims(self, k: int, step: int) -> Index:
        """Return up to k distinct objects to evict for `step`, all due later."""
        victims = self.unneeded(k, step)
        if len(victims) >= k:
            return victims
        step = self._jobs[0].clock() if step == FOR_PEERS else step
        return joined([victims, super().victims(k - len(victims), step)])
