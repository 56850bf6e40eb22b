"""Clusters: the nodes of this node's jobs, which serve each other, and how to reach them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from creel.cache.memory.arena import Arena
from creel.daemon.core.events import (
    SOURCE,
    ClusterChanged,
    Event,
    PeerAsked,
    PeerServed,
    ServeObjects,
)
from creel.daemon.peers.lane import PeerSource
from creel.daemon.peers.server import Asked, PeerServer
from creel.daemon.peers.wire import KEY_NBYTES, Credentials
from creel.errors import MalformedError, UnavailableError
from creel.messages import Join, Member
from creel.policies.cluster.eviction import ClusterView

log = logging.getLogger("creel.clusters")

#: Nodes of a cluster: their numbers are bytes, and one stands for nobody.
_MAX_MEMBERS = 255
_MAX_RANKS = 1 << 16


@dataclass(eq=False)
class Cluster:
    """A cluster that this node belongs to, as long as some client of its job is connected."""

    joined: Join
    view: ClusterView
    tokens: set[str] = field(default_factory=set)


class Clusters:
    """All clusters of a daemon. Used by the loop thread alone.

    Args:
        arena: what peers are served from.
        handle: gives an event to the core.
        call_soon: runs a function on the loop thread, from any thread.
        unreachable: ends all fetches from a peer, which is not asked any more.
    """

    def __init__(
        self,
        arena: Arena,
        handle: Callable[[Event], bool],
        call_soon: Callable[[Callable[[], None]], None],
        unreachable: Callable[[int], None],
    ) -> None:
        self.node = secrets.token_hex(16)
        self._arena = arena
        self._handle = handle
        self._call_soon = call_soon
        self._unreachable = unreachable
        self._server: PeerServer | None = None
        self._clusters: dict[str, Cluster] = {}
        #: By origin of a fetch: who is to be asked, and as whom.
        self._peers: dict[int, tuple[Member, Credentials]] = {}

    def host(self, address: str) -> Member:
        """Serve peers at this address of this node, unless that was begun; return how to reach it.

        Raises:
            UnavailableError: the system does not allow that.
        """
        if self._server is None:
            try:
                self._server = PeerServer(
                    *(address, 0, self.node, self._arena),
                    asked=lambda asked: self._call_soon(partial(self._asked, asked)),
                    served=lambda number: self._call_soon(partial(self._served, number)),
                )
            except (OSError, RuntimeError) as e:
                raise UnavailableError(f"peers cannot be served at {address}: {e}") from e
            log.info("serving peers at %s port %d", *self._server.address)
        return Member(self.node, *self._server.address, self._arena.nbytes)

    def join(self, token: str, request: Join) -> None:
        """Enter a cluster, for the client of this token.

        Raises:
            MalformedError: an impossible request.
            UnavailableError: this node is not one of the members.
        """
        known = self._clusters.get(request.cluster)
        if known is None:
            known = self._clusters[request.cluster] = Cluster(request, self._viewed(request))
            assert self._server is not None  # noqa: S101  `_viewed` has checked that
            self._server.admit(request.cluster, request.key)
            log.info("joined %d nodes", len(request.members))
        elif known.joined != request:
            raise MalformedError("another cluster of the same name")
        known.tokens.add(token)

    def _viewed(self, request: Join) -> ClusterView:
        members = request.members
        nodes = [one.node for one in members]
        if len(request.key) != KEY_NBYTES or not 2 <= len(members) <= _MAX_MEMBERS:
            raise MalformedError("a key of another size, or too few or too many nodes")
        if len(set(nodes)) != len(nodes) or not 0 < len(request.ranks) <= _MAX_RANKS:
            raise MalformedError("nodes that are twice there, or too many ranks")
        ranks = np.array(request.ranks, np.int64)
        if ranks.min() < 0 or ranks.max() >= len(members):
            raise MalformedError("a rank on a node that is no member")
        if self._server is None or self.node not in nodes:
            raise UnavailableError("this node is not one of the cluster's")
        credentials = Credentials(self.node, request.cluster, request.key)
        origins = [
            SOURCE if one.node == self.node else self._number(one, credentials) for one in members
        ]
        capacity = np.array([max(one.arena_nbytes, 1) for one in members])
        me = nodes.index(self.node)
        return ClusterView(me, ranks, capacity, np.array(origins), request.cluster)

    def _number(self, peer: Member, credentials: Credentials) -> int:
        """Give a peer the lowest number that is free."""
        number = next(n for n in count() if n not in self._peers)
        self._peers[number] = peer, credentials
        return number

    def view(self, cluster: str) -> ClusterView | None:
        """The nodes of a cluster; None where this node does not belong to it."""
        known = self._clusters.get(cluster)
        return None if known is None else known.view

    def source(self, origin: int, dataset: str) -> PeerSource:
        """Reads a dataset's objects from a peer."""
        member, credentials = self._peers[origin]
        return PeerSource((member.host, member.port), member.node, dataset, credentials)

    def client_left(self, token: str) -> None:
        """Leave the clusters of a client that has disconnected, if it was the last one there."""
        for name, cluster in list(self._clusters.items()):
            cluster.tokens.discard(token)
            if not cluster.tokens:
                self._leave(name, cluster)

    def _leave(self, name: str, cluster: Cluster) -> None:
        """End a cluster: its nodes get nothing, and none of them is asked any more."""
        del self._clusters[name]
        if self._server is not None:
            self._server.expel(name)
        self._handle(ClusterChanged(name, None))
        for number in cluster.view.origin.tolist():
            if number != SOURCE:
                self._unreachable(number)
                del self._peers[number]

    def _asked(self, asked: Asked) -> None:
        if asked.cluster in self._clusters:
            self._handle(PeerAsked(asked.number, asked.dataset, asked.ids))

    def _served(self, request: int) -> None:
        self._handle(PeerServed(request))

    def serve(self, action: ServeObjects) -> None:
        """Send a peer what it asked for."""
        if self._server is not None:
            self._server.serve(action.request, action.place, action.nbytes, action.version)

    def close(self) -> None:
        """End all connections; nothing is read from the arena afterwards."""
        if self._server is not None:
            self._server.close()
