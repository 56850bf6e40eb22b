"""How the ranks of a job come to exchange samples alike (`remap`): they agree once, or fail.

A rank that exchanged and one that did not would read samples twice and others never. So there is no
way back to torch's deal: each rank writes what it knows to the job's own store, rank 0 decides from
what all have written, and each rank takes that decision, or raises. A decision repeats the number
that each rank has drawn for itself: none that was made for other processes is ever taken. From then
on nothing is asked: the exchange follows from the order and from these terms.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from torch.utils.data import BatchSampler, DistributedSampler

from creel.errors import ConfigError
from creel.loader import torch_private
from creel.loader.client.cluster import own_address
from creel.loader.client.ranks import rank_and_world
from creel.policies.cluster.remap import Exchange, nodes_alike

_PREFIX = "creel/remap/"
#: Pauses between two looks at the store, in seconds: the first, and the longest.
_FIRST_S, _LONGEST_S = 0.001, 0.1
#: Ranks may come late to their first epoch, but not never.
_GIVE_UP_S = 600.0

#: Loaders of this process that have agreed: their ranks make them in the same order.
_agreements = itertools.count()


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What a rank writes: `name` is drawn by chance; `alike` must be the same on all ranks."""

    name: str
    rank: int
    node: str
    alike: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 decides: for these `names`, the node of each rank, or why not."""

    names: tuple[str, ...]
    node_of: tuple[int, ...]
    refused: str = ""


def dealt_by(index_sampler: Iterable[object]) -> tuple[DistributedSampler[object], int]:
    """The sampler that deals a loader's samples to ranks, and how many make a batch.

    Raises:
        ConfigError: it is another one than torch's.
    """
    inner = getattr(index_sampler, "sampler", None)
    if type(index_sampler) is not BatchSampler or type(inner) is not DistributedSampler:
        raise ConfigError("remap needs sampler=DistributedSampler(...) and a batch_size")
    return inner, index_sampler.batch_size


def agreed(index_sampler: Iterable[object]) -> Exchange:
    """How this loader's ranks exchange samples; waits until all of them begin its first epoch.

    Raises:
        ConfigError: a job that cannot exchange, ranks that differ, or one that does not come.
    """
    sampler, batch = dealt_by(index_sampler)
    rank, world = rank_and_world()
    if sampler.num_replicas != world:
        raise ConfigError(
            f"remap needs one rank of the sampler for each of the job: it has"
            f" {sampler.num_replicas}, the job {world}"
        )
    if world == 1:
        return Exchange((0,), batch)
    store = torch_private.default_store()
    if store is None:
        raise ConfigError("remap needs torch.distributed.init_process_group, in all ranks")
    flags = int(sampler.shuffle), int(sampler.drop_last)
    alike = world, batch, sampler.seed, len(sampler.dataset), *flags  # type: ignore[arg-type]  # it has a length
    terms = Terms(secrets.token_hex(8), sampler.rank, _node(store), alike)
    return Exchange(_decided(store, next(_agreements), rank, world, terms), batch)


def still(exchange: Exchange, index_sampler: Iterable[object]) -> None:
    """Check that a loader's ranks are those that have agreed.

    Raises:
        ConfigError: batch size or number of ranks have changed since.
    """
    sampler, batch = dealt_by(index_sampler)
    if (sampler.num_replicas, batch) != (len(exchange.node_of), exchange.batch):
        raise ConfigError(
            "remap: batch_size and number of ranks cannot change after the first epoch: make a new"
            " loader, in all ranks"
        )


def _node(store: Any) -> str:
    """A name that ranks of one node have in common."""
    try:
        address = own_address(store)
    except OSError:
        address = ""
    return f"{socket.gethostname()} {address}"


def _decided(store: Any, number: int, rank: int, world: int, terms: Terms) -> tuple[int, ...]:
    prefix, until = f"{_PREFIX}{number}/", time.monotonic() + _GIVE_UP_S
    store.set(f"{prefix}{rank}", msgspec.msgpack.encode(terms))
    if rank == 0:
        keys = [f"{prefix}{other}" for other in range(world)]
        _await(store, keys, until)
        heard = [msgspec.msgpack.decode(store.get(key), type=Terms) for key in keys]
        store.set(f"{prefix}decision", msgspec.msgpack.encode(decide(heard)))
    while True:
        _await(store, [f"{prefix}decision"], until)
        found = msgspec.msgpack.decode(store.get(f"{prefix}decision"), type=Decision)
        if terms.name in found.names:
            break
        _pause(_LONGEST_S, until)  # it was made for processes that were here before
    if found.refused:
        raise ConfigError(found.refused)
    return found.node_of


def decide(heard: list[Terms]) -> Decision:
    """Decide from what all ranks have written.

    >>> decide([Terms("x", 1, "b", (2, 8)), Terms("y", 0, "a", (2, 8))]).node_of
    (0, 1)
    """
    names = tuple(terms.name for terms in heard)
    if sorted(terms.rank for terms in heard) != list(range(len(heard))):
        return Decision(names, (), "remap: two processes have samplers of the same rank")
    if len({terms.alike for terms in heard}) > 1:
        return Decision(
            names,
            (),
            "remap: ranks differ in batch_size, dataset length, or seed, shuffle or drop_last of"
            " the sampler",
        )
    by_rank = sorted(heard, key=lambda terms: terms.rank)
    return Decision(names, nodes_alike([terms.node for terms in by_rank]))


def _await(store: Any, keys: list[str], until: float) -> None:
    pause_s = _FIRST_S
    while not store.check(keys):
        _pause(pause_s, until)
        pause_s = min(2 * pause_s, _LONGEST_S)


def _pause(pause_s: float, until: float) -> None:
    if time.monotonic() > until:
        raise ConfigError(
            f"remap: not all ranks have begun this loader's first epoch within {_GIVE_UP_S:.0f} s:"
            " all must make it, with remap, and none with CREEL_DISABLE"
        )
    time.sleep(pause_s)
