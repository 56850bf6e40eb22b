"""One node checks versions in storage for all: checks by a peer that are recent enough count.

Only for remote addresses, which mean the same on every node.
"""

from __future__ import annotations

import numpy as np
import pytest
from nodes import Nodes, Shell
from numpy.typing import NDArray

from creel.cache.storage.version import of_tag
from creel.daemon.core.events import Action, Event, Fetched, FetchObjects
from creel.daemon.core.versions import Versions
from creel.daemon.peers.peer_source import CLOCK_RATES
from creel.policies.cluster.job_order import JobOrder
from kit import seeds

OLD, NEW = of_tag("old"), of_tag("new")


def job(nodes: int, samples: int = 960) -> JobOrder:
    return JobOrder(samples, nodes, samples // nodes, 8, 100)


@pytest.mark.parametrize("nodes, held", [(2, 1.1), (4, 0.5), (8, 2.0)])
def test_of_remote_files_one_node_asks_for_all(nodes: int, held: float) -> None:
    """Except objects read while the last sessions were opened: here .1 s after each other."""
    cluster = Nodes(nodes, job(nodes), held, remote=True, recheck="open")
    counts = cluster.run(4)
    assert counts[0]["source"] == 960
    assert sum(count["checked"] for count in counts) <= 0.06 * 960


def test_of_local_files_each_node_asks_once() -> None:
    """The same path on another node may be another file."""
    cluster = Nodes(4, job(4), 1.1, recheck="open")
    checked = sum(count["checked"] for count in cluster.run(6))
    assert 2 * 960 <= checked <= 3 * 960


class Dated(Shell):
    """A node that knows the version of the bytes that it has."""

    def __init__(self, nodes: Nodes, number: int) -> None:
        super().__init__(nodes, number)
        self.got = np.zeros(nodes.order.samples, np.int64)
        self.floor = nodes.version.copy()  # when its loader came
        self.ids: dict[int, NDArray[np.int32]] = {}  # by fetch

    def do(self, action: Action) -> None:
        if isinstance(action, FetchObjects):
            self.ids[action.fetch] = action.ids
        super().do(action)

    def feed(self, event: Event) -> list[Action]:
        if isinstance(event, Fetched) and event.version is not None:
            here = event.nbytes >= 0
            self.got[self.ids[event.fetch][here]] = event.version[here]
        return super().feed(event)


class Changing(Nodes):
    """Nodes whose files change."""

    shell = Dated

    def __init__(self, nodes: int, order: JobOrder, held: float) -> None:
        super().__init__(nodes, order, held, remote=True, recheck="open")

    def change(self, part: float, rng: np.random.Generator) -> None:
        self.version[rng.random(len(self.version)) < part] += 1 << 40

    def _step(self, epoch: int, step: int) -> None:
        super()._step(epoch, step)
        order = self.order._replace(seed=self.order.seed + epoch)
        for node in self.alive:
            ids = order.by_rank(range(len(self.shells)))[node][step * order.batch :][: order.batch]
            shell = self.shells[node]
            assert isinstance(shell, Dated)
            ids = ids[shell.held()[ids]]
            assert (shell.got[ids] >> 40 >= shell.floor[ids] >> 40).all()


@pytest.mark.parametrize("seed", seeds(2))
def test_no_node_reads_what_is_older_than_its_loader(seed: int) -> None:
    """A node comes back and reads objects that others have read; files change all the time."""
    rng = np.random.default_rng(seed)
    nodes = Changing(4, job(4), float(rng.choice([0.6, 1.1, 1.6])))
    for _ in range(2):
        nodes.run(1, lambda: nodes.change(0.1, rng), float(rng.random()))
        nodes.lose(3)
        nodes.run(1, lambda: nodes.change(0.1, rng), float(rng.random()))
        nodes.restart(3)
        nodes.run(1)


@pytest.mark.parametrize("seed", seeds(40))
def test_a_check_counts_only_if_it_was_made_after_the_session_was_opened(seed: int) -> None:
    """Two clocks run at different rates, and messages take any time."""
    rng = np.random.default_rng(seed)
    t = 100 + rng.exponential(10, 9).cumsum()  # true times of the events
    fast = 1 + 5e-4 * rng.uniform(-1, 1, 2)
    clock = [lambda at, k=k: 1000 * k + at * fast[k] for k in range(2)]
    remote = np.ones(1, np.bool_)
    peer, mine = Versions(1, remote=remote), Versions(1, remote=remote)
    file = np.zeros(1, np.int32)
    # The peer asks, the file changes, is asked, my session opens, I ask, the peer answers: in any
    # possible order.
    asked, changed, opened = rng.permutation(t[:3]).tolist()
    begun, sent = t[int(rng.integers(3, 6)) - int(rng.integers(0, 3))], t[6]
    said = NEW if asked > changed else OLD
    peer.answered(file, np.array([said]), 1, clock[0](asked))
    if begun < opened or sent < asked:
        return
    since = peer.since(np.zeros(1, np.intp))
    age = clock[0](sent) - since
    late = mine.received(
        np.zeros(1, np.intp),
        np.array([said]),
        clock[1](begun) - age * CLOCK_RATES,
        [(clock[1](opened), 7)],
    )
    assert not late.any()
    if mine.current(np.zeros(1, np.intp), 7, 7).all():
        assert asked > opened
        assert said == NEW or changed > opened
