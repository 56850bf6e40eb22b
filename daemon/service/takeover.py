"""Takeover: a service that finds an embedded daemon at its address asks it to make way.

A training process starts a daemon where none listens, also in the second that a service needs to
restart. Without this the service could not come back before that training ends.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import zmq

from creel.errors import MalformedError
from creel.messages import (
    MAX_BODY,
    PROTOCOL,
    Command,
    CommandReply,
    ControlReply,
    Hello,
    RequestReply,
    Welcome,
    decode,
    encode,
)
from creel.peers import peer_of

_TIMEOUT_S = 2.0


def released(address: str) -> bool:
    """Whether the embedded daemon at `address` freed it; that daemon ends with its last client.

    False for a service, for a daemon of another user, and for one that does not answer or cannot be
    understood.
    """
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    ) as control_socket:
        control_socket.settimeout(_TIMEOUT_S)
        try:
            welcome = _greet(control_socket, address)
            return welcome is not None and _ask_to_stop(welcome)
        except (OSError, MalformedError):
            return False


def _greet(control_socket: socket.socket, address: str) -> Welcome | None:
    control_socket.connect(address)
    if peer_of(control_socket).uid != os.getuid():
        return None
    control_socket.send(encode(Hello(PROTOCOL, "cli", os.getpid(), "")))
    body, fds, _, _ = socket.recv_fds(control_socket, MAX_BODY, 4, socket.MSG_CMSG_CLOEXEC)
    for fd in fds:
        os.close(fd)
    reply = decode(body, ControlReply)
    return reply if isinstance(reply, Welcome) else None


def _ask_to_stop(welcome: Welcome) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as request_socket:
        request_socket.linger = 0
        request_socket.rcvtimeo = int(_TIMEOUT_S * 1000)
        request_socket.connect(welcome.request_address)
        status = _answer(request_socket, Command(welcome.token, 1, "status", {}))
        if status is None or not status.get("embedded"):
            return False
        return (
            _answer(request_socket, Command(welcome.token, 2, "stop", {"now": False})) is not None
        )


def _answer(request_socket: zmq.Socket[bytes], ask: Command) -> dict[str, Any] | None:
    try:
        request_socket.send(encode(ask))
        reply = decode(request_socket.recv_multipart()[0], RequestReply)
    except zmq.ZMQError:
        return None
    return reply.body if isinstance(reply, CommandReply) else None
