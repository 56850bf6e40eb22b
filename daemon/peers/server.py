"""The peer server: sends a daemon's objects to the daemons of other nodes.

One thread with one epoll serves all connections. It never blocks, so a receiver that has stopped
costs no thread, and after a few seconds no pinned memory. More threads do not send more on few
cores, and one thread fills 25 Gbit/s (`benchmarks/peers.py`).

Bytes go from the arena straight to the socket. Of all sockets that take bytes, the server chooses
the one whose reader needs its bytes first.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from creel.cache.memory.arena import Arena
from creel.cache.memory.memfd import Descriptor
from creel.daemon.core.events import (
    Event,
    PeerAsked,
    PeerServed,
    PlanAsked,
    ServeObjects,
    SharePlan,
)
from creel.daemon.listener import Listener
from creel.daemon.peers import wire
from creel.daemon.peers.connections import (
    Account,
    PeerConnection,
    Request,
    Traffic,
    send_whole,
    watch,
)
from creel.daemon.peers.payload import payload
from creel.errors import MalformedError
from creel.messages import Message

log = logging.getLogger("creel.peers")

MAX_UNAUTHENTICATED = 64  # connections without proof; one more closes the oldest
HANDSHAKE_S = 3.0
_UNAUTHENTICATED_NBYTES = 2048  # read at once from an unauthenticated connection
_READ_NBYTES = 64 << 10
#: Bytes sent to one connection before the server looks for the most urgent one again. Of 2 MiB the
#: socket takes only a part each time, which costs 1.2 times the CPU (benchmarks/peers.py).
_QUANTUM = 512 << 10
_LONGEST_WAIT_S = 60.0
_SWEEP_S = 0.25


class PeerServer:
    """Serves the arena to peers; only the loop thread may call its methods.

    Args:
        host, port: address to listen at; port 0: any. `address` has the actual one.
        name: name of this node.
        arena: holds the objects; to be closed after the server.
        post: called with each `PeerAsked`, to be answered by one `serve`, with each `PlanAsked`, to
            be answered by one `serve_plan`, and with one `PeerServed` for each `serve`.
        on_beat: called with the cluster and the beat of each node that sends one; `say` sets the
            answer. Both callbacks run in the server's thread and must neither block nor raise.
        encrypt: whether to encrypt payload, and to refuse peers that do not.

    Raises:
        OSError: the address is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        arena: Arena,
        post: Callable[[Event], None],
        on_beat: Callable[[str, wire.PeerBeat], None],
        *,
        encrypt: bool,
    ) -> None:
        self.nbytes = 0  # payload sent
        #: Bytes by what they were for.
        self.traffic = Traffic()
        self._name = name
        self._arena = arena
        self._post = post
        self._on_beat = on_beat
        self._encrypt = encrypt
        #: What this node says of itself, by cluster.
        self._beats: dict[str, wire.PeerBeat] = {}
        #: By cluster.
        self._keys: dict[str, bytes] = {}
        self._names: dict[str, str] = {}  # of this node, by cluster
        #: Of the last request.
        self._number = 0
        self._requests: dict[int, Request] = {}  # not served yet
        #: By descriptor; only the server's thread writes it, others may only look at it.
        self.connections: dict[int, PeerConnection] = {}
        self._unauthenticated: dict[int, PeerConnection] = {}  # oldest first
        self.accounts: dict[tuple[str, str], Account] = {}  # by cluster and name; as `connections`
        #: Connections with something to send and room for it.
        self._sendable: set[PeerConnection] = set()
        self._orders: deque[Callable[[], None]] = deque()  # calls from the loop thread
        #: When dead connections were last closed.
        self._swept = time.monotonic()
        #: Whether the thread is to end.
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        listening.setblocking(False)
        self.address: tuple[str, int] = listening.getsockname()[:2]
        #: What the thread waits for.
        self._epoll = select.epoll()
        #: Accepts connections, while there are few enough.
        self._listener = Listener(listening, self._epoll)
        #: Wakes the thread for `_orders`.
        self._wake = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._epoll.register(self._wake.fd, select.EPOLLIN)
        #: The server's, which owns all connections.
        self._thread = threading.Thread(target=self._run, name="creel-peers", daemon=True)
        self._thread.start()

    # --- in the loop thread -------------------------------------------------------------------

    def admit(self, cluster: str, key: bytes, name: str) -> None:
        """Serve the nodes of a cluster; a new key ends connections with the old one.

        name: this node's name in the cluster.
        """
        if len(key) != wire.KEY_NBYTES:
            raise ValueError(f"a key must have {wire.KEY_NBYTES} bytes")
        self._order(partial(self._names.__setitem__, cluster, name))
        self._order(partial(self._set_key, cluster, key))

    def expel(self, cluster: str) -> None:
        """Stop serving a cluster and end its connections."""
        self._order(partial(self._set_key, cluster, b""))

    def serve(self, answer: ServeObjects) -> None:
        """Answer a `PeerAsked`; the arrays have one element for each of its ids.

        The objects must stay in place until `PeerServed`, which always follows. Does nothing after
        `close`.
        """
        self._order(partial(self._serve, answer))

    def serve_plan(self, answer: SharePlan) -> None:
        """Answer a `PlanAsked`."""
        self._order(partial(self._serve_plan, answer))

    def say(self, cluster: str, beat: wire.PeerBeat) -> None:
        """Answer beats of a cluster's nodes with this beat."""
        self._order(partial(self._beats.__setitem__, cluster, beat))

    def close(self) -> None:
        """End all connections; each pending `serve` gets its `PeerServed` before this returns.

        Afterwards no callback runs and the arena is not read.
        """
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake.fd, 1)
        self._thread.join()
        self._epoll.close()

    def _order(self, order: Callable[[], None]) -> None:
        if not self._closing:
            self._orders.append(order)
            os.eventfd_write(self._wake.fd, 1)

    # --- in the server's thread ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:  # noqa: PERF203  a bug, or no memory: end all connections
                log.exception("peers could not be served")
                self._end_all()
                time.sleep(_SWEEP_S)
        self._listener.socket.close()
        self._end_all()
        self._obey()

    def _end_all(self) -> None:
        for connection in list(self.connections.values()):
            self._end(connection)

    def _turn(self) -> None:
        ready = dict(self._epoll.poll(0 if self._sendable else _SWEEP_S))
        now = time.monotonic()
        if ready.pop(self._wake.fd, None):
            os.eventfd_read(self._wake.fd)
            self._obey()
        accept_ready = ready.pop(self._listener.socket.fileno(), None)
        for fd, event in ready.items():
            if connection := self.connections.get(fd):
                self._guarded(connection, self._ready, connection, event, now)
        if self._sendable:
            connection = min(self._sendable, key=lambda c: c.next)
            self._guarded(connection, self._send, connection, now)
        if now - self._swept >= _SWEEP_S:
            self._sweep(now)
        if accept_ready:  # last, as a new connection may reuse a descriptor that epoll has reported
            self._accept(now)

    def _obey(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _guarded(self, connection: PeerConnection, act: Callable[..., None], *args: Any) -> None:
        """Call `act` for one connection, and end the connection if that fails."""
        try:
            act(*args)
        except (MalformedError, OSError) as e:
            log.debug("a peer's connection ends: %s", str(e))
            self._end(connection)
        except Exception:  # a bug of ours, or no memory
            log.exception("a peer could not be served")
            self._end(connection)

    def _accept(self, now: float) -> None:
        for sock in self._listener.accepted():
            with contextlib.suppress(OSError):  # the peer has left: epoll will report that
                watch(sock)
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self._end(next(iter(self._unauthenticated.values())))
            connection = PeerConnection(sock, now)
            self.connections[sock.fileno()] = self._unauthenticated[sock.fileno()] = connection
            self._epoll.register(sock, connection.mask)

    def _sweep(self, now: float) -> None:
        self._swept = now
        self._listener.resume()
        late = [c for c in self._unauthenticated.values() if now - c.since > HANDSHAKE_S]
        for connection in late + [c for c in self.connections.values() if c.stuck(now)]:
            self._end(connection)

    def _set_key(self, cluster: str, key: bytes) -> None:
        self._keys[cluster] = key
        if not key:
            del self._keys[cluster]
            self._beats.pop(cluster, None)
            self._names.pop(cluster, None)
        for c in list(self.connections.values()):
            if c.session is not None and c.session.greeting.cluster == cluster and c.key != key:
                self._end(c)

    def _end(self, connection: PeerConnection) -> None:
        fd = connection.socket.fileno()
        if fd < 0:
            return
        del self.connections[fd]
        self._unauthenticated.pop(fd, None)
        self._sendable.discard(connection)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        connection.socket.close()
        unsent = connection.answers + ([connection.current] if connection.current else [])
        connection.answers, connection.current = [], None
        for request in unsent:
            self._done(request)
        for number in connection.asked:
            del self._requests[number]
        account = connection.account
        if account is not None and connection.session is not None:
            account.requests -= len(connection.asked)
            account.connections.discard(connection)
            if account.connections:
                self._resume(account)
            else:
                greeting = connection.session.greeting
                del self.accounts[greeting.cluster, greeting.name]

    # --- one connection -----------------------------------------------------------------------

    def _ready(self, connection: PeerConnection, event: int, now: float) -> None:
        if event & ~(select.EPOLLIN | select.EPOLLOUT):
            raise ConnectionResetError("the peer has left")
        if event & select.EPOLLOUT:
            connection.blocked_s += now - connection.blocked_since
            connection.blocked_since = 0.0
            self._watch(connection, select.EPOLLOUT, on=False)
            self._sendable.add(connection)
        if event & select.EPOLLIN:
            room = _READ_NBYTES if connection.account else _UNAUTHENTICATED_NBYTES
            data = connection.socket.recv(room)
            if not data:
                raise ConnectionResetError("the peer has left")
            connection.inbox += data
            self._parse(connection, now)

    def _watch(self, connection: PeerConnection, event: int, *, on: bool) -> None:
        mask = connection.mask | event if on else connection.mask & ~event
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.socket, mask)

    def _parse(self, connection: PeerConnection, now: float) -> None:
        """Handle all complete frames in the inbox, as long as the peer has credit."""
        inbox, size = connection.inbox, wire.HEADER.size
        while len(inbox) >= size and connection.socket.fileno() >= 0:
            if connection.account is not None and connection.account.full:
                self._watch(connection, select.EPOLLIN, on=False)
                return
            kind = connection.expected
            stop = size + wire.following(inbox[:size], kind)
            if len(inbox) < stop:
                break
            session = connection.session
            seal = session.requests if session and connection.account else None
            message, arrays = wire.unpack(inbox[:size], bytes(inbox[size:stop]), kind, seal)
            del inbox[:stop]
            self.traffic.count(message, stop)
            self._handle(connection, message, arrays, now)

    def _resume(self, account: Account) -> None:
        """Read from a peer's connections again if it has credit."""
        if not account.full:
            for c in [c for c in account.connections if not c.mask & select.EPOLLIN]:
                self._watch(c, select.EPOLLIN, on=True)
                self._guarded(c, self._parse, c, time.monotonic())

    def _handle(
        self, connection: PeerConnection, message: Message, arrays: bytes, now: float
    ) -> None:
        if isinstance(message, wire.Greeting):
            known = self._keys.get(message.cluster, b"")
            name = self._names.get(message.cluster, self._name)
            challenge = connection.greeted(message, known, name, encrypt=self._encrypt)
            self._say_at_once(connection, challenge)
        elif isinstance(message, wire.Proof):
            self._admit(connection, message)
        elif isinstance(message, wire.PeerRequest):
            ids, wait_s = wire.requested(message, arrays), min(message.wait_s, _LONGEST_WAIT_S)
            number = self._received(connection, message.number, now + wait_s)
            self._post(PeerAsked(number, message.dataset, ids, wait_s))
        elif isinstance(message, wire.PlanRequest):
            number = self._received(connection, message.number, now)
            self._post(PlanAsked(number, message.dataset, message.seed))
        elif isinstance(message, wire.PeerBeat):
            self._beat(connection, message)

    def _beat(self, connection: PeerConnection, beat: wire.PeerBeat) -> None:
        """Answer a beat at once: a connection with beats carries no other messages."""
        assert connection.session is not None  # noqa: S101
        greeting = connection.session.greeting
        mine = self._beats.get(greeting.cluster)
        if mine is None or connection.answers or connection.current:
            raise MalformedError("a beat of an unknown cluster, or among other requests")
        if beat.member.node != greeting.name:
            raise MalformedError("a beat of another node")
        self._say_at_once(connection, mine, connection.session.answers)
        self._on_beat(greeting.cluster, beat)

    def _admit(self, connection: PeerConnection, proof: wire.Proof) -> None:
        session = connection.session
        assert session is not None  # noqa: S101
        greeting = session.greeting
        if not session.proves("client", proof):
            raise MalformedError(f"no proof that {greeting.name!r} is of {greeting.cluster!r}")
        del self._unauthenticated[connection.socket.fileno()]
        account = self.accounts.setdefault((greeting.cluster, greeting.name), Account())
        account.connections.add(connection)
        connection.account = account
        self._say_at_once(connection, session.proof("server"))

    def _say_at_once(
        self, connection: PeerConnection, message: Message, seal: wire.Seal | None = None
    ) -> None:
        frame = wire.pack(message, seal=seal)
        self.traffic.count(message, len(frame))
        send_whole(connection.socket, frame)

    def _received(self, connection: PeerConnection, call: int, deadline: float) -> int:
        """Note a request that is to be answered; return its number."""
        assert connection.account is not None  # noqa: S101
        if self._encrypt and connection.sealer is None:
            raise MalformedError("the peer does not encrypt payload")
        self._number += 1
        request = Request(self._number, connection, call, deadline)
        self._requests[self._number] = request
        connection.asked.add(self._number)
        connection.account.requests += 1
        return self._number

    # --- answers ------------------------------------------------------------------------------

    def _serve(self, answer: ServeObjects) -> None:
        request = self._pop(answer.request)
        if request is None:
            self._post(PeerServed(answer.request))
        else:
            self._guarded(request.connection, self._prepare, request, answer)

    def _serve_plan(self, answer: SharePlan) -> None:
        request = self._pop(answer.request)
        if request is not None:
            request.answer, column = wire.plan_answer(request.call, answer.plan)
            request.left = [memoryview(column)] if column else []

    def _pop(self, number: int) -> Request | None:
        """Return a request that is to be answered now; None if its connection has ended."""
        request = self._requests.pop(number, None)
        if request is None:
            return None
        connection = request.connection
        connection.asked.discard(number)
        heapq.heappush(connection.answers, request)
        if not connection.blocked_since:
            self._sendable.add(connection)
        return request

    def _prepare(self, request: Request, answer: ServeObjects) -> None:
        account = request.connection.account
        assert account is not None  # noqa: S101
        nbytes, request.left = payload(self._arena, answer.place, answer.nbytes)
        request.arrays = wire.about(nbytes, answer.version, answer.age)
        request.nbytes = sum(map(len, request.left))
        account.nbytes += request.nbytes

    def _send(self, connection: PeerConnection, now: float) -> None:
        """Send one quantum of the most urgent answer."""
        request = connection.current or connection.begin(self.traffic)
        if not connection.send(request, _QUANTUM):
            connection.blocked_since = now
            self._sendable.discard(connection)
            self._watch(connection, select.EPOLLOUT, on=True)
        elif not (request.left or request.plain):
            connection.current = None
            if not connection.answers:
                self._sendable.discard(connection)
            self.nbytes += request.nbytes
            self._done(request)
            if connection.account is not None:
                self._resume(connection.account)

    def _done(self, request: Request) -> None:
        """Release the bytes of a request that was served, or whose connection has ended."""
        request.left = request.plain = []
        account = request.connection.account
        if account is not None:
            account.nbytes -= request.nbytes
            account.requests -= 1
        self._post(PeerServed(request.number))
