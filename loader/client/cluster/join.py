"""Make one cluster of the daemons of a job's nodes, through the store of its process group.

Every rank writes the address at which its node's daemon serves peers; rank 0 adds a fresh key. Once
all ranks have written, each gives its daemon the list. Training does not wait for that: until then,
and after a failure, each node reads for itself.

The first entry of a rank stays in the store, since it shows which ranks share a node. If another
daemon has replaced the first one, the rank writes a second entry for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from typing import Any

import msgspec

from creel.errors import ConfigError, UnavailableError
from creel.loader import torch_private
from creel.loader.client.backoff import pauses
from creel.loader.client.client import Client
from creel.loader.client.cluster.listed import address_towards, join_listed
from creel.loader.client.cluster.ranks import on_one_node
from creel.messages import Join, Member
from creel.settings import ClusterSettings

_log = logging.getLogger("creel.loader")

_PREFIX = "creel/cluster/"
#: The first and the longest pause between two looks at the store, in seconds.
_PAUSES_S = 0.05, 2.0
#: Longest wait for the other ranks, which may never make a creel.DataLoader.
_GIVE_UP_S = 600.0
#: Longest time that reading the next epoch ahead waits for the nodes to join.
_SOON_S = 10.0
#: Longest time that a session with a daemon in the place of another one waits for that: the daemon
#: would read from the source what its peers hold.
_AGAIN_S = 1.0
#: Processes that have joined before, with another daemon.
_joined: set[int] = set()


def join_cluster(client: Client, settings: ClusterSettings, rank: int, world: int) -> None:
    """Join this node's daemon with those of the other ranks' nodes, in the background.

    The nodes are found through the store of torch's process group, or without one by a list.
    """
    if client.joining or on_one_node(world, os.environ):
        return
    store = torch_private.default_store()
    if store is None and not settings.hosts:
        return
    client.joining = True
    args = client, settings, store, rank, world
    thread = threading.Thread(target=_attempt, args=args, name="creel-join", daemon=True)
    client.joining_until = time.monotonic() + _SOON_S
    try:
        thread.start()
    except RuntimeError:  # no thread available: this node reads for itself
        client.joining_until = 0.0
        _log.debug("no thread to join the cluster", exc_info=True)
    until = time.monotonic() + _AGAIN_S if os.getpid() in _joined else 0.0
    while time.monotonic() < min(client.joining_until, until):
        time.sleep(_PAUSES_S[0] / 10)


def _attempt(client: Client, settings: ClusterSettings, store: Any, rank: int, world: int) -> None:
    try:
        if store is None:
            join_listed(client, settings, rank, world, again=os.getpid() in _joined)
        else:
            _join(client, store, rank, world)
        _joined.add(os.getpid())
    except (  # ValueError: a name that no node can have, or a key that is not UTF-8
        ConfigError,
        UnavailableError,
        OSError,
        RuntimeError,
        ValueError,
        msgspec.MsgspecError,
    ) as e:
        level = logging.WARNING if store is None else logging.INFO  # the user has asked for a list
        _log.log(level, "this node shares no cache with the job's other nodes: %s", e)
    finally:
        client.joining_until = 0.0


def _join(client: Client, store: Any, rank: int, world: int) -> None:
    member = client.host(own_address(store))
    again: bool = store.check([f"{_PREFIX}{rank}"])
    key = f"{_PREFIX}{rank}/now" if again else f"{_PREFIX}{rank}"
    store.set(key, msgspec.msgpack.encode(member))
    if rank == 0 and not again:
        store.set(f"{_PREFIX}key", secrets.token_bytes(48))
    if not _all_there(client, store, world):
        return
    secret: bytes = store.get(f"{_PREFIX}key")
    first = [_member(store, f"{_PREFIX}{r}") for r in range(world)]
    later = {
        r: _member(store, f"{_PREFIX}{r}/now")
        for r in range(world)
        if again and store.check([f"{_PREFIX}{r}/now"])
    }
    members, ranks = nodes_of(first, later)
    if len(members) > 1:
        client.join(Join(secret[:16].hex(), secret[16:], members, ranks, again=again))


_decoder = msgspec.msgpack.Decoder(Member)


def _member(store: Any, key: str) -> Member:
    return _decoder.decode(store.get(key))


def nodes_of(first: list[Member], later: dict[int, Member]) -> tuple[list[Member], list[int]]:
    """Return the nodes of a job, and the node of each rank.

    Args:
        first: the daemon that each rank began with; ranks with the same one share a node.
        later: by rank, the daemon that has replaced its first one.

    >>> old, other = Member("a", "h", 1, 9), Member("c", "i", 1, 9)
    >>> members, ranks = nodes_of([old, old, other], {1: Member("b", "h", 2, 9, born=5.0)})
    >>> [member.node for member in members], ranks
    (['b', 'c'], [0, 0, 1])
    """
    known = {member.node: member for member in reversed(first)}
    names = list(dict.fromkeys(member.node for member in first))
    members, ranks = [known[name] for name in names], [names.index(member.node) for member in first]
    for rank, member in later.items():
        if member.born > members[ranks[rank]].born:
            members[ranks[rank]] = member
    return members, ranks


def _all_there(client: Client, store: Any, world: int) -> bool:
    """Wait until every rank has written to the store; False after 600 s."""
    keys = [f"{_PREFIX}key", *(f"{_PREFIX}{r}" for r in range(world))]
    waits, until = pauses(*_PAUSES_S), time.monotonic() + _GIVE_UP_S
    while not store.check(keys):
        if not client.alive or time.monotonic() > until:
            return False
        time.sleep(next(waits))
    return True


def own_address(store: Any) -> str:
    """Return the address at which the other nodes reach this one: its address towards the store.

    Raises:
        OSError: it cannot be determined.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR", "")
    if not host:
        raise OSError("the job's store has no address")
    return address_towards(host)
