"""Request socket: plans, waits and commands after the handshake, over one ROUTER socket.

A message that reaches the core is well-formed and concerns only its sender: every message carries
its client's token, and arrays are checked against the dataset. A client that sends an invalid plan
loses its control connection; messages without a valid token are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from creel.daemon.service.node import Node
from creel.daemon.service.registry import SessionRecord
from creel.daemon.service.sockets import commands
from creel.daemon.service.sockets.control_socket import ControlSocket
from creel.errors import ConfigError, MalformedError, UnavailableError
from creel.messages import (
    Begin,
    Command,
    CommandReply,
    Deal,
    DealtSamples,
    Extend,
    Failed,
    Follow,
    RequestMessage,
    Truncate,
    Wait,
    arrays_of,
    decode,
    encode,
    request_address,
)

log = logging.getLogger("creel.request_socket")

_MESSAGES = 64  # most messages in a turn, so that a flood leaves time for other work
_MAX_TURN_S = 0.01  # longest turn, except for its last message
_MAX_PIECE = 1 << 20  # most reads, and steps, in a message
_MAX_FRAME = 16 << 20  # bytes; above the size of such a piece, so that an excess is reported


class RequestSocket:
    """The ROUTER socket, served by the loop thread."""

    def __init__(
        self, node: Node, control_socket: ControlSocket, context: zmq.Context[Any]
    ) -> None:
        self._node = node
        self._control_socket = control_socket
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.RCVHWM, 256)
        self._socket.setsockopt(zmq.SNDHWM, 4096)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        with contextlib.suppress(zmq.ZMQError, AttributeError):  # an optional feature of libzmq
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self.address = request_address(os.getuid(), secrets.token_hex(16))
        self._socket.bind(self.address)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def turn(self) -> bool:
        """Handle a bounded number of messages; return whether more may wait."""
        until = time.monotonic() + _MAX_TURN_S
        for _ in range(_MESSAGES):
            if time.monotonic() > until:
                break
            if not self.more():
                return False
            try:
                client, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return False
            self._message(client.bytes, frames)
        return True

    def more(self) -> bool:
        """Return whether messages wait; to be called after sending, which may consume the wake-up.

        Also to be called before receiving: libzmq then notices all clients that have sent messages.
        By itself it checks only every 100 message parts while one client has more.
        """
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, client: bytes, message: Any) -> None:
        """Send a message; it is dropped if the client does not read its answers."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([client, encode(message)], zmq.DONTWAIT)

    def close(self) -> None:
        """Close the socket; pending messages have 0.1 s to be sent."""
        self._socket.close(linger=100)

    def _message(self, client: bytes, frames: list[zmq.Frame]) -> None:
        token = ""
        try:
            message = self._authenticated(frames)
            token = message.token
            self._request(client, message, [f.buffer for f in frames[1:]])
        except MalformedError as e:
            if token:
                self._control_socket.drop(token, str(e))
        except Exception:  # a bug of ours, or no memory: only the sender loses its connection
            log.exception("a message could not be handled")
            if token:
                self._control_socket.drop(token, "its message could not be handled")

    def _authenticated(self, frames: list[zmq.Frame]) -> Any:
        if not frames:
            raise MalformedError("a message without a body")
        message = decode(frames[0].buffer, RequestMessage)
        if not self._control_socket.knows(message.token):
            raise MalformedError("an unknown token")
        return message

    def _request(self, client: bytes, message: Any, frames: list[memoryview]) -> None:
        if frames and not isinstance(message, Extend | DealtSamples):
            raise MalformedError(f"{type(message).__name__} has no arrays")
        if isinstance(message, Command):
            self._answer_command(client, message)
            return
        try:
            session = self._node.registry.owned(message.token, message.session)
        except UnavailableError as e:
            if isinstance(message, Wait):
                self.send(client, Failed(message.call, str(e)))
            return  # not an error: the session may have ended meanwhile
        if isinstance(message, Wait):
            self._wait(client, session, message)
        elif self._node.shell.state != "draining":  # plans do not change any more then
            self._plan(session, message, frames)

    def _plan(self, session: SessionRecord, message: Any, frames: list[memoryview]) -> None:
        """Handle a message about the plan of a session."""
        sessions = self._node.sessions
        done, steps = self._node.core.planned(session.id)
        if isinstance(message, Extend):
            objects = len(session.dataset.manifest)
            sessions.extended(session, message, _checked(message, frames, steps, objects))
        elif isinstance(message, DealtSamples):
            sessions.sampled(session, message, _samples(message, frames, session))
        elif isinstance(message, Deal | Follow):
            sessions.dealt(session, message)
        elif isinstance(message, Begin):
            self._node.shell.handle(message)
        elif isinstance(message, Truncate):
            if not done <= message.step <= steps:
                raise MalformedError(f"truncate at {message.step} of {steps} steps")
            sessions.truncated(session, message)

    def _wait(self, client: bytes, session: SessionRecord, message: Wait) -> None:
        if not 0 <= message.step < 1 << 62:
            raise MalformedError(f"wait for step {message.step}")
        if not session.wait(client, message.call, message.step):
            self.send(client, Failed(message.call, "too many waits are pending for this session"))
        else:
            self._node.sessions.waiting(session)

    def _answer_command(self, client: bytes, message: Command) -> None:
        try:
            self.send(client, CommandReply(message.call, commands.answer(self._node, message)))
        except (ConfigError, UnavailableError) as e:
            self.send(client, Failed(message.call, str(e)))


def _checked(message: Extend, frames: list[memoryview], steps: int, n: int) -> list[NDArray[Any]]:
    """Check arrays that continue a plan of `steps` steps, of `n` objects; return aligned copies.

    Raises:
        MalformedError: there are not two arrays, the message is too long, its steps do not continue
            the plan, an id is out of range, or the ends are out of order.
    """
    arrays = arrays_of(message, frames)
    if max(map(len, arrays)) > _MAX_PIECE:
        raise MalformedError(f"a plan comes in pieces of {_MAX_PIECE} reads or steps at most")
    objects, ends = (np.array(a) for a in arrays)
    if message.step != steps or message.epoch < 0:
        raise MalformedError(f"extend at step {message.step}, known are {steps}")
    if len(ends) == 0 or ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] != len(objects):
        raise MalformedError("the ends of steps do not fit the objects")
    if len(objects) and (objects.min() < 0 or objects.max() >= n):
        raise MalformedError(f"object ids outside [0, {n})")
    return [objects, ends]


def _samples(
    message: DealtSamples, frames: list[memoryview], session: SessionRecord
) -> NDArray[np.int32]:
    """Check which object each of some samples is; return an aligned copy.

    Raises:
        MalformedError: the piece is too long or not one of the samples, or an id is out of range.
    """
    (objects,) = (np.array(a, np.int32) for a in arrays_of(message, frames))
    n, last = len(session.dataset.manifest), message.first + len(objects)
    if not 0 < len(objects) <= _MAX_PIECE or not 0 <= message.first < last <= message.samples:
        raise MalformedError(f"samples {message.first} to {last} of {message.samples}")
    if message.samples >= 1 << 31:
        raise MalformedError(f"{message.samples} samples")
    if objects.min() < 0 or objects.max() >= n:
        raise MalformedError(f"object ids outside [0, {n})")
    return objects
