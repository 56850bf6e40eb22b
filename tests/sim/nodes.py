"""The cores of several nodes on one clock, with the bytes that move between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import Allocator
from creel.daemon.core.cluster.silence import Silence, SilenceLimits
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    DISK,
    SOURCE,
    Action,
    AskPlan,
    Checked,
    CheckVersions,
    ClusterChanged,
    DatasetAdded,
    DiskOpened,
    EpochDealt,
    Event,
    Fetched,
    FetchObjects,
    PeerAsked,
    PeerServed,
    PlanAsked,
    PlanDoubted,
    PlanExtended,
    PlanRetention,
    PlanShared,
    Progressed,
    Publish,
    RetentionPlanned,
    ServeObjects,
    SessionOpened,
    SetReady,
    SharePlan,
    Spilled,
    SpillObjects,
)
from creel.daemon.core.versions import Versions
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.shared_plan import differing
from kit import default_window, lengths_of

_VERSION = 5 << 40 | 1
_CLUSTER = "c"
_STEP_S = 0.1
_APART_S = 1000.0
#: Most reads, writes and plans that may follow from the events of one moment; usual is a tenth.
_MOST_ACTIONS = 10_000


class Nodes:
    """One rank on each node reads epochs of equal objects; all ranks run in step.

    Attributes:
        counts: "source", "disk", "peer", "refused", "checked" and "shared" objects of this epoch;
            "empty": objects asked of a daemon that holds none.
    """

    def __init__(
        self,
        nodes: int,
        order: JobOrder,
        held: float,
        size: int = 1000,
        disk: float = 0.0,
        *,
        remote: bool = False,
        recheck: str = "never",
    ) -> None:
        """`held`: objects that all memories together hold, in datasets; `disk`: those of each disk.

        `remote`: the objects' addresses are not paths; `recheck`: as in `messages.Open`.
        """
        self.order, self.size = order, size
        self.capacity = int(held * order.samples * size / nodes)
        self._disks = [int(disk * order.samples * (size + 64))] * nodes
        self.counts: Counter[str] = Counter()
        self.version = np.full(order.samples, _VERSION)  # of each object at its source
        self._remote, self._recheck = remote, recheck
        self.gone: set[int] = set()  # nodes that answer no peer
        self.late: set[int] = set()  # nodes that hear nothing of the others
        self.dead: set[int] = set()  # nodes that do nothing at all
        self._again: set[int] = set()  # nodes whose daemon was restarted
        #: (a, b): node a does not reach node b; in `noticed`: it knows that.
        self.apart: set[tuple[int, int]] = set()
        self.noticed: set[tuple[int, int]] = set()
        self.chance: np.random.Generator | None = None  # draws the next action; None: in order
        self._now, self._requests = 0.0, 0
        self._queue: deque[tuple[int, Action]] = deque()
        #: By request: the node that waits, its fetch, and since when.
        self._asked: dict[int, tuple[int, FetchObjects, float]] = {}
        self._plans: dict[int, SharePlan] = {}
        self.ready = [0] * nodes
        self.places: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * nodes
        self.cores: list[Core] = []
        self._known = 0  # epochs that the nodes know
        self._began = [0] * nodes  # the epoch with which each core began
        self._skipped = [0] * nodes  # steps of that epoch that it was not told of
        self._next_step = 0  # of the present epoch
        self._limits = SilenceLimits.among(nodes)
        self.silence = [Silence(node, nodes, -10.0, self._limits) for node in range(nodes)]
        for node in range(nodes):
            self.cores.append(Core(Allocator(self.capacity), default_window()))
            self._begin(node)

    def _begin(self, node: int) -> None:
        samples = self.order.samples
        length = self._lengths()
        self.places[node] = np.full(samples, -1, np.int64)
        seen = self.places[node].view()
        seen.flags.writeable = False
        self._now += _STEP_S
        remote = np.full(samples, self._remote)
        added = lengths_of(length), Versions(samples, remote=remote)
        if self._disks[node]:
            self._feed(node, DiskOpened(self._disks[node], 1))
        self._feed(node, DatasetAdded("d", seen, length, *added))
        self._feed(node, SessionOpened(1, "d", "j", node, len(self.cores), self._recheck))

    def _lengths(self) -> NDArray[np.int64]:
        """Return (samples,) bytes of each object."""
        return np.broadcast_to(np.int64(self.size), (self.order.samples,))

    def run(
        self, epochs: int, then: Callable[[], None] = lambda: None, part: float = 0.5
    ) -> list[Counter[str]]:
        """Run further epochs, with `then` after `part` of each; return the counts of each."""
        out = []
        for _ in range(epochs):
            self.counts.clear()
            first = self._known - 1 if self._known else 0
            while self._known < first + 2:
                for node in self.alive:
                    self._tell(node, self._known)
                self._known += 1
            self._settle()
            steps = self.order.steps
            for step in range(steps):
                self._step(first, step)
                self._next_step = step + 1
                if step == steps // 4:
                    self._compare()
                if step == int(part * steps):
                    then()
            out.append(self.counts.copy())
        for node in self.alive:
            self.cores[node].check()
        return out

    def _step(self, epoch: int, step: int) -> None:
        self._now += _STEP_S
        at = {node: self._step_of(node, epoch, step) for node in self.alive}
        for node, done in at.items():
            if done >= 0:
                self._feed(node, Progressed(1, done, done + 1))
        self._settle()
        for node, done in at.items():
            assert self.ready[node] > done, "a step that nothing is awaited for is not ready"

    def _step_of(self, node: int, epoch: int, step: int) -> int:
        """Return the number in the node's session of a step of an epoch."""
        return (epoch - self._began[node]) * self.order.steps + step - self._skipped[node]

    @property
    def alive(self) -> list[int]:
        return [node for node in range(len(self.cores)) if node not in self.dead]

    def lose(self, node: int) -> None:
        """Let a node disappear, and the others notice."""
        self.gone.add(node)
        self.dead.add(node)
        for other in self.alive:
            self.silence[other].refused(node, self._now - 1000)
        self._tell_views()

    def restart(self, node: int, *, rest: bool = False) -> None:
        """Bring a node back, with a daemon that holds nothing.

        `rest`: its rank tells it of the steps that are left, as a loader does in mid-epoch.
        """
        epoch = self._known - 2
        self.gone.discard(node)
        self.dead.discard(node)
        self.cores[node] = Core(Allocator(self.capacity), default_window())
        self.ready[node], self._began[node] = 0, epoch
        self._skipped[node] = self._next_step if rest else 0
        self._begin(node)
        self.silence[node] = Silence(node, len(self.cores), self._now, self._limits)
        self._again.add(node)
        self._tell_views()
        for known in range(epoch, self._known):
            self._tell(node, known)
        self._settle()

    def lose_disk(self, node: int) -> None:
        """Let the disk of a node fail with all its contents; all nodes hear of it."""
        self._disks[node] = 0
        self._feed(node, DiskOpened(0, 1))
        self._tell_views()

    def _compare(self) -> None:
        """Compare each node's inputs of plans with those of the others, as heartbeats do."""
        plans = [core.plans.digests(_CLUSTER) for core in self.cores]
        for node in self.alive:
            for other in self.alive:
                lowest = other == self.alive[0]
                for plan in differing(plans[node], plans[other], lowest=lowest):
                    self._feed(node, PlanDoubted(plan.dataset, plan.seed))
        self._settle()

    def part(self, pairs: set[tuple[int, int]], noticed: set[tuple[int, int]]) -> None:
        """Cut these ways between nodes, and no others; some of them are noticed."""
        self.apart, self.noticed = pairs, noticed
        self._tell_views()

    def _reaches(self, node: int, peer: int) -> bool:
        return peer not in self.gone and (node, peer) not in self.apart

    def _tell_views(self) -> None:
        """Let each node hear of all others, and tell its core which it can reach."""
        for node in self.alive:
            for other in self.alive:
                self.silence[node].heard(other, self._now)
            self._feed(node, ClusterChanged(_CLUSTER, self._view(node)))
        self._settle()

    def _view(self, node: int) -> ClusterView:
        nodes = len(self.cores)
        reachable = self.silence[node].reachable(self._now)
        reachable[list(self.gone - self.dead)] = True  # no node has noticed yet
        reachable[[b for a, b in self.noticed if a == node]] = False
        origin = np.where(reachable, np.arange(nodes), SOURCE)
        origin[node] = SOURCE
        capacity = np.full(nodes, self.capacity)
        disks = np.array([(nbytes, 1) for nbytes in self._disks], np.int64)
        names = tuple(map(str, range(nodes)))
        rest = disks, _CLUSTER, names
        view = ClusterView(node, np.arange(nodes), capacity, origin, *rest)
        return replace(view, again=node in self._again)

    def _tell(self, node: int, epoch: int) -> None:
        order = self.order._replace(seed=self.order.seed + epoch)
        ends = np.minimum(np.arange(1, order.steps + 1) * order.batch, order.each)
        number = epoch - self._began[node]
        skipped = 0 if number else self._skipped[node]
        first, ids = (
            self._step_of(node, epoch, skipped),
            order.by_rank(range(len(self.cores)))[node],
        )
        ids, ends = ids[skipped * order.batch :].copy(), ends[skipped:] - skipped * order.batch
        for other in self.alive:
            self.silence[node].heard(other, self._now)
        self._feed(
            node, PlanExtended(1, number, first, ids, ends.astype(np.int64), unplanned=False)
        )
        if node not in self.late:
            self._feed(node, EpochDealt(1, number, order, self._view(node)))

    def _feed(self, node: int, event: Event) -> None:
        self._now += 1e-4
        now = self._now + _APART_S * node  # clocks of nodes differ
        for action in self.cores[node].handle(event, now):
            self._do(node, action)

    def _do(self, node: int, action: Action) -> None:
        if isinstance(
            action, FetchObjects | PlanRetention | AskPlan | SpillObjects | CheckVersions
        ):
            self._queue.append((node, action))
        elif isinstance(action, Publish):
            self.places[node][action.ids] = action.offset
        elif isinstance(action, SetReady):
            self.ready[node] = action.ready
        elif isinstance(action, ServeObjects):
            self._served(node, action)
        elif isinstance(action, SharePlan):
            self._plans[action.request] = action

    def _settle(self) -> None:
        """Run until no read, write or request is under way."""
        left = _MOST_ACTIONS
        while self._queue:
            left -= 1
            assert left, "one action leads to another without end"
            node, action = self._next()
            if node in self.dead:
                continue
            if isinstance(action, PlanRetention):
                kept = action.boundary.plan()
                self._feed(node, RetentionPlanned(action.dataset, action.boundary, kept))
            elif isinstance(action, AskPlan):
                self._ask_plan(node, action)
            elif isinstance(action, ServeObjects):
                self._arrive(node, action)
            elif isinstance(action, SpillObjects):
                self._feed(node, Spilled(action.spill, self._write(action)))
            elif isinstance(action, FetchObjects) and action.origin in {SOURCE, DISK}:
                self.counts["disk" if action.origin == DISK else "source"] += len(action.ids)
                version = self.version[action.ids]
                asked = np.full(len(version), self._now + _APART_S * node)
                self._feed(node, Fetched(action.fetch, self._read(action), version, asked))
            elif isinstance(action, CheckVersions):
                self.counts["checked"] += len(action.files)
                self._feed(node, Checked(action.check, self.version[action.files]))
            elif isinstance(action, FetchObjects):
                self._from_peer(node, action)

    def _read(self, action: FetchObjects) -> NDArray[np.int64]:
        """Return (k,) bytes of each object from source or disk, or -1 if it cannot be read."""
        return action.length.copy()

    def _write(self, action: SpillObjects) -> NDArray[np.bool_]:
        """Return (k,) whether each object could be written to disk."""
        return np.ones(len(action.ids), np.bool_)

    def _next(self) -> tuple[int, Action]:
        """Return the next action: in order, or as drawn by `chance`."""
        first = self._queue[0][1]
        if self.chance is not None and not isinstance(first, ServeObjects):
            self._queue.rotate(-int(self.chance.integers(len(self._queue))))
            while isinstance(self._queue[0][1], ServeObjects):
                self._queue.rotate(-1)
        return self._queue.popleft()

    def _ask_plan(self, node: int, action: AskPlan) -> None:
        plan = None
        if self._reaches(node, action.origin):
            self._requests += 1
            self._feed(action.origin, PlanAsked(self._requests, action.dataset, action.seed))
            plan = self._plans.pop(self._requests).plan
        self.counts["shared"] += plan is not None
        self._feed(node, PlanShared(action.dataset, action.seed, plan))

    def _from_peer(self, node: int, action: FetchObjects) -> None:
        if not self._reaches(node, action.origin):
            self.counts["refused"] += len(action.ids)
            self._feed(node, Fetched(action.fetch, np.full(len(action.ids), -1)))
            return
        self.counts["empty"] += len(action.ids) * bool((self.places[action.origin] == -1).all())
        self._ask(action.origin, node, action)

    def _ask(self, peer: int, node: int, action: FetchObjects) -> None:
        self._requests += 1
        self._asked[self._requests] = node, action, self._now
        self._feed(peer, PeerAsked(self._requests, action.dataset, action.ids, 1.0))

    def _served(self, node: int, answer: ServeObjects) -> None:
        """Deliver the answer of `node` to the node that asked, before any other event there."""
        self._queue.appendleft((node, answer))

    def _arrive(self, origin: int, answer: ServeObjects) -> None:
        node, action, sent = self._asked.pop(answer.request)
        here = answer.nbytes >= 0
        held = self.places[origin][action.ids]
        assert (answer.place[here] == held[here]).all(), "sent from where it is not"
        self.counts["peer"] += int(here.sum())
        self.counts["refused"] += int((~here).sum())
        asked = sent + _APART_S * node - answer.age
        columns = answer.nbytes.copy(), answer.version.copy(), np.maximum(asked, 0.0)
        self._feed(node, Fetched(action.fetch, *columns))
        self._feed(origin, PeerServed(answer.request))
