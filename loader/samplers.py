"""The order of an epoch: what torch's DataLoader will draw, known ahead and drawn on time.

`observe(loader)` is `iter(loader)` without workers: it makes torch's draws of that moment and
returns an `Order`, an iterator over what torch's index sampler yields. Each `next` makes the draws
that torch's sampler makes when it is pulled, no earlier and no later:

    moment           no generator               generator=G
    observe          base seed (global)         base seed (G)
    first next       sampler's seed (global)    permutation (G)
    at the end       -                          one more permutation (G), thrown away

With workers torch pulls `prefetch_factor * num_workers` times before `iter(loader)` returns, and
once for each batch it hands over; that is the caller's doing.

For exactly torch's own samplers the indices come as slices of int64 arrays; **an array stands for
the list of Python ints that torch would yield** (`.tolist()` before a user sees it). Whatever else
comes is the very object that torch would pass on. All other samplers are iterated, lazily.

`order.predict(0)` and `order.predict(1)` say what this epoch and the next one will read, as a
`Plan`. A prediction changes no state that anyone can see.
"""

from __future__ import annotations

import zlib

import torch
from torch.utils.data import BatchSampler, DataLoader

from creel.errors import ConfigError
from creel.loader.draws import Dice, Memo, Shadow, set_state, state_of, unpack
from creel.loader.foresee import Plan
from creel.loader.orders import (
    Begun,
    ForeignOrder,
    KnownOrder,
    Order,
    State,
    index_sampler,
    kind_of,
)
from creel.loader.recipes import is_sequence, opened, trusted
from creel.loader.streams import Facts

__all__ = ["Begun", "Order", "Plan", "State", "adopt", "before", "observe", "restore"]


def before() -> bytes:
    """The global generator's state; to be taken before torch's iterator is constructed."""
    return state_of(torch.default_generator)


def observe(
    loader: DataLoader[object], *, previous: Order | None = None, keep_seed: bool = False
) -> Order:
    """Begin an epoch: the calls and draws that torch's iterator makes before it pulls indices.

    Args:
        loader: a map-style loader.
        previous: the order of this loader's last epoch; what was learned then is used.
        keep_seed: workers persist and this is not their first epoch: no base seed is drawn.
    """
    seed = previous.base_seed if previous is not None and keep_seed else None
    return adopt(loader, _begin(loader, seed), previous=previous)


def restore(loader: DataLoader[object], state: State, *, previous: Order | None = None) -> Order:
    """Begin an epoch anew that `Order.state` told of, in this or another process; then `skip`.

    A generator of the user's is put where it was, so that the following epochs too are those of a
    run that was not interrupted. The global generator belongs to the user: it stays where it is,
    unless it stands exactly where it stood before the epoch (a script that seeds and starts over);
    then the epoch's draws are made, as they were.

    Raises:
        ConfigError: the state is of another kind of sampler, or of another number of samples.
    """
    return adopt(loader, _begin(loader, None), previous=previous, state=state)


def adopt(
    loader: DataLoader[object],
    begun: Begun,
    *,
    previous: Order | None = None,
    state: State | None = None,
) -> Order:
    """`observe`, or `restore` where there is a `state`, where torch's own iterator has begun.

    The order takes the place of `_sampler_iter`; `_base_seed` must become `order.base_seed`.

    Raises:
        ConfigError: as `restore`.
    """
    if not _is_known(loader):
        order: Order = ForeignOrder(loader, begun, previous)
        if state is not None:
            _check(loader, state, None)
            order.base_seed = state["base_seed"]
        return order
    if state is None:
        return KnownOrder(loader, begun, previous)
    given = state.get("stream", {})
    _check(loader, state, given)
    redraw = zlib.crc32(begun.before) == state["before"]
    if not redraw:
        set_state(torch.default_generator, begun.before)
    if loader.generator is not None and "loader_rng" in state:
        set_state(loader.generator, unpack(state["loader_rng"]))
    begun = begun._replace(base_seed=state["base_seed"])
    return KnownOrder(loader, begun, previous, given, redraw=redraw)


def _begin(loader: DataLoader[object], keep_seed: int | None) -> Begun:
    """torch's `_BaseDataLoaderIter.__init__` and `_reset`, as far as they draw."""
    moment = before()
    sampler = index_sampler(loader)
    sampler_iter = iter(sampler)
    if keep_seed is not None:
        return Begun(sampler_iter, keep_seed, moment)
    base_seed = Dice().seed(loader.generator)
    if loader.num_workers > 0:
        sampler_iter = iter(sampler)  # torch's iterator with workers begins a second time
    return Begun(sampler_iter, base_seed, moment)


def _is_known(loader: DataLoader[object]) -> bool:
    sampler = index_sampler(loader)
    if type(sampler) is not BatchSampler:
        return is_sequence(sampler) or trusted(type(sampler))
    inner: object = sampler.sampler
    return trusted(BatchSampler) and (is_sequence(inner) or trusted(type(inner)))


def _check(loader: DataLoader[object], state: State, given: Facts | None) -> None:
    """Raise ConfigError unless `state` may be of this loader."""
    sampler = index_sampler(loader)
    if kind_of(sampler) != state["kind"]:
        raise ConfigError(f"saved order is of {state['kind']}, this loader has {kind_of(sampler)}")
    if given is None:
        return
    inner: object = sampler.sampler if type(sampler) is BatchSampler else sampler
    shadow = Shadow(loader.generator, getattr(inner, "generator", None))
    total = opened(inner, shadow, Memo(), given).total
    if total != state["total"]:
        raise ConfigError(f"saved order is of {state['total']} samples, this loader has {total}")
