"""Connections of peers to the server: their requests, state, and credit."""

from __future__ import annotations

import heapq
import secrets
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from creel.cache.memory.buffers import cut
from creel.daemon.peers import sealing, wire
from creel.errors import MalformedError
from creel.messages import Message
from creel.system.limits import IOV_MAX

#: Longest time, in s, that a receiver may block an answer; each byte of the answer adds 1 / rate.
BLOCKED_S = 5.0
SLOWEST_BPS = 1e6
#: Credit of one peer: unsent bytes of answers, and unserved requests, at which the server stops
#: reading the peer's requests.
QUEUED_NBYTES = 32 << 20
QUEUED_REQUESTS = 256


class Traffic:
    """Bytes of frames to and from peers by purpose, without the payload.

    Only the server of a connection counts them, so that each byte counts once over all nodes.
    """

    def __init__(self) -> None:
        self.nbytes = dict.fromkeys(("handshakes", "requests", "plans", "heartbeats"), 0)

    def count(self, message: Message, nbytes: int) -> None:
        self.nbytes[_PURPOSE[type(message)]] += nbytes


_PURPOSE: dict[type[Message], str] = {
    **dict.fromkeys((wire.Greeting, wire.Challenge, wire.Proof), "handshakes"),
    **dict.fromkeys((wire.PeerRequest, wire.PeerAnswer), "requests"),
    **dict.fromkeys((wire.PlanRequest, wire.PlanAnswer), "plans"),
    wire.PeerBeat: "heartbeats",
}


@dataclass(eq=False)
class Account:
    """Bytes and requests pending for one peer, over all its connections."""

    nbytes: int = 0
    requests: int = 0
    connections: set[PeerConnection] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether the peer has no credit left."""
        return self.nbytes >= QUEUED_NBYTES or self.requests >= QUEUED_REQUESTS


@dataclass(eq=False)
class Request:
    """A request of a peer; once it is served, `left` has the bytes still to be sent."""

    number: int
    connection: PeerConnection
    call: int  # number of the request in its connection
    deadline: float
    nbytes: int = 0
    arrays: Sequence[NDArray[Any]] = ()  # arrays in the frame of the answer
    answer: Message | None = None  # None: a PeerAnswer
    left: list[memoryview] = field(default_factory=list)
    plain: list[memoryview] = field(default_factory=list)  # payload to be encrypted before sending

    def __lt__(self, other: Request) -> bool:
        return (self.deadline, self.number) < (other.deadline, other.number)


@dataclass(eq=False)
class PeerConnection:
    """A connection from a peer, or from an unauthenticated client."""

    socket: socket.socket  # to the peer
    since: float  # monotonic seconds
    inbox: bytearray = field(default_factory=bytearray)  # bytes that are no whole message yet
    key: bytes = b""  # of the cluster that it greeted for
    session: wire.PeerSession | None = None  # set once the peer has sent its Greeting
    sealer: sealing.Sealer | None = None  # None: payload is not encrypted
    account: Account | None = None  # set once the peer has proved that it has the key
    asked: set[int] = field(default_factory=set)  # numbers of requests that are not served yet
    answers: list[Request] = field(default_factory=list)  # a heap
    current: Request | None = None  # the answer being sent
    blocked_since: float = 0.0  # time since when the socket takes no bytes; 0: it takes them
    blocked_s: float = 0.0  # seconds for which the current answer was blocked before
    mask: int = select.EPOLLIN | select.EPOLLRDHUP  # what epoll waits for

    @property
    def expected(self) -> wire.Kind:
        """Kinds of messages that the other side may send now."""
        if self.session is None:
            return wire.Greeting
        return wire.Proof if self.account is None else wire.CLIENT_SAYS

    @property
    def next(self) -> Request:
        """The answer to send next: the current one, or else the most urgent."""
        return self.current or self.answers[0]

    def stuck(self, now: float) -> bool:
        """Return whether the receiver takes too long to read the current answer."""
        if not self.blocked_since or self.current is None:
            return False
        allowed = BLOCKED_S + self.current.nbytes / SLOWEST_BPS
        return self.blocked_s + now - self.blocked_since > allowed

    def greeted(
        self, greeting: wire.Greeting, key: bytes, name: str, *, encrypt: bool
    ) -> wire.Challenge:
        """Return the answer to a greeting; `key` is empty for an unknown cluster.

        Raises:
            MalformedError: the greeting has another protocol, or an invalid public key.
        """
        self.key = key
        agreement = sealing.KeyAgreement() if encrypt else None
        public = agreement.public if agreement is not None else b""
        challenge = wire.Challenge(name, secrets.token_bytes(wire.NONCE_NBYTES), public)
        # A random key for unknown clusters, so that no answer shows whether a cluster is known.
        key = key or secrets.token_bytes(wire.KEY_NBYTES)
        self.session = wire.PeerSession(key, greeting, challenge)
        if agreement is not None and greeting.public:
            self.sealer = sealing.Sealer(agreement.cipher(self.session, greeting.public))
        return challenge

    def begin(self, traffic: Traffic) -> Request:
        """Begin the most urgent answer and make its frame, which gets the next number."""
        assert self.session is not None  # noqa: S101
        request = self.current = heapq.heappop(self.answers)
        self.blocked_s = 0.0
        answer = request.answer or wire.PeerAnswer(request.call)
        frame = wire.pack(answer, request.arrays, self.session.answers)
        columns = sum(map(len, request.left)) if request.answer else 0  # else payload
        traffic.count(answer, len(frame) + columns)
        if self.sealer is not None:
            request.left, request.plain = [], request.left
        request.left.insert(0, memoryview(frame))
        return request

    def send(self, request: Request, nbytes: int) -> bool:
        """Send about `nbytes` of the current answer; return whether the socket took all of them."""
        ready = sum(map(len, request.left[:IOV_MAX])) if self.sealer else nbytes
        while self.sealer is not None and request.plain and ready < nbytes:
            record, request.plain = self.sealer.record(request.plain)
            request.left.append(record)
            ready += len(record)
        portion, _ = cut(request.left[:IOV_MAX], nbytes)
        wanted = sum(map(len, portion))
        try:
            sent = self.socket.sendmsg(portion, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        request.left = cut(request.left, sent)[1]
        return sent == wanted


def send_whole(sock: socket.socket, frame: bytes) -> None:
    """Send a small frame at once: the send buffer of a new connection has room for it."""
    if sock.send(frame, socket.MSG_NOSIGNAL) < len(frame):
        raise MalformedError("the peer does not read the handshake")


def watch(sock: socket.socket) -> None:
    """Set socket options so that the kernel detects an unreachable peer within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
