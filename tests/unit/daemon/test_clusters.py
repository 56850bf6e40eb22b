"""Which clusters a daemon joins, and which it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from cluster_node import ClusterNode
from creel.daemon.core.events import SOURCE, ClusterChanged
from creel.daemon.peers import sealing
from creel.daemon.service.cluster_service import ClusterService
from creel.errors import CreelError
from creel.messages import Join, Member
from creel.settings import ClusterSettings

KEY = bytes(range(32))


@pytest.fixture
def node() -> Iterator[ClusterNode]:
    with closing(ClusterNode()) as node:
        yield node


@pytest.fixture
def clusters(node: ClusterNode) -> ClusterService:
    return node.clusters


def other(number: int = 0) -> Member:
    return Member(f"node{number}", "127.0.0.1", 9, 4096)


def test_a_node_knows_itself_among_the_others(clusters: ClusterService) -> None:
    mine = clusters.host("127.0.0.1", 0)
    assert clusters.host("127.0.0.1", 0) == mine
    clusters.join("token", Join("c", KEY, [other(), mine], [1, 0, 0]))
    view = clusters.view("c")
    assert view is not None
    assert view.me == 1
    assert view.nodes.tolist() == [1, 0, 0]
    assert view.capacity.tolist() == [4096, 1 << 20]
    assert view.origin[1] == SOURCE
    assert view.origin[0] >= 0


def test_a_daemon_leaves_a_cluster_with_its_last_client(node: ClusterNode) -> None:
    clusters = node.clusters
    joined = Join("c", KEY, [clusters.host("127.0.0.1", 0), other()], [0, 1])
    for token in ("a", "b", "a"):
        clusters.join(token, joined)
    clusters.client_left("a")
    assert clusters.view("c") is not None
    clusters.client_left("b")
    assert clusters.view("c") is None
    (event,) = node.events
    assert isinstance(event, ClusterChanged)
    assert (event.cluster, event.view) == ("c", None)


def test_origins_of_a_cluster_are_free_once_it_has_ended(node: ClusterNode) -> None:
    clusters = node.clusters
    mine = clusters.host("127.0.0.1", 0)
    clusters.join("long", Join("long", KEY, [mine, other()], [0, 1]))
    for turn in range(3):
        name = f"short{turn}"
        clusters.join("short", Join(name, KEY, [mine, other(1), other(2)], [0, 1, 2]))
        view = clusters.view(name)
        assert view is not None
        assert view.origin.tolist() == [SOURCE, 1, 2]
        node.ended.clear()
        clusters.client_left("short")
        assert node.ended == [1, 2]
    assert clusters.source(0, "d") is not None


@pytest.mark.parametrize(
    "key, others, ranks, me",
    [
        (KEY[:8], [other()], [0, 1], -1),
        (KEY, [], [0], -1),
        (KEY, [other(), other()], [0, 1], -1),
        (KEY, [other(i) for i in range(1024)], [0], -1),
        (KEY, [other()], [], -1),
        (KEY, [other()], [0, 2], -1),
        (KEY, [other()], [-1], -1),
        (KEY, [other()], [0, 1], 2),
    ],
)
def test_an_impossible_cluster_is_refused(
    clusters: ClusterService, key: bytes, others: list[Member], ranks: list[int], me: int
) -> None:
    mine = clusters.host("127.0.0.1", 0)
    with pytest.raises(CreelError):
        clusters.join("token", Join("c", key, [mine, *others], ranks, me))
    assert clusters.view("c") is None


def test_a_cluster_without_this_node_is_refused(clusters: ClusterService) -> None:
    for _ in range(2):  # before it serves any peer, and after
        with pytest.raises(CreelError):
            clusters.join("token", Join("c", KEY, [other(0), other(1)], [0, 1]))
        clusters.host("127.0.0.1", 0)


def test_one_name_is_one_cluster(clusters: ClusterService) -> None:
    mine = clusters.host("127.0.0.1", 0)
    clusters.join("a", Join("c", KEY, [mine, other()], [0, 1]))
    with pytest.raises(CreelError):
        clusters.join("b", Join("c", KEY[::-1], [mine, other()], [0, 1]))


def test_an_address_of_another_node_is_refused(clusters: ClusterService) -> None:
    with pytest.raises(CreelError):
        clusters.host("203.0.113.1", 0)


def test_without_the_library_nobody_joins_a_cluster_that_encrypts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "find_spec", lambda _: None)
    with (
        closing(ClusterNode(ClusterSettings(encrypt=True))) as secret,
        pytest.raises(CreelError, match="cryptography"),
    ):
        secret.clusters.host("127.0.0.1", 0)
