"""How ranks that read the same batches share them (`replicate`): one rank of a node makes them.

The ranks agree once, in a loader's first epoch (`negotiation`), and connect over a unix socket. The
first rank of the group on each node leads; its other ranks follow. Afterwards the ranks wait only
for each other's batches.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from creel.errors import ConfigError
from creel.loader.client.cluster.ranks import of_process_group
from creel.loader.data.user_code.protected import attribute, length
from creel.loader.data.user_code.values import is_whole, wrong
from creel.loader.making.groups.negotiation import Terms, Topic, negotiated, node_name
from creel.loader.making.places.follower import Follower
from creel.loader.making.places.leader import Leader
from creel.loader.making.places.other_ranks import ALONE, OtherRanks
from creel.loader.making.transport.channel import Channel
from creel.loader.torch_private import default_store
from creel.system.unix_peers import peer_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_ALIKE = "dataset length, batch_size, num_workers or another argument of the loader"
_CONNECT_S = 60.0


def group_of(replicate: Any) -> tuple[int, ...]:
    """Return the ranks of this rank's group, in order.

    Args:
        replicate: the number of consecutive ranks in a group; or a process group; or a DeviceMesh,
            all of whose ranks are one group, as `mesh["tp"]` or `mesh["cp", "tp"]`.

    Raises:
        ConfigError: it is none of these, or this rank is not in it.
    """
    rank, world = of_process_group() or (0, 1)
    mesh = getattr(replicate, "mesh", None)
    if isinstance(replicate, int):
        if replicate > 1 and of_process_group() is None:
            raise ConfigError("replicate needs torch.distributed.init_process_group, in all ranks")
        if world % replicate:
            raise ConfigError(
                f"replicate={replicate}: {world} ranks cannot be divided into groups of that size"
            )
        first = rank - rank % replicate
        ranks = tuple(range(first, first + replicate))
    elif isinstance(mesh, torch.Tensor):
        ranks = tuple(int(rank) for rank in mesh.flatten())
    else:
        ranks = tuple(torch.distributed.get_process_group_ranks(replicate))
    if rank not in ranks:
        raise ConfigError(f"replicate: this rank, {rank}, is not in the group {list(ranks)}")
    return ranks


def place_of(replicate: Any) -> tuple[int, int]:
    """Return (number, count) of this rank's group among all groups of the job.

    For groups whose ranks are not consecutive: the first rank of it, of all ranks. (0, 1) without a
    process group.
    """
    group = of_process_group()
    if group is None:
        return 0, 1
    ranks, world = group_of(replicate), group[1]
    first, size = min(ranks), len(ranks)
    if sorted(ranks) == list(range(first, first + size)) and not (first % size or world % size):
        return first // size, world // size
    return first, world


def check(replicate: Any) -> None:
    """Check the argument, as far as possible before there is a process group.

    Raises:
        ConfigError: it is neither a number of ranks, a process group nor a DeviceMesh.
    """
    if is_whole(replicate, 1):
        return
    is_mesh = isinstance(attribute(replicate, "mesh"), torch.Tensor)
    if not is_mesh and not isinstance(replicate, getattr(torch.distributed, "ProcessGroup", ())):
        raise wrong("replicate", replicate, "a number of ranks, a process group or a DeviceMesh")


def join_group(
    loader: DataLoader[Any], replicate: Any, *, plain: bool, digest: str = ""
) -> OtherRanks:
    """Return who shares this rank's batches on its node; waits for the group's ranks.

    The group's first rank of each node leads. All ranks begin the loader's first epoch together.

    Args:
        replicate: as for `group_of`.
        plain: a batch is only copied from the arena. Then no ranks share batches, since mapping a
            leader's batch would take as long as copying one.
        digest: of the order's combinator; empty: there is none.

    Raises:
        ConfigError: a job without a process group, ranks that differ, or one that does not come.
    """
    ranks = group_of(replicate)
    if len(ranks) == 1:
        return ALONE
    me = ranks.index(torch.distributed.get_rank())
    name = secrets.token_hex(8)
    with _socket() as listener:
        listener.bind(_address(name))
        listener.listen(len(ranks))
        terms = Terms(name, me, node_name(), _alike(loader, plain=plain, digest=digest))
        topic = Topic("replicate", _ALIKE, "/" + ",".join(map(str, ranks)))
        decision = negotiated(topic, me, len(ranks), terms, default_store())
        here = [i for i, node in enumerate(decision.node_of) if node == decision.node_of[me]]
        if plain or len(here) == 1:
            return ALONE
        if here[0] == me:
            return Leader(_accepted(listener, {decision.names[i] for i in here[1:]}))
    return Follower(_connected(decision.names[here[0]], name), ranks[here[0]])


def _alike(loader: DataLoader[Any], *, plain: bool, digest: str) -> tuple[int, ...]:
    """Return what must be equal on all ranks so that their iterators yield the same batches."""
    samples = length(loader.dataset)  # not all datasets have one
    numbers = (
        -1 if samples is None else samples,
        loader.batch_size or 0,
        loader.num_workers,
        loader.prefetch_factor or 0,
    )
    flags = plain, loader.persistent_workers, loader.in_order, loader.drop_last
    return (*numbers, *map(int, flags), int(digest or "0", 16) >> 1)  # 63 bits


def _address(name: str) -> str:
    return f"\0creel-replicate-{name}"


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _connected(leader: str, name: str) -> Channel:
    """Connect to the leader, and send it this rank's name."""
    connection = _socket()
    try:
        connection.connect(_address(leader))
        _check_user(connection)
        connection.send(name.encode())
    except OSError as e:
        connection.close()
        raise ConfigError(f"replicate: the rank that makes the batches is gone: {e}") from e
    return Channel(connection)


def _accepted(listener: socket.socket, names: set[str]) -> Sequence[Channel]:
    """Accept one connection from each follower.

    Raises:
        ConfigError: one has not connected.
    """
    connections: dict[str, socket.socket] = {}
    until = time.monotonic() + _CONNECT_S
    try:
        while connections.keys() != names:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            try:
                _check_user(connection)
                connection.settimeout(_CONNECT_S)
                name = connection.recv(64).decode(errors="replace")
                connection.settimeout(None)
            except OSError:
                name = ""
            if name in names:
                connections[name] = connection
            else:  # another process that found the address in /proc/net/unix
                connection.close()
    except OSError as e:
        for connection in connections.values():
            connection.close()
        raise ConfigError(f"replicate: a rank of this node has not connected: {e}") from e
    return [Channel(connection) for connection in connections.values()]


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if the peer is another user: batches are pickles."""
    uid = peer_of(connection).uid
    if uid != os.geteuid():
        raise PermissionError(f"it is a process of user {uid}")
