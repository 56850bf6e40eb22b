"""Agreement of a job's ranks through the job's own store: all take one decision, or all fail.

Rank 0 writes a call, a fresh random word, to the store. Each other rank answers the call with its
terms, and rank 0 decides from all answers. For each call one decision is written and never
replaced: that of rank 0, or the refusal of a rank that gives up. So all ranks take the same one.
The store may be older than the processes: answers to other calls, and their decisions, are ignored.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from creel.errors import ConfigError
from creel.loader.client.backoff import pauses
from creel.policies.order.remap import nodes_alike
from creel.system.python_open import text_of

#: The first and the longest pause between two looks at the store, in seconds.
_PAUSES_S = 0.001, 0.1
#: Longest wait for a rank to begin its first epoch, in seconds.
_GIVE_UP_S = 600.0

_T = TypeVar("_T")


class Topic(NamedTuple):
    """The loader's argument to agree on, what must be `alike` on all ranks, and the group of ranks.

    Every agreement reuses the keys of its topic, so a job of many loaders does not fill the store.
    """

    name: str
    alike: str
    group: str = ""

    def key(self, kind: str) -> str:
        return f"creel/{self.name}{self.group}/{kind}"


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What a rank writes. `alike` must be the same on all ranks.

    `name` is random; `call` is the call of rank 0 that it answers.
    """

    name: str
    rank: int
    node: str
    alike: tuple[int, ...]
    call: str = ""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """For a call and these `names`, the node of each rank; or the reason of a refusal."""

    call: str
    names: tuple[str, ...]
    node_of: tuple[int, ...]
    refused: str = ""


_TERMS, _DECISION = msgspec.msgpack.Decoder(Terms), msgspec.msgpack.Decoder(Decision)


def node_name() -> str:
    """Return a name that ranks share if they can connect to each other's abstract sockets."""
    boot = text_of("/proc/sys/kernel/random/boot_id").strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.geteuid()}"


def negotiated(
    topic: Topic,
    rank: int,
    world: int,
    terms: Terms,
    store: Any,
) -> Decision:
    """Return the decision that all ranks find in `store`; each of them calls this once.

    store: of the process group (`torch_private.default_store`); None: there is none.

    Raises:
        ConfigError: there is no process group; or, on all ranks: they differ, or one comes 600 s
            after another.
    """
    if store is None:
        raise ConfigError(f"{topic.name} needs torch.distributed.init_process_group, in all ranks")
    late = (
        f"{topic.name}: not all ranks have begun this loader's first epoch within {_GIVE_UP_S:.0f}"
        f" s: every rank must make this loader with {topic.name}, and without CREEL_DISABLE"
    )
    until = time.monotonic() + _GIVE_UP_S
    decision = (
        _follow(topic, store, rank, terms, until, late)
        if rank
        else _lead(topic, store, world, terms, until, late)
    )
    if decision is None:
        raise ConfigError(late)
    if decision.refused:
        raise ConfigError(decision.refused)
    if terms.name not in decision.names:
        raise ConfigError(f"{topic.name}: another process has answered as rank {rank}")
    return decision


def _lead(topic: Topic, store: Any, world: int, terms: Terms, until: float, late: str) -> Decision:
    """Act as rank 0: call, and decide from all answers."""
    call = secrets.token_hex(8)
    store.set(topic.key("call"), call)
    terms_of_all = [terms]
    waits = pauses(*_PAUSES_S)
    while len(terms_of_all) < world:
        answer = _read(store, topic.key(f"terms/{len(terms_of_all)}"), _TERMS)
        if answer is not None and answer.call == call:
            terms_of_all.append(answer)
            continue
        decision = _read(store, topic.key("decision"), _DECISION)
        if decision is not None and decision.call == call:
            return decision  # another rank has given up
        if time.monotonic() > until:
            return _settled(topic, store, Decision(call, (), (), late))
        time.sleep(next(waits))
    return _settled(topic, store, decide(topic, call, terms_of_all))


def _follow(
    topic: Topic, store: Any, rank: int, terms: Terms, until: float, late: str
) -> Decision | None:
    """Act as another rank: answer the latest call, await its decision; None: no call came."""
    answered = ""
    waits = pauses(*_PAUSES_S)
    while True:
        # The call is read before the decision: rank 0 calls again only after it has decided.
        raw = _get(store, topic.key("call"))
        call = "" if raw is None else raw.decode()
        decision = _read(store, topic.key("decision"), _DECISION)
        decided = "" if decision is None else decision.call
        if answered and decided == answered:
            return decision
        if call not in {answered, decided}:
            answer = msgspec.structs.replace(terms, call=call)
            store.set(topic.key(f"terms/{rank}"), msgspec.msgpack.encode(answer))
            answered, waits = call, pauses(*_PAUSES_S)
        if time.monotonic() > until:
            return _settled(topic, store, Decision(answered, (), (), late)) if answered else None
        time.sleep(next(waits))


def _settled(topic: Topic, store: Any, decision: Decision) -> Decision:
    """Write the decision of a call; if another rank has written one before, return that one."""
    new = msgspec.msgpack.encode(decision)
    while True:
        old = _get(store, topic.key("decision")) or b""
        if old:
            agreed = _DECISION.decode(old)
            if agreed.call == decision.call:
                return agreed
        store.compare_set(topic.key("decision"), old, new)


def _get(store: Any, key: str) -> bytes | None:
    """Return the value of a key; None if it is missing (`get` alone would wait for it)."""
    return store.get(key) if store.check([key]) else None


def _read(store: Any, key: str, decoder: msgspec.msgpack.Decoder[_T]) -> _T | None:
    raw = _get(store, key)
    return None if raw is None else decoder.decode(raw)


def decide(topic: Topic, call: str, terms_of_all: list[Terms]) -> Decision:
    """Decide from all ranks' answers to a call.

    >>> terms = [Terms("x", 1, "b", (2, 8)), Terms("y", 0, "a", (2, 8))]
    >>> decide(Topic("remap", "batch_size"), "c", terms).node_of
    (0, 1)
    """
    names = tuple(terms.name for terms in terms_of_all)
    if sorted(terms.rank for terms in terms_of_all) != list(range(len(terms_of_all))):
        return Decision(call, names, (), f"{topic.name}: two processes have the same rank")
    if len({terms.alike for terms in terms_of_all}) > 1:
        return Decision(call, names, (), f"{topic.name}: ranks differ in {topic.alike}")
    by_rank = sorted(terms_of_all, key=lambda terms: terms.rank)
    return Decision(call, names, nodes_alike([terms.node for terms in by_rank]))
