"""The daemon's sockets with few descriptors, or with one client that is busier than others."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq

from creel.daemon.service.sockets.control_socket import ControlSocket
from creel.daemon.service.sockets.request_socket import RequestSocket
from creel.messages import Command, Extend, encode
from kit import descriptors, until

pytestmark = pytest.mark.timeout(120)


def test_a_client_that_knocks_while_descriptors_are_short_keeps_no_loop_awake(
    tmp_path: Path,
) -> None:
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        address = str(tmp_path / "desk")
        host: Any = None  # never used
        control_socket = ControlSocket(address, host, epoll, limit=4)
        client.connect(address)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (1 + max(int(fd) for fd, _ in descriptors(eventfds=True)), limits[1]),
        )
        try:
            taken = _all_free()
            assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
            control_socket.ready(control_socket.fd, 0.0)
            assert epoll.poll(0) == []
            assert control_socket.clients == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
        control_socket.sweep(1.0)
        assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
        control_socket.ready(control_socket.fd, 1.0)
        client.send(b"I am in")
        ((fd, _),) = epoll.poll(10)
        assert fd != control_socket.fd
        assert control_socket.handles(fd)
        control_socket.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOBUFS, errno.ENFILE])
def test_a_client_that_knocks_while_the_system_is_short_ends_no_daemon(
    number: int, tmp_path: Path
) -> None:
    address, short = str(tmp_path / "desk"), OSError(number, os.strerror(number))
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        host: Any = None
        control_socket = ControlSocket(address, host, epoll, limit=8)
        client.connect(address)
        with mock.patch.object(socket.socket, "accept", side_effect=short):
            control_socket.ready(control_socket.fd, 0.0)
        assert epoll.poll(0) == []
        control_socket.sweep(0.0)
        assert epoll.poll(0) == [(control_socket.fd, select.EPOLLIN)]
        control_socket.close()


def _all_free() -> list[int]:
    fds = []
    with contextlib.suppress(OSError):
        while True:
            fds.append(os.dup(0))
    return fds


def test_a_busy_client_does_not_hold_up_the_messages_of_others(tmp_path: Path) -> None:
    heard: list[str] = []
    control_socket = mock.Mock()
    control_socket.knows.side_effect = heard.append  # returns None: an unknown token

    def message(token: str) -> bytes:
        return encode(Command(token, 1, "status", {}))

    with zmq.Context(io_threads=1) as context, contextlib.ExitStack() as stack:
        requests = RequestSocket(mock.Mock(), control_socket, context)
        stack.callback(requests.close)
        busy, other, ping, pong = (
            stack.enter_context(context.socket(kind))
            for kind in (zmq.DEALER, zmq.DEALER, zmq.PUSH, zmq.PULL)
        )
        for client in (busy, other):
            client.linger = 0
            client.connect(requests.address)
        pong.bind(f"ipc://{tmp_path}/pong")
        ping.connect(f"ipc://{tmp_path}/pong")

        def moved() -> None:
            """Wait until libzmq's thread has moved all messages sent so far."""
            for _ in range(3):
                ping.send(b"")
                pong.recv()

        other.send(message("other"))
        until(requests.more)
        assert not requests.turn()
        for _ in range(500):
            busy.send(message("busy"))
        moved()
        assert requests.more()
        other.send(message("other"))
        moved()
        requests.turn()
        assert "other" in heard[1:10]


def test_messages_about_plans_are_ignored_while_draining() -> None:
    """The core does not change then, so that a plan's next piece would not seem to fit."""
    node, control_socket = mock.Mock(), mock.Mock()
    node.core.planned.return_value = 0, 0
    session = node.registry.owned.return_value
    session.dataset.manifest = range(9)
    piece = [np.zeros(1, np.int32).tobytes(), np.ones(1, np.int64).tobytes()]

    with zmq.Context(io_threads=1) as context, contextlib.ExitStack() as stack:
        requests = RequestSocket(node, control_socket, context)
        stack.callback(requests.close)
        client = stack.enter_context(context.socket(zmq.DEALER))
        client.linger = 0
        client.connect(requests.address)

        def send(step: int) -> None:
            client.send_multipart([encode(Extend("token", 1, 0, step)), *piece])
            until(requests.more)
            requests.turn()

        node.shell.state = "draining"
        send(3)
        control_socket.drop.assert_not_called()
        node.sessions.extended.assert_not_called()
        node.shell.state = "serving"
        send(3)
        control_socket.drop.assert_called_once_with("token", "extend at step 3, known are 0")
        send(0)
        assert node.sessions.extended.call_count == 1
