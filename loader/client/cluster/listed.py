"""Make one cluster of the daemons of a job's nodes from a list of them, without torch.distributed.

Each loader reads the list (`hostlist`) and the key, and gives both to its node's daemon. The
daemons connect to each other by the names in the list, and serve nobody without the key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from creel.config import KEY_VARIABLE
from creel.errors import ConfigError
from creel.loader.client.backoff import pauses
from creel.loader.client.client import Client
from creel.loader.client.cluster.hostlist import hosts_of
from creel.loader.client.cluster.ranks import job_name
from creel.messages import Join, Member
from creel.settings import ClusterSettings
from creel.system.python_open import python_open

_MIN_KEY = 16  # bytes
#: The first and the longest pause between two requests to the daemon, in seconds.
_PAUSES_S = 0.05, 1.0


def join_listed(
    client: Client, settings: ClusterSettings, rank: int, world: int, *, again: bool
) -> None:
    """Let this node's daemon connect to those of the listed nodes; wait until all are there.

    `again`: see `messages.Join`.

    Raises:
        ConfigError: no usable list or key; the message says what to do.
        UnavailableError: the daemon refuses.
        OSError: no route to the other nodes.
    """
    hosts = hosts_of(settings.hosts, os.environ)
    if len(hosts) < 2:
        return
    me = own_place(hosts, os.environ)
    ranks = ranks_in_blocks(len(hosts), world)
    if ranks[rank] != me:
        raise ConfigError(
            f"rank {rank} runs on {hosts[me]}, the node {me} of the list: start the ranks of each"
            " node one after the other (Slurm: --distribution=block)"
        )
    request = request_of(hosts, me, ranks, settings.port, secret_of(settings, os.environ))
    request = msgspec.structs.replace(request, again=again)
    client.host(address_towards(hosts[me - 1]), settings.port)
    waits = pauses(*_PAUSES_S)
    while not client.join(request) and client.alive:
        time.sleep(next(waits))


def request_of(hosts: list[str], me: int, ranks: list[int], port: int, secret: bytes) -> Join:
    """Return the request of every node to its daemon; key and name are unique to this job."""
    label = "\n".join([job_name(), str(len(ranks)), str(port), *hosts]).encode()
    name = hmac.digest(secret, b"creel cluster name\n" + label, "sha256")[:16].hex()
    key = hmac.digest(secret, b"creel cluster key\n" + label, "sha256")
    return Join(name, key, [Member(host, host, port, 0) for host in hosts], ranks, me)


def ranks_in_blocks(nodes: int, world: int) -> list[int]:
    """Return the node of each rank, with as many consecutive ranks on each node.

    Raises:
        ConfigError: the nodes would have different numbers of ranks.

    >>> ranks_in_blocks(2, 4)
    [0, 0, 1, 1]
    """
    each, left = divmod(world, nodes)
    if left or not each:
        raise ConfigError(f"{world} ranks on {nodes} nodes: all nodes must have the same number")
    return [rank // each for rank in range(world)]


def own_place(hosts: list[str], env: Mapping[str, str]) -> int:
    """Find this node in the list, by its name or its address; return the position.

    Raises:
        ConfigError: none of the nodes matches, or several do.
    """
    full = socket.gethostname()
    names = [env.get("SLURMD_NODENAME", ""), full, full.split(".")[0]]
    for name in names:
        if name in hosts:
            return hosts.index(name)
    short = [i for i, host in enumerate(hosts) if host.split(".")[0] == names[-1]]
    places = short or [i for i, host in enumerate(hosts) if _is_local(host)]
    if len(places) != 1:
        raise ConfigError(f"this node ({full}) is not one of {', '.join(hosts[:8])}")
    return places[0]


def _is_local(host: str) -> bool:
    """Whether an address of this host belongs to this machine: a socket can be bound to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return True
    return False


def address_towards(host: str) -> str:
    """Return the address of this node from which it reaches another one.

    Raises:
        OSError: it cannot be determined.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(where)  # UDP: sends nothing
        address: str = towards.getsockname()[0]
        return address


def secret_of(settings: ClusterSettings, env: Mapping[str, str]) -> bytes:
    """Return the nodes' shared secret: from the environment, or a file only its owner can read.

    Raises:
        ConfigError: there is none, it is too short, or others can read the file.
    """
    if text := env.get(KEY_VARIABLE, ""):
        return _long_enough(text.encode(), KEY_VARIABLE)
    if not settings.key_file:
        raise ConfigError(
            f"cluster.hosts needs a key: set cluster.key_file, or {KEY_VARIABLE}; without one,"
            " daemons do not serve each other"
        )
    path = Path(settings.key_file).expanduser()
    try:
        with python_open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in {os.getuid(), 0}:
                raise ConfigError(f"the key {path} may be read by others: chmod 600 {path}")
            return _long_enough(file.read(4096).strip(), str(path))
    except OSError as e:
        raise ConfigError(f"the key {path} cannot be read: {e.strerror}") from e


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _MIN_KEY:
        raise ConfigError(
            f"the key in {where} is shorter than {_MIN_KEY} bytes: openssl rand -hex 32"
        )
    return secret
