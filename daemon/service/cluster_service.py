"""Cluster service: the nodes of each job on this node, which serve each other."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from creel.cache.memory.arena import Arena
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    SOURCE,
    AskPlan,
    ClusterChanged,
    Event,
    PlanDoubted,
    PlanShared,
    ServeObjects,
    SharePlan,
)
from creel.daemon.peers import sealing, wire
from creel.daemon.peers.link import ask_plan
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.server import PeerServer
from creel.daemon.peers.wire import KEY_NBYTES, Credentials
from creel.daemon.service.cluster import Cluster
from creel.errors import MalformedError, UnavailableError
from creel.messages import Join, Member
from creel.policies.cluster.agreement import SharedPlan
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.members import authority, differing, latest
from creel.settings import ClusterSettings

if TYPE_CHECKING:
    from creel.daemon.peers.heartbeats import Heartbeats

log = logging.getLogger("creel.clusters")

#: Nodes of a cluster: each asks each other one twice a second whether it is there.
_MAX_MEMBERS = 1024
_MAX_RANKS = 1 << 16
#: The other nodes hear of a new size of the disk where it differs by more than this part (1/n).
_DISK_PARTS = 16


class ClusterService:
    """All clusters of a daemon. Used by the loop thread alone.

    Args:
        arena: what peers are served from.
        settings: after what silence a node counts as lost, and whether payload is encrypted.
        core: is asked for its plans and for the size of the disk.
        handle: gives an event to the core.
        call_soon: runs a function on the loop thread, from any thread.
        unreachable: ends all fetches from a peer, which is not asked any more.
    """

    def __init__(
        self,
        arena: Arena,
        settings: ClusterSettings,
        core: Core,
        *,
        handle: Callable[[Event], bool],
        call_soon: Callable[[Callable[[], None]], None],
        unreachable: Callable[[int], None],
    ) -> None:
        self.node = secrets.token_hex(16)
        self._born = time.time()
        self._arena = arena
        self._core = core
        self._handle, self._call_soon, self._unreachable = handle, call_soon, unreachable
        self._lost_s, self._encrypt = settings.lost_s, settings.encrypt
        self._server: PeerServer | None = None
        self._beats: Heartbeats | None = None
        self._clusters: dict[str, Cluster] = {}
        #: By origin of a fetch: who is to be asked, and as whom.
        self._peers: dict[int, tuple[Member, Credentials]] = {}
        self._asking: set[str] = set()  # datasets whose plan a peer is asked for
        self._disk = 0, 1  # bytes and unit, as the other nodes know them

    # --- serving ------------------------------------------------------------------------------

    def host(self, address: str, port: int) -> Member:
        """Serve peers at this address of this node, unless that was begun; return how to reach it.

        Nobody gets anything before a cluster and its key are known. Port 0: any.

        Raises:
            UnavailableError: the system does not allow that, they are served at another port, or
                payload is to be encrypted and cannot be.
        """
        if self._encrypt and (why := sealing.why_not()):
            raise UnavailableError(why)
        if self._server is None:
            self._disk = self._core.disk.nbytes, self._core.disk.unit
            try:
                self._server = PeerServer(
                    *(address, port, self.node, self._arena),
                    post=self._on_loop(self._handle),
                    on_beat=self._on_loop(partial(self._on_beat, answer=False)),
                    encrypt=self._encrypt,
                )
            except (OSError, RuntimeError) as e:
                raise UnavailableError(f"peers cannot be served at {address}: {e}") from e
            log.info("serving peers at %s port %d", *self._server.address)
        elif port not in {0, self._server.address[1]}:
            raise UnavailableError(f"peers are served at port {self._server.address[1]} already")
        return self._member(self.node)

    def _member(self, name: str) -> Member:
        """This node, by its name in a cluster."""
        assert self._server is not None  # noqa: S101  or nothing can be asked of it
        own = *self._server.address, self._arena.nbytes, self._born
        return Member(name, *own, *self._disk)

    def traffic(self) -> dict[str, int]:
        """Bytes to and from the peers that this node serves, by purpose; empty: it serves none."""
        if self._server is None:
            return {}
        return {"payload": self._server.nbytes, **self._server.traffic.nbytes}

    def _on_loop(self, call: Callable[..., Any]) -> Callable[..., None]:
        """What has the loop thread make a call."""
        return lambda *args: self._call_soon(partial(call, *args))

    def serve(self, action: ServeObjects) -> None:
        if self._server is not None:
            self._server.serve(action)

    def share_plan(self, action: SharePlan) -> None:
        if self._server is not None:
            self._server.serve_plan(action)

    # --- joining ------------------------------------------------------------------------------

    def join(self, token: str, request: Join) -> bool:
        """Enter a cluster, for the client of this token; return whether all nodes are known.

        Raises:
            MalformedError: an impossible request.
            UnavailableError: this node is not one of the members.
        """
        known = self._clusters.get(request.cluster)
        if known is None:
            self._check(request)
            known = self._enter(request)
        elif not known.same(request):
            raise MalformedError("another cluster of the same name")
        for node, member in enumerate(request.members):
            self._replace(known, node, member)
        known.tokens.add(token)
        return known.complete

    def _check(self, request: Join) -> None:
        nodes = [one.node for one in request.members]
        if len(request.key) != KEY_NBYTES or not 2 <= len(nodes) <= _MAX_MEMBERS:
            raise MalformedError("a key of another size, or too few or too many nodes")
        if len(set(nodes)) != len(nodes) or not 0 < len(request.ranks) <= _MAX_RANKS:
            raise MalformedError("nodes that are twice there, or too many ranks")
        if min(request.ranks) < 0 or max(request.ranks) >= len(nodes):
            raise MalformedError("a rank on a node that is no member")
        if request.me >= len(nodes):
            raise MalformedError("a place outside the list of nodes")
        if self._server is None or not (self.node in nodes or request.me >= 0):
            raise UnavailableError("this node is not one of the cluster's")

    def _enter(self, request: Join) -> Cluster:
        assert self._server is not None  # noqa: S101  `_check` has seen to that
        nodes = [one.node for one in request.members]
        me = request.me if request.me >= 0 else nodes.index(self.node)
        who = Credentials(nodes[me], request.cluster, request.key, self._encrypt)
        origins = [
            SOURCE if node == me else self._new_origin(one, who)
            for node, one in enumerate(request.members)
        ]
        own = self._member(nodes[me])
        cluster = Cluster(request, me, own, origins, time.monotonic(), self._lost_s)
        self._clusters[request.cluster] = cluster
        self._server.admit(request.cluster, request.key, nodes[me])
        if self._beats is None:
            from creel.daemon.peers.heartbeats import Heartbeats  # asyncio takes 16 ms

            on_beat = self._on_loop(partial(self._on_beat, answer=True))
            self._beats = Heartbeats(on_beat, self._on_loop(self._refused))
        self._update_beats(cluster, now=False)
        for node, one in enumerate(request.members):
            if node != cluster.me:
                self._beats.watch(node, one, who, cluster.members.limits.beat_s)
        log.info("joined %d nodes", len(request.members))
        return cluster

    def _new_origin(self, peer: Member, who: Credentials) -> int:
        """Give a peer the lowest number that is free."""
        number = next(n for n in count() if n not in self._peers)
        self._peers[number] = peer, who
        return number

    def client_left(self, token: str) -> None:
        """Leave the clusters of a client that has disconnected, if it was the last one there."""
        for cluster in list(self._clusters.values()):
            cluster.tokens.discard(token)
            if not cluster.tokens:
                self._leave(cluster)

    def _leave(self, cluster: Cluster) -> None:
        """End a cluster: its nodes get nothing, and none of them is asked any more."""
        del self._clusters[cluster.name]
        if self._server is not None:
            self._server.expel(cluster.name)
        if self._beats is not None:
            self._beats.forget(cluster.name)
        self._handle(ClusterChanged(cluster.name, None))
        for number in cluster.origins:
            if number != SOURCE:
                self._unreachable(number)
                del self._peers[number]

    # --- members ------------------------------------------------------------------------------

    def view(self, name: str) -> ClusterView | None:
        """The nodes of a cluster; None where this node does not belong to it."""
        known = self._clusters.get(name)
        return known.view if known is not None and known.complete else None

    def tick(self, now: float) -> None:
        """Notice silent nodes; tell the core which are there, and log changes that are due."""
        self._tell_disk_size()
        for cluster in self._clusters.values():
            due = cluster.members.due(now)
            if due is not None:
                change = cluster.members.change(due, self._core.plans.moments(cluster.name))
                log.warning("plans now count on %s of the nodes", cluster.names(due))
                log.debug("change %s at %s", change.id, change.moments)
                self._update_beats(cluster, now=True)
            plans = self._core.plans.digests(cluster.name)
            if plans != cluster.plans:
                cluster.plans = plans
                self._update_beats(cluster, now=False)
            self._place_by_hash(cluster, self._core.plans.by_hash(cluster.name))
            self._update_view(cluster, now)

    def _tell_disk_size(self) -> None:
        """Tell all nodes where the disk has another size now: it was lost, or is full earlier."""
        nbytes, unit = self._core.disk.nbytes, self._core.disk.unit
        known_nbytes = self._disk[0]
        if abs(nbytes - known_nbytes) * _DISK_PARTS <= known_nbytes:
            return
        self._disk = nbytes, unit
        for cluster in self._clusters.values():
            self._resize(cluster, cluster.me, nbytes, unit)
            self._update_beats(cluster, now=True)

    def _resize(self, cluster: Cluster, node: int, nbytes: int, unit: int) -> None:
        """A node's disk has this size now: all plan with it from their next plan on."""
        if cluster.resized(node, nbytes, unit):
            self._handle(ClusterChanged(cluster.name, cluster.view))

    def _place_by_hash(self, cluster: Cluster, datasets: frozenset[str]) -> None:
        """A node reads these datasets for a job on other nodes, too: all nodes are to know that."""
        if cluster.place_by_hash(datasets):
            self._handle(ClusterChanged(cluster.name, cluster.view))
            self._update_beats(cluster, now=True)

    def _update_view(self, cluster: Cluster, now: float) -> None:
        """Tell the core what has changed of a cluster; end fetches from nodes that are gone."""
        before, view = cluster.view, cluster.seen(now)
        if view is before:
            return
        self._handle(ClusterChanged(cluster.name, view))
        for number in set(before.origin.tolist()) - set(view.origin.tolist()):
            log.warning("node %s is not reached", self._peers[number][0].host)
            self._unreachable(number)

    def _update_beats(self, cluster: Cluster, *, now: bool) -> None:
        """Put what this node knows of the cluster's changes into the beats that it sends."""
        assert self._server is not None  # noqa: S101
        assert self._beats is not None  # noqa: S101
        members = cluster.members
        member = cluster.joined[cluster.me]
        known = latest(members.log), members.log, cluster.plans
        beat = wire.PeerBeat(cluster.me, member, *known, tuple(sorted(cluster.view.by_hash)))
        self._server.say(cluster.name, beat)
        self._beats.say(beat, cluster.name, now=now)

    def _on_beat(self, name: str, beat: wire.PeerBeat, *, answer: bool) -> None:
        """Take in a beat of a node; `answer`: it came over the connection that fetches use."""
        cluster = self._clusters.get(name)
        if cluster is None or not cluster.has(beat.node):
            return
        now = time.monotonic()
        self._replace(cluster, beat.node, beat.member)
        if answer and cluster.joined[beat.node].node == beat.member.node:
            cluster.members.heard(beat.node, now)
        if cluster.joined[beat.node].born == beat.member.born:
            self._resize(cluster, beat.node, beat.member.disk_nbytes, beat.member.disk_unit)
        if cluster.members.learn(beat.log):
            self._update_beats(cluster, now=False)
        self._place_by_hash(cluster, frozenset(beat.by_hash))
        self._update_view(cluster, now)
        right = beat.node == authority(cluster.members.log)
        for plan in differing(cluster.plans, beat.plans, authority=right):
            self._handle(PlanDoubted(plan.dataset, plan.seed))
            cluster.plans = ()  # until the next tick

    def _refused(self, name: str, node: int) -> None:
        cluster = self._clusters.get(name)
        if cluster is not None:
            now = time.monotonic()
            cluster.members.refused(node, now)
            self._update_view(cluster, now)

    def _replace(self, cluster: Cluster, node: int, member: Member) -> None:
        """Take another daemon for a node, if it is a younger one."""
        before = cluster.joined[node]
        if node == cluster.me or member.born <= before.born:
            return
        if not before.arena_nbytes and member.node == before.node:
            cluster.found(node, member)  # for the first time, where the list said
            return
        mine = cluster.joined[cluster.me].node
        who = Credentials(mine, cluster.name, cluster.key, self._encrypt)
        number, now = cluster.origins[node], time.monotonic()
        cluster.replaced(node, member, self._new_origin(member, who), now)
        self._update_view(cluster, now)
        self._unreachable(number)
        del self._peers[number]
        if self._beats is not None:
            self._beats.watch(node, member, who, cluster.members.limits.beat_s)
        log.info("node %s has another daemon", member.host)

    # --- asking -------------------------------------------------------------------------------

    def source(self, origin: int, dataset: str) -> PeerSource:
        """Reads a dataset's objects from a peer."""
        member, who = self._peers[origin]
        return PeerSource((member.host, member.port), member.node, dataset, who)

    def ask_plan(self, action: AskPlan) -> None:
        """Ask a peer where objects lie; `PlanShared` is the answer, if there is one."""
        cluster = self._clusters.get(action.cluster)
        origin = None if cluster is None else cluster.authority(time.monotonic())
        if origin is None or action.dataset in self._asking:
            return
        member, who = self._peers[origin]
        self._asking.add(action.dataset)

        def ask() -> None:
            address = member.host, member.port
            plan = ask_plan(address, member.node, who, action.dataset, action.seed)
            self._call_soon(partial(self._plan_came, action.dataset, plan))

        try:
            threading.Thread(target=ask, name="creel-ask-plan", daemon=True).start()
        except RuntimeError:  # no thread to be had: the core asks again
            self._asking.discard(action.dataset)

    def _plan_came(self, dataset: str, plan: SharedPlan | None) -> None:
        self._asking.discard(dataset)
        if plan is not None:
            self._handle(PlanShared(dataset, plan))

    def close(self) -> None:
        """End all connections; nothing is read from the arena afterwards."""
        if self._beats is not None:
            self._beats.close()
        if self._server is not None:
            self._server.close()
