"""SamplerCopy: a copy of a custom sampler that is run ahead, if the user permits that.

`foreseeable = True` in a sampler's class, or `loader.foresee`, promises that a deep copy of the
sampler yields what the sampler will yield, without side effects. The copy is made just before torch
begins an epoch. It then does what torch makes the sampler do: `iter` as often, the base seed drawn
in between, one epoch after the other.

Modules, the dataset (never copied) and the global generators of torch, numpy and `random` exist
only once. A copy that drew from the latter would change what training draws next. So their states
are compared before and after. A copy that changed them is refused: they are put back this once, a
warning says what to do, and the sampler is only followed from then on.

The copy runs in the thread that trains, as all user code does, so it is the copy that changed them.
(Or another thread of the user's that draws meanwhile: such a program differs from run to run.)
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from creel.loader.order.epoch_plan import EpochPlan, PredictedEpoch, run_to_end
from creel.loader.order.generators import RandomSource, set_state, state_of
from creel.loader.order.sampler_state import attribute

_log = logging.getLogger("creel.loader")
_T = TypeVar("_T")

#: Seconds that a copy may run for one epoch; an endless sampler is given up then.
COPY_S = 2.0
_DRAWS = (
    "it draws from a global generator of torch, numpy or random; give it a generator of its own,"
    " such as torch.Generator()"
)


class SamplerCopy:
    """A deep copy of what torch iterates for a loader, and of the loader's generator."""

    def __init__(self, loader: DataLoader[object], sampler: Iterable[object], kind: str) -> None:
        """`kind`: the sampler's name in messages."""
        self._kind, self._workers = kind, loader.num_workers > 0
        self._epochs: list[object] = []  # the counts of the last epoch
        holders = sampler, attribute(sampler, "sampler")
        kept = [loader.dataset, *(attribute(h, k) for h in holders for k in _DATASETS)]
        memo = {id(one): one for one in kept}
        self._copied = self._guarded(lambda: copy.deepcopy((sampler, loader.generator), memo))

    def run(self, *, anew: bool) -> EpochPlan | None:
        """Run the next epoch (at first the one that torch begins); None if that is impossible.

        `anew`: torch makes an iterator for it, and does not reset a persistent one.
        """
        found = self._guarded(lambda: self._epoch(anew=anew)) if self._copied else None
        return None if found is None else EpochPlan(lambda: found)

    def _epoch(self, *, anew: bool) -> PredictedEpoch:
        assert self._copied is not None  # noqa: S101  see `run`
        sampler, generator = self._copied
        counting: list[Any] = [sampler, attribute(sampler, "sampler")]
        for one, epoch in zip(counting, self._epochs, strict=False):
            # Scripts call set_epoch between two epochs, where a sampler does not count by itself.
            if isinstance(epoch, int) and one.epoch == epoch and attribute(one, "set_epoch"):
                one.set_epoch(epoch + 1)
        self._epochs = [attribute(one, "epoch") for one in counting]
        items = iter(sampler)
        if anew and generator is not None:
            RandomSource().seed(generator)
        if anew and self._workers:
            items = iter(sampler)  # torch's iterator with workers calls iter() twice
        found = run_to_end(items, time.monotonic() + COPY_S)
        if found is None:
            raise TimeoutError(f"an epoch of it takes more than {COPY_S:g} s")
        return found

    def _guarded(self, work: Callable[[], _T]) -> _T | None:
        """Return what user code returns; None if it raises or draws from a global generator."""
        before, found, why = _global_states(), None, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the sampler itself will warn
                found = work()
        except Exception as e:  # noqa: BLE001  any error means that it cannot be predicted
            why = repr(e)
        finally:
            if pickle.dumps(before) != pickle.dumps(_global_states()):
                _put_back(*before)
                found, why = None, _DRAWS
        if why:
            _log.warning("creel does not run a copy of %s ahead: %s", self._kind, why)
        return found


_DATASETS = ("dataset", "data_source")  # attributes of torch's samplers


def _global_states() -> tuple[list[bytes], Any, Any]:
    generators = (torch.default_generator, *torch.cuda.default_generators)
    return [state_of(g) for g in generators], np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002


def _put_back(of_torch: list[bytes], of_numpy: Any, of_random: Any) -> None:
    for generator, state in zip(
        (torch.default_generator, *torch.cuda.default_generators), of_torch, strict=False
    ):
        set_state(generator, state)
    np.random.set_state(of_numpy)  # noqa: NPY002  the global one
    random.setstate(of_random)
