"""Whether the nodes of a job reach each other, how fast, and whether their clocks agree.

`srun -N4 creel doctor --nodes auto` runs on each node: each serves the others for a while, and asks
those after it in the list. Nothing but zeros and the time is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from creel.cli.checks.finding import Finding, judged
from creel.errors import ConfigError
from creel.units import format_size

_NBYTES = 64 << 20  # sent by each node that is asked
_PEERS = 8  # most nodes that each one asks
_WAIT_S = 20.0  # longest time that another node may take to start its doctor
_MEASURED_S = 3.0  # longest time of one measurement
_TIME = struct.Struct("<d")
#: Below this rate objects travel hardly faster than from a storage: 1 Gbit/s.
_SLOW_BPS = 125e6
_CLOCK_S = 1.0


class NodeAnswer(NamedTuple):
    """What another node answered; `reason`: why it could not be asked, else ""."""

    host: str
    reason: str = ""
    Bps: float = 0.0
    ahead_s: float = 0.0


def findings(setting: str, port: int) -> Iterator[Finding]:
    """Yield what is wrong between this node and others of its job.

    Args:
        setting: the nodes, as in `cluster.hosts`.
        port: at which each node serves the others meanwhile.

    Raises:
        ConfigError: a list that names no nodes, or not this one.
    """
    from creel.loader.client.cluster.hostlist import hosts_of
    from creel.loader.client.cluster.listed import own_place

    hosts = hosts_of(setting, os.environ)
    if len(hosts) < 2:
        raise ConfigError("--nodes names fewer than two nodes: run it by srun on all of a job")
    me, asked = own_place(hosts, os.environ), min(_PEERS, len(hosts) - 1)
    try:
        server = socket.create_server(("", port), backlog=64)
    except OSError as e:
        yield Finding("nodes", "bad", f"port {port}: {e.strerror}", "name another one with --port")
        return
    until = time.monotonic() + _WAIT_S + asked * _MEASURED_S
    with server:
        serving = threading.Thread(target=_serve, args=(server, asked), daemon=True)
        serving.start()
        for k in range(1, asked + 1):
            yield from judge(ask(hosts[(me + k) % len(hosts)], port))
        serving.join(max(until - time.monotonic(), 0))


def judge(answer: NodeAnswer) -> Iterator[Finding]:
    """Yield what an answer says: the way to that node, and its clock."""
    if answer.reason:
        remedy = "start it on all nodes at once (srun), and let a firewall pass TCP between them"
        yield Finding("nodes", "bad", f"{answer.host}: {answer.reason}", remedy)
        return
    speed = f"{format_size(int(answer.Bps))}/s from {answer.host}"
    remedy = "is that the fast network? list the nodes by their names there (cluster.hosts)"
    yield judged("nodes", speed, remedy if answer.Bps < _SLOW_BPS else "")
    if abs(answer.ahead_s) > _CLOCK_S:
        way = "ahead" if answer.ahead_s > 0 else "behind"
        clock = f"the clock of {answer.host} is {abs(answer.ahead_s):,.1f} s {way}"
        yield Finding("clock", "warn", clock, "let all nodes use one NTP server")


def ask(host: str, port: int, wait_s: float = _WAIT_S) -> NodeAnswer:
    """Ask a node for the time and for bytes; wait until its doctor has started."""
    until = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection(
                (host, port), timeout=max(until - time.monotonic(), 0.1)
            ) as way:
                return _measured(host, way)
        except OSError as e:
            if time.monotonic() > until or isinstance(e, TimeoutError):
                return NodeAnswer(host, f"not reached at port {port}: {e.strerror or e}")
        time.sleep(0.1)


def _measured(host: str, way: socket.socket) -> NodeAnswer:
    way.settimeout(_PEERS * _MEASURED_S)  # it may serve others first
    way.sendall(b"?")
    ahead_s = _TIME.unpack(_exactly(way, _TIME.size))[0] - time.time()
    before, done = time.perf_counter(), 0
    piece = bytearray(1 << 20)
    while time.perf_counter() < before + _MEASURED_S and (got := way.recv_into(piece)):
        done += got
    return NodeAnswer(host, "", done / max(time.perf_counter() - before, 1e-9), ahead_s)


def _exactly(way: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        piece = way.recv(nbytes - len(got))
        if not piece:
            raise ConnectionResetError("the other node has closed the connection")
        got += piece
    return got


def _serve(server: socket.socket, times: int) -> None:
    """Answer so many nodes, one after the other."""
    for _ in range(times):
        with contextlib.suppress(OSError):
            way = server.accept()[0]
            with way:
                way.settimeout(_MEASURED_S)
                way.recv(1)
                way.sendall(_TIME.pack(time.time()))
                way.sendall(bytes(_NBYTES))
