"""Predict a custom sampler by running a copy of it to its end, if the user asked for that.

The copy runs in the calling thread; the global generators of torch, numpy and `random` are restored
afterwards. Other side effects of its code remain, because a copy shares the dataset and module
state with the original. So only samplers that declare themselves `foreseeable`, or those under
`loader.foresee`, are run.
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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from creel.loader.order.generators import RandomSource, clone
from creel.loader.order.streams import indices_of

_log = logging.getLogger("creel.loader")

#: Most indices of an epoch that is drained (int32: 512 MiB).
LIMIT = 1 << 27

_REUSABLE: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)  # a shallow copy continues from the same position


class DrainedSampler(NamedTuple):
    """Result of a copy: `indices` (total,) int32; step i ends at `ends[i]`, (b,) int64."""

    indices: NDArray[np.int32]
    ends: NDArray[np.int64]


def drain(
    loader: DataLoader[object],
    sampler: Iterable[object],
    begun: Iterator[object] | None,
    *,
    next_epoch: bool,
    keep_seed: bool,
    advance: int,
    budget_s: float,
) -> DrainedSampler | None:
    """Run a copy of the sampler for one epoch; the dataset is never copied.

    Args:
        loader: the loader.
        sampler: the object that the loader iterates for indices or batches.
        begun: `iter(sampler)` of this epoch, if nothing was pulled from it yet; else None.
        next_epoch: run the epoch after that of `begun`, not that one.
        keep_seed: no base seed is drawn in between (persistent workers).
        advance: added to the copy's `epoch` in between, if it has one and did not change it itself.
        budget_s: time limit in seconds.

    Returns:
        None if the sampler cannot be copied, takes too long or yields anything but indices.
    """
    deadline = time.monotonic() + budget_s
    generator = loader.generator
    found = None
    with _undisturbed():
        try:
            memo: dict[int, object] = {id(kept): kept for kept in _datasets_of(loader, sampler)}
            if generator is not None:
                memo[id(generator)] = generator = clone(generator)
            copied = copy.deepcopy(sampler, memo)
            if begun is not None:
                found = gather(_same_start(sampler, begun, copied, memo), deadline)
            if next_epoch and (found is not None or begun is None):
                _advance(sampler, copied, advance)
                source = iter(copied)
                if not keep_seed:
                    RandomSource().seed(generator)
                    if loader.num_workers > 0:
                        source = iter(copied)  # torch's iterator with workers calls iter() twice
                found = gather(source, deadline)
        except Exception as e:  # noqa: BLE001  any error means that it cannot be predicted
            _log.info("a copy of %s cannot be run: %r", type(sampler).__name__, e)
            return None
    return found


def _same_start(
    sampler: object,
    begun: Iterator[object],
    copied: Iterable[object],
    memo: dict[int, object],
) -> Iterator[object]:
    """Return an iterator that will yield the items of `begun`.

    Raises:
        TypeError, AttributeError: `begun` cannot be copied.
    """
    if isinstance(begun, types.GeneratorType):
        # No code of a generator function has run yet, so a new one yields the same items.
        if type(sampler).__iter__.__code__ is not begun.gi_code:  # type: ignore[attr-defined]  # else AttributeError
            raise TypeError("a generator that __iter__ did not make cannot be copied")
        return iter(copied)
    if isinstance(begun, _REUSABLE):
        return copy.copy(begun)
    return copy.deepcopy(begun, memo)


def _advance(sampler: object, copied: object, by: int) -> None:
    """Call `set_epoch` on the copy, as training scripts do, unless it has changed its own epoch."""
    for old, new in (
        (sampler, copied),
        (vars_of(sampler).get("sampler"), vars_of(copied).get("sampler")),
    ):
        epoch = getattr(old, "epoch", None)
        move = getattr(new, "set_epoch", None)
        if isinstance(epoch, int) and callable(move) and getattr(new, "epoch", None) == epoch:
            move(epoch + by)


def gather(source: Iterator[object], deadline: float = math.inf) -> DrainedSampler | None:
    """Pull all items of `source`; None past the deadline or `LIMIT`.

    Raises:
        TypeError, ValueError: an item is neither an index nor a flat group of them.
    """
    indices: list[int] = []
    ends: list[int] = []
    for count, pulled in enumerate(source):
        if type(pulled) is int:
            indices.append(pulled)
        elif isinstance(pulled, (list, tuple)) or getattr(pulled, "ndim", 0) == 1:
            indices.extend(map(operator.index, pulled))  # type: ignore[call-overload]  # iterable
        else:
            indices.append(operator.index(pulled))  # type: ignore[arg-type]  # TypeError if it is not an index
        ends.append(len(indices))
        if count % 256 == 0 and (time.monotonic() > deadline or len(indices) > LIMIT):
            return None
    array = indices_of(np.array(indices, dtype=np.int64))
    return DrainedSampler(array, np.array(ends, dtype=np.int64))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the global generators at the end, and suppress warnings."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    of_numpy, of_random = np.random.get_state(), random.getstate()  # noqa: NPY002  the global one
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002  the global one
        random.setstate(of_random)


def vars_of(thing: object) -> dict[str, object]:
    return getattr(thing, "__dict__", {})


def _datasets_of(loader: DataLoader[object], sampler: object) -> list[object]:
    """Return the datasets, which are never copied."""
    kept: list[object] = [loader.dataset]
    for holder in (sampler, vars_of(sampler).get("sampler")):
        kept += [v for k, v in vars_of(holder).items() if k in {"dataset", "data_source"}]
    return kept
