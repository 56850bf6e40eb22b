"""How the ranks of a job come to exchange samples alike (`remap`): they agree once, or fail.

A rank that exchanged and one that did not would read samples twice and others never. So there is no
way back to torch's deal: rank 0 writes a call, a fresh word, to the job's own store; each rank
answers it with what it knows; rank 0 decides from all answers. For each call one decision is
written, and never replaced: that of rank 0, or the refusal of a rank that gives up. So all take the
same one. The store may be older than the processes: what answers or decides another call counts for
nothing. From then on nothing is asked: the exchange follows from the order and from these terms.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from torch.utils.data import BatchSampler, DistributedSampler

from creel.errors import ConfigError
from creel.loader import torch_private
from creel.loader.cluster.join import own_address
from creel.loader.cluster.ranks import rank_and_world
from creel.policies.cluster.remap import Exchange, nodes_alike

#: Used again by each agreement, so a job of many loaders does not fill the store.
_CALL, _TERMS, _DECISION = "creel/remap/call", "creel/remap/terms/", "creel/remap/decision"
#: Pauses between two looks at the store, in seconds: the first, and the longest.
_FIRST_S, _LONGEST_S = 0.001, 0.1
#: Ranks may come late to their first epoch, but not never.
_GIVE_UP_S = 600.0

_T = TypeVar("_T")


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What a rank writes: `name` is drawn by chance; `alike` must be the same on all ranks."""

    name: str
    rank: int
    node: str
    alike: tuple[int, ...]


class AnsweredTerms(msgspec.Struct, frozen=True, array_like=True):
    """The terms of a rank, for one call of rank 0."""

    call: str
    terms: Terms


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """For a call and these `names`, the node of each rank; or why not."""

    call: str
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
    return Exchange(negotiated(store, rank, world, terms), batch)


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


def negotiated(
    store: Any, rank: int, world: int, terms: Terms, *, give_up_s: float = _GIVE_UP_S
) -> tuple[int, ...]:
    """The node of each rank, as all ranks find it in `store`; each calls this once.

    Raises:
        ConfigError: on all ranks: they differ, or one comes `give_up_s` seconds after another.
    """
    late = (
        f"remap: not all ranks have begun this loader's first epoch within {give_up_s:.0f} s: all"
        " must make it, with remap, and none with CREEL_DISABLE"
    )
    until = time.monotonic() + give_up_s
    decision: Decision | None
    if rank == 0:
        decision = _lead(store, world, terms, until, late)
    else:
        decision = _follow(store, rank, terms, until, late)
    if decision is None:
        raise ConfigError(late)
    if decision.refused:
        raise ConfigError(decision.refused)
    if terms.name not in decision.names:
        raise ConfigError(f"remap: another process has answered as rank {rank}")
    return decision.node_of


def _lead(store: Any, world: int, terms: Terms, until: float, late: str) -> Decision:
    """Rank 0: call, and decide from all answers."""
    call = secrets.token_hex(8)
    store.set(_CALL, call)
    heard = [terms]
    pause_s = _FIRST_S
    while len(heard) < world:
        answer = _read(store, f"{_TERMS}{len(heard)}", AnsweredTerms)
        if answer is not None and answer.call == call:
            heard.append(answer.terms)
            continue
        decision = _read(store, _DECISION, Decision)
        if decision is not None and decision.call == call:
            return decision  # another rank has given up
        if time.monotonic() > until:
            return _settled(store, Decision(call, (), (), late))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return _settled(store, decide(call, heard))


def _follow(store: Any, rank: int, terms: Terms, until: float, late: str) -> Decision | None:
    """Another rank: answer the latest call, and await its decision; None: no call has come."""
    answered = ""
    pause_s = _FIRST_S
    while True:
        # In this order: rank 0 calls again only after it has decided.
        raw = _get(store, _CALL)
        call = "" if raw is None else raw.decode()
        decision = _read(store, _DECISION, Decision)
        decided = "" if decision is None else decision.call
        if answered and decided == answered:
            return decision
        if call not in {answered, decided}:
            store.set(f"{_TERMS}{rank}", msgspec.msgpack.encode(AnsweredTerms(call, terms)))
            answered, pause_s = call, _FIRST_S
        if time.monotonic() > until:
            return _settled(store, Decision(answered, (), (), late)) if answered else None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def _settled(store: Any, decision: Decision) -> Decision:
    """The decision of a call: this one, or that which another rank has written before."""
    new = msgspec.msgpack.encode(decision)
    while True:
        old = _get(store, _DECISION) or b""
        if old:
            found = msgspec.msgpack.decode(old, type=Decision)
            if found.call == decision.call:
                return found
        store.compare_set(_DECISION, old, new)


def _get(store: Any, key: str) -> bytes | None:
    """What a key has; None: it is not there (`get` alone would wait for it)."""
    return store.get(key) if store.check([key]) else None


def _read(store: Any, key: str, kind: type[_T]) -> _T | None:
    raw = _get(store, key)
    return None if raw is None else msgspec.msgpack.decode(raw, type=kind)


def decide(call: str, heard: list[Terms]) -> Decision:
    """Decide from what all ranks have answered to a call.

    >>> decide("c", [Terms("x", 1, "b", (2, 8)), Terms("y", 0, "a", (2, 8))]).node_of
    (0, 1)
    """
    names = tuple(terms.name for terms in heard)
    if sorted(terms.rank for terms in heard) != list(range(len(heard))):
        return Decision(call, names, (), "remap: two processes have samplers of the same rank")
    if len({terms.alike for terms in heard}) > 1:
        return Decision(
            call,
            names,
            (),
            "remap: ranks differ in batch_size, dataset length, or seed, shuffle or drop_last of"
            " the sampler",
        )
    by_rank = sorted(heard, key=lambda terms: terms.rank)
    return Decision(call, names, nodes_alike([terms.node for terms in by_rank]))
