"""The cores of several nodes on one clock, with the bytes that move between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from core_shell import VERSION, CoreShell
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.cluster.silence import Silence, SilenceLimits
from creel.daemon.core.events import (
    DISK,
    SOURCE,
    Action,
    AskPlan,
    CheckVersions,
    ClusterChanged,
    DiskOpened,
    EpochDealt,
    Event,
    Fetched,
    FetchObjects,
    PeerAsked,
    PeerServed,
    PlanAsked,
    PlanDoubted,
    PlanShared,
    Progressed,
    ServeObjects,
    SharePlan,
)
from creel.daemon.core.versions import Versions
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.shared_plan import differing

_CLUSTER = "c"
_STEP_S = 0.1
_APART_S = 1000.0
#: Most reads, writes and plans that may follow from the events of one moment; usual is a tenth.
_MOST_ACTIONS = 10_000
_NOTHING = np.empty(0, np.int64)


class Shell(CoreShell):
    """One of `nodes`, which do what its core asks for in an order of their own."""

    def __init__(self, nodes: Nodes, number: int) -> None:
        super().__init__(nodes.capacity)
        self.nodes, self.number = nodes, number

    def feed(self, event: Event) -> list[Action]:
        self.nodes.now += 1e-4
        self.now = self.nodes.now + _APART_S * self.number  # clocks of nodes differ
        return super().feed(event)

    def do(self, action: Action) -> None:
        if not self.keep(action):
            self.nodes.queue(self.number, action)

    def held(self) -> NDArray[np.bool_]:
        """Return (n,) which objects this node has in memory, in any dataset."""
        held = np.zeros(max(map(len, self.offset.values()), default=0), np.bool_)
        for offset in self.offset.values():
            held[: len(offset)] |= offset != NOWHERE
        return held

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64]:
        return self.nodes.version[fetch.ids]

    def asked_at(self, fetch: FetchObjects) -> NDArray[np.float64]:
        return np.full(len(fetch.ids), self.nodes.now + _APART_S * self.number)

    def checked(self, check: CheckVersions) -> NDArray[np.int64]:
        return self.nodes.version[check.files]


class Nodes:
    """One rank on each node reads epochs of equal objects; all ranks run in step.

    Attributes:
        shells: the nodes.
        counts: "source", "disk", "peer", "refused", "checked" and "shared" objects of this epoch;
            "empty": objects asked of a daemon that holds none.
    """

    #: What a node is; a test may watch it.
    shell: Callable[..., Shell] = Shell

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
        self.version = np.full(order.samples, VERSION)  # of each object at its source
        self._remote, self._recheck = remote, recheck
        self.gone: set[int] = set()  # nodes that answer no peer
        self.late: set[int] = set()  # nodes that hear nothing of the others
        self.dead: set[int] = set()  # nodes that do nothing at all
        self._again: set[int] = set()  # nodes whose daemon was restarted
        #: (a, b): node a does not reach node b; in `noticed`: it knows that.
        self.apart: set[tuple[int, int]] = set()
        self.noticed: set[tuple[int, int]] = set()
        self.chance: np.random.Generator | None = None  # draws the next action; None: in order
        self.now, self._requests = 0.0, 0
        self._queue: deque[tuple[int, Action]] = deque()  # what is asked for, by which node
        #: By request: the node that waits, its fetch, and since when.
        self._asked: dict[int, tuple[int, FetchObjects, float]] = {}
        self._plans: dict[int, SharePlan] = {}
        self.shells: list[Shell] = []
        self._known = 0  # epochs that the nodes know
        self._began = [0] * nodes  # the epoch with which each core began
        self._skipped = [0] * nodes  # steps of that epoch that it was not told of
        self._next_step = 0  # of the present epoch
        self._limits = SilenceLimits.of_nodes(nodes)
        self.silence = [Silence(node, nodes, -10.0, self._limits) for node in range(nodes)]
        for node in range(nodes):
            self.shells.append(self.shell(self, node))
        for node in range(nodes):
            self._begin(node)

    def _begin(self, node: int) -> None:
        samples, shell = self.order.samples, self.shells[node]
        self.now += _STEP_S
        if self._disks[node]:
            shell.feed(DiskOpened(self._disks[node], 1))
        remote = np.full(samples, self._remote)
        shell.add("d", self._lengths(), Versions(samples, remote=remote))
        shell.open(1, "d", "j", node, len(self.shells), self._recheck)

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
            self.shells[node].core.check()
        return out

    def _step(self, epoch: int, step: int) -> None:
        self.now += _STEP_S
        at = {node: self._step_of(node, epoch, step) for node in self.alive}
        for node, done in at.items():
            if done >= 0:
                self.shells[node].feed(Progressed(1, done, done + 1))
        self._settle()
        for node, done in at.items():
            ready = self.shells[node].ready[1].ready
            assert ready > done, "a step that nothing is awaited for is not ready"

    def _step_of(self, node: int, epoch: int, step: int) -> int:
        """Return the number in the node's session of a step of an epoch."""
        return (epoch - self._began[node]) * self.order.steps + step - self._skipped[node]

    @property
    def alive(self) -> list[int]:
        return [node for node in range(len(self.shells)) if node not in self.dead]

    def lose(self, node: int) -> None:
        """Let a node disappear, and the others notice."""
        self.gone.add(node)
        self.dead.add(node)
        for other in self.alive:
            self.silence[other].refused(node, self.now - 1000)
        self._tell_views()

    def restart(self, node: int, *, rested: bool = False) -> None:
        """Bring a node back, with a daemon that holds nothing.

        `rested`: its rank tells it of the steps that are left, as a loader does in mid-epoch.
        """
        epoch = self._known - 2
        self.gone.discard(node)
        self.dead.discard(node)
        self.shells[node], self._began[node] = self.shell(self, node), epoch
        self._skipped[node] = self._next_step if rested else 0
        self._begin(node)
        self.silence[node] = Silence(node, len(self.shells), self.now, self._limits)
        self._again.add(node)
        self._tell_views()
        for known in range(epoch, self._known):
            self._tell(node, known)
        self._settle()

    def lose_disk(self, node: int) -> None:
        """Let the disk of a node fail with all its contents; all nodes hear of it."""
        self._disks[node] = 0
        self.shells[node].feed(DiskOpened(0, 1))
        self._tell_views()

    def _compare(self) -> None:
        """Compare each node's inputs of plans with those of the others, as heartbeats do."""
        plans = [shell.core.plans.digests(_CLUSTER) for shell in self.shells]
        for node in self.alive:
            for other in self.alive:
                lowest = other == self.alive[0]
                for plan in differing(plans[node], plans[other], lowest=lowest):
                    self.shells[node].feed(PlanDoubted(plan.dataset, plan.seed))
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
            self._hear(node)
            self.shells[node].feed(ClusterChanged(_CLUSTER, self._view(node)))
        self._settle()

    def _hear(self, node: int) -> None:
        """Let a node hear of all others."""
        for other in self.alive:
            self.silence[node].heard(other, self.now)

    def _view(self, node: int) -> ClusterView:
        nodes = len(self.shells)
        reachable = self.silence[node].reachable(self.now)
        reachable[list(self.gone - self.dead)] = True  # no node has noticed yet
        reachable[[b for a, b in self.noticed if a == node]] = False
        origin = np.where(reachable, np.arange(nodes), SOURCE)
        origin[node] = SOURCE
        capacity = np.full(nodes, self.capacity)
        disks = np.array([(nbytes, 1) for nbytes in self._disks], np.int64)
        names = tuple(map(str, range(nodes)))
        view = ClusterView(node, np.arange(nodes), capacity, origin, disks, _CLUSTER, names)
        return replace(view, again=node in self._again)

    def _tell(self, node: int, epoch: int) -> None:
        order = self.order._replace(seed=self.order.seed + epoch)
        number = epoch - self._began[node]
        skipped = 0 if number else self._skipped[node]
        ids = order.by_rank(range(len(self.shells)))[node][skipped * order.batch :].copy()
        ends = self._ends()[skipped:] - skipped * order.batch
        self._hear(node)
        self.shells[node].tell(1, number, ids, ends)
        if node not in self.late:
            self.shells[node].feed(EpochDealt(1, number, order, self._view(node)))

    def _ends(self) -> NDArray[np.int64]:
        """Return (steps,) the end of each step in an epoch of a rank."""
        order = self.order
        return np.minimum(np.arange(1, order.steps + 1, dtype=np.int64) * order.batch, order.each)

    def queue(self, node: int, action: Action) -> None:
        """Note what a node asks for; an answer reaches the other node before any other event."""
        if isinstance(action, SharePlan):
            self._plans[action.request] = action
        elif isinstance(action, ServeObjects):
            self._queue.appendleft((node, action))
        else:
            self._queue.append((node, action))

    def _settle(self) -> None:
        """Run until no read, write or request is under way."""
        left = _MOST_ACTIONS
        while self._queue:
            left -= 1
            assert left, "one action leads to another without end"
            node, action = self._next()
            if node in self.dead:
                continue
            if isinstance(action, AskPlan):
                self._ask_plan(node, action)
            elif isinstance(action, ServeObjects):
                self._arrive(node, action)
            elif isinstance(action, FetchObjects) and action.origin not in {SOURCE, DISK}:
                self._from_peer(node, action)
            else:
                self._count(action)
                self.shells[node].fulfil(action)

    def _count(self, action: Action) -> None:
        if isinstance(action, FetchObjects):
            self.counts["disk" if action.origin == DISK else "source"] += len(action.ids)
        elif isinstance(action, CheckVersions):
            self.counts["checked"] += len(action.files)

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
            self.shells[action.origin].feed(PlanAsked(self._requests, action.dataset, action.seed))
            plan = self._plans.pop(self._requests).plan
        self.counts["shared"] += plan is not None
        self.shells[node].feed(PlanShared(action.dataset, action.seed, plan))

    def _from_peer(self, node: int, action: FetchObjects) -> None:
        if not self._reaches(node, action.origin):
            self.counts["refused"] += len(action.ids)
            self.shells[node].feed(Fetched(action.fetch, np.full(len(action.ids), -1)))
            return
        self.counts["empty"] += len(action.ids) * (not self.shells[action.origin].held().any())
        self._ask(action.origin, node, action)

    def _ask(self, peer: int, node: int, action: FetchObjects) -> None:
        self._requests += 1
        self._asked[self._requests] = node, action, self.now
        self.shells[peer].feed(PeerAsked(self._requests, action.dataset, action.ids, 1.0))

    def _arrive(self, origin: int, answer: ServeObjects) -> None:
        node, action, sent = self._asked.pop(answer.request)
        here = answer.nbytes >= 0
        held = self.shells[origin].offset.get(action.dataset, _NOTHING)[action.ids[here]]
        assert (answer.place[here] == held).all(), "sent from where it is not"
        self.counts["peer"] += int(here.sum())
        self.counts["refused"] += int((~here).sum())
        asked = sent + _APART_S * node - answer.age
        self.shells[node].feed(
            Fetched(
                action.fetch, answer.nbytes.copy(), answer.version.copy(), np.maximum(asked, 0.0)
            )
        )
        self.shells[origin].feed(PeerServed(answer.request))
