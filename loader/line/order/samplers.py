"""Begin, save and restore an epoch's order.

`take_over` takes over an epoch that torch's iterator has begun, and returns its `EpochOrder`, an
iterator over what torch's index sampler yields: a `ReplayedOrder` for exactly torch's own samplers,
as long as this torch draws as `streams` does, and else a `CustomOrder`.

`resume` begins a saved epoch again. `resized`, `resharded` and `without_batches` convert a saved
state for a loader with another batch size, for another number of ranks, and to one with some of its
batches left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.errors import ConfigError
from creel.loader.data.user_code.protected import attribute, length
from creel.loader.line.options.loader_args import args_of
from creel.loader.line.order.custom.orders import (
    CustomOrder,
    PacedIterator,
    PacedOrder,
    inner_generator,
)
from creel.loader.line.order.custom.sampler_copy import SamplerCopy
from creel.loader.line.order.custom.sampler_state import load_sampler_states, sampler_states
from creel.loader.line.order.derived import in_whole
from creel.loader.line.order.epoch_order import (
    EpochOrder,
    IteratorStart,
    OrderState,
    StateBefore,
    batch_of,
    combinator_of,
    index_sampler,
    inner_of,
    kind_of,
)
from creel.loader.line.order.generators import (
    GeneratorCopies,
    RandomSource,
    decode_state,
    set_state,
    state_of,
)
from creel.loader.line.order.replay import is_sequence, open_stream, trusted
from creel.loader.line.order.replayed import ReplayedOrder
from creel.loader.line.order.streams import StreamState
from creel.policies.order.dealing import each_of
from creel.policies.order.remap import Exchange


def before(
    loader: DataLoader[object], previous: EpochOrder | None = None, *, foresee: bool = False
) -> StateBefore:
    """Return the state an epoch begins from; call it before torch's iterator is constructed.

    Args:
        loader: a map-style loader.
        previous: the order of its last epoch.
        foresee: a copy of a custom sampler may be run ahead (`loader.foresee`).
    """
    rng = state_of(torch.default_generator)
    if _is_known(loader):
        return StateBefore(rng, [])
    sampler, copied = index_sampler(loader), None
    asked = attribute(inner_of(sampler), "foreseeable")
    permitted = asked is True or (foresee and asked is not False)
    if permitted and args_of(loader).creel is not False:
        copied = None if previous is None else previous.copied
        if copied is None or not copied.given_up:
            copied = SamplerCopy(loader, sampler, kind_of(sampler))
    return StateBefore(rng, sampler_states(sampler), copied)


def resume(
    loader: DataLoader[object],
    state: OrderState,
    *,
    over: bool,
    batches: int,
    previous: EpochOrder | None,
) -> EpochOrder | None:
    """Restore the user's custom samplers before a resumed epoch begins.

    Args:
        loader: a map-style loader with no epoch in progress.
        state: `EpochOrder.state` of the saved epoch.
        over: the saved epoch was read to its end; the next one begins.
        batches: how many batches of it were read.
        previous: the order of this loader's last epoch.

    Returns:
        If `over`, the order of the saved epoch at its end, if it can be recomputed; else None.

    Raises:
        ConfigError: as `take_over`.
    """
    _check_kind(loader, state)
    load_sampler_states(index_sampler(loader), state.get("own", []))
    combinator = combinator_of(loader)
    if combinator is not None:
        combinator.resume(state)
    if not over:
        return None
    if not _is_known(loader):
        _put_back(loader, state)
        inner = inner_generator(loader, index_sampler(loader))
        if inner is not None and "inner_rng" in state:
            set_state(inner, decode_state(state["inner_rng"]))
        return None
    moment = before(loader)
    begun = IteratorStart(iter(()), RandomSource().seed(loader.generator), moment)  # as torch draws
    order = take_over(loader, begun, previous=previous, state=state)
    order.skip(batches)
    for _ in order:  # only the final draws of the epoch are left
        pass
    return order


def without_batches(
    loader: DataLoader[object], state: OrderState, batches: int, left_out: Iterable[int]
) -> OrderState:
    """Convert the state of a saved epoch to one without some of its batches.

    Args:
        state: `EpochOrder.state`.
        batches: how many batches were read; earlier numbers in `left_out` are ignored.
        left_out: the numbers of batches, as `batches` counts them.

    Raises:
        ConfigError: the numbers are invalid, the sampler is not one of torch's, or as `take_over`.
    """
    _check_kind(loader, state)
    given: list[object] = list(left_out)
    wanted = sorted({k for k in given if isinstance(k, int) and k >= 0})
    if len(wanted) < len(set(given)):
        raise ConfigError(f"batches to leave out are numbers from 0 on, not {given}")
    if "stream" not in state:
        raise ConfigError("batches can be left out only of an epoch of one of torch's samplers")
    stream = state["stream"].copy()
    inner, world = inner_of(index_sampler(loader)), stream.get("world", 0)
    if type(inner) is DistributedSampler and world not in {0, inner.num_replicas}:
        raise ConfigError(
            f"leave_out counts batches of the {world} ranks that saved the state, not of"
            f" {inner.num_replicas}: resume with {world} ranks, or leave out none"
        )
    _check_total(loader, state, stream)
    gone = np.array(stream.get("without", []), np.int64)
    if stream.get("each", state["batch"]) != state["batch"]:
        raise ConfigError(
            "an epoch that was resumed with another batch_size must be read to its end with it"
        )
    more = in_whole(np.array([k for k in wanted if k >= batches], np.int64), gone)
    if len(more):
        stream["without"], stream["each"] = sorted({*gone.tolist(), *more.tolist()}), state["batch"]
    anew = state.copy()
    anew["stream"], anew["total"] = stream, _total(loader, stream)
    return anew


def resharded(
    loader: DataLoader[object], state: OrderState, *, batches: int, over: bool
) -> tuple[OrderState, int, bool]:
    """Convert a state saved by a `DistributedSampler` of another number of ranks.

    The samples that the other ranks have not read are dealt to these ranks, in the same order.

    Args:
        state: `EpochOrder.state` of the saved epoch.
        batches: how many batches of it each rank has read.
        over: it was read to its end.

    Returns:
        state, batches and over for this number of ranks; unchanged if nothing needs conversion.

    Raises:
        ConfigError: the state is of another number of samples.
    """
    inner = inner_of(index_sampler(loader))
    stream = state.get("stream", {})
    world = stream.get("world", 0)
    if type(inner) is not DistributedSampler or world in {0, inner.num_replicas}:
        return state, batches, over
    if "without" in stream:
        raise ConfigError(
            "an epoch with batches left out must be resumed with the same number of ranks"
        )
    offset, n = stream.get("offset", 0), len(inner.dataset)  # type: ignore[arg-type]  # it has a length
    if state["total"] != each_of(n - offset, world, drop_last=inner.drop_last):
        raise ConfigError(f"the saved state is of other data than this loader's {n} samples")
    read = state["total"] if over else min(batches * state["batch"], state["total"])
    offset += read * world
    over = over or offset >= n
    stream = StreamState(epoch=stream["epoch"], world=inner.num_replicas)
    if not over:
        stream["offset"] = offset
    anew = state.copy()
    anew["stream"], anew["total"] = stream, _total(loader, stream)
    return anew, 0, over


def resized(
    loader: DataLoader[object], state: OrderState, *, batches: int, over: bool
) -> tuple[OrderState, int]:
    """Convert a position saved with another batch size: no sample is read twice or skipped.

    Args:
        state, batches, over: as for `resharded`.

    Returns:
        state and batches for this loader's size; unchanged if nothing needs conversion.

    Raises:
        ConfigError: the sampler is not one of torch's and the position is within a batch; or as
            `without_batches`.
    """
    sampler = index_sampler(loader)
    size = batch_of(sampler)
    was = state.get("batch", size)
    if over or not batches or was == size:
        return state, batches
    if "stream" in state:
        return without_batches(loader, state, 0, range(batches)), 0
    if batches * was % size:
        raise ConfigError(
            f"the saved position, {batches} batches of {was}, is not a whole number of batches of"
            f" {size}: a {kind_of(sampler)} can only be resumed between batches"
        )
    return state, batches * was // size


def take_over(
    loader: DataLoader[object],
    begun: IteratorStart,
    *,
    previous: EpochOrder | None = None,
    state: OrderState | None = None,
    exchange: Exchange | None = None,
) -> EpochOrder:
    """Take over an epoch that torch's iterator has begun; with a `state`, begin that one instead.

    The order replaces `_sampler_iter`; the caller must set `_base_seed` to `order.base_seed`, and
    `skip` the batches already read of a saved epoch.

    A user's generator is set to its saved state, so that later epochs are also those of an
    uninterrupted run. The global generator belongs to the user and is left as it was before the
    iterator began, unless it was in the same state before the saved epoch (a script that seeds and
    starts over); then the epoch's draws are repeated.

    Args:
        loader: a map-style loader.
        begun: what torch's iterator has drawn.
        previous: the order of this loader's last epoch.
        state: `EpochOrder.state` of the epoch to begin again, saved in any process.
        exchange: how the ranks of a DistributedSampler exchange samples within each step.

    Raises:
        ConfigError: the state is of another kind of sampler or number of samples; or an exchange is
            wanted, but this torch deals samples to ranks in a way unknown to creel.
    """
    if state is not None:
        _check_kind(loader, state)
        begun = begun._replace(base_seed=state["base_seed"])
    order = _taken_over(loader, begun, previous, state, exchange)
    order.extended = args_of(loader).extends
    combinator = combinator_of(loader)
    return order if combinator is None else combinator.around(order, state)


def _taken_over(
    loader: DataLoader[object],
    begun: IteratorStart,
    previous: EpochOrder | None,
    state: OrderState | None,
    exchange: Exchange | None,
) -> EpochOrder:
    """Return the order of the loader's sampler itself; see `take_over`."""
    if not _is_known(loader):
        if exchange is not None and not _raises(loader):
            raise ConfigError("remap: this torch deals samples to ranks in a way unknown to creel")
        if state is not None:
            _put_back(loader, state)
            if loader.generator is not None or "inner_rng" in state:  # copied before it is put back
                begun = begun._replace(before=begun.before._replace(copied=None))
        items = begun.sampler_iter
        if isinstance(items, PacedIterator):
            return PacedOrder(loader, begun, items)
        redraw = state is not None and zlib.crc32(begun.before.rng) == state["before"]
        return CustomOrder(loader, begun, previous, state, redraw=redraw)
    if state is None:
        return ReplayedOrder(loader, begun, previous, exchange=exchange)
    given = state.get("stream", {})
    _check_total(loader, state, given)
    redraw = zlib.crc32(begun.before.rng) == state["before"]
    if not redraw:
        set_state(torch.default_generator, begun.before.rng)
    _put_back(loader, state)
    order = ReplayedOrder(
        loader,
        begun,
        previous,
        given,
        redraw=redraw,
        exchange=exchange,
    )
    order.before = state["before"]  # an epoch that is saved once more is compared with it again
    return order


def _put_back(loader: DataLoader[object], state: OrderState) -> None:
    """Set the loader's generator, if it has one, to its saved state."""
    if loader.generator is not None and "loader_rng" in state:
        set_state(loader.generator, decode_state(state["loader_rng"]))


def _is_known(loader: DataLoader[object]) -> bool:
    """Whether the order is torch's own, and recomputing it runs no user code."""
    sampler = index_sampler(loader)
    if type(sampler) is not BatchSampler:
        return _is_torchs(sampler)
    return trusted(BatchSampler) and _is_torchs(sampler.sampler)


def _is_torchs(sampler: object) -> bool:
    if type(sampler) is SubsetRandomSampler and not is_sequence(sampler.indices):
        return False
    if type(sampler) is WeightedRandomSampler and sampler.weights.device.type != "cpu":
        return False  # it draws on the accelerator
    if type(sampler) is DistributedSampler and not _is_sound(sampler):
        return False  # torch itself raises for it
    return is_sequence(sampler) or trusted(type(sampler))


def _raises(loader: DataLoader[object]) -> bool:
    """Whether it is a DistributedSampler that torch itself will refuse to iterate."""
    inner = attribute(index_sampler(loader), "sampler")
    return type(inner) is DistributedSampler and not _is_sound(inner)


def _total(loader: DataLoader[object], given: StreamState) -> int:
    """Return the number of items of an epoch that begins with this state."""
    inner = inner_of(index_sampler(loader))
    shadow = GeneratorCopies(loader.generator, getattr(inner, "generator", None))
    return open_stream(inner, shadow, given).total


def _is_sound(sampler: DistributedSampler[object]) -> bool:
    """Whether the dataset's length still fits the sampler, as far as torch checks it."""
    n = length(sampler.dataset)  # torch calls it too, later
    if n is None:
        return False
    return n >= sampler.total_size if sampler.drop_last else 0 < n <= sampler.total_size


def _check_kind(loader: DataLoader[object], state: OrderState) -> None:
    """Raise ConfigError unless `state` is of this loader's kind of sampler, and its combinator."""
    kind = kind_of(index_sampler(loader))
    if kind != state["kind"]:
        raise ConfigError(f"the saved state is of a {state['kind']}, this loader has a {kind}")
    combinator = combinator_of(loader)
    if combinator is not None:
        combinator.check(state)
    elif more := sorted(state.keys() - OrderState.__annotations__.keys()):
        raise ConfigError(
            f"the saved state is of an epoch with another {more[0]} memory than this loader's, none"
        )


def _check_total(loader: DataLoader[object], state: OrderState, given: StreamState) -> None:
    """Raise ConfigError unless `state` has as many samples as this loader."""
    total = _total(loader, given)
    if total != state["total"]:
        raise ConfigError(
            f"the saved state is of {state['total']} samples, this loader has {total}"
        )
