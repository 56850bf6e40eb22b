"""Heartbeats: exchanges beats with every other node of a cluster to see which are reachable.

Each node is watched over a connection of its own to its peer server, with the usual handshake: the
peer must have the cluster's key, and a recorded answer is invalid. Beats use the same port as
fetches, so that a node counts as reachable if objects can be fetched from it. One thread watches
all nodes of all clusters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from creel.daemon.peers import wire
from creel.daemon.peers.wire import Credentials
from creel.errors import MalformedError, ProtocolError
from creel.messages import Member, Message

log = logging.getLogger("creel.peers")

#: A connection is given up if a peer has not answered for so many beats: a machine may be busy.
_LATE_BEATS = 4

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Heartbeats:
    """Watches peers; only the loop thread may call its methods.

    Args:
        on_beat: called with the cluster and the beat of a peer that has answered.
        refused: called with the cluster and the number of a node that refuses connections.
            Both are called in the heartbeat thread.
    """

    def __init__(
        self, on_beat: Callable[[str, wire.PeerBeat], None], refused: Callable[[str, int], None]
    ) -> None:
        self._on_beat = on_beat
        self._refused = refused
        self._beats: dict[str, wire.PeerBeat] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="creel-beats", daemon=True)
        self._thread.start()

    def say(self, beat: wire.PeerBeat, cluster: str, *, now: bool) -> None:
        """Send this beat from now on; `now`: to all nodes at once."""
        self._call(self._say, cluster, beat, now)

    def watch(self, node: int, peer: Member, credentials: Credentials, every_s: float) -> None:
        """Watch a node of the cluster, in place of an earlier one with the same number."""
        self._call(self._watch, node, peer, credentials, every_s)

    def remove(self, cluster: str) -> None:
        """Stop watching the nodes of a cluster."""
        self._call(self._remove, cluster)

    def close(self) -> None:
        """End all connections; no callback runs afterwards."""
        if self._thread.is_alive():
            self._call(self._loop.stop)
            self._thread.join()

    def _call(self, call: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._tasks.clear()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        while tasks:  # before Python 3.12, `wait_for` may lose a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.01)
        await asyncio.sleep(0)  # their connections are closed in the next turn

    def _say(self, cluster: str, beat: wire.PeerBeat, now: bool) -> None:
        self._beats[cluster] = beat
        if now and cluster in self._wake:
            self._wake[cluster].set()
            self._wake[cluster] = asyncio.Event()

    def _watch(self, node: int, peer: Member, credentials: Credentials, every_s: float) -> None:
        self._wake.setdefault(credentials.cluster, asyncio.Event())
        before = self._tasks.get((credentials.cluster, node))
        if before is not None:
            before.cancel()
        task = self._loop.create_task(self._watching(node, peer, credentials, every_s))
        self._tasks[credentials.cluster, node] = task

    def _remove(self, cluster: str) -> None:
        for key in [key for key in self._tasks if key[0] == cluster]:
            self._tasks.pop(key).cancel()
        self._beats.pop(cluster, None)
        self._wake.pop(cluster, None)

    async def _watching(
        self, node: int, peer: Member, credentials: Credentials, every_s: float
    ) -> None:
        while self._wanted(node, credentials.cluster):
            streams = None
            try:
                connecting = asyncio.open_connection(peer.host, peer.port)
                streams = await asyncio.wait_for(connecting, _LATE_BEATS * every_s)
                session = await asyncio.wait_for(
                    _shake_hands(streams, peer, credentials), _LATE_BEATS * every_s
                )
                await self._ask(streams, session, node, credentials.cluster, every_s)
            except ConnectionRefusedError:
                self._refused(credentials.cluster, node)
            except (OSError, EOFError, ProtocolError, asyncio.TimeoutError) as e:
                log.debug("node %s does not answer: %s", peer.node, repr(e))
            except Exception:  # a bug of ours: the node counts as silent
                log.exception("node %s could not be asked", peer.node)
            finally:
                if streams is not None:
                    streams[1].transport.abort()
            await asyncio.sleep(every_s)

    def _wanted(self, node: int, cluster: str) -> bool:
        """Return whether the current task should continue to watch this node."""
        return self._tasks.get((cluster, node)) is asyncio.current_task()

    async def _ask(
        self, streams: Streams, session: wire.PeerSession, node: int, cluster: str, every_s: float
    ) -> None:
        while self._wanted(node, cluster):
            wake, mine = self._wake[cluster], self._beats[cluster]
            streams[1].write(wire.pack(mine, seal=session.requests))
            frame = _message(streams[0], wire.PeerBeat, session.answers)
            self._on_beat(cluster, await asyncio.wait_for(frame, _LATE_BEATS * every_s))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wake.wait(), every_s)


async def _shake_hands(
    streams: Streams, peer: Member, credentials: Credentials
) -> wire.PeerSession:
    reader, writer = streams
    nonce = secrets.token_bytes(wire.NONCE_NBYTES)
    greeting = wire.Greeting(wire.PEER_PROTOCOL, credentials.cluster, credentials.name, nonce)
    writer.write(wire.pack(greeting))
    challenge = await _message(reader, wire.Challenge)
    if challenge.name != peer.node:
        raise MalformedError(f"this is node {challenge.name!r}, not {peer.node!r}")
    session = wire.PeerSession(credentials.key, greeting, challenge)
    writer.write(wire.pack(session.proof("client")))
    if not session.proves("server", await _message(reader, wire.Proof)):
        raise MalformedError(f"node {peer.node!r} has another key")
    return session


async def _message(
    reader: asyncio.StreamReader, kind: type[Message], seal: wire.Seal | None = None
) -> Any:
    header = await reader.readexactly(wire.HEADER.size)
    body = await reader.readexactly(wire.following(header, kind))
    return wire.unpack(header, body, kind, seal)[0]
