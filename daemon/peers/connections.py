"""Connections of peers to the server: what they ask, what it knows of each, and its credit."""

from __future__ import annotations

import heapq
import secrets
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from creel.cache.memory.buffers import MAX_BUFFERS, cut
from creel.daemon.peers import sealing, wire
from creel.errors import MalformedError
from creel.messages import Message

#: Longest time that a receiver may keep an answer waiting, and what each byte adds.
BLOCKED_S = 5.0
SLOWEST_BPS = 1e6
#: Of one peer: bytes of answers not yet sent, and requests not yet served, before the server stops
#: reading its requests.
QUEUED_NBYTES = 32 << 20
QUEUED_REQUESTS = 256


class Traffic:
    """Bytes of frames to and from peers by what they are for, beside the payload.

    Each connection is counted at its server alone: over all nodes, each byte counts once.
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
    """What is on its way to one peer, over all its connections."""

    nbytes: int = 0
    requests: int = 0
    connections: set[PeerConnection] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether the peer has no credit left."""
        return self.nbytes >= QUEUED_NBYTES or self.requests >= QUEUED_REQUESTS


@dataclass(eq=False)
class Request:
    """A request; once it is served, `left` has what is still to be sent."""

    number: int
    connection: PeerConnection
    call: int  # its number in the connection
    deadline: float
    nbytes: int = 0
    arrays: Sequence[NDArray[Any]] = ()  # of the answer's frame
    answer: Message | None = None  # None: a PeerAnswer
    left: list[memoryview] = field(default_factory=list)
    plain: list[memoryview] = field(default_factory=list)  # to be encrypted before it is sent

    def __lt__(self, other: Request) -> bool:
        return (self.deadline, self.number) < (other.deadline, other.number)


@dataclass(eq=False)
class PeerConnection:
    """A connection that a peer, or somebody unauthenticated, has opened."""

    socket: socket.socket
    since: float
    inbox: bytearray = field(default_factory=bytearray)
    key: bytes = b""
    session: wire.PeerSession | None = None  # set once the peer has said who it is
    sealer: sealing.Sealer | None = None  # None: payload travels as it is
    account: Account | None = None  # set once the peer proved that it has the key
    asked: set[int] = field(default_factory=set)  # requests that are not served yet
    answers: list[Request] = field(default_factory=list)  # a heap
    current: Request | None = None  # the answer that is being sent
    blocked_since: float = 0.0  # 0: the socket takes bytes
    blocked_s: float = 0.0  # seconds that the current answer had to wait
    mask: int = select.EPOLLIN | select.EPOLLRDHUP

    @property
    def expected(self) -> wire.Kind:
        """What the other side may send now."""
        if self.session is None:
            return wire.Greeting
        return wire.Proof if self.account is None else wire.CLIENT_SAYS

    @property
    def next(self) -> Request:
        """The answer to go on with."""
        return self.current or self.answers[0]

    def stuck(self, now: float) -> bool:
        """Whether the receiver takes too long."""
        if not self.blocked_since or self.current is None:
            return False
        allowed = BLOCKED_S + self.current.nbytes / SLOWEST_BPS
        return self.blocked_s + now - self.blocked_since > allowed

    def greeted(
        self, greeting: wire.Greeting, key: bytes, name: str, *, encrypt: bool
    ) -> wire.Challenge:
        """The answer to a greeting; `key` is empty where the cluster is unknown.

        Raises:
            MalformedError: of another protocol, or with an impossible key.
        """
        self.key = key
        agreement = sealing.KeyAgreement() if encrypt else None
        public = agreement.public if agreement is not None else b""
        challenge = wire.Challenge(name, secrets.token_bytes(wire.NONCE_NBYTES), public)
        # A key that nobody has: whether the cluster is known shows in nothing.
        key = key or secrets.token_bytes(wire.KEY_NBYTES)
        self.session = wire.PeerSession(key, greeting, challenge)
        if agreement is not None and greeting.public:
            self.sealer = sealing.Sealer(agreement.cipher(self.session, greeting.public))
        return challenge

    def begin(self, traffic: Traffic) -> Request:
        """Begin the most urgent answer. Its frame is made here: frames are numbered."""
        assert self.session is not None  # noqa: S101
        request = self.current = heapq.heappop(self.answers)
        self.blocked_s = 0.0
        answer = request.answer or wire.PeerAnswer(request.call)
        frame = wire.pack(answer, request.arrays, self.session.answers)
        columns = sum(map(len, request.left)) if request.answer else 0  # else they are payload
        traffic.count(answer, len(frame) + columns)
        if self.sealer is not None:
            request.left, request.plain = [], request.left
        request.left.insert(0, memoryview(frame))
        return request

    def send(self, request: Request, nbytes: int) -> bool:
        """Send about `nbytes` of the current answer; return whether the socket took them all."""
        ready = sum(map(len, request.left[:MAX_BUFFERS])) if self.sealer else nbytes
        while self.sealer is not None and request.plain and ready < nbytes:
            record, request.plain = self.sealer.record(request.plain)
            request.left.append(record)
            ready += len(record)
        portion, _ = cut(request.left[:MAX_BUFFERS], nbytes)
        wanted = sum(map(len, portion))
        try:
            sent = self.socket.sendmsg(portion, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        request.left = cut(request.left, sent)[1]
        return sent == wanted


def send_whole(sock: socket.socket, frame: bytes) -> None:
    """Send a frame of the handshake, for which a new connection has room."""
    if sock.send(frame, socket.MSG_NOSIGNAL) < len(frame):
        raise MalformedError("unauthenticated, and does not read")


def watch(sock: socket.socket) -> None:
    """Have the system notice within seconds that the other side cannot be reached."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
