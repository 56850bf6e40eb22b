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
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from creel.errors import ConfigError
from creel.loader.draws import Dice, Memo, Shadow, set_state, state_of, unpack
from creel.loader.foresee import Plan
from creel.loader.orders import (
    Begun,
    ForeignOrder,
    KnownOrder,
    Moment,
    Order,
    State,
    index_sampler,
    kind_of,
)
from creel.loader.recipes import is_sequence, opened, trusted
from creel.loader.sampler_state import load_own, own_states
from creel.loader.streams import Facts

__all__ = ["Begun", "Moment", "Order", "Plan", "State", "adopt", "before", "observe", "restore"]


def before(loader: DataLoader[object]) -> Moment:
    """What an epoch begins from; to be taken before torch's iterator is constructed."""
    own = [] if _is_known(loader) else own_states(index_sampler(loader))
    return Moment(state_of(torch.default_generator), own)


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


def resume(
    loader: DataLoader[object], state: State, *, over: bool, batches: int, previous: Order | None
) -> Order | None:
    """Before the next epoch begins: give the person's own samplers their state.

    Args:
        loader: a map-style loader, of which no epoch is under way.
        state: of `Order.state`, of the epoch that is to be begun again.
        over: that epoch was read to its end; what begins next is the one after it.
        batches: how many it had.
        previous: the order of this loader's last epoch.

    Returns:
        The order of the epoch that is over, at its end, where it can be made again.

    Raises:
        ConfigError: as `restore`.
    """
    _check(loader, state, None)
    load_own(index_sampler(loader), state.get("own", []))
    if not over:
        return None
    if not _is_known(loader):
        _put_back(loader, state)
        return None
    order = restore(loader, state, previous=previous)
    order.skip(batches)
    for _ in order:  # nothing is left but the draws of the epoch's end
        pass
    return order


def adopt(
    loader: DataLoader[object],
    begun: Begun,
    *,
    previous: Order | None = None,
    state: State | None = None,
    foresee: bool = False,
) -> Order:
    """`observe`, or `restore` where there is a `state`, where torch's own iterator has begun.

    `foresee`: a copy of a sampler of the person's own may be run ahead (`loader.foresee`).
    The order takes the place of `_sampler_iter`; `_base_seed` must become `order.base_seed`.

    Raises:
        ConfigError: as `restore`.
    """
    if not _is_known(loader):
        if state is not None:
            _check(loader, state, None)
            _put_back(loader, state)
            begun = begun._replace(base_seed=state["base_seed"])
        return ForeignOrder(loader, begun, previous, foresee=foresee)
    if state is None:
        return KnownOrder(loader, begun, previous)
    given = state.get("stream", {})
    _check(loader, state, given)
    redraw = zlib.crc32(begun.before.rng) == state["before"]
    if not redraw:
        set_state(torch.default_generator, begun.before.rng)
    _put_back(loader, state)
    begun = begun._replace(base_seed=state["base_seed"])
    return KnownOrder(loader, begun, previous, given, redraw=redraw)


def _begin(loader: DataLoader[object], keep_seed: int | None) -> Begun:
    """torch's `_BaseDataLoaderIter.__init__` and `_reset`, as far as they draw."""
    moment = before(loader)
    sampler = index_sampler(loader)
    sampler_iter = iter(sampler)
    if keep_seed is not None:
        return Begun(sampler_iter, keep_seed, moment)
    base_seed = Dice().seed(loader.generator)
    if loader.num_workers > 0:
        sampler_iter = iter(sampler)  # torch's iterator with workers begins a second time
    return Begun(sampler_iter, base_seed, moment)


def _put_back(loader: DataLoader[object], state: State) -> None:
    """A generator of the person's stands again where it stood."""
    if loader.generator is not None and "loader_rng" in state:
        set_state(loader.generator, unpack(state["loader_rng"]))


def _is_known(loader: DataLoader[object]) -> bool:
    """Whether the order is torch's own, and no code of the person's runs when it is re-created."""
    sampler = index_sampler(loader)
    if type(sampler) is not BatchSampler:
        return _is_torchs(sampler)
    return trusted(BatchSampler) and _is_torchs(sampler.sampler)


def _is_torchs(sampler: object) -> bool:
    if type(sampler) is SubsetRandomSampler and not is_sequence(sampler.indices):
        return False
    return is_sequence(sampler) or trusted(type(sampler))


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
