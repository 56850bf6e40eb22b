"""Passes news of members and plans from other nodes of a cluster to each dataset. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from creel.daemon.core import events
from creel.daemon.core.residency import Residency
from creel.policies.cluster.eviction import ClusterEviction
from creel.policies.cluster.members import EpochMoment, PlanDigest

#: Pause before a peer is asked again for a plan that this node has missed, in seconds.
_ASK_AGAIN_S = 1.0


class ClusterPlans:
    """The plans that this node shares with other nodes."""

    def __init__(
        self, residencies: Mapping[str, Residency], emit: Callable[[events.Action], None]
    ) -> None:
        self._residencies = residencies
        self._emit = emit
        self._ask_again: dict[str, float] = {}  # by dataset: time of the next request, in s

    def changed(self, e: events.ClusterChanged) -> None:
        """Apply the new view of a cluster whose nodes have left or come back."""
        for residency in self._residencies.values():
            for group in residency.groups:
                if group.deals.view is not None and group.deals.view.cluster == e.cluster:
                    group.deals.view = e.view
            residency.choose_policy()

    def shared(self, e: events.PlanShared) -> None:
        policy = self._policy(e.dataset)
        if policy is not None:
            policy.adopt(e.plan)

    def doubted(self, e: events.PlanDoubted) -> None:
        policy = self._policy(e.dataset)
        if policy is not None:
            policy.doubt(e.seed)

    def asked(self, e: events.PlanAsked) -> None:
        policy = self._policy(e.dataset)
        self._emit(events.SharePlan(e.request, None if policy is None else policy.share(e.seed)))

    def ask(self, residency: Residency, now: float) -> None:
        """Ask peers, once a second, for the plan of an epoch that began without this node."""
        policy = residency.policy.cluster
        if policy is None or now < self._ask_again.get(residency.name, 0.0):
            return
        seed, view = policy.lacks, policy.deals.view
        if seed is not None and view is not None:
            self._ask_again[residency.name] = now + _ASK_AGAIN_S
            self._emit(events.AskPlan(residency.name, view.cluster, seed))

    def forget(self, dataset: str) -> None:
        self._ask_again.pop(dataset, None)

    def moments(self, cluster: str) -> tuple[EpochMoment, ...]:
        """Return the moments from which nodes of a cluster can follow a change of its members."""
        found = (
            policy.moment(residency.groups[0].clock(), residency.groups[0].step_s())
            for residency, policy in self._within(cluster)
            if residency.groups
        )
        return tuple(moment for moment in found if moment is not None)

    def digests(self, cluster: str) -> tuple[PlanDigest, ...]:
        """Return digests of the inputs of this node's plans, which must be equal on all nodes."""
        found = (policy.digest for _, policy in self._within(cluster))
        return tuple(digest for digest in found if digest is not None)

    def by_hash(self, cluster: str) -> frozenset[str]:
        """Return datasets that this node reads for this cluster and for a job on other nodes."""
        found = (r.name for r in self._residencies.values() if r.shared_with_others(cluster))
        return frozenset(found)

    def _within(self, cluster: str) -> Iterator[tuple[Residency, ClusterEviction]]:
        """Yield the datasets that are planned in this cluster, and their policies."""
        for residency in self._residencies.values():
            policy = residency.policy.cluster
            view = None if policy is None else policy.deals.view
            if policy is not None and view is not None and view.cluster == cluster:
                yield residency, policy

    def _policy(self, dataset: str) -> ClusterEviction | None:
        residency = self._residencies.get(dataset)
        return None if residency is None else residency.policy.cluster
