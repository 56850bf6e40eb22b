"""Run a copy of a sampler of the person's own to its end, where the person asked for that.

The copy runs here and now, with the global generators of torch, numpy and `random` put back
afterwards. Whatever else its code touches stays touched: a copy shares the dataset and the state of
modules with the original. So this is done only to samplers that are declared to be foreseeable, or
under `loader.foresee`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import operator
import random
import time
import types
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from creel.loader.draws import Dice, clone

_log = logging.getLogger("creel.loader")

#: A longer epoch is not drained (int32: 512 MiB).
LIMIT = 1 << 27

_REUSABLE: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)  # shallow copies go on alike


class Drained(NamedTuple):
    """What a copy yielded: `indices` (total,) int32, step i reads up to `ends[i]` (b,) int64."""

    base_seed: int | None
    indices: NDArray[np.int32]
    ends: NDArray[np.int64]


@dataclass(frozen=True)
class Ahead:
    """Which epoch of a loader's sampler to run on a copy; the dataset is never copied.

    Attributes:
        loader: the loader.
        sampler: what it iterates for indices or batches.
        begun: what `iter(sampler)` gave, before anything was pulled; None: begin anew.
        next_epoch: the epoch after that of `begun`, not that one.
        keep_seed: no base seed is drawn in between (persistent workers).
        advance: what to add to the copy's epoch in between, where it has one and does not count.
    """

    loader: DataLoader[object]
    sampler: Iterable[object]
    begun: Iterator[object] | None
    next_epoch: bool
    keep_seed: bool
    advance: int


def drain(ahead: Ahead, budget_s: float) -> Drained | None:
    """Foresee an epoch; None when the sampler cannot be copied, ends too late or is no indices.

    Args:
        ahead: which epoch of which sampler.
        budget_s: seconds all this may take.
    """
    deadline = time.monotonic() + budget_s
    with _undisturbed():
        try:
            return _run_copy(ahead, deadline)
        except Exception as e:  # noqa: BLE001  whatever it raises, here it means: not foreseeable
            _log.info("a copy of %s cannot be run: %r", type(ahead.sampler).__name__, e)
            return None


def _run_copy(ahead: Ahead, deadline: float) -> Drained | None:
    sampler, generator = ahead.sampler, ahead.loader.generator
    memo: dict[int, object] = {id(kept): kept for kept in _kept(ahead.loader, sampler)}
    if generator is not None:
        memo[id(generator)] = generator = clone(generator)
    twin = copy.deepcopy(sampler, memo)
    base_seed = found = None
    if ahead.begun is not None:
        found = gather(_same_start(sampler, ahead.begun, twin, memo), deadline)
    if ahead.next_epoch and (found is not None or ahead.begun is None):
        _advance(sampler, twin, ahead.advance)
        source = iter(twin)
        if not ahead.keep_seed:
            base_seed = Dice().seed(generator)
            if ahead.loader.num_workers > 0:
                source = iter(twin)  # torch's iterator with workers begins a second time
        found = gather(source, deadline)
    return found and found._replace(base_seed=base_seed)


def _same_start(
    sampler: object, begun: Iterator[object], twin: Iterable[object], memo: dict[int, object]
) -> Iterator[object]:
    """An iterator that will yield what `begun` will."""
    if isinstance(begun, types.GeneratorType):
        # Nothing of a generator function has run yet, so its copy begins alike.
        if type(sampler).__iter__.__code__ is not begun.gi_code:  # type: ignore[attr-defined]  # else AttributeError
            raise TypeError("a generator made by something else than __iter__ cannot be copied")
        return iter(twin)
    if isinstance(begun, _REUSABLE):
        return copy.copy(begun)
    return copy.deepcopy(begun, memo)


def _advance(sampler: object, twin: object, by: int) -> None:
    """Set the twin's next epoch as training scripts do, unless it has moved by itself."""
    for old, new in (
        (sampler, twin),
        (vars_of(sampler).get("sampler"), vars_of(twin).get("sampler")),
    ):
        epoch = getattr(old, "epoch", None)
        move = getattr(new, "set_epoch", None)
        if isinstance(epoch, int) and callable(move) and getattr(new, "epoch", None) == epoch:
            move(epoch + by)


def gather(source: Iterator[object], deadline: float = math.inf) -> Drained | None:
    """Pull everything; None when time or room runs out.

    Raises:
        TypeError, ValueError: something pulled is neither an index nor a flat group of them.
    """
    indices: list[int] = []
    ends: list[int] = []
    for count, pulled in enumerate(source):
        if type(pulled) is int:
            indices.append(pulled)
        elif isinstance(pulled, (list, tuple)) or getattr(pulled, "ndim", 0) == 1:
            indices.extend(map(operator.index, pulled))  # type: ignore[call-overload]  # iterable
        else:
            indices.append(operator.index(pulled))  # type: ignore[arg-type]  # TypeError if it is none
        ends.append(len(indices))
        if count % 256 == 0 and (time.monotonic() > deadline or len(indices) > LIMIT):
            return None
    array = np.array(indices, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError("an index is negative or above 2**31 - 1")
    return Drained(None, array.astype(np.int32), np.array(ends, dtype=np.int64))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put the global generators back at the end, and keep warnings to ourselves."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    of_numpy, of_random = np.random.get_state(), random.getstate()  # noqa: NPY002  (the global one)
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002  (the global one)
        random.setstate(of_random)


def vars_of(thing: object) -> dict[str, object]:
    """The instance attributes of `thing`, where it has any."""
    return getattr(thing, "__dict__", {})


def _kept(loader: DataLoader[object], sampler: object) -> list[object]:
    """The datasets: they are never copied."""
    kept: list[object] = [loader.dataset]
    for holder in (sampler, vars_of(sampler).get("sampler")):
        kept += [v for k, v in vars_of(holder).items() if k in {"dataset", "data_source"}]
    return kept
