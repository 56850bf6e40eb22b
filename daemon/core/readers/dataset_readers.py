"""The readers of one dataset, and the eviction policy that suits their plans. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from creel.daemon.core.admission import Admission
from creel.daemon.core.readers.planned_job import PlannedJob, clocks
from creel.daemon.core.readers.sessions import JobGroup, RankStream
from creel.daemon.core.residency import ONE, Residency
from creel.messages import Open
from creel.policies.arrays import Index, Mask, some, unique
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.cluster.homes import Homes, memory_of
from creel.policies.cluster.job_order import JobOrder, SampleObjects
from creel.policies.cluster.jobs import DealtJob
from creel.policies.cluster.scheme import scheme_of
from creel.policies.eviction.context import PlanningTask
from creel.policies.eviction.policy import RESIDENT, STORED, NoEviction
from creel.policies.next_use import NextUses
from creel.policies.policy_for import Readers, policy_for
from creel.policies.prefetch import Window


class DatasetReaders:
    """The jobs that read one dataset, a group of local ranks each; chooses the eviction policy.

    Writes `groups`, and `policy` and `sessions` of `Residency`, but nothing else there: the
    sessions pin objects, and their events move them.
    """

    def __init__(self, residency: Residency) -> None:
        self.groups: list[JobGroup] = []
        self._residency = residency
        self._seen: tuple[list[ClusterView], Homes] | None = None
        self._alive_memo: tuple[set[SampleObjects], Mask] | None = None

    @property
    def sessions(self) -> Iterator[RankStream]:
        return (s for g in self.groups for s in g.sessions.values())

    def join(self, number: int, asked: Open, now: float, generation: int) -> RankStream:
        """Open a session of a rank, in a group with the other local ranks of its job."""
        job, rank, world = asked.job, asked.rank, asked.world
        for group in self.groups:
            there = group.left.union(group.sessions)  # a loader for each task
            if group.job == job and group.world == world and rank not in there:
                break
        else:
            group = JobGroup(job, world, NextUses(len(self._residency)))
            self.groups.append(group)
        session = RankStream(number, self._residency, group, asked, now, generation)
        group.sessions[rank] = session
        self._count()
        return session

    def leave(self, session: RankStream) -> None:
        """Remove a session, and its group if the session was the last in it."""
        group = session.group
        del group.sessions[session.rank]
        if session.rehearsed is not None:
            group.left.add(session.rank)
        if not group.sessions:
            self.groups.remove(group)
        self._count()

    def _count(self) -> None:
        self._residency.sessions = sum(len(g.sessions) for g in self.groups)

    def give_up_decoded(self, ids: Index) -> None:
        """Evict those of these objects that all readers have decoded: one form of each in a node.

        Not for other nodes, whose plans may name this one; nor what the disk is still to get.
        """
        residency, twins = self._residency, [s.twin for s in self.sessions]
        if any(g.deals.view is not None for g in self.groups):
            return
        leaving = (residency.state[ids] == RESIDENT) & (residency.pins[ids] == 0)
        if residency.disk.column is not None:
            leaving &= residency.disk.state[ids] == STORED
        for twin in twins:
            if twin is None:
                return
            leaving &= twin.has(ids)
        if some(leaving):
            residency.evict(unique(ids[leaving]), "decoded")

    def choose_policy(self) -> None:
        """Choose the eviction policy for the present plans; keep the current one if it suits."""
        residency = self._residency
        groups = [g for g in self.groups if g.planned()]
        if not groups:
            if not self.groups:
                residency.policy = NoEviction(residency.state, residency.pins, [])
            return
        residency.policy = policy_for(
            residency.policy, self._described(groups), residency.state, residency.pins
        )
        residency.policy.stored = residency.disk.column

    def _described(self, groups: list[JobGroup]) -> Readers:
        """Describe the jobs with planned steps, of which there are some."""
        residency = self._residency
        first = next(iter(groups[0].sessions.values()))
        views = [g.deals.view for g in groups if g.deals.view is not None]
        unplanned = all(s.unplanned for g in groups for s in g.sessions.values())
        dealt, once, alive = _dealt(groups), groups[0].once(), self._alive()
        merged = len(groups) > 1 or alive is not None
        by_hash = any(residency.name in view.by_hash for view in views)
        scheme = scheme_of(
            len(groups),
            peers=bool(views),
            dealt=dealt is not None if merged else not groups[0].deals.followed,
            by_hash=by_hash,
            once=once,
            unplanned=unplanned,
            together=residency.nbytes <= memory_of(views),
            rehearses=alive is not None,
        )
        one_order = len(groups) == 1 and dealt is not None and not by_hash and not unplanned
        readers = residency.first_readers if one_order and alive is not None else None
        return Readers(
            [g.uses for g in groups],
            lambda: clocks(groups),
            unplanned=unplanned,
            once=once,
            epoch=first.stream.epoch(first.cursors.done)[0] + first.epoch_shift,
            deals=groups[0].deals,
            scheme=scheme,
            homes=self._homes(views, readers) if scheme.by_home else None,
            dealt=dealt,
            alive=alive,
        )

    def _alive(self) -> Mask | None:
        """Return (n,) which objects jobs that rehearse may read again; None without such jobs."""
        rehearsed = {s.rehearsed for s in self.sessions if s.rehearsed is not None}
        if not rehearsed:
            self._alive_memo = None
        elif self._alive_memo is None or self._alive_memo[0] != rehearsed:
            alive = np.zeros(len(self._residency), np.bool_)
            for samples in rehearsed:
                alive[samples.objects] = True
            self._alive_memo = rehearsed, alive
        return None if self._alive_memo is None else self._alive_memo[1]

    def _homes(self, views: list[ClusterView], readers: FirstReaders | None) -> Homes:
        """Return the homes of objects at these nodes."""
        if readers is not None:
            readers.seen(views[0])
        if self._seen is None or self._seen[0] != views or self._seen[1].first is not readers:
            self._seen = views, Homes(views, readers)
        return self._seen[1]

    def dealt(self, session: RankStream, epoch: int, order: JobOrder, view: ClusterView) -> None:
        """Note how an epoch of a session's job is dealt to all ranks."""
        if session.rehearsed is not None:
            self._first_readers().dealt(epoch, order, view)
        self.choose_policy()

    def followed(self, session: RankStream) -> None:
        """Note that not all nodes know the order of a session's job."""
        if session.rehearsed is not None:
            self._first_readers().followed()
        self.choose_policy()

    def _first_readers(self) -> FirstReaders:
        residency = self._residency
        if residency.first_readers is None:
            residency.first_readers = FirstReaders(residency.name, len(residency))
        return residency.first_readers

    def shared_with_others(self, cluster: str) -> bool:
        """Return whether this node reads the dataset for this cluster and for a job elsewhere."""
        sets = {g.deals.view.cluster: set(g.deals.view.names) for g in self.groups if g.deals.view}
        mine = sets.get(cluster)
        alone = any(g.deals.view is None and len(g.sessions) == g.world for g in self.groups)
        return mine is not None and (alone or any(other != mine for other in sets.values()))

    def planning_task(self, admission: Admission, window: Window) -> PlanningTask | None:
        """Return the retention plan to compute outside the loop, if the policy wants one."""
        if not self.groups:
            return None
        first = self._residency.first_readers
        if first is not None and (task := first.task()) is not None:
            return task
        job = PlannedJob(self._residency, self.groups[0], admission, window)
        return self._residency.policy.planning_task(job)

    def planned(self, task: PlanningTask, plan: object) -> None:
        """Take the answer to a planning task."""
        first, policy = self._residency.first_readers, self._residency.policy
        if first is not None and first.planned(task, plan):
            policy.stale = True
        else:
            policy.retention_planned(task, plan)

    def pins(self) -> NDArray[np.int32]:
        """Return (n,) how many pins the sessions have on each object."""
        pins = np.zeros(len(self._residency), np.int32)
        for s in self.sessions:
            np.add.at(pins, s.pinned(), ONE)
        return pins

    def check(self) -> None:
        """Raise IllegalEventError unless the cursors of all sessions are consistent."""
        for s in self.sessions:
            s.cursors.check(s.stream, s.id)

    def rebuild(self) -> None:
        """Rebuild next uses and eviction policy from the plans, after `Residency.rebuild`."""
        self.groups = [g for g in self.groups if g.sessions]
        self._count()
        for group in self.groups:
            group.replan()
        self._residency.policy = NoEviction(self._residency.state, self._residency.pins, [])
        self.choose_policy()


def _dealt(groups: list[JobGroup]) -> list[DealtJob] | None:
    """Return how each job deals its epochs to all ranks, or None if that is not known of all."""
    if any(g.deals.followed or not g.deals.orders or g.deals.view is None for g in groups):
        return None
    return [DealtJob(g.uses, g.deals, g.clock) for g in groups]
