"""Objects from one daemon's arena to another's: GB/s and CPU, against a bare socket loop.

    python benchmarks/peers.py [--sizes 150528 3072] [--threads 1 2] [--limits none 2gbit] [--json]

Two processes have an arena each. `creel` reads with `PeerSource` from a `PeerServer`, whose
requests a thread answers as a daemon's loop does; `encrypted` adds `cluster.encrypt`. The baseline,
`raw`, has no protocol: as many threads `sendmsg` the same objects and `recvmsg_into` the same
places, two requests ahead. Loopback; as root also a veth pair between two network namespaces, with
each of the `limits` (tbf). On a machine that others use: `chrt -r 50`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial

import numpy as np
from measure import Round, measured, median, report

from creel.cache.memory.arena import Arena
from creel.cache.memory.buffers import cut
from creel.daemon.core.events import Event, PeerAsked, ServeObjects
from creel.daemon.peers.peer_source import PeerSource
from creel.daemon.peers.server import PeerServer
from creel.daemon.peers.wire import Credentials, PeerBeat
from creel.system.limits import IOV_MAX

KEY = bytes(range(32))
OBJECTS_NBYTES = 256 << 20  # bytes of the objects in each arena
PART_NBYTES = 4 << 20  # bytes read at once: 2 ms at 2 GB/s, a fetcher's part
RAW_NBYTES = 2 << 20  # bytes of one `raw` request
_CLONE_NEWNET = 0x40000000
_RAW = struct.Struct("<qq")  # first object, objects; the arena's order is shuffled


def places(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the places of all objects, shuffled, so that neighbours do not lie together."""
    count = OBJECTS_NBYTES // nbytes
    return np.random.default_rng(0).permutation(count).astype(np.int64) * nbytes


def filled() -> Arena:
    arena = Arena.create(OBJECTS_NBYTES)
    arena.array[:] = 7
    return arena


# --- the process that serves ------------------------------------------------------------------


def serve(host: str, nbytes: int) -> None:
    """Serve until standard input ends; print both ports."""
    place = places(nbytes)
    with closing(filled()) as arena, socket.create_server((host, 0)) as raw:
        threading.Thread(target=accept_raw, args=(raw, arena, place, nbytes), daemon=True).start()
        asked: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        server = PeerServer(host, 0, "server", arena, asked.put, no_beats, encrypt=False)
        secret_asked: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        secret = PeerServer(host, 0, "server", arena, secret_asked.put, no_beats, encrypt=True)
        servers = [(server, asked), (secret, secret_asked)]
        loops = [
            threading.Thread(target=answer, args=(*server, place, nbytes)) for server in servers
        ]
        for (listener, _), loop in zip(servers, loops, strict=True):
            listener.admit("cluster", KEY, "server")
            loop.start()
        ports = [server.address[1], raw.getsockname()[1], secret.address[1]]
        print(json.dumps(ports), flush=True)
        sys.stdin.read()
        for (listener, questions), loop in zip(servers, loops, strict=True):
            questions.put(None)
            loop.join()
            listener.close()
        os._exit(0)


def no_beats(cluster: str, beat: PeerBeat) -> None:
    """Ignore heartbeats: no node asks whether this one is alive."""


def answer(
    server: PeerServer,
    asked: queue.SimpleQueue[Event | None],
    place: np.ndarray[tuple[int], np.dtype[np.int64]],
    nbytes: int,
) -> None:
    while (event := asked.get()) is not None:
        if isinstance(event, PeerAsked):
            at = place[event.ids]
            version, age = np.ones(len(at), np.int64), np.full(len(at), np.inf)
            sizes = np.full(len(at), nbytes)
            server.serve(ServeObjects(event.request, at, sizes, version, age))


def accept_raw(
    listener: socket.socket,
    arena: Arena,
    place: np.ndarray[tuple[int], np.dtype[np.int64]],
    nbytes: int,
) -> None:
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=send_raw, args=(sock, arena, place, nbytes), daemon=True).start()


def send_raw(
    sock: socket.socket,
    arena: Arena,
    place: np.ndarray[tuple[int], np.dtype[np.int64]],
    nbytes: int,
) -> None:
    with sock, suppress(ConnectionError):
        while wanted := sock.recv(_RAW.size, socket.MSG_WAITALL):
            first, objects = _RAW.unpack(wanted)
            left = [arena.view[a : a + nbytes] for a in place[first : first + objects].tolist()]
            while left:
                sent = sock.sendmsg(left[:IOV_MAX])
                left = cut(left, sent)[1]


# --- the process that reads -------------------------------------------------------------------


class Reading:
    """An arena that `threads` threads fill, part by part."""

    def __init__(self, host: str, ports: list[int], nbytes: int, threads: int) -> None:
        self.nbytes, self.threads = nbytes, threads
        self.place = places(nbytes)
        self.arena = filled()
        self.host, self.ports = host, ports
        credentials = Credentials("client", "cluster", KEY, encrypt=False)
        self.source = PeerSource((host, ports[0]), "server", "dataset", credentials)
        secret = credentials._replace(encrypt=True)
        self.secret = PeerSource((host, ports[2]), "server", "dataset", secret)

    def run(self, read: Callable[[Iterator[slice]], None], passes: int, into: Round) -> None:
        """Read every object `passes` times."""
        size = max(PART_NBYTES // self.nbytes, 1)
        parts = [slice(a, a + size) for a in range(0, len(self.place), size)] * passes
        mine = [iter(parts[i :: self.threads]) for i in range(self.threads)]
        threads = [threading.Thread(target=read, args=(some,)) for some in mine]
        with measured(into):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        into.batches += passes * len(self.place)

    def creel(self, parts: Iterator[slice]) -> None:
        self.read(self.source, parts)

    def encrypted(self, parts: Iterator[slice]) -> None:
        self.read(self.secret, parts)

    def read(self, source: PeerSource, parts: Iterator[slice]) -> None:
        for part in parts:
            ids = np.arange(len(self.place), dtype=np.int32)[part]
            length = np.full(len(ids), self.nbytes)
            views = self.arena.parts(self.place[part], length)
            read = source.read_parts(ids, length, views)
            if (read.nbytes != self.nbytes).any():
                os._exit(3)  # any figure would be wrong

    def raw(self, parts: Iterator[slice]) -> None:
        size = max(RAW_NBYTES // self.nbytes, 1)
        with socket.create_connection((self.host, self.ports[1])) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in parts:
                at = self.place[part]
                for a in range(0, len(at), size):
                    sock.sendall(_RAW.pack(part.start + a, len(at[a : a + size])))
                left = [self.arena.view[a : a + self.nbytes] for a in at.tolist()]
                while left:
                    got = sock.recvmsg_into(left[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
                    left = cut(left, got)[1]

    def close(self) -> None:
        self.source.close()
        self.secret.close()
        self.arena.close()


def compare(name: str, reading: Reading, rounds: int, passes: int) -> dict[str, object]:
    ways = {"raw": reading.raw, "creel": reading.creel, "encrypted": reading.encrypted}
    took: dict[str, list[Round]] = {way: [] for way in ways}
    for i in range(rounds + 1):
        for way, read in ways.items():
            into = Round()
            reading.run(read, passes, into)
            if i:
                took[way].append(into)
    row: dict[str, object] = {"name": name}
    for way, runs in took.items():
        rates = [r.batches * reading.nbytes / r.wall_s / 1e9 for r in runs]
        row[f"{way}_GBps"] = round(median(rates), 3)
        row[f"{way}_cpu_us_per_MB"] = round(
            median([r.cpu_s / (r.batches * reading.nbytes) * 1e12 for r in runs])
        )
    pairs = zip(took["raw"], took["creel"], strict=True)
    row["creel_wall_ratio"] = round(median([raw.wall_s / ours.wall_s for raw, ours in pairs]), 2)
    return row


# --- networks ---------------------------------------------------------------------------------


@contextmanager
def veth(limit: str) -> Iterator[tuple[str, list[str]]]:
    """Put this thread in one namespace; yield the other's address and how to run there."""
    ours, theirs = (f"creel-bench-{os.getpid()}-{side}" for side in "ab")
    ip = partial(subprocess.run, check=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    with ExitStack() as stack:
        for name in ours, theirs:
            ip(["ip", "netns", "add", name])
            stack.callback(ip, ["ip", "netns", "del", name])
        ip([*f"ip -n {ours} link add v0 type veth peer name v0 netns {theirs}".split()])
        for name, address in (ours, "10.9.8.1/24"), (theirs, "10.9.8.2/24"):
            ip([*f"ip -n {name} addr add {address} dev v0".split()])
            ip([*f"ip -n {name} link set v0 up".split()])
            if limit != "none":
                rate = f"rate {limit} burst 512k latency 20ms"
                ip([*f"tc -n {name} qdisc add dev v0 root tbf {rate}".split()])
        enter(os.open(f"/run/netns/{ours}", os.O_RDONLY))
        stack.callback(enter, home)
        yield "10.9.8.2", ["ip", "netns", "exec", theirs]


def enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


@contextmanager
def serving(host: str, prefix: list[str], nbytes: int) -> Iterator[list[int]]:
    command = [*prefix, sys.executable, __file__, "--serve", host, "--sizes", str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[150_528, 3072])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limits", nargs="*", default=["none", "2gbit"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2, help="over 256 MiB of objects a round")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if o.serve:
        serve(o.serve, o.sizes[0])
        return
    rows = []
    for where in ["loopback", *(o.limits if os.geteuid() == 0 else [])]:
        for nbytes in o.sizes:
            with ExitStack() as stack:
                host, prefix = "127.0.0.1", list[str]()
                if where != "loopback":
                    host, prefix = stack.enter_context(veth(where))
                ports = stack.enter_context(serving(host, prefix, nbytes))
                for threads in o.threads:
                    reading = Reading(host, ports, nbytes, threads)
                    name = "" if where == "loopback" else f"veth, limit {where}"
                    name = f"{name or where}: {nbytes / 1000:g} KB, {threads} threads"
                    rows.append(compare(name, reading, o.rounds, o.passes))
                    reading.close()
    report(rows)


if __name__ == "__main__":
    main()
