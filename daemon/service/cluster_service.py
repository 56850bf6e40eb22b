"""Cluster service: membership of this node in the clusters of its jobs, and service to peers."""

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
from creel.policies.cluster.boundary import ClusterView
from creel.policies.cluster.shared_plan import SharedPlan, differing
from creel.settings import ClusterSettings

if TYPE_CHECKING:
    from creel.daemon.peers.heartbeats import Heartbeats

log = logging.getLogger("creel.clusters")

#: Most nodes of a cluster: each sends a beat to each other one, twice a second up to 64 nodes.
_MAX_MEMBERS = 1024
_MAX_RANKS = 1 << 16
#: A pause of the loop, which ticks four times a second, from which on it counts as stopped, in
#: seconds: its peers seem silent, though it is this daemon that did not listen. Not again within so
#: many seconds, or a loop that is always late would never find anybody silent.
_SLEEP_S, _SLEEPS_APART_S = 1.0, 10.0
#: The other nodes are told a new size of the disk if it differs by more than this part (1/n).
_DISK_PARTS = 16


class ClusterService:
    """All clusters of a daemon. Only the loop thread may use it.

    Args:
        arena: holds the objects that peers are served.
        settings: whether payload is encrypted.
        core: gives its plans and the size of the disk.
        handle: gives an event to the core.
        call_soon: runs a function on the loop thread; may be called from any thread.
        unreachable: ends all fetches from a peer, given its origin.
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
        self.node = secrets.token_hex(16)  # this node's name for its peers
        self._born = time.time()  # wall clock; members are told
        self._arena = arena
        self._core = core
        self._handle, self._call_soon, self._unreachable = handle, call_soon, unreachable
        self._encrypt = settings.encrypt
        self._server: PeerServer | None = None
        self._beats: Heartbeats | None = None
        self._clusters: dict[str, Cluster] = {}  # by name
        #: By origin of a fetch: the peer, and this node's credentials for it.
        self._peers: dict[int, tuple[Member, Credentials]] = {}
        self._disk = 0, 1  # bytes and unit of the disk, as the other nodes know them
        self._awake = time.monotonic()  # when the loop last looked at the other nodes
        self._may_sleep = 0.0  # time from which on a pause counts as sleep

    # --- serving ------------------------------------------------------------------------------

    def host(self, address: str, port: int) -> Member:
        """Start to serve peers at this address, if not done before; return this node as a member.

        The server serves nobody before a cluster and its key are known. Port 0: any.

        Raises:
            UnavailableError: the address is not available, peers are served at another port, or
                payload is to be encrypted and cannot be.
        """
        if self._encrypt and (why := sealing.why_not()):
            raise UnavailableError(why)
        if self._server is None:
            self._disk = self._core.disk.nbytes, self._core.disk.unit
            try:
                self._server = PeerServer(
                    address,
                    port,
                    self.node,
                    self._arena,
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
        """Return this node under its name in a cluster."""
        assert self._server is not None  # noqa: S101  peers need an address to ask
        return Member(name, *self._server.address, self._arena.nbytes, self._born, *self._disk)

    def traffic(self) -> dict[str, int]:
        """Return the bytes to and from peers by purpose; empty if this node serves no peers."""
        if self._server is None:
            return {}
        return {"payload": self._server.nbytes, **self._server.traffic.nbytes}

    def _on_loop(self, call: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that runs `call` on the loop thread."""
        return lambda *args: self._call_soon(partial(call, *args))

    def serve(self, action: ServeObjects) -> None:
        if self._server is not None:
            self._server.serve(action)

    def share_plan(self, action: SharePlan) -> None:
        if self._server is not None:
            self._server.serve_plan(action)

    # --- joining ------------------------------------------------------------------------------

    def join(self, token: str, request: Join) -> bool:
        """Enter a cluster for the client of this token; return whether all members are known.

        Raises:
            MalformedError: the request is invalid.
            UnavailableError: this node is not one of the members.
        """
        known = self._clusters.get(request.cluster)
        if known is None:
            self._check(request)
            known = self._enter(request)
        elif not known.same(request):
            raise MalformedError("there is another cluster of the same name")
        for node, member in enumerate(request.members):
            self._replace(known, node, member)
        known.tokens.add(token)
        return known.complete(time.monotonic())

    def _check(self, request: Join) -> None:
        nodes = [member.node for member in request.members]
        if len(request.key) != KEY_NBYTES or not 2 <= len(nodes) <= _MAX_MEMBERS:
            raise MalformedError("a key of a wrong size, or too few or too many nodes")
        if len(set(nodes)) != len(nodes) or not 0 < len(request.ranks) <= _MAX_RANKS:
            raise MalformedError("a node is listed twice, or there are no or too many ranks")
        if min(request.ranks) < 0 or max(request.ranks) >= len(nodes):
            raise MalformedError("a rank runs on a node that is no member")
        if request.me >= len(nodes):
            raise MalformedError("a place outside the list of nodes")
        if self._server is None or not (self.node in nodes or request.me >= 0):
            raise UnavailableError("this node is not one of the cluster's")

    def _enter(self, request: Join) -> Cluster:
        assert self._server is not None  # noqa: S101  `_check` makes sure
        nodes = [member.node for member in request.members]
        me = request.me if request.me >= 0 else nodes.index(self.node)
        credentials = Credentials(nodes[me], request.cluster, request.key, self._encrypt)
        origins = [
            SOURCE if node == me else self._new_origin(member, credentials)
            for node, member in enumerate(request.members)
        ]
        own = self._member(nodes[me])
        cluster = Cluster(request, me, own, origins, time.monotonic())
        self._clusters[request.cluster] = cluster
        self._server.admit(request.cluster, request.key, nodes[me])
        if self._beats is None:
            from creel.daemon.peers.heartbeats import Heartbeats  # asyncio takes 16 ms

            on_beat = self._on_loop(partial(self._on_beat, answer=True))
            self._beats = Heartbeats(on_beat, self._on_loop(self._refused))
        self._update_beats(cluster, now=False)
        for node, member in enumerate(request.members):
            if node != cluster.me:
                self._beats.watch(node, member, credentials, cluster.silence.limits.beat_s)
        log.info("joined %d nodes", len(request.members))
        return cluster

    def _new_origin(self, peer: Member, credentials: Credentials) -> int:
        """Give a peer the lowest free number and return it."""
        number = next(n for n in count() if n not in self._peers)
        self._peers[number] = peer, credentials
        return number

    def client_left(self, token: str) -> None:
        """Leave the clusters in which a client that has disconnected was the last one."""
        for cluster in list(self._clusters.values()):
            cluster.tokens.discard(token)
            if not cluster.tokens:
                self._leave(cluster)

    def _leave(self, cluster: Cluster) -> None:
        """End a cluster: stop serving its nodes and fetching from them."""
        del self._clusters[cluster.name]
        if self._server is not None:
            self._server.expel(cluster.name)
        if self._beats is not None:
            self._beats.remove(cluster.name)
        self._handle(ClusterChanged(cluster.name, None))
        for number in cluster.origins:
            if number != SOURCE:
                self._unreachable(number)
                del self._peers[number]

    # --- members ------------------------------------------------------------------------------

    def view(self, name: str) -> ClusterView | None:
        """Return the view of a cluster; None if unknown, or not all of its members are known."""
        known = self._clusters.get(name)
        there = known is not None and known.complete(time.monotonic())
        return known.view if known is not None and there else None

    def tick(self, now: float) -> None:
        """Detect silent nodes, and give the core the views."""
        self._wake(now)
        self._tell_disk_size()
        for cluster in self._clusters.values():
            plans = self._core.plans.digests(cluster.name)
            if plans != cluster.plans:
                cluster.plans = plans
                self._update_beats(cluster, now=False)
            self._place_by_hash(cluster, self._core.plans.by_hash(cluster.name))
            self._update_view(cluster, now)

    def _wake(self, now: float) -> None:
        """Count no silence of other nodes for a time in which this loop did not run."""
        slept_s, self._awake = now - self._awake, now
        if slept_s > _SLEEP_S and now >= self._may_sleep:
            self._may_sleep = now + _SLEEPS_APART_S
            for cluster in self._clusters.values():
                cluster.silence.slept(slept_s)

    def _tell_disk_size(self) -> None:
        """Tell all nodes if the disk's size has changed: it was lost, or has less room."""
        nbytes, unit = self._core.disk.nbytes, self._core.disk.unit
        known_nbytes = self._disk[0]
        if abs(nbytes - known_nbytes) * _DISK_PARTS <= known_nbytes:
            return
        self._disk = nbytes, unit
        for cluster in self._clusters.values():
            self._resize(cluster, cluster.me, nbytes, unit)
            self._update_beats(cluster, now=True)

    def _resize(self, cluster: Cluster, node: int, nbytes: int, unit: int) -> None:
        """Enter the size of a node's disk, which counts from the next plan on."""
        if cluster.resized(node, nbytes, unit):
            self._handle(ClusterChanged(cluster.name, cluster.view))

    def _place_by_hash(self, cluster: Cluster, datasets: frozenset[str]) -> None:
        """Tell core and nodes that a node reads these datasets for a job on other nodes, too."""
        if cluster.place_by_hash(datasets):
            self._handle(ClusterChanged(cluster.name, cluster.view))
            self._update_beats(cluster, now=True)

    def _update_view(self, cluster: Cluster, now: float) -> None:
        """Tell the core of changes of a cluster; end fetches from unreachable nodes."""
        before, view = cluster.view, cluster.seen(now)
        if view is before:
            return
        self._handle(ClusterChanged(cluster.name, view))
        for number in set(before.origin.tolist()) - set(view.origin.tolist()):
            log.warning("node %s cannot be reached", self._peers[number][0].host)
            self._unreachable(number)

    def _update_beats(self, cluster: Cluster, *, now: bool) -> None:
        """Update the beats that this node sends; `now`: send them at once."""
        assert self._server is not None  # noqa: S101
        assert self._beats is not None  # noqa: S101
        beat = wire.PeerBeat(
            cluster.me,
            cluster.joined[cluster.me],
            cluster.plans,
            tuple(sorted(cluster.view.by_hash)),
        )
        self._server.say(cluster.name, beat)
        self._beats.say(beat, cluster.name, now=now)

    def _on_beat(self, name: str, beat: wire.PeerBeat, *, answer: bool) -> None:
        """Handle a beat of a node; `answer`: it answers a beat that this node sent to the peer."""
        cluster = self._clusters.get(name)
        if cluster is None or not cluster.has(beat.node):
            return
        now = time.monotonic()
        self._wake(now)
        self._replace(cluster, beat.node, beat.member)
        if cluster.joined[beat.node].node == beat.member.node:
            note = cluster.silence.heard if answer else cluster.silence.was_asked
            note(beat.node, now)
        if cluster.joined[beat.node].born == beat.member.born:
            self._resize(cluster, beat.node, beat.member.disk_nbytes, beat.member.disk_unit)
        self._place_by_hash(cluster, frozenset(beat.by_hash))
        self._update_view(cluster, now)
        lowest = beat.node == cluster.lowest(now)
        for plan in differing(cluster.plans, beat.plans, lowest=lowest):
            self._handle(PlanDoubted(plan.dataset, plan.seed))
            cluster.plans = ()  # until the next tick

    def _refused(self, name: str, node: int) -> None:
        cluster = self._clusters.get(name)
        if cluster is not None:
            now = time.monotonic()
            cluster.silence.refused(node, now)
            self._update_view(cluster, now)

    def _replace(self, cluster: Cluster, node: int, member: Member) -> None:
        """Replace a node's daemon by `member`, if that is younger."""
        before = cluster.joined[node]
        if node == cluster.me or member.born <= before.born:
            return
        if not before.arena_nbytes and member.node == before.node:
            cluster.first_answer(node, member)  # its first answer, at the address in the list
            self._handle(ClusterChanged(cluster.name, cluster.view))
            return
        mine = cluster.joined[cluster.me].node
        credentials = Credentials(mine, cluster.name, cluster.key, self._encrypt)
        number, now = cluster.origins[node], time.monotonic()
        cluster.replaced(node, member, self._new_origin(member, credentials), now)
        self._update_view(cluster, now)
        self._unreachable(number)
        del self._peers[number]
        if self._beats is not None:
            self._beats.watch(node, member, credentials, cluster.silence.limits.beat_s)
        log.info("node %s has another daemon", member.host)

    # --- asking -------------------------------------------------------------------------------

    def source(self, origin: int, dataset: str) -> PeerSource:
        """Return a reader of a dataset's objects from a peer."""
        member, credentials = self._peers[origin]
        return PeerSource((member.host, member.port), member.node, dataset, credentials)

    def ask_plan(self, action: AskPlan) -> None:
        """Ask a peer for its plan, in a thread; the core gets `PlanShared`."""

        def answered(plan: SharedPlan | None) -> None:
            self._handle(PlanShared(action.dataset, action.seed, plan))

        def ask(member: Member, credentials: Credentials) -> None:
            self._call_soon(
                partial(
                    answered,
                    ask_plan(
                        (member.host, member.port),
                        member.node,
                        credentials,
                        action.dataset,
                        action.seed,
                    ),
                )
            )

        try:
            peer = self._peers[action.origin]
            threading.Thread(target=ask, args=peer, name="creel-ask-plan", daemon=True).start()
        except (KeyError, RuntimeError):  # it has left, or the system gives no thread
            self._call_soon(partial(answered, None))

    def close(self) -> None:
        """End all connections; the arena is not read afterwards."""
        if self._beats is not None:
            self._beats.close()
        if self._server is not None:
            self._server.close()
