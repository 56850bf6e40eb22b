"""PeerLink: a connection to another node's daemon. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import cut
from creel.daemon.peers import sealing, wire
from creel.daemon.peers.connections import watch
from creel.daemon.peers.wire import Credentials
from creel.errors import MalformedError, ProtocolError
from creel.messages import Message
from creel.policies.cluster.shared_plan import SharedPlan
from creel.system.limits import IOV_MAX

log = logging.getLogger("creel.peers")

CONNECT_S = 2.0  # longest time to connect, handshake included
STALL_S = 3.0  # longest pause within a payload
_PLAN_S = 5.0  # longest time until a plan is sent
#: A thread that receives payload is woken for this many bytes, not for each 64 KiB: this halves the
#: CPU time of both sides, at 1.8 times the rate (benchmarks/peers.py, 2 cores).
WAKE_NBYTES = 256 << 10
_CHUNK_NBYTES = 16 << 20  # allocated at once for an object of unknown length


class PeerLink:
    """One authenticated connection; for one thread at a time.

    Raises:
        OSError, MalformedError: from every method, if the connection can no longer be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        peer: str,
        credentials: Credentials,
        connected: Callable[[PeerLink], None] = lambda link: None,  # noqa: ARG005
    ) -> None:
        """`connected` is called with this link before the handshake."""
        until = time.monotonic() + CONNECT_S
        self._limit_s = 0.0
        self._opener: sealing.Opener | None = None  # None: payload is not encrypted
        self._plain = memoryview(b"")  # payload of the latest record that was not consumed yet
        self._sealed = bytearray()  # buffer of the latest record
        self.socket = socket.create_connection(address, CONNECT_S)
        try:
            self.socket.settimeout(None)  # the kernel's limits cost no system call each time
            self._set_limit(socket.SO_SNDTIMEO, STALL_S)
            watch(self.socket)
            connected(self)
            self._shake_hands(peer, credentials, until)
        except BaseException:
            self.socket.close()
            raise

    def _shake_hands(self, peer: str, credentials: Credentials, until: float) -> None:
        nonce = secrets.token_bytes(wire.NONCE_NBYTES)
        agreement = sealing.KeyAgreement() if credentials.encrypt else None
        public = agreement.public if agreement is not None else b""
        greeting = wire.Greeting(
            wire.PEER_PROTOCOL, credentials.cluster, credentials.name, nonce, public
        )
        self.socket.sendall(wire.pack(greeting))
        challenge, _ = self._message(wire.Challenge, until)
        if challenge.name != peer:
            raise MalformedError(f"this is node {challenge.name!r}, not {peer!r}")
        if bool(challenge.public) != credentials.encrypt:
            differs = "does not encrypt payload" if credentials.encrypt else "encrypts payload"
            raise MalformedError(f"node {peer!r} {differs} (cluster.encrypt), unlike this one")
        self._session = wire.PeerSession(credentials.key, greeting, challenge)
        if agreement is not None:
            self._opener = sealing.Opener(agreement.cipher(self._session, challenge.public))
        self.socket.sendall(wire.pack(self._session.proof("client")))
        proof, _ = self._message(wire.Proof, until)
        if not self._session.proves("server", proof):
            raise MalformedError(f"node {peer!r} has another key")

    def ask(self, number: int, dataset: str, ids: NDArray[np.integer], wait_s: float) -> None:
        request = wire.PeerRequest(number, dataset, wait_s)
        self.socket.sendall(wire.pack(request, [ids.astype("<i4")], self._session.requests))

    def ask_plan(self, number: int, dataset: str, seed: int) -> None:
        """Ask for the plan of an epoch; see `wire.PlanRequest`."""
        request = wire.PlanRequest(number, dataset, seed)
        self.socket.sendall(wire.pack(request, seal=self._session.requests))

    def plan(self, until: float) -> SharedPlan | None:
        answer, _ = self._message(wire.PlanAnswer, until, self._session.answers)
        holder = None if answer.holder < 0 else self.whole(answer.holder)
        return wire.shared_plan(answer, holder)

    def answer(self, until: float) -> tuple[int, bytes]:
        """Receive the number of the next answer and its arrays; the payload follows."""
        answer, arrays = self._message(wire.PeerAnswer, until, self._session.answers)
        return answer.number, arrays

    def _message(
        self, kind: type[Message], until: float, seal: wire.Seal | None = None
    ) -> tuple[Any, bytes]:
        header = self._exactly(wire.HEADER.size, until)
        return wire.unpack(header, self._exactly(wire.following(header, kind), until), kind, seal)

    def _exactly(self, nbytes: int, until: float) -> bytes:
        data = b""
        while len(data) < nbytes:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "the peer does not answer")
            self._set_limit(socket.SO_RCVTIMEO, left_s)
            more = self.socket.recv(nbytes - len(data), socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
            data += more
        return data

    def fill(self, buffers: list[memoryview]) -> None:
        """Receive payload into the buffers, none of which is empty."""
        if self._opener is None:
            self._receive(buffers)
            return
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                self._plain = self._plain or self._next_record(self._opener)
                n = min(len(buffer) - at, len(self._plain))
                buffer[at : at + n] = self._plain[:n]
                self._plain, at = self._plain[n:], at + n

    def _next_record(self, opener: sealing.Opener) -> memoryview:
        """Receive the next record and return its payload."""
        header = bytearray(sealing.HEADER.size)
        self._receive([memoryview(header)])
        nbytes = opener.following(header)
        if len(self._sealed) < nbytes:
            self._sealed = bytearray(nbytes)
        sealed = memoryview(self._sealed)[:nbytes]
        self._receive([sealed])
        return memoryview(opener.opened(header, sealed))

    def _receive(self, buffers: list[memoryview]) -> None:
        nbytes = sum(map(len, buffers))
        if nbytes >= 2 * WAKE_NBYTES:
            first, buffers = cut(buffers, nbytes - WAKE_NBYTES)  # WAKE_NBYTES follow the first part
            self._wake_for(WAKE_NBYTES)
            self._fill(first)
            self._wake_for(1)
        self._fill(buffers)

    def _wake_for(self, nbytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _fill(self, buffers: list[memoryview]) -> None:
        while buffers:
            self._set_limit(socket.SO_RCVTIMEO, STALL_S)
            some = buffers[:IOV_MAX]
            received = self.socket.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
            buffers = cut(buffers, received)[1]

    def drain(self, nbytes: int) -> None:
        """Receive and discard payload."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes > 0:
            piece = scratch[: min(nbytes, len(scratch))]
            self.fill([piece])
            nbytes -= len(piece)

    def whole(self, nbytes: int) -> bytes:
        """Receive one object into new memory, which grows only as bytes arrive."""
        chunks = []
        while nbytes > 0:
            chunk = bytearray(min(nbytes, _CHUNK_NBYTES))
            self.fill([memoryview(chunk)])
            chunks.append(chunk)
            nbytes -= len(chunk)
        return b"".join(chunks)

    def _set_limit(self, which: int, seconds: float) -> None:
        """Limit the wait of one system call, which raises BlockingIOError after that time."""
        if which == socket.SO_RCVTIMEO:
            if seconds == self._limit_s:
                return
            self._limit_s = seconds
        micros = max(int(seconds * 1e6), 1)
        self.socket.setsockopt(
            socket.SOL_SOCKET, which, struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
        )

    def shut(self) -> None:
        """End the connection from another thread: a thread that waits for it fails at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def ask_plan(
    address: tuple[str, int], peer: str, credentials: Credentials, dataset: str, seed: int
) -> SharedPlan | None:
    """Ask a peer for the plan of the epoch of this order; return None if it gives none."""
    link = None
    try:
        link = PeerLink(address, peer, credentials)
        link.ask_plan(1, dataset, seed)
        return link.plan(time.monotonic() + _PLAN_S)
    except (OSError, ProtocolError) as e:
        log.debug("node %s has sent no plan: %s", peer, str(e))
        return None
    finally:
        if link is not None:
            link.socket.close()
