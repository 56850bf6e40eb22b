"""SamplerCopy: a copy of a custom sampler that is run ahead, if the user permits that.

`foreseeable = True` in a sampler's class, or `loader.foresee`, promises that a deep copy of it
yields what it will yield, without side effects. The copy is made just before torch begins an epoch,
and then does what torch makes the sampler do. If it drew from a global generator of torch, numpy or
`random`, training would draw other numbers next. That is noticed by the generators' states: they
are put back this once, a warning says what to do, and the sampler is only followed from then on.
The copy runs in the thread that trains, as all user code does, so it is blamed for no draw of that.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from creel.loader.data.user_code.protected import attribute
from creel.loader.line.order.epoch_plan import EpochPlan, PredictedEpoch, run_to_end
from creel.loader.line.order.generators import RandomSource, set_state, state_of

_log = logging.getLogger("creel.loader")

#: Seconds that a copy may run for one epoch; an endless sampler is given up then.
COPY_S = 2.0


class SamplerCopy:
    """A deep copy of what torch iterates for a loader, and of the loader's generator."""

    def __init__(self, loader: DataLoader[object], sampler: object, kind: str) -> None:
        """`kind`: the sampler's name in messages."""
        self._kind, self._workers = kind, loader.num_workers > 0
        self._persistent = self._workers and loader.persistent_workers
        self._plans: list[EpochPlan] = []  # of the epoch that torch begins, and later ones
        self._epochs: list[object] = []  # the counts of the last of these epochs
        holders = sampler, attribute(sampler, "sampler")
        kept = [attribute(h, name) for h in holders for name in ("dataset", "data_source")]
        memo = {id(value): value for value in (loader.dataset, *kept)}  # they are not copied
        self._copied: Any = self._guarded(copy.deepcopy, (sampler, loader.generator), memo)

    @property
    def given_up(self) -> bool:
        return self._copied is None

    def give_up(self, why: str) -> None:
        self._copied = None
        _log.warning("creel runs no copy of %s ahead: %s", self._kind, why)

    def plan(self, epochs_ahead: int, *, kept: bool) -> EpochPlan | None:
        """Run up to the epoch that torch begins (0) or a later one; None if the copy is given up.

        `kept`: the base seed is the last epoch's, as where torch resets a persistent iterator.
        """
        while self._copied and len(self._plans) <= epochs_ahead:
            anew = not (self._persistent and (kept or self._plans))
            predicted = self._guarded(self._run, *self._copied, anew)
            if predicted is not None:
                self._plans.append(EpochPlan(partial(PredictedEpoch, *predicted)))
        return self._plans[epochs_ahead] if self._copied else None

    def _run(self, sampler: Any, generator: torch.Generator | None, anew: bool) -> PredictedEpoch:
        counting = [sampler, attribute(sampler, "sampler")]
        for epoch_sampler, epoch in zip(counting, self._epochs, strict=False):
            # Scripts call set_epoch between two epochs, where a sampler does not count by itself.
            if (
                isinstance(epoch, int)
                and epoch_sampler.epoch == epoch
                and attribute(epoch_sampler, "set_epoch")
            ):
                epoch_sampler.set_epoch(epoch + 1)
        self._epochs = [attribute(sampler, "epoch") for sampler in counting]
        items = iter(sampler)
        if anew and generator is not None:
            RandomSource().seed(generator)
        if anew and self._workers:
            items = iter(sampler)  # torch's iterator with workers calls iter() twice
        predicted = run_to_end(items, time.monotonic() + COPY_S)
        if predicted is None:
            raise TimeoutError(f"an epoch of it takes more than {COPY_S:g} s")
        return predicted

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call user code; give up if it raises or draws from a global generator."""
        shared, result, why = _global_generators(), None, ""
        before = [get() for get, _ in shared]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the sampler itself will warn
                result = work(*args)
        except Exception as e:  # noqa: BLE001  any error means that it cannot be predicted
            why = repr(e)
        finally:
            if pickle.dumps([get() for get, _ in shared]) != pickle.dumps(before):
                why = "it draws from a global generator; give it one of its own (torch.Generator())"
                for (_, put_back), state in zip(shared, before, strict=True):
                    put_back(state)
        if why:
            self.give_up(why)
        return None if why else result


def _global_generators() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return how to get and to set the state of each generator that all code shares."""
    of_torch = torch.default_generator, *torch.cuda.default_generators
    return [
        *((partial(state_of, g), partial(set_state, g)) for g in of_torch),
        (partial(np.random.get_state, legacy=False), np.random.set_state),
        (random.getstate, random.setstate),
    ]
