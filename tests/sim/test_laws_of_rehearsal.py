"""A job that rehearses, on several nodes: together they read what one memory would read.

Four tasks are parts of one dataset of N = 1,664 objects, three epochs each. After each task the
memory keeps a part of all that was read; every step replays rows of it behind the new samples.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from nodes import Nodes

from creel.daemon.core.cluster.silence import Silence
from creel.daemon.core.events import DatasetGrew, EpochDealt, SamplesTold
from creel.messages import Close
from creel.policies.cluster.job_order import JobOrder, JobReplays, SampleObjects
from creel.policies.rehearsal.memory_rows import Offered, kept, mixed
from creel.policies.rehearsal.replay_passes import Passes

TASKS, TASK, EPOCHS, BATCH, EACH = 4, 416, 3, 4, 2
SAMPLES = TASKS * TASK
RANKS = 4
#: Epochs that loaders foretell.
AHEAD = 2


@cache
def memory(task: int, budget: int) -> np.ndarray:
    """Return (k,) the objects that are kept of all tasks before this one."""
    uids = np.arange(task * TASK)
    offered = Offered(uids, uids * TASKS * 4 // SAMPLES, mixed(uids, 1))
    return uids[kept(offered, budget, 2)]


@cache
def alive(task: int, budget: int) -> SampleObjects:
    """Return the objects of all samples and rows of a task."""
    new = task * TASK + np.arange(TASK)
    return SampleObjects(np.concatenate([new, memory(task, budget)]).astype(np.int32))


@cache
def order(task: int, epoch: int, budget: int) -> JobOrder:
    """Return the order of an epoch of a task on four ranks."""
    samples = alive(task, budget)
    seed = 100 * task + epoch
    dealt = JobOrder(TASK, RANKS, TASK // RANKS, BATCH, seed, object_of=samples)
    if not task:
        return dealt
    passes = Passes(len(samples.objects) - TASK, EACH, RANKS, task)
    return dealt._replace(replays=JobReplays(passes, epoch * dealt.steps))


class Rehearsing(Nodes):
    """Four ranks of a job that rehearses: each on a node of its own, or all on one.

    Attributes:
        one_by_one: whether a node reads ahead in a task before the next one begins it.
    """

    def __init__(self, nodes: int, held: float, budget: int, joins: int = 0) -> None:
        """`held`: of all objects, by all memories together.

        `joins`: the step of the first epoch before which the nodes hear of each other.
        """
        self.budget, self.refused, self.lost = budget, 0, 0
        self.peers: list[int] = []  # objects that each epoch reads from peers
        self._joins, self.one_by_one = joins, False
        every = JobOrder(SAMPLES, RANKS, TASK // RANKS, BATCH, 0)
        super().__init__(nodes, every, held)

    def _begin_task(self, node: int, task: int) -> None:
        """Let a node's rank make a loader for the next task."""
        shell = self.shells[node]
        if task:
            shell.feed(Close(1))
            shell.open(1, "d", "j", node, len(self.shells))
            self._began[node] = self._skipped[node] = 0
        shell.feed(SamplesTold(1, alive(task, self.budget)))

    def _tell_of(self, node: int, task: int, epoch: int) -> None:
        """Tell a node of an epoch of a task; loaders foretell some that will not be read."""
        shell, dealt = self.shells[node], order(task, epoch, self.budget)
        assert dealt.sound()
        self._hear(node)
        ranks = dealt.by_rank(range(RANKS))
        if len(self.shells) == RANKS:
            number = epoch - self._began[node]
            skipped = 0 if number else self._skipped[node]
            first = int(np.append(0, dealt.ends)[skipped])
            if not self._joins:
                shell.feed(EpochDealt(1, number, dealt, self._view(node)))
            shell.tell(1, number, ranks[node][first:].copy(), dealt.ends[skipped:] - first)
        else:
            steps = zip(*(np.split(ids, dealt.ends[:-1]) for ids in ranks), strict=True)
            ids = np.concatenate([part for step in steps for part in step])
            shell.tell(1, epoch, ids, RANKS * dealt.ends)

    def _join(self) -> None:
        """Let the nodes hear of each other, and of all epochs that loaders foretell."""
        self._joins = 0
        for node in self.alive:
            self.shells[node].feed(EpochDealt(1, 0, order(0, 0, self.budget), self._view(node)))
            for ahead in range(1, AHEAD + 1):
                self._tell_of(node, 0, ahead)
        self._settle()

    def replace(self, node: int, task: int, epoch: int, step: int) -> int:
        """Kill a node's daemon before a step, and start another; return the objects it held."""
        held = int(self.shells[node].held().sum())
        self.lose(node)
        self.gone.discard(node)
        self.dead.discard(node)
        self.shells[node] = self.shell(self, node)
        self._began[node], self._skipped[node] = epoch, step
        self._begin(node)
        self.silence[node] = Silence(node, RANKS, self.now, self._limits)
        self._again.add(node)
        self._tell_views()
        self.shells[node].feed(SamplesTold(1, alive(task, self.budget)))
        for ahead in range(AHEAD + 1):
            self._tell_of(node, task, epoch + ahead)
        self._settle()
        return held

    def _begin_epoch(self, task: int, epoch: int) -> None:
        """Let all ranks begin an epoch, and foretell others."""
        for node in self.alive:
            if not epoch:
                self._begin_task(node, task)
            for ahead in range(0 if epoch == 0 else AHEAD, 1 if self._joins else AHEAD + 1):
                self._tell_of(node, task, epoch + ahead)
            if self.one_by_one:
                self._settle()
        self._settle()

    def run_all(self, killed: tuple[int, int, int, int] | None = None) -> list[int]:
        """Read all tasks; return the objects that each epoch reads from the source.

        killed: node, task, epoch and step in which its daemon is replaced.
        """
        sources = []
        for task in range(TASKS):
            for epoch in range(EPOCHS):
                self.counts.clear()
                self._begin_epoch(task, epoch)
                for step in range(self.order.steps):
                    if killed is not None and killed[1:] == (task, epoch, step):
                        self.lost = self.replace(*killed)
                    if self._joins and step == self._joins:
                        self._join()
                    self._step(epoch, step)
                sources.append(self.counts["source"])
                self.peers.append(self.counts["peer"])
                self.refused += self.counts["refused"]
        for node in self.alive:
            self.shells[node].core.check()
        return sources


class InFolders(Rehearsing):
    """Tasks in folders of their own: each dataset begins with the one before it."""

    def _begin(self, node: int) -> None:
        """Register nothing yet."""

    def _begin_task(self, node: int, task: int) -> None:
        shell = self.shells[node]
        if task:
            shell.feed(Close(1))
        names = [f"d{number}" for number in range(task + 1)]
        lengths = np.broadcast_to(np.int64(self.size), ((task + 1) * TASK,))
        shell.add(names[task], lengths, begins_with="".join(names[-2:-1]))
        shell.open(1, names[task], "j", node, len(self.shells))
        shell.feed(SamplesTold(1, alive(task, self.budget)))
        for old in names[-2:-1]:
            shell.feed(DatasetGrew(names[task], old))


@pytest.mark.parametrize("tasks", [Rehearsing, InFolders])
def test_no_node_reads_what_another_one_has_read_whoever_begins_a_task_first(
    tasks: type[Rehearsing],
) -> None:
    """All memories together hold all objects; loaders foretell epochs that are not read."""
    nodes = tasks(RANKS, 1.1, int(0.3 * SAMPLES))
    nodes.one_by_one = True
    sources = nodes.run_all()
    assert sources == [TASK, 0, 0] * TASKS


@pytest.mark.parametrize(
    "held, kept_part, most",
    [(1.1, 0.3, 1.01), (0.6, 0.3, 1.02), (0.3, 0.3, 1.12)],
)
def test_nodes_read_what_one_memory_of_the_sum_would_read(
    held: float, kept_part: float, most: float
) -> None:
    budget = int(kept_part * SAMPLES)
    nodes = Rehearsing(RANKS, held, budget)
    together, alone = sum(nodes.run_all()), sum(Rehearsing(1, held, budget).run_all())
    assert together <= most * alone
    assert nodes.refused <= 0.002 * together
    if held >= 0.6:  # what may still be read is .25 + .3 of all objects
        assert together <= 1.02 * SAMPLES


@pytest.mark.parametrize("joins, held", [(0, 0.6), (5, 1.1), (TASK // RANKS // BATCH - 1, 0.6)])
def test_who_reads_an_object_first_reads_it_from_the_source_and_keeps_it(
    joins: int, held: float
) -> None:
    """Whenever the nodes hear of each other: what they have read until then is not read again."""
    nodes = Rehearsing(RANKS, held, int(0.3 * SAMPLES), joins)
    sources = nodes.run_all()
    assert nodes.peers[0] <= 0.1 * TASK  # ahead of the next epoch
    assert sources[: EPOCHS + 1] == [TASK, 0, 0, TASK]
    assert sum(sources) <= (1.0 if held > 1 else 1.02) * SAMPLES


def test_objects_that_a_killed_daemon_held_are_read_again_once() -> None:
    """Another daemon takes its place in the last task."""
    nodes = Rehearsing(RANKS, 0.6, int(0.3 * SAMPLES))
    sources = nodes.run_all((2, TASKS - 1, 1, 10))
    assert nodes.lost > 0.1 * SAMPLES
    assert sum(sources[:-2]) <= 1.002 * SAMPLES
    assert sum(sources[-2:]) <= 1.1 * nodes.lost
