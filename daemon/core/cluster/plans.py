"""Passes news of the nodes and of their plans to each dataset, and asks for plans. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from creel.daemon.core import events
from creel.daemon.core.readers.dataset_readers import DatasetReaders
from creel.daemon.core.residency import Residency
from creel.policies.cluster.boundary import SOURCE
from creel.policies.cluster.eviction import ClusterEviction
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.cluster.shared_plan import PlanDigest
from creel.policies.policy_for import joint

#: Longest time that reading ahead waits for a peer to say who holds what, in seconds.
_PATIENCE_S = 2.0
#: Pause after all peers were asked in vain, as they may be about to begin this node's epoch.
_ASK_AGAIN_S = 1.0
#: Times that all peers are asked.
_ROUNDS = 2


@dataclass
class _Question:
    """A plan that this node asks its peers for, one after the other.

    Args:
        seed: `JobOrder.mark` of the epoch.
        since: time of the first request; again: time before which nobody is asked.
        vain: peers that were asked in vain.
        pending: whether a peer is being asked.
    """

    seed: int
    since: float
    again: float = 0.0
    vain: int = 0
    pending: bool = False


class ClusterPlans:
    """The plans that this node shares with other nodes."""

    def __init__(
        self,
        residencies: Mapping[str, Residency],
        readers: Mapping[str, DatasetReaders],
        emit: Callable[[events.Action], None],
    ) -> None:
        self._residencies = residencies
        self._readers = readers
        self._emit = emit
        self._questions: dict[str, _Question] = {}  # by dataset

    def changed(self, e: events.ClusterChanged) -> None:
        """Apply the new view of a cluster some of whose nodes are silent, or answer again."""
        for readers in self._readers.values():
            for group in readers.groups:
                if group.deals.view is not None and group.deals.view.cluster == e.cluster:
                    group.deals.view = e.view
            readers.choose_policy()

    def shared(self, e: events.PlanShared) -> None:
        question, policy = self._questions.get(e.dataset), self._policy(e.dataset)
        if policy is not None and e.plan is not None:
            policy.take_plan(e.plan)
            self._residencies[e.dataset].policy.stale = True
        if question is not None and question.seed == e.seed:
            question.pending = False
            question.vain += policy is None or policy.lacks == e.seed

    def doubted(self, e: events.PlanDoubted) -> None:
        policy = self._policy(e.dataset)
        if policy is not None:
            policy.doubt(e.seed)

    def asked(self, e: events.PlanAsked) -> None:
        policy = self._policy(e.dataset)
        self._emit(events.SharePlan(e.request, None if policy is None else policy.share(e.seed)))

    def ask(self, residency: Residency, now: float) -> None:
        """Ask the peers, the lowest first, for a plan that this node lacks; until one knows it.

        If none of them does, this node goes on with what it knows.
        """
        policy = joint(residency.policy)
        seed = None if policy is None else policy.lacks
        if policy is None or seed is None:
            self.remove(residency.name)
            if policy is not None:
                policy.waits = False
            return
        question = self._questions.get(residency.name)
        if question is None or question.seed != seed:
            question = self._questions[residency.name] = _Question(seed, now)
        view = policy.view
        peers = [] if view is None else [x for x in view.origin.tolist() if x != SOURCE]
        policy.waits = question.vain < len(peers) and now < question.since + _PATIENCE_S
        if question.pending or not peers or now < question.again:
            return
        rounds, turn = divmod(question.vain, len(peers))
        if rounds >= _ROUNDS:
            policy.insist()
        elif rounds and not turn and not question.again:
            question.again = now + _ASK_AGAIN_S
        else:
            question.pending = True
            self._emit(events.AskPlan(residency.name, peers[turn], seed))

    def remove(self, dataset: str) -> None:
        self._questions.pop(dataset, None)

    def digests(self, cluster: str) -> tuple[PlanDigest, ...]:
        """Return digests of the inputs of this node's plans, which must be equal on all nodes."""
        digests = (policy.digest for policy in self._within(cluster))
        return tuple(digest for digest in digests if digest is not None)

    def by_hash(self, cluster: str) -> frozenset[str]:
        """Return datasets that this node reads for this cluster and for a job on other nodes."""
        readers = self._readers.items()
        return frozenset(
            name for name, of_dataset in readers if of_dataset.shared_with_others(cluster)
        )

    def _within(self, cluster: str) -> Iterator[ClusterEviction | FirstReaders]:
        """Yield the policies of datasets that are planned in this cluster."""
        for residency in self._residencies.values():
            policy = joint(residency.policy)
            view = None if policy is None else policy.view
            if policy is not None and view is not None and view.cluster == cluster:
                yield policy

    def _policy(self, dataset: str) -> ClusterEviction | FirstReaders | None:
        residency = self._residencies.get(dataset)
        return None if residency is None else joint(residency.policy)
